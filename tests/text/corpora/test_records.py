"""Records come out of text, JSON lines, parquet and arrow alike; what fails is named."""

import errno
import hashlib
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.text.corpora import text_files
from trainkit.text.corpora.open import open_corpus
from trainkit.text.corpora.records import describe_record, read_records
from trainkit.text.corpora.text_files import read_text
from trainkit.types import ConfigError, DataError, DiskError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS = [{"text": f"row {number}", "messages": MESSAGES[: 1 + number % 2]} for number in range(2500)]


def write_parquet(path, rows=ROWS):
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path, row_group_size=700)


def write_arrow(path, rows=ROWS, *, stream=False):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


def write_stream(path, rows=ROWS):
    write_arrow(path, rows, stream=True)


WRITERS = [(".parquet", write_parquet), (".arrow", write_arrow), (".arrow", write_stream)]


# ------------------------------------------------------------------------------------ JSON lines


@given(st.lists(st.sampled_from([b"", b"  ", b'{"a": 1}', b'{"a": "' + b"x" * 50 + b'"}'])))
def test_lines_are_found_wherever_blocks_end(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    sources = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "BLOCK", 7)
        names = [name for name, _ in read_records(path, sources=sources)]
    assert names == [str(n) for n, line in enumerate(lines, start=1) if line.strip()]
    assert sources == {"a.jsonl": hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]}


def test_records_are_chosen_by_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{bad\n{"a": 3}')
    assert list(read_records(path, keep=lambda name: name != "2")) == [
        ("1", {"a": 1}),
        ("3", {"a": 3}),
    ]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.md").write_text("text")
    assert list(read_records(tmp_path / "b")) == [("c.md", {"text": "text"})]


def test_what_holds_no_records_is_refused_at_the_call(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"1,2")
    with pytest.raises(DataError, match=r"a.csv: neither a directory, nor a file of .jsonl"):
        read_records(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"there is no file of text or records"):
        read_records(tmp_path)
    for name in ("a.jsonl", "b.parquet"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"there is both a.jsonl and b.parquet"):
        read_records(tmp_path)
    os.mkfifo(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"c.jsonl: neither a regular file nor .* but a pipe"):
        read_records(tmp_path / "c.jsonl")


@pytest.mark.case("D7")
def test_text_beside_records_is_refused_unless_one_kind_is_left_out(tmp_path):
    (tmp_path / "README.md").write_text("all of the corpus?")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "no"}\n')
    for read in (read_records, open_corpus):
        with pytest.raises(DataError, match=r"there is both README.md and a.jsonl") as caught:
            read(tmp_path)
        assert "--exclude" in caught.value.hint
    (record,) = read_records(tmp_path, keep=lambda name: not name.endswith(".md"))
    assert record == ("a.jsonl:1", {"text": "no"})
    assert open_corpus(tmp_path, suffixes=()).names == ["a.jsonl:1"]
    assert open_corpus(tmp_path, keep=lambda name: name == "README.md").names == ["README.md"]


@pytest.mark.case("D8")
def test_a_name_that_is_no_utf_8_is_refused_when_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("b")
    with pytest.raises(DataError, match=r"\\udcff.txt: the name is no UTF-8") as caught:
        open_corpus(tmp_path)
    assert str(caught.value).isprintable()
    assert open_corpus(tmp_path, keep=str.isascii).names == ["a.txt"]


def test_a_record_has_a_place(tmp_path):
    assert describe_record(Path("a.jsonl"), "3") == "a.jsonl: line 3"
    assert describe_record(Path("a.parquet"), "3") == "a.parquet: row 3"
    assert describe_record(tmp_path, "b/c.jsonl:3") == f"{tmp_path}/b/c.jsonl: line 3"
    assert describe_record(tmp_path, "b/c.txt") == f"{tmp_path}/b/c.txt"


# ------------------------------------------------------------------------------- parquet and arrow


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_rows_are_records_with_lists_of_dicts(tmp_path, suffix, write):
    path = tmp_path / f"a{suffix}"
    write(path)
    sources = {}
    records = list(read_records(path, sources=sources))
    assert [name for name, _ in records] == [str(number) for number in range(1, 2501)]
    assert [record for _, record in records] == ROWS
    assert sources == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    chosen = list(read_records(path, keep=lambda name: name == "1401"))
    assert chosen == [("1401", ROWS[1400])]
    corpus = open_corpus(path)
    assert bytes(corpus.read(2499, 1, 8).astype(np.uint8)) == b"row 2499"
    with pytest.raises(DataError, match=rf"a{suffix}: row 1: there is no field 'body'"):
        open_corpus(path, field="body")


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_rows_are_read_a_part_at_a_time(tmp_path, suffix, write):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / f"a{suffix}"
    write(path, [{"text": "x" * 1000}] * 20_000)
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_records(path):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 8_000_000  # of 20 MB of text


@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_a_damaged_file_of_rows_is_named(tmp_path, suffix, write):
    path = tmp_path / f"a{suffix}"
    write(path)
    data = path.read_bytes()
    for bad in (b"", b"no such file", data[: len(data) // 2], bytes(100) + data[100:]):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=rf"a{suffix}: no {suffix} file, or a damaged one"):
            list(read_records(path))


def test_rows_that_point_outside_their_file_are_refused(tmp_path):
    path = tmp_path / "a.arrow"
    write_arrow(path, [{"text": "12345"}] * 9)
    offsets = struct.pack("<4i", 0, 5, 10, 15)
    data = path.read_bytes()
    assert offsets in data
    path.write_bytes(data.replace(offsets, struct.pack("<4i", 0, 5, 2**30, 15)))
    with pytest.raises(DataError, match=r"a.arrow: no .arrow file, or a damaged one"):
        list(read_records(path))


def test_without_pyarrow_the_command_that_installs_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[data\]"'):
            read_records(tmp_path / name)


# ------------------------------------------------------------------------------------ bad disks


def failing(function, times, code=errno.EIO):
    """Return a function that fails a few times before it does what it should."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    return call


@pytest.mark.case("D9")
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_read_that_fails_for_once_is_tried_again(tmp_path, monkeypatch, code):
    waits = []
    monkeypatch.setattr(text_files.time, "sleep", waits.append)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}')
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing(os.pread, 3, code))
        assert read_text(tmp_path / "a.txt") == "text"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing(os.pread, 3, code))
        assert list(read_records(tmp_path / "a.jsonl")) == [("1", {"text": "a"})]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing(Path.open, 3, code))
        assert list(read_records(tmp_path / "a.jsonl")) == [("1", {"text": "a"})]
    assert waits == [0.1, 0.2, 0.4] * 3


@pytest.mark.case("D9")
def test_a_disk_that_goes_on_failing_ends_the_run_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files.time, "sleep", lambda _: None)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}')
    monkeypatch.setattr(os, "pread", failing(os.pread, 4))
    with pytest.raises(DiskError, match=r"a.txt: cannot be read: Input/output error, 4 times"):
        read_text(tmp_path / "a.txt")
    monkeypatch.undo()
    monkeypatch.setattr(text_files.time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "pread", failing(os.pread, 4))
    with pytest.raises(DiskError, match=r"a.jsonl: cannot be read: Input/output error") as caught:
        list(read_records(tmp_path / "a.jsonl"))
    assert caught.value.code == 74


def test_what_waiting_does_not_mend_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files.time, "sleep", lambda _: pytest.fail("waited"))
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}')
    monkeypatch.setattr(Path, "open", failing(Path.open, 1, errno.EACCES))
    with pytest.raises(DataError, match=r"a.jsonl: Permission denied"):
        list(read_records(tmp_path / "a.jsonl"))
