"""Tiny random models of every family, as `transformers` makes and saves them."""

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
OF_QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROWS = {
    "llama": ("Llama", PLAIN),
    "llama tied, scaled": ("Llama", LLAMA3 | {"tie_word_embeddings": True}),
    "llama wide heads": ("Llama", PLAIN | {"head_dim": 12}),
    "mistral": ("Mistral", PLAIN | {"sliding_window": 128, "head_dim": 6}),
    "qwen2": ("Qwen2", PLAIN | {"tie_word_embeddings": True}),
    "qwen2 yarn": ("Qwen2", YARN),
    "qwen3": ("Qwen3", PLAIN | {"head_dim": 12, "tie_word_embeddings": True}),
    "phi3": ("Phi3", PLAIN | {"pad_token_id": None, "eos_token_id": 1}),
    "mixtral": ("Mixtral", PLAIN | {"num_local_experts": 4}),
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
    "qwen3_moe every other layer": (
        "Qwen3Moe",
        PLAIN | OF_QWEN3_MOE | {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "deepseek_v3 yarn, no query rank": (
        "DeepseekV3",
        OF_DEEPSEEK
        | {"q_lora_rank": None, "n_shared_experts": 1, "norm_topk_prob": False}
        | {"rope_parameters": {**YARN["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
}


def make_theirs(row, transformers):
    """Return a tiny model whose norms, biases and router biases are not what they begin as."""
    kind, changes = ROWS[row]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, x in (*theirs.named_parameters(), *theirs.named_buffers()):
            if "inv_freq" in name:
                continue
            if x.ndim == 1:
                x.add_(0.1 * torch.sin(torch.arange(x.numel()) + len(name)))
            elif x.ndim > 1:  # small values would make all scores alike
                nn.init.normal_(x, std=x.shape[-1] ** -0.5)
    return theirs
