"""Plant the mistakes of table.py, one at a time, and see whether the test of each fails.

usage: python tests/mistakes/run.py [--only WORD ...] [--jobs N] [--timeout SECONDS] [--list]

The tests are first run without a mistake, where they must pass. Then each mistake is planted in a
copy of the tree of its own, so that nothing compiled with it outlives it, and its tests are run
until the first failure. A test that hangs has caught the mistake too, and the last lines say so.
It takes some seconds for each mistake, so .ci/run leaves it out. Exit code 1 if one is not caught.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from table import MISTAKES, Mistake  # noqa: E402

Name, Result = TypeVar("Name"), TypeVar("Result")

NOT_COPIED = (".git", "__pycache__", "runs", "build", "dist", "*.egg-info", ".*cache", ".venv")
PYTEST = ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider")
PASSED = 0
NOT_RUN = (2, 3, 4, 5)  # pytest could not import a test, was told nonsense, or found no test
HUNG = "it hangs"


class Outcome(NamedTuple):
    """How a run of pytest ended: its exit code (None: the time was up), seconds, and output."""

    code: int | None
    seconds: float
    output: str

    def __str__(self) -> str:
        return f"{'passes' if self.code == PASSED else 'FAILS'} in {self.seconds:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mistakes that are asked for; return 0 if all are caught."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # it stands in the description
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="mistakes whose line has one of these"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=int, default=cores, metavar="N", help=f"runs of pytest at a time ({cores})"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="for the tests of a mistake; by default 60, and 5 times what they take without it",
    )
    parser.add_argument("--list", action="store_true", help="print the mistakes and run nothing")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    rows = [row for row in MISTAKES if has_word(row, options.only)]
    if not rows:
        parser.error(f"no mistake has one of the words {' '.join(options.only)}")
    if options.list:
        print(*(f"{row}  ({row.test})" for row in rows), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mistakes_") as folder:
        return run_rows(rows, Path(folder).resolve(), jobs=options.jobs, timeout=options.timeout)


def has_word(row: Mistake, words: Sequence[str]) -> bool:
    """Return whether a row's file, name or test has one of some words in it, or there is none."""
    text = f"{row} {row.test}"
    return not words or any(word in text for word in words)


def run_rows(
    rows: Sequence[Mistake], folder: Path, *, jobs: int, timeout: float | None, root: Path = ROOT
) -> int:
    """Run the tests of some rows without their mistakes, then with them; print what was found.

    Args:
        rows: The mistakes.
        folder: An empty folder, for the copies.
        jobs: How many runs of pytest there are at a time.
        timeout: Seconds for the tests of a row; None follows from what they take without it.
        root: The tree that is copied.
    """
    sound = folder / "sound"
    shutil.copytree(root, sound, ignore=shutil.ignore_patterns(*NOT_COPIED))
    tests = sorted({test for row in rows for test in row.test.split()})
    unchanged: dict[str, Outcome] = {}
    with ThreadPoolExecutor(jobs) as pool:
        work = {test: lambda test=test: run_tests(sound, [test], 1800.0) for test in tests}
        print(f"without a mistake, {len(work)} runs:")
        for test, outcome in finished(pool, work):
            unchanged[test] = outcome
            if outcome.code != PASSED:
                print(f"{test} fails without a mistake:\n{outcome.output[-3000:]}", flush=True)
        print(f"with one, {len(rows)} runs:")

        def plant(row: Mistake) -> str:
            own = [unchanged[test] for test in row.test.split()]
            if any(outcome.code != PASSED for outcome in own):
                return "NOT CAUGHT: its tests fail without it"
            limit = timeout or 60 + 5 * sum(outcome.seconds for outcome in own)
            return verdict(run_with(row, sound, limit))

        found = dict(finished(pool, {row: lambda row=row: plant(row) for row in rows}))
    missed = [row for row in rows if not found[row].startswith("caught")]
    hung = [row for row in rows if HUNG in found[row]]
    for row in [*hung, *missed]:
        print(f"{found[row]}: {row} ({row.test})")
    print(f"{len(rows) - len(missed)} of {len(rows)} caught")
    return int(bool(missed) or any(x.code != PASSED for x in unchanged.values()))


def finished(
    pool: ThreadPoolExecutor, work: dict[Name, Callable[[], Result]]
) -> Iterator[tuple[Name, Result]]:
    """Do some work, and yield each result as it comes; a line tells how far it is.

    On a terminal it is one line, which is written anew.
    """
    begin, is_terminal = time.monotonic(), sys.stdout.isatty()
    futures = {pool.submit(call): name for name, call in work.items()}
    for done, future in enumerate(as_completed(futures), 1):
        name, result = futures[future], future.result()
        left = (time.monotonic() - begin) / done * (len(futures) - done)
        line = f"{done} of {len(futures)}, {left / 60:.1f} min left: {result}: {name}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{line[:width]:{width}}" if is_terminal else line, end="" if is_terminal else "\n")
        sys.stdout.flush()
        yield name, result
    print(end="\n" if is_terminal else "")


def run_with(row: Mistake, sound: Path, limit: float) -> Outcome:
    """Run the tests of a row in a copy of the tree that has its mistake."""
    with tempfile.TemporaryDirectory(dir=sound.parent, ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(sound, copy)
        path = copy / row.file
        path.write_text(planted(path.read_text(), row))
        # A file of the same size and second would be taken for the one that was compiled.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        return run_tests(copy, row.test.split(), limit)


def planted(text: str, row: Mistake) -> str:
    """Return a file's text with a mistake in it, which must find its place exactly once."""
    count = text.count(row.old)
    if count != 1:
        raise ValueError(f"{row.file} has {row.old!r} {count} times, and must have it once")
    return text.replace(row.old, row.new)


def run_tests(tree: Path, tests: Iterable[str], limit: float) -> Outcome:
    """Run tests in a tree until one fails, and end every process that they leave behind."""
    begin = time.monotonic()
    # Byte code and compiled loops lie beside the source, and go with the tree.
    dropped = (
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "NUMBA_CACHE_DIR",
        "PYTEST_ADDOPTS",
    )
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TRAINKIT_FAULT_SEED": "0"}
    with tempfile.TemporaryDirectory(dir=tree.parent, ignore_cleanup_errors=True) as temporary:
        environ["TMPDIR"] = temporary
        with subprocess.Popen(
            [sys.executable, *PYTEST, *tests],
            cwd=tree,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                code = None
                end_processes(temporary)
                output, _ = process.communicate()
        end_processes(temporary)
    return Outcome(code, time.monotonic() - begin, output)


def end_processes(temporary: str) -> None:
    """Kill what has a folder of ours as its TMPDIR: a test and whatever it has started."""
    entry = f"TMPDIR={temporary}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def verdict(outcome: Outcome) -> str:
    """Say whether a mistake was caught, and by what."""
    if outcome.code is None:
        return f"caught: {HUNG}, {outcome.seconds:.0f} s"
    if outcome.code == PASSED:
        return "NOT CAUGHT: all tests pass"
    if outcome.code in NOT_RUN:
        return f"NOT CAUGHT: pytest ended with {outcome.code}: {outcome.output[-500:]}"
    name = re.search(r"^(?:FAILED|ERROR) \S+?::([^\s\[]+)", outcome.output, re.MULTILINE)
    return f"caught by {name[1] if name else f'the exit code {outcome.code}'}"


if __name__ == "__main__":
    sys.exit(main())
