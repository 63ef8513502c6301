"""Run every benchmark with its bounds, beside the same of another commit.

    python tests/benchmarks/all.py                     # beside the last tag, if there is one
    python tests/benchmarks/all.py --against 57a5653 --only step sharding --repeat 3
    python tests/benchmarks/all.py --write             # and fill docs/benchmarks.md

A benchmark is a script of this folder; it prints its figures and exits with 1 when one of its
bounds is missed. What has no bounds, and takes long, stands in the folder `studies`. The other
commit's run in a worktree of its own, by turns with this one's, since a shared machine is faster at
one time than at another. A bound counts as missed where it is missed in more than half of the runs.
Exits with 1 if one is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).resolve()
BROKEN = 70
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


class Run(NamedTuple):
    """What became of a script: its exit status, what it printed, and how long it took."""

    status: int
    output: str
    seconds: float


def find_benchmarks(folder: Path) -> list[str]:
    """Return the names of the scripts of a folder, without this one."""
    return sorted(path.stem for path in folder.glob("*.py") if path.name != HERE.name)


def run_benchmark(root: Path, script: Path, limit: float) -> Run:
    """Run a script with the library of `root`, for at most `limit` seconds."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        status, output = done.returncode, done.stdout + done.stderr * bool(done.returncode)
        if "Traceback (most recent call last)" in done.stderr:  # Python exits with 1 as well
            status = BROKEN
    except subprocess.TimeoutExpired:
        status, output = 124, f"took more than {limit:g} s"
    return Run(status, output.strip(), time.perf_counter() - begin)


def is_missed(runs: Sequence[Run]) -> bool:
    """Say whether more than half of the runs of a benchmark missed a bound, or failed."""
    return sum(run.status != 0 for run in runs) * 2 > len(runs)


def describe(runs: Sequence[Run]) -> str:
    """Return a cell of the table: whether bounds were met, and the median of the seconds."""
    if not runs:
        return "-"
    missed = sum(run.status == 1 for run in runs)
    failed = sum(run.status not in {0, 1} for run in runs)
    word = "failed" if failed else "MISSED" if is_missed(runs) else "met"
    often = f" ({missed + failed} of {len(runs)})" if (missed or failed) and len(runs) > 1 else ""
    return f"{word}{often}, {median(run.seconds for run in runs):.0f} s"


def run_all(
    roots: Sequence[Path], names: Sequence[str], *, folder: str, repeat: int, limit: float
) -> dict[str, list[list[Run]]]:
    """Return the runs of each benchmark, for each root; print how far it is and the time left."""
    begin, found = time.perf_counter(), {}
    for number, name in enumerate(names):
        runs: list[list[Run]] = [[] for _ in roots]
        for turn in range(repeat):
            order = range(len(roots)) if turn % 2 == 0 else reversed(range(len(roots)))
            for index in order:
                script = roots[index] / folder / f"{name}.py"
                if script.exists():
                    runs[index].append(run_benchmark(roots[index], script, limit))
        found[name] = runs
        elapsed = time.perf_counter() - begin
        left = elapsed / (number + 1) * (len(names) - number - 1)
        cells = " | ".join(map(describe, runs))
        print(
            f"{number + 1} of {len(names)} | {name} | {cells} | about {left / 60:.0f} min left",
            flush=True,
        )
    return found


def make_table(found: dict[str, list[list[Run]]], titles: Sequence[str]) -> str:
    """Return what was found as a table in Markdown, with what the first root's scripts printed."""
    lines = [f"| benchmark | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(map(describe, runs))} |" for name, runs in found.items()]
    for name, (own, *_) in found.items():
        lines += ["", f"`{name}`, the last run:", "", "```text", own[-1].output, "```"]
    return "\n".join(lines)


def name_machine() -> str:
    """Return the processor, its cores, the threads that torch takes, and torch's version."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    threads = torch.get_num_threads()
    return f"{cpu}, {os.cpu_count()} cores, {threads} threads, torch {torch.__version__}"


def fill_region(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no region to fill: write {BEGIN} and {END} where it shall be")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def git(root: Path, *words: str) -> str:
    """Return what git prints; empty where it fails."""
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


@contextlib.contextmanager
def worktree_of(root: Path, commit: str) -> Iterator[Path]:
    """Give a folder that holds a commit, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "other"
        if not git(root, "rev-parse", "--verify", f"{commit}^{{commit}}"):
            raise SystemExit(f"there is no commit {commit!r}")
        subprocess.run(
            ["git", "-C", str(root), "worktree", "add", "--quiet", "--detach", path, commit],
            check=True,
        )
        try:
            yield path
        finally:
            git(root, "worktree", "remove", "--force", str(path))


def main(arguments: Sequence[str] | None = None, root: Path = HERE.parents[2]) -> int:
    """Run what is asked; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="a commit or tag to run beside; 'none' for none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benchmarks alone")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, by turns")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a run may take")
    parser.add_argument("--write", action="store_true", help="fill docs/benchmarks.md")
    options = parser.parse_args(arguments)
    # The bounds are those of one thread, as a rank of several has; idle threads would spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = HERE.parent.relative_to(HERE.parents[2])
    known = find_benchmarks(root / folder)
    names = options.only or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    other = options.against or git(root, "describe", "--tags", "--abbrev=0")
    commit = git(root, "rev-parse", "--short", "HEAD")
    with contextlib.ExitStack() as stack:
        roots, titles = [root], [f"here ({commit})"]
        if other and other != "none":
            roots.append(stack.enter_context(worktree_of(root, other)))
            titles.append(other)
        found = run_all(
            roots, names, folder=str(folder), repeat=options.repeat, limit=options.limit
        )
    table = make_table(found, titles)
    print(f"\n{table}")
    if options.write:
        head = f"{time.strftime('%Y-%m-%d')}, {name_machine()}; runs of each: {options.repeat}."
        fill_region(root / "docs" / "benchmarks.md", f"{head}\n\n{table}")
    missed = [name for name, (own, *_) in found.items() if is_missed(own)]
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
