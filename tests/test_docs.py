"""What the README and the pages show is true: code runs, commands and links name what is there."""

import contextlib
import doctest
import functools
import importlib.util
import io
import re
import shlex
import sys
from itertools import zip_longest
from pathlib import Path
from unittest import mock

import pytest

import trainkit
import trainkit.__main__ as command_line
from trainkit import config
from trainkit.text.corpora.formats import RECORD_FORMATS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]
FIRST_LINES = """\
pip install -e ".[recipes]" && python recipes/pretrain.py        # trains, now, on text that is \
already on this machine
pip install -e ".[test]" && pytest                               # the tests
"""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks_of(text):
    """Return (language, code, line, output) of the fenced blocks of a page.

    The output is that of a text block which follows directly; elsewhere it is None.
    """
    found = list(FENCE.finditer(text))
    blocks = []
    for block, below in zip_longest(found, found[1:]):
        is_output = below and below[1] == "text" and not text[block.end() : below.start()].strip()
        line = text.count("\n", 0, block.start(2)) + 1
        blocks.append((block[1], block[2], line, below[2] if is_output else None))
    return blocks


def run_page(text, name):
    """Run a page's Python blocks in one namespace; compare what they print with what they show.

    A block that begins with `# file.py` is written to that file, for blocks below to import.
    """
    namespace = {"__name__": "page"}
    for language, code, line, output in blocks_of(text):
        file = re.match(r"# (\w+\.py)\n", code)
        if language != "python":
            continue
        if file:
            Path(file[1]).write_text(code)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, name, "exec"), namespace)
        if output is not None:
            same = doctest.OutputChecker().check_output(output, printed.getvalue(), FLAGS)
            assert same, f"{name}:{line} printed {printed.getvalue()!r}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in an empty directory from which modules can be imported; forget them afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_the_code_of_a_page_runs(path):
    with mock.patch.dict(RECORD_FORMATS):  # a page adds a format
        run_page(path.read_text(), name_of(path))


def test_a_page_that_shows_what_it_does_not_print_is_found():
    page = "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n"
    with pytest.raises(AssertionError, match=r"page\.md:6 printed '1\\n'"):
        run_page(page, "page.md")


# ------------------------------------------------------------------------------------ commands


@functools.cache
def flags_of(script):
    """Return the flags of a recipe, from its Config; of another script, from its text."""
    if script.parent.name != "recipes":
        return set(re.findall(r"--[\w-]+", script.read_text()))
    spec = importlib.util.spec_from_file_location(f"recipe_{script.stem}", script)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return {"--help", *map(config._format_flag, config._list_fields(recipe.Config))}


def problems_of_command(line):
    """Return what a command line names that is not there; nothing for commands of others."""
    words = shlex.split(line, comments=True)
    # A launcher comes before the recipe.
    scripts = [word for word in words if word.endswith(".py") and "/" in word]
    script = scripts[-1] if scripts else None
    if script is not None:
        if missing := [f"there is no {name}" for name in scripts if not (ROOT / name).is_file()]:
            return missing
        flags, given = flags_of(ROOT / script), words[words.index(script) + 1 :]
        return [f"{script} has no flag {w}" for w in given if w[:2] == "--" and w not in flags]
    if words[:3] == ["python", "-m", "trainkit"]:
        try:
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                command_line._make_parser().parse_args(words[3:])
        except SystemExit:
            return [stderr.getvalue()]
    elif words[:1] not in (["pip"], ["cat"], ["pytest"]):
        return [f"{words[0]!r} is no command that the pages may use"]
    return []


def commands_of(path):
    """Return the command lines of a page: those of console blocks, in sh blocks all."""
    found = []
    for language, code, *_ in blocks_of(path.read_text()):
        lines = code.replace("\\\n", " ").splitlines()
        if language == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif language == "sh":
            found += [part for line in lines for part in line.partition("#")[0].split("&&")]
    return [line for line in found if line.strip()]


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_commands_name_flags_and_files_that_exist(path):
    assert [problem for line in commands_of(path) for problem in problems_of_command(line)] == []


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_recipes_and_flags_that_a_sentence_names_exist(path):
    named = re.findall(r"`(?:recipes/)?(\w+\.py) (--[\w-]+)", path.read_text())
    lines = [f"python recipes/{script} {flag}" for script, flag in named if script not in OWN]
    assert [problem for line in lines for problem in problems_of_command(line)] == []


OWN = {"packing.py"}  # a script of tests/benchmarks


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("python recipes/pretrain.py --stpes 3", "recipes/pretrain.py has no flag --stpes"),
        ("python recipes/none.py", "there is no recipes/none.py"),
        ("rm -rf runs", "'rm' is no command that the pages may use"),
    ],
)
def test_a_command_that_is_wrong_is_found(line, problem):
    assert problems_of_command(line) == [problem]


# ------------------------------------------------------------------------------------ pages


def test_the_readme_has_the_two_lines_as_they_are():
    assert blocks_of((ROOT / "README.md").read_text())[0][1] == FIRST_LINES


def test_the_map_names_every_page():
    linked = {(DOCS / link).resolve() for link in LINK.findall((DOCS / "index.md").read_text())}
    assert {p for p in WRITTEN[1:] if p.name != "index.md"} <= linked


@pytest.mark.parametrize("path", [*WRITTEN, ROOT / "CHANGELOG.md"], ids=name_of)
def test_nobody_is_told_to_install_another_project(path):
    assert not re.search(r"pip install\s+[\"']?trainkit(?!-lm)", path.read_text())


# ------------------------------------------------------------------------------------ reference


@pytest.fixture(scope="module")
def reference():
    """Return the script that builds the reference, as a module."""
    spec = importlib.util.spec_from_file_location("build_reference", DOCS / "build_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference):
    return reference.build()


def test_every_public_name_has_a_docstring_and_every_link_leads_somewhere(reference, pages):
    built = {reference.BUILT / name: text for name, text in pages.items()}
    assert reference.gaps() == []
    assert reference.broken_links(built | {path: path.read_text() for path in WRITTEN}) == []


def test_the_reference_begins_with_tk_and_the_families_in_the_order_of_the_alphabet(pages):
    tk, families = pages["index.md"].split("## Families")
    names = re.findall(r"^- \[`tk\.(\w+)`\]", tk, re.MULTILINE)
    rooms = re.findall(r"^### \[trainkit\.([\w.]+)\]", families, re.MULTILINE)
    assert (names, rooms) == (sorted(names, key=str.lower), sorted(rooms))
    listed = {*names, *(room.split(".")[-1] for room in rooms)}
    assert listed == set(trainkit.__all__) - {"text", "weights", "post", "tools"}
    assert "](internals.md)" in families


def test_the_reference_names_nothing_private(pages):
    text = "\n".join(pages.values())
    names = re.findall(r"(?<![\w./-])_[a-z]\w*", re.sub(r"\(\S*\)", "", text), re.IGNORECASE)
    assert names == []


def test_a_link_to_nowhere_is_found(reference):
    page = reference.BUILT / "page.md"
    text = "# A head, here\n[a](#a-head-here) [b](#b) [c](other.md) [d](../../index.md#look)\n"
    found = [problem.partition(": ")[2] for problem in reference.broken_links({page: text})]
    assert found == ["there is no #b in page.md", "other.md leads nowhere"]
