"""All faults of the catalogue in their full number, with the figures of the issue; in half an hour.

python tests/faults/soak.py                     # everything, and 15 minutes of chaos
python tests/faults/soak.py --only kills chaos --minutes 5
python tests/faults/soak.py --seed 7            # the choices of an earlier run

It prints how far it is, then a table, and exits with 1 when a figure is not reached.
"""

import argparse
import collections
import collections.abc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import attrs

sys.path.append(str(Path(__file__).parents[1]))  # helpers of all tests
import harness
import trials

from trainkit.weights.checkpoint.manifest import list_checkpoints, verify_checkpoint

ROOT = Path(__file__).parents[2]
DAMAGE = {"flip": 1000, "truncate": 200, "zero": 200, "mix": 50, "pointer": 50}
MODES = [(2, False), (2, True), (4, False), (4, True)]
KILLS, INSIDE = 50, 16
QUOTAS = 24
STOPS = 8
HOSTILE = ["tests/weights/checkpoint/test_hostile.py", "tests/weights/convert/test_convert.py"]
CHAOS_STEPS = 120


@attrs.frozen
class Figure:
    """A line of the table: what was to be reached, what was found, and whether that is enough."""

    name: str
    reach: str
    found: str
    ok: bool


@attrs.frozen(eq=False)
class Place:
    """The arguments of every part: an arena, a log of progress, and the fraction of trials."""

    arena: trials.Arena
    log: collections.abc.Callable
    scale: float = 1.0


def times(place, count):
    """Return the number of trials, of `count` at full scale."""
    return max(1, round(count * place.scale))


def fresh(place):
    """Return an arena with a new run directory."""
    out = Path(tempfile.mkdtemp(dir=place.arena.out)) / "run"
    return attrs.evolve(place.arena, out=out)


# ------------------------------------------------------------------------------------------- parts


def damage(place):
    """Damage every file of a checkpoint of two ranks, in every way."""
    arena = fresh(place)
    harness.complete(arena.ground, arena.out, "--save-every", 2, "--keep", 9)
    figures = []
    for kind, every in DAMAGE.items():
        count = times(place, every)
        found = []
        for done in range(0, count, 50):
            place.log(done / count, f"{kind} {done} of {count}")
            part = {kind: min(50, count - done)}
            found += trials.damage_trials(arena.out / "checkpoints", arena.random, part)
        bad = summarize_problems(found)
        figures.append(
            Figure(f"{kind}, over every file", f"0 of {count} undetected", bad or "0", not bad)
        )
    return figures


def kills(place):
    """Kill runs at random moments, some of them inside a save, all ranks or one."""
    found, count = [], times(place, KILLS)
    for i in range(count):
        ranks, background = MODES[i % len(MODES)]
        inside = i * KILLS < INSIDE * count
        place.log(i / count, f"kill {i + 1} of {count}")
        arena = fresh(place)
        alone = i % 5 == 4
        trial = trials.kill_trial(
            arena, ranks=ranks, background=background, inside=inside, alone=alone
        )
        found.append(trial)
        print_problems(trial)
    bad, hits = summarize_problems(found), sum(trial.inside for trial in found)
    wanted = f"0 of {count} differ, 10 inside a save"
    return [
        Figure("kill -9, 2 and 4 ranks, both saves", wanted, bad or f"0, {hits} inside", not bad),
        Figure("kills inside a save", "at least 10", str(hits), hits >= 10),
        *(work_lost(found, background=background) for background in (False, True)),
    ]


def work_lost(found, *, background):
    """Return the maximum number of steps that one kill has cost, and its bound."""
    lost = [trial.lost for trial in found if trial.background == background]
    kind, allowed = "background" if background else "foreground", trials.allowed(background)
    reach = f"at most {allowed} steps, of saves every {trials.INTERVAL}"
    if not lost:
        return Figure(f"work lost, {kind} saves", reach, "not tried", ok=False)
    result = f"{max(lost)} at most, {sum(lost) / len(lost):.1f} on average, of {len(lost)} kills"
    return Figure(f"work lost, {kind} saves", reach, result, max(lost) <= allowed)


def numbers(place):
    """Put NaN and infinities into every kind of number, on any rank."""
    names = (None, "layers.0.attention.wq.weight", "layers.0.mlp.down.weight", "norm.weight")
    values = (float("nan"), float("inf"), float("-inf"))
    sites = [("nan_loss_at", {"value": value}) for value in values]
    sites += [("nan_gradient_at", {"name": n, "value": v}) for n in names for v in values[:2]]
    sites += [("nan_parameter_at", {"name": n}) for n in (None, names[1])]
    sites += [("nan_parameter_at", {"name": n, "value": values[1]}) for n in (None, names[2])]
    sites += [("nan_moment_at", {"moment": m}) for m in ("exp_avg", "exp_avg_sq")]
    sites += [
        ("nan_moment_at", {"moment": m, "value": values[1]}) for m in ("exp_avg", "exp_avg_sq")
    ]
    sites += [("nan_loss_at", {"at": list(range(3, 99))})]
    found, sites = [], sites[: times(place, len(sites))]
    for i, (fault, given) in enumerate(sites):
        place.log(i / len(sites), f"{fault} {i + 1} of {len(sites)}")
        arena = fresh(place)
        where = {"at": arena.random.randint(2, 6), "rank": arena.random.randrange(2), **given}
        found.append(trials.number_trial(arena, ranks=2, fault=fault, given=where))
        print_problems(found[-1])
    bad = summarize_problems(found)
    return [Figure(f"NaN and Inf at {len(sites)} sites", "0 poisoned", bad or "0", not bad)]


def disk(place):
    """Let the disk be full at random bytes of a save."""
    found, count = [], times(place, QUOTAS)
    for i in range(count):
        place.log(i / count, f"quota {i + 1} of {count}")
        arena = fresh(place)
        saved = arena.wanted(2) / "checkpoints/step_00000008"
        largest = max(path.stat().st_size for path in saved.iterdir())
        size = arena.random.randrange(1000, largest)
        trial = trials.full_disk_trial(arena, ranks=2, size=size, background=i % 2 == 1)
        found.append(trial)
        print_problems(trial)
    bad = summarize_problems(found)
    return [
        Figure(f"disk full at {count} sizes", "0 lost, 0 false commits", bad or "0, 0", not bad)
    ]


def stops(place):
    """Tell random ranks to stop."""
    found, count = [], times(place, STOPS)
    for i in range(count):
        place.log(i / count, f"stop {i + 1} of {count}")
        number = signal.SIGTERM if i % 2 else signal.SIGUSR1
        ranks, background = MODES[i % len(MODES)]
        trial = trials.stop_trial(fresh(place), ranks=ranks, background=background, number=number)
        found.append(trial)
        print_problems(trial)
    bad = summarize_problems(found)
    return [Figure(f"{count} stops of any ranks", "saved, 75, within 25 s", bad or "all", not bad)]


def long(place):
    """Take 10,000 steps in one process, and look at what grows."""
    arena, steps = fresh(place), [1000, times(place, 10) * 1000 + 1000]
    flags = ["--save-every", 100_000, "--schedule-steps", 20_000]
    place.log(0.0, f"{steps[1]} steps")
    with harness.running(arena.ground, arena.out, *flags, ranks=1, steps=100_000) as job:
        early, late = harness.weights_at(job, *steps, patience=900)
    slope = (late[0] - early[0]) / 2**20 / (steps[1] - steps[0]) * 1000
    ok = slope < 1 and late[1:] == early[1:]
    found = f"{slope:.3f} MB; files {early[1]} to {late[1]}, threads {early[2]} to {late[2]}"
    return [Figure(f"memory over {steps[1]} steps", "1 MB per 1,000, no file or thread", found, ok)]


def hostile(place):
    """Run the tests of hostile checkpoints, which count their payloads."""
    place.log(0.0, "hostile checkpoints")
    files = [name for name in HOSTILE if (ROOT / name).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.rstrip().splitlines()[-1]
    return [Figure("hostile checkpoints", "0 executed, 0 outside", last, done.returncode == 0)]


def rates(place):
    """Measure how fast checkpoints are hashed, written and read."""
    place.log(0.0, "rates")
    command = [sys.executable, str(ROOT / "tests/benchmarks/checkpoint.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    ok = done.returncode == 0
    return [Figure("rates", "see above", "measured" if ok else done.stderr[-200:], ok)]


# ------------------------------------------------------------------------------------------- chaos


def chaos(place, minutes):
    """Disturb runs again and again until the time is over; each must end as if never touched."""
    deadline = time.monotonic() + 60 * minutes
    done, count, found = 0, collections.Counter(), []
    while time.monotonic() < deadline or not done:
        arena = fresh(place)
        ranks = arena.random.choice([2, 2, 4])
        wanted = arena.wanted(ranks, CHAOS_STEPS)
        problems, starts = [], 0
        while not is_complete(arena.out):
            left = deadline - time.monotonic()
            part = min(1.0, 1 - left / (60 * minutes))
            place.log(part, f"run {done + 1}, start {starts + 1}, {sum(count.values())} faults")
            name = arena.random.choice(list(CHAOS)) if left > 0 else "nothing"
            problems += disturb(arena, ranks, name)
            count[name] += 1
            starts += 1
            if starts > 60:
                problems.append("60 starts were not enough")
                break
        problems += harness.differences(arena.out, wanted)
        found.append(trials.Trial(f"run {done + 1}", tuple(problems)))
        print_problems(found[-1])
        done += 1
    bad = summarize_problems(found)
    faults = ", ".join(f"{n} {name}" for name, n in count.items())
    print(f"chaos: {done} runs of {CHAOS_STEPS} steps, {faults}")
    what = f"{minutes:g} min of chaos"
    return [Figure(what, "the undisturbed numbers", bad or f"{done} runs, all the same", not bad)]


def is_complete(out):
    return (out / "final.json").exists() and trials.trained(out) == CHAOS_STEPS


def disturb(arena, ranks, name):
    """Start a run, disturb it in one way at a random moment, and see it end as it should."""
    random, out = arena.random, arena.out
    background = random.random() < 0.5
    flags = [*trials.saves(background=background, every=10), "--step-timeout", 5]
    limit, slow_disk = None, 0.0
    if name == "full":
        limit = {"bytes": random.randrange(1000, 200_000), "rank": random.randrange(ranks)}
    elif random.random() < 0.3:
        slow_disk = 0.02
    before = trials.trained(out)
    with harness.running(
        arena.ground,
        out,
        *flags,
        ranks=ranks,
        steps=CHAOS_STEPS,
        limit_files=limit,
        slow_disk=slow_disk,
    ) as job:
        harness.wait_for(harness.reached(out, before + 1), job)
        time.sleep(random.uniform(0, 3))
        victim = random.randrange(ranks)
        CHAOS.get(name, leave_alone)(job, random, victim)
        patience = 60 if name in {"nothing", "full"} else 40
        codes = harness.finish(job, patience)
        if name == "stop":
            codes = [code for rank, code in enumerate(codes) if rank != victim]
        stderr = job.stderr(0)[-300:]
    good = [path for path in list_checkpoints(out / "checkpoints") if not verify_checkpoint(path)]
    if name == "flip" and len(good) > 1:  # with none left a run has to refuse
        trials.damage(good[0], random, "flip")
    wrong = set(codes) - EXPECTED[name] - {0}
    return [f"{name}: ended with {codes}: {stderr}"] if wrong else []


def leave_alone(_job, _random, _victim):
    pass


def kill_everything(job, _random, _victim):
    harness.kill_all(job)


def kill_one(job, _random, victim):
    harness.kill(job, job.pids[victim])


def freeze_one(job, _random, victim):
    harness.kill(job, job.pids[victim], signal.SIGSTOP)
    harness.finish(job, 40, ranks=[rank for rank in range(len(job.pids)) if rank != victim])
    harness.kill(job, job.pids[victim])


def ask_some(job, random, _victim):
    number = random.choice([signal.SIGTERM, signal.SIGUSR1])
    for pid in random.sample(job.pids, random.randint(1, len(job.pids))):
        harness.kill(job, pid, number)


CHAOS = {
    "kill": kill_everything,
    "kill one": kill_one,
    "stop": freeze_one,
    "TERM": ask_some,
    "flip": kill_everything,
    "full": leave_alone,
}
EXPECTED = {
    "kill": {-9},
    "kill one": {-9, trials.PEER},
    "stop": {trials.PEER},
    "TERM": {trials.SAVED},
    "flip": {-9},
    "full": {trials.DISK},
    "nothing": set(),
}
"""The exit codes that a disturbed run may end with, or 0 if it was complete already."""


# ---------------------------------------------------------------------------------------- reporting


def summarize_problems(found):
    """Return the number of trials with a problem, and the first problem; or an empty text."""
    bad = [trial for trial in found if trial.problems]
    return f"{len(bad)} of {len(found)}: {bad[0].what}: {bad[0].problems[0][:160]}" if bad else ""


def make_log(name, begin):
    """Return `log(share, what)`, which prints the progress of a part and the time left."""
    part, last = time.monotonic(), 0.0
    is_terminal = sys.stdout.isatty()

    def log(share, what):
        nonlocal last
        now = time.monotonic()
        if now - last < (0.5 if is_terminal else 20):
            return
        last, spent = now, now - part
        left = f", {clock(spent / share - spent)} left of this part" if share > 0.02 else ""
        line = f"{clock(now - begin)}  {name}: {what}{left}"
        print(
            f"\r\x1b[K{line}" if is_terminal else line, end="" if is_terminal else "\n", flush=True
        )

    return log


def print_problems(trial):
    """Print at once what is wrong."""
    for problem in trial.problems:
        print(f"\n!! {trial.what}: {problem}", flush=True)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def table(figures):
    """Return the figures as a table."""
    rows = [("", "reach", "found", ""), *[(f.name, f.reach, f.found, mark(f)) for f in figures]]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)) + row[3]
        for row in rows
    )


def mark(figure):
    return "  ok" if figure.ok else "  NOT REACHED"


PARTS = {
    "damage": damage,
    "numbers": numbers,
    "kills": kills,
    "disk": disk,
    "stops": stops,
    "long": long,
    "hostile": hostile,
    "rates": rates,
    "chaos": chaos,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15, help="how long the chaos lasts")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--scale", type=float, default=1, help="the share of the trials to take")
    parser.add_argument("--seed", type=int, help="of all choices; by default a new one")
    given = parser.parse_args()
    if given.seed is not None:
        os.environ["TRAINKIT_FAULT_SEED"] = str(given.seed)
    seed, figures, begin = harness.fault_seed(), [], time.monotonic()
    print(f"--seed {seed}; parts: {', '.join(given.only)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ground = harness.write_text(Path(folder))
        wanted = harness.undisturbed(ground, folder)
        for name in given.only:
            arena = trials.Arena(ground, wanted, Random(f"{seed} {name}"), Path(folder))
            place = Place(arena, make_log(name, begin), given.scale)
            since = time.monotonic()
            figures += PARTS[name](place, given.minutes) if name == "chaos" else PARTS[name](place)
            print(f"\n{name}: done in {clock(time.monotonic() - since)}", flush=True)
    print(f"\n{table(figures)}\n\nseed {seed}, {clock(time.monotonic() - begin)}")
    return int(not all(figure.ok for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
