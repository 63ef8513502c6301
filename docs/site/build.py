"""Build the site of the documentation: docs/_build/site/index.html, which opens from the disk.

    pip install -e ".[docs]" && python docs/site/build.py

The pages are those of docs/, as they stand there; the reference comes from the docstrings, and a
page of source stands behind each link to a file. The lists of docs/index.md are the navigation. Any
warning is an error, as is a page that no list names, a public name without a docstring, and a link
that leads nowhere: each is printed, and the exit code is 1.
"""
# ruff: noqa: INP001, T201 -- a script, which prints

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

SITE = Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent
BUILD = DOCS / "_build"  # ignored by git
PAGES = BUILD / "pages"
FENCE = re.compile(r"^(```+|~~~+).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"""(\]\(|\bsrc(?:set)?=")([^)"\s]+)([)"])"""
)  # Markdown's, and of pictures in HTML
HEAD_OR_ITEM = re.compile(r"^(#{2,3}) (.+)$|^- \[([^\]]+)\]\(([^)\s#]+)\)", re.MULTILINE)
QUIET = re.compile(r"Build started|Build finished.*|No issues found|")
HIDDEN = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"


# --------------------------------------------------------------------------------- what is shown


def find_pages() -> dict[Path, str]:
    """Return {file: page of the site} of what people wrote: Markdown, and notebooks."""
    texts = [p for p in DOCS.rglob("*.md") if not {BUILD, SITE} & {*p.parents}]
    pages = {path: path.relative_to(DOCS).as_posix() for path in texts}
    pages |= {p: f"{p.relative_to(DOCS).as_posix()}.md" for p in DOCS.glob("*.ipynb")}
    return pages | {path: path.name.lower() for path in ROOT.glob("*.md")}


def read_navigation(text: str, pages: dict[Path, str]) -> tuple[list, list[str]]:
    """Return the lists of the front page as nested groups, and the pages that stand in none."""
    groups: list = [{"Home": "index.md"}]
    inside, listed = groups, {DOCS / "index.md"}
    for level, head, title, link in HEAD_OR_ITEM.findall(FENCE.sub("", text)):
        if level:
            outside = groups if level == "##" else next(iter(groups[-1].values()))
            outside.append({head: (inside := [])})
            continue
        path = Path(os.path.normpath(DOCS / link))
        if path in pages or path == ROOT / "trainkit":
            inside.append({title: pages.get(path, "reference/index.md")})
            listed.add(path)
    missing = [p for p in pages if p not in listed and DOCS in p.parents]
    wanted = "is in no list of docs/index.md, and so in no menu: add `- [title](link): what it is`"
    return _without_empty(groups), [f"{p.relative_to(ROOT)} {wanted}" for p in sorted(missing)]


def _without_empty(groups: list) -> list:
    """Return nested groups without those that have no page."""
    found = []
    for title, item in (pair for group in groups for pair in group.items()):
        inner = _without_empty(item) if isinstance(item, list) else item
        found += [{title: inner}] if inner else []
    return found


def group_rooms(rooms: list[str]) -> list:
    """Return the pages of the reference, those of a package's packages as a group."""
    groups: dict[str, list] = {}
    for room in sorted(rooms):
        groups.setdefault(room.split(".")[0], []).append({room: f"reference/{room}.md"})
    return [i[0] if len(i) == 1 else {name: i} for name, i in groups.items()]


def as_toml(item: object) -> str:
    """Return a navigation as TOML writes it: JSON but for the sign between key and value."""
    if isinstance(item, list):
        return f"[{', '.join(map(as_toml, item))}]"
    if isinstance(item, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {as_toml(v)}' for k, v in item.items())} }}"
    return json.dumps(item)


# --------------------------------------------------------------------------------- pages


def stage(text: str, path: Path, pages: dict[Path, str], sources: set[Path]) -> str:
    """Return a page with its links as the site has them; files that it links go to `sources`."""
    here = Path(pages[path]).parent

    def link(match: re.Match[str]) -> str:
        before, (file, sharp, anchor), after = match[1], match[2].partition("#"), match[3]
        target = Path(os.path.normpath(path.parent / file))
        if not file or "://" in file or file.startswith("data:") or not target.exists():
            return match[0]  # the check of the site finds the last
        if target in pages:
            to = pages[target]
        elif target == ROOT / "trainkit":
            to = "reference/index.md"
        elif target.suffix in (".png", ".svg"):
            to = target.relative_to(DOCS).as_posix()
        else:
            sources.update([target] if target.is_file() else target.glob("*.py"))
            sources.add(target)
            to = f"source/{target.relative_to(ROOT).as_posix()}.md"
            anchor = re.sub(r"^L(\d+)", r"__codelineno-0-\1", anchor)
        return f"{before}{os.path.relpath(to, here)}{sharp}{anchor}{after}"

    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [LINK.sub(link, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(link, text[end:])])


def source_page(path: Path) -> str:
    """Return the page of a file, whose lines are numbered and have anchors; of a folder, a list."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        links = [f"- [{p.name}]({path.name}/{p.name}.md)" for p in sorted(path.glob("*.py"))]
        return f"{HIDDEN}# {name}\n\n" + "\n".join(links) + "\n"
    language = {".py": "python", ".toml": "toml", ".sh": "bash"}.get(path.suffix, "text")
    fence = "`" * 8
    head = f'{fence}{{ .{language} linenums="1" }}'
    return f"{HIDDEN}# {name}\n\n{head}\n{path.read_text(encoding='utf-8').rstrip()}\n{fence}\n"


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text, its code, and what the code printed and drew."""
    blocks = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        blocks.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                blocks.append(f"![Drawn by the code above](data:image/png;base64,{picture})")
            elif shown:
                blocks.append(f"```text\n{shown}\n```")
    return "\n\n".join(blocks) + "\n"


def write_pages() -> tuple[list, list[str]]:
    """Write all pages; return the navigation, and what is wrong already."""
    import reference  # noqa: PLC0415 -- it needs griffe, whose absence main() explains

    pages, sources = find_pages(), set()
    navigation, problems = read_navigation((DOCS / "index.md").read_text(encoding="utf-8"), pages)
    rooms = reference.read_rooms(reference.load(ROOT))
    entries = reference.write_pages(rooms)
    sources |= {Path(item.filepath) for _, names in rooms.values() for item in names.values()}
    for group in navigation:
        if "Reference" in group:
            names = [name.removesuffix(".md") for name in entries if name != "index.md"]
            group["Reference"].append({"Modules": group_rooms(names)})
    texts = {f"reference/{name}": text for name, text in entries.items()}
    for path, to in pages.items():
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        texts[to] = stage(text, path, pages, sources)
    texts["index.md"] = f"---\nhide:\n  - navigation\n---\n\n{texts['index.md']}"
    for path in sources:
        texts[f"source/{path.relative_to(ROOT).as_posix()}.md"] = source_page(path)
    shutil.rmtree(PAGES, ignore_errors=True)
    for name, text in texts.items():
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / name).write_text(text, encoding="utf-8")
    for path in [*DOCS.rglob("*.png"), *DOCS.rglob("*.svg"), SITE / "extra.css"]:
        if BUILD not in path.parents:
            (PAGES / path.relative_to(DOCS)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, PAGES / path.relative_to(DOCS))
    return navigation, problems + find_undocumented(rooms)


# --------------------------------------------------------------------------------- the site


def run_zensical(navigation: list) -> list[str]:
    """Build the site from the pages; return what it complained of."""
    config = (SITE / "zensical.toml").read_text(encoding="utf-8")
    added = {"nav": navigation, **read_addresses(ROOT / "pyproject.toml")}
    lines = "".join(f"{name} = {as_toml(value)}\n" for name, value in added.items())
    config = config.replace("[project]\n", f"[project]\n{lines}", 1)
    (BUILD / "zensical.toml").write_text(config, encoding="utf-8")
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=BUILD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    problems = [line for line in done.stdout.splitlines() if not QUIET.fullmatch(line.strip())]
    if done.returncode or not (BUILD / "site" / "index.html").exists():
        problems.append(f"zensical ended with exit code {done.returncode}")
    if "site_url" not in added:  # it would list nothing
        for path in (BUILD / "site").glob("sitemap.xml*"):
            path.unlink()
    return problems


def read_addresses(path: Path) -> dict[str, str]:
    """Return the addresses of site and repository that a pyproject.toml has, for the generator.

    The first goes into the site map, the second to the top of every page.
    """
    urls = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("urls", {})
    names = {"site_url": "Documentation", "repo_url": "Repository"}
    return {option: urls[name] for option, name in names.items() if name in urls}


def find_undocumented(rooms: dict) -> list[str]:
    """Return a sentence for each public name of the reference that has no docstring."""
    found = {f"{room}.{n}": item for room, (_, names) in rooms.items() for n, item in names.items()}
    return [f"{name} has no docstring" for name, item in found.items() if not item.docstring]


def find_broken_links(site: Path) -> list[str]:
    """Return the links and pictures of a built site that lead to no file, or to no anchor."""
    texts = {p: p.read_text(encoding="utf-8") for p in site.rglob("*.html") if p.name != "404.html"}
    anchors = {
        p: {html.unescape(found) for found in re.findall(r'\b(?:id|name)="([^"]+)"', text)}
        for p, text in texts.items()
    }
    found = []
    for page, text in texts.items():
        if "source" in page.relative_to(site).parts[:1]:
            continue  # a file as it stands; its links are those of the menu
        for link in {*re.findall(r'\b(?:href|src)="([^"]+)"', text)}:
            file, _, anchor = html.unescape(unquote(link)).partition("#")
            target = Path(os.path.normpath(page.parent / file.partition("?")[0])) if file else page
            if re.match(r"https?:|mailto:|data:|//", file):
                continue
            name = f"{page.relative_to(site)}: {link}"
            if not target.is_file():
                found.append(f"{name} leads nowhere")
            elif anchor and target in anchors and anchor not in anchors[target]:
                found.append(f"{name}: there is no such heading")
    return sorted(found)


def main() -> int:
    """Build the site, print what is wrong, and return the exit code."""
    needed = {"zensical": "zensical", "griffe": "griffe", "mkdocstrings_handlers": "mkdocstrings"}
    absent = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if absent:
        print(
            f"docs/site/build.py: {', '.join(absent)} not installed here ({sys.executable}): "
            'pip install -e ".[docs]"'
        )
        return 1
    navigation, problems = write_pages()
    problems += run_zensical(navigation)
    problems += find_broken_links(BUILD / "site")
    pages = sum(1 for _ in (BUILD / "site").rglob("*.html"))
    print("\n".join(problems) or f"{pages} pages: {(BUILD / 'site/index.html').relative_to(ROOT)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
