"""Plant each mistake of table.py in a copy of the tree, and see whether its test goes red.

usage: PYTHONPATH=. python tests/mistakes/run.py [-j PROCESSES] [--timeout S] [WORD ...]

With words only rows whose file or text has one of them. Not part of .ci/run: it takes some seconds
for each mistake. Exit code 1 if a mistake is not caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from table import MISTAKES, Mistake  # noqa: E402

COPIED = ("trainkit", "tests", "recipes", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
TEST_FAILED = 1  # pytest's exit code; 4 and 5 say that there is no such test


def main() -> int:
    """Run the mistakes asked for; return 0 if all are caught."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="only rows with one of these")
    parser.add_argument("-j", type=int, default=len(os.sched_getaffinity(0)), dest="processes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one test")
    options = parser.parse_args()
    rows = [row for row in MISTAKES if has_one(row, options.words)]
    if not rows:
        print("no row has one of", *options.words)
        return 64
    begin, missed = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mistakes_") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for index in range(min(options.processes, len(rows))):
            copies.put(copy_of_tree(Path(folder) / str(index)))
        with ThreadPoolExecutor(options.processes) as pool:
            running = {pool.submit(is_caught, row, copies, options.timeout): row for row in rows}
            for done, finished in enumerate(as_completed(running), 1):
                row, (verdict, text) = running[finished], finished.result()
                left = (time.monotonic() - begin) / done * (len(rows) - done)
                print(f"{done:3} of {len(rows)}, {left:4.0f} s left: {verdict}: {row}", flush=True)
                if verdict != "caught":
                    missed.append(row)
                    print(text, flush=True)
    print(f"{len(rows) - len(missed)} of {len(rows)} mistakes are caught")
    for row in missed:
        print(f"not caught: {row}")
    return int(bool(missed))


def has_one(row: Mistake, words: list[str]) -> bool:
    """Return whether a row has one of some words in it, or there is none."""
    text = f"{row.file} {row.what} {row.test}"
    return not words or any(word in text for word in words)


def copy_of_tree(folder: Path) -> Path:
    """Copy what tests need of the tree."""
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def is_caught(row: Mistake, copies: SimpleQueue[Path], timeout: float) -> tuple[str, str]:
    """Plant a mistake in one of the copies, run its test, and take it out again."""
    copy = copies.get()
    path = copy / row.file
    sound = path.read_text()
    try:
        path.write_text(planted(sound, row))
        return verdict_of(copy, row, timeout)
    finally:
        path.write_text(sound)
        copies.put(copy)


def planted(text: str, row: Mistake) -> str:
    """Return a file's text with a mistake in it, which must find its place exactly once."""
    count = text.count(row.old)
    if count != 1:
        raise ValueError(f"{row.file} has {row.old!r} {count} times, and must have it once")
    return text.replace(row.old, row.new)


def verdict_of(copy: Path, row: Mistake, timeout: float) -> tuple[str, str]:
    """Run the test of a mistake in a tree that has it; return the verdict and what was printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environ = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *row.test.split()],
        cwd=copy,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            text, _ = run.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # the test and the ranks that it started
            text, _ = run.communicate()
            return "NOT CAUGHT (it took too long)", text[-2000:]
    if run.returncode == TEST_FAILED:
        return "caught", ""
    why = "all passed" if run.returncode == 0 else f"pytest ended with {run.returncode}"
    return f"NOT CAUGHT ({why})", text[-2000:]


if __name__ == "__main__":
    sys.exit(main())
