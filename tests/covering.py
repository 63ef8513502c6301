"""Few rows of many that hold every pair of choices: what goes wrong nearly always takes two."""

from itertools import combinations

import attrs

from trainkit.tools.testing import LayoutCase
from trainkit.types import Layout


def choices_of(case):
    """Return the choices of a case: each degree above 1, and each field that is not the default."""
    usual, degrees = Layout(), case.layout.degrees
    chosen = {name for name, degree in degrees.items() if degree > 1}
    for record, plain in ((case.layout, usual), (case, LayoutCase())):
        fields = [name for name in attrs.fields_dict(type(record)) if name not in {*degrees}]
        values = {name: getattr(record, name) for name in fields if name != "layout"}
        chosen |= {f"{k} = {v}" for k, v in values.items() if v != getattr(plain, k)}
    return chosen


def pairs_of(choices):
    """Return every pair of some choices, and each choice alone."""
    some = list(choices)
    return {frozenset(pair) for size in (1, 2) for pair in combinations(some, size)}


def covering(rows, *, choices, cost):
    """Return few of the rows, in their order, that hold every pair of choices of any of them.

    The row that holds the most that no row before it does, for its cost, comes next; then those are
    left out which the others make needless.
    """
    held = [pairs_of(choices(row)) for row in rows]
    worth = [1 / cost(row) for row in rows]
    left, taken = set().union(*held), []
    while left:
        taken.append(max(range(len(rows)), key=lambda i: len(held[i] & left) * worth[i]))
        left -= held[taken[-1]]
    for index in sorted(taken, key=lambda i: worth[i]):
        if held[index] <= set().union(*(held[i] for i in taken if i != index)):
            taken.remove(index)
    return [rows[index] for index in sorted(taken)]
