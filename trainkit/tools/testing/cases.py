"""The cases of a certificate: every layout and every choice that must not change the numbers."""

from __future__ import annotations

import attrs
import torch

from trainkit.parallel.check_layout import find_problems
from trainkit.types import Layout

_SHORT = {"dp_replicate": "replica", "dp_shard": "dp"}


@attrs.frozen
class LayoutCase:
    """A layout, and what else may be chosen that no number depends on.

    `rows_per_microbatch` is None for all rows of a rank at once. `recompute` and `compiled` are
    there for a plan to read, and `note` for anything else a plan may want to know; it is part of
    the name.

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
        """The degrees above 1, and every choice that is not the usual one."""
        layout, rows = self.layout, self.rows_per_microbatch
        factors = [f"{_SHORT.get(name, name)}{n}" for name, n in layout.degrees.items() if n > 1]
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
    """Return whether this torch and this machine can run a case on a kind of device.

    On CPUs 2.11 has no V schedules; on "cuda" there must be a GPU for each rank.

    Examples:
        >>> runs_here(LayoutCase(Layout(pp=2, schedule="gpipe")))
        True
    """
    if device == "cuda" and case.world > torch.cuda.device_count():
        return False
    return not find_problems(case.layout, world=case.world, device=device)


def make_default_cases() -> list[LayoutCase]:
    """Return cases on 1 to 8 ranks that cover every dimension, every choice, and products.

    They suit a step of at least 8 rows, 4 layers, 8 heads with 4 of keys and values, and documents
    in multiples of 16 tokens. A pipeline needs as many microbatches as it has stages. Compiling
    takes 4 to 9 s of each rank, so few cases ask it: one rank, tp, and products of every axis.

    Examples:
        >>> cases = make_default_cases()
        >>> len(cases) >= 40, {case.world for case in cases}
        (True, {1, 2, 3, 4, 6, 8})
    """
    return [*_alone(), *_on_two(), *_on_three_to_six(), *_on_eight()]


def _alone() -> list[LayoutCase]:
    return [
        LayoutCase(),
        LayoutCase(rows_per_microbatch=3),
        LayoutCase(recompute="full"),
        LayoutCase(recompute="selective"),
        LayoutCase(compiled=True),
    ]


def _on_two() -> list[LayoutCase]:
    schedules = ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"]
    schedules += ["interleaved_zero_bubble", "zero_bubble_v", "dual_pipe_v"]
    return [
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
        LayoutCase(Layout(ring=2, fold_sp="none"), rows_per_microbatch=2),
        LayoutCase(Layout(ring=2), recompute="full"),
        LayoutCase(Layout(ulysses=2)),
        LayoutCase(Layout(ulysses=2, fold_sp="none")),
        LayoutCase(Layout(ulysses=2), recompute="full"),
        *(LayoutCase(Layout(pp=2, schedule=schedule)) for schedule in schedules),
        LayoutCase(Layout(pp=2), rows_per_microbatch=2),
        LayoutCase(Layout(pp=2), recompute="full"),
    ]


def _on_three_to_six() -> list[LayoutCase]:
    return [
        LayoutCase(Layout(dp_shard=3)),
        LayoutCase(Layout(pp=3)),
        LayoutCase(Layout(dp_shard=4)),
        LayoutCase(Layout(dp_shard=4, reshard_over=2, prefetch=2, separate_ends=True)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
        LayoutCase(Layout(dp_replicate=2, dp_shard=2, reduce="each"), recompute="selective"),
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
            Layout(
                pp=2, dp_shard=2, schedule="interleaved_zero_bubble", reshard_after_forward=False
            )
        ),
        LayoutCase(Layout(pp=2, dp_replicate=2)),
        LayoutCase(Layout(pp=2, tp=2)),
        LayoutCase(Layout(pp=2, ring=2)),
        LayoutCase(Layout(pp=2, ulysses=2, fold_sp="none")),
        LayoutCase(Layout(dp_shard=3, tp=2)),
    ]


def _on_eight() -> list[LayoutCase]:
    return [
        LayoutCase(Layout(dp_shard=8)),
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
    ]
