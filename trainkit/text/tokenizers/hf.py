"""Tokenizers of the `tokenizers` library, as in a `tokenizer.json`: open, train and save them.

Their ids are those of `transformers` for the same text, without the special tokens that it adds.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from trainkit.files import atomic_write, convert_disk_errors, read_limited
from trainkit.text.tokenizers.bytes import Offsets, format_byte
from trainkit.text.tokenizers.special import BOS, EOS, PAD
from trainkit.types import DataError, needs_extra

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ROLES = ("bos", "eos", "pad")

_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

_MAX_BYTES = 1 << 27
"""The maximum size of a tokenizer.json; those with a million tokens have half of it."""
_MAX_UNUSED = 1 << 20
"""The maximum number of ids without a token: a model has a row for each."""

# A word with the blank before it; one to three digits; a run of other signs; line ends with the
# blank lines before them; blanks, except for one before a word. Numbers are split from the left,
# and the indentation of code is one piece.
_PIECES = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]|\s+(?!\S)|\s+"


@attrs.frozen(eq=False)
class HFTokenizer:
    """A tokenizer of the `tokenizers` library.

    Attributes:
        backend: The `tokenizers.Tokenizer`, without truncation and padding.
        vocab_size: The largest id, of added tokens too, plus one.
        special_ids: The ids of the special tokens, by their text.
        bos_id: The token before a document, or None.
        eos_id: The token after a document, or None.
        pad_id: The padding token, or None.
    """

    backend: Any
    vocab_size: int
    special_ids: Mapping[str, int]
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    @property
    def identity(self) -> str:
        """A text that identifies the mapping to ids."""
        return f"{self.backend.to_str()} {self.bos_id} {self.eos_id} {self.pad_id}"

    @property
    def adds_bos(self) -> bool:
        """Whether `transformers` adds BOS to a text; `encode` never does."""
        return self.bos_id is not None and self.backend.encode("a").ids[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are encoded as such, and none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, on all cores unless TOKENIZERS_PARALLELISM is off."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Encode a text; return the ids, and the characters `[start, end)` of each."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, without special tokens."""
        # The library takes Python's integers alone, not those of numpy or torch.
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each id separately: `<0xC3>` for bytes that are no character."""
        # Added tokens are not in the alphabet of the vocabulary.
        added = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        # Only a byte-level decoder, alone or in a sequence, makes letters of the vocabulary bytes.
        decoder = orjson.loads(self.backend.to_str())["decoder"]
        byte_of = map_letters_to_bytes() if b'"ByteLevel"' in orjson.dumps(decoder) else {}
        return [
            added[i] if i in added else _format_token(self.backend.id_to_token(i), byte_of)
            for i in map(int, ids)
        ]


def open_hf_tokenizer(
    source: Any, *, bos: str | None = None, eos: str | None = None, pad: str | None = None
) -> HFTokenizer:
    """Open a `tokenizer.json`; the ids are those of `transformers`.

    The tokens that begin and end a document are those of the arguments, or of
    `tokenizer_config.json` or `special_tokens_map.json` in the same folder, or those with the names
    `<|bos|>`, `<|eos|>` and `<|pad|>`, which trainkit's own tokenizers have. Nothing is guessed:
    otherwise they are None.

    Args:
        source: A `tokenizer.json`, a folder that has one, a `tokenizers.Tokenizer`, or a fast
            tokenizer of `transformers`. An object is copied, never changed.
        bos: The text of the token that begins a document.
        eos: The text of the token that ends one.
        pad: The text of the padding token.

    Raises:
        DataError: The file is missing or no tokenizer, its ids are random, or a token that it names
            is not in its vocabulary.
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
        path = _find_file(path) if path.is_dir() else path
        name = str(path)
        text = _read_text(path)
        config = read_tokenizer_settings(path)
    else:
        name = type(source).__name__
        for role in _ROLES:
            if token := getattr(source, f"{role}_token", None):
                config[f"{role}_token"] = token
        # By text, which copies it: the caller's object stays as it is.
        text = getattr(source, "backend_tokenizer", source).to_str()
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    # The library raises plain exceptions.
    except Exception as error:
        raise DataError(f"{name}: no tokenizer.json: {error}", where=name) from error
    # BPE dropout is a regularizer of training, and would make a corpus irreproducible.
    if getattr(backend.model, "dropout", None):
        raise DataError(
            f"{name}: it drops merges at random ({backend.model.dropout}), so its ids differ each "
            'time; set "dropout" to null',
            where=name,
        )
    # A saved tokenizer may truncate and pad, which would change documents silently.
    backend.no_truncation()
    backend.no_padding()
    _add_from_config(backend, config, name)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    # Ids may have gaps: the size that a model needs is the largest id plus one.
    largest = max(vocabulary.values(), default=-1)
    if largest - len(vocabulary) > _MAX_UNUSED:
        raise DataError(
            f"{name}: its largest id is {largest}, and it has {len(vocabulary)} tokens: a model "
            "would have a row for every id between; renumber the tokens",
            where=name,
            got=largest,
        )
    # Special tokens are known only from the list of added ones.
    added = sorted(backend.get_added_tokens_decoder().items())
    return HFTokenizer(
        backend,
        largest + 1,
        {token.content: i for i, token in added if token.special},
        bos_id=_find_id(vocabulary, bos or config.get("bos_token"), BOS, name),
        eos_id=_find_id(vocabulary, eos or config.get("eos_token"), EOS, name),
        pad_id=_find_id(vocabulary, pad or config.get("pad_token"), PAD, name),
    )


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, special: Sequence[str] = (BOS, EOS, PAD)
) -> HFTokenizer:
    """Train a byte-level BPE tokenizer, which encodes every text without loss.

    A text is first split into words with the blank before them, groups of one to three digits, runs
    of other signs, and blanks; tokens never cross these boundaries. The same texts in the same
    order give the same tokenizer. Byte pair encoding of words: Sennrich, Haddow and Birch, 2016;
    over bytes: Radford et al., 2019.

    Args:
        texts: The texts, read once.
        vocab_size: The maximum number of ids, special tokens and the 256 bytes included. There are
            fewer if the texts have too few pairs that occur twice.
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
    min_size = 256 + len(special)
    if vocab_size < min_size:
        raise ValueError(
            f"train_bpe: vocab_size must be at least {min_size}, for 256 bytes and {len(special)} "
            f"special tokens; got {vocab_size}"
        )
    # The library trains on nothing without an error, and then knows only bytes.
    first = next(texts := iter(texts), None)
    if first is None:
        raise ValueError("train_bpe: there is no text to train on")
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    # The regular expression of `ByteLevel` itself would split the words again.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    # It turns the letters that stand for bytes into text again.
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(itertools.chain([first], texts), trainer)
    return open_hf_tokenizer(backend)


def add_tokens(tokenizer: HFTokenizer, special: Sequence[str]) -> HFTokenizer:
    """Return a tokenizer with more special tokens, whose ids follow the existing ones.

    Args:
        tokenizer: The tokenizer; it is not changed.
        special: Texts; existing special tokens among them keep their ids.

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
    texts = [text for text in dict.fromkeys(special) if text not in tokenizer.special_ids]
    for text in texts:
        if not text or tokenizer.backend.token_to_id(text) is not None:
            raise DataError(f"add_tokens: {text!r} is empty, or an ordinary token already")
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    # The library decides on the ids, so they are compared with the expected ones.
    ids: dict[str, Any] = {text: backend.token_to_id(text) for text in texts}
    expected = range(tokenizer.vocab_size, tokenizer.vocab_size + len(ids))
    if [*ids.values()] != [*expected]:
        raise DataError(f"add_tokens: the new tokens would have the ids {list(ids.values())[:9]}")
    return attrs.evolve(
        tokenizer,
        backend=backend,
        vocab_size=tokenizer.vocab_size + len(ids),
        special_ids={**tokenizer.special_ids, **ids},
    )


def save_tokenizer(tokenizer: HFTokenizer, path: str | os.PathLike[str]) -> None:
    """Write a tokenizer into a `tokenizer.json`, atomically.

    Raises:
        DiskError: The file cannot be written.

    Effects:
        Writes `path`, through a temporary file in the same directory.
    """
    text = tokenizer.backend.to_str(pretty=True)
    with (
        atomic_write(Path(path), by="save_tokenizer") as file,
        convert_disk_errors(Path(path), by="save_tokenizer", needed=len(text)),
    ):
        file.write(text.encode())


def _find_file(folder: Path) -> Path:
    """Return a folder's tokenizer.json; raise DataError if it has a tokenizer in another format."""
    others = [name for name in _OTHER_FORMATS if (folder / name).exists()]
    if others and not (folder / "tokenizer.json").exists():
        raise DataError(
            f"{folder} has {others[0]}, and no tokenizer.json, which alone is read; "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(...) "
            "writes one",
            where=folder,
            got=others,
        )
    return folder / "tokenizer.json"


def _read_text(path: Path) -> str:
    try:
        return read_limited(path, max_bytes=_MAX_BYTES).decode()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", where=path) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: no tokenizer.json: invalid UTF-8 at byte {error.start}", where=path
        ) from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object of a file.

    Raises:
        DataError: It cannot be read, or is no JSON object.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "a.json"
        ...     _ = path.write_text('{"a": 1}')
        ...     read_json_object(path)
        {'a': 1}
    """
    try:
        value = orjson.loads(_read_text(file))
    except orjson.JSONDecodeError as error:
        raise DataError(f"{file}: bad JSON: {error}", where=file) from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: no JSON object but {type(value).__name__}", where=file)
    return value


def read_tokenizer_settings(path: Path) -> dict[str, Any]:
    """Read the settings in the folder of a tokenizer.json; `tokenizer_config.json` goes first.

    Raises:
        DataError: One of the files is no JSON object.

    Examples:
        >>> read_tokenizer_settings(Path("/does/not/exist/tokenizer.json"))
        {}
    """
    # `tokenizer_config.json` last, so that it overrides the other.
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = path.with_name(name)
        if file.exists():
            values = read_json_object(file).items()
            settings |= {key: value for key, value in values if value is not None}
    # Older folders list added tokens in a file of its own.
    file = path.with_name("added_tokens.json")
    if "added_tokens_decoder" in settings or not file.exists():
        return settings
    try:
        ids = read_json_object(file).items()
        added = {str(int(i)): {"content": text, "normalized": False} for text, i in ids}
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{file}: no JSON object of tokens and their ids: {error}", where=file
        ) from error
    return settings | {"added_tokens_decoder": added}


def _add_from_config(backend: Any, config: Mapping[str, Any], name: str) -> None:
    """Add the tokens that only the configuration lists, with the ids that it lists."""
    from tokenizers import AddedToken  # noqa: PLC0415 - an extra

    try:
        listed = config.get("added_tokens_decoder", {}).items()
        tokens = {int(i): AddedToken(**fields) for i, fields in listed}
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"{name}: added_tokens_decoder in its configuration is no table of tokens by id: "
            f"{error}",
            where=name,
        ) from error
    # In the order of the ids, as the library numbers new tokens itself.
    for expected, token in sorted(tokens.items(), key=lambda item: item[0]):
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        actual = backend.token_to_id(token.content)
        if actual != expected:
            raise DataError(
                f"{name}: its configuration gives {token.content!r} the id {expected}, but it is "
                f"{actual}",
                where=name,
                got=actual,
                want=expected,
            )


def _find_id(vocabulary: Mapping[str, int], token: Any, default: str, name: str) -> int | None:
    """Return the id of a role's token; if none is named, that of trainkit's default or None.

    A token is a text in a configuration, or an object with its `content`.
    """
    if token is None:
        return vocabulary.get(default)
    text = str(token.get("content", token) if isinstance(token, dict) else token)
    if text not in vocabulary:
        raise DataError(
            f"{name}: the token {text!r} is not in its vocabulary of {len(vocabulary)}",
            where=name,
            want=text,
        )
    return vocabulary[text]


def map_letters_to_bytes() -> dict[str, int]:
    """Return the byte that each letter represents in the vocabularies of byte-level BPE.

    Printable bytes of Latin-1 represent themselves, the others are U+0100 and above in order.

    Examples:
        >>> map_letters_to_bytes()["A"], map_letters_to_bytes()["\u0120"]
        (65, 32)
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _format_token(token: str, byte_of: Mapping[str, int]) -> str:
    if not byte_of.keys() >= set(token):
        return token.replace("\u2581", " ")  # how SentencePiece writes a blank
    data = bytes(byte_of[letter] for letter in token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(map(format_byte, data))
