"""`python -m trainkit`: text for people, JSON for programs, and an error once."""

import json
import sys

import pytest

from trainkit.__main__ import COMMANDS, main
from trainkit.text.corpora import write_corpus
from trainkit.tools.commands.text import as_text
from trainkit.weights.checkpoint.safe_files import write_durably

ESCAPE = "\x1b[31m"


@pytest.fixture
def home(tmp_path):
    """Return a directory of two checkpoints that do not verify, and a small corpus."""
    for step in (4, 1000):
        folder = tmp_path / f"run/checkpoints/step_{step:08}"
        folder.mkdir(parents=True)
        write_durably(folder / "manifest.json", [b'{"files": 3}'])
    write_corpus(tmp_path / "c.tokens", [[1, 2, 3], [4] * 1200], vocab_size=9)
    (tmp_path / "c.jsonl").write_text('{"text":"a"}')
    return tmp_path


COMMAND_LINES = [
    "checkpoint ls {0}/run",
    "checkpoint verify {0}/run",
    "checkpoint prune {0}/run --dry-run",
    "data show {0}/c.tokens",
    "data verify {0}/c.tokens",
    "pack {0}/c.tokens --capacity 16",
    "prepare {0}/c.jsonl --out {0}/new.tokens --workers 1",
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_records_are_text_on_a_terminal_and_json_elsewhere_or_by_flag(
    line, home, capsys, monkeypatch
):
    words = line.format(home).split()
    if words[0] == "prepare":  # it makes its file only once
        words = [*words[:3], str(home / "json.tokens"), *words[4:]]
    code = main(words)
    report = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([*line.format(home).split(), "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert type(printed) is type(report)
    (home / "new.tokens").unlink(missing_ok=True)
    assert main(line.format(home).split()) == code
    shown = capsys.readouterr().out
    for name in report[0] if isinstance(report, list) else report:
        assert name in shown or not any(row[name] for row in report), name
    assert not {"{", '"'} & set(shown)


def test_a_word_that_is_no_text_here_is_refused(capsys):
    assert main(["checkpoint", "ls", "runs/\udcff"]) == 64
    assert "is no text in this locale" in json.loads(capsys.readouterr().out)["error"]


def test_a_command_that_is_interrupted_says_so(capsys, monkeypatch):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["certify"], "run", stopped)
    assert main(["certify"]) == 76
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}


def test_an_error_stands_once_on_a_terminal_and_in_words(tmp_path, capsys, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["checkpoint", "ls", str(tmp_path / "no")]) == 66
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: checkpoint: {tmp_path}/no is not a directory\n")
    assert main(["chekpoint"]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert "invalid choice: 'chekpoint'" in err.splitlines()[0]
    assert err.splitlines()[1].startswith("hint: usage: ")
    assert main(["checkpoint", "ls", str(tmp_path / "no"), "--json"]) == 66
    out, err = capsys.readouterr()
    assert (json.loads(out)["error"], err) == (f"checkpoint: {tmp_path}/no is not a directory", "")


def test_an_error_behind_a_pipe_is_seen_on_the_terminal_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["checkpoint", "ls", str(tmp_path / "no")]) == 66
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] in err


def test_alone_it_prints_help_that_teaches(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in COMMANDS:
        assert f"\n  python -m trainkit {name} " in out
    for text in ("recipe pretrain > train.py", "COMMAND --help", "--json", "66"):
        assert text in out


def test_a_table_is_aligned_and_says_nothing_of_empty_columns():
    rows = [
        {"name": "step_9", "bytes": 1234567, "score": None, "ok": True, "problems": []},
        {"name": f"step_{ESCAPE}", "bytes": 5, "score": None, "ok": False, "problems": ["a", "b"]},
    ]
    assert as_text(rows).splitlines() == [
        "name            bytes  ok   problems",
        "step_9      1,234,567  yes  -",
        "step_\ufffd[31m          5  no   a, b",
    ]
    assert as_text([]) == "none"
    assert as_text({"losses": [[1.5, 2.0], [0.123456]], "ids": list(range(99))}).splitlines() == [
        "losses  [1.5, 2], [0.1235]",
        "ids     0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... 99 in all",
    ]
