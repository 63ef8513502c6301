"""Every pipeline schedule gives the numbers of one process; what would not is refused by name."""

import functools
import sys

import attrs
import every_pair
import numpy as np
import pytest
import torch
import torch.distributed as dist
import whole_step
from torch import nn
from whole_step import Layout, build, difference, joined, model_config, run_steps

import trainkit as tk
import trainkit.collectives
import trainkit.grads
from trainkit.losses import declare_terms, next_token_linear
from trainkit.models import Decoder, call_with_noise, init_weights
from trainkit.parallel import fsdp, mixed_precision, pipeline, tied_embeddings
from trainkit.parallel.split import SCHEDULES
from trainkit.parallel.stage_forward import stage_boundary
from trainkit.tools.testing import run_ranks

V = {"zero_bubble_v", "dual_pipe_v"}
SPLITS = {name for name, kind in SCHEDULES.items() if kind.splits_backward}


def runs_v():
    from trainkit.parallel.check_layout import passes_to_itself

    return passes_to_itself()


def needs_v(schedule):
    if schedule in V and not runs_v():
        pytest.skip("this torch cannot run V schedules under gloo")


two = functools.partial(Layout, 2, pp=2, layers=4)
four = functools.partial(Layout, 4, pp=2, layers=4)

TWO = {name: two(schedule=name) for name in SCHEDULES}
TWO |= {f"{name}, tied": two(schedule=name, tied=True, dropout=0.3) for name in SCHEDULES}
TWO |= {
    "1f1b, recomputed": two(recompute="full"),
    "interleaved_zero_bubble, recomputed": two(
        schedule="interleaved_zero_bubble", recompute="full"
    ),
    "interleaved_zero_bubble, compiled": two(
        schedule="interleaved_zero_bubble", compiled=True, rows=2
    ),
    "1f1b, two microbatches": two(rows_per_microbatch=2),
    "gpipe, one microbatch": two(schedule="gpipe", rows_per_microbatch=4),
    "1f1b, eight microbatches": two(rows=8),
}
FOUR = {
    name: Layout(4, pp=4, schedule=name, layers=4 if name == "1f1b" else 8, rows=8, tied=True)
    for name in ("1f1b", "looped_bfs", "interleaved_zero_bubble", *sorted(V))
}
FOUR |= {
    "1f1b x 2 sharded": four(rows=8),
    "1f1b x 2 sharded, each": four(rows=8, reduce="each"),
    "1f1b x 2 sharded, recomputed": four(recompute="full"),
    "1f1b x 2 replicated": four(dp_replicate=2),
    "1f1b x 2 replicated, each": four(dp_replicate=2, reduce="each", tied=True),
    "interleaved_1f1b x 2 sharded, each": four(schedule="interleaved_1f1b", reduce="each"),
    "looped_bfs x 2 replicated": four(schedule="looped_bfs", dp_replicate=2),
    "gpipe x 2 sharded, tied": four(schedule="gpipe", tied=True, dropout=0.3),
    "interleaved_zero_bubble x 2 sharded": four(
        schedule="interleaved_zero_bubble", reshard=False, tied=True
    ),
    "1f1b x 2 tensor": four(tp=2, vocab_size=32),
    "interleaved_zero_bubble x 2 tensor, tied": four(
        schedule="interleaved_zero_bubble", tp=2, vocab_size=32, tied=True
    ),
    "1f1b x 2 ulysses": four(ulysses=2, fold_sp="none"),
    "looped_bfs x 2 ring, tied": four(
        schedule="looped_bfs", ring=2, multiple_of=4, fold_sp="none", tied=True
    ),
    "zero_bubble_v x 2 sharded": four(schedule="zero_bubble_v", reshard=False, tied=True),
    "dual_pipe_v x 2 replicated": four(
        schedule="dual_pipe_v", reshard=False, dp_replicate=2, rows=8
    ),
}


def all_of(layouts):
    return [run_steps(layout) for layout in layouts]


ALWAYS = ("1f1b",)  # the one of four stages


def results(layouts, world):
    """Run all layouts of a number of ranks, in one start of the ranks."""
    layouts = {name: x for name, x in layouts.items() if x.schedule not in V or runs_v()}
    found = run_ranks(all_of, world, list(layouts.values()), timeout=120.0)
    return dict(zip(layouts, map(joined, zip(*found, strict=True)), strict=True))


@pytest.fixture(scope="module")
def of_two():
    return results(every_pair.running(TWO, beside=FOUR), 2)


@pytest.fixture(scope="module")
def of_four():
    return results(every_pair.running(FOUR, beside=TWO, always=ALWAYS), 4)


reference = functools.cache(run_steps)


def alone(layout):
    solo = Layout(
        layers=layout.layers,
        rows=layout.rows,
        tied=layout.tied,
        dropout=layout.dropout,
        vocab_size=layout.vocab_size,
        multiple_of=layout.multiple_of,
    )
    return reference(solo)


@pytest.mark.parametrize("name", every_pair.named(TWO, beside=FOUR))
def test_two_stages_give_the_numbers_of_one_process(name, of_two):
    needs_v(TWO[name].schedule)
    found, wanted = of_two[name], alone(TWO[name])
    assert difference(found, wanted) < 1e-12
    assert (found["hashes"], found["tokens"]) == (wanted["hashes"], wanted["tokens"])


@pytest.mark.parametrize("name", every_pair.named(FOUR, beside=TWO, always=ALWAYS))
def test_four_ranks_give_the_numbers_of_one_process(name, of_four):
    needs_v(FOUR[name].schedule)
    assert difference(of_four[name], alone(FOUR[name])) < 1e-12


def test_dropout_and_ties_change_the_numbers():
    assert difference(alone(two(dropout=0.3)), alone(two())) > 1e-3
    assert (
        difference({**alone(two(tied=True)), "parameters": {}}, {**alone(two()), "parameters": {}})
        > 1e-3
    )


# ---------------------------------------------------------------- one step, looked at closely


def batch_of(length, seed, rows=1):
    """Return one microbatch with two documents in a row, as a plain dict."""
    from trainkit.batch.shards import spans_of_runs

    torch.manual_seed(seed)
    cut = 1 + seed % (length - 1)
    ids = torch.randint(0, 31, (rows, length))
    documents = (torch.arange(length) >= cut).long().expand(rows, length)
    places = torch.arange(length).expand(rows, length) - cut * documents
    return {
        "input_ids": ids,
        "labels": tk.shift_labels(ids, documents),
        "position_ids": places.contiguous(),
        "spans": spans_of_runs(documents.numpy()),
        "noise_key": torch.randint(0, 2**60, (rows, length)),
    }


def microbatches(length, count):
    return [batch_of(length, seed) for seed in range(count)]


def gradients(stages):
    named = tk.get_named_parameters(stages)
    return {name: p.grad.numpy().copy() for name, p in named.items() if p.grad is not None}


def of_lengths(layout, lengths, counts):
    """Add the gradients of some steps, the text of each of another length; count the calls."""
    with tk.parallel_session(pp=layout.pp) as ps:
        stages, _ = build(layout, ps)
        calls = []

        def counting(model, batch):
            calls.append("stage")
            return call_with_noise(model, batch)

        @declare_terms("loss")
        def loss(output, batch):
            calls.append("loss")
            return next_token_linear(output, batch)

        run = tk.make_forward_backward(stages, loss, call=counting)
        call_counts, sums = [], []
        for length, count in zip(lengths, counts, strict=True):
            calls.clear()
            step = run(microbatches(length, count), denominator=torch.tensor(7))
            sums.append((step["loss"].item(), str(step["loss"].dtype)))
            call_counts.append((calls.count("stage"), calls.count("loss")))
        norm = tk.grad_norm(tk.get_parameters(stages), axis=ps.pp)
        return sums, call_counts, gradients(stages), float(norm)


def buffers_that_may_be_reused(schedules):
    """Return what torch's compiler may do with buffers while each schedule runs, and after it.

    Return also how stages came to know what they receive, for each schedule.
    """
    from torch._functorch import config

    from trainkit.parallel import torch_pipeline

    found, made, make_stage = [], [], torch_pipeline.Stage

    def noting(*args, **kwargs):
        made.append(make_stage(*args, **kwargs))
        return made[-1]

    torch_pipeline.Stage = noting
    with tk.parallel_session(pp=2) as ps:
        for schedule in schedules:
            stages, _ = build(two(schedule=schedule), ps)
            seen = set()

            def looking(model, batch, seen=seen):
                seen.add(config.donated_buffer)
                return call_with_noise(model, batch)

            run = tk.make_forward_backward(stages, next_token_linear, call=looking)
            run(microbatches(8, 4), denominator=torch.tensor(7))
            found.append((seen, config.donated_buffer))
    modes = [stage._inference_mode.name for stage in made if hasattr(stage, "_inference_mode")]
    return found, modes


@pytest.fixture(scope="module")
def looked_at():
    return run_ranks(buffers_that_may_be_reused, 2, ["1f1b", "interleaved_zero_bubble"])


def test_compiled_backward_passes_keep_their_buffers_where_they_run_twice(looked_at):
    from torch._functorch import config

    usual = config.donated_buffer
    for found, _ in looked_at:
        assert found == [({usual}, usual), ({False}, usual)]
    assert usual


def test_stages_are_told_what_they_receive_and_run_nothing_to_find_out(looked_at):
    for _, modes in looked_at:
        assert modes == ["STATIC"] * 3 or torch.__version__ < (2, 13)


LENGTHS, COUNTS = (8, 5, 12, 8), (4, 2, 6, 4)


def of_schedules(schedules):
    return [of_lengths(two(schedule=name, tied=True), LENGTHS, COUNTS) for name in schedules]


def test_steps_may_differ_in_length_and_number_and_nothing_is_computed_twice():
    schedules = ["1f1b", "interleaved_zero_bubble", *(["zero_bubble_v"] if runs_v() else [])]
    wanted, _, whole, norm = of_lengths(Layout(layers=4, tied=True), LENGTHS, COUNTS)
    for schedule, found in zip(
        schedules, zip(*run_ranks(of_schedules, 2, schedules), strict=True), strict=True
    ):
        for rank, (sums, call_counts, grads, own_norm) in enumerate(found):
            assert sums == [(pytest.approx(a, rel=1e-13), b) for a, b in wanted]
            assert own_norm == pytest.approx(norm, rel=1e-13)
            stages = 1 if schedule == "1f1b" else 2
            last = 0 if schedule in V else 1
            assert call_counts == [(stages * n, n if rank == last else 0) for n in COUNTS]
            for name, grad in grads.items():
                b = whole[name.removesuffix(" (copy)")]
                assert np.abs(grad - b).max() <= 1e-12 * np.abs(b).max(), (schedule, name)


def failing(*_):
    raise RuntimeError


def with_a_wrong_split(layouts):
    from torch.distributed.pipelining import _backward

    from trainkit.parallel import torch_pipeline

    _backward.stage_backward_weight = failing
    assert not torch_pipeline.splits_rightly()
    return all_of(layouts)


def test_where_torch_splits_the_backward_pass_wrongly_it_is_not_split():
    layouts = [two(schedule=x, tied=True) for x in sorted(SPLITS) if x not in V or runs_v()]
    found = zip(*run_ranks(with_a_wrong_split, 2, layouts), strict=True)
    assert all(difference(joined(parts), alone(layouts[0])) < 1e-12 for parts in found)


def test_the_split_backward_pass_of_new_torch_is_right():
    from trainkit.parallel.torch_pipeline import splits_rightly

    assert splits_rightly() or torch.__version__ < (2, 13)


def test_no_name_of_torch_decides_whether_v_schedules_are_tested(monkeypatch):
    from torch.distributed.pipelining import PipelineStage

    assert runs_v() == (torch.__version__ >= (2, 12))
    monkeypatch.delattr(PipelineStage, "_warmup_forward_vote", raising=False)  # gone in 2.15
    assert runs_v() == (torch.__version__ >= (2, 12))


# ---------------------------------------------------------------- refusals


def refusal(function, *args, **options):
    try:
        function(*args, **options)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def bound(stages, loss=next_token_linear, **options):
    return tk.make_forward_backward(stages, loss, call=call_with_noise, **options)


def by(stages, schedule, modules=None):
    """Return stages that were built for another schedule, or are in another order."""
    layout = attrs.evolve(stages.layout, schedule=schedule)
    return attrs.evolve(stages, layout=layout, modules=modules or stages.modules)


@declare_terms("loss", "other")
def forgetful(output, batch):
    return next_token_linear(output, batch)


def two_rank_refusals():
    fitting = sys.modules["trainkit.parallel.check_layout"]

    one = torch.tensor(1)
    with tk.parallel_session(pp=2) as ps:
        stages, _ = build(two(), ps)
        looped, _ = build(two(schedule="interleaved_1f1b"), ps)
        run = bound(stages)
        messages = {
            "none": refusal(run, [], denominator=one),
            "shapes": refusal(run, [batch_of(8, 0), batch_of(9, 1)], denominator=one),
            "few": refusal(run, microbatches(8, 1), denominator=one),
            "rounds": refusal(bound(looped), microbatches(8, 5), denominator=one),
            "placement": refusal(bound, by(looped, "zero_bubble_v")),
            "per rank": refusal(bound, by(stages, "dual_pipe_v")),
            "reversed": refusal(bound, by(looped, "looped_bfs", looped[::-1])),
            "boundary": refusal(stage_boundary, nn.Linear(1, 1), {}),
            "deep": refusal(build, two(layers=1), ps),
            "terms": refusal(bound(stages, loss=forgetful), microbatches(8, 2), denominator=one),
        }
        twice = "interleaved_zero_bubble"
        selective, _ = build(two(schedule=twice, recompute="selective"), ps)
        messages["selective"] = refusal(bound, selective)
        fitting.passes_to_itself = lambda: False
        messages["V"] = refusal(build, two(schedule="zero_bubble_v"), ps)
        return messages


def test_what_a_pipeline_cannot_run_is_refused_before_it_communicates():
    for messages in run_ranks(two_rank_refusals, 2):
        assert "must be a sequence of batches, got no batch" in messages["none"]
        assert "shape (1, 9, 16), microbatch 0 of (1, 8, 16)" in messages["shapes"]
        assert "1 microbatches in a step, the schedule 1f1b needs at least 2" in messages["few"]
        assert "5 microbatches" in messages["rounds"]
        assert "a multiple of 2" in messages["rounds"]
        assert "declares the terms ['loss', 'other'], but returns ['loss']" in messages["terms"]
        assert "has them on (0, 1, 1, 0)" in messages["placement"]
        assert "dual_pipe_v has 2 stage(s) on each rank, got 1" in messages["per rank"]
        assert "are not the stages of rank" in messages["reversed"]
        assert "Linear has no method boundary(batch)" in messages["boundary"]
        assert "1 layers are too few for 2 stages" in messages["deep"]
        assert "which selective recomputation does not allow" in messages["selective"]
        assert "no connection from a rank to itself; take schedule = " in messages["V"]


def four_rank_refusals():
    messages = {}
    with tk.parallel_session(pp=2) as ps:
        for name in ["interleaved_zero_bubble", *(V if runs_v() else ())]:
            stages, _ = build(four(schedule=name), ps)
            messages[name] = refusal(bound, stages)
        stages, _ = build(four(schedule="interleaved_zero_bubble", reshard=False), ps)
        messages["each"] = refusal(bound, stages, reduce="each")
        stages, _ = build(four(), ps)
        for module in stages[0].modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(2.0)
        messages["averages"] = refusal(bound, stages)
        return messages, bf16_loss(ps), norm_of_two_lengths(ps)


def norm_of_two_lengths(ps):
    """Return the norm of what two steps of different lengths add, the same on both data ranks."""
    stages, _ = build(four(), ps)
    run = bound(stages)
    for length in (8, 5):
        run(microbatches(length, 2), denominator=torch.tensor(7))
    return float(tk.grad_norm(tk.get_parameters(stages), axis=ps.pp))


def bf16_loss(ps):
    """Return the loss of two microbatches whose hidden states cross in bf16."""
    config = model_config(four())
    stages = tk.build_stages(
        lambda: Decoder(config, head="hidden"),
        ps,
        [mixed_precision(torch.bfloat16), fsdp()],
        weights=init_weights(config, seed=0),
    )
    seen = []

    def looking(model, batch):
        seen.append(batch["input_ids"].dtype)
        return call_with_noise(model, batch)

    run = tk.make_forward_backward(stages, next_token_linear, call=looking)
    sums = run(microbatches(8, 2), denominator=torch.tensor(1))
    assert seen == [torch.bfloat16 if ps.pp.index else torch.int64] * 2
    return float(sums["loss"])


def test_fsdp_in_stages_is_refused_where_gradients_would_be_wrong_and_right_elsewhere():
    (first, _), _, _, norm = of_lengths(Layout(layers=4), [8, 5], [2, 2])
    for messages, bf16, found in run_ranks(four_rank_refusals, 4):
        assert bf16 == pytest.approx(first[0], rel=1e-2)
        assert found == pytest.approx(2 * norm, rel=1e-12)  # torch would clear the first step's
        assert "can only be reduced once a step" in messages.pop("each")
        assert "averages gradients" in messages.pop("averages")
        for name, message in messages.items():
            assert f"schedule = {name!r} splits the backward pass" in message
            assert "on these 2 ranks; set reshard_after_forward to False" in message


def stage_that_passes_on_something_else():
    with tk.parallel_session(pp=2) as ps:
        stages, _ = build(two(), ps)

        def halved(model, batch):
            output = call_with_noise(model, batch)
            return output.float() if ps.pp.index == 0 else output

        run = tk.make_forward_backward(stages, next_token_linear, call=halved)
        run(microbatches(8, 2), denominator=torch.tensor(1))


def test_a_stage_that_breaks_its_boundary_is_told_so():
    with pytest.raises(RuntimeError, match="its boundary\\(batch\\) is"):
        run_ranks(stage_that_passes_on_something_else, 2, timeout=20.0)


# ---------------------------------------------------------------- evaluation and generation


CONTEXT = 7


def written(stages):
    """Return a text that the model goes on with, and the logits of one window."""
    from trainkit.post.generation import generate

    (found,) = generate(stages, [[3, 1, 4]], max_new_tokens=6, context=CONTEXT, slide=True)
    ids = found.ids
    return ids, [module.training for stage in stages for module in stage.modules()]


def evaluated(layout, counts, dp_replicate=1):
    """Evaluate batches sharded over data ranks, then train, generate, and evaluate again."""
    with tk.parallel_session(pp=layout.pp, dp_replicate=dp_replicate, tp=layout.tp) as ps:
        stages, optimizer = build(layout, ps)
        start = sum(counts[: ps.dp.index])
        own = [batch_of(8, seed) for seed in range(sum(counts))][start:][: counts[ps.dp.index]]
        loss = next_token_linear
        before = tk.evaluate(stages, own, loss)
        untouched = all(p.grad is None for p in tk.get_parameters(stages))
        run = bound(stages, loss)
        run(microbatches(8, 4), denominator=torch.tensor(20 * ps.dp.count))
        norm = tk.clip_and_step(stages, optimizer, lr=0.01, max_norm=1.0).norm
        ids, modes = written(stages)
        after = tk.evaluate(stages, own, loss)
        assert untouched
        assert all(modes)
        figures = [before["loss"], norm, after["loss"]]
        return [float(x) for x in figures], int(before["tokens"]), ids


EVALUATED = {"1f1b": two(tied=True), "zero_bubble_v": two(tied=True, schedule="zero_bubble_v")}


def evaluated_all(layouts, counts):
    return [evaluated(layout, counts) for layout in layouts]


def test_evaluation_and_generation_go_through_the_stages():
    wanted, tokens, ids = evaluated(Layout(layers=4, tied=True), (5,))
    layouts = [x for x in EVALUATED.values() if x.schedule not in V or runs_v()]
    for found in run_ranks(evaluated_all, 2, layouts, (5,)):
        for figures, count, text in found:
            assert figures == pytest.approx(wanted, rel=1e-12)
            assert (count, text) == (tokens, ids)


def test_data_ranks_of_a_pipeline_may_have_different_numbers_of_batches():
    wanted, tokens, ids = evaluated(Layout(layers=4), (5,))
    for found in run_ranks(evaluated_all, 4, [four()], (5, 0)):
        for figures, count, text in found:
            assert figures == pytest.approx(wanted, rel=1e-12)
            assert (count, text) == (tokens, ids)


# ---------------------------------------------------------------- checkpoints


def resumed(layouts, **how):
    return [run_steps(layout, **how) for layout in layouts]


V_OR_NOT = two(tied=True, schedule="dual_pipe_v" if runs_v() else "gpipe")
DEEP_ONES = [Layout(4, pp=4, layers=4, tied=True), four(tied=True)]


@pytest.mark.parametrize(
    "layouts", [[V_OR_NOT], pytest.param(DEEP_ONES, marks=every_pair.ONLY_ALL)]
)
def test_a_run_goes_on_with_other_stages_bit_for_bit(layouts, tmp_path):
    start = two(tied=True, rows=4)
    saved = joined(run_ranks(functools.partial(run_steps, steps=1, save_to=tmp_path), 2, start))
    alone_again = run_steps(Layout(layers=4, tied=True), steps=1, resume_from=tmp_path)
    assert alone_again["state_hash"] == saved["state_hash"]
    went_on = run_steps(
        Layout(layers=4, tied=True), steps=2, resume_from=tmp_path, save_to=tmp_path
    )
    load = functools.partial(resumed, steps=2, resume_from=tmp_path)
    found = run_ranks(load, layouts[0].world, layouts)
    for again in map(joined, zip(*found, strict=True)):
        assert again["state_hash"] == went_on["state_hash"]
        for name, value in went_on["parameters"].items():
            assert np.array_equal(again["parameters"][name], value)


def half_frozen(config, **options):
    model = Decoder(config, **options)
    for module in (model.embedding, *list(model.layers.values())[: config.layers // 2]):
        module.requires_grad_(False)
    return model


def frozen_steps(layout, **options):
    """Fine-tune the upper half of the blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_step, "Decoder", half_frozen)
        return run_steps(layout, **options)


def frozen_and_resumed(layout, folder):
    frozen_steps(layout, steps=1, save_to=folder)
    return frozen_steps(layout, steps=2, resume_from=folder, save_to=folder)


def test_a_stage_that_is_frozen_as_a_whole_saves_and_goes_on(tmp_path):
    layout = two(dtype=torch.float32)  # a rank with nothing to train has the norm in fp32
    found = joined(run_ranks(frozen_and_resumed, 2, layout, tmp_path))
    solo = Layout(layers=4, dtype=torch.float32)
    loaded = frozen_steps(solo, steps=2, resume_from=tmp_path)
    assert loaded["state_hash"] == found["state_hash"]
    whole = frozen_steps(solo, steps=2)
    last = {key: whole[key][1:] for key in ("losses", "norms")}
    assert difference(found, whole | last) < 1e-5


# ---------------------------------------------------------------- planted mistakes


def nothing(*_):
    return None


def last_alone(terms):
    return dict(terms[max(terms)]) if terms else {}


def largest(norms, groups, norm_type):
    """Return the largest norm of the ranks, in place of that of all they have."""
    del norm_type
    for group in groups:
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=group)
    return norms


MISTAKES = {
    "last microbatch only": (pipeline, "_sum_terms", last_alone),
    "norm as maximum": (tk.grads, "_reduce_norms", largest),
    "tied copy counted twice": (tk.grads, "is_tied_copy", nothing),
    "tied gradient not summed": (tied_embeddings, "_exchange_tied", nothing),
}


def with_mistakes():
    found = {}
    for name, (where, what, planted) in {
        "none": (pipeline, "_sum_terms", None),
        **MISTAKES,
    }.items():
        right = getattr(where, what)
        setattr(where, what, planted or right)
        result = run_steps(two(tied=True), steps=2)
        setattr(where, what, right)
        found[name] = result["losses"], result["norms"]
    return found


def test_planted_mistakes_are_seen():
    wanted = alone(two(tied=True))
    whole = np.array([wanted["losses"][:2], wanted["norms"][:2]])
    found = run_ranks(with_mistakes, 2)[0]
    errors = {name: np.abs(np.array(x) / whole - 1).max() for name, x in found.items()}
    assert errors.pop("none") < 1e-12
    assert all(error > 1e-5 for error in errors.values()), errors
