"""The cases of a certificate: layouts and options that must not change the numbers."""

from __future__ import annotations

import attrs
import torch

from trainkit.parallel.check_layout import find_problems
from trainkit.types import Layout

# Nearly every name has one of these.
_SHORT = {"dp_replicate": "replica", "dp_shard": "dp"}


@attrs.frozen
class LayoutCase:
    """A layout, with other options that must not change the numbers.

    `rows_per_microbatch` is None for all rows of a rank at once. A plan reads `recompute` and
    `compiled`, and may read `note`, which is part of the name.

    Examples:
        >>> LayoutCase(Layout(dp_shard=2, ring=2, tp=2, fold_sp="none")).name
        'dp2 x ring2 x tp2, fold none'
        >>> LayoutCase(Layout(pp=2, schedule="gpipe", reduce="each"), compiled=True).name
        'pp2, gpipe, reduce each, compiled'
    """

    layout: Layout = attrs.field(factory=Layout)
    rows_per_microbatch: int | None = attrs.field(default=1, kw_only=True)
    recompute: str = attrs.field(default="none", kw_only=True)
    compiled: bool = attrs.field(default=False, kw_only=True)
    note: str = attrs.field(default="", kw_only=True)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.layout.world

    @property
    def name(self) -> str:
        """The degrees above 1, and every option that is not the default."""
        layout = self.layout
        rows = self.rows_per_microbatch
        factors = [f"{_SHORT.get(name, name)}{n}" for name, n in layout.degrees.items() if n > 1]
        # Each text with whether it is part of the name: options at their default are not.
        choices = {
            layout.schedule: layout.pp > 1,
            f"fold {layout.fold_sp}": layout.fold_sp != "all",
            "ep strided": not layout.ep_adjacent,
            "all rows at once": rows is None,
            f"{rows} rows a microbatch": rows not in (None, 1),
            f"reduce {layout.reduce}": layout.reduce != "last",
            f"recompute {self.recompute}": self.recompute != "none",
            "compiled": self.compiled,
            f"reshard over {layout.reshard_over}": layout.reshard_over,
            f"prefetch {layout.prefetch}": layout.prefetch,
            "ends apart": layout.separate_ends,
            "cpu offload": layout.cpu_offload,
            self.note: self.note != "",
        }
        chosen = [text for text, is_chosen in choices.items() if is_chosen]
        return ", ".join([" x ".join(factors) or "one rank", *chosen])


def runs_here(case: LayoutCase, device: str = "cpu") -> bool:
    """Return whether this version of torch and this machine can run a case on a device.

    On CPUs torch 2.11 has no V schedules; "cuda" needs a GPU for each rank.

    Examples:
        >>> runs_here(LayoutCase(Layout(pp=2, schedule="gpipe")))
        True
    """
    if device == "cuda" and case.world > torch.cuda.device_count():
        return False
    return not find_problems(case.layout, world=case.world, device=device)


def make_default_cases() -> list[LayoutCase]:
    """Return cases on 1 to 8 ranks that cover every axis, every option, and combinations.

    They need at least 8 rows a step, 4 layers, 8 query and 4 key heads, and documents aligned to 16
    tokens. A pipeline needs as many microbatches as it has stages. Compiling takes each rank 4 to
    9 s, so few cases do it: one rank, tp, and combinations that contain every axis.

    Examples:
        >>> cases = make_default_cases()
        >>> len(cases) >= 40, {case.world for case in cases}
        (True, {1, 2, 3, 4, 6, 8})
    """
    return [*_DEFAULT_CASES]


_DEFAULT_CASES = (
    # One rank. 3 does not divide the rows of a step, so the last microbatch has padding rows.
    LayoutCase(),
    LayoutCase(rows_per_microbatch=3),
    LayoutCase(recompute="full"),
    LayoutCase(recompute="selective"),
    LayoutCase(compiled=True),
    # Two ranks.
    LayoutCase(Layout(dp_shard=2)),
    LayoutCase(Layout(dp_shard=2), rows_per_microbatch=None),
    LayoutCase(Layout(dp_shard=2, reduce="each")),
    LayoutCase(Layout(dp_shard=2), recompute="full"),
    LayoutCase(Layout(dp_shard=2, cpu_offload=True)),
    LayoutCase(Layout(dp_replicate=2)),
    LayoutCase(Layout(tp=2)),
    LayoutCase(Layout(tp=2), recompute="selective"),
    LayoutCase(Layout(tp=2), compiled=True),
    LayoutCase(Layout(ring=2)),
    # Without a fold the gradients are summed by `sync_sp_grads` and not by FSDP.
    LayoutCase(Layout(ring=2, fold_sp="none"), rows_per_microbatch=2),
    LayoutCase(Layout(ring=2), recompute="full"),
    LayoutCase(Layout(ulysses=2)),
    LayoutCase(Layout(ulysses=2, fold_sp="none")),
    LayoutCase(Layout(ulysses=2), recompute="full"),
    *(
        LayoutCase(Layout(pp=2, schedule=schedule))
        for schedule in (
            "1f1b",
            "gpipe",
            "interleaved_1f1b",
            "looped_bfs",
            "interleaved_zero_bubble",
            "zero_bubble_v",
            "dual_pipe_v",
        )
    ),
    LayoutCase(Layout(pp=2), rows_per_microbatch=2),
    LayoutCase(Layout(pp=2), recompute="full"),
    # Three to six ranks. On 3 the rows, and most dimensions of the parameters, do not divide.
    LayoutCase(Layout(dp_shard=3)),
    # Three stages of four layers are unequal.
    LayoutCase(Layout(pp=3)),
    LayoutCase(Layout(dp_shard=4)),
    LayoutCase(Layout(dp_shard=4, reshard_over=2, prefetch=2, separate_ends=True)),
    LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
    LayoutCase(Layout(dp_replicate=2, dp_shard=2, reduce="each"), recompute="selective"),
    # One key head a rank.
    LayoutCase(Layout(tp=4)),
    LayoutCase(Layout(ring=4)),
    LayoutCase(Layout(ulysses=4)),
    *(
        LayoutCase(Layout(ring=2, ulysses=2, fold_sp=fold))
        for fold in ("all", "ring", "ulysses", "none")
    ),
    LayoutCase(Layout(pp=4)),
    LayoutCase(Layout(dp_shard=2, tp=2)),
    LayoutCase(Layout(dp_shard=2, tp=2), compiled=True),
    LayoutCase(Layout(dp_replicate=2, tp=2)),
    LayoutCase(Layout(dp_shard=2, ring=2)),
    LayoutCase(Layout(dp_replicate=2, ring=2, fold_sp="none")),
    LayoutCase(Layout(dp_shard=2, ulysses=2)),
    LayoutCase(Layout(ring=2, tp=2)),
    LayoutCase(Layout(ulysses=2, tp=2)),
    LayoutCase(Layout(pp=2, dp_shard=2)),
    LayoutCase(Layout(pp=2, dp_shard=2, reduce="each")),
    LayoutCase(
        Layout(pp=2, dp_shard=2, schedule="interleaved_zero_bubble", reshard_after_forward=False)
    ),
    LayoutCase(Layout(pp=2, dp_replicate=2)),
    LayoutCase(Layout(pp=2, tp=2)),
    LayoutCase(Layout(pp=2, ring=2)),
    LayoutCase(Layout(pp=2, ulysses=2, fold_sp="none")),
    LayoutCase(Layout(dp_shard=3, tp=2)),
    # Eight ranks: combinations of three axes, and the largest degree of two.
    LayoutCase(Layout(dp_shard=8)),
    # As many ranks as query heads, and twice as many as key heads, which are repeated.
    LayoutCase(Layout(ulysses=8)),
    LayoutCase(Layout(pp=2, dp_shard=2, tp=2)),
    LayoutCase(
        Layout(pp=2, dp_shard=2, tp=2, schedule="zero_bubble_v", reshard_after_forward=False)
    ),
    LayoutCase(Layout(dp_shard=2, ring=2, tp=2)),
    LayoutCase(Layout(dp_shard=2, ring=2, tp=2, fold_sp="none"), recompute="full"),
    LayoutCase(Layout(dp_shard=2, ring=2, ulysses=2, fold_sp="ulysses")),
    LayoutCase(Layout(dp_replicate=2, dp_shard=2, ulysses=2), compiled=True),
    LayoutCase(Layout(pp=2, dp_replicate=2, dp_shard=2)),
    LayoutCase(Layout(pp=2, ring=2, tp=2), compiled=True),
    LayoutCase(Layout(pp=2, ring=2, ulysses=2, schedule="interleaved_1f1b")),
    LayoutCase(Layout(pp=4, dp_shard=2)),
)
