"""The table of mistakes: every row still has its place in the source, and its test is there."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mistakes.run import planted
from tests.mistakes.table import MISTAKES, Mistake

ROOT = Path(__file__).parents[2]
WINGS = ("text", "weights", "post", "tools")


@pytest.mark.parametrize("row", MISTAKES, ids=str)
def test_a_mistake_has_its_place_exactly_once_and_its_test(row):
    text = planted((ROOT / row.file).read_text(), row)
    compile(text, row.file, "exec")
    assert row.old != row.new
    for test in row.test.split():
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_a_row_that_has_lost_its_place_is_named():
    row = Mistake("a.py", "it is lost", "x", "y", "t.py")
    for text in ("nothing", "x x"):
        with pytest.raises(ValueError, match=r"a.py has 'x' \d times, and must have it once"):
            planted(text, row)


def room_of(file):
    """Return the room of a file of the package: a file or folder of the core, or one of a wing."""
    parts = Path(file).with_suffix("").parts[1:]
    return "/".join(parts[: 2 if parts[0] in WINGS else 1])


def test_every_room_has_at_least_two_mistakes():
    files = [path.relative_to(ROOT) for path in (ROOT / "trainkit").rglob("*.py")]
    rooms = {room_of(path) for path in files if not path.name.startswith("__")}
    counts = Counter(room_of(row.file) for row in MISTAKES)
    assert not {room: counts[room] for room in rooms if counts[room] < 2}


def test_no_mistake_stands_twice():
    names = Counter((row.file, row.old, row.new) for row in MISTAKES)
    assert max(names.values()) == 1
    assert max(Counter(map(str, MISTAKES)).values()) == 1
