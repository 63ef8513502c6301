"""Print what chunked losses of answers cost over the same losses on whole logits, on one core.

    python tests/benchmarks/objectives.py

DPO, distillation and a policy gradient at 2,048 tokens, width 256 and a vocabulary of 131,072, each
forward and backward. Times are processor seconds, paired in one process, one after the other, and
the median of the pairs' ratios counts. Peak memory is the growth of the resident set beyond the
inputs, of a process that runs one path once. Bounds: 0.9 of the time of whole logits and 0.15 of
their memory; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear, logsigmoid

from trainkit.post.objectives import distillation, dpo, policy_gradient, ppo_clip
from trainkit.types import Hidden

Inputs = dict[str, Tensor]


def inputs(tokens: int, width: int, vocabulary: int) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    half = tokens // 2

    def head() -> Tensor:  # in place: what a peak grows from must not hold more than the inputs
        return torch.empty(vocabulary, width).normal_(std=0.05, generator=draw)

    return {
        "hidden": torch.randn(1, tokens, width, generator=draw).requires_grad_(),
        "weight": head().requires_grad_(),
        "teacher_hidden": torch.randn(1, tokens, width, generator=draw),
        "teacher_weight": head(),
        "labels": torch.randint(vocabulary, (1, tokens), generator=draw),
        "document_ids": torch.arange(2).repeat_interleave(half)[None],
        "position_ids": torch.arange(half).repeat(2)[None],
        "reference_logprobs": torch.randn(1, tokens, generator=draw) - 12,
        "old_logprobs": torch.randn(1, tokens, generator=draw) - 12,
        "advantages": torch.randn(1, tokens, generator=draw),
    }


def whole_logprobs(batch: Inputs) -> Tensor:
    rows = linear(batch["hidden"], batch["weight"]).log_softmax(-1)
    return rows.gather(-1, batch["labels"][..., None])[..., 0]


def whole_dpo(batch: Inputs) -> Tensor:
    ratios = (whole_logprobs(batch) - batch["reference_logprobs"]).view(2, -1).sum(-1)
    return -logsigmoid(0.1 * (ratios[0] - ratios[1]))


def whole_distillation(batch: Inputs) -> Tensor:
    student = linear(batch["hidden"], batch["weight"]).log_softmax(-1)
    with torch.no_grad():
        teacher = linear(batch["teacher_hidden"], batch["teacher_weight"]).log_softmax(-1)
    return kl_div(student, teacher, reduction="sum", log_target=True)


def whole_policy(batch: Inputs) -> Tensor:
    ratios, advantages = (whole_logprobs(batch) - batch["old_logprobs"]).exp(), batch["advantages"]
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).sum()


def chunked_dpo(batch: Inputs) -> Tensor:
    return dpo()(Hidden(batch["hidden"], batch["weight"]), batch)[0]


def chunked_distillation(batch: Inputs) -> Tensor:
    loss = distillation(Hidden(torch.empty(0), batch["teacher_weight"]))
    return loss(Hidden(batch["hidden"], batch["weight"]), batch)[0]


def chunked_policy(batch: Inputs) -> Tensor:
    return policy_gradient(ppo_clip())(Hidden(batch["hidden"], batch["weight"]), batch)[0]


PATHS: dict[str, Callable[[Inputs], Tensor]] = {
    f"{kind} {name}": path
    for name, paths in {
        "dpo": (whole_dpo, chunked_dpo),
        "distillation": (whole_distillation, chunked_distillation),
        "policy": (whole_policy, chunked_policy),
    }.items()
    for kind, path in zip(("whole", "chunked"), paths, strict=True)
}
NAMES = ("dpo", "distillation", "policy")


def seconds(path: str, batch: Inputs) -> float:
    batch["hidden"].grad = batch["weight"].grad = None
    gc.collect()
    start = time.process_time()
    PATHS[path](batch).backward()
    return time.process_time() - start


def print_peak(path: str, shape: tuple[int, int, int]) -> None:
    """Print the growth of this process's peak resident set, in MiB, when it runs one path once."""
    seconds(path, inputs(8, 8, 8))  # loads the libraries
    batch = inputs(*shape)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds(path, batch)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def peak_mib(path: str, shape: tuple[int, int, int]) -> float:
    words = [sys.executable, __file__, "--peak", path]
    names = ("--tokens", "--width", "--vocabulary")
    words += [word for name, size in zip(names, shape, strict=True) for word in (name, str(size))]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--peak", choices=sorted(PATHS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (args.tokens, args.width, args.vocabulary)
    if args.peak:
        print_peak(args.peak, shape)
        return
    print(f"{shape[0]} tokens, width {shape[1]}, vocabulary {shape[2]}, one thread")
    missed = False
    # First: a child's peak is at least what its parent holds when it starts it.
    peaks = {n: [peak_mib(f"{kind} {n}", shape) for kind in ("whole", "chunked")] for n in NAMES}
    batch = inputs(*shape)
    for name in NAMES:
        both = [f"whole {name}", f"chunked {name}"]
        pairs = [[seconds(path, batch) for path in both] for _ in range(args.pairs + 1)][1:]
        whole, chunked = (statistics.median(x) for x in zip(*pairs, strict=True))
        time_ratio = statistics.median(b / a for a, b in pairs)
        memory_ratio = peaks[name][1] / peaks[name][0]
        print(f"{name}: whole {whole:.2f} s {peaks[name][0]:.0f} MiB,", end=" ")
        print(f"chunked {chunked:.2f} s {peaks[name][1]:.0f} MiB,", end=" ")
        print(
            f"ratios {time_ratio:.3f} and {memory_ratio:.3f} (at most 0.900 and 0.150)", flush=True
        )
        missed |= time_ratio > 0.9 or memory_ratio > 0.15
    sys.exit(missed)


if __name__ == "__main__":
    main()
