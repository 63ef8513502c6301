"""What the README and the pages show is true: code runs, commands and links name what is there."""

import contextlib
import doctest
import functools
import importlib.util
import io
import json
import re
import shlex
import sys
from itertools import zip_longest
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

import trainkit
import trainkit.__main__ as command_line
from trainkit import config
from trainkit.text.corpora.formats import RECORD_FORMATS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
WRITTEN = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *PAGES]
FIRST_LINES = """\
pip install -e ".[recipes]" && python recipes/pretrain.py  # trains, on Python's own source
pip install -e ".[test]" && pytest                         # the tests
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
    namespace = {}
    for language, code, line, output in blocks_of(text):
        # A script that shows what it prints runs as one; others are imported.
        is_script = output is not None and '__name__ == "__main__"' in code
        namespace["__name__"] = "__main__" if is_script else "page"
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


def load_script(path):
    """Return a script of the pages as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------ commands


@functools.cache
def flags_of(script):
    """Return the flags of a recipe, from its Config; of another script, from its text."""
    if script.parent.name != "recipes":
        return set(re.findall(r"--[\w-]+", script.read_text()))
    recipe = load_script(script)
    return {"--help", *map(config._format_flag, config._list_fields(recipe.Config))}


def problems_of_command(line):
    """Return what a command line names that is not there; nothing for commands of others."""
    words = shlex.split(line.partition(" > ")[0], comments=True)
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


def test_the_readme_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 210


@pytest.mark.parametrize("dark", ["", "-dark"])
@pytest.mark.parametrize("picture", ["certificate", "certificate-reported"])
def test_the_picture_of_the_certificate_has_the_numbers_of_its_page(picture, dark):
    script = load_script(DOCS / "pictures" / "certificate.py")
    with Image.open(DOCS / "pictures" / f"{picture}{dark}.png") as image:
        assert image.info["Description"] == script.hash_numbers(*script.read_numbers())


@pytest.mark.parametrize("path", [*WRITTEN, ROOT / "CHANGELOG.md"], ids=name_of)
def test_nobody_is_told_to_install_another_project(path):
    assert not re.search(r"pip install\s+[\"']?trainkit(?!-lm)", path.read_text())


CODE = sorted([*(ROOT / "trainkit").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])


def test_help_docstrings_and_hints_name_pages_and_recipes_but_no_path_of_a_checkout():
    """Who has the wheel has neither docs/ nor recipes/; the site has the pages by their titles."""
    titles = re.findall(r"^- \[([^\]]+)\]", (DOCS / "index.md").read_text(), re.MULTILINE)
    found = []
    for path in CODE:
        text = path.read_text()
        found += [f"{name_of(path)}: {x}" for x in re.findall(r"\b(?:docs|recipes)/\w+", text)]
        named = re.findall(r'\bpage\s+"([^"]+)"', text)
        found += [f"{name_of(path)}: no page {x!r}" for x in named if x not in titles]
    assert found == []


def test_the_gallery_shows_every_picture():
    files = {path.name for path in (DOCS / "pictures").iterdir() if path.suffix in (".png", ".svg")}
    shown = re.findall(r"!\[[^]]*\]\(pictures/([^)#]+)", (DOCS / "gallery.md").read_text())
    assert set(shown) == files
    assert len(shown) == len(files)


def test_the_gallery_has_every_function_and_command_that_draws():
    gallery = (DOCS / "gallery.md").read_text()
    texts = {path: path.read_text() for path in (ROOT / "trainkit").rglob("*.py")}
    written = "\n".join(text for path, text in texts.items() if path.stem != "drawing")
    functions = set(re.findall(r'save_picture\(\s*"(\w+)"', written))
    assert functions == set(re.findall(r"^def (plot_\w+)", written, re.MULTILINE))
    commands = {path.stem for path, text in texts.items() if draws_as_a_command(path, text)}
    assert commands == {"pack", "report"}
    calls = functions | {f"python -m trainkit {command}" for command in commands}
    assert {call for call in calls if not re.search(rf"\b{call}\b", gallery)} == set()


def draws_as_a_command(path, text):
    return path.parent.name == "commands" and re.search(r"import .*(\bplot_|write_report)", text)


# ------------------------------------------------------------------------------------ links


def anchors_of(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links_of(path, text):
    """Return the links of a page that lead to no file, or to no heading of a page."""
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if link.startswith("https://") or anchor in SCHEMES:
            continue
        if not target.exists():
            found.append(f"{link} leads nowhere")
        elif anchor and target.suffix == ".md":
            page = text if target == path else target.read_text()
            found += [] if anchor in anchors_of(page) else [f"there is no #{anchor} in {file}"]
    return found


SCHEMES = {"gh-light-mode-only", "gh-dark-mode-only"}  # of two pictures GitHub shows one


@pytest.mark.parametrize("path", [*WRITTEN, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_link_leads_somewhere(path):
    assert broken_links_of(path, path.read_text()) == []


def test_a_link_to_nowhere_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# Other\n")
    text = "# A head, here\n[a](#a-head-here) [b](#b) [c](none.md) [d](other.md#look)\n"
    (tmp_path / "page.md").write_text(text)
    found = broken_links_of(tmp_path / "page.md", text)
    assert found == ["there is no #b in ", "none.md leads nowhere", "there is no #look in other.md"]


# ------------------------------------------------------------------------------------ site


@pytest.fixture(scope="module")
def site():
    return load_script(DOCS / "site" / "build.py")


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("griffe")
    return load_script(DOCS / "site" / "reference.py")


@pytest.fixture(scope="module")
def rooms(reference):
    return reference.read_rooms(reference.load(ROOT))


def test_the_front_page_lists_every_page_and_its_lists_are_the_navigation(site):
    navigation, problems = site.read_navigation((DOCS / "index.md").read_text(), site.find_pages())
    assert problems == []
    groups = [title for group in navigation for title in group]
    assert groups == ["Home", "Tutorial", "How-to", "Explanation", "Reference", "Benchmarks"]


def test_a_page_in_no_list_is_a_problem_and_a_new_one_stands_where_it_is_listed(site):
    pages = {DOCS / name: name for name in ("index.md", "a.md", "b/c.md", "d.md")}
    text = "# Front\n## Learn\n- [A](a.md): first.\n## Do\n### Now\n- [C](b/c.md)\n## None\n"
    navigation, problems = site.read_navigation(text, pages)
    assert navigation == [
        {"Home": "index.md"},
        {"Learn": [{"A": "a.md"}]},
        {"Do": [{"Now": [{"C": "b/c.md"}]}]},
    ]
    assert [problem.partition(" is in no list")[0] for problem in problems] == ["docs/d.md"]
    assert (
        site.as_toml(navigation[:2])
        == '[{ "Home" = "index.md" }, { "Learn" = [{ "A" = "a.md" }] }]'
    )


def test_links_to_files_lead_to_pages_of_their_source(site):
    page, sources = DOCS / "howto" / "new.md", set()
    pages = {page: "howto/new.md", DOCS / "index.md": "index.md"}
    text = (
        "[a](../index.md#b) [c](../../trainkit/step.py#L3) [d](../../trainkit) [e](#f)\n"
        "```python\n[g](../index.md)\n```\n[h](https://example.org)\n"
    )
    assert site.stage(text, page, pages, sources) == (
        "[a](../index.md#b) [c](../source/trainkit/step.py.md#__codelineno-0-3) "
        "[d](../reference/index.md) [e](#f)\n"
        "```python\n[g](../index.md)\n```\n[h](https://example.org)\n"
    )
    assert sources == {ROOT / "trainkit" / "step.py"}


def test_a_notebook_is_a_page_of_its_text_code_and_output(site, tmp_path):
    output = {"output_type": "stream", "text": ["2\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# One\n", "and one"]},
        {"cell_type": "code", "source": ["print(2)"], "outputs": [output]},
    ]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}))
    shown = "# One\nand one\n\n```python\nprint(2)\n```\n\n```text\n2\n```\n"
    assert site.notebook_page(tmp_path / "one.ipynb") == shown


def test_a_broken_link_of_the_built_site_is_found(site, tmp_path):
    (tmp_path / "a.html").write_text('<h2 id="x"></h2><a href="b.html#y"></a><a href="#x"></a>')
    (tmp_path / "b.html").write_text('<a href="a.html#z"></a><img src="none.png"><a href="a.html">')
    assert site.find_broken_links(tmp_path) == [
        "a.html: b.html#y: there is no such heading",
        "b.html: a.html#z: there is no such heading",
        "b.html: none.png leads nowhere",
    ]


def test_what_the_generator_complains_of_is_an_error(site, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "BUILD", tmp_path)
    (tmp_path / "site").mkdir()

    def build(*_, **__):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "index.html").touch()
        text = "Build started\ngriffe: a.py:1: No type\nNo issues found\nBuild finished in 3s\n"
        return mock.Mock(stdout=text, returncode=0)

    monkeypatch.setattr(site.subprocess, "run", build)
    assert site.run_zensical([]) == ["griffe: a.py:1: No type"]


@pytest.mark.parametrize("has_addresses", [False, True])
def test_the_site_has_a_map_and_a_link_to_the_repository_where_their_addresses_are_known(
    site, tmp_path, monkeypatch, has_addresses
):
    monkeypatch.setattr(site, "BUILD", tmp_path)
    monkeypatch.setattr(site, "ROOT", tmp_path)
    urls = '[project.urls]\nDocumentation = "https://a.org/"\nRepository = "https://b.org/c"\n'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{urls if has_addresses else ''}")

    def build(*_, **__):
        (tmp_path / "site").mkdir()
        for name in ("index.html", "sitemap.xml", "sitemap.xml.gz"):
            (tmp_path / "site" / name).touch()
        return mock.Mock(stdout="", returncode=0)

    monkeypatch.setattr(site.subprocess, "run", build)
    assert site.run_zensical([]) == []
    config = (tmp_path / "zensical.toml").read_text()
    assert ('site_url = "https://a.org/"' in config) is has_addresses
    assert ('repo_url = "https://b.org/c"' in config) is has_addresses
    assert (tmp_path / "site" / "sitemap.xml").exists() is has_addresses
    assert (tmp_path / "site" / "sitemap.xml.gz").exists() is has_addresses


def test_without_the_generator_the_reason_is_printed(site, monkeypatch, capsys):
    monkeypatch.setattr(site.importlib.util, "find_spec", lambda _: None)
    assert site.main() == 1
    assert "zensical, griffe, mkdocstrings not installed here" in capsys.readouterr().out


PLACES = ("pages", "generator", "links")


@pytest.mark.parametrize("place", PLACES)
def test_any_problem_is_printed_and_fails_the_build(site, monkeypatch, capsys, place):
    problems = {name: [f"wrong: {name}"] if name == place else [] for name in PLACES}
    monkeypatch.setattr(site.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(site, "write_pages", lambda: ([], problems["pages"]))
    monkeypatch.setattr(site, "run_zensical", lambda _: problems["generator"])
    monkeypatch.setattr(site, "find_broken_links", lambda _: problems["links"])
    assert site.main() == 1
    assert capsys.readouterr().out == f"wrong: {place}\n"


def test_the_reference_has_every_name_of_tk_and_of_every_table(site, reference, rooms):
    assert site.find_undocumented(rooms) == []
    modules = {room.split(".")[-1] for room in rooms}
    listed = modules | set(rooms["trainkit"][1]) | {"text", "weights", "post", "tools"}
    assert set(trainkit.__all__) <= listed
    pages = reference.write_pages(rooms)
    assert "::: trainkit.batch.shards.zigzag_shard\n" in pages["batch.md"]
    assert "[`tk.zigzag_shard`](batch.md#trainkit.batch.shards.zigzag_shard)" in pages["index.md"]


def test_the_reference_is_a_plug_in_of_under_100_lines():
    assert len((DOCS / "site" / "reference.py").read_text().splitlines()) < 100


def test_a_public_name_without_a_docstring_is_found(site, reference, tmp_path):
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "trainkit" / "__init__.py").write_text("from trainkit.a import f\n")
    (tmp_path / "trainkit" / "a.py").write_text("def f():\n    pass\n")
    found = site.find_undocumented(reference.read_rooms(reference.load(tmp_path)))
    assert found == ["trainkit.f has no docstring"]


def test_records_have_the_signature_of_their_constructor(reference, tmp_path):
    griffe = pytest.importorskip("griffe")
    (tmp_path / "records.py").write_text(
        "import attrs\n@attrs.frozen\nclass A:\n    x: int\n"
        "    y: list = attrs.field(factory=list)\n    z: int = attrs.field(default=3)\n"
    )
    extensions = griffe.Extensions(reference.AttrsInit())
    module = griffe.load("records", search_paths=[tmp_path], extensions=extensions)
    found = {p.name: p.default and str(p.default) for p in module["A"].parameters}
    assert found == {"self": None, "x": None, "y": "...", "z": "3"}
