"""Conversations: from messages to tokens with a mask, and pairs of answers to prefer."""

from trainkit.text.chat.encode import (
    check_mask,
    encode_chat,
    encode_prompt,
    find_stop_ids,
    format_answers_warning,
    format_mask,
    make_chat_encoder,
    messages_from_sharegpt,
    split_by_mask,
)
from trainkit.text.chat.folder import (
    choose_template_name,
    load_template,
    locate_template,
    read_stop_ids,
    read_template,
    template_hash,
)
from trainkit.text.chat.jinja import make_jinja_template
from trainkit.text.chat.preference import (
    encode_preference_pair,
    flatten_pairs,
    mismatch_answers,
    pack_pairs,
)
from trainkit.text.chat.sources import JINJA_SOURCES
from trainkit.text.chat.templates import (
    CHATML_SPECIAL,
    LLAMA3_SPECIAL,
    QWEN3_SPECIAL,
    chatml,
    llama3,
    qwen3,
)

__all__ = [
    "CHATML_SPECIAL",
    "JINJA_SOURCES",
    "LLAMA3_SPECIAL",
    "QWEN3_SPECIAL",
    "chatml",
    "check_mask",
    "choose_template_name",
    "encode_chat",
    "encode_preference_pair",
    "encode_prompt",
    "find_stop_ids",
    "flatten_pairs",
    "format_answers_warning",
    "format_mask",
    "llama3",
    "load_template",
    "locate_template",
    "make_chat_encoder",
    "make_jinja_template",
    "messages_from_sharegpt",
    "mismatch_answers",
    "pack_pairs",
    "qwen3",
    "read_stop_ids",
    "read_template",
    "split_by_mask",
    "template_hash",
]
