"""Which rows of a family of layouts run: few that hold every pair of choices, and with --all all.

Those that only `pytest --all` runs have a mark, and are counted at the end of the tests. What two
choices do to each other the certificate shows first: other families run what it does not hold.
"""

import functools
import math
import os
import re

import attrs
import pytest
from covering import choices_of as choices_of_case
from covering import covering

from trainkit.tools.testing import cases
from trainkit.tools.testing.builtin import cases_of_model, models_of_tier
from trainkit.types import Layout

WITH_ALL = "TRAINKIT_ALL_ROWS"  # set by conftest.py, for workers too
ONLY_ALL = pytest.mark.only_all
SIZES = {
    "world",
    "layers",
    "rows",
    "vocab_size",
    "kv_heads",
    "multiple_of",
}  # a layout needs them: no choices


def choices_of(row):
    """Return what a record chooses: degrees above 1 by name, and other fields that are unusual.

    Ranks that no other degree takes are those over which parameters are sharded.
    """
    usual, degrees = type(row)(), [name for name in Layout().degrees if hasattr(row, name)]
    every = attrs.asdict(row).items()
    fields = {k: v for k, v in every if k not in SIZES and v != getattr(usual, k)}
    sharded = row.world > math.prod(getattr(row, name) for name in degrees)
    choices = {k if k in degrees else f"{k} = {v}" for k, v in fields.items()}
    return choices | ({"dp_shard"} if sharded else set())


def few(rows, *, beside=(), always=()):
    """Return those of {name: layout} that hold every pair of choices that any of them holds.

    Pairs that rows of the certificate hold need no row here, nor those of rows `beside` these,
    which are another dict of the same tests; and what all of them choose is no choice.
    """
    every = {**dict(beside), **rows}
    held = {name: choices_of(row) for name, row in every.items()}
    held = {name: choices - set.intersection(*held.values()) for name, choices in held.items()}
    shown = {choices: choices for choices in map(as_here, narrow_pairs_of(rows_of("fp64")))}
    ranks = {name: 1 + row.world for name, row in every.items()}
    chosen = covering(
        [*every, *shown], choices=(held | shown).get, cost=lambda row: ranks.get(row, 1e-3)
    )
    return {name: row for name, row in rows.items() if name in (*chosen, *always)}


def running(rows, **few_of):
    """Return those of {name: layout} that run here: few, or all."""
    return rows if os.environ.get(WITH_ALL) else few(rows, **few_of)


def named(rows, **few_of):
    """Return the names of all rows as parameters of a test, marked where only `--all` runs them."""
    usual = few(rows, **few_of)
    return [pytest.param(name, marks=() if name in usual else ONLY_ALL) for name in rows]


# ------------------------------------------------------------------------------ of the certificate

# Eight ranks that share two cores take a third of the time: of the models in floating point they
# are for --all, and products of three axes are those of the exact model, which is a small one.
NARROW = 4


@functools.cache
def rows_of(tier):
    """Return (name of a model, case) for all cases of a tier that run here."""
    rows = [(name, case) for name in models_of_tier(tier) for case in cases_of_model(name)]
    return [(name, case) for name, case in rows if cases.runs_here(case)]


def held_by(row):
    """Return what a row chooses: what its model has is chosen as what its case has is.

    A decoder with experts and adapters shows experts in a layout, and adapters in it.
    """
    model, case = row
    has = re.split(r",? (?:with|and|in|by) ", model)
    return choices_of_case(case) | {*(has[1:] or has)}


def seconds_of(row):
    """Return about what a row costs: ranks, in which compiling takes most, and DTensor much."""
    layout, compiled = row[1].layout, row[1].compiled
    return layout.world * (1 + (layout.tp > 1) + 4 * compiled) / (1 + (layout.pp > 1))


def pairs_of_rows(rows):
    """Return few rows of the certificate that hold every pair of choices."""
    return covering(rows, choices=held_by, cost=seconds_of)


def narrow_pairs_of(rows):
    """Return few rows on few ranks."""
    return pairs_of_rows([row for row in rows if row[1].world <= NARROW])


def as_here(row):
    """Return the choices of a row of the certificate by the names of whole_step.Layout."""
    names = {"tied decoder": "tied = True", "dropout": "dropout = 0.3"}
    names |= {"reshard_after_forward = False": "reshard = False"}
    return frozenset(names.get(choice, choice) for choice in held_by(row) - {"decoder"})
