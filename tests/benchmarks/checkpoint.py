"""What a checkpoint costs: the copy that blocks, the hashes, the disk, reading it back, a restart.

Run `PYTHONPATH=. python tests/benchmarks/checkpoint.py [--bytes N] [--dir DIR] [--turns N]`. Ways
are timed in turns, and figures are medians of the turns, ratios those of the ratios of each turn,
so that a busy machine disturbs all alike. Torch has one thread, as one rank of two would have.
"""

import argparse
import hashlib
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

import trainkit as tk
from trainkit.noise.hashing import hash_box
from trainkit.weights.checkpoint import verify_checkpoint
from trainkit.weights.checkpoint.retention import Retention
from trainkit.weights.checkpoint.save import open_saver
from trainkit.weights.checkpoint.snapshot import make_snapshot_taker

GIB = 1 << 30


def model_and_optimizer(size, device="cpu"):
    """Return a model and AdamW whose state has about `size` bytes."""
    width = 1024
    layers = max(1, size // (12 * width * width))
    model = nn.ModuleList(nn.Linear(width, width, bias=False, device=device) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def taken_in_turns(functions, turns, before=lambda: None):
    """Seconds and CPU seconds of each of some functions, called in turns after one call each."""
    taken = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name, function in functions.items():
            before()
            begin, busy = time.perf_counter(), time.process_time()
            function()
            if turn:
                taken[name].append((time.perf_counter() - begin, time.process_time() - busy))
    return taken


def seconds_in_turns(functions, turns):
    """Median seconds of each of some functions, by name."""
    taken = taken_in_turns(functions, turns)
    return {name: statistics.median(wall for wall, _ in pairs) for name, pairs in taken.items()}


def blocking(model, optimizer, turns):
    """The copy that a save waits for, beside a plain copy of as many bytes."""
    take = make_snapshot_taker([model], optimizer, tk.solo_parallel())
    begin = time.perf_counter()
    size = sum(file.data.nbytes for file in take(tk.TrainState(), {}).files)
    first = time.perf_counter() - begin
    plain = torch.zeros(size, dtype=torch.uint8)
    into = torch.zeros(size, dtype=torch.uint8)
    ways = {
        "copy": lambda: into.copy_(plain),
        "snapshot": lambda: take(tk.TrainState(), {}),
        "new memory": plain.clone,
    }
    found = seconds_in_turns(ways, turns)
    ratio = found["snapshot"] / found["copy"]
    print(f"state {size / 1e9:.2f} GB; a plain copy {found['copy']:.3f} s")
    print(f"snapshot {found['snapshot']:.3f} s = {ratio:.2f} x the copy (to reach: 1.3)")
    print(
        f"the first snapshot {first:.3f} s, in new memory (a clone: {found['new memory']:.3f} s)\n"
    )
    return size


def hashing():
    """GiB a second of each hash, on one core."""
    data = np.random.default_rng(0).integers(0, 1 << 30, GIB // 8 // 4, dtype=np.uint32)
    box = data.reshape(-1, 1024)
    ways = {
        "sha256 (manifest)": lambda: hashlib.sha256(data),
        "state hash": lambda: hash_box("x", box, shape=box.shape, offset=(0, 0)),
    }
    for name, seconds in seconds_in_turns(ways, 3).items():
        print(f"{name:20} {data.nbytes / GIB / seconds:.2f} GiB/s on one core")
    print()


def write_raw(folder, parts):
    """Write as many bytes with nothing else: two files at a time, fsync."""

    def one(numbered):
        number, data = numbered
        handle = os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT, 0o666)
        for begin in range(0, len(data), 1 << 22):
            os.write(handle, data[begin : begin + (1 << 22)])
        os.fsync(handle)
        os.close(handle)

    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, enumerate(parts)))


def writing(model, optimizer, size, folder, turns):
    """A save, all of it, beside the raw write of files of as many bytes; then reading it back."""
    solo = tk.solo_parallel()
    part = 128 << 20  # a save's files have as many bytes
    data = memoryview(torch.randint(0, 255, (size,), dtype=torch.uint8).numpy())
    parts = [data[begin : begin + part] for begin in range(0, size, part)]
    run_dir = folder / "run"
    steps = itertools.count()

    def before():
        """Begin with a disk that has nothing to do: what was deleted is deleted."""
        shutil.rmtree(folder / "raw", ignore_errors=True)
        for old in sorted((run_dir / "checkpoints").glob("step_*"))[:-1]:
            shutil.rmtree(old)
        os.sync()
        time.sleep(1.5)  # the blocks of what was deleted are discarded after that

    with open_saver(run_dir, [model], optimizer, solo, background=False, retention=None) as both:
        save, saved = both

        def whole():
            save(tk.TrainState(step=next(steps)))
            assert saved()[0].error is None

        ways = {"raw write": lambda: write_raw(folder / "raw", parts), "save": whole}
        taken = taken_in_turns(ways, turns, before)
    before()
    for name, pairs in taken.items():
        seconds, busy = map(statistics.median, zip(*pairs, strict=True))
        print(f"{name:12} {size / seconds / 1e9:.2f} GB/s, CPU {busy:.2f} s in {seconds:.2f} s")
    rates = [raw / save for (raw, _), (save, _) in zip(*taken.values(), strict=True)]
    print(
        f"a save, hashes and fsync included: {statistics.median(rates):.2f} of the rate of the raw "
        f"write ({min(rates):.2f} to {max(rates):.2f} in {turns} pairs; to reach: 0.7)"
    )
    newest = max((run_dir / "checkpoints").glob("step_*"))
    reading = {
        "verify": lambda: verify_checkpoint(newest),
        "resume": lambda: tk.resume(
            run_dir, tk.TrainState(), [model], optimizer, solo, log=lambda _: None
        ),
    }
    found = seconds_in_turns(reading, turns)
    print(f"verify                {size / found['verify'] / 1e9:.2f} GB/s")
    print(f"resume, verified      {size / found['resume'] / 1e9:.2f} GB/s (to reach: 1.5)\n")


def overhead(folder, size, turns, steps=200):
    """The share of the wall time that a save every `steps` steps costs, written in background."""
    model, optimizer = model_and_optimizer(size)
    rows = torch.randn(64, 1024)

    def run(*, save_too):
        with open_saver(
            folder / "loop", [model], optimizer, tk.solo_parallel(), retention=Retention(last=2)
        ) as (save, saved):
            for step in range(steps):
                x = rows
                for layer in model:
                    x = layer(x).tanh()
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if save_too and step == steps // 2:
                    save(tk.TrainState(step=step))
                saved()

    found = seconds_in_turns(
        {"without": lambda: run(save_too=False), "with": lambda: run(save_too=True)}, turns
    )
    cost = found["with"] / found["without"] - 1
    print(
        f"{steps} steps of {found['without'] / steps * 1e3:.0f} ms, a state of 150 MiB, one save:"
    )
    print(f"the save costs {100 * cost:.1f} % of the wall time (to reach: 3.5)")


def seconds_to_a_step(out, cache):
    """Seconds from the start of the default recipe to the line of its first step; then stop it."""
    metrics = out / "metrics.jsonl"
    known = metrics.stat().st_size if metrics.exists() else 0
    recipe = Path(__file__).parents[2] / "recipes" / "pretrain.py"
    command = [sys.executable, recipe, "--out", out, "--cache", cache]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not metrics.exists() or metrics.stat().st_size <= known:
            assert process.poll() is None
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        process.send_signal(signal.SIGTERM)  # it saves
    assert process.returncode == 75
    return seconds


def restarting(folder, turns):
    """From launch to the first new step: of a run that begins, and of one that goes on."""
    numbers = itertools.count()
    out = [folder]

    def begins():
        out[0] = folder / f"restart-{next(numbers)}"
        return seconds_to_a_step(out[0], folder / "cache")

    begins()  # makes the plan of rows
    pairs = [(begins(), seconds_to_a_step(out[0], folder / "cache")) for _ in range(turns)]
    fresh, again = map(statistics.median, zip(*pairs, strict=True))
    print(f"\nthe default recipe, from launch to its first step: {fresh:.1f} s; with a checkpoint")
    print(f"{again:.1f} s (to reach: 15 s and the time to read it)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    torch.set_num_threads(1)
    try:
        held = model_and_optimizer(options.bytes)
        size = blocking(*held, options.turns)
        hashing()
        writing(*held, size, folder, options.turns)
        del held
        overhead(folder, min(options.bytes, 100 << 20), options.turns)
        restarting(folder, 3)
    finally:
        shutil.rmtree(folder)
