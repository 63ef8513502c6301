"""Token files: what is written is read, and what was changed is refused; corpora in memory."""

import errno
import hashlib
import os
import random
import re
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.concat import concat_corpora, fingerprint
from trainkit.data.corpus import make_corpus
from trainkit.data.memory_map import check_unchanged
from trainkit.text.corpora import content, token_file
from trainkit.text.corpora.open import open_corpus
from trainkit.text.corpora.token_file import (
    BLOCK,
    encode_header,
    get_header_fields,
    read_token_header,
    sample_chunks,
)
from trainkit.text.corpora.tokens import open_tokens, write_corpus
from trainkit.types import DataError, DiskError, Sample

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), min_size=1, max_size=6)


def sample(tokens, trained):
    return Sample(np.array(tokens, np.int64), np.array(trained, bool))


def samples(draw_from):
    """Documents with a choice for each token."""
    pairs = st.lists(st.tuples(draw_from, st.booleans()), max_size=9)
    made = pairs.map(lambda p: sample([i for i, _ in p], [t for _, t in p]))
    return st.lists(made, min_size=1, max_size=6)


# ------------------------------------------------------------------------------------ round trips


@given(DOCUMENTS)
def test_what_was_written_is_read(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("corpus") / "a.tokens"
    for corpus in (
        write_corpus(path, iter(documents)),
        open_corpus(path),
        make_corpus(iter(documents)),
    ):
        assert corpus.lengths.tolist() == [len(document) for document in documents]
        read = [corpus.read(i, 0, len(document)).tolist() for i, document in enumerate(documents)]
        assert read == documents
        assert corpus.loss_mask is None
        assert not corpus.tokens.flags.writeable
        assert (corpus.tokens.dtype, corpus.offsets.dtype) == (np.uint32, np.int64)
    open_tokens(path, check="full")


@given(samples(st.integers(0, 99)))
def test_what_is_trained_on_is_written_beside_the_tokens(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("corpus") / "a.tokens"
    want = np.concatenate([document.loss_mask for document in documents])
    for corpus in (
        write_corpus(path, iter(documents), vocab_size=100),
        open_corpus(path),
        make_corpus(iter(documents), vocab_size=100),
    ):
        for number, document in enumerate(documents):
            read = corpus.read(number, 0, len(document.tokens))
            assert read.tolist() == document.tokens.tolist()
        assert corpus.loss_mask.dtype == np.uint8
        assert corpus.loss_mask.astype(bool).tolist() == want.tolist()
        assert not corpus.loss_mask.flags.writeable
    open_tokens(path, check="full")


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_documents_that_span_chunks_come_out_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(content, "CHUNK", 64)
    documents = [np.arange(n) % 200 for n in (0, 1, 63, 64, 65, 1000, 0, 7)]
    choices = [document % 3 == 0 for document in documents]
    path = tmp_path / "a.tokens"
    pairs = map(Sample, documents, choices)
    corpus = write_corpus(path, pairs, dtype=kind)
    assert corpus.tokens.tolist() == np.concatenate(documents).tolist()
    assert corpus.loss_mask.tolist() == np.concatenate(choices).tolist()
    open_tokens(path, check="full")
    assert path.stat().st_size == header_of(path).size


@pytest.mark.parametrize("make", [make_corpus, lambda d: write_corpus("a.tokens", d)])
def test_all_documents_are_samples_or_none_is(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    one = sample([1], [True])
    with pytest.raises(DataError, match="document 1 is no Sample, unlike those before it"):
        make([one, [1]])
    with pytest.raises(DataError, match="document 2 is a Sample, unlike those before it"):
        make([[1], [], one])
    with pytest.raises(DataError, match=r"document 1: `loss_mask` must be bool \(1,\)"):
        make([one, Sample(np.array([1]), np.array([True, False]))])
    with pytest.raises(DataError, match=r"document 0: `loss_mask` must be bool"):
        make([Sample(np.array([1]), np.array([1]))])
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_in_memory_checks_its_tokens_and_names():
    corpus = make_corpus([[1], [2, 3]], vocab_size=10, names=["a", "b"])
    assert (corpus.names, corpus.vocab_size, corpus.tokens.dtype) == (["a", "b"], 10, np.uint8)
    with pytest.raises(DataError, match=r"make_corpus: document 1 has token 10 at 1"):
        make_corpus([[1], [2, 10]], vocab_size=10)
    with pytest.raises(DataError, match=r"document 0 has token -1"):
        make_corpus([[-1]])
    with pytest.raises(ValueError, match="1 names for 2 documents"):
        make_corpus([[1], [2]], names=["a"])
    assert len(make_corpus([]).lengths) == 0


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "kind"),
    [
        (256, None, "uint8"),
        (257, None, "uint16"),
        (65536, None, "uint16"),
        (65537, None, "uint32"),
        (None, None, "uint32"),
        (100, np.uint16, "uint16"),
        (None, "uint8", "uint8"),
    ],
)
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path, vocab_size, dtype, kind):
    corpus = write_corpus(tmp_path / "a.tokens", [[1]], vocab_size=vocab_size, dtype=dtype)
    assert corpus.tokens.dtype == kind
    assert corpus.vocab_size == vocab_size


# ------------------------------------------------------------------------------------ damage


def written(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2, 3], [], [4] * 50], vocab_size=100)
    return path


def header_of(path):
    with path.open("rb") as file:
        return read_token_header(file, path)


def forge(path, changes=None, *, content=None):
    """Write a file whose hashes all fit, whatever it says."""
    changes = changes or {}
    header = get_header_fields(header_of(path))
    content = path.read_bytes()[BLOCK : header_of(path).table_at] if content is None else content
    chunk = changes.get("chunk_bytes", header["chunk_bytes"])
    parts = [content[i : i + chunk] for i in range(0, len(content), chunk)] if chunk > 0 else []
    table = b"".join(hashlib.sha256(part).digest() for part in parts)
    ends = content[-8 * (header["documents"] + 1) :]
    header["offsets_sha256"] = hashlib.sha256(ends).hexdigest()
    header["table_sha256"] = hashlib.sha256(table).hexdigest()
    path.write_bytes(encode_header(header | changes) + content + table)


@pytest.mark.case("D3")
def test_a_file_cut_anywhere_is_refused_with_both_sizes(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    for size in (*range(0, len(data), 97), len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=re.escape(str(path))) as caught:
            open_corpus(path)
        if size >= 4096:
            assert (caught.value.got, caught.value.want) == (size, len(data))
    path.write_bytes(data + b"\0")
    with pytest.raises(DataError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
        open_corpus(path)


@pytest.mark.case("D5")
@pytest.mark.parametrize("document", [[4] * 50, sample([4] * 50, [True] * 50)])
def test_every_flipped_bit_of_a_small_file_is_found_when_it_is_opened(tmp_path, document):
    path = tmp_path / "a.tokens"
    write_corpus(path, [document], vocab_size=100)
    data = bytearray(path.read_bytes())
    for bit in random.Random(0).sample(range(8 * len(data)), 300):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(DataError, match=re.escape(str(path))):
            open_tokens(path)
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    open_tokens(path)


def test_a_changed_chunk_is_named_with_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "CHUNK", 64)
    path = tmp_path / "a.tokens"
    write_corpus(path, [range(100)] * 50)
    data = bytearray(path.read_bytes())
    data[BLOCK + 64 * 3 + 5] ^= 1
    path.write_bytes(data)
    message = rf"content between bytes {BLOCK + 192} and {BLOCK + 256} .*fingerprint"
    with pytest.raises(DataError, match=message) as caught:
        open_tokens(path, check="full")
    assert caught.value.code == 65
    open_tokens(path, check="none")
    with pytest.raises(ValueError, match="check must be one of sample, full, none, got 'all'"):
        open_tokens(path, check="all")


def test_a_large_file_is_read_in_other_places_at_each_start(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "CHUNK", 64)
    path = tmp_path / "a.tokens"
    write_corpus(path, [range(100)] * 50)  # 319 chunks
    data = bytearray(path.read_bytes())
    data[BLOCK + 64 * 100] ^= 1
    path.write_bytes(data)
    found = 0
    for _ in range(100):
        try:
            open_tokens(path)
        except DataError:
            found += 1
    assert 0 < found < 60  # 10 are expected; either end has a probability below 1e-4


@given(st.integers(0, 500), st.integers(0, 40))
def test_a_sample_of_chunks_has_the_first_the_last_and_others(count, most):
    chosen = sample_chunks(count, most)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(count))
    assert len(chosen) == min(count, most) if most != 2 else len(chosen) <= 2
    if min(count, most) >= 3:
        assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert sample_chunks(count, None) == list(range(count))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1; this trainkit reads 2"),
        ({"version": None}, "version None"),
        ({"dtype": "object"}, "unknown dtype object"),
        ({"dtype": ["uint8"]}, "unknown dtype"),
        ({"dtype": "uint16"}, "bytes instead of"),
        ({"tokens": 52}, "offsets that do not rise from 0 to 52"),
        ({"tokens": 2**62}, "bytes instead of"),
        ({"tokens": -8}, "a header with tokens -8"),
        ({"tokens": 53.0}, "a header with tokens 53.0"),
        ({"documents": 2**60}, "bytes instead of"),
        ({"documents": 0}, "a header with documents 0"),
        ({"documents": True}, "a header with documents True"),
        ({"documents": None}, "a header with documents None"),
        ({"vocab_size": 0}, "a header with vocab_size 0"),
        ({"vocab_size": "9"}, "a header with vocab_size '9'"),
        ({"loss_mask": 1}, "a header with loss_mask 1"),
        ({"tokenizer": 1}, "a header with tokenizer 1"),
        ({"loss_mask": True}, "bytes instead of"),
        ({"chunk_bytes": 0}, "a header with chunk_bytes 0"),
        ({"chunk_bytes": 12}, "a header with chunk_bytes 12"),
        ({"table_sha256": None}, "a header with table_sha256 None"),
        ({"offsets_sha256": "0" * 64}, "offsets that were changed"),
        ({"table_sha256": "0" * 64}, "a table of fingerprints, from byte 4184 on, that changed"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_made(tmp_path, change, message):
    path = written(tmp_path)
    forge(path, change)
    with pytest.raises(DataError, match=message):
        open_tokens(path)


def test_a_header_may_say_more_but_not_be_no_object(tmp_path):
    path = written(tmp_path)
    forge(path, {"new": "field"})
    open_tokens(path, check="full")
    data = path.read_bytes()
    for text, message in [(b"[2]", "version None"), (b"{", "a header that is no JSON")]:
        block = token_file.MAGIC + len(text).to_bytes(8, "little")
        block += hashlib.sha256(text).digest() + text
        path.write_bytes(block.ljust(BLOCK, b"\0") + data[BLOCK:])
        with pytest.raises(DataError, match=message):
            open_tokens(path)
    path.write_bytes(data.replace(b'"uint8"', b'"uint4"'))
    with pytest.raises(DataError, match="a header that is truncated or damaged"):
        open_tokens(path)


def test_offsets_that_fall_are_found(tmp_path):
    path = written(tmp_path)
    body = path.read_bytes()[BLOCK : header_of(path).offsets_at]
    forge(path, content=body + np.array([0, 3, 3, 53], "<i8").tobytes())
    open_tokens(path, check="full")
    forge(path, content=body + np.array([0, 3, 2, 53], "<i8").tobytes())
    for check in ("none", "sample"):
        with pytest.raises(DataError, match="offsets that do not rise from 0 to 53"):
            open_tokens(path, check=check)


def test_changed_offsets_are_found_whichever_chunks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "CHUNK", 64)
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2]] * 3000)
    data = bytearray(path.read_bytes())
    data[header_of(path).offsets_at + 8 * 1500] -= 1  # still rising, still the same size
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"offsets that were changed|fingerprint"):
        open_tokens(path)


def test_a_token_outside_the_vocabulary_is_named_with_its_document_and_place(tmp_path):
    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2], [3, 70_000, 4]])
    forge(path, {"vocab_size": 50_000})
    byte = BLOCK + 4 * 3
    place = rf"a.tokens: .*file has, in document 1 at offset 1 \(byte {byte} of the file\)"
    message = f"{place}, token 70000 outside its vocabulary of 50000"
    for check in (open_tokens, partial(open_tokens, check="full")):
        with pytest.raises(DataError, match=message) as caught:
            check(path)
        assert (caught.value.got, caught.value.want, caught.value.code) == (70_000, 50_000, 65)
    forge(path, {"vocab_size": 70_000})  # the largest of these is 69,999
    with pytest.raises(DataError, match="token 70000 outside its vocabulary of 70000"):
        open_tokens(path)
    forge(path, {"vocab_size": 70_001})
    assert open_tokens(path).vocab_size == 70_001
    open_tokens(path, check="none")


def test_a_file_without_a_vocabulary_has_to_fit_the_tokenizers(tmp_path):
    class Small:
        vocab_size = 4

    path = tmp_path / "a.tokens"
    write_corpus(path, [[1, 2], [3, 5]])
    assert open_corpus(path).vocab_size is None
    with pytest.raises(DataError, match=r"document 1 at offset 1 .*token 5 outside .* of 4"):
        open_corpus(path, tokenizer=Small())
    write_corpus(path, [[1, 2], [3]])
    assert open_corpus(path, tokenizer=Small()).vocab_size == 4


def test_another_kind_of_file_with_the_suffix_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5000))
    (tmp_path / "a.npy").rename(tmp_path / "a.tokens")
    with pytest.raises(DataError, match="no token file's beginning"):
        open_corpus(tmp_path / "a.tokens")


@pytest.mark.parametrize(
    ("documents", "write", "message"),
    [
        ([], write_corpus, "no documents to write"),
        ([[1], [5, -1]], write_corpus, r"document 1 has token -1 at 1, outside \[0, 4294967296\)"),
        ([[1], [2**32]], write_corpus, "document 1 has token 4294967296 at 0"),
        ([[300]], partial(write_corpus, dtype="uint8"), r"token 300 at 0, outside \[0, 256\)"),
        ([[99, 100]], partial(write_corpus, vocab_size=100), r"100 at 1, outside \[0, 100\)"),
        ([[1.5]], write_corpus, "document 0 must be integers"),
        ([["a"]], write_corpus, "document 0 must be integers"),
        ([[[1]]], write_corpus, "one dimension"),
    ],
)
def test_bad_documents_are_refused_and_nothing_is_left(tmp_path, documents, write, message):
    with pytest.raises(DataError, match=message):
        write(tmp_path / "a.tokens", documents)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .tokens"):
        write_corpus(tmp_path / "a.bin", [[1]])
    with pytest.raises(ValueError, match="dtype must be one of uint8, uint16, uint32, got int64"):
        write_corpus(tmp_path / "a.tokens", [[1]], dtype=np.int64)


def test_a_source_that_fails_leaves_the_old_file_as_it_was(tmp_path):
    path = written(tmp_path)
    before = path.read_bytes()

    def documents():
        yield [1]
        raise OSError(errno.EIO, "the source broke")

    with pytest.raises(OSError, match="the source broke") as caught:
        write_corpus(path, documents())
    assert not isinstance(caught.value, DiskError)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_corpus_may_be_rewritten_while_it_is_read(tmp_path):
    path = written(tmp_path)
    corpus = open_corpus(path)
    write_corpus(path, [[9]])
    assert corpus.read(0, 0, 3).tolist() == [1, 2, 3]
    assert open_corpus(path).read(0, 0, 1).tolist() == [9]


@pytest.mark.parametrize("documents", [[[1, 2]], [[1] * 3_000_000]])
def test_a_full_disk_is_named_with_what_is_free(tmp_path, monkeypatch, documents):
    opened = Path.open

    def open_full(path, mode="r", *args, **kwargs):
        return (
            opened(Path("/dev/full"), "wb") if mode == "xb" else opened(path, mode, *args, **kwargs)
        )

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(DiskError, match=r"a.tokens: No space left on device.* \d+ bytes are free"):
        write_corpus(tmp_path / "a.tokens", documents)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DiskError, match=r"cannot write .*gone/a.tokens: No such file"):
        write_corpus(tmp_path / "gone" / "a.tokens", [[1]])
    with pytest.raises(DiskError, match=r"cannot write /proc/a.tokens"):
        write_corpus("/proc/a.tokens", [[1]])


def test_a_full_disk_for_what_is_trained_on_is_named(tmp_path, monkeypatch):
    full = lambda **_: Path("/dev/full").open("wb", buffering=0)  # noqa: E731, SIM115
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(DiskError, match=r"a.tokens: No space left on device.* \d+ bytes are free"):
        write_corpus(tmp_path / "a.tokens", [sample([1], [True])])
    assert list(tmp_path.iterdir()) == []


def test_reading_outside_a_document_is_refused(tmp_path):
    corpus = open_corpus(written(tmp_path))
    for document, start, length in [(3, 0, 1), (-1, 0, 1), (0, 1, 3), (0, -1, 2), (1, 0, 1)]:
        with pytest.raises(ValueError, match=f"document {document}"):
            corpus.read(document, start, length)


# ------------------------------------------------------------------------------------ fingerprints


def test_the_same_bytes_as_another_dtype_have_another_fingerprint(tmp_path):
    one = write_corpus(tmp_path / "a.tokens", [[1, 2, 3]], dtype="uint8")
    two = write_corpus(tmp_path / "b.tokens", [[0x0201, 3, 0]], dtype="uint16")
    content = [path.read_bytes()[BLOCK:] for path in sorted(tmp_path.iterdir())]
    assert content[0] == content[1]
    assert fingerprint(one) != fingerprint(two)


def test_a_fingerprint_changes_with_tokens_offsets_and_what_is_trained_on(tmp_path):
    contents = [
        [[1, 2], [3]],
        [[1, 2], [4]],
        [[1], [2, 3]],
        [[1, 2], [3], []],
        [sample([1, 2], [1, 1]), sample([3], [1])],
        [sample([1, 2], [1, 0]), sample([3], [1])],
    ]
    files = [write_corpus(tmp_path / f"{i}.tokens", c) for i, c in enumerate(contents)]
    assert len({fingerprint(corpus) for corpus in files}) == len(contents)
    assert len({fingerprint(make_corpus(c)) for c in contents}) == len(contents)
    again = write_corpus(tmp_path / "again.tokens", contents[4])
    assert fingerprint(again) == fingerprint(files[4]) == files[4].sources["4.tokens"]


# --------------------------------------------------------------------------- while it is read


@pytest.mark.case("D4")
def test_a_file_that_is_cut_grown_or_written_to_while_it_is_open_is_refused(tmp_path):
    path = written(tmp_path)
    data = path.read_bytes()
    corpus = open_tokens(path)
    check_unchanged(corpus)
    with path.open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(DataError, match=rf"has 4000 bytes, but had {len(data)} when") as caught:
        check_unchanged(corpus)
    assert (caught.value.where, caught.value.got, caught.value.want) == (str(path), 4000, len(data))
    path.write_bytes(data + b"more")
    with pytest.raises(DataError, match=r"a.tokens: the file has"):
        check_unchanged(concat_corpora([make_corpus([[1]]), corpus]))
    path.write_bytes(data)
    os.utime(path, ns=(0, corpus.file.modified + 1))
    with pytest.raises(DataError, match=r"was written to while it was open"):
        check_unchanged(corpus)
    os.utime(path, ns=(0, corpus.file.modified))
    check_unchanged(corpus)


def test_a_file_that_was_replaced_or_removed_stays_readable(tmp_path):
    corpus = open_tokens(written(tmp_path))
    write_corpus(tmp_path / "a.tokens", [[9]])
    check_unchanged(corpus)
    (tmp_path / "a.tokens").unlink()
    check_unchanged(corpus)
    assert corpus.read(0, 0, 3).tolist() == [1, 2, 3]


def test_maps_hold_no_descriptor_and_go_with_the_last_array(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    path = written(tmp_path)
    corpora = [open_tokens(path) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    tokens = corpora[0].read(0, 0, 3)
    assert Path("/proc/self/maps").read_text().count(str(path)) == 20
    del corpora
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    assert tokens.tolist() == [1, 2, 3]
    del tokens
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_system_that_gives_fewer_bytes_than_asked_is_no_damage(tmp_path, monkeypatch):
    path, own = tmp_path / "a.tokens", os.pread
    documents = [list(range(300)), [1, 2], []]
    write_corpus(path, documents)
    monkeypatch.setattr(os, "pread", lambda file, size, place: own(file, min(size, 7), place))
    corpus = open_corpus(path)
    assert [corpus.read(i, 0, len(x)).tolist() for i, x in enumerate(documents)] == documents
