"""What telling costs, in parts of a step: the default recipe's sinks, and one that hangs.

    python tests/benchmarks/sinks.py

The default recipe's model takes steps in one process, in pairs: one tells its line, to
`metrics.jsonl`, the console and a sink that hangs, the other does not; both fetch their numbers.
Printed are medians: of a step, of `log` itself, and of the differences between neighbours, which
also hold what the sinks' threads take from the steps that follow. Beside it stands the CPU time of
all threads for a line, from a thousand lines without a step between: no pair can hide more. The
bound is 1 % of a step, for `log` and for that CPU time.
"""

import contextlib
import io
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from step import batches, with_trainkit

from trainkit import models, optim, schedules, sinks
from trainkit.metrics import make_step_record
from trainkit.types import Share

PAIRS, LINES, MAX_PART = 60, 1000, 0.01
RELEASED = threading.Event()


@contextlib.contextmanager
def stuck(*, step):
    """Yield a sink that takes its first line and never comes back."""
    del step
    yield lambda *_: RELEASED.wait()


def seconds_of(function):
    """Return what a function returns, and its seconds."""
    begin = time.perf_counter()
    found = function()
    return found, time.perf_counter() - begin


def bind_step(data):
    """Return take(index): one step of the default recipe's model, and its record."""
    model = models.build_decoder(models.make_decoder_config("tiny"), seed=0)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    step = with_trainkit(model, optim.adamw(groups, lr=1e-3), schedules.constant(1e-3))

    def take(index):
        loss, norm = step(index, data[index % len(data)])
        metrics = {"loss": loss, "grad_norm": norm, "lr": 1e-3, "tokens": 2048, "skipped": False}
        return make_step_record(metrics, begin=0.0)

    return take


def pairs(take, log):
    """Return the seconds of steps that tell, of `log` in them, and of steps that do not."""
    taken = {"logged": [], "log": [], "silent": []}
    for pair in range(-3, PAIRS):
        for logs in (True, False) if pair % 2 else (False, True):
            record, seconds = seconds_of(lambda pair=pair: take(pair))
            log_seconds = seconds_of(lambda r=record, n=pair + 4: log(n, r))[1] if logs else 0.0
            if pair >= 0:
                taken["logged" if logs else "silent"].append(seconds + log_seconds)
                taken["log"] += [log_seconds] if logs else []
    return taken, record


def cpu_of_a_line(run_dir, record):
    """Return the CPU seconds of all threads for one line, opening and closing included."""
    begin = time.process_time()
    with opened(run_dir, LINES) as log:
        for number in range(1, LINES + 1):
            log(number, record)
    return (time.process_time() - begin) / LINES


@contextlib.contextmanager
def opened(run_dir, last):
    Path(run_dir).mkdir()
    with (
        contextlib.redirect_stderr(io.StringIO()),  # it warns of the sink that hangs
        contextlib.redirect_stdout(io.StringIO()),
        sinks.open_run_sinks(
            run_dir, Share(0, 1), step=0, last=last, extra={"stuck": stuck}, patience=0.5
        ) as (log, _),
    ):
        yield log


def main():
    """Print the figures; exit with 1 when the bound is missed."""
    torch.set_num_threads(1)
    take = bind_step(batches(models.make_decoder_config("tiny").vocab_size, 8, 256))
    with tempfile.TemporaryDirectory() as folder:
        with opened(f"{folder}/pairs", PAIRS + 3) as log:
            taken, record = pairs(take, log)
        line = cpu_of_a_line(f"{folder}/lines", record)
    step, log = statistics.median(taken["silent"]), statistics.median(taken["log"])
    both = zip(taken["logged"], taken["silent"], strict=True)
    more = statistics.median(a - b for a, b in both)
    print(f"a step of the default model, 8 x 256, one thread: {1e3 * step:.1f} ms; {PAIRS} pairs")
    for name, seconds in (("log()", log), ("a pair's difference", more), ("CPU of a line", line)):
        print(f"{name:24} {1e6 * seconds:9.1f} us {seconds / step:9.3%} of a step")
    kept = max(log, line) <= MAX_PART * step
    print(f"the bound is {MAX_PART:.0%}: {'kept' if kept else 'NOT KEPT'}")
    RELEASED.set()
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
