"""Token files that others made: read where all is known, refused where anything must be guessed."""

import hashlib
import os
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.concat import fingerprint
from trainkit.data.memory_map import check_unchanged
from trainkit.text.corpora import foreign, foreign_layouts
from trainkit.text.corpora.open import open_corpus
from trainkit.text.corpora.shards import describe_unread_files
from trainkit.types import DataError


def documents_of(corpus):
    return [corpus.read(i, 0, int(n)).tolist() for i, n in enumerate(corpus.lengths)]


def raw(path, tokens, kind="uint16", /, **sidecar):
    np.asarray(tokens, kind).tofile(path)
    if sidecar:
        path.with_name(f"{path.name}.json").write_bytes(orjson.dumps(sidecar))
    return path


def megatron(path, documents, kind="uint16", number=8, change=None):
    """Write .idx and .bin as Megatron does: a document is a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = np.append(0, np.cumsum(lengths * np.dtype(kind).itemsize))[:-1].astype("<i8")
    ends = np.append(0, np.cumsum([len(document) for document in documents])).astype("<i8")
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", number),
        "sequences": struct.pack("<Q", len(lengths)),
        "documents": struct.pack("<Q", len(ends)),
        "lengths": lengths.tobytes(),
        "pointers": pointers.tobytes(),
        "ends": ends.tobytes(),
    }
    path.write_bytes(b"".join((parts | (change or {})).values()))
    flat = [token for sequence in sequences for token in sequence]
    np.array(flat, kind).tofile(path.with_suffix(".bin"))
    return path


# ------------------------------------------------------------------------------------ npy


@pytest.mark.parametrize("dtype", foreign_layouts.DTYPES)
def test_arrays_of_integers_are_mapped(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=dtype))
    corpus = open_corpus(tmp_path / "a.npy")
    assert documents_of(corpus) == [list(range(100))]
    assert corpus.tokens.dtype.kind == "u"
    assert corpus.tokens.dtype.itemsize == np.dtype(dtype).itemsize
    assert not corpus.tokens.flags.writeable
    assert corpus.file.path == str(tmp_path / "a.npy")
    check_unchanged(corpus)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(4.0), "integers in one dimension, got float64"),
        (np.arange(4).reshape(2, 2), r"integers in one dimension, got int64 \(2, 2\)"),
        (np.array([True]), "integers in one dimension, got bool"),
        (np.array([{}]), "integers in one dimension, got object"),
        (np.arange(4, dtype=">u2"), "big-endian"),
        (np.array([], np.uint16), "holds no tokens"),
        (np.array([5, -3], np.int32), r"document 0 at offset 1 .*token -3 outside"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=f"a.npy: .*{message}"):
        open_corpus(tmp_path / "a.npy")


def test_an_array_cut_or_damaged_anywhere_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    data = path.read_bytes()
    for size in (0, 5, 50, 128, 327):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=r"a.npy: "):
            open_corpus(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DataError, match="329 bytes instead of 328"):
        open_corpus(path)
    for shape in (b"(10**9,)", b"(-1,   )", b"(1e9,  )"):
        path.write_bytes(data.replace(b"(100,), }  ", shape + b", } "[: 11 - len(shape)]))
        with pytest.raises(DataError, match=r"a.npy: "):
            open_corpus(path)
    for bad in (b"\x93NUMPY\x09", b"\x93NUMPY\x01\x00\xff\xff"):
        path.write_bytes(bad + data[len(bad) :])
        with pytest.raises(DataError, match=r"a.npy: no .npy file, or a damaged one"):
            open_corpus(path)


# ------------------------------------------------------------------------------------ raw


@pytest.mark.case("D1")
def test_a_raw_file_needs_a_sidecar_with_its_dtype(tmp_path):
    path = raw(tmp_path / "a.bin", range(1000))
    message = r'a.bin: .*does not store its dtype.*\{"dtype": "uint16"\}.* into .*a.bin.json'
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(path)
    assert caught.value.code == 65
    with pytest.raises(DataError, match=message):
        open_corpus(raw(path, range(1000), vocab_size=1000))
    (tmp_path / "a.bin.json").unlink()
    with pytest.raises(DataError, match=message):
        open_corpus(tmp_path)
    assert documents_of(open_corpus(raw(path, range(1000), dtype="uint16"))) == [list(range(1000))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_document_ends_after_each_eos(tmp_path_factory, tokens):
    path = tmp_path_factory.mktemp("raw") / "a.bin"
    want = [[]]
    for token in tokens:
        want[-1].append(token)
        if token == 0:
            want.append([])
    want = [document for document in want if document]
    raw(path, tokens, dtype="uint16", eos_id=0)
    if 0 not in tokens:
        with pytest.raises(DataError, match=r"a.bin: eos_id 0 .* is not among the \d+ tokens"):
            open_corpus(path)
        return
    assert documents_of(open_corpus(path)) == want
    raw(path, tokens, dtype="uint16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "BLOCK", 4)
        assert documents_of(open_corpus(path, eos_id=0)) == want
    assert documents_of(open_corpus(path)) == [tokens]


@pytest.mark.parametrize("in_file", [False, True])
def test_a_sidecar_may_say_where_documents_end(tmp_path, in_file):
    if in_file:
        np.save(tmp_path / "ends.npy", np.array([0, 2, 2, 5], np.int32))
    offsets = "ends.npy" if in_file else [0, 2, 2, 5]
    path = raw(tmp_path / "a.bin", range(5), dtype="uint16", offsets=offsets, vocab_size=9)
    corpus = open_corpus(path)
    assert documents_of(corpus) == [[0, 1], [], [2, 3, 4]]
    names = {"a.bin", "a.bin.json", "ends.npy"} if in_file else {"a.bin", "a.bin.json"}
    assert set(corpus.sources) == names
    assert corpus.vocab_size == 9
    assert open_corpus(tmp_path).lengths.tolist() == [2, 0, 3]  # ends.npy is no corpus
    with pytest.raises(ValueError, match="eos_id=3 is for files that do not say where"):
        open_corpus(path, eos_id=3)


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_a_sidecar_that_is_read_is_not_told_as_left_out(tmp_path, name):
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    (tmp_path / "a.npy").rename(tmp_path / name)
    (tmp_path / f"{name}.json").write_text('{"vocab_size": 9}')
    assert not describe_unread_files(tmp_path)


@pytest.mark.parametrize(
    ("sidecar", "message"),
    [
        ({"dtype": ">u2"}, "dtype '>u2' is not one of uint8, uint16"),
        ({"dtype": "float32"}, "dtype 'float32' is not one of"),
        ({"dtype": 2}, "dtype 2 is not one of"),
        ({"dtype": "uint64"}, "10 bytes are no multiple of uint64"),
        ({"dtype": "uint16", "vocabsize": 3}, "must be a JSON object of dtype, offsets"),
        (["dtype"], "must be a JSON object of .*, got list"),
        ({"dtype": "uint16", "vocab_size": 4}, r"offset 4 \(byte 8 .*token 4 outside .* of 4"),
        ({"dtype": "uint16", "vocab_size": True}, "vocab_size True is not"),
        ({"dtype": "uint16", "eos_id": -1}, "eos_id -1 is not"),
        ({"dtype": "uint16", "offsets": [0, 3]}, "must rise from 0 to 5, the number of tokens"),
        ({"dtype": "uint16", "offsets": [0, 4, 3, 5]}, "must rise from 0 to 5"),
        ({"dtype": "uint16", "offsets": [1, 5]}, "must rise from 0 to 5"),
        ({"dtype": "uint16", "offsets": []}, "must rise from 0 to 5"),
        ({"dtype": "uint16", "offsets": [0, 1.5, 5]}, "offsets .* is not"),
        ({"dtype": "uint16", "offsets": "../ends.npy"}, "offsets '../ends.npy' is not"),
        ({"dtype": "uint16", "offsets": "ends\0.npy"}, r"offsets 'ends\\x00.npy' is not"),
        ({"dtype": "uint16", "offsets": "gone.npy"}, "gone.npy: No such file"),
        ({"dtype": "uint16", "sha256": "0" * 64}, "the fingerprint .* of its sidecar"),
    ],
)
def test_a_sidecar_that_does_not_fit_is_refused(tmp_path, sidecar, message):
    path = raw(tmp_path / "a.bin", range(5))
    (tmp_path / "a.bin.json").write_bytes(orjson.dumps(sidecar))
    with pytest.raises(DataError, match=rf"a.bin.*{message}|{message}"):
        open_corpus(path)


def test_a_damaged_file_of_document_ends_is_named_by_its_kind(tmp_path):
    path = raw(tmp_path / "a.bin", range(5), dtype="uint16", offsets="ends")
    (tmp_path / "ends").write_bytes(b"no numbers")
    with pytest.raises(DataError, match=r"ends: no .npy file, or a damaged one: "):
        open_corpus(path)


def test_a_cut_file_of_document_ends_is_named(tmp_path):
    path = raw(tmp_path / "a.bin", range(5), dtype="uint16", offsets="ends.npy")
    np.save(tmp_path / "ends.npy", np.array([0, 2, 5]))
    data = (tmp_path / "ends.npy").read_bytes()
    (tmp_path / "ends.npy").write_bytes(data[:-8])
    with pytest.raises(DataError, match=r"ends.npy: the file has 144 bytes instead of 152"):
        open_corpus(path)


def test_a_sidecars_hash_and_dtype_are_compared(tmp_path):
    sha256 = hashlib.sha256(np.arange(5, dtype=np.uint16).tobytes()).hexdigest()
    path = raw(tmp_path / "a.bin", range(5), dtype="uint16", sha256=sha256)
    assert open_corpus(path).sources["a.bin"] == sha256[:16]
    np.save(tmp_path / "a.npy", np.arange(5))
    (tmp_path / "a.npy.json").write_bytes(b'{"dtype": "uint16"}')
    with pytest.raises(DataError, match="dtype is int64, its sidecar says uint16"):
        open_corpus(tmp_path / "a.npy")
    (tmp_path / "a.npy.json").write_bytes(b"{")
    with pytest.raises(DataError, match=r"a.npy.json: bad JSON"):
        open_corpus(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="this one has 2"):
        open_corpus(raw(path, range(5), dtype="uint16", eos_id=2), eos_id=3)


def test_tokens_have_to_fit_the_tokenizers_vocabulary(tmp_path):
    class Few:
        vocab_size = 4

    path = raw(tmp_path / "a.bin", [3, 70_000], "uint32", dtype="uint32")
    with pytest.raises(DataError, match=r"file has, .* offset 1 \(byte 4 .*token 70000 .* of 4"):
        open_corpus(path, tokenizer=Few())
    assert open_corpus(raw(path, [3], "uint32", dtype="uint32"), tokenizer=Few()).vocab_size == 4
    with pytest.raises(DataError, match="vocabulary of 9 is larger than the tokenizer's, 4"):
        open_corpus(raw(path, [3], "uint32", dtype="uint32", vocab_size=9), tokenizer=Few())


# ------------------------------------------------------------------------------------ large files


def test_of_a_large_file_pieces_are_read_and_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "WHOLE", 1000)
    monkeypatch.setattr(foreign, "BLOCK", 64)
    monkeypatch.setattr(foreign, "SAMPLES", 8)
    path = raw(tmp_path / "a.bin", np.arange(5000) % 100, dtype="uint16", vocab_size=100)
    before = open_corpus(path)
    assert fingerprint(open_corpus(path)) == fingerprint(before)
    data = bytearray(path.read_bytes())
    data[-1] = 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="token 355 outside its vocabulary of 100"):
        open_corpus(path)
    os.utime(path, ns=(0, 10**18))
    raw(path, np.arange(5000) % 100)
    os.utime(path, ns=(0, before.file.modified))
    assert fingerprint(open_corpus(path)) == fingerprint(before)
    os.utime(path, ns=(0, before.file.modified + 1))
    assert fingerprint(open_corpus(path)) != fingerprint(before)


def test_every_change_of_a_small_file_changes_its_fingerprint_and_its_source(tmp_path):
    path = raw(tmp_path / "a.bin", [1, 2, 3], dtype="uint16")
    before = open_corpus(path)
    raw(path, [1, 2, 4])
    assert open_corpus(path).sources["a.bin"] != before.sources["a.bin"]
    assert fingerprint(open_corpus(path)) != fingerprint(before)
    raw(path, [1, 2, 3], dtype="uint16", eos_id=2)
    assert open_corpus(path).sources["a.bin"] == before.sources["a.bin"]
    assert open_corpus(path).sources["a.bin.json"] != before.sources["a.bin.json"]
    assert fingerprint(open_corpus(path)) != fingerprint(before)


# ------------------------------------------------------------------------------------ Megatron

DOCUMENTS = [[[1, 2], [3]], [], [[4, 5, 6]], [[]]]


@pytest.mark.parametrize(("code", "dtype"), foreign_layouts.MEGATRON_DTYPES.items())
def test_megatrons_documents_are_runs_of_its_sequences(tmp_path, code, dtype):
    path = megatron(tmp_path / "a.idx", DOCUMENTS, dtype, code)
    for name in (path, path.with_suffix(".bin"), tmp_path):
        corpus = open_corpus(name)
        assert documents_of(corpus) == [[1, 2, 3], [], [4, 5, 6], []]
        assert set(corpus.sources) == {"a.bin", "a.idx"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, "a.idx: no Megatron index of version 1"),
        ({"version": struct.pack("<Q", 2)}, "a.idx: no Megatron index of version 1"),
        ({"version": struct.pack(">Q", 1)}, "a.idx: no Megatron index of version 1"),
        ({"code": b"\x07"}, "a.idx: dtype code 7 is no dtype of tokens"),
        ({"code": b"\x04"}, "a.idx: sequence 1 begins at byte 4 .* instead of 8"),
        ({"sequences": struct.pack("<Q", 2**60)}, "a.idx: the file has .* bytes instead of"),
        ({"documents": struct.pack("<Q", 9)}, "a.idx: the file has .* bytes instead of"),
        ({"lengths": struct.pack("<4i", 2, -1, 3, 0)}, "a.idx: sequence 1 has -1 tokens"),
        ({"lengths": struct.pack("<4i", 2, 1, 3, 1)}, "a.bin: the file has 12 bytes instead of 14"),
        ({"pointers": struct.pack("<4q", 0, 4, 4, 12)}, "sequence 2 begins at byte 4 .* of 6"),
        ({"ends": struct.pack("<5q", 0, 2, 1, 3, 4)}, "rise from 0 to 4, the number of sequences"),
        ({"ends": struct.pack("<5q", 0, 2, 2, 3, 5)}, "rise from 0 to 4"),
        ({"ends": struct.pack("<5q", 0, 2, 2, 3, 3)}, "rise from 0 to 4"),
        ({"ends": struct.pack("<5q", -1, 2, 2, 3, 4)}, "rise from 0 to 4"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, change, message):
    path = megatron(tmp_path / "a.idx", DOCUMENTS, change=change)
    with pytest.raises(DataError, match=message):
        open_corpus(path)


def test_a_megatron_file_that_was_cut_or_lost_is_named(tmp_path):
    path = megatron(tmp_path / "a.idx", DOCUMENTS)
    index, data = path.read_bytes(), path.with_suffix(".bin").read_bytes()
    for size in range(0, len(index), 7):
        path.write_bytes(index[:size])
        with pytest.raises(DataError, match=r"a.idx: "):
            open_corpus(path)
    path.write_bytes(index)
    path.with_suffix(".bin").write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"a.bin: the file has 11 bytes instead of 12"):
        open_corpus(path)
    path.with_suffix(".bin").unlink()
    for name in (path, tmp_path):
        with pytest.raises(DataError, match=r"a.bin: No such file"):
            open_corpus(name)
    with pytest.raises(ValueError, match="this one does"):
        open_corpus(megatron(tmp_path / "a.idx", DOCUMENTS), eos_id=3)


def test_a_file_with_an_index_and_a_sidecar_is_refused(tmp_path):
    path = megatron(tmp_path / "a.idx", DOCUMENTS)
    (tmp_path / "a.bin.json").write_bytes(b'{"dtype": "uint32"}')
    for name in (path, path.with_suffix(".bin"), tmp_path):
        with pytest.raises(DataError, match=r"both an .idx file and a.bin.json"):
            open_corpus(name)


def test_an_eos_that_the_dtype_cannot_hold_is_refused(tmp_path):
    path = raw(tmp_path / "a.bin", [1, 0, 2], "uint8", dtype="uint8", eos_id=256)
    with pytest.raises(DataError, match=r"eos_id 256 .* is not among the 3 tokens"):
        open_corpus(path)


def test_an_eos_may_be_missing_from_some_files_of_a_directory_but_not_from_all(tmp_path):
    for name, tokens in {"a": [1, 2], "b": [3, 0, 4]}.items():
        raw(tmp_path / f"{name}.bin", tokens, dtype="uint16")
    assert open_corpus(tmp_path, eos_id=0).lengths.tolist() == [2, 2, 1]
    with pytest.raises(DataError, match=r"eos_id 7 .* is not among the 5 tokens: look which"):
        open_corpus(tmp_path, eos_id=7)
    raw(tmp_path / "a.bin", [1, 2], dtype="uint16", eos_id=8)
    with pytest.raises(DataError, match=r"eos_id 8 .* is not among the 2 tokens"):
        open_corpus(tmp_path)
    raw(tmp_path / "a.bin", [1, 2], dtype="uint16", eos_id=8, offsets=[0, 2])
    assert open_corpus(tmp_path).lengths.tolist() == [2, 3]  # they say where documents end


def test_a_directory_with_raw_files_leaves_none_out(tmp_path):
    raw(tmp_path / "a.bin", [1], dtype="uint16")
    raw(tmp_path / "b.bin", [2])
    with pytest.raises(DataError, match=r"b.bin: a raw file .* dtype"):
        open_corpus(tmp_path)
    raw(tmp_path / "b.bin", [2], dtype="uint16")
    assert documents_of(open_corpus(tmp_path)) == [[1], [2]]
    megatron(tmp_path / "c.idx", DOCUMENTS)
    with pytest.raises(DataError, match=r"of two kinds, c.idx and a.bin"):
        open_corpus(tmp_path)


def test_text_beside_files_that_may_be_anything_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.bin").write_bytes(b"\0")
    (tmp_path / "c.idx").write_bytes(b"\0")
    assert list(open_corpus(tmp_path).sources) == ["a.txt"]
    raw(tmp_path / "b.bin", [1], dtype="uint16")
    with pytest.raises(DataError, match=r"both a.txt and b.bin, text and tokens"):
        open_corpus(tmp_path)
