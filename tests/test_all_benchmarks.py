"""The command that runs all benchmarks says what is missed, beside another commit's."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "all.py"


def load():
    spec = importlib.util.spec_from_file_location("all_benchmarks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repository(folder):
    """Return a repository whose first commit misses a bound that the second meets."""
    benchmarks = folder / "tests" / "benchmarks"
    benchmarks.mkdir(parents=True)
    (folder / "docs").mkdir()
    page = folder / "docs" / "benchmarks.md"
    page.write_text("before\n<!-- benchmarks: begin -->old<!-- benchmarks: end -->\nafter\n")

    def commit(tag):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        for words in (["add", "-A"], [*who, "commit", "-qm", tag], ["tag", tag]):
            subprocess.run(["git", "-C", folder, *words], check=True)

    subprocess.run(["git", "init", "-q", folder], check=True)
    (benchmarks / "quick.py").write_text("import sys\nprint('2.5 us: MISSED')\nsys.exit(1)\n")
    commit("old")
    (benchmarks / "quick.py").write_text("print('1.5 us: met')\n")
    (benchmarks / "new.py").write_text("print('a figure')\n")
    return benchmarks, page


def test_every_benchmark_is_run_beside_the_last_tag_and_a_miss_is_told(tmp_path, capsys):
    command = load()
    benchmarks, page = repository(tmp_path)
    assert command.main(["--write"], root=tmp_path) == 0
    printed, text = capsys.readouterr().out, page.read_text()
    for table in (printed, text):
        assert "| benchmark | here (" in table
        assert "| old |" in table
        assert "| new | met, 0 s | - |" in table
        assert "| quick | met, 0 s | MISSED, 0 s |" in table
        assert "1.5 us: met" in table
    assert "2 of 2 | quick | met, 0 s | MISSED, 0 s | about 0 min left" in printed
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old<" not in text
    assert "torch" in text
    worktrees = subprocess.run(
        ["git", "-C", tmp_path, "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(worktrees.stdout.splitlines()) == 1

    (benchmarks / "new.py").write_text("import sys\nprint('0.5')\nsys.exit(1)\n")
    (benchmarks / "quick.py").write_text("raise ImportError('gone')\n")
    flags = ["--against", "none", "--repeat", "2", "--only", "new"]
    assert command.main(flags, root=tmp_path) == 1
    assert "| new | MISSED (2 of 2), 0 s |" in capsys.readouterr().out
    assert command.main(["--against", "none"], root=tmp_path) == 1
    assert "ImportError: gone" in capsys.readouterr().out


def test_what_is_not_there_is_refused(tmp_path, capsys):
    command = load()
    repository(tmp_path)
    with pytest.raises(SystemExit):
        command.main(["--only", "slow"], root=tmp_path)
    assert "there is no benchmark slow" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="there is no commit 'nowhere'"):
        command.main(["--against", "nowhere"], root=tmp_path)


def test_a_script_that_breaks_is_no_missed_bound(tmp_path, capsys):
    command = load()
    benchmarks, _ = repository(tmp_path)
    (benchmarks / "quick.py").write_text("no_such_name\n")
    assert command.main(["--against", "none"], root=tmp_path) == 1
    assert "| quick | failed, 0 s |" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(SCRIPT.parent.rglob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_imports_what_there_is(path, monkeypatch):
    """Some measure private functions, whose names change."""
    monkeypatch.setattr(sys, "argv", [str(path)])  # where one reads it
    # As a script finds modules: its own folder first, not the folders that pytest has added.
    folders = [x for x in sys.path if not Path(x).is_relative_to(SCRIPT.parents[1])]
    monkeypatch.setattr(sys, "path", [str(path.parent), *folders])
    for name in [name for name in sys.modules if name in {"operators", "measured_step"}]:
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
