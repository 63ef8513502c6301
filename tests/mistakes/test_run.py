"""The script that plants mistakes says which are caught, and by what, and which are not."""

import pytest

from tests.mistakes import run
from tests.mistakes.table import Mistake

SOURCE = "def next_of(number):\n    return number + 1\n"
TEST = """
from own import next_of


def test_next_of():
    number = next_of(2)
    while number == 0:
        pass
    assert number > 2
"""


def mistake(what, new, test="test_own.py"):
    return Mistake("own.py", what, "return number + 1", f"return {new}", test)


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    (root / "own.py").write_text(SOURCE)
    (root / "test_own.py").write_text(TEST)
    (root / "test_red.py").write_text("def test_red():\n    assert False\n")
    return root


def test_mistakes_are_caught_by_a_failure_or_by_a_hang(tree, tmp_path, capsys):
    rows = [mistake("it goes back", "number - 1"), mistake("it hangs", "0")]
    assert run.run_rows(rows, tmp_path, jobs=2, timeout=3.0, root=tree) == 0
    printed = capsys.readouterr().out
    assert "caught by test_next_of: own.py: it goes back" in printed
    assert "caught: it hangs, 3 s: own.py: it hangs (test_own.py)" in printed
    assert printed.endswith("2 of 2 caught\n")
    assert (tree / "own.py").read_text() == SOURCE
    assert {path.name for path in tmp_path.iterdir()} == {"tree", "sound"}


def test_what_no_test_sees_or_was_red_before_is_not_caught(tree, tmp_path, capsys):
    rows = [
        mistake("it goes two", "number + 2"),
        mistake("it is red before", "number", "test_red.py"),
        mistake("nobody can import it", "number +", "test_own.py"),
    ]
    assert run.run_rows(rows, tmp_path, jobs=2, timeout=None, root=tree) == 1
    printed = capsys.readouterr().out
    assert "test_red.py fails without a mistake:" in printed
    assert "NOT CAUGHT: all tests pass: own.py: it goes two (test_own.py)" in printed
    assert "NOT CAUGHT: its tests fail without it: own.py: it is red before" in printed
    assert "NOT CAUGHT: pytest ended with 2: " in printed
    assert printed.endswith("0 of 3 caught\n")


def test_mistakes_are_listed_and_chosen_by_words(capsys):
    assert run.main(["--list"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert run.main(["--list", "--only", "collectives.py", "a loss is a mean"]) == 0
    some = capsys.readouterr().out.splitlines()
    assert 1 < len(some) < len(every)
    assert set(some) < set(every)
    for wrong in (["--only", "no such word"], ["--jobs", "0"]):
        with pytest.raises(SystemExit, match="2"):
            run.main(wrong)
