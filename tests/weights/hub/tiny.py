"""Tiny random models of every family, as `transformers` makes and saves them."""

import copy

import pytest
import torch
from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
    }
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 50.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.5, 5.0, 30.0],
}
LESS = {each: LONGROPE[each][1:3] for each in ("short_factor", "long_factor")}
OF_DEEPSEEK = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
}
# Norms of latents have another epsilon than these, which is large enough to show.
OF_GLM_LITE = {
    **{key: x for key, x in OF_DEEPSEEK.items() if key != "first_k_dense_replace"},
    "rms_norm_eps": 1e-3,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
}
OF_GLM = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
OF_QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OF_GEMMA = {
    "pad_token_id": None,  # whose embedding has no gradient
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
}
OF_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
LOCAL_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }
}
OF_GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
# The options of the published folders, with other sizes; all heads differ.
OF_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 12,
}
OF_MROPE = {
    "rope_parameters": OF_DELTA["rope_parameters"]
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
}
OF_QWEN3_NEXT = OF_QWEN3_MOE | {"shared_expert_intermediate_size": 24}
CONTEXT = 128
ROWS = {
    "llama": ("Llama", PLAIN),
    "llama tied, scaled": ("Llama", LLAMA3 | {"tie_word_embeddings": True}),
    "llama wide heads": ("Llama", PLAIN | {"head_dim": 12}),
    "mistral": ("Mistral", PLAIN | {"sliding_window": 128, "head_dim": 6}),
    "mistral with windows": ("Mistral", PLAIN | {"sliding_window": 7}),
    "qwen2": ("Qwen2", PLAIN | {"tie_word_embeddings": True}),
    "qwen2 yarn": ("Qwen2", YARN),
    "qwen2, windows from a layer on": (
        "Qwen2",
        PLAIN | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "llama, biases, gelu, linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}}
        | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "gemma2": ("Gemma2", PLAIN | OF_GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma2, untied, no caps": (
        "Gemma2",
        PLAIN
        | OF_GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma3": ("Gemma3Text", LOCAL_ROPE | OF_GEMMA | {"num_hidden_layers": 7}),
    "gemma3, untied, all see": (
        "Gemma3Text",
        LOCAL_ROPE
        | OF_GEMMA
        | {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 3},
    ),
    "olmo2": ("Olmo2", PLAIN | {"pad_token_id": None}),
    "olmo2 tied": ("Olmo2", LLAMA3 | {"pad_token_id": None, "tie_word_embeddings": True}),
    "olmo3": (
        "Olmo3",
        {"rope_parameters": {"full_attention": YARN["rope_parameters"]}}
        | {"pad_token_id": None, "num_hidden_layers": 5, "sliding_window": 6},
    ),
    "olmo3 tied, all see": (
        "Olmo3",
        {"rope_parameters": {"full_attention": PLAIN["rope_parameters"]}}
        | {"pad_token_id": None, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention"] * 2},
    ),
    "smollm3": ("SmolLM3", PLAIN | {"pad_token_id": None, "num_hidden_layers": 5}),
    "smollm3 untied, every other layer, biases": (
        "SmolLM3",
        YARN
        | {"pad_token_id": None, "tie_word_embeddings": False, "no_rope_layers": [1, 0]}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "granite": ("Granite", LLAMA3 | OF_GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite tied": (  # in few layers a tied embedding times 12 would only repeat itself
        "Granite",
        PLAIN
        | OF_GRANITE
        | {"tie_word_embeddings": True, "embedding_multiplier": 0.5, "residual_multiplier": 2.0},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2 untied": ("GPT2", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "phi3, a part of each head, windows": (
        "Phi3",
        {"rope_parameters": PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.5}}
        | {"pad_token_id": None, "eos_token_id": 1, "sliding_window": 9},
    ),
    "phi3 longrope, short": (
        "Phi3",
        {"rope_parameters": LONGROPE | {"factor": 4.0}, "original_max_position_embeddings": 128}
        | {"pad_token_id": None, "eos_token_id": 1},
    ),
    "phi3 longrope, long, a part of each head": (
        "Phi3",
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5, **LESS}}
        | {"pad_token_id": None, "eos_token_id": 1, "original_max_position_embeddings": 4},
    ),
    "qwen3": ("Qwen3", PLAIN | {"head_dim": 12, "tie_word_embeddings": True}),
    "phi3": ("Phi3", PLAIN | {"pad_token_id": None, "eos_token_id": 1}),
    "mixtral": ("Mixtral", PLAIN | {"num_local_experts": 4}),
    "granitemoe": ("GraniteMoe", PLAIN | OF_GRANITE | {"num_local_experts": 4}),
    "granitemoe tied": (
        "GraniteMoe",
        LLAMA3
        | OF_GRANITE
        | {"tie_word_embeddings": True, "embedding_multiplier": 0.5, "residual_multiplier": 2.0}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "qwen3_moe": ("Qwen3Moe", PLAIN | OF_QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe some layers": (
        "Qwen3Moe",
        PLAIN | OF_QWEN3_MOE | {"mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "deepseek_v3": ("DeepseekV3", PLAIN | OF_DEEPSEEK),
    "deepseek_v3 wide values": (
        "DeepseekV3",
        PLAIN | OF_DEEPSEEK | {"v_head_dim": 24, "first_k_dense_replace": 0},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", PLAIN | OF_GLM_LITE),
    "glm4_moe_lite tied, no query rank": (
        "Glm4MoeLite",
        PLAIN
        | OF_GLM_LITE
        | {"tie_word_embeddings": True, "q_lora_rank": None}
        | {"mlp_layer_types": ["dense", "dense", "sparse"]},
    ),
    "glm4_moe": (
        "Glm4Moe",
        PLAIN | OF_GLM | {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2},
    ),
    "glm4_moe, all of a head, tied": (
        "Glm4Moe",
        {"rope_parameters": PLAIN["rope_parameters"] | {"partial_rotary_factor": 1.0}}
        | OF_GLM
        | {"tie_word_embeddings": True, "first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "qwen3_moe every other layer": (
        "Qwen3Moe",
        PLAIN | OF_QWEN3_MOE | {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3_next": ("Qwen3Next", OF_DELTA | OF_QWEN3_NEXT),
    "qwen3_next, tied, some layers": (
        "Qwen3Next",
        OF_DELTA
        | OF_QWEN3_NEXT
        | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1], "tie_word_embeddings": True}
        | {"full_attention_interval": 2, "norm_topk_prob": False},
    ),
    "qwen3_5": ("Qwen3_5Text", OF_DELTA),
    "qwen3_5 tied": ("Qwen3_5Text", OF_DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeText", OF_DELTA | OF_QWEN3_NEXT),
    "deepseek_v3 yarn, no query rank": (
        "DeepseekV3",
        OF_DEEPSEEK
        | {"q_lora_rank": None, "n_shared_experts": 1, "norm_topk_prob": False}
        | {"rope_parameters": {**YARN["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
}

# Every option as published, in a small size: yarn without whole bounds, sinks, windows by turns.
OF_GPT_OSS = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "hidden_size": 64,  # two blocks of MXFP4
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 1.0,
    "rope_parameters": {**YARN["rope_parameters"], "truncate": False},
}
ROWS |= {
    "gpt_oss": ("GptOss", OF_GPT_OSS),
    "gpt_oss, tied, no biases of attention, all see": (
        "GptOss",
        OF_GPT_OSS
        | PLAIN
        | {"tie_word_embeddings": True, "attention_bias": False, "swiglu_limit": 7.0}
        | {"hidden_size": 32, "intermediate_size": 48}
        | {"layer_types": ["full_attention"] * 3},
    ),
}

# Multimodal models, of which the decoder is the text tower: their class, the changes of its text,
# and what else their configuration has. Ids of images are beyond those that the tests use.
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
OF_GEMMA3 = {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 260}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [1],
}
MROPE = {
    "rope_parameters": {
        **PLAIN["rope_parameters"],
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    }
}
# As the dense model of 31B, but for sizes.
OF_GEMMA4 = {
    "pad_token_id": 0,  # needed by its class
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
TOWERS = {
    "gemma4": ("Gemma4", OF_GEMMA4, {"vision_config": GEMMA4_VISION, "audio_config": None}),
    "gemma4, untied, values of their own": (
        "Gemma4",
        OF_GEMMA4 | {"attention_k_eq_v": False, "attention_bias": True},
        {"vision_config": GEMMA4_VISION, "audio_config": None, "tie_word_embeddings": False},
    ),
    "gemma3 tower": (
        "Gemma3",
        LOCAL_ROPE | OF_GEMMA | {"num_hidden_layers": 7, "final_logit_softcapping": None},
        OF_GEMMA3,
    ),
    "gemma3 tower, untied": (
        "Gemma3",
        LOCAL_ROPE | OF_GEMMA | {"final_logit_softcapping": None},
        OF_GEMMA3 | {"tie_word_embeddings": False},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        MROPE | {"head_dim": 12},
        {"vision_config": QWEN_VISION, "tie_word_embeddings": True},
    ),
    "qwen3_vl, untied": (
        "Qwen3VL",
        MROPE | {"head_dim": 12, "attention_bias": True},
        {"vision_config": QWEN_VISION, "tie_word_embeddings": False},
    ),
    "qwen3_5 tower": (
        "Qwen3_5",
        OF_DELTA | OF_MROPE,
        {"vision_config": QWEN_VISION, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe tower": (
        "Qwen3_5Moe",
        OF_DELTA | OF_MROPE | OF_QWEN3_NEXT,
        {"vision_config": QWEN_VISION, "tie_word_embeddings": False},
    ),
}

# What the first row of a family, or another row, shows as well where a family's map or its layers
# are not the claim: heads of another width, tied or joined matrices, biases, caps, scores.
BESIDE = {
    "llama tied, scaled",
    "llama wide heads",
    "mistral",
    "qwen2 yarn",
    "qwen2, windows from a layer on",
    "gemma2, untied, no caps",
    "gemma3, untied, all see",
    "olmo2 tied",
    "olmo3 tied, all see",
    "smollm3 untied, every other layer, biases",
    "granite tied",
    "granitemoe tied",
    "glm4_moe_lite tied, no query rank",
    "gpt2 untied",
    "phi3 longrope, short",
    "qwen3_moe",
    "qwen3_moe every other layer",
    "deepseek_v3 wide values",
    "glm4_moe",
    "qwen3_next, tied, some layers",
    "qwen3_5 tied",
    "gemma3 tower, untied",
    "qwen3_vl, untied",
    "gemma4, untied, values of their own",
}
FEW = [
    pytest.param(row, marks=pytest.mark.only_all if row in BESIDE else ())
    for row in [*ROWS, *TOWERS]
]


def load_transformers():
    """Return the module. Ranks that only read a folder do not load it: it takes 1 s in each."""
    return pytest.importorskip("transformers")


def make_config(row):
    """Return the configuration of a tiny model."""
    kind, changes, *outer = (ROWS | TOWERS)[row]
    values = (OF_GPT2 if kind == "GPT2" else SIZES) | changes
    if outer:
        values = outer[0] | {"text_config": values}
    make = getattr(load_transformers(), f"{kind}Config").from_dict
    return make(copy.deepcopy(values))  # it writes into its argument


def make_theirs(row):
    """Return a tiny model whose norms and biases differ from their initial values."""
    transformers = load_transformers()
    kind, _, *outer = (ROWS | TOWERS)[row]
    config = make_config(row)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind.removesuffix('Text')}ForCausalLM"
    name = f"{kind}ForConditionalGeneration" if outer else name
    theirs = getattr(transformers, name)(config).eval()
    fill(theirs)
    if hasattr(theirs, "model") and hasattr(theirs.model, "language_model"):
        theirs.model.language_model.embed_tokens.padding_idx = None  # which has no gradient
    return theirs


def fill(theirs):
    """Change a new model's values so that every tensor has an effect."""
    with torch.no_grad():
        for name, x in (*theirs.named_parameters(), *theirs.named_buffers()):
            if "inv_freq" in name or not x.is_floating_point():
                continue
            if x.ndim == 1:
                x.add_(0.1 * torch.sin(torch.arange(x.numel()) + len(name)))
            elif x.ndim > 1:  # small values would make all scores alike
                nn.init.normal_(x, std=x.shape[-1] ** -0.5)
            # The norm after the delta rule divides an output that is nearly 0 by its own size, and
            # so its rounding. Slow decays and clear queries and keys leave few of these.
            if name.endswith("A_log"):
                x.sub_(5)
            elif name.endswith("conv1d.weight"):
                x.mul_(6)
