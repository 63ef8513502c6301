"""The supported families of Hugging Face models, one declaration each.

A declaration maps the keys of a `config.json` to fields of a `DecoderConfig`, with the defaults of
missing keys and the allowed values of others, and the names of tensors. To add a family, add a
declaration here and its row in `tests/weights/hub`; a field that `DecoderConfig` lacks must become
an option of the decoder first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trainkit.models.config import DecoderConfig
from trainkit.weights.hub.links import HFTensor
from trainkit.weights.hub.towers import BODY, Tower


@attrs.frozen(eq=False)
class Key:
    """A key whose value must be converted to that of a field.

    Attributes:
        field: The field.
        read: `read(value, config_json)` returns the field's value.
        write: `write(field_value, config)` returns the key's value, or raises `ValueError` if there
            is none.
    """

    field: str
    read: Callable[[Any, Mapping[str, Any]], Any]
    write: Callable[[Any, DecoderConfig], Any]


@attrs.frozen(eq=False, kw_only=True)
class Family:
    """One family of Hugging Face models.

    Attributes:
        model_type: Its name in a `config.json`.
        architecture: Its class in `transformers`.
        keys: The field of each key, "experts.count" for one of `Experts`; a key may set two.
        aliases: Other names of keys.
        defaults: The values of missing keys. A key without a default is required.
        fixed: The fields without a key: a value, or a function of the whole `config.json`.
        only: The allowed values of keys; the first is written.
        ignored_keys: Keys that do not change what a decoder computes.
        ropes: The supported types of rotary positions; empty for learned positions.
        needs_rope: Whether a file must have a table of rotary positions.
        windows: The fields of `Sliding` except the window, for files without `layer_types`; a text
            is the key that has the value. None if the family has no sliding windows.
        local_rope: Whether sliding layers have a rotary theta of their own.
        names: From a configuration to where each tensor is, by our names; `{i}` is the layer in
            both.
        ignored_tensors: Patterns of tensors that are no part of the model; `{layers}` is the number
            of layers.
        tower: Set if the decoder is a part of the model: the text tower of a multimodal one.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str | Key | Sequence[str]]
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = attrs.field(factory=dict)
    only: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)
    ignored_keys: frozenset[str] = frozenset()
    ropes: Sequence[str] = ("default", "linear", "llama3", "yarn")
    needs_rope: bool = False
    windows: Mapping[str, int | str] | None = None
    local_rope: bool = False
    names: Callable[[DecoderConfig], Mapping[str, HFTensor]]
    ignored_tensors: Sequence[str] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    tower: Tower | None = None


# ------------------------------------------------------------------------------------------- names


def _block(
    names: Mapping[str, str | HFTensor], *, prefix: str = "model.layers.{i}"
) -> dict[str, HFTensor]:
    """Return the names of a layer's tensors with their prefixes on both sides."""
    prefixed = {}
    for ours, theirs in names.items():
        there = theirs if isinstance(theirs, HFTensor) else HFTensor(theirs)
        prefixed[f"layers.{{i}}.{ours}"] = attrs.evolve(there, name=f"{prefix}.{there.name}")
    return prefixed


def _mlp(ours: str, theirs: str) -> dict[str, str]:
    names = [f"{x}.{kind}" for x in ("gate", "up", "down") for kind in ("weight", "bias")]
    return {f"{ours}.{x}": f"{theirs}.{x.replace('.', '_proj.')}" for x in names}


_EXPERTS = {
    "mlp.router.weight": "mlp.gate.weight",
    **{f"mlp.experts.{x}": f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down")},
}

# Our names to those of Llama, which most families share. A decoder has a part of them only, such as
# biases or norms of queries: `make_links` ignores names without a tensor.
_NAMES = {
    "embedding.weight": HFTensor("model.embed_tokens.weight"),
    "norm.weight": HFTensor("model.norm.weight"),
    "head.weight": HFTensor("lm_head.weight"),
    **_block(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "mlp_norm.weight": "post_attention_layernorm.weight",
            **{f"attention.w{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
            **{f"attention.w{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkvo"},
            **{f"attention.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
            **_mlp("mlp", "mlp"),
        }
    ),
}

# With norms on both sides, the norm after attention has the name of Llama's norm before the MLP.
_NORMS_AROUND = _block(
    {
        "attention_out_norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.weight": "pre_feedforward_layernorm.weight",
        "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
    }
)

# The order of the rows is that of the table: q, k, v; and gate before up.
_FUSED = _block(
    {
        **{
            f"attention.w{x}.weight": HFTensor("self_attn.qkv_proj.weight", fused=True)
            for x in "qkv"
        },
        **{
            f"mlp.{x}.weight": HFTensor("mlp.gate_up_proj.weight", fused=True)
            for x in ("gate", "up")
        },
    }
)

# In the formula of its experts, w2(silu(w1 x) * (w3 x)), w1 is the gate.
_MIXTRAL_EXPERTS = _block(
    {
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.gate": "block_sparse_moe.experts.{e}.w1.weight",
        "mlp.experts.down": "block_sparse_moe.experts.{e}.w2.weight",
        "mlp.experts.up": "block_sparse_moe.experts.{e}.w3.weight",
    }
)

_SHARED_EXPERTS = {
    **_EXPERTS,
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    **_mlp("mlp.shared", "mlp.shared_experts"),
}

# The compressed keys and values, and below them the one rotary key that all heads share.
_KV = "self_attn.kv_a_proj_with_mqa.weight"


# ------------------------------------------------------------------------------------------ config

_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_width",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
# Qwen: layers from `max_window_layers` on have the window, if it is in use at all.
_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
# Experts are gated by SiLU here; dense layers take any of the activations below.
_SILU = {"hidden_act": ("silu",)}
_NO_BIAS = {**_SILU, "attention_bias": (False,)}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _activation_key(tanh: str = "gelu_pytorch_tanh") -> Key:
    """Return the key of an activation; `tanh` is what GELU's approximation by tanh is called."""

    def read(value: Any, _: Mapping[str, Any]) -> str:
        if value not in _ACTIVATIONS:
            raise ValueError(f"not {' or '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    names = {"gelu_tanh": tanh}
    return Key("feed_forward.activation", read, lambda kind, _: names.get(kind, kind))


_DENSE_KEYS = {**_KEYS, "hidden_act": _activation_key()}
_DENSE_DEFAULTS = {**_DEFAULTS, "hidden_act": "silu"}
# One key of Llama's files: whether queries, keys, values and the output have biases.
_BIAS_KEYS = {**_DENSE_KEYS, "attention_bias": ("qkv_bias", "out_bias")}
_BIAS_DEFAULTS = {**_DENSE_DEFAULTS, "attention_bias": False}


# Touvron et al., "LLaMA" (2023) and "Llama 2" (2023). The families below say what differs.
_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={**_BIAS_KEYS, "mlp_bias": "feed_forward.bias"},
    defaults={**_BIAS_DEFAULTS, "mlp_bias": False},
    names=lambda _: _NAMES,
)


# Jiang et al., "Mistral 7B" (2023): sliding windows.
_MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=_DENSE_KEYS,
    defaults={**_DENSE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    windows={},  # in every layer
    names=lambda _: _NAMES,
)


# Yang et al., "Qwen2 Technical Report" (2024): biases of queries, keys and values.
_QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=_DENSE_KEYS,
    defaults=_DENSE_DEFAULTS | _WINDOWS,
    fixed={"qkv_bias": True},  # of q, k and v; no key of its config.json says so
    windows={"first": "max_window_layers"},
    names=lambda _: _NAMES,
)


# "Qwen3 Technical Report" (2025): norms of queries and keys in place of these biases.
_QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=_BIAS_KEYS,
    defaults={**_BIAS_DEFAULTS, **_WINDOWS, "head_dim": 128},
    fixed={"qk_norm": True},
    windows={"first": "max_window_layers"},
    names=lambda _: _NAMES,
)


# Abdin et al., "Phi-3 Technical Report" (2024): fused matrices, LongRoPE.
_PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=_DENSE_KEYS,
    defaults={
        **_DENSE_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
    },
    only={"attention_bias": (False,)},
    # Dropout, and keys that `transformers` does not read either.
    ignored_keys=frozenset({"resid_pdrop", "embd_pdrop", "interpolate_factor", "full_attn_mod"}),
    ropes=("default", "partial", "longrope"),
    windows={},
    # Where both have a name the right side counts: fused matrices replace Llama's.
    names=lambda _: _NAMES | _FUSED,
)


# "Gemma 2" (2024): norms on both sides of attention and MLP, soft caps, scaled embeddings.
_GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys={
        **{key: field for key, field in _BIAS_KEYS.items() if key != "hidden_act"},
        "hidden_activation": _activation_key(),
        "query_pre_attn_scalar": "query_scalar",
        "attn_logit_softcapping": "score_softcap",
        "final_logit_softcapping": "logit_softcap",
    },
    aliases={"hidden_act": "hidden_activation"},
    defaults={
        **{key: value for key, value in _BIAS_DEFAULTS.items() if key != "hidden_act"},
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    fixed={
        "norms.kind": "offset",  # scaled by 1 + weight
        "norms.place": "around",
        "embedding_scale": lambda config: config["hidden_size"] ** 0.5,
    },
    only={"use_bidirectional_attention": (None, False)},
    ignored_keys=frozenset({"cache_implementation"}),
    windows={"full_every": 2},  # sliding and full layers take turns
    names=lambda _: _NAMES | _NORMS_AROUND,
)


# "Gemma 3 Technical Report" (2025): norms of queries and keys in place of the soft cap of scores;
# five sliding layers, with a theta of their own, for each full one.
_GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys={k: field for k, field in _GEMMA2.keys.items() if k != "attn_logit_softcapping"},
    aliases=_GEMMA2.aliases,
    defaults={
        **{k: value for k, value in _GEMMA2.defaults.items() if k != "attn_logit_softcapping"},
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    fixed={**_GEMMA2.fixed, "qk_norm": True},
    only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": (None,)},
    ignored_keys=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    windows={"full_every": "sliding_window_pattern"},
    local_rope=True,
    names=lambda _: _NAMES | _NORMS_AROUND,
)


# "2 OLMo 2 Furious" (2025): norms after attention and MLP, none before.
_OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys={key: field for key, field in _BIAS_KEYS.items() if key != "head_dim"},
    defaults={**_BIAS_DEFAULTS, "rms_norm_eps": 1e-5},
    fixed={"norms.place": "after", "qk_norm": "wide"},  # one norm over all heads of q, or of k
    names=lambda _: _NAMES | _NORMS_AROUND,  # of which it has those after alone
)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("it must be a whole number")
    return value


_GPT2_PARTS = ("weight", "bias")
# GPT-2 has `Conv1D` in place of `Linear`: its matrices are [in, out].
_GPT2_QKV = HFTensor("attn.c_attn.weight", fused=True, transposed=True)
_GPT2_NAMES = {
    "embedding.weight": HFTensor("transformer.wte.weight"),
    "positions.weight": HFTensor("transformer.wpe.weight"),
    **{f"norm.{x}": HFTensor(f"transformer.ln_f.{x}") for x in _GPT2_PARTS},
    "head.weight": HFTensor("lm_head.weight"),
    **_block(
        {
            **{f"attention_norm.{x}": f"ln_1.{x}" for x in _GPT2_PARTS},
            **{f"mlp_norm.{x}": f"ln_2.{x}" for x in _GPT2_PARTS},
            **{f"attention.w{x}.weight": _GPT2_QKV for x in "qkv"},
            **{f"attention.w{x}.bias": HFTensor("attn.c_attn.bias", fused=True) for x in "qkv"},
            **{
                f"{ours}.weight": HFTensor(f"{theirs}.weight", transposed=True)
                for ours, theirs in (
                    ("attention.wo", "attn.c_proj"),
                    ("mlp.up", "mlp.c_fc"),
                    ("mlp.down", "mlp.c_proj"),
                )
            },
            "attention.wo.bias": "attn.c_proj.bias",
            "mlp.up.bias": "mlp.c_fc.bias",
            "mlp.down.bias": "mlp.c_proj.bias",
        },
        prefix="transformer.h.{i}",
    ),
}

# Radford et al., "Language models are unsupervised multitask learners" (2019): learned positions,
# LayerNorm, biases everywhere, an MLP without a gate.
_GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": "vocab_size",
        "n_embd": "width",
        "n_layer": "layers",
        "n_head": ("heads", "kv_heads"),
        "n_inner": Key(
            "mlp_width",
            lambda value, config: 4 * _whole(config["n_embd"]) if value is None else _whole(value),
            lambda width, _: width,
        ),
        "n_positions": "positions",
        "activation_function": _activation_key("gelu_new"),
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied",
    },
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
    defaults={
        "n_inner": None,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    fixed={
        "qkv_bias": True,
        "out_bias": True,
        "norms.kind": "layer",
        "feed_forward.gated": False,
        "feed_forward.bias": True,
    },
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    ignored_keys=frozenset(
        {
            "n_ctx",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "gradient_checkpointing",
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        }
    ),
    ropes=(),
    names=lambda _: _GPT2_NAMES,
    ignored_tensors=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)


# Jiang et al., "Mixtral of Experts" (2024): softmax routing to two of eight experts in each layer.
_MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        **_KEYS,
        # Every layer has experts, so `mlp_width` has no effect, but a decoder needs one.
        "intermediate_size": ("mlp_width", "experts.width"),
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.top_k",
    },
    aliases={"num_experts": "num_local_experts"},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    only=_SILU,
    windows={},
    ignored_keys=frozenset({"router_jitter_noise"}),
    names=lambda _: _NAMES | _MIXTRAL_EXPERTS,
)


def _first_layers(value: Any, _: Mapping[str, Any]) -> int:
    """Return the number of layers without experts, which must be the first ones."""
    layers: list[int] = [] if value is None else value
    if layers != [*range(len(layers))]:
        raise ValueError("layers without experts must be the first ones, 0, 1, and so on")
    return len(layers)


# "Qwen3 Technical Report" (2025): experts with softmax routing, and none that all tokens share.
_QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={
        **_KEYS,
        "num_experts": "experts.count",
        "num_experts_per_tok": "experts.top_k",
        "moe_intermediate_size": "experts.width",
        "norm_topk_prob": "experts.renormalize",
        "decoder_sparse_step": "experts.every",
        "mlp_only_layers": Key("experts.first", _first_layers, lambda first, _: [*range(first)]),
    },
    aliases={"num_local_experts": "num_experts"},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    fixed={"qk_norm": True},
    only=_NO_BIAS,
    windows={},
    names=lambda _: _NAMES | _block(_EXPERTS),
)


def _shared_experts(value: Any, config: Mapping[str, Any]) -> int:
    """Return the total width of the shared experts, from their number."""
    return _whole(value or 0) * _whole(config["moe_intermediate_size"])


def _count_shared(shared: int, config: DecoderConfig) -> int:
    assert config.experts is not None
    # DeepSeek's files state how many experts are shared; they are one MLP of their total width.
    count, rest = divmod(shared, config.experts.width)
    if rest:
        width = config.experts.width
        raise ValueError(f"the shared expert's {shared} columns are no multiple of {width}")
    return count


# DeepSeek-V3 and families with its experts: chosen by sigmoid scores, balanced by a bias.
_SIGMOID_KEYS = {
    "n_routed_experts": "experts.count",
    "num_experts_per_tok": "experts.top_k",
    "moe_intermediate_size": "experts.width",
    "n_shared_experts": Key("experts.shared", _shared_experts, _count_shared),
    "first_k_dense_replace": "experts.first",
    "norm_topk_prob": "experts.renormalize",
    "n_group": "experts.groups",
    "topk_group": "experts.groups_chosen",
    "routed_scaling_factor": "experts.scale",
}
_SIGMOID: dict[str, Any] = {
    "fixed": {"experts.scores": "sigmoid", "experts.biased": True},
    "aliases": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "ignored_tensors": ("model.layers.{layers}.**",),  # multi-token prediction
}


def _deepseek_names(config: DecoderConfig) -> dict[str, HFTensor]:
    assert config.latents is not None
    # With a rank, queries pass a latent: q_a_proj, a norm, q_b_proj. Smaller models have none.
    queries = "q_proj" if config.latents.query_rank is None else "q_b_proj"
    return _NAMES | _block(
        {
            **_SHARED_EXPERTS,
            "attention.q_latent.weight": "self_attn.q_a_proj.weight",
            "attention.q_latent_norm.weight": "self_attn.q_a_layernorm.weight",
            "attention.wq.weight": HFTensor(f"self_attn.{queries}.weight", interleaved="head_size"),
            "attention.kv_latent.weight": HFTensor(_KV, fused=True),
            "attention.k_rotary.weight": HFTensor(_KV, fused=True, interleaved="rotary_size"),
            "attention.kv_latent_norm.weight": "self_attn.kv_a_layernorm.weight",
            "attention.wkv.weight": "self_attn.kv_b_proj.weight",
        }
    )


# DeepSeek-AI, "DeepSeek-V3" (2024): multi-head latent attention; experts that are chosen by sigmoid
# scores, in groups, and shared experts for all tokens.
_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys={
        **{key: field for key, field in _KEYS.items() if key != "head_dim"},
        "q_lora_rank": "latents.query_rank",
        "kv_lora_rank": "latents.kv_rank",
        "qk_nope_head_dim": "latents.plain",
        "qk_rope_head_dim": "latents.rotary",
        "v_head_dim": "latents.values",
        **_SIGMOID_KEYS,
    },
    defaults={**_DEFAULTS, "norm_topk_prob": True, "q_lora_rank": None},
    only={
        **_NO_BIAS,
        "rms_norm_eps": (1e-6,),  # the norms of its latents always have this one
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),  # balanced by a bias of scores, without an auxiliary loss
        "num_nextn_predict_layers": (0, 1),
    },
    ignored_keys=frozenset({"ep_size", "aux_loss_alpha", "seq_aux", "head_dim", "qk_head_dim"}),
    names=_deepseek_names,
    **_SIGMOID,
)


# "GLM-4.5" (2025): the experts of DeepSeek-V3 with grouped-query attention.
_GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys={**_KEYS, **_SIGMOID_KEYS, "attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"},
    defaults={
        **_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    only={**_SILU, "num_nextn_predict_layers": (0, 1)},
    ropes=("default", "partial", "linear", "llama3"),
    names=lambda _: _NAMES | _block(_SHARED_EXPERTS),
    **_SIGMOID,
)


_GPT_OSS_JOINED = {"gate": (2, 0), "up": (2, 1)}
_GPT_OSS_NAMES = _block(
    {
        "attention.sinks": "self_attn.sinks",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.logit_bias": "mlp.router.bias",
        # All experts in one tensor, whose matrices are [in, out]; columns of `gate` and `up` take
        # turns.
        **{
            f"mlp.experts.{x}": HFTensor("mlp.experts.gate_up_proj", transposed=True, every=every)
            for x, every in _GPT_OSS_JOINED.items()
        },
        **{
            f"mlp.experts.{x}_bias": HFTensor("mlp.experts.gate_up_proj_bias", every=every)
            for x, every in _GPT_OSS_JOINED.items()
        },
        "mlp.experts.down": HFTensor("mlp.experts.down_proj", transposed=True),
        "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
    }
)

# "gpt-oss-120b & gpt-oss-20b Model Card" (OpenAI, 2025): attention sinks, windows in every other
# layer, experts with biases and clamped inner values.
_GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys={
        **_KEYS,
        "intermediate_size": ("mlp_width", "experts.width"),
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.top_k",
        "attention_bias": ("qkv_bias", "out_bias"),
        "swiglu_limit": "experts.clamp",
        "swiglu_alpha": "experts.sigmoid_scale",
    },
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults={
        **_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "sliding_window": 128,
    },
    fixed={"attention_sinks": True, "experts.bias": True},
    only=_SILU,
    ignored_keys=frozenset({"initial_context_length"}),
    ropes=("default", "linear", "llama3", "yarn"),
    needs_rope=True,
    windows={"full_every": 2},
    names=lambda _: _NAMES | _GPT_OSS_NAMES,
)


# ------------------------------------------------------------------------------------------ towers

# In the `config.json` of every multimodal model.
_OUTER_KEYS = frozenset({"vision_config", "image_token_id", "image_token_index", "video_token_id"})


def _make_tower(
    text: Family,
    *,
    model_type: str,
    architecture: str,
    tensors: Sequence[str],
    keys: Sequence[str] = (),
    rope_keys: Sequence[str] = (),
    defaults: Mapping[str, Any],
) -> Family:
    """Return the family of multimodal models whose text tower is a decoder of the family `text`.

    Args:
        text: The family of the decoder; its `model_type` is that of the `text_config`.
        model_type: The name of the whole model in its `config.json`.
        architecture: Its class in `transformers`.
        tensors: Patterns of the tensors that are not the decoder's, under the names of any release.
        keys: Keys of the `config.json` besides those of all multimodal models.
        rope_keys: See `Tower`.
        defaults: The values of missing keys that are others than those of `text`.
    """

    def name(there: str) -> str:
        return BODY + there.removeprefix("model.") if there.startswith("model.") else there

    def names(config: DecoderConfig) -> dict[str, HFTensor]:
        return {k: attrs.evolve(x, name=name(x.name)) for k, x in text.names(config).items()}

    return attrs.evolve(
        text,
        model_type=model_type,
        architecture=architecture,
        defaults={**text.defaults, **defaults},
        names=names,
        ignored_tensors=[*map(name, text.ignored_tensors), *tensors],
        tower=Tower(
            model_type=text.model_type,
            keys=_OUTER_KEYS.union(keys),
            rope_keys=frozenset(rope_keys),
            tensors=tensors,
        ),
    )


# The published folders of 4B, 12B and 27B leave out what is the default of `transformers`.
_GEMMA3_TOWER = _make_tower(
    attrs.evolve(
        _GEMMA3,
        keys={k: x for k, x in _GEMMA3.keys.items() if k != "final_logit_softcapping"},
        # Its class in `transformers` does not read this one.
        only={**_GEMMA3.only, "final_logit_softcapping": (None,)},
    ),
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    tensors=(
        "vision_tower.**",
        "multi_modal_projector.**",
        "model.vision_tower.**",
        "model.multi_modal_projector.**",
    ),
    keys=("boi_token_index", "eoi_token_index", "mm_tokens_per_image"),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
)

# "Qwen3-VL Technical Report" (2025). Its rotary positions have three sections, for time, height and
# width: in a text all three are the index of the token.
_QWEN3_VL = _make_tower(
    attrs.evolve(_QWEN3, model_type="qwen3_vl_text", windows=None),
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    tensors=("visual.**", "model.visual.**"),
    keys=("vision_start_token_id", "vision_end_token_id"),
    rope_keys=("mrope_section", "mrope_interleaved"),
    defaults={
        "num_key_value_heads": 32,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 128_000,
    },
)


FAMILIES = (
    _LLAMA,
    _MISTRAL,
    _QWEN2,
    _QWEN3,
    _PHI3,
    _GEMMA2,
    _GEMMA3,
    _OLMO2,
    _GPT2,
    _MIXTRAL,
    _QWEN3_MOE,
    _DEEPSEEK_V3,
    _GLM4_MOE,
    _GPT_OSS,
    _GEMMA3_TOWER,
    _QWEN3_VL,
)
"""Every family; of those that compute the same, the first is what is written."""
