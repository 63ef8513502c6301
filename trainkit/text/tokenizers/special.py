"""Special tokens: texts that are one token each."""

from __future__ import annotations

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
"""The special tokens of trainkit's own tokenizers: beginning and end of a document, and padding."""

CHATML_SPECIAL = ("<|im_start|>", "<|im_end|>")
"""The special tokens of the template `chatml`."""

QWEN3_SPECIAL = (
    *CHATML_SPECIAL,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""The special tokens of `qwen3`; Qwen's tokenizer has a token for each."""

LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
"""The special tokens of `llama3`."""

CHAT_SPECIAL = (*QWEN3_SPECIAL, *LLAMA3_SPECIAL)
"""The special tokens of all native templates of `trainkit.text.chat`."""
