"""A file of results: it grows line by line, a killed run resumes it, other files are rejected."""

import fcntl
import re

import numpy as np
import pytest

from trainkit import evaluation
from trainkit.post.evaluation.examples import EvalItem, make_example
from trainkit.post.evaluation.score import ExampleScores
from trainkit.tools.testing import run_ranks
from trainkit.types import DataError, DiskError

FACTS = {"model": "1234", "data": {"a.jsonl": "abcd"}, "context": 8}
ITEMS = [EvalItem([make_example([1], [2] * (i % 3 + 1), context=8)]) for i in range(7)]


def lines_from(start, *, seen=None, stop_at=None):
    """Score examples by how many there are, as rounding does, or die at an item."""

    def score(examples):
        if seen is not None:
            seen.append(len(examples))
        if stop_at is not None and sum(seen or []) > stop_at:
            raise KeyboardInterrupt
        return [ExampleScores(np.full(x.scored, -1 / len(examples)), True) for x in examples]

    return evaluation.score_in_groups(
        score, ITEMS, evaluation.make_text_record, group=3, start=start
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the bytes of a file that was written at once."""
    path = tmp_path_factory.mktemp("whole") / "a.jsonl"
    assert evaluation.write_results(path, lines_from, facts=FACTS) == 0
    assert [line["index"] for line in evaluation.read_results(path)] == list(range(7))
    return path.read_bytes()


def test_wherever_a_run_was_killed_the_same_command_gives_the_same_file(whole, tmp_path):
    path = tmp_path / "a.jsonl"
    for size in range(0, len(whole) + 30, 29):
        path.write_bytes(whole[:size])
        had = evaluation.write_results(path, lines_from, facts=FACTS)
        assert had == max(0, whole[:size].count(b"\n") - 1)
        assert path.read_bytes() == whole


def test_a_group_that_is_done_is_on_the_disk_and_is_not_computed_again(whole, tmp_path):
    path, seen = tmp_path / "a.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        evaluation.write_results(
            path, lambda start: lines_from(start, seen=seen, stop_at=6), facts=FACTS
        )
    assert len(evaluation.read_results(path)) == 6
    seen.clear()
    evaluation.write_results(path, lambda start: lines_from(start, seen=seen), facts=FACTS)
    assert seen == [1]
    assert path.read_bytes() == whole
    seen.clear()
    evaluation.write_results(path, lambda start: lines_from(start, seen=seen), facts=FACTS)
    assert seen == []


def other(**changes):
    return lambda path: evaluation.write_results(path, lines_from, facts=FACTS | changes)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (other(model="9"), "holds results of another model: model is 1234 there, and 9 here"),
        (other(data={}, context=9), "another data and another context: data is"),
        (other(more=1), "another more: more is None there, and 1 here"),
    ],
)
def test_a_file_of_another_model_or_other_data_is_refused_and_stays(call, words, whole, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole)
    with pytest.raises(DataError, match=words):
        call(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", [b"my only notes", b"a\nb\n", b'{"index": 0}\n', b"[]\n"])
def test_a_file_of_something_else_is_refused_and_stays(text, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    for call in (other(), evaluation.read_results):
        with pytest.raises(DataError, match=r"a\.jsonl is no file of results"):
            call(path)
    assert path.read_bytes() == text


def test_a_damaged_line_is_named_by_its_number(whole, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = whole.splitlines(keepends=True)
    for bad in (b"\0\0\0\n", b"{}\n", lines[4]):
        path.write_bytes(b"".join([*lines[:3], bad, *lines[4:]]))
        with pytest.raises(DataError, match="line 4 is damaged: it is not the result of item 2"):
            other()(path)


@pytest.mark.parametrize("number", [1, 4])
def test_a_number_that_was_changed_is_not_believed(number, whole, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = whole.splitlines(keepends=True)
    digit = re.search(rb"\d(?=[,}\]].*hash)", lines[number]).start()
    changed = b"7" if lines[number][digit : digit + 1] != b"7" else b"8"
    lines[number] = lines[number][:digit] + changed + lines[number][digit + 1 :]
    path.write_bytes(b"".join(lines))
    for call in (other(), evaluation.read_results):
        with pytest.raises(DataError, match=f"line {number + 1} is damaged"):
            call(path)


def test_a_file_that_is_being_written_or_cannot_be_is_refused(whole, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is being written by another process"):
            other()(path)
    with pytest.raises(DiskError, match="No such file or directory"):
        other()(tmp_path / "no" / "a.jsonl")


def fails_on_one_rank(path):
    from trainkit.mesh import parallel_session

    with parallel_session(dp_shard=2) as ps:
        try:
            evaluation.write_results(path, lines_from, facts=FACTS, axis=ps.world)
        except DataError as error:
            return str(error)


def test_what_only_the_first_rank_sees_all_are_told(tmp_path):
    (tmp_path / "a").write_text("my notes")
    first, second = run_ranks(fails_on_one_rank, 2, str(tmp_path / "a"))
    assert second == f"rank 0: {first}"
    assert "is no file of results" in first
