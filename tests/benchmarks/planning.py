"""The planner against torch's memory tracker, and how long it takes to plan.

python tests/benchmarks/planning.py

Peaks are of whole steps of CPU-size decoders in fp32 on one process: forward, loss, backward and
the optimizer, measured by torch.distributed._tools.mem_tracker.MemTracker.
"""

import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import measured_step`

from measured_step import measure

from trainkit.models import DecoderConfig
from trainkit.models.decoder_sizes import make_decoder_config
from trainkit.tools.planning import Job, estimate_memory, get_hardware, list_layouts, rank_layouts
from trainkit.types import Layout, Precision

SHAPES = {
    "wide": DecoderConfig(
        vocab_size=1_000, width=256, layers=2, heads=4, kv_heads=4, mlp_width=768
    ),
    "deep": DecoderConfig(
        vocab_size=1_000, width=64, layers=12, heads=4, kv_heads=2, mlp_width=192
    ),
    "wordy": DecoderConfig(
        vocab_size=20_000, width=64, layers=4, heads=4, kv_heads=4, mlp_width=192, tied=True
    ),
}


def peaks():
    """Print the planned and the measured peak of some models, policies and rows."""
    print(
        f"{'model':<6} {'row':>5}  {'recompute':<9}  {'measured MB':>11}  {'planned MB':>10}  ratio"
    )
    for name, row_length, policy in product(SHAPES, (128, 1_024), ("none", "selective", "full")):
        job = Job(
            config=SHAPES[name],
            row_length=row_length,
            rows=2,
            precision=Precision(compute="fp32"),
            recompute=policy,
        )
        found = measure(job).peak
        planned = estimate_memory(job, Layout(), fused_norms=False).peak
        print(
            f"{name:<6} {row_length:>5}  {policy:<9}  {found / 1e6:>11.1f}  {planned / 1e6:>10.1f}"
            f"  {planned / found:.3f}"
        )


def speed():
    """Print how long it takes to list all layouts of a world."""
    for world in (8, 64, 1_024):
        begin = time.perf_counter()
        job = Job(config=make_decoder_config("llama-3.1-70b"), row_length=8_192, rows=world)
        found = rank_layouts(job, list_layouts(world), get_hardware("h100"))
        seconds = time.perf_counter() - begin
        print(f"world {world:>5}: {len(found):>6} plans in {seconds:.2f} s")


def main():
    """Print both tables."""
    peaks()
    print()
    speed()


if __name__ == "__main__":
    main()
