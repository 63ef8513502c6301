"""What a checkpoint costs: the copy that blocks, the hashes, the disk, reading it back.

Run `python tests/benchmarks/checkpoint.py [--bytes N] [--dir DIR] [--turns N]`. Ways are timed in
turns, and figures are medians of the turns, so that a busy machine disturbs all alike. Torch has
one thread, as one rank of two would have.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

import trainkit as tk
from trainkit.checkpoint import verify_checkpoint
from trainkit.checkpoint.retention import Retention
from trainkit.checkpoint.save import saves
from trainkit.checkpoint.snapshot import bind_snapshots
from trainkit.hashing import hash_box

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


def seconds_in_turns(functions, turns):
    """Median seconds of each of some functions, by name, called in turns after one call each."""
    taken = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in taken.items()}


def blocking(model, optimizer, turns):
    """The copy that a save waits for, beside a plain copy of as many bytes."""
    take = bind_snapshots([model], optimizer, tk.solo_parallel())
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
    """A save, all of it, beside the raw write of as many bytes; then reading it back."""
    solo = tk.solo_parallel()
    part = 128 << 20
    data = memoryview(torch.randint(0, 255, (size,), dtype=torch.uint8).numpy())
    parts = [data[begin : begin + part] for begin in range(0, size, part)]
    run_dir = folder / "run"
    numbers = {"raw": 0, "step": 0}

    def raw():
        numbers["raw"] += 1
        write_raw(folder / f"raw-{numbers['raw']}", parts)
        shutil.rmtree(folder / f"raw-{numbers['raw']}")

    with saves(
        run_dir, [model], optimizer, solo, background=False, retention=Retention(last=2)
    ) as (save, saved):

        def whole():
            numbers["step"] += 1
            save(tk.TrainState(step=numbers["step"]))
            assert saved()[0].error is None

        found = seconds_in_turns({"raw": raw, "save": whole}, turns)
    newest = max((run_dir / "checkpoints").glob("step_*"))
    rate = found["raw"] / found["save"]
    print(f"raw write, fsync      {size / found['raw'] / 1e9:.2f} GB/s")
    print(f"save, hashes, fsync   {size / found['save'] / 1e9:.2f} GB/s = {rate:.2f} of it", end="")
    print(" (to reach: 0.7)")
    reading = {
        "verify": lambda: verify_checkpoint(newest),
        "resume": lambda: tk.resume(
            run_dir, tk.TrainState(), [model], optimizer, solo, tell=lambda _: None
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
        with saves(
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--turns", type=int, default=5)
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
    finally:
        shutil.rmtree(folder)
