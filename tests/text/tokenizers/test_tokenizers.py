"""Text to tokens and back: bytes, a tokenizer.json, a BPE trained here, and any other object."""

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.text.tokenizers.bytes import make_byte_tokenizer
from trainkit.text.tokenizers.documents import encode_document, encode_documents, make_text_encoder
from trainkit.text.tokenizers.hf import open_hf_tokenizer, save_tokenizer, train_bpe
from trainkit.text.tokenizers.open import (
    find_tokenizer,
    list_compatible_hashes,
    open_tokenizer,
    tokenizer_hash,
)
from trainkit.text.tokenizers.special import CHAT_SPECIAL
from trainkit.types import ConfigError, DataError, DiskError

BYTES = make_byte_tokenizer()
SPECIAL = ("<|end|>", "<|end|><|end|>", "<x>")
TEXT = "def f(x):\n    return x + 12345  # naïve 日本語 \U0001f600\r\n\n\tif x:\n        pass\n"


# ------------------------------------------------------------------------------------------- bytes


@given(st.text())
def test_every_text_comes_back(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.decode([BYTES.bos_id, *ids, BYTES.eos_id, BYTES.pad_id]) == text


def test_special_tokens_lie_above_the_bytes_and_inside_the_vocabulary():
    special = {BYTES.bos_id, BYTES.eos_id, BYTES.pad_id}
    assert special == {256, 257, 258}
    assert BYTES.vocab_size == 259


def test_a_sample_that_ends_inside_a_character_can_be_shown():
    assert BYTES.decode("ä".encode()[:1]) == "\ufffd"
    assert BYTES.pieces([*"aä\n".encode(), 257]) == ["a", "<0xC3>", "<0xA4>", "\n", "<|eos|>"]


def test_special_tokens_of_ones_own_are_read_in_a_text_the_longest_first():
    tokenizer = make_byte_tokenizer(SPECIAL)
    assert tokenizer.special_ids == {"<|end|>": 259, "<|end|><|end|>": 260, "<x>": 261}
    assert tokenizer.vocab_size == 262
    ids = tokenizer.encode("<|end|><|end|><|end|>ä<x")
    assert ids == [260, 259, *"ä<x".encode()]
    assert tokenizer.decode(ids) == "ä<x"
    assert tokenizer.pieces(ids)[:2] == ["<|end|><|end|>", "<|end|>"]
    assert tokenizer.encode("") == []


@given(st.lists(st.sampled_from(["<", *SPECIAL, "ä", "日", "a"])).map("".join))
def test_offsets_say_which_characters_a_byte_or_special_token_belongs_to(text):
    tokenizer = make_byte_tokenizer(SPECIAL)
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    names = {i: name.encode() for name, i in tokenizer.special_ids.items()}
    spans = dict.fromkeys(offsets)
    assert "".join(text[begin:end] for begin, end in spans) == text
    for span in spans:
        own = b"".join(
            names.get(i, bytes([i]) if i < 256 else b"")
            for i, o in zip(ids, offsets, strict=True)
            if o == span
        )
        assert own.decode() == text[slice(*span)]


@pytest.mark.parametrize("special", [["a", "a"], [""]])
def test_special_tokens_must_differ_and_be_something(special):
    with pytest.raises(ValueError, match="special tokens must be different texts"):
        make_byte_tokenizer(special)


# ------------------------------------------------------------------------------------------- others


class Letters:
    """A tokenizer with no attributes at all."""

    def encode(self, text):
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids):
        return "".join(chr(i + ord("a")) for i in ids)


def test_special_tokens_are_added_only_where_there_are_some():
    assert encode_document(BYTES, "ab").tolist() == [256, 97, 98, 257]
    assert encode_document(Letters(), "ab").tolist() == [0, 1]
    letters = Letters()
    letters.bos_id, letters.eos_id = None, 30
    assert encode_document(letters, "ab").tolist() == [0, 1, 30]
    assert encode_document(Letters(), "").tolist() == []
    assert [x.tolist() for x in encode_documents(letters, ["", "a"])] == [[30], [0, 30]]


def test_a_record_without_its_text_is_refused_with_the_fields_name():
    encode = make_text_encoder(BYTES, field="body")
    assert encode({"body": "a", "x": 1}).tolist() == [256, 97, 257]
    with pytest.raises(DataError, match=r"there is no field 'body'; found text, id"):
        encode({"text": "a", "id": 1})
    with pytest.raises(DataError, match=r"field 'body' must be a string, got NoneType"):
        encode({"body": None})


def test_a_tokenizer_that_cannot_be_told_from_another_has_no_hash():
    letters = Letters()
    with pytest.raises(ValueError, match=r"Letters has nothing .*`identity`"):
        tokenizer_hash(letters)
    letters.identity = "1"
    before = tokenizer_hash(letters)
    letters.identity = "2"
    assert tokenizer_hash(letters) != before
    assert tokenizer_hash(BYTES) == tokenizer_hash(make_byte_tokenizer())
    assert tokenizer_hash(BYTES) != tokenizer_hash(make_byte_tokenizer(["x"]))


def test_bytes_cover_bytes_with_the_first_of_their_special_tokens():
    hashes = list_compatible_hashes(make_byte_tokenizer(["x", "y"]))
    smaller = [make_byte_tokenizer(special) for special in ([], ["x"], ["x", "y"])]
    assert hashes == tuple(map(tokenizer_hash, smaller))
    assert tokenizer_hash(make_byte_tokenizer(["y"])) not in hashes
    assert list_compatible_hashes(object()) == ()


def test_a_tokenizer_is_opened_by_its_name(tmp_path):
    assert open_tokenizer("bytes") == make_byte_tokenizer(CHAT_SPECIAL)
    with pytest.raises(DataError, match=r"there is no 'gpt5'; give `bytes`, a tokenizer\.json"):
        open_tokenizer("gpt5")
    with pytest.raises(DataError, match=r"tokenizer\.json: No such file"):
        open_tokenizer(tmp_path)


# ---------------------------------------------------------------------------------- tokenizer.json


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return train_bpe([TEXT * 3, "the theme of them"], vocab_size=320)


def test_the_tokenizer_that_lies_beside_the_data_is_found(tmp_path):
    data = [tmp_path / name for name in ("a.txt", "a.tokens", "b.tokens")]
    assert find_tokenizer(None, data) == "bytes"
    (tmp_path / "a.tokenizer.json").mkdir()
    (tmp_path / "b.tokenizer.json").write_text("{}")
    assert find_tokenizer(None, data) == str(tmp_path / "b.tokenizer.json")
    assert find_tokenizer(None, data[:2]) == find_tokenizer("bytes", data) == "bytes"


def test_a_bpe_brings_every_text_back(bpe):
    @given(st.text())
    def check(text):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert all(0 <= i < bpe.vocab_size for i in ids)

    check()
    assert 259 < bpe.vocab_size <= 320
    assert len(bpe.encode(TEXT)) < len(TEXT.encode()) / 2


@pytest.mark.usefixtures("bpe")
def test_a_bpe_cuts_words_numbers_signs_and_blanks_apart():
    text = "x1 x1 1234567 a==b   a"
    tokenizer = train_bpe([text + "\n"] * 9, vocab_size=400)
    want = ["x", "1", " x", "1", " ", "123", "456", "7", " a", "==", "b", "  ", " a"]
    assert tokenizer.pieces(tokenizer.encode(text)) == want


def test_a_bpe_is_the_same_each_time_and_comes_back_from_its_file(bpe, tmp_path):
    again = train_bpe([TEXT * 3, "the theme of them"], vocab_size=320)
    save_tokenizer(bpe, tmp_path / "tokenizer.json")
    opened = open_tokenizer(tmp_path)
    for other in (again, opened, open_tokenizer(tmp_path / "tokenizer.json")):
        assert tokenizer_hash(other) == tokenizer_hash(bpe)
        assert (other.bos_id, other.eos_id, other.pad_id) == (0, 1, 2)
        assert other.encode(TEXT) == bpe.encode(TEXT)
    assert tokenizer_hash(train_bpe([TEXT], vocab_size=320)) != tokenizer_hash(bpe)
    assert encode_document(opened, "a").tolist() == [0, *bpe.encode("a"), 1]
    with pytest.raises(DiskError, match="save_tokenizer: cannot write"):
        save_tokenizer(bpe, tmp_path / "none" / "tokenizer.json")


@pytest.mark.usefixtures("bpe")
def test_a_bpe_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="at least 259, for 256 bytes and 3 special tokens; got 9"):
        train_bpe([TEXT], vocab_size=9)
    with pytest.raises(ValueError, match="there is no text to train on"):
        train_bpe([], vocab_size=300)
    assert train_bpe([""], vocab_size=256, special=()).bos_id is None


@pytest.mark.parametrize("text", [TEXT, "", " <|eos|>x<|tool|> <|tool|>", "a\u0301 \x00 \u017f"])
def test_the_ids_are_those_of_transformers(bpe, text, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe.backend, bos_token="<|bos|>", pad_token="<|pad|>"
    )
    theirs.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    want = theirs(text, add_special_tokens=False)["input_ids"]
    theirs.save_pretrained(tmp_path)
    for ours in (open_hf_tokenizer(theirs), open_hf_tokenizer(tmp_path)):
        assert ours.encode(text) == want
        assert ours.encode_batch([text, text]) == [want, want]
        assert ours.vocab_size == len(theirs)
        assert ours.special_ids["<|tool|>"] == theirs.convert_tokens_to_ids("<|tool|>")
        assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)


def test_offsets_of_a_bpe_count_characters(bpe):
    text = "naïve 日 x<|eos|>"
    ids, offsets = bpe.encode_with_offsets(text)
    assert ids == bpe.encode(text)
    assert offsets[-1] == (9, 16)
    cover = {place for begin, end in offsets for place in range(begin, end)}
    assert cover == set(range(len(text)))
    assert bpe.pieces(ids)[-1] == "<|eos|>"


@pytest.mark.usefixtures("bpe")
def test_roles_come_from_arguments_then_the_files_beside_and_are_never_guessed(tmp_path):
    plain = train_bpe([TEXT], vocab_size=300, special=("<s>", "</s>"))
    save_tokenizer(plain, tmp_path / "tokenizer.json")
    assert open_hf_tokenizer(tmp_path).eos_id is None
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "x"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    opened = open_hf_tokenizer(tmp_path)
    assert (opened.bos_id, opened.eos_id, opened.pad_id) == (0, 1, None)
    assert open_hf_tokenizer(tmp_path, eos="<s>").eos_id == 0
    assert tokenizer_hash(open_hf_tokenizer(tmp_path, eos="<s>")) != tokenizer_hash(opened)
    with pytest.raises(DataError, match=r"'<end>' is not in its vocabulary of"):
        open_hf_tokenizer(tmp_path, eos="<end>")


def test_tokens_that_only_the_configuration_lists_are_added_at_their_ids(bpe, tmp_path):
    save_tokenizer(bpe, tmp_path / "tokenizer.json")
    size = bpe.vocab_size

    def write(i):
        facts = {str(i): {"content": "<tool>", "special": True}}
        text = json.dumps({"added_tokens_decoder": facts})
        (tmp_path / "tokenizer_config.json").write_text(text)

    write(size)
    opened = open_hf_tokenizer(tmp_path)
    assert opened.encode("<tool>") == [size]
    assert opened.vocab_size == size + 1
    write(size + 5)
    with pytest.raises(DataError, match=rf"gives '<tool>' the id {size + 5}, but it is {size}"):
        open_hf_tokenizer(tmp_path)
    for value in ({"x": {}}, {"50": 3}, [1]):
        text = json.dumps({"added_tokens_decoder": value})
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match="no table of tokens by id"):
            open_hf_tokenizer(tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused_by_name(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"text", b"\xff\xfe", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json: no tokenizer\.json"):
            open_hf_tokenizer(path)
    path.write_text(bpe.backend.to_str().replace('"dropout":null', '"dropout":0.1'))
    with pytest.raises(DataError, match="drops merges at random"):
        open_hf_tokenizer(path)
    save_tokenizer(bpe, path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: no JSON object but list"):
        open_hf_tokenizer(path)


def test_a_file_that_would_take_all_memory_is_refused_at_once(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"tokenizer\.json: is no regular file"):
        open_tokenizer(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(DataError, match=r"has 3221225472 bytes, where 134217728 are the most"):
        open_tokenizer(path)
    facts = json.loads(bpe.backend.to_str())
    facts["model"]["vocab"]["far"] = 2**32 - 1
    path.write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"its largest id is 4294967295, and it has 3\d\d tokens"):
        open_tokenizer(path)
    facts["model"]["vocab"]["far"] = 1000  # some unused are usual
    path.write_text(json.dumps(facts))
    assert open_tokenizer(path).vocab_size == 1001


def test_an_object_is_copied_and_its_truncation_does_not_count(bpe):
    other = type(bpe.backend).from_str(bpe.backend.to_str())
    other.enable_truncation(2)
    other.enable_padding(length=999)
    assert open_hf_tokenizer(other).encode(TEXT) == bpe.encode(TEXT)
    assert other.truncation["max_length"] == 2


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[hf\]"'):
        train_bpe(["a"], vocab_size=300)
    with pytest.raises(ConfigError, match="tokenizers is missing"):
        open_hf_tokenizer("tokenizer.json")
