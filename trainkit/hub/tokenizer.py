"""The files of a tokenizer that a Hugging Face folder has: copied, or made of one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from trainkit.chat import CHATML_SOURCE, TEMPLATES, stop_ids
from trainkit.checkpoint.plain import read_bounded
from trainkit.tokenizers.bytes import ByteTokenizer
from trainkit.tokenizers.hf import byte_of_letter
from trainkit.tokenizers.open import open_tokenizer
from trainkit.tokenizers.special import BOS, EOS, PAD

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from trainkit.tokenizers.hf import HFTokenizer
    from trainkit.types import Tokenizer

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.json",
)
_MOST_BYTES = 1 << 27
_ROLES = ("bos", "eos", "pad")


def tokenizer_files(
    name: str | os.PathLike[str],
    *,
    tokenizer: HFTokenizer | None = None,
    template: str | None = None,
) -> dict[str, bytes]:
    """Return what a Hugging Face folder holds of a tokenizer, by the names of the files.

    Args:
        name: What `open_tokenizer` takes: "bytes", a `tokenizer.json`, or a folder that has one,
            whose files for the tokenizer and for generation are copied as they are.
        tokenizer: What `tokenizer.json` shall hold in place of the folder's own: the same with more
            tokens (`tokenizers.add_tokens`).
        template: The name of the chat template that a model has learned. Generation then stops
            where it ends an answer, too; of "chatml" the folder gets the text itself, of "llama3"
            and "qwen3" not.

    Raises:
        DataError: It is no tokenizer.
        CheckpointError: A file to be copied is no plain one, or too large.

    Examples:
        >>> sorted(tokenizer_files("bytes"))
        ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    own, path = tokenizer or open_tokenizer(name), Path(name)
    files: dict[str, bytes] = {}
    if isinstance(own, ByteTokenizer):
        files["tokenizer.json"] = byte_tokenizer_json(own)
        texts = dict(zip(_ROLES, (BOS, EOS, PAD), strict=True))
    else:
        folder = path if path.is_dir() else path.parent
        names = _COPIED if path.is_dir() else ("tokenizer.json",)
        there = {each: folder / each for each in names if (folder / each).is_file()}
        there["tokenizer.json"] = path / "tokenizer.json" if path.is_dir() else path
        files |= {
            each: bytes(read_bounded(p, _MOST_BYTES, shared=True)) for each, p in there.items()
        }
        if tokenizer is not None:
            files["tokenizer.json"] = tokenizer.backend.to_str(pretty=True).encode()
        texts = {role: own.backend.id_to_token(i) for role, i in _ids(own).items()}
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    said |= {f"{role}_token": text for role, text in texts.items()}
    files.setdefault("tokenizer_config.json", _json(said))
    ids: dict[str, Any] = {f"{role}_token_id": i for role, i in _ids(own).items()}
    if template in TEMPLATES:
        ends = [*stop_ids(own, TEMPLATES[template]), own.eos_id]
        said_ends = sorted({i for i in ends if i is not None})
        files["generation_config.json"] = _json(ids | {"eos_token_id": said_ends})
    if template == "chatml":
        files["chat_template.jinja"] = CHATML_SOURCE.encode()
    files.setdefault("generation_config.json", _json(ids))
    return files


def _json(values: Mapping[str, Any]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_INDENT_2)


def _ids(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the ids of the roles that a tokenizer has."""
    found = {role: getattr(tokenizer, f"{role}_id") for role in _ROLES}
    return {role: i for role, i in found.items() if i is not None}


def byte_tokenizer_json(tokenizer: ByteTokenizer) -> bytes:
    """Return a `tokenizer.json` that gives the ids of a tokenizer of bytes.

    It is a byte-level BPE without merges. `transformers` reads `<|bos|>`, `<|eos|>` and `<|pad|>`
    in a text as tokens too, which are bytes to ours, so that no text can end a document.

    Examples:
        >>> from tokenizers import Tokenizer
        >>> from trainkit.tokenizers import byte_tokenizer
        >>> ours = byte_tokenizer(["<|end|>"])
        >>> theirs = Tokenizer.from_str(byte_tokenizer_json(ours).decode())
        >>> theirs.encode("né<|end|>").ids == ours.encode("né<|end|>")
        True
    """
    texts = {BOS: tokenizer.bos_id, EOS: tokenizer.eos_id, PAD: tokenizer.pad_id}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": text, **flags, "special": True}
        for text, i in (texts | dict(tokenizer.special_ids)).items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level |= {"use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": byte_of_letter(),
        "merges": [],
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return _json(whole)
