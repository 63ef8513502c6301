"""Any layout gives the numbers of one process; and what is wrong does not."""

import functools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from covering import covering, pairs_of
from every_pair import NARROW, held_by, pairs_of_rows, rows_of
from hypothesis import given

from trainkit.parallel.check_layout import passes_to_itself
from trainkit.tools.testing.builtin import TIMEOUT, builtin_subjects, exact_cases, models_of_tier
from trainkit.tools.testing.cases import LayoutCase, make_default_cases, runs_here
from trainkit.tools.testing.certificate import format_text
from trainkit.tools.testing.certify import certify_together
from trainkit.types import Layout


def table_of(certificate):
    return "\n".join([format_text(certificate), *(row.traceback for row in certificate.red)])


# Parts of a length that three ranks do not share evenly: no two choices, but a case of its own.
UNEVEN = LayoutCase(Layout(dp_shard=3))


def every_pair(rows):
    """Return few rows that hold every pair of choices, and parts of three."""
    picked = pairs_of_rows(rows)
    return [*picked, *(row for row in rows if row[1] == UNEVEN and row not in picked)]


def every_narrow_pair(rows):
    return every_pair([row for row in rows if row[1].world <= NARROW])


def all_others(rows):
    picked = every_pair(rows)
    return [row for row in rows if row not in picked]


def all_wider(rows):
    picked = every_narrow_pair(rows)
    return [row for row in rows if row not in picked]


FEW = [
    LayoutCase(Layout(tp=2)),
    LayoutCase(Layout(ring=2, fold_sp="none")),
    LayoutCase(Layout(dp_shard=2)),
]


def few_of_the_decoder(_rows):
    return [("decoder", case) for case in FEW]


ALL = pytest.mark.only_all
PICKS = {"fp64": every_narrow_pair, "exact": every_pair}
PICKS |= dict.fromkeys(("fp32", "bf16"), few_of_the_decoder)
OTHERS = {"fp64": all_wider, "exact": all_others}
WHICH = ["usual", pytest.param("others", marks=ALL)]


@functools.cache
def certificates(which):
    """Certify rows of every tier in one start for each number of ranks; return them by tier.

    The usual ones take one step, but two of the exact model, so that what a step leaves shows.
    Others with more steps are in test_layouts.py and in tests/parallel.
    """
    picks = PICKS if which == "usual" else OTHERS
    steps = {tier: 2 if tier == "exact" or which == "others" else 1 for tier in picks}
    subjects = [
        subject
        for tier, pick in picks.items()
        for subject in builtin_subjects(tier, chosen=runs_here, pick=pick, steps=steps[tier])
    ]
    found = certify_together(subjects, timeout=TIMEOUT)
    return {tier: [one for one in found if one.tier.name == tier] for tier in picks}


@pytest.mark.parametrize("which", WHICH)
def test_every_layout_gives_the_numbers_of_one_process_in_fp64(which):
    found = certificates(which)["fp64"]
    if which == "usual":
        titles = {certificate.title for certificate in found}
        assert titles == {*models_of_tier("fp64")} or not passes_to_itself()
    for certificate in found:
        assert certificate.ok, table_of(certificate)


@pytest.mark.parametrize("which", WHICH)
def test_the_table_of_the_page_is_the_one_that_is_made_here(which):
    text = (Path(__file__).parents[2] / "docs" / "certificate.md").read_text()
    table = text.partition("## decoder, fp64\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    cells = {line[0]: line[1:] for line in lines[2:]}
    assert set(cells) == {"packed documents", *(case.name for case in make_default_cases())}
    (rows,) = [c.rows for c in certificates(which)["fp64"] if c.title == "decoder"]
    pick = (PICKS if which == "usual" else OTHERS)["fp64"]
    picked = [case.name for model, case in pick(rows_of("fp64")) if model == "decoder"]
    assert sorted(row.layout for row in rows) == sorted(picked)
    for row in rows:
        world, *numbers = cells[row.layout]
        assert int(world) == row.world
        assert all(float(number) < 1e-13 for number in numbers[:3]), row.layout


@pytest.mark.parametrize("which", WHICH)
def test_integers_are_the_same_bit_for_bit_in_every_layout(which):
    (certificate,) = certificates(which)["exact"]
    assert certificate.ok, table_of(certificate)


def of_here(cases):
    return list(filter(runs_here, cases))


@pytest.mark.parametrize(("tier", "widest"), [("fp64", NARROW), ("exact", 8)])
def test_the_rows_that_run_hold_every_pair_of_choices(tier, widest):
    rows = rows_of(tier)
    chosen, others = PICKS[tier](rows), OTHERS[tier](rows)
    assert sorted(map(name_of, (*chosen, *others))) == sorted(map(name_of, rows))
    requested = [row for row in rows if row[1].world <= widest]
    assert pairs_held(chosen) == pairs_held(requested)
    assert {x for row in chosen for x in held_by(row)} == {x for row in rows for x in held_by(row)}
    assert {row for row in rows if row[1] == UNEVEN} <= {*chosen}
    # No row is there for nothing, and without it a pair is missed.
    held = {name_of(row): pairs_of(held_by(row)) for row in chosen}
    for row in map(name_of, pairs_of_rows(requested)):
        assert held[row] - set().union(*(held[other] for other in held if other != row))


def name_of(row):
    return row[0], row[1].name


def test_three_axes_at_once_run_in_the_exact_model():
    products = [case for _, case in every_pair(rows_of("exact")) if case.world > NARROW]
    assert {name for case in products for name, n in case.layout.degrees.items() if n > 1} >= {
        *("pp", "dp_replicate", "dp_shard", "ring", "tp")
    }


@given(st.lists(st.frozensets(st.integers(0, 6), max_size=4), max_size=30))
def test_a_cover_of_any_rows_holds_every_pair_of_them(rows):
    chosen = covering(rows, choices=lambda row: row, cost=lambda row: 1 + len(row))
    held = [set().union(*map(pairs_of, some)) for some in (chosen, rows)]
    assert held[0] == held[1]
    for index in range(len(chosen)):  # and none is there for nothing
        assert set().union(*map(pairs_of, chosen[:index] + chosen[index + 1 :])) < held[1]


def pairs_held(rows):
    return {pair for row in rows for pair in pairs_of(held_by(row))}


@pytest.mark.parametrize("tier", ["fp32", "bf16"])
def test_rounding_stays_within_the_stated_bounds(tier):
    (certificate,) = certificates("usual")[tier]
    assert certificate.ok, table_of(certificate)
    worst = max(max(row.loss, row.grad_norm, row.parameters) for row in certificate.rows)
    assert worst > 1e-9  # it is rounding that is bounded here, not nothing


def test_the_layouts_cover_every_dimension_and_every_choice():
    cases = make_default_cases()
    assert len({case.name for case in cases}) == len(cases) >= 40
    assert {case.world for case in of_here(cases)} == {1, 2, 3, 4, 6, 8}
    assert len(of_here(exact_cases())) >= 15
    layouts = [case.layout for case in cases]
    for name in Layout().axes["world"]:
        assert any(getattr(layout, name) > 1 for layout in layouts)
    choices = ["fold_sp", "schedule", "reduce", "cpu_offload"]
    assert all(len({getattr(layout, name) for layout in layouts}) > 1 for name in choices)
    choices = ["rows_per_microbatch", "recompute", "compiled"]
    assert all(len({getattr(case, name) for case in cases}) > 1 for name in choices)
    named = {case.name.partition(",")[0] for case in cases}
    assert {"pp2 x dp2 x tp2", "dp2 x ring2 x tp2", "dp2 x ring2 x ulysses2"} <= named
    assert "pp2 x replica2 x dp2" in named
    compiled = [case.layout for case in cases if case.compiled]
    for name in Layout().axes["world"]:
        assert any(getattr(layout, name) > 1 for layout in compiled)
    assert any(layout.dp_shard == layout.tp == 2 for layout in compiled)
    assert any(layout.pp == layout.ring == layout.tp == 2 for layout in compiled)
