"""Bytes to tokens and back, and documents from any tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data import byte_tokenizer, encode_document

BYTES = byte_tokenizer()


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


def test_tokens_outside_the_vocabulary_are_refused():
    letters = Letters()
    letters.vocab_size = 5
    with pytest.raises(ValueError, match=r"tokens 0 to 25 do not lie in \[0, 5\).*Letters"):
        encode_document(letters, "az")
    with pytest.raises(ValueError, match="tokens -32 to"):
        encode_document(Letters(), "aA")
