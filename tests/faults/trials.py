"""Single trials of harm, each a function that returns a `Trial`.

The suite runs a few of each kind, soak.py all. A trial starts a run, harms it, starts it again as a
user would, and compares the result with an undisturbed run.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import attrs
import harness
from harness import (
    committed,
    differences,
    finish,
    is_saving,
    kill,
    kill_all,
    living,
    reached,
    running,
    steps_of,
    torn,
    wait_for,
)
from safetensors import safe_open

from trainkit.tools.testing import faults
from trainkit.types import CheckpointError
from trainkit.weights.checkpoint.manifest import (
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)

INTERVAL = 2
STEPS = 8
SLOW = [["slow_at", {"at": list(range(2, STEPS + 1)), "seconds": 0.3}]]
"""Faults that give a test the time to act in the middle of a run of `STEPS`."""
SAVED, PEER, NUMERICS, DISK, CHECKPOINT = 75, 68, 67, 74, 66


@attrs.frozen(eq=False)
class Arena:
    """The inputs of a trial: the corpus, undisturbed runs, random choices, and a run directory."""

    ground: Path
    wanted: Callable
    random: Random
    out: Path


@attrs.frozen
class Trial:
    """The result of a trial: its description, and the problems that it found."""

    what: str
    problems: tuple[str, ...] = ()
    inside: bool = False
    lost: int = 0
    seconds: float = 0.0
    background: bool = False


def saves(*, background, every=INTERVAL):
    """Return the flags of a run that saves in the background, or not."""
    return ["--save-every", every, "--background-saves" if background else "--no-background-saves"]


def allowed(background):
    """Return the number of steps that a kill may cost: an interval, or two of background saves."""
    return (2 if background else 1) * INTERVAL


def last_saved(out):
    """Return the step of the newest checkpoint that verifies, 0 for none."""
    return max((int(name.split("_")[1].split("-")[0]) for name in committed(out)), default=0)


def trained(out):
    """Return the last step of a run's metrics, 0 for none."""
    return max(steps_of(out), default=0)


def resume(arena, *flags, ranks=2, steps=STEPS, **options):
    """Start a run again until its end; return its differences from the undisturbed one."""
    wanted, out = arena.wanted(ranks, steps), arena.out
    with running(arena.ground, out, *flags, ranks=ranks, steps=steps, **options) as job:
        codes = finish(job)
        if set(codes) != {0}:
            return [f"started again it ended with {codes}: {job.stderr()[-600:]}"]
    return differences(out, wanted) + [f"a false commit: {name}" for name in torn(out)]


# --------------------------------------------------------------------------------------------- kill


def kill_trial(arena, *, ranks, background, inside, alone=False):
    """Kill all ranks of a run, or one, at a random moment, or inside a save; then go on.

    The window of a small save is some milliseconds, so it is aimed: the staging directory has just
    appeared, on a disk that takes its time.
    """
    flags, start = saves(background=background), time.monotonic()
    out, random, problems = arena.out, arena.random, []
    victim = random.randrange(ranks)
    with running(
        arena.ground,
        arena.out,
        *flags,
        ranks=ranks,
        steps=STEPS,
        slow_disk=0.01 if inside else 0.0,
    ) as job:
        if inside:
            after = random.randrange(0, STEPS, INTERVAL)
            wait_for(reached(out, after + INTERVAL) if after else lambda: True, job)
            wait_for(lambda: is_saving(out), job, every=0.0005)
            time.sleep(random.uniform(0, 0.02))
        else:
            wait_for(reached(out, 1), job)
            time.sleep(random.uniform(0, 0.5))
        if alone:
            kill(job, job.pids[victim])
            codes = finish(job, 10)
            expected = {0, PEER, -9}
            if not set(codes) <= expected:
                problems.append(f"rank {victim} killed, within 10 s the ranks ended with {codes}")
        kill_all(job)
    was_inside = is_saving(out)
    saved, lost = last_saved(out), trained(out) - last_saved(out)
    problems += [f"a false commit: {name}" for name in torn(out)]
    if lost > allowed(background):
        problems.append(f"{lost} steps are lost, of a run that saves every {INTERVAL}")
    problems += resume(arena, *flags, ranks=ranks)
    if saved and f"step_{saved:08d}" not in resumed_from(out):
        problems.append(f"step {saved} was committed, and it went on from {resumed_from(out)}")
    who = f"rank {victim} of {ranks}" if alone else f"{ranks} ranks"
    what = f"kill {who}, {'background' if background else 'foreground'}"
    seconds = time.monotonic() - start
    return Trial(what, tuple(problems), was_inside, max(lost, 0), seconds, background)


def resumed_from(out):
    """Return the messages of a run's last start about the checkpoint that it took."""
    path = Path(out) / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    messages = [event["messages"] for event in events if event["event"] == "resume"]
    return " ".join(messages[-1]) if messages else ""


# ------------------------------------------------------------------------------------------- damage


def damage(folder, random, kind):
    """Damage a checkpoint at random; return a description, and a function that restores it.

    All files are hit equally often, whatever their sizes: the manifest as often as a shard.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = random.choice(files)
    before = {file: file.read_bytes() for file in files}
    size = len(before[path])
    if kind == "flip":
        bit = random.randrange(8 * size)
        faults.flip_bit(path, bit)
        what = f"bit {bit} of {path.name}"
    elif kind == "truncate":
        left = random.randrange(size)
        faults.truncate(path, left)
        what = f"{path.name} cut to {left} of {size}"
    elif kind == "zero":
        pages = [i for i in range(-(-size // 4096)) if any(before[path][4096 * i :][:4096])]
        page = random.choice(pages)
        faults.zero_page(path, page)
        what = f"page {page} of {path.name} zeroed"
    else:
        what = mix(folder, files, random)

    def restore():
        for extra in set(folder.iterdir()) - set(files):
            extra.unlink()
        for file, content in before.items():
            file.write_bytes(content)

    return what, restore


def mix(folder, files, random):
    """Swap two files, take one from another checkpoint, remove one or add one."""
    path = random.choice(files)
    kind = random.choice(["swap", "other", "remove", "add"])
    content = path.read_bytes()
    others = [p for p in folder.parent.glob(f"step_*/{path.name}") if p.read_bytes() != content]
    if kind == "swap":
        other = random.choice([file for file in files if file.read_bytes() != content])
        faults.swap_files(path, other)
        return f"{path.name} and {other.name} swapped"
    if kind == "other" and others:
        other = random.choice(others)
        path.write_bytes(other.read_bytes())
        return f"{path.name} of {other.parent.name}"
    if kind == "remove":
        faults.remove_file(path)
        return f"{path.name} removed"
    faults.add_file(folder / "rank_00099.safetensors", content)
    return "a file added"


def damage_trials(directory, random, kinds, *, check=verify_checkpoint):
    """Damage the newest checkpoint in `checkpoints/` many times; return the trials.

    `kinds` has the number of trials of each kind: {"flip": 1000}. The damage must be found, and
    "auto" must take another checkpoint.
    """
    newest, second = list_checkpoints(directory)[:2]
    trials = []
    for kind, count in kinds.items():
        for _ in range(count):
            if kind == "pointer":
                trials.append(pointer_trial(directory, newest, random))
                continue
            what, restore = damage(newest, random, kind)
            found = check(newest)
            problems = [] if found else [f"undetected: {what}"]
            if found and trials and len(trials) % 25 == 0:
                taken = find_checkpoint(directory.parent, log=lambda _: None)
                problems += [] if taken == second else [f"{what}: auto takes {taken}"]
                with contextlib.suppress(CheckpointError):
                    find_checkpoint(newest)
                    problems.append(f"{what}: taken by its name")
            restore()
            trials.append(Trial(f"{kind}: {what}", tuple(problems)))
    assert check(newest) == []
    return trials


def pointer_trial(directory, newest, random):
    """Flip a bit of the pointer for people: nothing that a program does may change."""
    pointer = directory / "latest"
    before, bit = pointer.read_bytes(), random.randrange(8 * pointer.stat().st_size)
    faults.flip_bit(pointer, bit)
    taken = find_checkpoint(directory.parent, log=lambda _: None)
    pointer.write_bytes(before)
    problems = [] if taken == newest else [f"auto takes {taken}"]
    return Trial(f"bit {bit} of the pointer", tuple(problems))


def damaged_run_trial(arena, *, ranks, kind):
    """Damage the newest checkpoint of a run that has stopped; it must resume all the same."""
    flags, out, random = saves(background=False), arena.out, arena.random
    harness.complete(arena.ground, arena.out, *flags, ranks=ranks, steps=STEPS // 2 + INTERVAL)
    (out / "final.json").unlink(missing_ok=True)
    what, _ = damage(list_checkpoints(out / "checkpoints")[0], random, kind)
    problems = []
    if len(committed(out)) != (STEPS // 2) // INTERVAL:
        problems.append(f"{what}: {committed(out)} verify")
    # The damaged checkpoint stays, and is no false commit.
    problems += [
        problem for problem in resume(arena, *flags, ranks=ranks) if "a false commit" not in problem
    ]
    return Trial(what, tuple(problems))


# --------------------------------------------------------------------------------------- preemption


def stop_trial(arena, *, ranks, background, number=signal.SIGTERM, to=None):
    """Stop some ranks of a run at a random moment; it must save, end with 75, and resume."""
    flags = saves(background=background, every=100)
    out, random, problems, start = arena.out, arena.random, [], time.monotonic()
    to = to or random.sample(range(ranks), random.randint(1, ranks))
    with running(arena.ground, arena.out, *flags, ranks=ranks, steps=STEPS, faults=SLOW) as job:
        wait_for(reached(out, 1), job)
        time.sleep(random.uniform(0, 0.2))
        signal_time = time.monotonic()
        for rank in to:
            kill(job, job.pids[rank], number)
        codes, seconds = finish(job, 60), time.monotonic() - signal_time
        if set(codes) != {SAVED} or seconds > 25:
            problems.append(f"ended with {codes} after {seconds:.1f} s: {job.stderr()[-600:]}")
    if trained(out) != last_saved(out):
        problems.append(f"step {last_saved(out)} was saved and {trained(out)} trained")
    problems += resume(arena, *flags, ranks=ranks)
    what = f"{signal.Signals(number).name} to ranks {to} of {ranks}"
    return Trial(what, tuple(problems), seconds=time.monotonic() - start)


# -------------------------------------------------------------------------------------------- peers


def peer_trial(arena, *flags, ranks, fault, victim, codes, named, within):
    """Inject a fault into one rank in step 3; the others must end in time and name it.

    After a kill the run must resume, too.
    """
    flags = [*saves(background=False), *flags]
    planned = [[fault, {"at": 3, "rank": victim}]]
    problems = []
    with running(arena.ground, arena.out, *flags, ranks=ranks, steps=STEPS, faults=planned) as job:
        wait_for(reached(arena.out, 2), job)
        start = time.monotonic()
        others = [rank for rank in range(ranks) if rank != victim]
        ended = finish(job, within + 20, ranks=others)
        seconds, found = time.monotonic() - start, [ended[rank] for rank in others]
        errors = [job.error(rank).get("what", "") for rank in others]
        if not set(found) <= set(codes) or seconds > within:
            problems.append(f"the others ended with {found} after {seconds:.1f} s: {errors}")
        problems += [f"rank {victim} is not named: {what}" for what in errors if named not in what]
        if fault == "stop_at":
            kill(job, job.pids[victim])
        elif finish(job, 10)[victim] is None:
            problems.append(f"rank {victim} still runs")
    problems += [f"{pid} still runs" for pid in living(job)]
    problems += [f"a false commit: {path}" for path in torn(arena.out)]
    problems += resume(arena, *flags, ranks=ranks) if fault == "kill_at" else []
    return Trial(f"{fault} on rank {victim} of {ranks}", tuple(problems))


def is_stopped(pid):
    """Return whether a process has been stopped (SIGSTOP)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# ------------------------------------------------------------------------------------------ numbers


def number_trial(arena, *, ranks, fault, given, allowed=(0, NUMERICS)):
    """Inject a non-finite number into a run; no parameter or moment may become non-finite."""
    flags = saves(background=False)
    problems = []
    with running(
        arena.ground, arena.out, *flags, ranks=ranks, steps=STEPS, faults=[[fault, given]]
    ) as job:
        codes = finish(job)
        if len(set(codes)) > 1 or codes[0] not in allowed:
            problems.append(f"ended with {codes}: {job.stderr()[-600:]}")
    problems += [f"{name}: not finite" for path in every(arena.out) for name in poisoned(path)]
    return Trial(f"{fault} {given}", tuple(problems))


def every(out):
    return list_checkpoints(Path(out) / "checkpoints")


def poisoned(checkpoint):
    """Return the names of the tensors of a checkpoint with non-finite elements."""
    found = []
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += [
                name
                for name in file.keys()  # noqa: SIM118 (no dictionary)
                if not file.get_tensor(name).double().isfinite().all()
            ]
    return found


# --------------------------------------------------------------------------------------------- disk


def full_disk_trial(arena, *, ranks, size, background):
    """Limit files to `size` bytes; nothing may be lost or half-committed, and the run resumes."""
    flags, out = saves(background=background), arena.out
    harness.complete(arena.ground, arena.out, *flags, ranks=ranks, steps=INTERVAL)
    (out / "final.json").unlink(missing_ok=True)
    before, problems = committed(out), []
    limit = {"bytes": size, "rank": ranks - 1}
    with running(
        arena.ground, arena.out, *flags, ranks=ranks, steps=STEPS, limit_files=limit
    ) as job:
        codes = finish(job)
        if len(set(codes)) > 1 or codes[0] not in {0, DISK}:
            problems.append(f"ended with {codes}: {job.stderr()[-600:]}")
    if not set(before) <= set(committed(out)):
        problems.append(f"{before} became {committed(out)}")
    if is_saving(out):
        problems.append("a staging directory is left")
    problems += resume(arena, *flags, ranks=ranks)
    return Trial(f"files of {size} bytes at most", tuple(problems))
