"""Every case of the catalogue that matters has a test that says so."""

import ast
import functools
from pathlib import Path

import pytest
from catalogue import CASES, ELSEWHERE, NOT_YET

TESTS = Path(__file__).parents[1]


def marked(text):
    """Return the ids that `@pytest.mark.case(...)` names in a test file, without importing it."""
    return {
        argument.value if isinstance(argument, ast.Constant) else ast.unparse(argument)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "case"
        for argument in node.args
    }


@functools.cache
def by_file():
    texts = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    return {path: marked(text) for path, text in texts.items() if "pytest.mark.case" in text}


def without_a_test(covered, cases=CASES):
    """Return the cases of the first two priorities that nothing covers."""
    first = {case for case, (priority, _) in cases.items() if priority in {"P0", "P1"}}
    return sorted(first - covered - set(NOT_YET) - set(ELSEWHERE))


def test_every_case_of_the_first_two_priorities_has_a_test():
    assert without_a_test(set().union(*by_file().values())) == []


def test_every_mark_names_a_case():
    assert {
        path.name: ids - set(CASES) for path, ids in by_file().items() if ids - set(CASES)
    } == {}


def test_what_has_a_test_is_not_excused():
    covered = set().union(*by_file().values())
    assert {*NOT_YET} & covered == set()
    assert {*NOT_YET, *ELSEWHERE} <= set(CASES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('@pytest.mark.case("K1", "K2")\ndef test_a(): ...', {"K1", "K2"}),
        ('CASES = [pytest.param(1, marks=pytest.mark.case("K3"))]', {"K3"}),
        ("@pytest.mark.case(name)\ndef test_a(): ...", {"name"}),
        ('@pytest.mark.parametrize("K4", [1])\ndef test_a(K4): ...', set()),
    ],
)
def test_marks_are_read_off_the_text(text, found):
    assert marked(text) == found


def test_a_case_without_a_test_is_found():
    cases = {"A1": ("P0", "x"), "A2": ("P1", "x"), "A3": ("P2", "x"), "A4": ("P0", "x")}
    assert without_a_test({"A4"}, cases) == ["A1", "A2"]
