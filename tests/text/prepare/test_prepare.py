"""Text becomes the same token file, whatever process wrote it and however often it stopped."""

import fcntl
import functools
import itertools
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from argparse import ArgumentParser
from collections import Counter
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit import files, hub
from trainkit.models import Experts
from trainkit.models.call import RoutingTape
from trainkit.models.experts import check_tape, preload_
from trainkit.post.evaluation.columns import make_logprob_columns, score_corpus
from trainkit.post.evaluation.score import ExampleScores
from trainkit.text.chat import (
    CHATML_SPECIAL,
    encode_chat,
    make_chat_encoder,
    template_hash,
)
from trainkit.text.chat.templates import TEMPLATES
from trainkit.text.corpora import open_conversations
from trainkit.text.corpora.records import read_records
from trainkit.text.corpora.text_files import TEXT_SUFFIXES
from trainkit.text.corpora.tokens import open_tokens, write_corpus
from trainkit.text.prepare import chunks, parts, workers
from trainkit.text.prepare import prepare as room
from trainkit.text.prepare.prepare import PrepareProgress, prepare_corpus
from trainkit.text.tokenizers import (
    encode_document,
    make_byte_tokenizer,
    open_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_bpe,
)
from trainkit.text.tokenizers.documents import make_text_encoder
from trainkit.tools.commands import prepare as command
from trainkit.types import Column, ConfigError, DataError, DiskError

BYTES = make_byte_tokenizer()
WORDS = ["", "one", "zwei ä", "three\n" * 9, "4" * 200, "fünf", "", "seven", "eight " * 30]


def write_lines(path, texts, **extra):
    lines = (orjson.dumps({"text": text, **extra}) + b"\n" for text in texts)
    path.write_bytes(b"".join(lines))
    return path


def write_tree(root, texts=WORDS, suffix=".txt"):
    for i, text in enumerate(texts):
        path = root / f"{'abc'[i % 3]}" / f"{i}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def texts_of(path):
    corpus = open_tokens(path)
    ends = itertools.pairwise(corpus.offsets.tolist())
    return [BYTES.decode(corpus.tokens[begin:end]) for begin, end in ends]


def run(source, out, *, tokenizer=BYTES, chunk_bytes=100, **options):
    return prepare_corpus(source, out, tokenizer=tokenizer, chunk_bytes=chunk_bytes, **options)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "a.tokens"


# ------------------------------------------------------------------------------------------ content


def lines(folder):
    path = write_lines(folder / "a.jsonl", WORDS, id=1)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n \r\n", 3).rstrip())
    return path


def table(suffix, writer):
    def write(folder):
        pa = pytest.importorskip("pyarrow")
        path = folder / f"a{suffix}"
        writer(pa, pa.table({"text": WORDS, "id": range(len(WORDS))}), path)
        return path

    return write


def as_parquet(_, rows, path):
    from pyarrow import parquet

    parquet.write_table(rows, path, row_group_size=2)


def as_ipc(pa, rows, path, *, kind):
    with getattr(pa.ipc, kind)(str(path), rows.schema) as file:
        file.write_table(rows, 2)


def shards(folder):
    for i in range(3):
        write_lines(folder / f"{i}.jsonl", WORDS[i * 3 : i * 3 + 3])
    return folder


KINDS = {
    "directory": write_tree,
    "jsonl": lines,
    "shards": shards,
    "parquet": table(".parquet", as_parquet),
    "arrow file": table(".arrow", functools.partial(as_ipc, kind="new_file")),
    "arrow stream": table(".arrow", functools.partial(as_ipc, kind="new_stream")),
}


@pytest.mark.parametrize("chunk_bytes", [1, 60, None])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_the_records_give_one_after_the_other(kind, chunk_bytes, source, out):
    path = KINDS[kind](source)
    encode = make_text_encoder(BYTES)
    records = list(read_records(path))
    write_corpus(
        out.with_name("b.tokens"),
        [encode(record) for _, record in records],
        vocab_size=BYTES.vocab_size,
        tokenizer_hash=tokenizer_hash(BYTES),
    )
    done = run(path, out, chunk_bytes=chunk_bytes)
    assert out.read_bytes() == out.with_name("b.tokens").read_bytes()
    assert names_in(out.parent) == ["a.tokens", "b.tokens"]
    assert done.documents == len(records) == len(WORDS)
    assert done.empty_documents == WORDS.count("")
    assert (done.tokens, done.digest) == (open_tokens(out).tokens.size, open_tokens(out).digest)


@given(st.lists(st.sampled_from([b"", b" ", b"{}", b'{"a":1}', b'{"a":"' + b"x" * 50 + b'"}'])))
def test_lines_are_cut_anywhere_and_each_is_read_once(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    for end in (b"", b"\n"):
        path.write_bytes(b"\n".join(content) + end)
        want = [orjson.loads(line) for line in content if line.strip()]
        places = [i for i, line in enumerate(content, start=1) if line.strip()]
        for size in (1, 7, 64, 1 << 20):
            cuts = chunks.split_source(path, suffixes=[], chunk_bytes=size)
            found = [(c, i, r) for c in cuts for i, r in enumerate(chunks.read_chunk(c))]
            assert [record for *_, record in found] == want
            names = [chunks.describe_document(chunk, i) for chunk, i, _ in found]
            assert names == [f"{path}: line {place}" for place in places]
            assert all(chunk.bytes >= size for chunk in cuts[:-1])


def test_a_cut_that_falls_on_the_end_of_a_line_stays_there(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["one", "two", "six"])
    line = path.stat().st_size // 3
    cuts = chunks.split_source(path, suffixes=[], chunk_bytes=line)
    assert [(cut.start, cut.end) for cut in cuts] == [(i * line, (i + 1) * line) for i in range(3)]


def test_sources_follow_one_another_and_files_are_left_out_by_name(source, out):
    first, second = write_tree(source / "x"), write_lines(source / "y.jsonl", ["last"])
    run([first, second], out)
    assert texts_of(out)[-1] == "last"
    assert len(texts_of(out)) == len(WORDS) + 1
    run(first, out, keep=lambda name: name == "b/1.txt", suffixes=[".txt"])
    assert texts_of(out) == ["one"]
    with pytest.raises(ValueError, match="only files of a directory can be left out"):
        run(second, out, keep=bool)
    with pytest.raises(DataError, match="there are no documents: all files are left out by name"):
        run(first, out, keep=lambda _: False)


def test_what_is_left_out_is_told_and_two_kinds_of_files_are_refused(source, out):
    write_tree(source)
    (source / "b" / "page.html").write_text("x")
    (source / "c" / "link").symlink_to(source / "b")
    messages = []
    run(source, out, log=messages.append)
    assert messages[0] == (
        f"{source}: 1 file of another kind is left out, such as b/page.html; "
        "1 linked folder is left out, such as c/link"
    )
    write_lines(source / "a.jsonl", ["last"])
    with pytest.raises(DataError, match=r"there is both a/0.txt and a.jsonl"):
        run(source, out)
    run(source, out, keep=lambda name: not name.endswith(".txt"))
    assert texts_of(out) == ["last"]


def test_a_text_file_is_a_source_of_one_document(tmp_path):
    (tmp_path / "input.txt").write_text("one\n\ntwo")
    (cut,) = chunks.split_source(tmp_path / "input.txt", suffixes=TEXT_SUFFIXES, chunk_bytes=1)
    assert list(chunks.read_chunk(cut)) == [{"text": "one\n\ntwo"}]
    assert chunks.describe_document(cut, 0) == str(tmp_path / "input.txt")
    run(tmp_path / "input.txt", tmp_path / "a.tokens")
    assert texts_of(tmp_path / "a.tokens") == ["one\n\ntwo"]


def test_a_file_of_nul_bytes_is_refused_at_the_first(tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(DataError, match=r"a\.jsonl: bad JSON: a line with a NUL byte"):
        chunks.split_source(tmp_path / "a.jsonl", suffixes=TEXT_SUFFIXES, chunk_bytes=1 << 20)


def test_a_name_that_could_not_be_reported_is_refused_at_once(source, out):
    write_lines(source / "a.jsonl", ["a"])
    with pytest.raises(DataError, match=r"\\udcff.tokens: the name is no UTF-8"):
        run(source, out.with_name(os.fsdecode(b"\xff.tokens")))
    assert names_in(out.parent) == []


def encoded_by_letter(tokenizer, letter):
    """Make an encoder for records, as a template for messages is one."""
    return lambda record: encode_document(tokenizer, record["text"] + letter)


def test_an_encoder_of_ones_own_gets_the_tokenizer_and_whole_records(source, out):
    run(lines(source), out, make_encode=functools.partial(encoded_by_letter, letter="!"))
    assert texts_of(out) == [text + "!" for text in WORDS]


@pytest.mark.parametrize("bad", [lambda: None, {"a": object()}])
def test_an_encoder_that_no_other_process_can_name_is_refused(bad, source, out):
    with pytest.raises(ValueError, match="must be a function at the top of a module"):
        run(lines(source), out, make_encode=functools.partial(encoded_by_letter, letter=bad))
    assert names_in(out.parent) == []


# ------------------------------------------------------------------------------------ interruptions


def die_at(event):
    """End this process like kill -9 at the n-th write to the disk or rename, before or after it."""
    count = itertools.count()

    def dying(function):
        def call(*args):
            if next(count) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args)
            if next(count) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.fsync, Path.replace, Path.unlink = map(dying, (os.fsync, Path.replace, Path.unlink))


def in_a_fork(function, *args):
    """Run a function in a child process; return the signal that ended it, or 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child starts no threads
        child = os.fork()
    if child == 0:
        try:
            function(*args)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_run_that_is_killed_anywhere_goes_on_and_gives_the_same_file(source, out):
    path = write_lines(source / "a.jsonl", ["a" * 60, "b" * 150, "c" * 10])
    run(path, out)
    want = out.read_bytes()
    out.write_bytes(b"old")
    ended = reused = 0

    def killed(event):
        die_at(event)
        run(path, out)

    for event in itertools.count():
        ended = in_a_fork(killed, event)
        if not ended:
            break
        assert out.read_bytes() in (b"old", want)
        reused += run(path, out).parts_reused
        assert out.read_bytes() == want
        assert names_in(out.parent) == ["a.tokens"]
        out.write_bytes(b"old")
    assert event > 20
    assert reused > event / 4  # finished parts are not made again


def stop_after(count):
    def progress(_):
        if next(calls) == count - 1:
            raise KeyboardInterrupt

    calls = itertools.count()
    return progress


def test_an_interrupted_run_keeps_its_parts_and_says_so(source, out):
    path, messages = lines(source), []
    with pytest.raises(KeyboardInterrupt):
        run(path, out, progress=stop_after(2))
    assert names_in(out.parent) == ["a.tokens.parts"]
    assert len(names_in(out.parent / "a.tokens.parts")) == 4
    shown = []
    done = run(path, out, log=messages.append, progress=shown.append)
    assert done.parts_reused == 2
    assert "resuming with 2 of 3 parts" in messages[0]
    assert len(messages) == 2  # that, and the concatenation
    (last,) = shown
    assert 0 < last.reused_bytes < last.bytes == last.total_bytes == path.stat().st_size
    assert (last.documents, last.tokens) == (done.documents, done.tokens)


def change_file(path):
    os.utime(path / "a" / "0.txt", ns=(1, 1))


def change_part(path):
    part = path.parent / "out" / "a.tokens.parts" / "part_00000000.tokens"
    data = bytearray(part.read_bytes())
    data[4100] ^= 1
    part.write_bytes(data)


def swap_part(path):
    """Put another token file, which is in order, into a part's place."""
    part = path.parent / "out" / "a.tokens.parts" / "part_00000000.tokens"
    write_corpus(part, [[*b"other"]] * len(open_tokens(part).lengths), vocab_size=BYTES.vocab_size)


def change_facts(path):
    (path.parent / "out" / "a.tokens.parts" / "part_00000000.json").write_text('{"key": 3}')


@pytest.mark.parametrize(
    ("change", "run_again", "found"),
    [
        (change_file, run, (1, "a/0.txt changed")),
        (change_part, run, (1, "changed after it was written")),
        (swap_part, run, (1, "part_00000000.tokens is not the file that was written")),
        (change_facts, run, (1, "part_00000000.json is damaged")),
        (
            bool,
            functools.partial(run, tokenizer=make_byte_tokenizer(["x"])),
            (0, "tokenizer changed from"),
        ),
        (bool, functools.partial(run, chunk_bytes=150), (1, "end changed from")),
    ],
)
def test_parts_of_something_else_are_made_anew(change, run_again, found, source, out):
    messages = []
    reused, reason = found
    with pytest.raises(KeyboardInterrupt):
        run(write_tree(source), out, progress=stop_after(2))
    change(source)
    assert run_again(source, out, log=messages.append).parts_reused == reused
    assert reason in messages[1]
    assert texts_of(out) == [record["text"] for _, record in read_records(source)]


def test_parts_of_another_field_are_made_anew(source, out):
    messages = []
    with pytest.raises(KeyboardInterrupt):
        run(write_tree(source), out, progress=stop_after(2))
    # It fails only after it has compared the parts.
    with pytest.raises(DataError, match="there is no field 'body'"):
        run(source, out, log=messages.append, field="body")
    assert "encode changed from 'field text' to 'field body'" in messages[1]


def test_an_encoder_that_changed_makes_parts_anew(source, out):
    make = functools.partial(encoded_by_letter, letter="a")
    with pytest.raises(KeyboardInterrupt):
        run(lines(source), out, make_encode=make, progress=stop_after(2))
    done = run(
        source / "a.jsonl", out, make_encode=functools.partial(encoded_by_letter, letter="b")
    )
    assert done.parts_reused == 0


def another_version(_, monkeypatch):
    monkeypatch.setattr(parts, "read_version", lambda: "9.9")


def other_code(tree, monkeypatch, room="chat"):
    monkeypatch.setattr(parts, "__file__", str(tree / "prepare" / "parts.py"))
    (tree / room).mkdir()
    (tree / room / "a.py").write_text("b = 1")


def other_format(_, monkeypatch):
    monkeypatch.setattr(parts, "FORMAT", parts.FORMAT + 1)


@pytest.mark.parametrize("change", [another_version, other_code, other_format])
def test_parts_of_another_trainkit_are_made_anew(change, source, out, monkeypatch):
    path, messages = lines(source), []
    with pytest.raises(KeyboardInterrupt):
        run(path, out, progress=stop_after(2))
    change(source, monkeypatch)
    assert run(path, out, log=messages.append).parts_reused == 0
    assert "changed from" in messages[1]
    assert messages[1].split(": ")[-1].startswith(("trainkit", "format"))


def test_a_trainkit_that_is_not_installed_still_knows_its_code(tmp_path, monkeypatch):
    def not_installed(_):
        raise files.metadata.PackageNotFoundError

    monkeypatch.setattr(files.metadata, "version", not_installed)
    ours = parts.code_version()
    assert ours.startswith("source ")
    seen = {ours}
    for name in ("chat", "tokenizers"):
        other_code(tmp_path, monkeypatch, name)
        seen.add(parts.code_version())
    assert len(seen) == 3


def test_a_file_that_changes_while_it_is_read_is_found(source, out):
    path = lines(source)
    with pytest.raises(DataError, match=r"a\.jsonl: it was written to while it was read"):
        run(path, out, progress=lambda _: os.utime(path, ns=(1, 1)))


def test_a_file_that_changes_inside_its_last_chunk_is_found(source, out):
    path = write_lines(source / "a.jsonl", WORDS * 9)  # more than are encoded at a time
    with pytest.raises(DataError, match="it was written to while it was read"):
        run(path, out, make_encode=functools.partial(touching, path=str(path)), chunk_bytes=None)


def touching(tokenizer, path):
    """Make an encoder that writes to the file that is being read."""

    def encode(record):
        os.utime(path, ns=(1, 1))
        return encode_document(tokenizer, record["text"])

    return encode


def test_a_file_that_became_another_before_its_chunk_came_is_named_as_such(source, out):
    path = lines(source)
    size = path.stat().st_size
    with pytest.raises(DataError, match="it was written to while it was read"):
        run(path, out, progress=lambda _: path.write_bytes(b"x" * size))


def test_a_part_of_what_is_no_longer_there_does_not_come_back(source, out):
    path = write_lines(source / "a.jsonl", ["a" * 120, "b" * 120])
    with pytest.raises(KeyboardInterrupt):
        run(path, out, progress=stop_after(1))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\n" * len(first) + second)
    run(path, out)
    assert texts_of(out) == ["b" * 120]


def test_what_a_killed_process_was_writing_is_cleared_away(source, out):
    def left_behind(_):
        (out.parent / "a.tokens.parts" / ".part_00000001.tokens.1.ff").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lines(source), out, progress=left_behind)
    left = names_in(out.parent / "a.tokens.parts")
    assert left == ["part_00000000.json", "part_00000000.tokens"]


def test_encoders_are_told_apart_by_their_name_their_code_and_what_is_bound_to_them():
    bound = functools.partial(encoded_by_letter, letter="a")
    others = [touching, encoded_by_letter, functools.partial(touching, "a"), "a"]
    names = {parts.identify(value) for value in [bound, *others]}
    assert len(names) == 5
    assert parts.identify(functools.partial(encoded_by_letter, letter="a")) in names


def test_two_runs_for_one_file_do_not_disturb_each_other(source, out):
    path = lines(source)
    with (out.parent / ".a.tokens.lock").open("a+") as other:
        other.write("4711")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process \(process 4711\) makes it"):
            run(path, out)
    run(path, out)  # a lock that nobody holds is none
    assert names_in(out.parent) == ["a.tokens"]


def test_a_lock_whose_file_another_run_has_replaced_is_taken_anew(out, monkeypatch):
    path, lock = out.with_name(".a.tokens.lock"), fcntl.flock
    first = [True]

    def after_another_run(file, how):
        if first.pop() if first else False:  # its holder deletes it, and a third run makes it anew
            path.unlink()
            path.touch()
        lock(file, how)

    monkeypatch.setattr(room.fcntl, "flock", after_another_run)
    with room.lock_output(out), path.open() as other, pytest.raises(BlockingIOError):
        lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": 3}', r"a\.jsonl: line 9: field 'text' must be a string, got int"),
        (b'{"txt": ""}', r"a\.jsonl: line 9: there is no field 'text'; found txt"),
        (b'{"text": "', r"a\.jsonl: line 9: bad JSON"),
        (b"[]", r"a\.jsonl: line 9: must be a JSON object, got list"),
    ],
)
def test_a_bad_line_is_named_and_finished_parts_are_kept(line, message, source, out):
    path = source / "a.jsonl"
    good = orjson.dumps({"text": "x" * 40}) + b"\n"
    path.write_bytes(good * 3 + b"\n" + good * 4 + line + b"\n" + good)
    with pytest.raises(DataError, match=message):
        run(path, out)
    assert len(names_in(out.parent / "a.tokens.parts")) == 6
    path.write_bytes(path.read_bytes().replace(line, good.strip()))
    assert run(path, out).documents == 9


def failing(tokenizer):
    """Make an encoder that fails at some records."""

    def encode(record):
        if record["text"] == "seven":
            return {"index": [BYTES.vocab_size]}[record.get("kind", "index")]
        return encode_document(tokenizer, record["text"])

    return encode


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"row 8: what `encode` returned has token 259 at 0, outside \[0, 259\)"),
        ({"kind": "none"}, r"row 8: KeyError: 'none'"),
    ],
)
def test_a_row_that_cannot_be_encoded_is_named(extra, message, source, out):
    pa = pytest.importorskip("pyarrow")
    rows = [{"text": text, **extra} for text in WORDS]
    as_parquet(pa, pa.Table.from_pylist(rows), source / "a.parquet")
    with pytest.raises(DataError, match=message):
        run(source / "a.parquet", out, make_encode=failing)


def test_a_file_that_is_no_text_is_named(source, out):
    write_tree(source)
    (source / "b" / "1.txt").write_bytes(b"ok\xff")
    with pytest.raises(DataError, match=r"b/1\.txt: not a text file: invalid UTF-8 at byte 2"):
        run(source, out)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, r"none\.jsonl: No such file"),
        ("a.jsonl", b"", r"a\.jsonl: there are no documents"),
        ("a.jsonl", b"\n\n", "no documents: there is none"),
        ("a.csv", b"x", r"a\.csv: neither a directory, nor a file of \.jsonl, \.parquet.* \.txt"),
        ("a.parquet", b"PAR1 x PAR1", r"a\.parquet: no \.parquet file, or a damaged one"),
        ("a.arrow", b"x" * 99, r"a\.arrow: no \.arrow file, or a damaged one"),
    ],
)
def test_a_source_that_is_missing_empty_or_of_no_kind_is_refused(
    name, content, message, source, out
):
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    if content is not None:
        (source / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        run(source / name, out)
    assert not out.exists()


def test_documents_that_are_all_empty_are_no_corpus(source, out):
    class Bare:
        identity = "bare"

        def encode(self, text):
            return [*text.encode()]

    for tokenizer in (Bare(), BYTES):  # which marks where a document begins and ends
        with pytest.raises(DataError, match=r"a.jsonl: no documents: they are all empty"):
            run(write_lines(source / "a.jsonl", ["", ""]), out, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("a.bin", ValueError, r"must end in \.tokens, got"),
        ("none/a.tokens", DiskError, "none is no folder that can be written to"),
        ("folder.tokens", DiskError, "it is a folder"),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_at_once(name, error, message, source, out):
    (out.parent / "folder.tokens").mkdir()
    with pytest.raises(error, match=message):
        run(source / "none.jsonl", out.parent / name)


def test_a_disk_without_room_for_the_concatenated_file_is_found_before_it_is_written(
    source, out, monkeypatch
):
    path = lines(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=17))
    with pytest.raises(DiskError, match=r"which needs \d+ bytes; 17 bytes are free") as caught:
        run(path, out)
    assert (caught.value.got, caught.value.want > 17) == (17, True)
    monkeypatch.undo()
    assert run(path, out).parts_reused == 3


def test_a_folder_that_does_not_reach_the_disk_is_named_and_leaves_nothing_open(
    source, out, monkeypatch
):
    sync = os.fsync

    def failing_there(handle):
        if Path(f"/proc/self/fd/{handle}").readlink() == out.parent:
            raise OSError(5, "Input/output error")
        sync(handle)

    path = lines(source)
    monkeypatch.setattr(os, "fsync", failing_there)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(DiskError, match=r"cannot write .*a\.tokens: Input/output error"):
        run(path, out)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize(
    "run_wrongly", [functools.partial(run, workers=0), functools.partial(run, chunk_bytes=0)]
)
def test_numbers_out_of_range_are_refused(run_wrongly, source, out):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        run_wrongly(lines(source), out)


# ---------------------------------------------------------------------------------------- processes

DEADLY = """
import os, signal, time
from trainkit.text.tokenizers import encode_document

def make(tokenizer):
    return lambda record: encode_document(tokenizer, record["text"])

def make_deadly(tokenizer):
    def encode(record):
        if record["text"] == "seven":
            os.kill(os.getpid(), signal.SIGKILL)
        if record["text"] == "late":
            raise ValueError("too late")
        if record["text"] == "hangs":
            time.sleep(60)
        return encode_document(tokenizer, record["text"])
    return encode
"""


@pytest.fixture
def encoders(tmp_path, monkeypatch):
    """A module that other processes can import."""
    (tmp_path / "deadly_encoders.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("deadly_encoders")
    del sys.modules["deadly_encoders"]


def test_several_processes_give_the_file_of_one(source, out):
    path = lines(source)
    run(path, out)
    want = out.read_bytes()
    shown = []
    done = run(path, out, workers=2, progress=shown.append)
    assert out.read_bytes() == want
    assert done.workers == 2
    assert (shown[-1].bytes, shown[-1].documents) == (path.stat().st_size, len(WORDS))
    assert names_in(out.parent) == ["a.tokens"]


@pytest.mark.case("D10")
def test_a_process_that_dies_is_named_with_its_chunk(source, out, encoders):
    path = lines(source)
    message = r"process \d+ on .*, at chunk 2, bytes \d+ to \d+ of .*, was ended by SIGKILL"
    with pytest.raises(DataError, match=message):
        run(path, out, workers=2, make_encode=encoders.make_deadly)
    left = names_in(out.parent / "a.tokens.parts")
    assert all(name.endswith((".json", ".tokens")) for name in left)
    path.write_bytes(path.read_bytes().replace(b"seven", b"late"))
    with pytest.raises(DataError, match=r"a\.jsonl: line \d+: too late"):
        run(path, out, workers=2, make_encode=encoders.make_deadly)


@pytest.fixture
def work(out):
    """What a worker does with some chunks, in this process."""

    def written(make_encode, *todo, tokenizer=BYTES):
        work = parts.make_work(out.parent, tokenizer, make_encode, "text")
        job = workers._Job(secrets.token_hex(8), workers.code_version(), work)
        return [workers._write(job, *task) for task in enumerate(todo)]

    return written


def test_processes_start_without_torch():
    code = "import sys, trainkit.text.prepare.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_processes_look_for_no_script_that_came_through_a_pipe(monkeypatch):
    for name, value in {"__file__": "<stdin>", "__spec__": None}.items():
        monkeypatch.setitem(vars(sys.modules["__main__"]), name, value)
    with workers.process_pool(1) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()


def start_one():
    with workers.process_pool(2) as pool:
        with workers._delay_interrupts():
            pool.submit(os.getpid)
        pytest.fail("the interrupt was lost")


@pytest.fixture
def _interrupts():
    """Receive Ctrl-C: tests that a shell has started in the background begin with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_workers_leave_the_interrupt_to_the_parent(monkeypatch, capfd):
    """Ctrl-C goes to all processes of a terminal, those that are still starting too."""
    masks = []

    def start(process):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        # To this thread, for a library's own would take it; it comes when all are there.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        started(process)

    started = multiprocessing.context.SpawnProcess.start
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        start_one()
    assert [signal.SIGINT in mask for mask in masks] == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert "Traceback" not in capfd.readouterr().err


class TwoPartsError(ValueError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class OwnError(DataError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


ERRORS = {
    "two parts": (TwoPartsError("a", "b"), DataError, "TwoPartsError: a and b"),
    "own": (OwnError("a", "b"), DataError, "OwnError: a and b"),
    "odd": (DataError("odd", got=lambda: 0), DataError, "DataError: odd"),
    "key": (KeyError("k"), DataError, "KeyError: 'k'"),
    "value": (ValueError("v"), ValueError, "v"),
    "disk": (DiskError("full", where=Path("a"), got=1, want=(2,), hint="h"), DiskError, "full: h"),
    "config": (ConfigError("gone", hint="pip"), ConfigError, "gone: pip"),
}


def failing_at_once(_, name):
    raise ERRORS[name][0]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_worker_comes_as_what_it_is_or_in_its_words(name, work, source):
    error, kind, message = ERRORS[name]
    (chunk,) = chunks.split_source(lines(source), suffixes=[], chunk_bytes=10_000)
    with pytest.raises(kind) as caught:
        work(functools.partial(failing_at_once, name=name), chunk)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (type(sent), str(sent)) == (kind, message)
    if kind in (DiskError, ConfigError):
        for fact in ("what", "where", "got", "want", "hint"):
            assert getattr(sent, fact) == getattr(error, fact)


def test_an_error_while_a_chunk_is_read_comes_in_its_words(source, out, work, monkeypatch):
    def broken(*_, **__):
        raise TwoPartsError("a", "b")

    (chunk,) = chunks.split_source(lines(source), suffixes=[], chunk_bytes=10_000)
    monkeypatch.setattr(parts, "read_chunk", broken)
    with pytest.raises(DataError, match="TwoPartsError: a and b"):
        work(None, chunk)
    assert names_in(out.parent) == []


def test_another_trainkit_is_refused(source, out, monkeypatch):
    (chunk,) = chunks.split_source(lines(source), suffixes=[], chunk_bytes=10_000)
    work = parts.make_work(out.parent, BYTES, None, "text")
    monkeypatch.setattr(workers, "_thread_state", threading.local())
    with pytest.raises(DataError, match=r"has another trainkit .* \(of old\)"):
        workers._write(workers._Job("a run", "of old", work), 0, chunk)


@pytest.mark.case("D11")
def test_a_process_without_a_heartbeat_is_named(source, out, encoders):
    path = write_lines(source / "a.jsonl", ["x" * 200, "hangs", "y" * 200])
    message = (
        r"process \d+ on .*, at chunk 1, bytes \d+ to \d+ of .*, has sent no heartbeat for \d+ s"
    )
    with pytest.raises(DataError, match=message):
        run(path, out, workers=2, timeout=2.0, make_encode=encoders.make_deadly)
    assert no_children_are_left()


SLOW = """
import time
from multiprocessing import parent_process

if parent_process():
    time.sleep(60)

def make(tokenizer):
    return tokenizer.encode
"""


def no_children_are_left():
    """Return whether all processes end soon; a pool's thread may not have noted it yet."""
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not multiprocessing.active_children()


def test_processes_that_start_no_chunk_are_reported(source, out, tmp_path, monkeypatch):
    (tmp_path / "slow_encoders.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(workers, "_MIN_START_SECONDS", 0.5)
    make = __import__("slow_encoders").make
    with pytest.raises(DataError, match=r"a process has started no chunk for \d+ s.*__main__"):
        run(lines(source), out, workers=2, timeout=0.5, make_encode=make)
    assert no_children_are_left()


def test_a_process_that_still_hangs_at_the_end_is_killed(monkeypatch):
    monkeypatch.setattr(workers, "_EXIT_SECONDS", 0.2)
    start = time.monotonic()
    with workers.process_pool(1) as pool:
        pool.submit(time.sleep, 300)
    assert time.monotonic() - start < 100
    assert no_children_are_left()


def test_an_executor_may_start_its_chunks_late(source, out):
    path, started = lines(source), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(started.wait)
        threading.Timer(1.0, started.set).start()
        assert run(path, out, executor=executor, timeout=0.1).documents == len(WORDS)


class Reaped:
    """A process whose exit code another thread has fetched, and not yet stored."""

    pid = 4711

    def __init__(self, *codes):
        self._codes = iter(codes)

    @property
    def exitcode(self):
        return next(self._codes)


def test_a_dead_process_is_found_once_its_exit_code_is_known(tmp_path):
    others = [SimpleNamespace(pid=1, exitcode=code) for code in (0, -signal.SIGTERM)]
    (tmp_path / ".at_2").write_text("process 4711 on x, at chunk 2,")
    dead = Reaped(None, None, -signal.SIGKILL)
    error = workers._find_dead_process([*others, dead], tmp_path)
    assert "process 4711 on x, at chunk 2, was ended by SIGKILL" in str(error)
    error = workers._find_dead_process(others, tmp_path)
    assert "at chunk 2, has ended" in str(error)


def test_a_pool_that_breaks_while_chunks_are_submitted_is_reported(source, out):
    class Broken(ThreadPoolExecutor):
        def submit(self, *_):
            raise BrokenExecutor

    with Broken(1) as executor, pytest.raises(DataError, match="a process has ended"):
        run(lines(source), out, executor=executor)


def test_processes_end_with_one_that_is_killed(tmp_path):
    """No pool outlives the process that made it, however that ends."""
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    children = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(map(is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


KILLED = """
import os, time
from trainkit.text.prepare.workers import process_pool

if __name__ == "__main__":
    with process_pool(2) as pool:
        pool.submit(time.sleep, 1), pool.submit(time.sleep, 1)
        for process in pool._processes:
            print(process, flush=True)
        time.sleep(60)
"""


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_pool_of_somebody_elses_does_the_same(source, out):
    path = lines(source)
    run(path, out)
    want = out.read_bytes()
    with ThreadPoolExecutor(3) as executor:
        done = run(path, out, executor=executor)
    assert (out.read_bytes(), done.workers) == (want, None)


def test_a_small_source_is_done_in_this_process(source, out):
    assert run(lines(source), out, workers=None).workers == 1


# ------------------------------------------------------------------------------------------ command


def command_line(*words):
    parser = ArgumentParser()
    command.add(parser)
    return command.run(parser.parse_args([*map(str, words)]))


def test_the_command_reports_what_it_has_done(source, out, capsys):
    report, code = command_line(lines(source), "--out", out)
    assert code == 0
    assert orjson.loads(orjson.dumps(report)) == report
    assert (report["documents"], report["empty_documents"]) == (len(WORDS), 2)
    assert (report["path"], report["tokenizer"]) == (str(out), "bytes")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "100 %  9 documents" in captured.err


def test_the_command_leaves_out_and_chooses_files(source, out):
    write_tree(source)
    write_tree(source, ["code"], suffix=".c")
    report, _ = command_line(source, "--out", out, "--suffix", ".c", ".txt", "--exclude", "b/*")
    assert report["documents"] == len(WORDS) + 1 - 3
    assert "code" in texts_of(out)
    assert set(TEXT_SUFFIXES) >= {".txt", ".md"}


def test_the_command_trains_a_bpe_and_writes_it_beside_the_corpus(source, out):
    pytest.importorskip("tokenizers")
    report, _ = command_line(lines(source), "--out", out, "--tokenizer", "bpe:280")
    tokenizer = out.with_name("a.tokenizer.json")
    assert (report["bpe_documents"], report["tokenizer"]) == (len(WORDS), str(tokenizer))
    first = out.read_bytes()
    again, _ = command_line(source / "a.jsonl", "--out", out, "--tokenizer", tokenizer)
    assert out.read_bytes() == first
    assert again["vocab_size"] == open_tokens(out).vocab_size == report["vocab_size"]
    with pytest.raises(ValueError, match=r"bpe:N wants a number, got 'x'"):
        command_line(source / "a.jsonl", "--out", out, "--tokenizer", "bpe:x")
    with pytest.raises(DiskError, match="none is no folder"):
        command_line(source, "--out", out.parent / "none" / "a.tokens", "--tokenizer", "bpe:280")


def test_the_command_trains_conversations_on_what_the_assistant_says(source, out):
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    path = source / "a.jsonl"
    path.write_bytes((orjson.dumps({"messages": talk}) + b"\n") * 2)
    report, _ = command_line(path, "--out", out, "--messages", "--template", "chatml")
    corpus = open_tokens(out)
    assert (report["documents"], report["vocab_size"]) == (2, 271)
    assert corpus.tokenizer_hash == tokenizer_hash(open_tokenizer("bytes"))
    trained = corpus.tokens[corpus.loss_mask.astype(bool)]
    assert trained.tolist() == [*b"2", 260] * 2
    path.write_bytes(orjson.dumps({"chat": talk}))
    with pytest.raises(DataError, match="no field 'messages'; it has chat"):
        command_line(path, "--out", out, "--messages")
    report, _ = command_line(path, "--out", out, "--messages", "--field", "chat")
    assert report["documents"] == 1
    with pytest.raises(ConfigError, match="bpe:N is trained on text"):
        command_line(path, "--out", out, "--messages", "--tokenizer", "bpe:300")


def talks(folder):
    """Four conversations of 26, 54, 56 and 39 tokens of ChatML; the last has no short turn."""
    texts = [["1+1?", "2"], ["a", "b", "c", "d"], ["e", "f", "g", "hij"], ["a long question", "A"]]
    roles = ["user", "assistant"] * 2
    records = (
        {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]}
        for turns in texts
    )
    path = folder / "talks.jsonl"
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def test_the_command_keeps_what_fits_and_reports_what_was_lost(source, out):
    path = talks(source)
    report, _ = command_line(path, "--out", out, "--messages", "--max-length", 35)
    counts = {"conversations": 4, "truncated": 2, "dropped": 1, "turns_lost": 3, "answers": 6}
    counts |= {"hidden_answers": 0}
    assert (report["counts"], report["documents"], report["empty_documents"]) == (counts, 4, 0)
    assert open_tokens(out).lengths[-1] == 0
    assert open_tokens(out).lengths.max() <= 35
    report, _ = command_line(path, "--out", out, "--messages", "--train-on", "last")
    assert +Counter(report["counts"]) == {"conversations": 4, "answers": 4}
    corpus = open_tokens(out)
    trained = corpus.tokens[corpus.loss_mask.astype(bool)]
    assert BYTES.decode(trained) == "2dhijA"
    with pytest.raises(DataError, match=r"no documents: they are all empty, or dropped \(4\)"):
        command_line(path, "--out", out, "--messages", "--max-length", 3)


@pytest.fixture
def model(tmp_path):
    """Return a folder of a tokenizer of bytes, with the chat template of Llama 3."""
    pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in hub.make_tokenizer_files("bytes", template="llama3").items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("given", ["folder", "file"])
def test_conversations_are_written_by_the_template_of_the_tokenizers_folder(
    given, source, out, model
):
    path, name = talks(source), model if given == "folder" else model / "tokenizer.json"
    tokenizer, (record, *_) = open_tokenizer(model), read_records(path)
    report, _ = command_line(path, "--out", out, "--messages", "--tokenizer", name)
    for native, flags in (("llama3", []), ("qwen3", ["--template", "qwen3"])):
        command_line(path, "--out", out, "--messages", "--tokenizer", name, *flags)
        want = encode_chat(record[1]["messages"], tokenizer, template=TEMPLATES[native])
        corpus = open_tokens(out)
        assert corpus.tokens[: len(want.tokens)].tolist() == want.tokens.tolist()
        assert corpus.template_hash == template_hash(native)  # the folder holds the same source
    assert report["template"] == str(model)
    assert corpus.made_with == {"tokenizer": str(name), "template": "qwen3"}


def test_a_token_file_of_another_template_or_tokenizer_is_refused_with_the_name_of_its_own(
    source, out, model
):
    command_line(talks(source), "--out", out, "--messages", "--tokenizer", model)
    tokenizer, opened = open_tokenizer(model), open_conversations
    for same in (str(model), "llama3", None):
        opened(out, None, tokenizer=tokenizer, template=same)
    with pytest.raises(DataError, match=rf"with the template {model} .* model's is qwen3 .*"):
        opened(out, None, tokenizer=tokenizer, template="qwen3")
    for other in (open_tokenizer("bytes"), BYTES):  # of as many ids, and of fewer
        with pytest.raises(DataError, match=f"give --tokenizer {model}, which made it"):
            opened(out, None, tokenizer=other, template=None)
    # What is scored says of its making what its corpus says.
    scored = out.with_name("scored.tokens")
    measured = make_logprob_columns(
        lambda rows: [ExampleScores(np.zeros(x.scored), True) for x in rows]
    )
    score_corpus(measured, open_tokens(out), scored, context=512, facts={})
    assert open_tokens(scored).template_hash == open_tokens(out).template_hash


def test_a_template_without_a_place_for_calls_is_warned_of_and_refused_above_one_in_a_hundred(
    source, out, model, capsys
):
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"function": {"name": "end", "arguments": {"x": 1}}}
    calls = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "tool_calls": [call]}]
    says = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": " 2 "}]
    path = source / "calls.jsonl"
    for many in (99, 98):
        talk = [{"messages": calls}, *[{"messages": says}] * many]
        path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in talk))
        flags = [path, "--out", out, "--messages", "--tokenizer", model]
        finding = f"the template shows nothing of 1 of {many + 1} answers"
        if many == 99:
            report, _ = command_line(*flags)
            assert report["counts"]["hidden_answers"] == 1
            assert f"warning: {finding}" in capsys.readouterr().err
        else:
            with pytest.raises(DataError, match=f"{finding}.*; take a template that shows them"):
                command_line(*flags)
    # A template that shows calls, and one that takes the thoughts out of words, hide nothing.
    report, _ = command_line(*flags, "--template", "qwen3")
    assert report["counts"]["hidden_answers"] == 0


def test_a_tokenizer_without_a_template_is_told_what_was_assumed(source, out, model):
    save_tokenizer(train_bpe(["a b c"], vocab_size=260), model / "tokenizer.json")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=f"{model} brings no chat template, so ChatML was assumed, and .* has"
    ) as caught:
        command_line(talks(source), "--out", out, "--messages", "--tokenizer", model)
    assert "--template: chatml, llama3, qwen3, or a folder" in caught.value.hint


def test_the_help_shows_a_column_of_choices_that_a_model_takes():
    (shown,) = (word for word in command.__doc__.split() if word.startswith("choices:"))
    name, column = command._parse_column(shown)
    assert (name, column.of) == ("choices", "token")
    tape, values = RoutingTape(), np.zeros((1, 3, 1, *column.inner), column.dtype)
    preload_(tape, ["mlp"], torch.from_numpy(values) + torch.arange(2, dtype=torch.uint8))
    experts = Experts(count=2, top_k=2, width=8)
    check_tape(tape, ["mlp"], experts, is_token=torch.ones(3, dtype=torch.bool))


def test_the_command_takes_ids_with_a_value_for_each(source, out):
    record = {"ids": [65, 66, 67], "answer": [0, 1, 1], "weights": [0, 0.5, -1.0]}
    record["experts"] = [[0, 1], [2, 0], [1, 3]]
    path = source / "ids.jsonl"
    path.write_bytes((orjson.dumps(record) + b"\n") * 2)
    flags = ["--columns", "weights:float32", "experts:uint8:2:token", "--field", "ids"]
    command_line(path, "--out", out, *flags, "--loss-mask", "answer")
    corpus = open_tokens(out)
    assert corpus.columns == {
        "weights": Column("float32"),
        "experts": Column("uint8", (2,), of="token"),
    }
    assert corpus.values["weights"].tolist() == record["weights"] * 2
    assert corpus.values["experts"].tolist() == record["experts"] * 2
    assert corpus.loss_mask.tolist() == record["answer"] * 2
    with pytest.raises(ConfigError, match="bpe:N is trained on text; give token ids a tokenizer"):
        command_line(path, "--out", out, *flags, "--tokenizer", "bpe:300")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss-mask", "answer"], "--loss-mask is for records of token ids: give --columns too"),
        (["--columns", "a:float32", "--messages"], "--columns is for records of token ids"),
        (["--columns", "weights"], r"--columns must be NAME:DTYPE\[:K\]\[:token\], .* 'weights'"),
        (["--columns", "a:uint8:two"], "--columns must be"),
        (["--columns", "a:float64"], "dtype must be one of"),
        (["--max-length", 9], "--max-length is for conversations: give --messages too"),
        (["--train-on", "last"], "--train-on is for conversations"),
        (["--template", "chatml"], "--template is for conversations"),
        (["--messages", "--template", "chatmal"], "is no chat template and no folder with one"),
        (["--messages", "--max-length", 0], "--max-length must be at least 1, got 0"),
    ],
)
def test_the_command_refuses_flags_that_make_no_sense(flags, message, source, out):
    with pytest.raises(ConfigError, match=message):
        command_line(talks(source), "--out", out, *flags)


def test_counts_of_parts_add_up_in_any_process_and_after_a_stop(source, out, work):
    path, tokenizer = talks(source), make_byte_tokenizer(CHATML_SPECIAL)
    make = functools.partial(make_chat_encoder, max_length=35, overlong="drop")
    todo = chunks.split_source(path, suffixes=[], chunk_bytes=1)
    parts_of_chunks = work(make, *todo, tokenizer=tokenizer)
    found = [(part.counts["truncated"], part.counts["dropped"]) for part in parts_of_chunks]
    assert found == [(0, 0), (1, 0), (1, 0), (0, 1)]
    assert [part.empty_documents for part in parts_of_chunks] == [0] * 4
    run_it = functools.partial(run, path, out, make_encode=make, tokenizer=tokenizer, chunk_bytes=1)
    with pytest.raises(KeyboardInterrupt):
        run_it(progress=stop_after(3))
    done = run_it()
    assert (done.parts_reused, done.empty_documents) == (3, 0)
    counts = {"conversations": 4, "truncated": 2, "dropped": 1, "turns_lost": 3, "answers": 6}
    assert +Counter(done.counts) == counts


@pytest.mark.parametrize("finished", [0, 1])
def test_the_command_says_how_to_go_on_when_it_is_interrupted(finished, source, out, monkeypatch):
    calls, write = itertools.count(), parts.write_corpus

    def interrupted(*args, **options):
        if next(calls) == finished:
            raise KeyboardInterrupt
        return write(*args, **options)

    monkeypatch.setattr(parts, "write_corpus", interrupted)
    monkeypatch.setattr(room, "_MIN_CHUNK_BYTES", 100)
    report, code = command_line(lines(source), "--out", out)
    assert code == 76
    assert ("give the same command again to resume" in report["error"]) == bool(finished)
    assert ("the same command starts from scratch" in report["error"]) != bool(finished)
    assert out.with_name("a.tokens.parts").exists() == bool(finished)


def test_an_interrupt_before_the_first_part_is_none_of_a_traceback(source, out, monkeypatch):
    monkeypatch.setattr(room, "check_output", stop_after(1))
    report, code = command_line(lines(source), "--out", out)
    assert (code, "starts from scratch" in report["error"]) == (76, True)


def test_progress_in_a_log_comes_every_ten_seconds_and_at_the_end(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    show = command._make_progress_printer()
    for seconds in np.arange(0, 30.5, 0.5):
        now[0] = 100.0 + seconds
        show(PrepareProgress(1, 2, int(seconds * 10), 300, 0, float(seconds)))
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in shown] == [" 33 %", " 67 %", "100 %"]
    assert shown[0].endswith("0:00:20 left")
