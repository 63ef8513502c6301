"""The layouts of a certificate: every degree and every choice that must not change the numbers."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trainkit.mesh import FoldSP
from trainkit.parallel.reduction import Reduce
from trainkit.parallel.split import schedule_kind

_DEGREES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
_SHORT = {"dp_replicate": "replica", "dp_shard": "dp"}


@attrs.frozen(kw_only=True)
class Layout:
    """One way to do the work of a step: the degrees, and the choices that no number depends on.

    `rows_per_microbatch` is None for all rows of a rank at once. `recompute`, `compiled` and
    `cpu_offload` are there for a plan to read, and `note` for anything else a plan may want to
    know; it is part of the name.

    Examples:
        >>> layout = Layout(dp_shard=2, ring=2, tp=2, fold_sp="none")
        >>> layout.name, layout.world
        ('dp2 x ring2 x tp2, fold none', 8)
        >>> Layout(pp=2, dp_replicate=2, schedule="gpipe", reduce="each").name
        'pp2 x replica2, gpipe, reduce each'
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    fold_sp: FoldSP = "all"
    schedule: str = "1f1b"
    rows_per_microbatch: int | None = 1
    reduce: Reduce = "last"
    recompute: Literal["none", "selective", "full"] = "none"
    compiled: bool = False
    cpu_offload: bool = False
    note: str = ""

    @property
    def degrees(self) -> dict[str, Any]:
        """What `parallel_session` takes."""
        return {name: getattr(self, name) for name in (*_DEGREES, "fold_sp")}

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.ring * self.ulysses * self.tp

    @property
    def name(self) -> str:
        """The degrees above 1, and every choice that is not the usual one."""
        degrees = {name: getattr(self, name) for name in _DEGREES}
        factors = [f"{_SHORT.get(name, name)}{n}" for name, n in degrees.items() if n > 1]
        rows = self.rows_per_microbatch
        choices = {
            self.schedule: self.pp > 1,
            f"fold {self.fold_sp}": self.fold_sp != "all",
            "all rows at once": rows is None,
            f"{rows} rows a microbatch": rows not in (None, 1),
            f"reduce {self.reduce}": self.reduce != "last",
            f"recompute {self.recompute}": self.recompute != "none",
            "compiled": self.compiled,
            "cpu offload": self.cpu_offload,
            self.note: self.note != "",
        }
        chosen = [text for text, is_chosen in choices.items() if is_chosen]
        return ", ".join([" x ".join(factors) or "one rank", *chosen])


def runs_here(layout: Layout) -> bool:
    """Say whether this torch can run a layout on CPUs: 2.11 has no V schedules there.

    Examples:
        >>> runs_here(Layout(pp=2, schedule="gpipe"))
        True
    """
    from trainkit.parallel.torch_pipeline import passes_to_itself  # noqa: PLC0415 (slow import)

    return schedule_kind(layout.schedule).placement != "v" or passes_to_itself()


def default_layouts() -> list[Layout]:
    """Return layouts on 1 to 8 ranks that cover every dimension, every choice, and products.

    They suit a step of at least 8 rows, 4 layers, 8 heads with 4 of keys and values, and documents
    in multiples of 16 tokens. A pipeline needs as many microbatches as it has stages. Compiling
    takes 4 to 5 s of each rank, so it is asked of one rank and of products that have every axis.

    Examples:
        >>> layouts = default_layouts()
        >>> len(layouts) >= 40, {layout.world for layout in layouts}
        (True, {1, 2, 3, 4, 6, 8})
    """
    return [*_alone(), *_on_two(), *_on_three_to_six(), *_on_eight()]


def _alone() -> list[Layout]:
    return [
        Layout(),
        Layout(rows_per_microbatch=3),
        Layout(recompute="full"),
        Layout(recompute="selective"),
        Layout(compiled=True),
    ]


def _on_two() -> list[Layout]:
    schedules = ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"]
    schedules += ["interleaved_zero_bubble", "zero_bubble_v", "dual_pipe_v"]
    return [
        Layout(dp_shard=2),
        Layout(dp_shard=2, rows_per_microbatch=None),
        Layout(dp_shard=2, reduce="each"),
        Layout(dp_shard=2, recompute="full"),
        Layout(dp_shard=2, cpu_offload=True),
        Layout(dp_replicate=2),
        Layout(tp=2),
        Layout(tp=2, recompute="selective"),
        Layout(ring=2),
        Layout(ring=2, fold_sp="none", rows_per_microbatch=2),
        Layout(ring=2, recompute="full"),
        Layout(ulysses=2),
        Layout(ulysses=2, fold_sp="none"),
        Layout(ulysses=2, recompute="full"),
        *(Layout(pp=2, schedule=schedule) for schedule in schedules),
        Layout(pp=2, rows_per_microbatch=2),
        Layout(pp=2, recompute="full"),
    ]


def _on_three_to_six() -> list[Layout]:
    return [
        Layout(dp_shard=3),
        Layout(pp=3),
        Layout(dp_shard=4),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(dp_replicate=2, dp_shard=2, reduce="each", recompute="selective"),
        Layout(tp=4),
        Layout(ring=4),
        Layout(ulysses=4),
        *(Layout(ring=2, ulysses=2, fold_sp=fold) for fold in ("all", "ring", "ulysses", "none")),
        Layout(pp=4),
        Layout(dp_shard=2, tp=2),
        Layout(dp_shard=2, tp=2, compiled=True),
        Layout(dp_replicate=2, tp=2),
        Layout(dp_shard=2, ring=2),
        Layout(dp_replicate=2, ring=2, fold_sp="none"),
        Layout(dp_shard=2, ulysses=2),
        Layout(ring=2, tp=2),
        Layout(ulysses=2, tp=2),
        Layout(pp=2, dp_shard=2),
        Layout(pp=2, dp_shard=2, reduce="each"),
        Layout(pp=2, dp_shard=2, schedule="interleaved_zero_bubble"),
        Layout(pp=2, dp_replicate=2),
        Layout(pp=2, tp=2),
        Layout(pp=2, ring=2),
        Layout(pp=2, ulysses=2, fold_sp="none"),
        Layout(dp_shard=3, tp=2),
    ]


def _on_eight() -> list[Layout]:
    return [
        Layout(dp_shard=8),
        Layout(ulysses=8),
        Layout(pp=2, dp_shard=2, tp=2),
        Layout(pp=2, dp_shard=2, tp=2, schedule="zero_bubble_v"),
        Layout(dp_shard=2, ring=2, tp=2),
        Layout(dp_shard=2, ring=2, tp=2, fold_sp="none", recompute="full"),
        Layout(dp_shard=2, ring=2, ulysses=2, fold_sp="ulysses"),
        Layout(dp_replicate=2, dp_shard=2, ulysses=2, compiled=True),
        Layout(pp=2, dp_replicate=2, dp_shard=2),
        Layout(pp=2, ring=2, tp=2, compiled=True),
        Layout(pp=2, ring=2, ulysses=2, schedule="interleaved_1f1b"),
        Layout(pp=4, dp_shard=2),
    ]
