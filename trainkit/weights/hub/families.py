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

from trainkit.models.config import DecoderConfig, FullHeads
from trainkit.weights.hub.links import HFTensor
from trainkit.weights.hub.towers import BODY, Tower

KINDS = ("full_attention", "sliding_attention")
"""The names of full and of sliding layers, in `layer_types` and in `rope_parameters`."""

DELTA = "linear_attention"
"""The name of layers with the gated delta rule in `layer_types`."""


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
        models: The models that people know it by, for messages and tables.
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
        local_rope: The key of the rotary theta of sliding layers, whose wavelengths are then not
            scaled; None if all layers have the same.
        has_delta: Whether layers of type "linear_attention" are delta layers.
        names: From a configuration to where each tensor is, by our names; `{i}` is the layer in
            both.
        ignored_tensors: Patterns of tensors that are no part of the model; `{layers}` is the number
            of layers.
        tower: Set if the decoder is a part of the model: the text tower of a multimodal one.
    """

    model_type: str
    models: str = ""
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
    local_rope: str | None = None
    has_delta: bool = False
    names: Callable[[DecoderConfig], Mapping[str, HFTensor]]
    ignored_tensors: Sequence[str] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    tower: Tower | None = None

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The entries that `layer_types` may have."""
        return (KINDS[0], *KINDS[1:] * (self.windows is not None), *[DELTA] * self.has_delta)

    @property
    def known_keys(self) -> frozenset[str]:
        """The keys of a `config.json` that are its own."""
        own = {*self.keys, *self.aliases, *self.only, *self.defaults, *self.ignored_keys}
        return frozenset(own)


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
    "relu2": "relu2",
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
    models="Llama 2 and 3, TinyLlama, SmolLM2",
    architecture="LlamaForCausalLM",
    keys={**_BIAS_KEYS, "mlp_bias": "feed_forward.bias"},
    defaults={**_BIAS_DEFAULTS, "mlp_bias": False},
    names=lambda _: _NAMES,
)


# Jiang et al., "Mistral 7B" (2023): sliding windows.
_MISTRAL = Family(
    model_type="mistral",
    models="Mistral 7B, Mistral Nemo",
    architecture="MistralForCausalLM",
    keys=_DENSE_KEYS,
    defaults={**_DENSE_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    windows={},  # in every layer
    names=lambda _: _NAMES,
)


# Yang et al., "Qwen2 Technical Report" (2024): biases of queries, keys and values.
_QWEN2 = Family(
    model_type="qwen2",
    models="Qwen2, Qwen2.5, QwQ",
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
    models="Qwen3",
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
    models="Phi 3, Phi 4",
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
    models="Gemma 2",
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


_GEMMA3_ONLY = frozenset({"query_pre_attn_scalar", "sliding_window_pattern"})

# "Gemma 3 Technical Report" (2025): norms of queries and keys in place of the soft cap of scores;
# five sliding layers, with a theta of their own, for each full one.
_GEMMA3 = Family(
    model_type="gemma3_text",
    models="Gemma 3 (1B, 270M)",
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
    local_rope="rope_local_base_freq",
    names=lambda _: _NAMES | _NORMS_AROUND,
)


# "2 OLMo 2 Furious" (2025): norms after attention and MLP, none before.
_OLMO2 = Family(
    model_type="olmo2",
    models="OLMo 2",
    architecture="Olmo2ForCausalLM",
    keys={key: field for key, field in _BIAS_KEYS.items() if key != "head_dim"},
    defaults={**_BIAS_DEFAULTS, "rms_norm_eps": 1e-5},
    fixed={"norms.place": "after", "qk_norm": "wide"},  # one norm over all heads of q, or of k
    names=lambda _: _NAMES | _NORMS_AROUND,  # of which it has those after alone
)


# "Olmo 3" (2025): three sliding layers, whose positions are not scaled, for each full one.
_OLMO3 = attrs.evolve(
    _OLMO2,
    model_type="olmo3",
    models="OLMo 3",
    architecture="Olmo3ForCausalLM",
    defaults={**_OLMO2.defaults, "rope_theta": 500_000.0, "sliding_window": 4096},
    windows={"full_every": 4},
    local_rope="rope_theta",
)


def _read_no_rope(value: Any, config: Mapping[str, Any]) -> int | None:
    """Return the interval of layers without positions, from a list of whether each has them."""
    layers = config["num_hidden_layers"]
    if value is None:
        return _whole(config["no_rope_layer_interval"])
    bare = [i for i, has_rope in enumerate(value[:layers]) if not has_rope]
    every = bare[0] + 1 if bare else None
    if len(value) < layers or (every and bare != [*range(every - 1, layers, every)]):
        raise ValueError(
            f"a list of 1 and 0 for {layers} layers, in which every n-th is 0, is supported"
        )
    return every


def _write_no_rope(_: int | None, config: DecoderConfig) -> list[int]:
    return [int(i not in config.no_rope_layers) for i in range(config.layers)]


# Bakouch et al., "SmolLM3" (2025): every fourth layer has no positions.
_SMOLLM3 = Family(
    model_type="smollm3",
    models="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    keys={
        **_LLAMA.keys,
        "no_rope_layers": Key("no_rope_every", _read_no_rope, _write_no_rope),
    },
    defaults={
        **_LLAMA.defaults,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    },
    # There the windows would be in the layers without positions.
    only={"use_sliding_window": (False,)},
    names=lambda _: _NAMES,
)


# Scores have a factor there, and are divided by a root here. The square is rounded, so that a
# factor comes back as itself.
_SCORE_FACTOR = Key(
    "query_scalar",
    lambda factor, _: float(f"{_number(factor) ** -2:.12g}"),
    lambda scalar, _: scalar**-0.5,
)

# "Granite 3.0 Language Models" (2024): factors of embeddings, scores, branches and logits.
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
    "attention_multiplier": _SCORE_FACTOR,
}
_GRANITE = Family(
    model_type="granite",
    models="Granite 3",
    architecture="GraniteForCausalLM",
    keys={**_LLAMA.keys, **_GRANITE_KEYS},
    defaults={**_LLAMA.defaults, **dict.fromkeys(_GRANITE_KEYS, 1.0)},
    names=lambda _: _NAMES,
)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError("it must be a number above 0")
    return value


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
    models="GPT-2",
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
    models="Mixtral",
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


# The experts of a layer are one tensor, with the gates above the others.
_GRANITE_INPUTS = HFTensor("block_sparse_moe.input_linear.weight", fused=True, rows=1)
_GRANITE_EXPERTS = _block(
    {
        "mlp.router.weight": "block_sparse_moe.router.layer.weight",
        "mlp.experts.gate": _GRANITE_INPUTS,
        "mlp.experts.up": _GRANITE_INPUTS,
        "mlp.experts.down": "block_sparse_moe.output_linear.weight",
    }
)

# "Granite 3.0 Language Models" (2024): experts with softmax routing in each layer.
_GRANITE_MOE = Family(
    model_type="granitemoe",
    models="Granite 3 MoE",
    architecture="GraniteMoeForCausalLM",
    keys={
        **_KEYS,
        **_GRANITE_KEYS,
        "attention_bias": ("qkv_bias", "out_bias"),
        "intermediate_size": ("mlp_width", "experts.width"),
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.top_k",
    },
    defaults={
        **_DEFAULTS,
        **dict.fromkeys(_GRANITE_KEYS, 1.0),
        "attention_bias": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    only=_SILU,
    names=lambda _: _NAMES | _GRANITE_EXPERTS,
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
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
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


# The norms of latents always have this epsilon.
_LATENT_SIGMOID: dict[str, Any] = {
    **_SIGMOID,
    "fixed": {**_SIGMOID["fixed"], "latents.norm_eps": 1e-6},
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
    models="DeepSeek-V3, DeepSeek-R1",
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
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),  # balanced by a bias of scores, without an auxiliary loss
        "num_nextn_predict_layers": (0, 1),
    },
    ignored_keys=frozenset({"ep_size", "aux_loss_alpha", "seq_aux", "head_dim", "qk_head_dim"}),
    names=_deepseek_names,
    **_LATENT_SIGMOID,
)


def _read_sparse(value: Any, config: Mapping[str, Any]) -> int:
    """Return the first layer with experts, from the list of each layer's kind of MLP."""
    if value is None:
        if config.get("first_k_dense_replace", 1) != 1:
            raise ValueError("without it the first layer alone is dense in transformers")
        return 1
    layers = config["num_hidden_layers"]
    first = value.index("sparse") if "sparse" in value else len(value)
    if value != ["dense"] * first + ["sparse"] * (layers - first):
        raise ValueError(f"{layers} layers, dense ones and then sparse ones, are supported")
    return first


# "GLM-4.7-Flash" (2026): the layers of DeepSeek-V3.
_GLM4_MOE_LITE = attrs.evolve(
    _DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    architecture="Glm4MoeLiteForCausalLM",
    keys={
        **{key: x for key, x in _DEEPSEEK_V3.keys.items() if key != "first_k_dense_replace"},
        "mlp_layer_types": Key(
            "experts.first",
            _read_sparse,
            lambda first, config: ["dense"] * first + ["sparse"] * (config.layers - first),
        ),
    },
    defaults={
        **_DEEPSEEK_V3.defaults,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "n_shared_experts": 1,
    },
    ignored_keys=_DEEPSEEK_V3.ignored_keys | {"first_k_dense_replace"},
)


# "GLM-4.5" (2025): the experts of DeepSeek-V3 with grouped-query attention.
_GLM4_MOE = Family(
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.6, GLM-4.7",
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
    models="gpt-oss",
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


# Layers with the gated delta rule; those with attention are gated too.
_DELTA_KEYS = {
    **_KEYS,
    "linear_num_key_heads": "delta.key_heads",
    "linear_num_value_heads": "delta.value_heads",
    "linear_key_head_dim": "delta.key_size",
    "linear_value_head_dim": "delta.value_size",
    "linear_conv_kernel_dim": "delta.conv",
    "full_attention_interval": "delta.full_every",
}
_SHARED_GATE_KEYS = {
    "num_experts": "experts.count",
    "num_experts_per_tok": "experts.top_k",
    "shared_expert_intermediate_size": "experts.shared",
}
_DELTA: dict[str, Any] = {
    "aliases": {"num_local_experts": "num_experts"},
    "only": {
        **_NO_BIAS,
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),  # of the state, which is in at least fp32 here
        "output_gate_type": (None, "swish"),
    },
    # YaRN's factor of scores would hold for the rotary part of a head alone.
    "ropes": ("default", "partial", "linear", "llama3", "mrope"),
    "has_delta": True,
    "ignored_keys": frozenset(
        # The last two are about dense layers, in files of models where all layers or none are.
        {
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
            "intermediate_size",
            "mlp_only_layers",
        }
    ),
    "ignored_tensors": ("mtp.**",),  # multi-token prediction
}
_DELTA_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_DELTA_FIXED = {"qk_norm": True, "norms.kind": "offset", "attention_gate": True}
_SHARED_GATE = _block(
    {
        **_EXPERTS,
        **_mlp("mlp.shared", "mlp.shared_expert"),
        "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    }
)


def _delta_names(
    config: DecoderConfig, products: Mapping[str, str | HFTensor]
) -> dict[str, HFTensor]:
    """Return all names of a family with delta layers, from those of the matrices of its input."""
    conv = HFTensor("linear_attn.conv1d.weight", fused=True, unit=1)
    delta = _block(
        {
            **products,
            "attention.wa.bias": "linear_attn.dt_bias",
            "attention.wa.log_rate": "linear_attn.A_log",
            **{f"attention.{x}_conv.weight": conv for x in "qkv"},
            "attention.gated_norm.weight": "linear_attn.norm.weight",
            "attention.wo.weight": "linear_attn.out_proj.weight",
        }
    )
    # The rows of one head, then its gate.
    gated = HFTensor("self_attn.q_proj.weight", fused=True, groups=config.heads)
    attention = _block({f"attention.w{x}.weight": gated for x in "qg"})
    # A delta layer's matrices have the names of attention's here, and others there.
    own = {
        name.replace("{i}", str(i)): attrs.evolve(there, name=there.name.replace("{i}", str(i)))
        for i in config.delta_layers
        for name, there in delta.items()
    }
    return _NAMES | attention | _SHARED_GATE | own


def _qwen3_next_names(config: DecoderConfig) -> dict[str, HFTensor]:
    # For each key head its queries and keys, and the values and gates of its value heads.
    groups = 1 if config.delta is None else config.delta.key_heads
    heads = HFTensor("linear_attn.in_proj_qkvz.weight", fused=True, groups=groups)
    decays = HFTensor("linear_attn.in_proj_ba.weight", fused=True, groups=groups)
    products = {f"attention.w{x}.weight": heads for x in "qkvg"}
    return _delta_names(config, products | {f"attention.w{x}.weight": decays for x in "ba"})


# "Qwen3-Next" (2025): three layers with the gated delta rule to one with attention, experts with a
# gated shared one.
_QWEN3_NEXT = Family(
    model_type="qwen3_next",
    models="Qwen3-Next-80B-A3B",
    architecture="Qwen3NextForCausalLM",
    keys={
        **_DELTA_KEYS,
        **_SHARED_GATE_KEYS,
        "moe_intermediate_size": "experts.width",
        "norm_topk_prob": "experts.renormalize",
        "decoder_sparse_step": "experts.every",
        "mlp_only_layers": Key("experts.first", _first_layers, lambda first, _: [*range(first)]),
    },
    defaults={
        **_DELTA_DEFAULTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    fixed={**_DELTA_FIXED, "experts.shared_gate": True},
    names=_qwen3_next_names,
    **_DELTA,
)


def _qwen3_5_names(config: DecoderConfig) -> dict[str, HFTensor]:
    heads = HFTensor("linear_attn.in_proj_qkv.weight", fused=True)
    products = {f"attention.w{x}.weight": heads for x in "qkv"}
    others = {"g": "z", "b": "b", "a": "a"}
    return _delta_names(
        config,
        products
        | {f"attention.w{x}.weight": f"linear_attn.in_proj_{y}.weight" for x, y in others.items()},
    )


# "Qwen3.5" (2026): the layers of Qwen3-Next, dense or with experts in every layer.
_QWEN3_5 = Family(
    model_type="qwen3_5_text",
    models="Qwen3.5",
    architecture="Qwen3_5ForCausalLM",
    keys=_DELTA_KEYS,
    defaults={**_DELTA_DEFAULTS, "num_key_value_heads": 4},
    fixed=_DELTA_FIXED,
    names=_qwen3_5_names,
    **_DELTA,
)
_QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    models="Qwen3.5-35B-A3B",
    architecture="Qwen3_5MoeForCausalLM",
    keys={
        **{key: field for key, field in _DELTA_KEYS.items() if key != "intermediate_size"},
        **_SHARED_GATE_KEYS,
        "moe_intermediate_size": ("mlp_width", "experts.width"),
    },
    defaults=_DELTA_DEFAULTS,
    fixed={**_DELTA_FIXED, "experts.shared_gate": True},
    names=_qwen3_5_names,
    **_DELTA,
)


def _read_full_heads(_: Any, values: Mapping[str, Any]) -> FullHeads:
    """Return the heads of full layers, from either form of the file."""
    size, kv_heads = values["global_head_dim"], values["num_key_value_heads"]
    tied_values = values["attention_k_eq_v"]
    if not isinstance(tied_values, bool):
        raise TypeError("attention_k_eq_v must be true or false")
    if tied_values and values["num_global_key_value_heads"] is not None:
        kv_heads = values["num_global_key_value_heads"]
    # `transformers` 5.24 writes these, for each full layer by its index, in place of the two keys.
    layers = values["per_layer_config"]
    if layers is not None:
        full = [str(i) for i, x in enumerate(values["layer_types"]) if x == "full_attention"]
        changed = [layers[i] for i in full] if {*layers} == {*full} else []
        if not changed or any(x != changed[0] for x in changed):
            raise ValueError("it must have the same entries for each full layer, and no others")
        size = changed[0].get("head_dim", values["head_dim"])
        kv_heads = changed[0].get("num_key_value_heads", values["num_key_value_heads"])
        if changed[0].keys() - {"head_dim", "num_key_value_heads"}:
            raise ValueError("it must have head_dim and num_key_value_heads alone")
    return FullHeads(size=_whole(size), kv_heads=_whole(kv_heads), tied_values=tied_values)


def _write_full_heads(_: Any, config: DecoderConfig) -> dict[str, Any]:
    if config.full_heads is None:
        raise ValueError("the heads of all its layers are alike")
    full = {"head_dim": config.full_heads.size, "num_key_value_heads": config.full_heads.kv_heads}
    return {str(i): full for i in range(config.layers) if i not in config.sliding_layers}


def _write_tied_values(_: Any, config: DecoderConfig) -> bool:
    return config.full_heads is not None and config.full_heads.tied_values


# Gemma 4 (2026), as the dense model of 31B is: full layers have wider heads and fewer of keys,
# whose projection is also the values'; values are normalized; scores are not divided. The smaller
# ones have an embedding for each layer and layers that share keys and values, and 26B-A4B has
# experts next to an MLP in each layer: these keys are refused.
_GEMMA4 = Family(
    model_type="gemma4_text",
    models="Gemma 4, text alone",
    architecture="Gemma4ForCausalLM",
    keys={
        **{k: x for k, x in _GEMMA3.keys.items() if k != "query_pre_attn_scalar"},
        "per_layer_config": Key("full_heads", _read_full_heads, _write_full_heads),
        "attention_k_eq_v": Key("full_heads", _read_full_heads, _write_tied_values),
    },
    defaults={
        **{k: x for k, x in _GEMMA3.defaults.items() if k not in _GEMMA3_ONLY},
        "sliding_window": 512,
        "per_layer_config": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "rope_local_base_freq": 10_000.0,
    },
    fixed={
        "norms.place": "around",
        "qk_norm": True,
        "value_norm": True,
        "layer_scales": True,
        "query_scalar": 1.0,
        "embedding_scale": _GEMMA2.fixed["embedding_scale"],
    },
    only={
        "hidden_size_per_layer_input": (0, None),
        "num_kv_shared_layers": (0,),
        "enable_moe_block": (False,),
        # Of the tokens of an image; a text has none.
        "use_bidirectional_attention": (None, "vision"),
    },
    ignored_keys=frozenset(
        {
            "vocab_size_per_layer_input",
            "use_double_wide_mlp",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
        }
    ),
    ropes=("default", "proportional"),
    needs_rope=True,
    windows={"full_every": 6},
    local_rope="rope_local_base_freq",
    names=lambda _: _NAMES | _NORMS_AROUND | _block({"layer_scale": "layer_scalar"}),
)


# ------------------------------------------------------------------------------------------ towers

# In the `config.json` of every multimodal model.
_OUTER_KEYS = frozenset({"vision_config", "image_token_id", "image_token_index", "video_token_id"})


def _make_tower(
    text: Family,
    *,
    model_type: str,
    models: str,
    architecture: str,
    tensors: Sequence[str],
    keys: Sequence[str] = (),
    defaults: Mapping[str, Any],
) -> Family:
    """Return the family of multimodal models whose text tower is a decoder of the family `text`.

    Args:
        text: The family of the decoder; its `model_type` is that of the `text_config`.
        model_type: The name of the whole model in its `config.json`.
        models: The models that people know it by.
        architecture: Its class in `transformers`.
        tensors: Patterns of the tensors that are not the decoder's, under the names of any release.
        keys: Keys of the `config.json` besides those of all multimodal models.
        defaults: The values of missing keys that are others than those of `text`.
    """

    def name(there: str) -> str:
        return BODY + there.removeprefix("model.") if there.startswith("model.") else there

    def names(config: DecoderConfig) -> dict[str, HFTensor]:
        return {k: attrs.evolve(x, name=name(x.name)) for k, x in text.names(config).items()}

    return attrs.evolve(
        text,
        model_type=model_type,
        models=models,
        architecture=architecture,
        defaults={**text.defaults, **defaults},
        names=names,
        ignored_tensors=[*map(name, text.ignored_tensors), *tensors],
        tower=Tower(
            model_type=text.model_type,
            keys=_OUTER_KEYS.union(keys),
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
    models="Gemma 3 (4B, 12B, 27B)",
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

_GEMMA4_TOWER = _make_tower(
    _GEMMA4,
    model_type="gemma4",
    models="Gemma 4 (31B)",
    architecture="Gemma4ForConditionalGeneration",
    tensors=(
        "model.vision_tower.**",
        "model.embed_vision.**",
        "model.audio_tower.**",
        "model.embed_audio.**",
        "vision_tower.**",
        "embed_vision.**",
        "audio_tower.**",
        "embed_audio.**",
    ),
    keys=(
        "audio_config",
        "audio_token_id",
        "boa_token_id",
        "boi_token_id",
        "eoa_token_index",
        "eoa_token_id",
        "eoi_token_id",
        "vision_soft_tokens_per_image",
    ),
    defaults={"max_position_embeddings": 131_072},
)

# "Qwen3-VL Technical Report" (2025). Its rotary positions have three sections, for time, height and
# width: in a text all three are the index of the token.
_QWEN3_VL = _make_tower(
    attrs.evolve(_QWEN3, model_type="qwen3_vl_text", windows=None, ropes=(*_QWEN3.ropes, "mrope")),
    model_type="qwen3_vl",
    models="Qwen3-VL",
    architecture="Qwen3VLForConditionalGeneration",
    tensors=("visual.**", "model.visual.**"),
    keys=("vision_start_token_id", "vision_end_token_id"),
    defaults={
        "num_key_value_heads": 32,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 128_000,
    },
)

_QWEN3_5_TOWER: dict[str, Any] = {
    "tensors": ("visual.**", "model.visual.**", "mtp.**"),
    "keys": ("vision_start_token_id", "vision_end_token_id", "language_model_only"),
    "defaults": {},
}
_QWEN3_5_WHOLE = _make_tower(
    _QWEN3_5,
    model_type="qwen3_5",
    models="Qwen3.5 (2B, 27B)",
    architecture="Qwen3_5ForConditionalGeneration",
    **_QWEN3_5_TOWER,
)
_QWEN3_5_MOE_WHOLE = _make_tower(
    _QWEN3_5_MOE,
    model_type="qwen3_5_moe",
    models="Qwen3.5 (35B-A3B, 397B-A17B)",
    architecture="Qwen3_5MoeForConditionalGeneration",
    **_QWEN3_5_TOWER,
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
    _OLMO3,
    _SMOLLM3,
    _GRANITE,
    _GPT2,
    _MIXTRAL,
    _GRANITE_MOE,
    _QWEN3_MOE,
    _DEEPSEEK_V3,
    _GLM4_MOE,
    _GLM4_MOE_LITE,
    _GPT_OSS,
    _QWEN3_NEXT,
    _QWEN3_5,
    _QWEN3_5_MOE,
    _GEMMA4,
    _QWEN3_5_WHOLE,
    _QWEN3_5_MOE_WHOLE,
    _GEMMA3_TOWER,
    _GEMMA4_TOWER,
    _QWEN3_VL,
)
"""Every family; of those that compute the same, the first is what is written."""


def list_who(has: Callable[[Family], bool]) -> str:
    """Return the end of a message about something that a family lacks: the families that have it.

    Examples:
        >>> list_who(lambda family: "longrope" in family.ropes), list_who(lambda _: False)
        (', which phi3 has', '')
    """
    names = [family.model_type for family in FAMILIES if has(family)]
    if not names:
        return ""
    return f", which {' and '.join(names[:3])} {'have' if len(names) > 1 else 'has'}"
