"""Scores of tokens: equal in every layout, and equal to those of the model's logits."""

import functools
import json

import attrs
import numpy as np
import pytest
import torch
from whole_step import CONFIG

import trainkit as tk
from trainkit import evaluation
from trainkit.batch import batch_from_rows
from trainkit.models import Decoder, Experts, call_model, call_routed, init_weights
from trainkit.parallel import expert_parallel, fsdp
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.post.evaluation.examples import EvalItem, Example, make_example, make_rolling_windows
from trainkit.post.evaluation.score import ExampleScores, token_scores
from trainkit.tools.testing import run_ranks
from trainkit.types import Hidden, Layout, NumericsError

SMALL = attrs.evolve(CONFIG, vocab_size=32)
MIXED = attrs.evolve(SMALL, experts=Experts(count=4, top_k=2, width=8))
CONTEXT = 20
LAYOUTS = [
    pytest.param(2, [Layout(pp=2), Layout(tp=2), Layout(), Layout(dp_shard=2, ep=2)], id="2"),
    pytest.param(4, [Layout(pp=2, tp=2), Layout(ring=2, ulysses=2)], id="4"),
    pytest.param(4, [Layout(tp=2, ring=2)], id="4, others", marks=pytest.mark.only_all),
]


def make_items():
    """Return pairs of many lengths, a text of three windows, and each word after three contexts."""
    random = np.random.default_rng(0)
    pairs = [random.integers(0, 32, size=size) for size in random.integers(2, 30, size=13)]
    cuts = [int(random.integers(1, min(len(ids), CONTEXT))) for ids in pairs]
    examples = [
        make_example(ids[:-n], ids[-n:], context=CONTEXT)
        for ids, n in zip(pairs, cuts, strict=True)
    ]
    text = make_rolling_windows(random.integers(0, 32, size=47), prefix=1, context=CONTEXT)
    words = [
        make_example(ids, [word], context=4) for ids in ([2], [9], [3, 1]) for word in range(32)
    ]
    return [
        *(EvalItem([example], {"tokens": example.scored}) for example in examples + words),
        EvalItem(text),
    ]


def stages_in(ps, *, head, config, dtype=torch.float64):
    plan = [
        tensor_parallel(),
        sequence_parallel(),
        *([expert_parallel()] if config.experts else []),
        fsdp(),
    ]
    make = lambda: Decoder(config, head=head).to(dtype)  # noqa: E731
    return tk.build_stages(make, ps, plan, weights=init_weights(config, seed=0))


def scored(layout, path, *, head="hidden", dtype=torch.float64):
    """Write the lines of all items in a layout, in batches of about two rows."""
    config = MIXED if layout.ep > 1 else SMALL
    config = attrs.evolve(config, tied=head == "logits")
    with tk.parallel_session(layout) as ps:
        stages = stages_in(ps, head=head, config=config, dtype=dtype)
        call = call_routed if config.experts else call_model
        score, items = evaluation.make_scorer(stages, tokens_per_batch=48, call=call), make_items()

        def lines_from(start):
            return evaluation.score_in_groups(
                score, items, evaluation.make_text_record, group=40, start=start
            )

        evaluation.write_results(path, lines_from, facts={"model": "a"}, axis=ps.world)
        assert all(module.training for stage in stages for module in stage.modules())


def all_of(layouts, folder):
    for i, layout in enumerate(layouts):
        scored(layout, f"{folder}/{i}", head=("hidden", "logits")[i % 2])


def numbers_of(lines):
    return [(line.pop("logprob"), line.pop("token_logprobs"), line) for line in map(dict, lines)]


def assert_close(found, wanted, bound):
    for got, want in zip(numbers_of(found), numbers_of(wanted), strict=True):
        assert got[2] == want[2]
        for mine, theirs in zip(map(np.array, got[:2]), map(np.array, want[:2]), strict=True):
            assert abs(mine - theirs).max() <= bound * abs(theirs).max()


@functools.cache
def by_hand(config):
    """Return the lines that whole logits of each example alone come to."""
    (model,) = stages_in(tk.solo_parallel(), head="logits", config=config)
    call, lines = call_routed if config.experts else call_model, []
    for number, item in enumerate(make_items()):
        found = []
        for example in item.examples:
            ids = torch.from_numpy(example.ids)
            with torch.no_grad():
                logits = tk.types.drop_routing(call(model, batch_from_rows(ids[None, :-1])))[0]
            logprobs, labels = logits.log_softmax(-1), ids[1:]
            each = logprobs.gather(-1, labels[:, None])[-example.scored :, 0]
            greedy = (logits.argmax(-1) == labels)[-example.scored :].all()
            found.append(ExampleScores(each.double().numpy(), bool(greedy)))
        lines.append({"index": number, **evaluation.make_text_record(item, found)})
    return lines


@pytest.mark.parametrize(("world", "layouts"), LAYOUTS)
def test_every_layout_writes_the_lines_that_logits_of_each_example_alone_give(
    world, layouts, tmp_path
):
    run_ranks(all_of, world, layouts, str(tmp_path))
    for i, layout in enumerate(layouts):
        config = attrs.evolve(MIXED if layout.ep > 1 else SMALL, tied=i % 2 == 1)
        wanted = by_hand(config)
        assert_close(evaluation.read_results(tmp_path / f"{i}"), wanted, 1e-12)
        greedy = [(line["index"] - 13) % 32 for line in wanted[13:-1] if line["greedy"]]
        assert len(greedy) == 3  # one word after each context, and not of one rank's words alone
        assert max(greedy) >= 16
        assert sum(line["cut"] for line in wanted) > 0


def test_in_fp32_the_numbers_are_equal_to_1e_5_and_the_names_are_equal(tmp_path):
    scored(Layout(), tmp_path / "32", head="hidden", dtype=torch.float32)
    wanted = by_hand(SMALL)
    assert_close(evaluation.read_results(tmp_path / "32"), wanted, 1e-5)


def test_what_is_greedy_is_what_argmax_takes_of_equal_logits_too():
    hidden = torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(0)).round()
    weight = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]])
    logits = hidden @ weight.T
    labels = logits.argmax(-1)
    labels[0, ::3] = (labels[0, ::3] + 1) % 4
    found, want = (
        token_scores(Hidden(hidden, weight), labels),
        labels == logits.argmax(-1),
    )
    assert torch.equal(found[1], want)
    assert torch.equal(token_scores(logits, labels)[1], want)
    assert (logits.sort(-1).values.diff(dim=-1)[..., -1] == 0).sum() > 5


def test_scores_that_are_not_finite_are_refused():
    (model,) = stages_in(tk.solo_parallel(), head="hidden", config=SMALL)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    score = evaluation.make_scorer(model)
    with pytest.raises(NumericsError, match="a token of example 0 has the log-probability nan"):
        score([Example(np.array([1, 2]), 1)])


def test_a_reference_is_scored_without_dropout():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 32)
    )
    score = evaluation.make_scorer(model, call=lambda model, batch: model(batch["input_ids"]))
    ids = np.arange(9)
    (found,) = score([Example(ids, 8)])
    assert model.training
    with torch.no_grad():
        rows = model[2](model[0](torch.arange(8))).log_softmax(-1)
    want = rows.gather(-1, torch.arange(1, 9)[:, None])[:, 0].double().numpy()
    np.testing.assert_allclose(found.logprobs, want, rtol=1e-5)


def test_an_example_without_a_context_is_refused_and_none_at_all_are_no_call():
    score = evaluation.make_scorer(torch.nn.Identity())
    assert score([]) == []
    with pytest.raises(ValueError, match="example 1 has 2 tokens of which 2 are scored"):
        score([Example(np.array([1, 2]), 1), Example(np.array([1, 2]), 2)])


def test_lines_are_whole_json_that_others_read(tmp_path):
    scored(Layout(), tmp_path / "a")
    first, *rest = (tmp_path / "a").read_text().splitlines()
    assert json.loads(first)["model"] == "a"
    assert [json.loads(line)["index"] for line in rest] == list(range(14 + 96))
