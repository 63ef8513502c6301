"""Tensor parallelism gives the numbers of one process, and is refused before anything is sent."""

import functools

import attrs
import every_pair
import numpy as np
import pytest
import torch
from torch import nn
from whole_step import Layout, build, corpus, difference, full, input_of, model_config, run_steps

import trainkit as tk
from trainkit.batch import make_padding_batch
from trainkit.collectives import all_gather_replicated, all_sum
from trainkit.losses import declare_terms, next_token, next_token_linear
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, Latents, call_with_noise, init_weights
from trainkit.parallel import fsdp, grad_reduction
from trainkit.parallel.grad_reduction import mark_partial_, sum_partial_
from trainkit.parallel.parameters import get_local_box
from trainkit.parallel.styles import STYLES
from trainkit.parallel.tensor_parallel import DECODER_STYLES, read_hf_styles, tensor_parallel
from trainkit.tools.testing import RankError, run_ranks
from trainkit.types import Axis, ConfigError, Cursor, Share

BASE = Layout(vocab_size=32, kv_heads=4, qkv_bias=True)
LAYOUTS = {
    "tp 2": Layout(2, tp=2),
    "tp 2, dropout, tied, two rows": Layout(2, tp=2, dropout=0.3, tied=True, rows_per_microbatch=2),
    "tp 2, selective recomputation": Layout(2, tp=2, recompute="selective"),
    "tp 4": Layout(4, tp=4),
    "tp 4, dropout, tied": Layout(4, tp=4, dropout=0.3, tied=True),
    "tp 2 x fsdp 2": Layout(4, tp=2),
    "tp 2 x fsdp 2, each, full recomputation": Layout(4, tp=2, reduce="each", recompute="full"),
    "tp 2 x fsdp 2, dropout, tied, each": Layout(4, tp=2, dropout=0.3, tied=True, reduce="each"),
    "tp 2 x replicate 2": Layout(4, tp=2, dp_replicate=2),
}
LAYOUTS = {
    name: attrs.evolve(layout, vocab_size=32, kv_heads=4, qkv_bias=True)
    for name, layout in LAYOUTS.items()
}
WORLDS = sorted({layout.world for layout in LAYOUTS.values()})

# The same matrices cut without cutting the sequence.
WHOLE_SEQUENCE = {
    "embedding": "vocabulary",
    "layers.*.attention.w[qkv]": "column",
    "layers.*.attention.[qk]_norm": "partial",
    "layers.*.attention.wo": "row",
    "layers.*.mlp.[gu]*": "column",
    "layers.*.mlp.down": "row",
    "head": "column",
}


@functools.cache
def reference(*, tied=False, dropout=0.0):
    return run_steps(attrs.evolve(BASE, tied=tied, dropout=dropout))


def several(layouts):
    return {name: run_steps(layout) for name, layout in layouts.items()}


@functools.cache
def found_on(world):
    running = every_pair.running(LAYOUTS).items()
    chosen = {name: layout for name, layout in running if layout.world == world}
    return run_ranks(several, world, chosen, timeout=240)[0]


@pytest.mark.parametrize("name", every_pair.named(LAYOUTS))
def test_two_steps_give_the_numbers_of_one_process_in_fp64(name):
    layout = LAYOUTS[name]
    wanted = reference(tied=layout.tied, dropout=layout.dropout)
    found = found_on(layout.world)[name]
    assert difference(found, wanted) < 1e-12
    assert found["hashes"] == wanted["hashes"]
    assert found["tokens"] == wanted["tokens"]


# --------------------------------------------------------------------------------------- gradients


def gradients(styles, *, calls=1, mistake=None, head="hidden", loss=next_token_linear, **changes):
    """Return the gradients of a step, its sums and their norm, by any plan, with or without tp."""
    layout = attrs.evolve(BASE, **changes)
    config = model_config(layout)
    text = corpus()
    with tk.parallel_session(tp=layout.tp) as ps, pytest.MonkeyPatch.context() as patch:
        if mistake == "partial sums are skipped":
            patch.setattr("trainkit.parallel.grad_reduction.sum_partial_", lambda _: None)
        if mistake == "partial sums are made twice":
            patch.setattr(
                "trainkit.parallel.grad_reduction.sum_partial_",
                lambda m: (sum_partial_(m), sum_partial_(m)),
            )
        (model,) = tk.build_stages(
            lambda: Decoder(config, head=head).to(layout.dtype),
            ps,
            [tensor_parallel(styles), fsdp()],
            weights=init_weights(config, seed=0),
        )
        bins = tk.pack_bins(text.lengths, 24)
        batch = input_of(Cursor(), ps, layout, text=text, bins=bins)
        tokens = all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        step = functools.partial(
            tk.forward_backward, model, loss=loss, denominator=tokens, call=call_with_noise
        )
        for index in range(calls):
            sums = step(batch.microbatches[index::calls])
        grads = {name: p.grad for name, p in tk.get_named_parameters([model]).items()}
        norm = float(tk.grad_norm(tk.get_parameters([model]), axis=ps.pp))
        return {
            "parameters": {name: full(grad.double()) for name, grad in grads.items()},
            "losses": [float(v) for v in tk.reduce_metrics(sums, ps.loss).values()],
            "norms": [norm],
        }


def gathered_without_a_sum():
    own = attrs.evolve(
        STYLES["gather"], on_input=lambda x, axis: all_gather_replicated(x, axis, dim=1)
    )
    return DECODER_STYLES | {"layers.*.mlp": own}


def partial_not_marked():
    return {**DECODER_STYLES, "layers.*.attention.[qk]_norm": "replicated"}


PLANS = {
    "own": lambda: None,
    "without a cut sequence": lambda: WHOLE_SEQUENCE,
}
MISTAKES = {
    "a norm on heads is taken for whole": partial_not_marked,
    "a gather's gradient is not summed": gathered_without_a_sum,
    "partial sums are skipped": lambda: None,
    "partial sums are made twice": lambda: None,
}


@declare_terms("loss", "distance")
def own_loss(logits, batch):
    """A user's: it needs all of the vocabulary, at every token that has a label."""
    kept = (batch["labels"] >= 0).unsqueeze(-1)
    far = ((logits - logits.mean(-1, keepdim=True)).square() * kept).sum()
    total, terms = next_token(logits, batch)
    return total + 0.1 * far, {**terms, "distance": far.detach()}


gradients_of_logits = functools.partial(gradients, head="logits", loss=own_loss)
GATHERED = WHOLE_SEQUENCE | {"head": "column_gathered"}


def logits_on_two_ranks():
    return {
        "own, whole logits": gradients_of_logits(None, tp=2),
        "own, whole logits, tied": gradients_of_logits(None, tied=True, tp=2),
        "without a cut sequence, whole logits": gradients_of_logits(WHOLE_SEQUENCE, tp=2),
        "gathered by the plan": gradients_of_logits(GATHERED, tp=2),
    }


def test_a_loss_on_logits_sees_the_whole_vocabulary_in_value_and_gradient():
    wanted = {tied: gradients_of_logits(None, tied=tied) for tied in (False, True)}
    for name, found in run_ranks(logits_on_two_ranks, 2)[0].items():
        assert difference(found, wanted["tied" in name]) < 1e-12, name


def gradients_of_plans():
    return {name: gradients(make(), tp=2) for name, make in PLANS.items()} | {
        name: gradients(make(), tp=2, mistake=name) for name, make in MISTAKES.items()
    }


def test_gradients_are_those_of_one_process_and_every_mistake_shows():
    wanted = gradients(None)
    found = run_ranks(gradients_of_plans, 2)[0]
    for name in PLANS:
        assert difference(found[name], wanted) < 1e-12, name
    for name in MISTAKES:
        assert difference(found[name], wanted) > 1e-3, name


def gradients_in_two_calls():
    return gradients(None, tp=2, calls=2)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.only_all)])
def test_gradients_of_several_calls_add_up(world):
    wanted, found = gradients(None, calls=2), run_ranks(gradients_in_two_calls, world)[0]
    wanted["losses"] = found["losses"]  # of the last call, which here is one rank's
    assert difference(found, wanted) < 1e-12


class Biased(nn.Module):
    """A model whose hidden states are cut along the sequence, with a bias everywhere."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.head = nn.Linear(4, 8)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.mlp(x)))


BIASED = {"embedding": "vocabulary_scattered", "mlp": "gather", "mlp.0": "column_inside"}
BIASED |= {"mlp.1": "row_scattered", "norm": "partial_gathered", "head": "column_inside_gathered"}


def of_biases(tp):
    """Return the gradients of a user's model that is cut along the sequence too."""
    with tk.parallel_session(tp=tp) as ps:
        torch.manual_seed(0)
        model = tensor_parallel(BIASED)(Biased().double(), ps)
        ids = torch.arange(8).view(1, 8)
        total, _ = next_token(model(ids), {"labels": (3 * ids + 1) % 8})
        total.backward()
        sum_partial_(model)
        return {
            "losses": [float(total.detach())],
            "norms": [1.0],
            "parameters": {name: full(p.grad) for name, p in model.named_parameters()},
        }


def test_biases_where_the_sequence_is_cut_get_the_gradient_of_all_tokens():
    assert difference(run_ranks(of_biases, 2, 2)[0], of_biases(1)) < 1e-12


def partial_sums():
    """Return what two ranks make of gradients that not all of them have, and the calls it took."""
    with tk.parallel_session(tp=2) as ps:
        sizes = {"both": torch.float64, "one": torch.float64, "none": torch.float64}
        sizes |= {"low": torch.bfloat16, "frozen": torch.float64}
        model = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(3, dtype=dtype)) for name, dtype in sizes.items()}
        )
        tensor_parallel({})(model, ps)
        model["frozen"].requires_grad_(False)
        mark_partial_(model, list(sizes), ps.tp)
        for name in ("both", "low", "frozen") + (("one",) if ps.tp.index else ()):
            model[name].grad = torch.ones_like(model[name]) * (1 + ps.tp.index)
        calls = []
        send = torch.distributed.all_reduce
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                grad_reduction.dist, "all_reduce", lambda *a, **k: (calls.append(0), send(*a, **k))
            )
            sum_partial_(model)
        grads = {name: p.grad for name, p in model.items()}
        return len(calls), {
            name: None if grad is None else grad.to_local().tolist() for name, grad in grads.items()
        }


def test_partial_gradients_are_summed_in_one_call_per_dtype_and_missing_ones_are_zeros():
    for rank, (calls, grads) in enumerate(run_ranks(partial_sums, 2)):
        assert calls == 2
        assert grads == {
            "both": [3.0] * 3,
            "low": [3.0] * 3,
            "one": [2.0] * 3,
            "none": None,
            "frozen": [1.0 + rank] * 3,
        }


# -------------------------------------------------------------------------------------- checkpoints


def resumed(layout, folder):
    return run_steps(layout, steps=1, resume_from=folder)


def saved(folder):
    layout = attrs.evolve(BASE, tp=2, tied=True)
    with tk.parallel_session(tp=2) as ps:
        stages, _ = build(layout, ps)
        named = tk.get_named_parameters(stages)
        boxes = {
            name: (get_local_box(p), tuple(map(str, p.placements))) for name, p in named.items()
        }
        shapes = {
            name: (tuple(box.local.shape), box.offset, box.writes, placements[-1])
            for name, (box, placements) in boxes.items()
        }
    return shapes, run_steps(layout, steps=1, save_to=folder)["state_hash"]


def test_a_checkpoint_of_four_ranks_is_that_of_any_layout(tmp_path):
    found = run_ranks(saved, 4, tmp_path)
    hashes = {state_hash for _, state_hash in found}
    assert len(hashes) == 1
    for layout in (attrs.evolve(BASE, tied=True), attrs.evolve(BASE, tied=True, tp=2)):
        world = 2 if layout.tp == 2 else 1
        results = run_ranks(resumed, world, layout, tmp_path)
        assert {result["state_hash"] for result in results} == hashes
    shapes = [shapes for shapes, _ in found]
    for rank, (tp, dp) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        own = shapes[rank]
        assert own["embedding.weight"] == ((8, 16), (16 * tp + 8 * dp, 0), True, "S(0)")
        assert own["layers.0.attention.wo.weight"] == ((8, 8), (8 * dp, 8 * tp), True, "S(1)")
        assert own["layers.1.attention.wq.bias"] == ((4,), (8 * tp + 4 * dp,), True, "S(0)")
        assert own["norm.weight"] == ((8,), (8 * dp,), tp == 0, "R")


# ---------------------------------------------------------------------------------------- refusals


def fake(tp):
    """Return a layout with tp, and no process group: whatever is refused has sent nothing."""
    return attrs.evolve(solo_parallel(), tp=Axis("tp", Share(0, tp)))


SMALL = model_config(BASE)
SIX_HEADS = attrs.evolve(
    SMALL,
    heads=6,
    kv_heads=6,
    head_dim=None,
    qk_norm=False,
    qkv_bias=False,
    latents=Latents(kv_rank=4, plain=4, rotary=2, values=5),
)
ODD_MLP = attrs.evolve(SMALL, mlp_width=25)
TWO_KV_HEADS = attrs.evolve(SMALL, kv_heads=2)
ODD_VOCABULARY = attrs.evolve(SMALL, vocab_size=31)


def decoder(config=SMALL):
    with torch.device("meta"):
        return Decoder(config)


WITHOUT_NORM = {k: v for k, v in DECODER_STYLES.items() if k != "layers.*.mlp_norm"}
MLP = {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}


@pytest.mark.parametrize(
    ("tp", "config", "styles", "words"),
    [
        (8, SMALL, None, ["'layers.0.attention.wq'", "has 4 heads, which do not", "tp = 8"]),
        (4, TWO_KV_HEADS, None, ["'layers.0.attention.wk'", "2 heads", "tp = 4"]),
        (4, SIX_HEADS, None, ["'layers.0.attention.wq' has 6 heads, which do not", "tp = 4"]),
        (4, SIX_HEADS, {"layers.*.attention.wkv": "column"}, ["attention.wkv' has 6 heads"]),
        (2, ODD_VOCABULARY, None, ["embedding.weight", "is 31, which does not", "tp = 2"]),
        (2, ODD_MLP, None, ["mlp.gate.weight", "25", "tp = 2"]),
        (2, ODD_MLP, MLP, ["mlp.up.weight", "25", "tp = 2"]),
        (2, SMALL, {"layers.*.mpl": "gather"}, ["'layers.*.mpl'", "matches"]),
        (1, SMALL, {"layers.*.mpl": "gather"}, ["'layers.*.mpl'", "matches"]),
        (2, SMALL, {"norm": "row"}, ["'norm'", "RMSNorm", "Linear"]),
        (2, SMALL, {"norm": "rows"}, ["'rows'", "'norm'", "column"]),
        (2, SMALL, {"norm": "partial", "n*": "partial"}, ["'norm'", "'n*'", "two patterns"]),
        # What would be summed twice, by nobody, or only by some.
        (2, SMALL, {**DECODER_STYLES, "head": "column"}, ["'head' sums", "column_inside"]),
        (2, SMALL, {**DECODER_STYLES, "head": "column_gathered"}, ["'head' sums", "_gathered"]),
        (1, SMALL, {**DECODER_STYLES, "layers.*.mlp.up": "column"}, ["mlp.up' sums"]),
        (2, SMALL, {"layers.*.mlp.[gu]*": "column_inside"}, ["nothing sums", "mlp.gate'"]),
        (2, SMALL, WITHOUT_NORM, ["'layers.0.mlp_norm' has parameters", "no style", '"partial"']),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(tp, config, styles, words):
    with pytest.raises(ConfigError) as caught:
        tensor_parallel(styles)(decoder(config), fake(tp))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_parameter_of_ones_own_where_features_are_cut_needs_a_style():
    block = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)})
    model, mlp = nn.ModuleDict({"block": block}), {"block.up": "column", "block.down": "row"}
    assert tensor_parallel(mlp)(model, solo_parallel()) is model
    block.register_parameter("gain", nn.Parameter(torch.ones(1)))
    for ps in (solo_parallel(), fake(2)):
        with pytest.raises(ConfigError, match="'block' has parameters of its own and no style"):
            tensor_parallel(mlp)(model, ps)
    assert tensor_parallel(mlp | {"block": "partial"})(model, solo_parallel()) is model


def test_a_module_without_a_ready_plan_and_an_embedding_of_special_rows_are_refused():
    with pytest.raises(ConfigError, match="no ready plan for a Linear"):
        tensor_parallel()(nn.Linear(2, 2), fake(2))
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(ConfigError, match="max_norm"):
        tensor_parallel({"0": "vocabulary"})(model, fake(2))


def test_at_size_one_nothing_changes():
    model = decoder()
    before = [type(module) for module in model.modules()]
    assert tensor_parallel()(model, solo_parallel()) is model
    assert [type(module) for module in model.modules()] == before
    assert model.sequence_parts == 1


def late_refusals():
    """Ask for what only a forward pass can refuse; then the ranks still understand each other."""
    with tk.parallel_session(tp=2) as ps:
        config = model_config(BASE)
        (model,) = tk.build_stages(
            lambda: Decoder(config), ps, [tensor_parallel()], weights=init_weights(config, seed=0)
        )
        batch = make_padding_batch(1, 7)
        with pytest.raises(ValueError, match="size 7, which does not divide into 2 equal parts"):
            tk.call_model(model, batch)
        assert model.sequence_parts == 2
        logits = tk.call_model(model, make_padding_batch(1, 8))
        tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        tied["b"].weight = tied["a"].weight
        with pytest.raises(ConfigError, match=r"'b\.weight' is tied"):
            tensor_parallel({"a": "column"})(tied, ps)
        with pytest.raises(ConfigError, match="sharded already"):
            tensor_parallel()(model, ps)
        return tuple(logits.shape)


def test_a_sequence_that_does_not_divide_is_refused_before_anything_is_sent():
    assert run_ranks(late_refusals, 2) == [(1, 8, 32)] * 2


def compiled_whole():
    with tk.parallel_session(tp=2) as ps:
        own = tensor_parallel({"0": "replicated"})(nn.Sequential(nn.Linear(3, 2)), ps)[0]
        fullgraph = torch.__version__ >= "2.13"  # before it in parts
        compiled = torch.compile(own, backend="eager", fullgraph=fullgraph)
        compiled(torch.ones(1, 3))
        return tuple(compiled(torch.ones(1, 3)).shape)


def test_a_module_on_its_local_parameters_is_compiled_without_a_break():
    assert run_ranks(compiled_whole, 2) == [(1, 2)] * 2


def embedded(last_id):
    """Return embeddings and the gradients of their table, with a padding row on the second rank."""
    with tk.parallel_session(tp=2) as ps:
        model = nn.Sequential(nn.Embedding(8, 2, padding_idx=5))
        model.load_state_dict({"0.weight": torch.arange(16.0).view(8, 2)})
        tensor_parallel({"0": "vocabulary"})(model, ps)
        out = model(torch.tensor([0, 3, 4, 5, last_id]))
        out.sum().backward()
        return out[:, 0].tolist(), full(model[0].weight.grad)[:, 0].tolist()


def test_an_embedding_finds_every_row_once_and_keeps_its_padding_row():
    rows, grads = [0.0, 6.0, 8.0, 10.0, 14.0], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert run_ranks(embedded, 2, 7) == [(rows, grads)] * 2


@pytest.mark.parametrize("unknown", [8, -1])
def test_an_id_outside_the_vocabulary_fails_as_on_one_process(unknown):
    with pytest.raises(RankError, match="IndexError: index out of range"):
        run_ranks(embedded, 2, unknown)


# ------------------------------------------------------------------------------------ Hugging Face


def test_norms_of_heads_that_an_older_plan_leaves_out_are_partial_all_the_same():
    attention = nn.Module()
    attention.head_dim, attention.q_norm = 8, nn.RMSNorm(8)
    attention.q_proj = nn.Linear(16, 32)
    model = nn.ModuleDict({"attention": attention})
    model._tp_plan = {"attention.q_proj": "colwise"}
    assert read_hf_styles(model) == {"attention.q_proj": "column", "attention.q_norm": "partial"}
    attention.q_norm = nn.RMSNorm(32)
    with pytest.raises(ConfigError, match=r"'attention\.q_norm' is no norm of single heads"):
        read_hf_styles(model)


def test_a_plan_with_an_unknown_style_or_none_is_refused_by_name():
    model = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="brings no tensor-parallel plan"):
        read_hf_styles(model)
    model._tp_plan = {"experts": "grouped_gemm", "absent": "colwise"}
    with pytest.raises(ConfigError, match="'grouped_gemm' at 'experts'"):
        read_hf_styles(model)


# ----------------------------------------------------------------------------------- low precision


def test_bf16_stays_near_fp32():
    wanted = gradients(None, dtype=torch.float32)
    found = run_ranks(functools.partial(gradients, None, tp=2, dtype=torch.bfloat16), 2)[0]
    assert np.isclose(found["losses"], wanted["losses"], rtol=1e-2)
    assert np.isclose(found["norms"], wanted["norms"], rtol=5e-2)
