"""Tokenizers that a `tokenizer.json` of the `tokenizers` library describes: read, trained, written.

Their ids are those that `transformers` gives for the same text without its own special tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from trainkit.files import atomic_write, convert_disk_errors, read_limited
from trainkit.text.tokenizers.bytes import Offsets, byte_name
from trainkit.text.tokenizers.special import BOS, EOS, PAD
from trainkit.types import DataError, needs_extra

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ROLES = {"bos": BOS, "eos": EOS, "pad": PAD}

_OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

_MOST_BYTES = 1 << 27
"""The largest tokenizer.json that is read; those of a million tokens have half of it."""
_MOST_UNUSED = 1 << 20
"""The most ids without a token: a model has a row for each."""

# A word with the blank before it; one to three digits; a run of other signs; line ends with the
# blank lines before them; blanks, except the one that goes with what follows. Numbers are cut from
# the left, and code keeps its indentation in one piece.
_PIECES = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]|\s+(?!\S)|\s+"


@attrs.frozen(eq=False)
class HFTokenizer:
    """What a `tokenizer.json` says, read by the `tokenizers` library.

    Attributes:
        backend: The `tokenizers.Tokenizer`, without truncation and padding.
        vocab_size: The largest id, of added tokens too, and one.
        special_ids: The id of each special token, by its text.
        bos_id: The token before a document, or None; `eos_id` and `pad_id` likewise.
    """

    backend: Any
    vocab_size: int
    special_ids: Mapping[str, int]
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    @property
    def identity(self) -> str:
        """A text that changes with the ids it gives."""
        return f"{self.backend.to_str()} {self.bos_id} {self.eos_id} {self.pad_id}"

    @property
    def adds_bos(self) -> bool:
        """Whether `transformers` begins a text with BOS by it, as `encode` never does."""
        return self.bos_id is not None and self.backend.encode("a").ids[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are read as such, and none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what `encode` does of each text, faster: on all cores, where that is allowed."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return the ids, and of each the characters `[begin, end)` that it belongs to."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each id alone: `<0xC3>` for bytes that are no character."""
        added = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        byte_of = byte_of_letter() if _is_byte_level(self.backend) else {}
        return [
            added[i] if i in added else _piece(self.backend.id_to_token(i), byte_of)
            for i in map(int, ids)
        ]


def open_hf_tokenizer(
    source: Any, *, bos: str | None = None, eos: str | None = None, pad: str | None = None
) -> HFTokenizer:
    """Return the tokenizer of a `tokenizer.json`: the ids are those that `transformers` gives.

    Which of its tokens begin and end a document follows from the arguments, or else from
    `tokenizer_config.json` or `special_tokens_map.json` beside it, or else from the names
    `<|bos|>`, `<|eos|>` and `<|pad|>`, which trainkit's own have. Nothing is guessed: a role that
    nobody names is None.

    Args:
        source: A `tokenizer.json`, a folder that holds one, a `tokenizers.Tokenizer`, or a fast
            tokenizer of `transformers`. An object is copied, never changed.
        bos: The text of the token that begins a document.
        eos: Of the token that ends one.
        pad: Of the token that pads.

    Raises:
        DataError: The file is missing or no tokenizer, its ids would not be the same each time, or
            a token that it names is not in its vocabulary.
        ConfigError: The library is missing: `pip install "trainkit-lm[hf]"`.

    Examples:
        >>> tokenizer = train_bpe(["one two three"], vocab_size=300)
        >>> open_hf_tokenizer(tokenizer.backend).encode("two") == tokenizer.encode("two")
        True
    """
    with needs_extra("hf"):
        import tokenizers  # noqa: PLC0415 - an extra
    config: dict[str, Any] = {}
    if isinstance(source, str | Path):
        path = Path(source)
        path = _file_of(path) if path.is_dir() else path
        name, text, config = str(path), _text_of(path), settings_beside(path)
    else:
        name = type(source).__name__
        roles = {f"{role}_token": getattr(source, f"{role}_token", None) for role in _ROLES}
        config = {role: token for role, token in roles.items() if token}
        text = getattr(source, "backend_tokenizer", source).to_str()
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise _wrong(name, f"no tokenizer.json: {error}") from error
    if getattr(backend.model, "dropout", None):
        mend = 'so its ids differ each time; set "dropout" to null'
        raise _wrong(name, f"it drops merges at random ({backend.model.dropout}), {mend}")
    backend.no_truncation()
    backend.no_padding()
    _add_from_config(backend, config, name)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest - len(vocabulary) > _MOST_UNUSED:
        what = f"its largest id is {largest}, and it has {len(vocabulary)} tokens"
        mend = "a model would have a row for every id between; number the tokens anew"
        raise _wrong(name, f"{what}: {mend}", got=largest)
    asked = {"bos": bos, "eos": eos, "pad": pad}
    roles = {
        f"{role}_id": _id_of(vocabulary, asked[role] or config.get(f"{role}_token"), own, name)
        for role, own in _ROLES.items()
    }
    added = sorted(backend.get_added_tokens_decoder().items())
    special = {token.content: i for i, token in added if token.special}
    return HFTokenizer(backend, largest + 1, special, **roles)


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, special: Sequence[str] = (BOS, EOS, PAD)
) -> HFTokenizer:
    """Return a byte-level BPE trained on texts; it encodes every text without loss.

    A text is first cut into words with the blank before them, groups of one to three digits, runs
    of other signs, and blanks; tokens never cross these cuts. The same texts in the same order give
    the same tokenizer. Byte pair encoding of words: Sennrich, Haddow and Birch, 2016; over bytes:
    Radford et al., 2019.

    Args:
        texts: The texts, read once.
        vocab_size: The number of ids at most, special tokens and the 256 bytes included: fewer,
            where the texts have too few pairs that occur twice.
        special: Special tokens, with ids from 0 on. `<|bos|>`, `<|eos|>` and `<|pad|>` among them
            begin, end and pad documents.

    Raises:
        ValueError: `vocab_size` is below 256 and the special tokens, or there is no text.
        ConfigError: The library is missing: `pip install "trainkit-lm[hf]"`.

    Examples:
        >>> tokenizer = train_bpe(["low lower lowest"] * 3, vocab_size=270)
        >>> tokenizer.pieces(tokenizer.encode("lowest"))
        ['low', 'e', 'st']
        >>> tokenizer.decode(tokenizer.encode("7 °C"))
        '7 °C'
    """
    with needs_extra("hf"):
        from tokenizers import (  # noqa: PLC0415 - an extra
            Regex,
            Tokenizer,
            decoders,
            models,
            pre_tokenizers,
            trainers,
        )
    least = 256 + len(special)
    if vocab_size < least:
        raise ValueError(
            f"train_bpe: vocab_size must be at least {least}, for 256 bytes and {len(special)} "
            f"special tokens; got {vocab_size}"
        )
    first = next(texts := iter(texts), None)
    if first is None:
        raise ValueError("train_bpe: there is no text to train on")
    backend = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((text for part in ([first], texts) for text in part), trainer)
    return open_hf_tokenizer(backend)


def add_tokens(tokenizer: HFTokenizer, special: Sequence[str]) -> HFTokenizer:
    """Return a tokenizer with more special tokens: their ids follow those that there are.

    Args:
        tokenizer: It stays as it is.
        special: Texts; those that are its special tokens already keep their ids.

    Raises:
        DataError: A text is an ordinary token of its vocabulary, or empty.

    Examples:
        >>> tokenizer = train_bpe(["one two three"], vocab_size=300)
        >>> more = add_tokens(tokenizer, ["<|call|>"])
        >>> more.encode("one<|call|>")[-1] == tokenizer.vocab_size == more.vocab_size - 1
        True
    """
    with needs_extra("hf"):
        from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415 - an extra
    wanted = [text for text in dict.fromkeys(special) if text not in tokenizer.special_ids]
    taken = [text for text in wanted if not text or tokenizer.backend.token_to_id(text) is not None]
    if taken:
        raise DataError(f"add_tokens: {taken[0]!r} is empty, or an ordinary token already")
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in wanted])
    ids: dict[str, Any] = {text: backend.token_to_id(text) for text in wanted}
    if [*ids.values()] != [*range(tokenizer.vocab_size, tokenizer.vocab_size + len(ids))]:
        raise DataError(f"add_tokens: the new tokens would have the ids {list(ids.values())[:9]}")
    return attrs.evolve(
        tokenizer,
        backend=backend,
        vocab_size=tokenizer.vocab_size + len(ids),
        special_ids={**tokenizer.special_ids, **ids},
    )


def save_tokenizer(tokenizer: HFTokenizer, path: str | os.PathLike[str]) -> None:
    """Write a tokenizer into one file, a `tokenizer.json`, whole or not at all.

    Raises:
        DiskError: The file cannot be written.

    Effects:
        Writes `path`, through a temporary file beside it.
    """
    text = tokenizer.backend.to_str(pretty=True)
    with (
        atomic_write(Path(path), by="save_tokenizer") as file,
        convert_disk_errors(Path(path), by="save_tokenizer", needed=len(text)),
    ):
        file.write(text.encode())


def _file_of(folder: Path) -> Path:
    """Return a folder's tokenizer.json; refuse a folder that has a tokenizer in another form."""
    others = [name for name in _OTHER_FORMS if (folder / name).exists()]
    if others and not (folder / "tokenizer.json").exists():
        raise DataError(
            f"{folder} has {others[0]}, and no tokenizer.json, which alone is read; "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...) "
            "writes one",
            where=folder,
            got=others,
        )
    return folder / "tokenizer.json"


def _text_of(path: Path) -> str:
    try:
        return read_limited(path, most=_MOST_BYTES).decode()
    except OSError as error:
        raise _wrong(path, error.strerror) from error
    except UnicodeDecodeError as error:
        raise _wrong(path, f"no tokenizer.json: invalid UTF-8 at byte {error.start}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        DataError: It cannot be read, or is no JSON object.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.json"
        ...     _ = path.write_text('{"a": 1}')
        ...     read_object(path)
        {'a': 1}
    """
    try:
        found = orjson.loads(_text_of(file))
    except orjson.JSONDecodeError as error:
        raise _wrong(file, f"bad JSON: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(file, f"no JSON object but {type(found).__name__}")
    return found


def settings_beside(path: Path) -> dict[str, Any]:
    """Return what the files beside a tokenizer.json say; the configuration goes first.

    Raises:
        DataError: One of them is no JSON object.

    Examples:
        >>> settings_beside(Path("/does/not/exist/tokenizer.json"))
        {}
    """
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = path.with_name(name)
        if not file.exists():
            continue
        found = read_object(file).items()
        merged |= {key: value for key, value in found if value is not None}
    return _with_added(merged, path.with_name("added_tokens.json"))


def _with_added(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return a configuration that lists the tokens of an older file, if it lists none itself."""
    if "added_tokens_decoder" in config or not file.exists():
        return config
    try:
        ids = read_object(file).items()
        listed = {str(int(i)): {"content": text, "normalized": False} for text, i in ids}
    except (TypeError, ValueError) as error:
        raise _wrong(file, f"no JSON object of tokens and their ids: {error}") from error
    return config | {"added_tokens_decoder": listed}


def _add_from_config(backend: Any, config: Mapping[str, Any], name: str) -> None:
    """Add the tokens that only the configuration lists, at the ids that it gives them."""
    from tokenizers import AddedToken  # noqa: PLC0415 - an extra

    try:
        listed = config.get("added_tokens_decoder", {}).items()
        tokens = {int(i): AddedToken(**facts) for i, facts in listed}
    except (AttributeError, TypeError, ValueError) as error:
        what = f"added_tokens_decoder in its configuration is no table of tokens by id: {error}"
        raise _wrong(name, what) from error
    for want, token in sorted(tokens.items(), key=lambda item: item[0]):
        content = token.content
        if backend.token_to_id(content) is None:
            backend.add_tokens([token])
        if (got := backend.token_to_id(content)) != want:
            what = f"its configuration gives {content!r} the id {want}, but it is {got}"
            raise _wrong(name, what, got=got, want=want)


def _id_of(vocabulary: Mapping[str, int], token: Any, own: str, name: str) -> int | None:
    """Return the id of a role's token; that of trainkit's own name, or None, where none is named.

    A token stands in a configuration as a text or as an object with its `content`.
    """
    if token is None:
        return vocabulary.get(own)
    text = str(token.get("content", token) if isinstance(token, dict) else token)
    if text not in vocabulary:
        what = f"the token {text!r} is not in its vocabulary of {len(vocabulary)}"
        raise _wrong(name, what, want=text)
    return vocabulary[text]


def _wrong(place: object, what: str | None, **facts: Any) -> DataError:
    """Return the error that says what is wrong with a tokenizer, or a file of one."""
    return DataError(f"{place}: {what}", where=place, **facts)


def _is_byte_level(backend: Any) -> bool:
    """Say whether the letters of its tokens stand for bytes."""
    return '"ByteLevel"' in orjson.dumps(orjson.loads(backend.to_str())["decoder"]).decode()


def byte_of_letter() -> dict[str, int]:
    """Return which byte each letter stands for, in the vocabularies of byte-level BPE.

    Bytes that Latin-1 prints stand for themselves, the others in order for U+0100 and above.

    Examples:
        >>> byte_of_letter()["A"], byte_of_letter()["\u0120"]
        (65, 32)
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(others)}


def _piece(token: str, byte_of: Mapping[str, int]) -> str:
    if not byte_of.keys() >= set(token):
        return token.replace("\u2581", " ")  # how SentencePiece writes a blank
    data = bytes(byte_of[letter] for letter in token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(map(byte_name, data))
