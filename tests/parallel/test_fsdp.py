"""Every form of data parallelism gives the numbers of one process, with every option of FSDP2."""

import functools
from functools import partial

import attrs
import pytest
import torch
from torch import nn
from whole_step import CAPACITY, Layout, corpus, difference, full, input_of
from whole_step import CONFIG as WHOLE

import trainkit as tk
from trainkit.losses import next_token_linear
from trainkit.models import Decoder, init_weights
from trainkit.models.config import parameter_shapes
from trainkit.optim import adamw, decay_groups
from trainkit.parallel import fsdp
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError

CONFIG = attrs.evolve(WHOLE, vocab_size=32)
TIED = attrs.evolve(CONFIG, tied=True)
BLOCK = tuple(name for name in parameter_shapes(CONFIG) if name.startswith("layers.0."))


def freeze(names):
    """Return a transform that freezes parameters by the end of their names."""

    def apply(module, _):
        for name, p in module.named_parameters():
            p.requires_grad_(not name.endswith(names))
        return module

    return apply


def train(ps, options=None, *, config=CONFIG, frozen=(), steps=2, run_dir=None):
    """Train some steps from a fresh state, or from what `run_dir` holds; return the numbers."""
    text = corpus()
    bins = tk.pack_bins(text.lengths, CAPACITY)
    stages = tk.build_stages(
        lambda: Decoder(config, head="hidden").double(),
        ps,
        [tensor_parallel(), freeze(frozen), fsdp(options)],
        weights=init_weights(config, seed=0),
    )
    named = tk.get_named_parameters(stages)
    optimizer = adamw(decay_groups(named, weight_decay=0.1), lr=1e-2, eps=1e-4)
    state = tk.TrainState()
    if run_dir is not None:
        state = tk.resume(run_dir, state, stages, optimizer, ps, log=lambda _: None)
    layout = Layout()
    params, loss = tk.get_parameters(stages), next_token_linear
    run = tk.make_forward_backward(stages, loss)
    losses, norms = [], []
    while state.step < steps:
        batch = input_of(state.cursor, ps, layout, text=text, bins=bins)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = run(batch.microbatches, denominator=tokens)
        norms.append(float(tk.clip_and_step(params, optimizer, lr=1e-2, max_norm=0.5).norm))
        losses.append(float(tk.reduce_metrics(sums, ps.loss)["loss"] / tokens))
        state = attrs.evolve(
            state, step=state.step + 1, tokens=state.tokens + tokens, cursor=batch.cursor
        )
    if run_dir is not None:
        tk.save_checkpoint(run_dir, state, stages, optimizer, ps)
    parameters = {name: full(p) for name, p in named.items()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


OFFLOADED = tk.Layout(cpu_offload=True)
KINDS = {
    "kept gathered": partial(train, options=tk.Layout(reshard_after_forward=False)),
    "frozen in part": partial(train, frozen=("wq.weight", "norm.weight")),
    "a block frozen, offloaded": partial(train, options=OFFLOADED, frozen=BLOCK),
    "tied, offloaded": partial(train, options=OFFLOADED, config=TIED),
    "tied, its ends apart": partial(train, options=tk.Layout(separate_ends=True), config=TIED),
}


def of_kinds(layout, names):
    with tk.parallel_session(layout) as ps:
        return {name: KINDS[name](ps) for name in names}


@functools.cache
def alone():
    return of_kinds(tk.Layout(), KINDS)


@pytest.mark.parametrize(
    ("world", "layout", "kinds"),
    [
        pytest.param(2, tk.Layout(), [*KINDS][:2], id="2 sharded"),
        pytest.param(4, tk.Layout(dp_replicate=2), [*KINDS][2:], id="2 x 2 hybrid"),
        pytest.param(4, tk.Layout(tp=2), [*KINDS][1::2], id="2 sharded x 2 tensor"),
        *(
            pytest.param(world, layout, [*KINDS], id=f"all {layout}", marks=pytest.mark.only_all)
            for world, layout in (
                (2, tk.Layout()),
                (4, tk.Layout(dp_replicate=2)),
                (4, tk.Layout(tp=2)),
            )
        ),
    ],
)
def test_every_kind_gives_the_numbers_of_one_process(world, layout, kinds):
    found = run_ranks(of_kinds, world, layout, kinds)[-1]
    differences = {name: difference(found[name], alone()[name]) for name in kinds}
    assert max(differences.values()) < 1e-12, differences


def test_frozen_parameters_keep_every_bit():
    weights = init_weights(CONFIG, seed=0)
    found = alone()["frozen in part"]["parameters"]
    for name in (name for name in found if name.endswith(("wq.weight", "norm.weight"))):
        first = weights(name, found[name].shape, (0,) * found[name].ndim).double()
        assert torch.equal(torch.from_numpy(found[name]), first)
    assert difference(alone()["kept gathered"], alone()["frozen in part"]) > 1e-6


def offloaded_and_back(run_dir):
    """Train a step offloaded, and go on to 2 without."""
    with tk.parallel_session() as ps:
        train(ps, OFFLOADED, steps=1, run_dir=run_dir)
        return train(ps, steps=2, run_dir=run_dir)


def test_what_was_saved_offloaded_goes_on_elsewhere(tmp_path):
    found = run_ranks(offloaded_and_back, 2, tmp_path)[0]["parameters"]
    wanted = alone()["kept gathered"]["parameters"]
    for name, values in wanted.items():
        assert abs(found[name] - values).max() < 1e-12 * abs(values).max()
    with tk.parallel_session() as ps:
        assert train(ps, steps=2, run_dir=tmp_path)["losses"] == []


def test_on_one_process_offloading_is_refused_where_it_would_be_missed():
    ps = tk.solo_parallel()
    model = nn.Linear(1, 1)
    assert fsdp(tk.Layout(cpu_offload=True), blocks=None)(model, ps) is model
    on_gpu = attrs.evolve(ps, device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"cpu_offload is FSDP's, .* leave it out"):
        fsdp(tk.Layout(cpu_offload=True), blocks=None)(model, on_gpu)


def what_units_do():
    """Return for each choice whether blocks are offloaded, and whether they are freed early."""
    from trainkit.parallel.grad_reduction import fsdp_groups, reshards_after_forward

    found = {}
    with tk.parallel_session() as ps:
        for name, options in {
            "default": tk.Layout(),
            "offloaded": OFFLOADED,
            "kept gathered": tk.Layout(reshard_after_forward=False),
        }.items():
            with torch.device("meta"):
                model = fsdp(options)(Decoder(CONFIG), ps)
            block = model.layers["0"]
            policy = type(fsdp_groups(block)[0].offload_policy).__name__
            found[name] = policy, reshards_after_forward(block)
            assert not reshards_after_forward(model)
    return found


def test_blocks_are_offloaded_and_freed_as_was_asked():
    assert run_ranks(what_units_do, 2)[0] == {
        "default": ("OffloadPolicy", True),
        "offloaded": ("CPUOffloadPolicy", True),
        "kept gathered": ("OffloadPolicy", False),
    }


def what_is_gathered(choices):
    """Return for each choice the all-gathers that had started when each block did.

    In forward and in backward, and which of the ends were whole then; with the collectives.
    """
    from trainkit.tools.testing.ledger import _Counting

    with tk.parallel_session() as ps:
        return [watch_gathers(ps, _Counting, options) for options in choices]


def watch_gathers(ps, counting, options):
    config = attrs.evolve(CONFIG, layers=4)
    weights = init_weights(config, seed=0)
    (model,) = tk.build_stages(
        lambda: Decoder(config, head="hidden"), ps, [fsdp(options)], weights=weights
    )
    counts, forward, backward, whole = {}, [], [], set()

    def look(seen, *_):
        seen.append(sum(len(x) for (_, _, kind), x in counts.items() if kind == "all_gather"))
        ends = {"embedding": model.embedding.weight, "head": model.head.weight}
        whole.update(name for name, p in ends.items() if not hasattr(p, "placements"))

    def look_in_backward(_, __, output):
        output.register_hook(partial(look, backward))

    for block in model.layers.values():
        block.attention_norm.register_forward_pre_hook(partial(look, forward))
        block.register_forward_hook(look_in_backward)
    text = corpus()
    layout, bins = Layout(), tk.pack_bins(text.lengths, CAPACITY)
    batch = input_of(tk.Cursor(), ps, layout, text=text, bins=bins)
    run = tk.make_forward_backward(model, next_token_linear)
    with counting(counts, {}):
        run(batch.microbatches[:1], denominator=torch.tensor(1))
    near = sum(len(x) for (_, size, kind), x in counts.items() if (size, kind) == (2, "all_gather"))
    return forward, backward, whole, near


def test_blocks_are_gathered_ahead_and_ends_only_when_they_are_needed():
    choices = (
        tk.Layout(),
        tk.Layout(prefetch=2),
        tk.Layout(separate_ends=True, prefetch=1),
        tk.Layout(reshard_over=2),
    )
    own, ahead, apart, over = run_ranks(what_is_gathered, 4, choices)[0]
    # The ends are one gather; FSDP's own order is the next block in backward, none in forward.
    assert own == ([2, 3, 4, 5], [7, 8, 9, 9], {"embedding", "head"}, 0)
    assert ahead == ([4, 5, 5, 5], [8, 9, 9, 9], {"embedding", "head"}, 0)
    # The embedding, each block and the one after it, the head then; and the embedding in the end.
    assert apart[:2] == ([3, 4, 5, 6], [8, 9, 10, 11])
    assert apart[2] == set()
    assert over[3] == 4  # for backward from two ranks


def messages_of_axes(axes, layout):
    """Return what clipping over an axis that shards or replicates the parameters raises."""
    with tk.parallel_session(layout) as ps:
        model = fsdp(blocks=None)(nn.Linear(4, 4), ps)
        model(torch.ones(1, 4)).sum().backward()
        sgd = torch.optim.SGD(model.parameters())
        messages = []
        for name in axes:
            for clip in (
                partial(tk.grad_norm, model),
                partial(tk.clip_grads_, model.parameters(), max_norm=1.0),
                partial(tk.clip_and_step, model, sgd, lr=0.1, max_norm=1.0),
            ):
                with pytest.raises(ConfigError) as caught:
                    clip(axis=getattr(ps, name))
                messages.append(str(caught.value))
        tk.grad_norm(model, axis=ps.pp)
        return messages


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (["dp", "dp_shard", "fsdp", "loss", "world"], tk.Layout(dp_shard=2)),
        (["sp", "ring", "fsdp", "loss"], tk.Layout(ring=2)),
        (["dp", "dp_replicate", "loss"], tk.Layout(dp_replicate=2, dp_shard=1)),
    ],
)
def test_an_axis_over_which_parameters_are_sharded_is_refused_for_the_norm(axes, layout):
    for messages in run_ranks(messages_of_axes, 2, axes, layout):
        assert len(messages) == 3 * len(axes)
        assert all("summed over them already; give axis=ps.pp" in x for x in messages)


def without_blocks(pp):
    with tk.parallel_session() as ps:
        stages = attrs.evolve(ps, pp=tk.Axis("pp", tk.Share(0, pp)))
        with torch.device("meta"):
            module = nn.Embedding(8, 4)
        fsdp()(module, stages)
        return type(module.weight).__name__


def test_only_a_pipeline_stage_may_be_without_a_block():
    assert run_ranks(without_blocks, 2, 2) == ["DTensor", "DTensor"]
    with pytest.raises(RuntimeError, match=r"no submodule's name matches blocks='layers\.\*'"):
        run_ranks(without_blocks, 2, 1)


def test_a_wrong_name_of_the_blocks_is_found_on_one_rank_too_with_the_names_that_there_are():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "h": nn.ModuleList([nn.Linear(4, 4)])})
    message = r"are embed \(Embedding\), h \(ModuleList\)\. Name .* blocks=None"
    for blocks in ("layers.*", "g.*"):
        with pytest.raises(ValueError, match=message):
            fsdp(blocks=blocks)(model, tk.solo_parallel())
    for blocks in ("h.*", None):
        assert fsdp(blocks=blocks)(model, tk.solo_parallel()) is model
