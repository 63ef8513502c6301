"""Which rows of a family of layouts run: few that hold every pair of choices, and with --all all.

Those that only `pytest --all` runs have a mark, and are counted at the end of the tests.
"""

import math
import os

import attrs
import pytest

from trainkit.testing import covering
from trainkit.types import Layout

WITH_ALL = "TRAINKIT_ALL_ROWS"  # set by conftest.py, for workers too
ONLY_ALL = pytest.mark.only_all
SIZES = {"world", "layers", "rows", "vocab_size", "multiple_of"}  # a layout needs them: no choices


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


def few(rows):
    """Return those of {name: layout} that hold every pair of choices that any of them holds."""
    names = list(rows)
    chosen = covering(
        names, choices=lambda name: choices_of(rows[name]), cost=lambda name: 1 + rows[name].world
    )
    return {name: rows[name] for name in chosen}


def running(rows):
    """Return those of {name: layout} that run here: few, or all."""
    return rows if os.environ.get(WITH_ALL) else few(rows)


def named(rows):
    """Return the names of all rows as parameters of a test, marked where only `--all` runs them."""
    usual = few(rows)
    return [pytest.param(name, marks=() if name in usual else ONLY_ALL) for name in rows]
