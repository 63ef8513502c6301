"""Conversations: from messages to tokens with a mask, and pairs of answers to prefer."""

from trainkit.text.chat.encode import (
    answers_warning,
    chat_encoder,
    check_mask,
    encode_chat,
    from_sharegpt,
    mask_parts,
    show_mask,
    stop_ids,
)
from trainkit.text.chat.folder import (
    choose_template,
    find_template,
    folder_stop_ids,
    folder_template,
    has_template,
    template_beside,
    template_hash,
)
from trainkit.text.chat.jinja import jinja_template
from trainkit.text.chat.preference import encode_pair, exchange_answers, pack_pairs, pair_documents
from trainkit.text.chat.prompt import prompt_ids
from trainkit.text.chat.sources import SOURCES
from trainkit.text.chat.templates import (
    CHATML_SPECIAL,
    LLAMA3_SPECIAL,
    QWEN3_SPECIAL,
    TEMPLATES,
    Segment,
    Template,
    chatml,
    llama3,
    qwen3,
)

__all__ = [
    "CHATML_SPECIAL",
    "LLAMA3_SPECIAL",
    "QWEN3_SPECIAL",
    "SOURCES",
    "TEMPLATES",
    "Segment",
    "Template",
    "answers_warning",
    "chat_encoder",
    "chatml",
    "check_mask",
    "choose_template",
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
    "template_beside",
    "template_hash",
]
