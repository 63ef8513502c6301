"""A format of corpora is one row of a table: everything that reads corpora then reads it."""

import csv

import numpy as np
import pytest

from trainkit.data import TokenCorpus
from trainkit.text.corpora import open_corpus, read_records, verify_corpus
from trainkit.text.corpora.formats import RECORD_FORMATS, TOKEN_FORMATS, RecordFormat, TokenFormat
from trainkit.text.corpora.records import describe_record
from trainkit.text.prepare import prepare_corpus
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.types import DataError

BYTES = make_byte_tokenizer()


# The arguments are those of the signature, whether a format needs them or not.
# ruff: noqa: ARG001
def read_csv(path, start=0, end=None, *, columns=None, keep=None):
    with path.open(newline="") as file:
        for number, record in enumerate(csv.DictReader(file), start=1):
            if keep is None or keep(number):
                yield number, record


def open_hex(path, *, vocab_size, eos_id, max_chunks):
    ids = np.frombuffer(bytes.fromhex(path.read_text()), np.uint8)
    return TokenCorpus(ids, np.array([0, len(ids)]), vocab_size)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(RECORD_FORMATS, ".csv", RecordFormat(read_csv, record="row"))
    monkeypatch.setitem(TOKEN_FORMATS, ".hex", TokenFormat(open_hex))
    return tmp_path


def test_a_format_of_records_is_one_row(folder):
    (folder / "a.csv").write_text("q,text\n1,one\n2,two\n")
    (folder / "b.csv").write_text("q,text\n3,three\n")
    corpus = open_corpus(folder)
    assert corpus.names == ["a.csv:1", "a.csv:2", "b.csv:1"]
    assert list(corpus.sources) == ["a.csv", "b.csv"]
    assert [name for name, _ in read_records(folder / "a.csv", keep=lambda name: name == "2")] == [
        "2"
    ]
    assert verify_corpus(folder)["documents"] == 3
    done = prepare_corpus(folder, folder / "c.tokens", tokenizer=BYTES, chunk_bytes=1)
    assert (done.documents, done.tokens) == (3, int(corpus.lengths.sum()))


def test_a_record_of_such_a_format_is_named_by_its_number(folder):
    (folder / "a.csv").write_text("text\none\n\n")
    (folder / "b.csv").write_text("q\n1\n")
    assert describe_record(folder / "a.csv", "3").endswith("a.csv: row 3")
    with pytest.raises(DataError, match=r"b.csv: row 1: there is no field 'text'"):
        open_corpus(folder)
    with pytest.raises(DataError, match=r"b.csv: row 1: there is no field 'text'"):
        prepare_corpus(folder, folder / "c.tokens", tokenizer=BYTES)


def test_a_format_of_tokens_is_one_row(folder):
    (folder / "a.hex").write_text("0102")
    (folder / "b.hex").write_text("03")
    corpus = open_corpus(folder)
    assert [corpus.read(i, 0, n).tolist() for i, n in enumerate(corpus.lengths)] == [[1, 2], [3]]
    assert verify_corpus(folder) | {"path": ""} == {
        "path": "",
        "ok": True,
        "problems": [],
        "documents": 2,
        "tokens": 3,
    }
    (folder / "c.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"of two kinds, c.npy and a.hex"):
        open_corpus(folder)
