"""Conversations: from messages to tokens with a mask, and pairs of answers to prefer."""

from __future__ import annotations

from trainkit.chat.encode import (
    chat_encoder,
    check_mask,
    encode_chat,
    from_sharegpt,
    mask_parts,
    show_mask,
    stop_ids,
)
from trainkit.chat.folder import find_template, folder_stop_ids, folder_template, has_template
from trainkit.chat.jinja import jinja_template
from trainkit.chat.preference import encode_pair, exchange_answers, pack_pairs, pair_documents
from trainkit.chat.prompt import prompt_ids
from trainkit.chat.sources import SOURCES
from trainkit.chat.templates import (
    TEMPLATES,
    Segment,
    Template,
    chatml,
    llama3,
    qwen3,
)
from trainkit.tokenizers.special import CHATML_SPECIAL, LLAMA3_SPECIAL, QWEN3_SPECIAL

__all__ = [
    "CHATML_SPECIAL",
    "LLAMA3_SPECIAL",
    "QWEN3_SPECIAL",
    "SOURCES",
    "TEMPLATES",
    "Segment",
    "Template",
    "chat_encoder",
    "chatml",
    "check_mask",
    "encode_chat",
    "encode_pair",
    "exchange_answers",
    "find_template",
    "folder_stop_ids",
    "folder_template",
    "from_sharegpt",
    "has_template",
    "jinja_template",
    "llama3",
    "mask_parts",
    "pack_pairs",
    "pair_documents",
    "prompt_ids",
    "qwen3",
    "show_mask",
    "stop_ids",
]
