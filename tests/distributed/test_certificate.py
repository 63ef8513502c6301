"""Any layout gives the numbers of one process; and what is wrong does not."""

from pathlib import Path

import pytest

from trainkit.testing.builtin import certify_builtin, certify_model
from trainkit.testing.cases import Case, default_cases, runs_here
from trainkit.testing.certificate import as_text
from trainkit.types import Layout


def table_of(certificate):
    return "\n".join([as_text(certificate), *(row.traceback for row in certificate.red)])


@pytest.fixture(scope="module")
def certificates():
    return certify_builtin(chosen=runs_here, steps=2)


def test_every_layout_gives_the_numbers_of_one_process_in_fp64(certificates):
    rows = [row for certificate in certificates for row in certificate.rows]
    assert len(rows) >= 40
    assert {row.world for row in rows} == {1, 2, 3, 4, 6, 8}
    assert "decoder with frozen blocks" in {certificate.title for certificate in certificates}
    for certificate in certificates:
        assert certificate.ok, table_of(certificate)


def test_the_table_of_the_readme_is_the_one_that_is_made_here(certificates):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    table = text.partition("<!-- certificate -->")[2].partition("<!-- /certificate -->")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    told = {line[0]: line[1:] for line in lines[2:]}
    (rows,) = [c.rows for c in certificates if c.title == "decoder"]
    assert {row.layout for row in rows} == {name for name in told if here_by_name(name)}
    for row in rows:
        world, *numbers = told[row.layout]
        assert int(world) == row.world
        assert all(float(number) < 1e-13 for number in numbers[:3]), row.layout


def test_integers_are_the_same_bit_for_bit_in_every_layout():
    (certificate,) = certify_builtin("exact", chosen=runs_here, steps=2)
    assert certificate.ok, table_of(certificate)
    assert len(certificate.rows) >= 15


def here_by_name(name):
    return all(runs_here(case) for case in default_cases() if case.name == name)


FEW = [
    Case(Layout(dp_shard=2)),
    Case(Layout(tp=2)),
    Case(Layout(ring=2, fold_sp="none")),
    Case(Layout(ulysses=2)),
    Case(Layout(pp=2)),
    Case(Layout(dp_replicate=2, dp_shard=2)),
]


@pytest.mark.parametrize("tier", ["fp32", "bf16"])
def test_rounding_stays_within_the_stated_bounds(tier):
    certificate = certify_model("decoder", FEW, tier=tier, steps=2)
    assert certificate.ok, table_of(certificate)
    worst = max(max(row.loss, row.grad_norm, row.parameters) for row in certificate.rows)
    assert worst > 1e-9  # it is rounding that is bounded here, not nothing


def test_the_layouts_cover_every_dimension_and_every_choice():
    cases = default_cases()
    assert len({case.name for case in cases}) == len(cases) >= 40
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
