"""The records of a certificate and their tables: one row per layout, one set of bounds per tier."""

from __future__ import annotations

import attrs


@attrs.frozen
class Tier:
    """The dtype of a certificate, and the largest differences that it allows.

    `bound` holds for every parameter, `state_bound` for every buffer and optimizer state,
    `norm_bound` for the gradient norm, `loss_bound` for every term of the loss.
    """

    name: str
    dtype: str
    bound: float
    state_bound: float
    norm_bound: float
    loss_bound: float


TIERS = {
    tier.name: tier
    for tier in (
        # A norm is a root of a sum of roots squared, so it is rounded even where all else is exact.
        Tier("exact", "float64", bound=0.0, state_bound=0.0, norm_bound=1e-14, loss_bound=0.0),
        # Measured with the built-in decoder in 3 steps: 7e-15, 4e-14, 5e-15 and 2e-16.
        Tier("fp64", "float64", bound=1e-12, state_bound=1e-12, norm_bound=1e-12, loss_bound=1e-12),
        # Measured: 1e-5, 2e-5, 5e-6 and 2e-7.
        Tier("fp32", "float32", bound=1e-4, state_bound=2e-4, norm_bound=5e-5, loss_bound=5e-6),
        # Measured with every model of the tier: 6e-2, 1.0 (second moments of an embedding with soft
        # caps), 2.3e-2 and 4e-3; one unit in the last place of bf16 is 8e-3.
        Tier("bf16", "bfloat16", bound=2e-1, state_bound=2.0, norm_bound=1e-1, loss_bound=1e-2),
    )
}
"""The tiers by name.

exact: a linear model of small integers, whose partial sums are all representable, so the order of
summation must not change a bit. fp64: differences by rounding stay below 1e-12; those by a wrong
factor, a missing reduction or a lost label do not. fp32 and bf16: parameters, activations and
gradients all have that dtype, and the bounds allow for its rounding.
"""


def tier_called(name: str) -> Tier:
    """Return one of `TIERS` by name.

    Raises:
        ValueError: There is no such tier.

    Examples:
        >>> tier_called("fp64").bound
        1e-12
    """
    if name not in TIERS:
        raise ValueError(f"certify: tier must be one of {', '.join(TIERS)}, got {name!r}")
    return TIERS[name]


@attrs.frozen
class CertificateRow:
    """The largest differences of one layout from one process, max|a - b| / max|b| per tensor.

    `loss` is the maximum over steps and terms, `grad_norm` over steps, `parameters` and `state`
    (buffers, and "PARAMETER/KEY" of the optimizer) over all tensors after the last step. `worst`
    names the tensor with the largest difference. `batches` is whether every step trained on the
    same tokens. `error` is empty unless the layout failed; `traceback` is the rank's.
    """

    layout: str
    world: int
    # A row without results is outside of every bound.
    loss: float = float("inf")
    grad_norm: float = float("inf")
    parameters: float = float("inf")
    state: float = float("inf")
    worst: str = ""
    batches: bool = False
    seconds: float = 0.0
    error: str = ""
    traceback: str = attrs.field(default="", repr=False)


@attrs.frozen
class Certificate:
    """The rows of some layouts in one tier; `title` names the model.

    `packing` compares packed documents with each document alone, in fp64 where the model allows it:
    its `loss` is the difference of outputs, its `parameters` that of gradients. It has the bounds
    of `check_packing`, not those of the tier, and is red if it has an `error`.
    """

    title: str
    tier: Tier
    steps: int
    rows: tuple[CertificateRow, ...]
    packing: CertificateRow | None = None

    @property
    def ok(self) -> bool:
        """Whether there are layouts, and every row is within its bounds."""
        return bool(self.rows) and not self.red

    @property
    def red(self) -> tuple[CertificateRow, ...]:
        """The rows that are not within their bounds."""
        return tuple(row for row in self.all_rows if self.is_red(row))

    @property
    def all_rows(self) -> tuple[CertificateRow, ...]:
        """The row of packed documents, and the rows of the layouts."""
        return self.rows if self.packing is None else (self.packing, *self.rows)

    def is_red(self, row: CertificateRow) -> bool:
        """Return whether one of the rows is not within its bounds."""
        return bool(row.error) if row is self.packing else not is_within(row, self.tier)


def is_within(row: CertificateRow, tier: Tier) -> bool:
    """Return whether the differences of a layout are within the bounds of a tier.

    Examples:
        >>> row = CertificateRow("dp2", 2, 1e-16, 0.0, 2e-15, state=0.0, batches=True)
        >>> is_within(row, TIERS["fp64"]), is_within(row, TIERS["exact"])
        (True, False)
    """
    return (
        # NaN is within no bound.
        row.loss <= tier.loss_bound
        and row.grad_norm <= tier.norm_bound
        and row.parameters <= tier.bound
        and row.state <= tier.state_bound
        and row.batches
        and not row.error
    )


# --------------------------------------------------------------------------------------- rendering

_COLUMNS = ("layout", "ranks", "loss", "gradient norm", "parameters", "state", "worst tensor", "s")


def format_text(certificate: Certificate) -> str:
    """Format a certificate as a table for a terminal, with failures and a summary below.

    Examples:
        >>> row = CertificateRow("dp2", 2, 0.0, 1e-16, 2e-15, state=0.0, worst="w", batches=True)
        >>> print(format_text(Certificate("a model", TIERS["fp64"], 3, (row,))))
        layout  ranks  loss  gradient norm  parameters  state  worst tensor    s
        dp2         2     0        1.0e-16     2.0e-15      0             w  0.0
        a model, fp64: 1 of 1 layouts give the numbers of one process, to 1e-12, after 3 steps
    """
    lines = [_COLUMNS, *map(_format_cells, certificate.all_rows)]
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    marks = ["", *("  RED" if certificate.is_red(row) else "" for row in certificate.all_rows)]
    table = []
    for (name, *cells), mark in zip(lines, marks, strict=True):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        table.append("  ".join([name.ljust(first), *aligned]) + mark)
    return "\n".join([*table, *_list_failures(certificate), summary(certificate)])


def format_markdown(certificate: Certificate) -> str:
    """Format a certificate as a Markdown table, with failures and a summary below.

    Examples:
        >>> row = CertificateRow("dp2", 2, 0.0, 1e-16, 2e-15, state=0.0, worst="w", batches=True)
        >>> print(format_markdown(Certificate("a model", TIERS["fp64"], 3, (row,))))
        | layout | ranks | loss | gradient norm | parameters | state | worst tensor |
        | --- | ---: | ---: | ---: | ---: | ---: | --- |
        | dp2 | 2 | 0 | 1.0e-16 | 2.0e-15 | 0 | `w` |
        <BLANKLINE>
        a model, fp64: 1 of 1 layouts give the numbers of one process, to 1e-12, after 3 steps
    """
    head = [_COLUMNS[:-1], ("---", *["---:"] * (len(_COLUMNS) - 3), "---")]
    cells = [_format_cells(row)[:-1] for row in certificate.all_rows]
    quoted = [(*line[:-1], f"`{line[-1]}`" if line[-1] else "") for line in cells]
    table = ["| " + " | ".join(line) + " |" for line in (*head, *quoted)]
    return "\n".join([*table, "", *_list_failures(certificate), summary(certificate)])


def summary(certificate: Certificate) -> str:
    """Return a sentence: how many layouts equal one process, and within what bound.

    Examples:
        >>> summary(Certificate("a model", TIERS["exact"], 2, ()))
        'a model, exact: 0 of 0 layouts give the numbers of one process, bit for bit, after 2 steps'
    """
    tier = certificate.tier
    num_equal = sum(not certificate.is_red(row) for row in certificate.rows)
    precision = f"to {tier.bound:.0e}".replace("e-0", "e-") if tier.bound else "bit for bit"
    return (
        f"{certificate.title}, {tier.name}: {num_equal} of {len(certificate.rows)} layouts give "
        f"the numbers of one process, {precision}, after {certificate.steps} steps"
    )


def _list_failures(certificate: Certificate) -> list[str]:
    failures = []
    for row in certificate.red:
        why = "its numbers differ" if row.batches else "it trained on other tokens"
        failures.append(f"RED: {row.layout}: {row.error or why}")
    return failures


def _format_cells(row: CertificateRow) -> tuple[str, ...]:
    numbers = [
        # A bare 0 means equal bit for bit.
        "-" if row.error else "0" if x == 0 else f"{x:.1e}"
        for x in (row.loss, row.grad_norm, row.parameters, row.state)
    ]
    return (row.layout, str(row.world), *numbers, row.worst, f"{row.seconds:.1f}")
