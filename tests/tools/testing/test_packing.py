"""Packed documents compared with each alone: leaks are found and measured, and not trained."""

import sys
from functools import partial

import attrs
import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit import losses
from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.models import build_decoder
from trainkit.parallel.packing_leaks import leaks, refuse_leaks
from trainkit.tools.testing import LayoutCase, PackingError, certify, check_packing
from trainkit.tools.testing.builtin import CONFIG, decoder_batch
from trainkit.tools.testing.certificate import format_markdown, format_text
from trainkit.types import ConfigError

# ------------------------------------------------------------------------------- models of our own


class Model(nn.Module):
    """An embedding, `mix_bits` over the row, and a head."""

    def __init__(self, mix):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.mix = mix

    def forward(self, ids, document_ids):
        return self.head(self.mix(self.embedding(ids), document_ids))


def mean_before(x, _document_ids):
    """Keep a state over the row: a mean of all tokens so far."""
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)


def mean_in_document(x, document_ids):
    same = (document_ids.unsqueeze(1) == document_ids.unsqueeze(2)).tril().to(x)
    return same @ x / same.sum(-1, keepdim=True)


class Straight(torch.autograd.Function):
    """The input, whose gradient is the sum of those of later tokens, of all documents."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, grad):
        return grad.flip(1).cumsum(1).flip(1)


def gradient_of_the_row(x, document_ids):
    return Straight.apply(mean_in_document(x, document_ids))


def call(model, batch):
    return model(batch["input_ids"], batch["document_ids"])


def packed_rows(lengths=(3, 5, 8)):
    """Return two rows of some documents, and as many rows of one document each."""
    length = sum(lengths)
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[:, list(torch.tensor(lengths).cumsum(0)[:-1])] = True
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(0))
    return batch_from_rows(ids, starts=starts)


def test_documents_are_compared_alone_and_the_model_stays_as_it_is():
    model = Model(mean_in_document)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = check_packing(model, call, batch=packed_rows())
    assert (found.documents, found.dtype) == (6, torch.float64)
    assert max(found.output, found.gradient) < 1e-14
    assert model.training
    assert model.head.weight.grad is None
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_a_leak_is_named_with_its_document_and_its_size():
    with pytest.raises(
        PackingError, match=r"Model computes document 1 of row 0 .5 tokens"
    ) as error:
        check_packing(Model(mean_before), call, batch=packed_rows())
    assert "4 of 6 documents are off" in str(error.value)
    assert "max_documents=1" in str(error.value)
    assert error.value.got > 0.01
    assert check_packing(Model(mean_before), call, batch=packed_rows((16,))).documents == 2


def test_a_backward_pass_that_mixes_documents_is_found_though_the_outputs_are_equal():
    with pytest.raises(PackingError, match=r"other gradients .* 'embedding.weight'"):
        check_packing(Model(gradient_of_the_row), call, batch=packed_rows())


def test_without_a_batch_one_is_made_for_the_first_embedding():
    with pytest.raises(PackingError, match="document 1 of row 0"):
        check_packing(Model(mean_before), call)
    assert check_packing(Model(mean_in_document), call).documents == 6
    with pytest.raises(ConfigError, match=r"has no nn.Embedding"):
        check_packing(nn.Linear(1, 1), call)
    with pytest.raises(ConfigError, match="call must return a floating point tensor"):
        check_packing(Model(mean_before), lambda _, batch: batch["input_ids"])


def test_padding_inside_of_documents_is_not_compared():
    batch = decoder_batch(0)  # aligned to 16, with padding
    assert (batch.document_ids < -1).any()
    model = build_decoder(attrs.evolve(CONFIG, layers=1), seed=0)
    assert check_packing(model, batch=batch).output < 1e-13


# ------------------------------------------------------------------------------- transformers


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_chunk_size": 16, "layer_types": ["mamba", "attention"], "pad_token_id": 0}
OWN_MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
OWN_MAMBA |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
SHARED = {"shared_expert_intermediate_size": 16}
LEAKING = {
    "Qwen3Next": ("Qwen3NextConfig", HEADS | DELTA | EXPERTS | SHARED),
    "Qwen3_5": ("Qwen3_5TextConfig", HEADS | DELTA),
    "GraniteMoeHybrid": ("GraniteMoeHybridConfig", HEADS | MAMBA | {"num_local_experts": 0}),
    "Mamba2": ("Mamba2Config", OWN_MAMBA),
}
SOUND = {"Llama": ("LlamaConfig", HEADS)}


def made(kind):
    transformers = pytest.importorskip("transformers")
    name, more = (LEAKING | SOUND)[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name).from_dict(SIZES | more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def hf_call(model, batch):
    """Enter a batch as the how-to does (Mamba has no positions)."""
    ids, positions = batch["input_ids"], batch["position_ids"]
    if "Mamba2" in type(model).__name__:
        return model(input_ids=ids, use_cache=False).logits
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("kind", LEAKING)
def test_hybrids_of_transformers_leak_and_are_not_trained_packed(kind):
    model, batch = made(kind), packed_rows((24, 8))
    with pytest.raises(PackingError, match=f"{kind}ForCausalLM computes document 1 of row 0"):
        check_packing(model, hf_call)
    with pytest.raises(ConfigError, match=r"keeps a state over the row.*max_documents=1"):
        tk.forward_backward(
            model, [batch], losses.next_token, denominator=torch.tensor(62), call=hf_call
        )
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ConfigError, match=r"evaluate: .*keeps a state over the row"):
        tk.evaluate(model, [batch], losses.next_token, axis=solo_parallel().loss, call=hf_call)
    alone = packed_rows((32,))  # the cure
    assert (
        tk.forward_backward(
            model, [alone], losses.next_token, denominator=torch.tensor(62), call=hf_call
        )["loss"]
        > 0
    )


def call_with_bounds(model, batch):
    """Enter all documents in one row, with their bounds, as the how-to does."""
    rows, length = batch["input_ids"].shape
    ends = batch["spans"].cu_seqlens
    document = torch.repeat_interleave(ends.diff()).int()
    output = model(
        input_ids=batch["input_ids"].view(1, -1),
        position_ids=batch["position_ids"].view(1, -1),
        seq_idx=document.view(1, -1),
        cu_seq_lens_q=ends,
        use_cache=False,
    )
    return output.logits.view(rows, length, -1)


@pytest.mark.parametrize("kind", ["Qwen3Next", "Qwen3_5"])
def test_the_bounds_of_documents_reach_the_kernels_of_a_hybrid(kind, monkeypatch):
    """Functions that obey them, in place of kernels for CUDA, compute each document alone."""
    model = made(kind)
    module = sys.modules[type(model).__module__]
    convolve, apply_rule = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule

    def convolve_documents(x, *weights, seq_idx, **kwargs):
        kwargs.pop("cu_seq_lens_q")
        parts = x.split(seq_idx.flatten().bincount().tolist(), -1)
        return torch.cat([convolve(part, *weights, **kwargs) for part in parts], -1)

    def apply_to_documents(*qkv, g, beta, cu_seqlens, **kwargs):
        kwargs.pop("seq_idx")
        parts = zip(*(x.split(cu_seqlens.diff().tolist(), 1) for x in (*qkv, g, beta)), strict=True)
        out = [apply_rule(q, k, v, g=g, beta=beta, **kwargs)[0] for q, k, v, g, beta in parts]
        return torch.cat(out, 1), None

    monkeypatch.setattr(module, "causal_conv1d_fn", convolve_documents)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", apply_to_documents)
    assert check_packing(model, call_with_bounds).documents == 6
    # transformers 5.24 refuses bounds that its own function would ignore.
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", apply_rule)
    with pytest.raises((PackingError, ValueError), match=r"document 1 of row 0|sequences apart"):
        check_packing(model, call_with_bounds)


def test_llama_is_trained_packed():
    model = made("Llama")
    assert check_packing(model, hf_call).output < 1e-12
    assert (
        tk.forward_backward(
            model, [packed_rows()], losses.next_token, denominator=torch.tensor(62), call=hf_call
        )["loss"]
        > 0
    )


# ------------------------------------------------------------------------------- how it is tried


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_is_found_by_trying_in_any_dtype_and_batch(dtype):
    for mix, expected in ((mean_before, True), (mean_in_document, False)):
        model = Model(mix).to(dtype).train()
        assert leaks(model, packed_rows(), call) == expected
        assert leaks(model, dict(packed_rows()), call) == expected
        same = attrs.evolve(packed_rows(), input_ids=torch.full((2, 16), 63))
        assert leaks(model, same, call) == expected
        assert model.training


def test_a_model_is_tried_once_and_again_for_another_call_only_if_it_leaks():
    calls = []

    def counted(model, batch):
        calls.append(len(batch["input_ids"]))
        return call(model, batch)

    batch = packed_rows()
    run = partial(
        tk.forward_backward,
        microbatches=[batch],
        loss=losses.next_token,
        denominator=torch.tensor(30),
    )
    sound = Model(mean_in_document)
    for _ in range(2):
        run(sound, call=counted)
    assert len(calls) == 3 + 2
    leaky = Model(mean_before)
    for _ in range(2):
        with pytest.raises(ConfigError, match="keeps a state"):
            run(leaky, call=counted)
    assert len(calls) == 3 + 2 + 3
    leaky.mix = mean_in_document  # as another call would do
    run(leaky, call=call)


def test_a_batch_that_says_no_documents_leaves_the_model_to_be_tried_with_a_later_one():
    """A short batch, or one without spans, shows nothing; the model must not count as sound."""
    leaky = Model(mean_before)
    packed = packed_rows()
    run = partial(
        tk.forward_backward, leaky, loss=losses.next_token, denominator=torch.tensor(30), call=call
    )
    names = ("input_ids", "labels", "position_ids", "document_ids")
    silent = {name: packed[name] for name in names}
    run(microbatches=[silent])
    for batches in ([packed], [silent, packed]):
        with pytest.raises(ConfigError, match="keeps a state"):
            run(microbatches=batches)
    del silent["document_ids"]  # of which nobody knows whether it is packed
    refuse_leaks("forward_backward", leaky, [silent], call)


def test_rows_of_one_document_are_not_read_on_a_device():
    leaky = Model(mean_before)
    with pytest.raises(ConfigError, match="keeps a state"):
        refuse_leaks("forward_backward", leaky, [packed_rows()], call)
    alone = packed_rows((16,))
    unreadable = attrs.evolve(alone, document_ids=alone.document_ids.to("meta"))
    refuse_leaks("forward_backward", leaky, [unreadable], call)


def test_what_other_rows_change_is_rounding_and_no_leak():
    """Experts compute other numbers of tokens, so what is the same is rounded otherwise."""

    def rounded(x, document_ids):
        noise = x.detach().sum().mul(1e4).sin() * 1e-2  # a function of the whole batch
        return mean_in_document(x, document_ids) + noise

    assert not leaks(Model(rounded), packed_rows(), call)


# ------------------------------------------------------------------------------- the certificate


def leaking_model():
    return Model(mean_before)


def sound_model():
    return Model(mean_in_document)


def plan(_ps, _case):
    return []


def rows_of_one(_step):
    return packed_rows((16,))


def rows_of_three(_step):
    return packed_rows()


@pytest.mark.parametrize("model", [sound_model, leaking_model])
def test_the_first_row_of_a_certificate_compares_packed_documents(model):
    packed = certify(
        model, rows_of_three, [LayoutCase()], plan=plan, loss=losses.next_token, call=call, steps=1
    )
    lines = format_text(packed).splitlines()
    assert lines[1].startswith("packed documents")
    assert "| packed documents |" in format_markdown(packed)
    if model is sound_model:
        assert packed.ok, format_text(packed)
        assert packed.packing.loss < 1e-14
        return
    assert not packed.ok
    assert packed.packing in packed.red
    assert "RED: packed documents: check_packing: Model computes document 1" in format_text(packed)
    assert packed.rows[0].error.startswith("not trained")
    assert certify(
        model, rows_of_one, [LayoutCase()], plan=plan, loss=losses.next_token, call=call, steps=1
    ).ok  # one document a row
