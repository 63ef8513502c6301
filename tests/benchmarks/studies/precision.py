"""Is a run in fewer bits as far from fp32 as another seed is? The default recipe, 200 steps.

python tests/benchmarks/studies/precision.py FOLDER              # all rows: a minute or two each
python tests/benchmarks/studies/precision.py FOLDER bf16 fp16    # some, and those of fp32

Five seeds in fp32 come first: of each window of 20 steps the mean loss, and how far it is from the
least to the largest of the five. A row has seed 0, and is told by how far the mean of a window is
from that of fp32 with the same seed, as a part of the spread of that window: the farthest window,
and the mean of all. Above 1 it would be farther than another seed. Runs that FOLDER has are read.
"""

import contextlib
import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainkit as tk
from trainkit.parallel import autocast_call
from trainkit.run.sinks.jsonl import read_jsonl

RECIPE = Path(__file__).parents[3] / "recipes" / "pretrain.py"
STEPS, WINDOW, SEEDS = 200, 20, 5


def patched(name, **options):
    """Return what gives a function of trainkit options for as long as a row runs."""
    return lambda: mock.patch.object(tk, name, partial(getattr(tk, name), **options))


class Products(TorchDispatchMode):
    """Multiply fp16 as GPUs do, in fp32 and rounded once: a CPU's own loop takes 10 s a step."""

    names = ("mm", "addmm", "bmm")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, or its like in fp32."""
        is_half = func.overloadpacket.__name__ in self.names and args[0].dtype == torch.float16
        if is_half:
            args = [x.float() for x in args]
        out = func(*args, **(kwargs or {}))
        return out.half() if is_half else out


# A row: flags of the recipe, and what stands around it; None for two ranks.
ROWS = {
    "bf16": (["--compute", "bf16"], contextlib.nullcontext),
    "fp16": (["--compute", "fp16"], Products),
    "parameters bf16, stochastic": (["--storage", "bf16"], contextlib.nullcontext),
    "moments bf16": (["--moments", "bf16"], contextlib.nullcontext),
    "autocast bf16": ([], patched("make_forward_backward", call=autocast_call(tk.call_model))),
    "sums bf16, two ranks": (["--reduction", "bf16"], None),
}


def run(folder, name, flags, around):
    """Train, if nobody has, and return the loss of every step."""
    out = folder / name.replace(" ", "-").replace(",", "")
    spec = importlib.util.spec_from_file_location("pretrain", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe
    spec.loader.exec_module(recipe)
    own = ["--out", out, "--cache", folder / "cache", "--steps", STEPS, "--eval-every", 0]
    if around is None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", RECIPE, *own, *flags]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    else:
        with around(), contextlib.redirect_stdout(sys.stderr):
            recipe.main([*map(str, own), *flags])
    lines = read_jsonl(out / "metrics.jsonl")
    return np.array([line["loss"] for line in lines]), sum(line["skipped"] for line in lines)


def main(folder, *names):
    """Run and print the table."""
    folder, seeds = Path(folder), []
    for seed in range(SEEDS):
        flags = ["--seed", str(seed)]
        seeds.append(run(folder, f"fp32 seed {seed}", flags, contextlib.nullcontext)[0])
    means = np.stack(seeds).reshape(SEEDS, -1, WINDOW).mean(2)
    spread = means.max(0) - means.min(0)
    last = means[:, -1]
    print(f"fp32, {SEEDS} seeds: the last {WINDOW} of {STEPS} steps {last.min():.4f}", end=" ")
    print(f"to {last.max():.4f}; spread of a window {spread.min():.3f} to {spread.max():.3f}")
    print("| row | last window | from fp32 | of the spread: farthest, mean | skipped |")
    print("|---|---|---|---|---|")
    for name in names or ROWS:
        losses, skipped = run(folder, name, *ROWS[name])
        row = losses.reshape(-1, WINDOW).mean(1)
        part = np.abs(row - means[0]) / spread
        away = f"{row[-1] - means[0, -1]:+.4f}"
        print(f"| {name} | {row[-1]:.4f} | {away} | {part.max():.2f}, {part.mean():.2f} |", end="")
        print(f" {skipped:g} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
