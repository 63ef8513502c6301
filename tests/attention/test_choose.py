"""Which kernel is taken, why no other, and that each gives what the masked softmax gives."""

import sys
import warnings
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from attention.test_attention import (
    assert_equal,
    inputs,
    output_and_gradients,
    spans_of,
    written_out,
)
from recipe_runs import SMALL, assert_equal_runs, column, here, several
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit import models, parallel
from trainkit.attention import choose_kernel, flex, ring, sdpa, ulysses, varlen
from trainkit.attention.flex import BLOCK, block_mask
from trainkit.batch import spans_from_rows
from trainkit.mesh import solo_parallel
from trainkit.parallel.attention import describe_attention
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, Axis, ConfigError, Share

on_cpu = partial(choose_kernel, device="cpu", dtype=torch.float64, head_size=16)
on_gpu = partial(choose_kernel, device="cuda", dtype=torch.float16, head_size=16)
LENGTHS = [150, 1, 29, 120]
SEEN = [(None, None), (20, None), (None, 0.5), (70, 0.5)]


def got_and_wanted(attend, qkv, *, window, softcap, scale=None):
    """Return outputs and gradients of an attention, and those of the masked softmax in fp64."""
    tried = partial(attend, spans=spans_of(LENGTHS), window=window, softcap=softcap, scale=scale)
    masked = partial(written_out, lengths=LENGTHS, window=window, softcap=softcap, scale=scale)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    return output_and_gradients(tried, qkv), output_and_gradients(masked, wide)


def attention_of(name, monkeypatch):
    """Return one of the attentions of one process; those of several are in test_ring."""
    # Torch has a plain form of flex's backward for any device, and refuses it on a CPU.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    made = {"varlen": varlen, "ring": ring(SOLO), "ulysses": ulysses(sdpa, SOLO), "flex": flex()}
    return made.get(name) or on_cpu([name]).attend


@pytest.mark.parametrize(("window", "softcap"), SEEN)
@pytest.mark.parametrize("name", ["sdpa", "flash", "math", "varlen", "flex", "ring", "ulysses"])
def test_every_attention_gives_the_masked_softmax_forward_and_backward(
    monkeypatch, name, window, softcap
):
    """Windows, soft caps, both: rows of packed documents, shared key heads, narrow values."""
    attend, qkv = attention_of(name, monkeypatch), inputs(2, 150, kv_heads=2, dim=16, values=12)
    with warnings.catch_warnings(action="ignore"):  # that flex is in its plain form
        assert_equal(*got_and_wanted(attend, qkv, window=window, softcap=softcap, scale=0.7))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", ["flash", "sdpa", "math"])
def test_each_kernel_of_a_cpu_keeps_its_dtype(name, dtype, bound):
    for window, softcap in SEEN:
        qkv = inputs(2, 150, kv_heads=2, dim=16, values=12, dtype=dtype)
        attend = on_cpu([name], dtype=dtype).attend
        pairs = zip(*got_and_wanted(attend, qkv, window=window, softcap=softcap), strict=True)
        for a, b in pairs:
            assert a.dtype == dtype
            assert (a - b).abs().max() <= bound * b.abs().max(), (window, softcap)


@pytest.fixture
def gpu(monkeypatch):
    """Let torch answer as if there were a GPU, and a kernel of cuDNN were not there."""
    low = (torch.float16, torch.bfloat16)
    taken = {"flash": low, "efficient": (*low, torch.float32), "cudnn": ()}

    def answer(kind):
        masked = ("efficient", "cudnn")
        return lambda params: (
            params.query.dtype in taken[kind] and (params.attn_mask is None or kind in masked)
        )

    for kind in taken:
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{kind}_attention", answer(kind))
    found = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.usefixtures("gpu")
def test_a_kernel_of_torch_is_the_only_one_that_it_may_take(monkeypatch, name):
    switches = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp"}
    on = []

    def note(q, *_, **__):
        kinds = {**switches, "math": "math_sdp"}
        on.extend(x for x, y in kinds.items() if getattr(torch.backends.cuda, f"{y}_enabled")())
        return q

    only, calls = torch.nn.attention.sdpa_kernel, []

    def spy(kernels, *, set_priority):
        calls.append((kernels[0].name, set_priority))
        return only(kernels, set_priority=set_priority)

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", spy)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda _: True)
    attend = on_gpu([name]).attend
    attend(*(torch.ones(1, 4, 2, 16) for _ in "qkv"), spans=spans_from_rows(1, 4))
    # cuDNN refuses documents of one token, which would end a run.
    assert on == (["efficient", "cudnn"] if name == "cudnn" else [name])
    assert calls[-1] == (f"{name.upper()}_ATTENTION", True)


@pytest.mark.only_all
@pytest.mark.parametrize(("window", "kv_heads", "values"), [(None, 4, 16), (20, 1, 8)])
def test_flex_takes_any_heads(monkeypatch, window, kv_heads, values):
    attend = attention_of("flex", monkeypatch)
    qkv = inputs(2, 150, kv_heads=kv_heads, dim=16, values=values)
    with warnings.catch_warnings(action="ignore"):  # that it is the plain form
        assert_equal(*got_and_wanted(attend, qkv, LENGTHS, window=window))


@pytest.mark.only_all
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch's compiler imports
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (140, 0.5)])
def test_the_compiled_kernel_of_a_cpu_leaves_out_what_nobody_sees(window, softcap):
    qkv = [x.detach() for x in inputs(1, 600, kv_heads=2, dim=16, values=16, dtype=torch.float32)]
    lengths = [300, 1, 29, 270]

    def cap(score, *_):
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    mask = block_mask(spans_of(lengths), 600, window=window)
    heads, wide = [x.transpose(1, 2) for x in qkv], [x.double() for x in qkv]
    kernel = torch.compile(torch_flex.flex_attention)
    got = kernel(*heads, score_mod=cap, block_mask=mask, enable_gqa=True).transpose(1, 2)
    want = written_out(*wide, lengths, window=window, softcap=softcap)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("lengths", [[300], LENGTHS, [128] * 3, [1] * 140, [0, 513, 0]])
@pytest.mark.parametrize("window", [None, 1, 20, 128, 129, 1000, "both sides"])
def test_the_blocks_are_those_that_looking_at_every_pair_finds(lengths, window):
    tokens, causal = sum(lengths), window != "both sides"
    window = window if causal else None
    found = block_mask(spans_of(lengths), tokens, window=window, causal=causal)
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = document[:, None] == document[None]
    seen &= (key <= query) & (query - key < (window or tokens)) if causal else True
    assert torch.equal(found.mask_mod(0, 0, query, key), seen)
    blocks = -(-tokens // BLOCK)
    for each in range(blocks):
        rows = seen[each * BLOCK : (each + 1) * BLOCK]
        parts = [rows[:, at * BLOCK : (at + 1) * BLOCK] for at in range(blocks)]
        some = {at for at, part in enumerate(parts) if part.any()}
        # The last block may be no whole one, and its keys past the end are masked.
        fits = each if causal else tokens // BLOCK
        whole = {at for at in some if parts[at].all() and at < fits}
        got = [
            set(indices[0, 0, each, : counts[0, 0, each]].tolist())
            for counts, indices in (
                (found.kv_num_blocks, found.kv_indices),
                (found.full_kv_num_blocks, found.full_kv_indices),
            )
        ]
        assert got == [some - whole, whole]


def test_finding_the_blocks_does_not_wait_for_the_device():
    spans = spans_of(LENGTHS)  # on "meta" nothing can be read by the host
    on_device = attrs.evolve(spans, cu_seqlens=spans.cu_seqlens.to("meta"))
    assert block_mask(on_device, 300, window=7).full_q_indices.device.type == "meta"


def test_blocks_are_found_once_for_a_batch(monkeypatch):
    made, module = [], sys.modules["trainkit.attention.flex"]
    monkeypatch.setattr(module, "block_mask", lambda *_, **how: made.append(how) or object())
    monkeypatch.setattr(module, "_attention", lambda **_: lambda q, *_, **__: q)
    attend, (q, k, v), spans = flex(), inputs(1, 12), spans_of([7, 5])
    for window in (None, None, 3, None, 3):
        attend(q, k, v, spans=spans, window=window)
    assert [how["window"] for how in made] == [None, 3]
    attend(q, k, v, spans=spans_of([7, 5]))
    assert len(made) == 3


# -------------------------------------------------------------------------------------- the choice


FLAT = "torch does not take it here"


fp16, bf16, fp32, fp64 = (
    partial(on_gpu, dtype=dtype, head_size=64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)


@pytest.mark.parametrize(
    ("names", "choose", "taken", "reasons"),
    [
        ("varlen flex sdpa", bf16, "varlen", []),
        ("varlen flex sdpa", partial(bf16, window=8), "varlen", []),
        ("varlen flex", partial(bf16, softcap=5.0), "flex", ["it has no soft caps"]),
        ("varlen flex", fp32, "flex", ["fp16 and bf16", "not fp32 and heads of 64"]),
        ("flex sdpa", fp64, "sdpa", ["fp32, fp16 and bf16", "not fp64"]),
        ("flex math", partial(bf16, head_size=8), "math", ["heads of 16 and more"]),
        ("cudnn flash", fp16, "flash", [f"cudnn: {FLAT}"]),
        ("flash efficient", fp32, "efficient", [f"flash: {FLAT}"]),
        ("flash flex", partial(fp16, window=8), "flash", []),
        ("flash flex", partial(fp32, window=8), "flex", ["flash: it takes fp16 and bf16"]),
        ("cudnn efficient", partial(fp32, window=8), "efficient", [f"cudnn: {FLAT}"]),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_the_first_that_fits_is_taken_and_says_why_no_other(names, choose, taken, reasons):
    found = choose(names.split())
    assert found.name == taken
    assert list(found.refused) == names.split()[: names.split().index(taken)]
    assert all(reason in str(found) for reason in reasons)
    if taken == "flash":  # torch's attention would give it no mask
        assert (found.attend is varlen) == ("window" in choose.keywords)


@pytest.mark.usefixtures("gpu")
def test_a_kernel_is_asked_whether_it_takes_the_mask_of_a_window(monkeypatch):
    calls = []
    note = lambda params: calls.append((params.attn_mask is None, params.is_causal))  # noqa: E731
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", note)
    for window in (None, 8):
        on_gpu(["efficient", "math"], window=window)
    assert calls == [(True, True), (False, False)]


def test_when_none_fits_each_reason_is_told():
    names = ["varlen", "flash", "efficient", "cudnn", "flex"]
    with pytest.raises(ConfigError) as caught:
        on_cpu(names, window=8, softcap=5.0)
    message, alone = str(caught.value), "it runs only on CUDA"
    assert "heads of 16 in fp64 on cpu in a window of 8 with a soft cap of 5.0" in message
    reasons = {"varlen": alone, "efficient": alone, "cudnn": alone}
    reasons |= {"flash": "it has no soft caps", "flex": "torch has no backward pass of it"}
    assert all(f"{name}: {reason}" in message for name, reason in reasons.items())
    with pytest.raises(ValueError, match="kernel must be"):
        on_cpu(["flesh"])


def test_layers_of_one_kind_share_a_kernel_and_the_start_tells_of_each(monkeypatch):
    module = sys.modules["trainkit.attention.choose"]
    reject = lambda inputs: "it takes no mask" if inputs.window else ""  # noqa: E731
    row = attrs.evolve(module.KERNELS["flash"], reject=reject)
    monkeypatch.setitem(module.KERNELS, "flash", row)
    sliding = models.Sliding(window=8, full_every=2)
    config = models.make_decoder_config("tiny", vocab_size=256, layers=4, width=32, sliding=sliding)
    plan = parallel.set_attention(["flash", "math"], dtype=torch.float32)
    model = plan(models.Decoder(config), solo_parallel())
    kernels = [model.layers[str(i)].attention.attend for i in range(4)]
    assert len(set(map(id, kernels))) == 2
    assert describe_attention([model]) == (
        "attention: 2 layers by math (flash: it takes no mask), 2 layers by flash"
    )


def test_a_layer_with_sinks_gets_a_kernel_that_has_them(monkeypatch):
    module = sys.modules["trainkit.attention.choose"]
    row = attrs.evolve(module.KERNELS["flash"], sinks=False)
    monkeypatch.setitem(module.KERNELS, "flash", row)
    for sinks, taken in ((True, "sdpa"), (False, "flash")):
        config = models.make_decoder_config("tiny", layers=1, attention_sinks=sinks)
        made = parallel.set_attention(["flash", "sdpa"], dtype=torch.float32)(
            models.Decoder(config), solo_parallel()
        )
        assert f"1 layers by {taken}" in describe_attention([made])


def test_a_choice_that_would_do_nothing_is_refused():
    plan = parallel.set_attention(["sdpa"], dtype=torch.float32)
    ring = attrs.evolve(solo_parallel(), ring=Axis("ring", Share(0, 2)))
    with pytest.raises(ConfigError, match="ring = 2 has kernels of its own"):
        plan(models.Decoder(models.make_decoder_config("tiny", vocab_size=256, layers=1)), ring)
    with pytest.raises(ConfigError, match="no submodule has attributes"):
        plan(torch.nn.Linear(1, 1), solo_parallel())


@pytest.fixture
def text(tmp_path):
    (folder := tmp_path / "text").mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text("\n".join(f"word{i * j % 17} = {j}" for j in range(9)))
    return folder


def flags_of(out, text, *flags):
    own = ["--out", out, "--data", text, *SMALL.split(), "--steps", 3, "--eval-every", 0]
    return [*own, *flags]


def test_a_recipe_says_what_it_took_and_its_losses_are_those_of_another_kernel(text, tmp_path):
    runs = {}
    for names in ([], ["varlen", "flash"], ["math"]):
        out = tmp_path / f"run {' '.join(names)}"
        code, output = here(flags_of(out, text, *(["--attention", *names] if names else [])))
        assert code == 0, output
        runs[" ".join(names)] = column(out, "loss_hex"), output
    line = "attention: 2 layers by flash (varlen: it runs only on CUDA)"
    assert line in runs["varlen flash"][1]
    assert "attention:" not in runs[""][1]
    assert runs[""][0] == runs["varlen flash"][0]  # what a CPU takes by itself
    assert runs[""][0] != runs["math"][0]
    losses = [[float.fromhex(x) for x in runs[name][0]] for name in ("", "math")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.only_all
def test_ulysses_attends_by_what_was_chosen(text, tmp_path):
    runs = [tmp_path / "alone", tmp_path / "ulysses"]
    chosen = ["--attention", "varlen", "math"]
    assert here(flags_of(runs[0], text, *chosen))[0] == 0
    ranks = [flags_of(runs[1], text, *chosen, "--ulysses", 2)]
    (code, output), _ = (found[0] for found in run_ranks(several, 2, ranks))
    assert code == 0, output
    assert "attention: 2 layers by math (varlen: it runs only on CUDA)" in output
    assert_equal_runs(runs[1], runs[0])
