"""What does not fit together is refused in one sentence, before any process group is opened."""

import os
import subprocess
import sys
from functools import partial

import attrs
import pytest
import recipe_runs
from recipe_runs import error_of, refusal

from trainkit.models import Experts, Latents, list_decoder_sizes, make_decoder_config
from trainkit.parallel import check_layout
from trainkit.parallel.check_layout import find_problems
from trainkit.types import BatchShape, ConfigError, Layout

TINY = make_decoder_config("tiny")
GROUPED = attrs.evolve(TINY, kv_heads=2)
LATENT = attrs.evolve(
    TINY, heads=6, kv_heads=6, latents=Latents(kv_rank=4, plain=4, rotary=2, values=5)
)
ROWS = BatchShape(row_length=256, rows=8, microbatch=1, multiple_of=8)


def check(model=TINY, *, rows=ROWS, world=None, device=None, **fields):
    layout = Layout(**fields)
    check_layout(layout, model, rows, world=world or layout.world, device=device)


REFUSED = [
    (partial(check, tp=3), "4 heads do not divide by tp = 3; set tp to 1, 2 or 4"),
    (
        partial(check, GROUPED, tp=4),
        "2 key and value heads do not divide by tp = 4; set tp to 1 or 2",
    ),
    (
        partial(check, attrs.evolve(TINY, mlp_width=385), tp=2),
        "385 columns of the MLP.* by tp = 2; set",
    ),
    (
        partial(check, attrs.evolve(TINY, vocab_size=271), tp=2),
        "vocabulary of 271 .* tp = 2; round it up",
    ),
    (partial(check, ulysses=8), "4 heads do not divide by ulysses = 8; set ulysses to 1, 2 or 4"),
    (partial(check, tp=2, ulysses=4), "2 heads of each of tp = 2 ranks .* ulysses = 4; set"),
    (
        partial(check, attrs.evolve(TINY, heads=12, kv_heads=6, head_dim=8), ulysses=4),
        "6 key and value heads can neither be split nor repeated over ulysses = 4",
    ),
    (partial(check, LATENT, tp=4), "6 heads do not divide by tp = 4; set tp to 1 or 2"),
    (
        partial(check, LATENT, ulysses=4),
        "6 heads do not divide by ulysses = 4; set ulysses to 1, 2, 3 or",
    ),
    (partial(check, ring=8), "16 equal parts, and multiple_of = 8 .* set multiple_of to 16"),
    (
        partial(check, rows=attrs.evolve(ROWS, row_length=254), ring=2),
        "row of 254 tokens .* ring = 2.* set row_length to 256",
    ),
    (
        partial(check, rows=attrs.evolve(ROWS, row_length=260), ring=2, ulysses=2, tp=2),
        "row of 260 .* ring = 2, ulysses = 2 and tp = 2, .* multiple of 8; set row_length to 264",
    ),
    (
        partial(check, rows=attrs.evolve(ROWS, row_length=252)),
        "252 .* no multiple of multiple_of = 8, .* row_length to 256",
    ),
    (
        partial(check, rows=attrs.evolve(ROWS, row_length=255), tp=2),
        "row of 255 .* multiple of 2; set row_length to 256",
    ),
    (
        partial(check, attrs.evolve(TINY, positions=128)),
        "a document may fill a row of 256 tokens, and the model has 128 learned positions",
    ),
    (partial(check, dp_shard=9), "8 rows for dp_replicate x dp_shard = 9 .* set rows to 9"),
    (partial(check, pp=2, schedule="1f1f"), "no pipeline schedule '1f1f'; there are gpipe, 1f1b"),
    (partial(check, schedule="1f1f"), "no pipeline schedule '1f1f'"),
    (
        partial(check, pp=2, dp_shard=2, schedule="interleaved_zero_bubble"),
        "'interleaved_zero_bubble' .* on these 2 ranks; set reshard_after_forward to False",
    ),
    (
        partial(check, pp=2, ring=2, dp_shard=1, schedule="interleaved_zero_bubble"),
        "on these 2 ranks",
    ),
    (partial(check, pp=8), "4 layers are too few for 8 stages .*; lower pp"),
    (
        partial(check, pp=4, schedule="interleaved_1f1b"),
        "4 layers are too few for 8 stages .*2 of schedule = 'interleaved_1f1b' on each rank",
    ),
    (
        partial(check, rows=attrs.evolve(ROWS, microbatch=4), pp=4),
        "rows = 8 .* make 2 in a step, .* needs at least 4 for 4 stages; set rows to 16",
    ),
    (
        partial(check, rows=attrs.evolve(ROWS, microbatch=2, rows=6), pp=2, dp_shard=3),
        "on 3 data-parallel ranks make 1 in a step, .* needs at least 2 .*; set rows to 12",
    ),
    (
        partial(check, rows=attrs.evolve(ROWS, rows=5), pp=2, schedule="interleaved_1f1b"),
        "make 5 in a step, .*'interleaved_1f1b' needs a multiple of 2.* set rows to 6",
    ),
    (partial(check, ep=2, dp_shard=2), "no experts to shard over ep = 2; set ep to 1"),
    (
        partial(
            check, attrs.evolve(TINY, experts=Experts(count=6, top_k=2, width=8)), ep=4, dp_shard=4
        ),
        "6 experts do not divide by ep = 4; set ep to 1, 2, 3 or 6",
    ),
    (partial(check, dp_shard=2, ep_adjacent=False), "where the ranks of ep are, and ep = 1"),
    (
        partial(check, dp_shard=8, reshard_over=3),
        "reshard_over = 3 is no part of the 8 ranks .* set it to 2 or 4 or 0 for all of them",
    ),
    (partial(check, dp_shard=2, reshard_over=2), "no part of the 2 ranks .* set it to 0 for all"),
    (
        partial(check, dp_shard=4, reshard_over=2, reshard_after_forward=False),
        "reshard_over = 2 says where .* leave one of the two out",
    ),
    (partial(check, pp=0), "pp must be above 0, got 0"),
    (partial(check, fold_sp="some"), "fold_sp must be one of 'all', 'ring', 'ulysses', 'none'"),
]


@pytest.mark.case("S5", "S3", "G4")
@pytest.mark.parametrize(
    ("check_case", "message"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_with_both_numbers_and_a_way_out(check_case, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        check_case()
    assert "\n" not in str(refusal.value)
    assert refusal.value.code == 64


@pytest.mark.case("G3")
def test_a_product_that_is_not_the_world_is_refused():
    with pytest.raises(ConfigError, match=r"multiply to 4 .* but there are 8 processes"):
        check(world=8, dp_shard=1, tp=4)


FITTING = [
    *(partial(check, tp=n) for n in (2, 4)),
    *(partial(check, pp=n) for n in (2, 4)),
    *(partial(check, ulysses=n) for n in (2, 4)),
    *(partial(check, ring=n) for n in (2, 4)),
    partial(check, tp=2, ulysses=2, ring=2),
    partial(check, pp=2, tp=2, dp_replicate=2, dp_shard=2),
    partial(check, ulysses=4, dp_shard=8),
    partial(check, reshard_over=4, dp_shard=2, ring=4),
]


@pytest.mark.parametrize("check_case", FITTING, ids=lambda case: str(case.keywords))
def test_what_fits_passes(check_case):
    check_case()


def test_the_schedules_that_split_the_backward_pass_pass_where_nothing_is_freed():
    check(pp=2, dp_shard=2, schedule="interleaved_zero_bubble", reshard_after_forward=False)
    check(pp=2, ring=2, schedule="interleaved_zero_bubble", fold_sp="none")


def test_more_key_heads_than_ranks_and_fewer_both_fit_ulysses():
    check(GROUPED, ulysses=4)
    check(GROUPED, ulysses=2)


@pytest.mark.parametrize("name", list_decoder_sizes())
def test_every_size_fits_2_and_4_tensor_ranks(name):
    for tp in (2, 4):
        check(make_decoder_config(name), tp=tp)


def test_a_v_schedule_is_refused_where_gloo_cannot_send_to_itself(monkeypatch):
    monkeypatch.setattr(
        sys.modules["trainkit.parallel.check_layout"], "passes_to_itself", lambda: True
    )
    check(pp=2, schedule="dual_pipe_v", device="cpu")
    monkeypatch.setattr(
        sys.modules["trainkit.parallel.check_layout"], "passes_to_itself", lambda: False
    )
    with pytest.raises(ConfigError, match=r"cannot run .* on CPUs.*2\.12 or later"):
        check(pp=2, schedule="dual_pipe_v", device="cpu")
    check(pp=2, schedule="dual_pipe_v", device="cuda")  # a plan for another machine


def test_all_that_does_not_fit_is_listed_and_raised_as_one():
    layout, rows = Layout(pp=8, tp=3), BatchShape(row_length=256, rows=8)
    problems = find_problems(layout, TINY, rows, world=24)
    assert [problem.where for problem in problems] == ["tp", "row_length", "pp"]
    with pytest.raises(ConfigError, match=r"^4 heads do not .*; and a row of .*; and 4 layers"):
        check_layout(layout, TINY, rows, world=24)
    with pytest.raises(ConfigError, match=r"; and 4 more$") as caught:
        check_layout(layout, TINY, rows, world=24, others=problems * 3)
    assert str(caught.value).count("4 heads do not") == 3
    (problem,) = find_problems(layout, None, rows, world=24)
    assert problem.where == "row_length"
    check_layout(layout, world=24)


# ------------------------------------------------------------------------- as a new user meets it


ONE_OF_THREE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""One rank of three is started, and the port is nobody's: opening a group would wait for it."""
TP_3 = "4 heads do not divide by tp = 3; set tp to 1, 2 or 4"


@pytest.mark.only_all  # what the next one shows, as a process of its own
def test_a_recipe_refuses_a_layout_at_once_and_waits_for_nobody(tmp_path):
    recipe = str(recipe_runs.RECIPES / "pretrain.py")
    done = subprocess.run(
        [sys.executable, recipe, "--tp", "3", "--out", str(tmp_path / "run")],
        env={**os.environ, **ONE_OF_THREE},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    error = error_of(done.stderr)
    assert (done.returncode, error["code"]) == (64, 64)
    assert TP_3 in error["what"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", ["pretrain", "long_context"])
def test_every_recipe_asks_before_a_group_is_opened(recipe, tmp_path, monkeypatch):
    for name, value in ONE_OF_THREE.items():
        monkeypatch.setenv(name, value)
    for flags, message in {
        "--tp 3": TP_3,
        "--ring 3": "set multiple_of to 6",
        "--dp-shard 3 --rows 2": "set rows to 3",
        "--pp 3 --schedule dual_pipe": "no pipeline schedule 'dual_pipe'",
        "--ep 3": "no experts",
        "--pp 2": "multiply to 2",
    }.items():
        code, what = refusal(recipe, "--out", tmp_path / "run", *flags.split())
        assert (code, message in what) == (64, True), what
    assert not (tmp_path / "run").exists()
