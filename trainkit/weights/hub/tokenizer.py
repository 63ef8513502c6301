"""The files of a tokenizer that a Hugging Face folder has: copied, or made of one of ours."""

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


def make_tokenizer_files(
    name: str | os.PathLike[str],
    *,
    tokenizer: HFTokenizer | None = None,
    template: str | None = None,
    adds_bos: bool = False,
) -> dict[str, bytes]:
    """Return what a Hugging Face folder holds of a tokenizer, by the names of the files.

    `transformers` gives the ids with it that a run's own texts have: where BOS is `<|bos|>`, as in
    trainkit's own tokenizers, whose documents begin with it, so do texts there. A conversation has
    what its template writes and no more, here and in `apply_chat_template`.

    Some tokenizers name a BOS and add none (GPT-2, OLMo 2, whose BOS is the token that ends a
    document). Their families have learned that it stands before a text, as the end of the text
    before; so do documents of a run here, which attention keeps apart (`encode_document`).

    Args:
        name: What `open_tokenizer` takes: "bytes", a `tokenizer.json`, or a folder that has one,
            whose files for the tokenizer and for generation are copied as they are.
        tokenizer: What `tokenizer.json` shall hold in place of the folder's own: the same with more
            tokens (`tokenizers.add_tokens`).
        adds_bos: Whether the model has learned texts that begin with BOS (`Trained.adds_bos`): then
            they do so there too, whatever the folder's own tokenizer did.
        template: The chat template that a model has learned, as `chat.load_template` takes it: one
            of trainkit's, or a folder. It takes the place of what the tokenizer's folder has, and
            generation stops where it ends an answer, too; None, or that folder, leaves both.

    Raises:
        DataError: It is no tokenizer, or the template no template.
        ConfigError: There is no such template.
        ValueError: The tokenizer has no token for what ends an answer.
        CheckpointError: A file to be copied is no plain one, or too large.

    Examples:
        >>> sorted(make_tokenizer_files("bytes"))
        ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    own, path = tokenizer or open_tokenizer(name), Path(name)
    files = {} if isinstance(own, ByteTokenizer) else _copied(path)
    if isinstance(own, ByteTokenizer):
        files["tokenizer.json"] = byte_tokenizer_json(own)
        texts = dict(zip(_ROLES, (BOS, EOS, PAD), strict=True))
    else:
        if tokenizer is not None:
            files["tokenizer.json"] = tokenizer.backend.to_str(pretty=True).encode()
        texts = {role: own.backend.id_to_token(i) for role, i in _ids(own).items()}
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    said |= {f"{role}_token": text for role, text in texts.items()}
    files.setdefault("tokenizer_config.json", _json(said))
    ids = {f"{role}_token_id": i for role, i in _ids(own).items()}
    files.setdefault("generation_config.json", _json(ids))
    adds_bos = "bos" in texts and (adds_bos or texts["bos"] == BOS)
    if isinstance(own, HFTokenizer) and adds_bos and not own.adds_bos:
        _add_bos(files, texts["bos"], ids["bos_token_id"])
    if template is not None and not (path.is_dir() and Path(template) == path):
        _put_template(files, template, own)
    elif (path / MORE_TEMPLATES).is_dir():
        _put_sources(files, read_template_sources(path))
    return files


def _copied(path: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer: those of a folder, or one `tokenizer.json`."""
    names = _COPIED if path.is_dir() else ()
    there = {each: path / each for each in names if (path / each).is_file()}
    there["tokenizer.json"] = path / "tokenizer.json" if path.is_dir() else path
    return {each: bytes(read_bounded(p, _MOST_BYTES, shared=True)) for each, p in there.items()}


def _put_template(
    files: dict[str, bytes], template: str, tokenizer: ByteTokenizer | HFTokenizer
) -> None:
    """Put a template in the place of what a tokenizer's folder has, and stop where it ends too."""
    ends = {*find_stop_ids(tokenizer, load_template(template)), tokenizer.eos_id}
    native = JINJA_SOURCES.get(template)
    _put_sources(
        files, read_template_sources(Path(template)) if native is None else {"default": native}
    )
    said = orjson.loads(files["generation_config.json"])
    had = said.get("eos_token_id")
    ends |= {*had} if isinstance(had, list) else {had}
    ids = sorted(each for each in ends if each is not None)
    files["generation_config.json"] = _json(said | {"eos_token_id": ids})


def _put_sources(files: dict[str, bytes], sources: Mapping[str, str]) -> None:
    """Put chat templates, by name, in the place of those of a tokenizer's folder.

    Several go into `tokenizer_config.json`, since an export has no folder inside.
    """
    for each in ("chat_template.jinja", "chat_template.json"):
        files.pop(each, None)
    said = orjson.loads(files["tokenizer_config.json"])
    had = said.pop("chat_template", None)
    if len(sources) > 1:
        said["chat_template"] = [{"name": k, "template": text} for k, text in sources.items()]
    else:
        files["chat_template.jinja"] = next(iter(sources.values())).encode()
    if had is not None or len(sources) > 1:
        files["tokenizer_config.json"] = _json(said)


def _add_bos(files: dict[str, bytes], bos: str, bos_id: int) -> None:
    """Let a tokenizer's files begin texts with BOS, after all that they do to them."""
    whole, adds = orjson.loads(files["tokenizer.json"]), _begins_with_bos(bos, bos_id)
    had = whole.get("post_processor")
    both = {"type": "Sequence", "processors": [had, adds]}
    files["tokenizer.json"] = _json(whole | {"post_processor": adds if had is None else both})
    said = orjson.loads(files["tokenizer_config.json"])
    if said.pop("add_bos_token", None) is not None:  # older classes go by it, and not by the file
        files["tokenizer_config.json"] = _json(said | {"add_bos_token": True})


def _begins_with_bos(text: str, bos_id: int) -> dict[str, Any]:
    """Return the post-processor that begins a text, and the first of a pair, with BOS."""
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": each, "type_id": 0}} for each in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {text: {"id": text, "ids": [bos_id], "tokens": [text]}},
    }


def _json(values: Mapping[str, Any]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_INDENT_2)


def _ids(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the ids of the roles that a tokenizer has."""
    found = {role: getattr(tokenizer, f"{role}_id") for role in _ROLES}
    return {role: i for role, i in found.items() if i is not None}


def byte_tokenizer_json(tokenizer: ByteTokenizer) -> bytes:
    """Return a `tokenizer.json` that gives the ids of a tokenizer of bytes.

    It is a byte-level BPE without merges; it begins texts with BOS where special tokens are added.
    `transformers` reads `<|bos|>`, `<|eos|>` and `<|pad|>` in a text as tokens too, which are bytes
    to ours, so that no text can end a document.

    Examples:
        >>> from tokenizers import Tokenizer
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> ours = make_byte_tokenizer(["<|end|>"])
        >>> theirs = Tokenizer.from_str(byte_tokenizer_json(ours).decode())
        >>> theirs.encode("né<|end|>").ids == [ours.bos_id, *ours.encode("né<|end|>")]
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
        "vocab": map_letters_to_bytes(),
        "merges": [],
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": _begins_with_bos(BOS, tokenizer.bos_id),
        "decoder": level,
        "model": model,
    }
    return _json(whole)
