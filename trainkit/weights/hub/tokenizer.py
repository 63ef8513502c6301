"""The tokenizer files of a Hugging Face folder: copied from one, or made from ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from trainkit.text.chat import JINJA_SOURCES, find_stop_ids, load_template
from trainkit.text.chat.folder import MORE_TEMPLATES, read_template_sources
from trainkit.text.tokenizers.bytes import ByteTokenizer
from trainkit.text.tokenizers.hf import HFTokenizer, map_letters_to_bytes
from trainkit.text.tokenizers.open import open_tokenizer
from trainkit.text.tokenizers.special import BOS, EOS, PAD
from trainkit.weights.checkpoint.safe_files import read_bounded

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from trainkit.types import Tokenizer

# What `transformers` may read about a tokenizer and generation; nothing else is copied.
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
_MAX_BYTES = 1 << 27
_ROLES = ("bos", "eos", "pad")


def make_tokenizer_files(
    name: str | os.PathLike[str],
    *,
    tokenizer: HFTokenizer | None = None,
    template: str | None = None,
    adds_bos: bool = False,
) -> dict[str, bytes]:
    """Return the tokenizer files of a Hugging Face folder, by name.

    With them `transformers` gives the ids on which a run was trained: if BOS is `<|bos|>`, as in
    trainkit's own tokenizers, whose documents start with it, texts start with it there too. A
    conversation is exactly what its template writes, here and in `apply_chat_template`.

    Some tokenizers have a BOS but do not add it (GPT-2, OLMo 2, whose BOS is also the token that
    ends a document). Their models were trained with it in front of a text, as the end of the text
    before; so are documents of a run here, which do not attend to each other (`encode_document`).

    Args:
        name: A name for `open_tokenizer`: "bytes", a `tokenizer.json`, or a folder that has one,
            whose files for the tokenizer and for generation are copied.
        tokenizer: Written to `tokenizer.json` in place of the folder's: the same with more tokens
            (`tokenizers.add_tokens`).
        adds_bos: Whether the model was trained on texts that start with BOS (`ModelInfo.adds_bos`):
            then texts start with it there too, whatever the folder's own tokenizer did.
        template: The chat template of the training, for `chat.load_template`: one of trainkit's, or
            a folder. It replaces that of the tokenizer's folder, and generation also stops where it
            ends an answer. None, or the same folder, changes neither.

    Raises:
        DataError: The tokenizer or the template is invalid.
        ConfigError: There is no such template.
        ValueError: The tokenizer has no token for the end of an answer.
        CheckpointError: A file to be copied is no plain file, or too large.

    Examples:
        >>> sorted(make_tokenizer_files("bytes"))
        ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    path = Path(name)
    tok = tokenizer or open_tokenizer(name)
    if isinstance(tok, ByteTokenizer):
        files = {"tokenizer.json": _make_byte_tokenizer_json(tok)}
        texts = {"bos": BOS, "eos": EOS, "pad": PAD}
    else:
        # A single file may have any name; in the new folder it gets this one.
        paths = {"tokenizer.json": path}
        if path.is_dir():
            paths = {name: path / name for name in _COPIED if (path / name).is_file()}
            paths["tokenizer.json"] = path / "tokenizer.json"  # an error if it is missing
        files = {name: bytes(read_bounded(p, _MAX_BYTES, shared=True)) for name, p in paths.items()}
        if tokenizer is not None:
            files["tokenizer.json"] = tokenizer.backend.to_str(pretty=True).encode()
        texts = {role: tok.backend.id_to_token(i) for role, i in _get_role_ids(tok).items()}
    ids = {f"{role}_token_id": i for role, i in _get_role_ids(tok).items()}
    tokens = {f"{role}_token": text for role, text in texts.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    # The generic class, which takes everything from tokenizer.json.
    files.setdefault("tokenizer_config.json", _format_json(config))
    files.setdefault("generation_config.json", _format_json(ids))
    # A tokenizer of our own starts documents with BOS whether the caller knows it or not.
    adds_bos = "bos" in texts and (adds_bos or texts["bos"] == BOS)
    if isinstance(tok, HFTokenizer) and adds_bos and not tok.adds_bos:
        _add_bos(files, texts["bos"], ids["bos_token_id"])
    # The template of the tokenizer's own folder is among the copied files already.
    if template is not None and not (path.is_dir() and Path(template) == path):
        _set_template(files, template, tok)
    elif (path / MORE_TEMPLATES).is_dir():
        _set_sources(files, read_template_sources(path))
    return files


def _set_template(
    files: dict[str, bytes], template: str, tokenizer: ByteTokenizer | HFTokenizer
) -> None:
    """Replace the chat template, and add the end of its answers to the stop ids."""
    stop_ids = {*find_stop_ids(tokenizer, load_template(template)), tokenizer.eos_id}
    native = JINJA_SOURCES.get(template)
    _set_sources(
        files, read_template_sources(Path(template)) if native is None else {"default": native}
    )
    generation = orjson.loads(files["generation_config.json"])
    # One id or a list, as `transformers` accepts; generation stops at any of them.
    old = generation.get("eos_token_id")
    stop_ids |= {*old} if isinstance(old, list) else {old}
    generation["eos_token_id"] = sorted(i for i in stop_ids if i is not None)
    files["generation_config.json"] = _format_json(generation)


def _set_sources(files: dict[str, bytes], sources: Mapping[str, str]) -> None:
    """Replace the chat templates of a tokenizer's folder, by name.

    Several go into `tokenizer_config.json`, since an export has no subfolder.
    """
    # A template that stays in another place might be the one that is read.
    for name in ("chat_template.jinja", "chat_template.json"):
        files.pop(name, None)
    config = orjson.loads(files["tokenizer_config.json"])
    had_template = config.pop("chat_template", None) is not None
    if len(sources) > 1:
        config["chat_template"] = [{"name": k, "template": text} for k, text in sources.items()]
    else:
        files["chat_template.jinja"] = next(iter(sources.values())).encode()
    if had_template or len(sources) > 1:
        files["tokenizer_config.json"] = _format_json(config)


def _add_bos(files: dict[str, bytes], bos: str, bos_id: int) -> None:
    """Make a tokenizer's files add BOS to texts, after all their other processing."""
    tokenizer = orjson.loads(files["tokenizer.json"])
    processor = _make_bos_processor(bos, bos_id)
    # Ours comes last, so that it adds to what the tokenizer's own processor returns.
    if (old := tokenizer.get("post_processor")) is not None:
        processor = {"type": "Sequence", "processors": [old, processor]}
    files["tokenizer.json"] = _format_json(tokenizer | {"post_processor": processor})
    config = orjson.loads(files["tokenizer_config.json"])
    # Older classes of transformers obey this flag instead of tokenizer.json.
    if config.pop("add_bos_token", None) is not None:
        files["tokenizer_config.json"] = _format_json(config | {"add_bos_token": True})


def _make_bos_processor(text: str, bos_id: int) -> dict[str, Any]:
    """Return the post-processor that puts BOS in front of a text, and of the first of a pair."""
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {text: {"id": text, "ids": [bos_id], "tokens": [text]}},
    }


def _format_json(values: Mapping[str, Any]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_INDENT_2)


def _get_role_ids(tokenizer: Tokenizer) -> Mapping[str, int]:
    ids = {role: getattr(tokenizer, f"{role}_id") for role in _ROLES}
    return {role: i for role, i in ids.items() if i is not None}


def _make_byte_tokenizer_json(tokenizer: ByteTokenizer) -> bytes:
    """Return a `tokenizer.json` with the ids of a byte tokenizer.

    It is a byte-level BPE without merges that puts BOS in front of a text where special tokens are
    added. `transformers` also reads `<|bos|>`, `<|eos|>` and `<|pad|>` in a text as tokens; for our
    tokenizer they are bytes, so that no text can end a document.

    Examples:
        >>> from tokenizers import Tokenizer
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> ours = make_byte_tokenizer(["<|end|>"])
        >>> theirs = Tokenizer.from_str(_make_byte_tokenizer_json(ours).decode())
        >>> theirs.encode("né<|end|>").ids == [ours.bos_id, *ours.encode("né<|end|>")]
        True
    """
    texts = {BOS: tokenizer.bos_id, EOS: tokenizer.eos_id, PAD: tokenizer.pad_id}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    # Ids from 256 on, behind those of the bytes.
    added = [
        {"id": i, "content": text, **flags, "special": True}
        for text, i in (texts | dict(tokenizer.special_ids)).items()
    ]
    # GPT-2's regular expression splits texts into words, which bytes without merges do not need.
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    # One printable letter for each byte, as in GPT-2; without merges every token is one byte.
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": map_letters_to_bytes(),
        "merges": [],
    }
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _make_bos_processor(BOS, tokenizer.bos_id),
        "decoder": byte_level,
        "model": model,
    }
    return _format_json(tokenizer_json)
