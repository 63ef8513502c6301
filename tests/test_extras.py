"""In .ci/run a library that is absent is a failure; on a user's machine a test is skipped."""

from pathlib import Path

import pytest
from conftest import import_or_fail

ROOT = Path(__file__).parents[1]


def test_an_absent_library_fails_where_all_are_installed():
    assert import_or_fail("torch").__name__ == "torch"
    with pytest.raises(ImportError, match=r"'no_such_library'.*TRAINKIT_ALL_EXTRAS"):
        import_or_fail("no_such_library")


def test_ci_runs_the_tests_so():
    begin, end = "export TRAINKIT_ALL_EXTRAS=1", 'in_readme "${test_line##* && }"'
    text = (ROOT / ".ci" / "run").read_text()
    assert 0 <= text.index(begin) < text.index(end)
