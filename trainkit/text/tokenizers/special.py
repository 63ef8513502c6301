"""Special tokens: texts that are one token each."""

from __future__ import annotations

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Those of trainkit's own tokenizers: a document's begin, its end, and padding."""

CHATML_SPECIAL = ("<|im_start|>", "<|im_end|>")
"""Those that the template `chatml` writes."""

QWEN3_SPECIAL = (
    *CHATML_SPECIAL,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Those that `qwen3` writes; Qwen's tokenizer has one token for each."""

LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
"""Those that `llama3` writes."""

CHAT_SPECIAL = (*QWEN3_SPECIAL, *LLAMA3_SPECIAL)
"""Those of every native template of `trainkit.text.chat`."""
