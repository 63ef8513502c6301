"""The file: nothing of a run becomes markup, nothing is loaded, and it is written whole."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources

import pytest
import report_runs

from trainkit.__main__ import main
from trainkit.tools.report import page as report_page
from trainkit.tools.report.page import build_page, escape_json, write_report


class Outline(HTMLParser):
    """The tags of a page with their attributes, and the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.within = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.within = tag

    def handle_endtag(self, tag):
        del tag
        self.within = None

    def handle_data(self, data):
        if self.within in ("script", "style"):
            self.inside.append((self.within, data))


def write(tmp_path, *runs, **options):
    out = tmp_path / "report.html"
    write_report(runs, out, **options)
    return out.read_text(encoding="utf-8")


def read_data(text):
    return json.loads(re.search(r'id="runs">(.*?)</script>', text, re.DOTALL)[1])


def test_names_and_texts_of_a_run_are_no_markup(tmp_path):
    text = write(tmp_path, report_runs.hostile(tmp_path / "<b>run"), title=report_runs.HOSTILE)
    clean = write(tmp_path, report_runs.write_run(tmp_path / "b", [], []), title="b")
    assert [tag for tag, _ in Outline(text).tags] == [tag for tag, _ in Outline(clean).tags]
    data = read_data(text)
    (run,) = data["runs"]
    assert data["title"] == report_runs.HOSTILE
    assert run["name"] == "<b>run"
    assert f"tokens/{report_runs.HOSTILE}" in run["series"]
    assert report_runs.HOSTILE in [sample["prompt"] for sample in run["samples"]]
    assert "<!--" not in text.split('id="runs"')[1].split("</script>")[0]


def test_json_in_a_page_keeps_its_values():
    value = {"a": "</script><!--\u2028\u2029&amp;", "b": [1.5, None, "\\u003c"]}
    text = escape_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value


def test_only_the_pages_own_script_and_style_run(tmp_path):
    outline = Outline(write(tmp_path, report_runs.hostile(tmp_path / "a")))
    policy = next(attrs["content"] for tag, attrs in outline.tags if "http-equiv" in attrs)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    script = [text for tag, text in outline.inside if tag == "script"][-1]
    style = next(text for tag, text in outline.inside if tag == "style")
    for rule, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_nothing_is_loaded(tmp_path):
    outline = Outline(write(tmp_path, report_runs.healthy(tmp_path / "a", 40)))
    for tag, attrs in outline.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "href"} & attrs.keys() or attrs.get("href") == "#page"
    style = next(text for tag, text in outline.inside if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_our_scripts_write_no_markup():
    assets = resources.files("trainkit.tools.report").joinpath("assets")
    names = {path.name for path in assets.iterdir() if path.name.endswith(".js")}
    assert names == {"uPlot.iife.min.js", *(f"{name}.js" for name in report_page._SCRIPTS)}
    for name in names:
        script = assets.joinpath(name).read_text()
        for sink in ("</script", "<!--", "insertAdjacentHTML", "document.write", "fetch("):
            assert sink not in script
    own = "".join(assets.joinpath(f"{name}.js").read_text() for name in report_page._SCRIPTS)
    assert not re.search(r"(inner|outer)HTML|eval\(", own)


def test_the_licence_of_the_library_is_in_the_page(tmp_path):
    assert "Copyright (c) 2022 Leon Sorokin" in write(
        tmp_path, report_runs.KINDS["empty"](tmp_path)
    )


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [report_runs.KINDS["one-line"](tmp_path / parent / "run") for parent in ("a", "b")]
    data = read_data(write(tmp_path, *runs))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    assert data["title"] == "a/run, b/run"


def test_a_page_follows_only_what_goes_on(tmp_path):
    ended = report_runs.healthy(tmp_path / "ended", 40)
    going = report_runs.slow(tmp_path / "going", 40)
    assert read_data(write(tmp_path, ended, refresh=5.0))["refresh"] is None
    assert read_data(write(tmp_path, ended, going, refresh=5.0))["refresh"] == 5.0
    assert read_data(write(tmp_path, going))["refresh"] is None


# ------------------------------------------------------------------------------------ the command


def test_the_command_writes_a_page_and_says_where(tmp_path, capsys):
    folder = report_runs.healthy(tmp_path / "run", 40)
    assert main(["report", str(folder), "--title", "mine"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] == [{"name": "run", "state": "ended", "text": "ended"}]
    assert report["bytes"] == (folder / "report.html").stat().st_size
    assert read_data((folder / "report.html").read_text())["title"] == "mine"


def test_on_a_terminal_the_command_names_each_run_and_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    folders = [report_runs.healthy(tmp_path / name, 40) for name in ("a", "b\x1b[31m")]
    assert main(["report", *map(str, folders)]) == 0
    page = folders[0] / "report.html"
    assert capsys.readouterr().out == (f"a: ended\nb\ufffd[31m: ended\nthe page is in {page}\n")


def test_follow_writes_anew_until_the_run_has_ended(tmp_path, monkeypatch):
    folder = report_runs.slow(tmp_path / "run", 40)
    written = []

    def go_on(seconds):
        written.append((seconds, read_data((folder / "report.html").read_text())))
        line = json.dumps({"step": 40 + len(written), "loss": 1.0}) + "\n"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line)
        if len(written) == 2:
            (folder / "lock").unlink()
            with (folder / "events.jsonl").open("a") as file:
                file.write('{"time": 9e9, "event": "end", "step": 42, "failure": null}\n')

    monkeypatch.setattr("time.sleep", go_on)
    assert main(["report", str(folder), "--follow"]) == 0
    assert [data["runs"][0]["numbers"]["step"] for _, data in written] == [40, 41]
    assert all(seconds >= 5 and data["refresh"] >= 5 for seconds, data in written)
    last = read_data((folder / "report.html").read_text())
    assert (last["runs"][0]["numbers"]["step"], last["refresh"]) == (42, None)


def test_a_page_that_is_open_is_replaced_not_changed(tmp_path):
    folder = report_runs.KINDS["one-line"](tmp_path / "run")
    before = write(tmp_path, folder, title="first")
    with (tmp_path / "report.html").open(encoding="utf-8") as file:
        after = write(tmp_path, folder, title="second")
        assert file.read() == before != after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{0}/none"], 65, "is no run directory"),
        (["{0}/run", "{0}/run/../run"], 64, "a run is named twice"),
        (["{0}/run", "--out", "{0}"], 64, "is a folder; name a file"),
        (["{0}/run", "--out", "{0}/no/such/report.html"], 74, "report.html"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, words, code, message):
    report_runs.KINDS["one-line"](tmp_path / "run")
    assert main(["report", *(word.format(tmp_path) for word in words)]) == code
    assert message in json.loads(capsys.readouterr().out)["error"]


def test_the_command_needs_no_torch(tmp_path):
    folder = report_runs.KINDS["one-line"](tmp_path / "run")
    code = f"import sys; from trainkit.__main__ import main; main(['report', {str(folder)!r}])"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_page_of_a_run_is_the_same_each_time(tmp_path):
    folder = report_runs.healthy(tmp_path / "run", 40)
    run = report_page.describe_run(report_page.read_run(folder))
    pages = {build_page([run], title="a", written=0.0) for _ in range(2)}
    assert len(pages) == 1
