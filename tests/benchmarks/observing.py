"""What it costs to see a run: the lines of metrics, the seconds by phase, memory and counts.

    python tests/benchmarks/observing.py

A real run (`open_run`, `run.loop`) takes steps that compute nothing, on one process, so that what
is left is `loop.record` and `loop.checkpoint`: all that is on by default. Beside it stand what
`advance` adds to a step, on 8 rows of 256 tokens in one microbatch and in 8, and a phase. A line
is written for every step, as on a CPU. Bounds: 250 us for a line, and for everything together, with
one microbatch, 0.5 % of a step of 100 ms. It is the time of one rank that waits for no other; what
ranks send is counted in tests/run/test_observing.py.
"""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import trainkit as tk
from trainkit.batch import batch_from_rows, split_batch
from trainkit.phases import measure_phase, record_phases
from trainkit.types import Cursor, StepBatch, TrainState

STEPS = 2000
LINE, SHARE, STEP = 250e-6, 0.005, 0.100
PHASES = 40  # of a step with 16 microbatches


def measure(function, repeat=STEPS):
    """Return the median seconds of a call."""
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def enter_phase():
    """Enter a phase, and leave it."""
    with measure_phase("forward"):
        pass


def measure_lines(folder, batch):
    """Return the median seconds of `loop.record` and of `loop.checkpoint`."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records, checkpoints = [], []
    with tk.open_run(folder) as run:
        state = run.resume(model, optimizer)
        options = tk.checkpoint.CheckpointOptions(save_every=10 * STEPS)
        metrics = {"loss": torch.tensor(2.5), "grad_norm": torch.tensor(1.0), "skipped": False}
        metrics |= {"lr": 1e-3, "tokens": torch.tensor(2040)}
        steps = STEPS + 1  # the last one saves
        with run.loop(
            state, model, optimizer, steps=steps, replay=None, checkpoints=options
        ) as loop:
            for _ in range(STEPS):
                state, found = tk.advance(state, batch, metrics, axis=run.ps.loss)
                begin = time.perf_counter()
                state = loop.record(state, found, batch)
                recorded = time.perf_counter()
                loop.checkpoint(state)
                records.append(recorded - begin)
                checkpoints.append(time.perf_counter() - recorded)
    return statistics.median(records), statistics.median(checkpoints)


def main():
    """Print the figures; return 1 if a bound is missed."""
    torch.set_num_threads(1)
    rows = batch_from_rows(torch.arange(8 * 257).view(8, 257) % 256)
    batch = StepBatch([rows], Cursor(1))
    axis = tk.solo_parallel().loss
    metrics = {"tokens": torch.tensor(2040)}
    counts = measure(lambda: tk.advance(TrainState(), batch, metrics, axis=axis))
    parts = StepBatch(split_batch(rows, 1), Cursor(1))
    counts_of_parts = measure(lambda: tk.advance(TrainState(), parts, metrics, axis=axis))
    with record_phases():
        phase = measure(enter_phase, 10 * STEPS)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        line, checkpoint = measure_lines(Path(folder) / "run", batch)
    total = line + checkpoint + counts + PHASES * phase
    print(f"a line of metrics  {line * 1e6:7.1f} us  (bound {LINE * 1e6:.0f} us)")
    print(f"loop.checkpoint    {checkpoint * 1e6:7.1f} us")
    print(f"advance            {counts * 1e6:7.1f} us")
    print(f"  8 microbatches   {counts_of_parts * 1e6:7.1f} us")
    print(f"{PHASES} phases          {PHASES * phase * 1e6:7.1f} us")
    part = total / STEP
    print(f"together           {total * 1e6:7.1f} us = {part:.2%} of 100 ms (bound {SHARE:.1%})")
    missed = line > LINE or part > SHARE
    print("MISSED" if missed else "met")
    return int(missed)


if __name__ == "__main__":
    tk.run.run_main(main)  # garbage is collected between steps, as in a recipe
