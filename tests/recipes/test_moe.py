"""recipes/moe.py: it trains balanced experts, in every layout, and goes on to the same bits."""

import functools
import json
import random

import attrs
import pytest
import recipe_runs
import torch
from recipe_runs import (
    assert_equal_runs,
    column,
    events,
    lines,
    load,
    refusal,
    with_layers,
    with_short_texts,
    without_pictures,
)

from trainkit import checkpoint, hub, models
from trainkit.mesh import solo_parallel
from trainkit.models import make_decoder_config
from trainkit.models.experts import update_expert_bias, update_routers_
from trainkit.run.sinks import read_jsonl
from trainkit.tools.testing import run_ranks
from trainkit.types import TrainState
from trainkit.weights.checkpoint import save_checkpoint

LAYERS = 3  # two of them with experts
here = functools.partial(recipe_runs.here, layers=LAYERS)
several = functools.partial(recipe_runs.several, layers=LAYERS)
SMALL = [
    *recipe_runs.SMALL.split(),
    "--rows",
    4,
    "--schedule-steps",
    6,
    "--save-every",
    3,
    "--sample",
    8,
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a directory with a little text in it."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        words = [f"word{(i * j) % 17} = {j}" for j in range(3 + i % 7)]
        (folder / f"{i}.txt").write_text("\n".join(words))
    return folder


def flags_of(out, text, steps, *flags):
    return ["--out", out, "--data", text, "--steps", steps, *SMALL, *flags]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Return the directory of a run of 6 steps, and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, printed = here(flags_of(out, text, 6), "moe", drawn=True)
    assert code == 0, printed
    return out, printed


def test_every_line_holds_the_load_of_each_expert_and_what_it_comes_to(whole):
    for line in lines(whole[0]):
        table = line["load"]
        assert (len(table), {len(row) for row in table}) == (2, {8})
        assert {sum(row) for row in table} == {2 * line["tokens_processed"]}  # no padding
        each = [max(row) / (sum(row) / 8) for row in table]
        assert [line[f"load_over_mean/{i}"] for i in range(2)] == pytest.approx(each)
        assert line["load_over_mean"] == max(line[f"load_over_mean/{i}"] for i in range(2))
        assert line["load_entropy"] == min(line[f"load_entropy/{i}"] for i in range(2))
        assert "load/count" not in line
    losses = column(whole[0], "loss")
    assert losses[-1] < losses[0] - 0.5


def test_biases_move_once_a_step_by_the_loads_and_the_rate_of_the_step(whole):
    recipe = load("moe")
    rate = recipe.Config().bias_rate
    rate_at = recipe.tk.schedules.warmup_stable_decay(rate, warmup=0, total=6, decay=0.4)
    assert [rate_at(step) / rate for step in range(6)] == [1, 1, 1, 1, 1, 0.5]
    biases = torch.zeros(2, 8)
    for step, line in enumerate(lines(whole[0])):
        biases = update_expert_bias(biases, torch.tensor(line["load"]), rate=rate_at(step))
        found = [line[f"expert_bias/{i}"] for i in range(2)]
        assert found == biases.abs().amax(-1).tolist()
        assert line["expert_bias"] == max(found)


def test_it_shows_its_balance_a_sample_a_held_out_loss_and_a_picture(whole):
    out, printed = whole
    assert f"load {lines(out)[-1]['load_over_mean']:.2f}  left" in printed
    assert "\ndef " in printed
    (found,) = events(out, "evaluation")
    assert found["eval/loss"] > 0
    assert (out / "load.png").read_bytes().startswith(b"\x89PNG")


def test_generate_writes_text_from_its_checkpoint(whole):
    code, printed = here(["--run", whole[0], "--prompt", "word3", "--tokens", 5], "generate")
    assert code == 0, printed
    assert printed.startswith("word3")


def test_stopped_it_goes_on_to_the_same_bits(whole, text, tmp_path):
    for steps in (2, 6):
        assert here(flags_of(tmp_path, text, steps), "moe")[0] == 0
    for name in ("loss_hex", "grad_norm_hex", "load", "expert_bias"):
        assert column(tmp_path, name) == column(whole[0], name), name
    assert (tmp_path / "final.json").read_text() == (whole[0] / "final.json").read_text()


ALL = pytest.mark.only_all
SP = "--ring 2 --ulysses 2 --fold-sp ring"
LAYOUTS = [
    pytest.param(2, ["--tp 2", "--ring 2 --ep 2"], id="2"),
    # Any two of these choices stand beside each other in the certificate.
    pytest.param(2, ["", "--ep 2", "--pp 2"], id="2, data and stages", marks=ALL),
    pytest.param(
        4, ["--pp 2 --tp 2", "--tp 2 --ep 2", SP, f"{SP} --ep 2"], id="4, pairs", marks=ALL
    ),
]


@pytest.mark.parametrize(("world", "layouts"), LAYOUTS)
def test_every_layout_prints_the_numbers_of_one_process(world, layouts, whole, text, tmp_path):
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    runs = [
        flags_of(out, text, 2, *layout.split(), "--sample", 2)
        for out, layout in zip(outs, layouts, strict=True)
    ]
    said = run_ranks(several, world, runs, "moe", timeout=170)[0]
    for (code, printed), out, layout in zip(said, outs, layouts, strict=True):
        assert code == 0, f"{layout}: {printed}"
        assert_equal_runs(out, whole[0], steps=2, about=layout)
        for name in ("load", "expert_bias"):
            assert column(out, name) == column(whole[0], name)[:2], (layout, name)


def moving_with_every_microbatch(make_train_step):
    """Return a recipe's `make_train_step` that, by mistake, moves biases with every microbatch."""

    def make(cfg, ps, stages, optimizer, forward_backward):
        def each(microbatches, *, denominator):
            parts = []
            for one in microbatches:
                parts.append(forward_backward([one], denominator=denominator))
                load = parts[-1]["load"]
                if len(microbatches) > 1:
                    update_routers_(stages, load, rate=cfg.bias_rate / len(microbatches))
            return {name: sum(part[name] for part in parts) for name in parts[0]}

        return make_train_step(cfg, ps, stages, optimizer, each)

    return make


@pytest.mark.parametrize(
    ("rows", "mistaken"), [pytest.param(4, False, marks=ALL), (1, False), (2, True)]
)
def test_a_step_in_one_two_or_four_microbatches_is_the_same_unless_biases_move_in_it(
    rows, mistaken, whole, text, tmp_path
):
    recipe = load("moe")
    if mistaken:
        recipe.make_train_step = moving_with_every_microbatch(recipe.make_train_step)
    flags = [*flags_of(tmp_path, text, 3, "--eval-every", 0), "--microbatch", rows]
    with with_layers(LAYERS), without_pictures():
        assert recipe.main([str(flag) for flag in flags]) == 0
    for name in ("load", "expert_bias"):
        assert (column(tmp_path, name) != column(whole[0], name)[:3]) == mistaken, name
    if not mistaken:
        assert_equal_runs(tmp_path, whole[0], steps=3)  # which has 2 rows in a microbatch


def test_the_auxiliary_loss_takes_the_place_of_the_bias(whole, text, tmp_path):
    code, printed = here(flags_of(tmp_path, text, 2, "--balance", "loss"), "moe")
    assert code == 0, printed
    assert set(column(tmp_path, "expert_bias")) == {0.0}
    ours, others = column(tmp_path, "loss"), column(whole[0], "loss")
    assert ours[0] == others[0]  # the first loss reported is that of the text alone
    assert ours[1] != others[1]


def make_folder(home, name, config):
    """Export a new decoder; return it and the folder."""
    model = models.build_decoder(config, seed=5)
    optimizer, facts = torch.optim.SGD(model.parameters()), {"model": attrs.asdict(config)}
    run = save_checkpoint(
        home / f"{name}-run", TrainState(), [model], optimizer, solo_parallel(), facts=facts
    )
    files = hub.make_tokenizer_files("bytes")
    hub.export_folder(run, home / name, context=64, files=files)
    return model, home / name


def test_a_folder_of_a_mixture_is_gone_on_from_and_one_without_experts_is_refused(text, tmp_path):
    experts = models.Experts(count=4, top_k=2, width=32, scores="softmax")
    dense = make_decoder_config("tiny", layers=2, vocab_size=272)
    model, mixture = make_folder(tmp_path, "mix", attrs.evolve(dense, experts=experts))
    begun = flags_of(tmp_path / "out", text, 1, "--init", mixture, "--lr", 1e-30)
    code, printed = here(begun, "moe")
    assert code == 0, printed
    assert len(lines(tmp_path / "out")[0]["load"][0]) == 4
    assert lines(tmp_path / "out")[0]["balance"] > 0  # this family has no biases to move
    again = models.build_decoder(model.config, seed=6)
    checkpoint.load_weights(checkpoint.find_checkpoint(tmp_path / "out"), [again])
    for (name, p), its in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, its), name
    code, printed = here([*begun, "--steps", 2], "moe")
    assert (code, column(tmp_path / "out", "step")) == (0, [1, 2]), printed
    _, folder = make_folder(tmp_path, "dense", dense)
    code, what = refusal("moe", *flags_of(tmp_path / "no", text, 1, "--init", folder))
    assert (code, "has no experts, and this recipe trains decoders with" in what) == (64, True), (
        what
    )


def test_a_run_in_the_place_of_a_folder_is_refused_with_the_command_that_makes_one(text, tmp_path):
    (tmp_path / "base" / "checkpoints").mkdir(parents=True)
    flags = flags_of(tmp_path / "no", text, 1, "--init", tmp_path / "base", "--tokenizer", "bytes")
    code, said = here(flags, "moe")
    assert (code, "is a run, not a" in said, "trainkit export" in said) == (64, True, True), said


def test_experts_that_cannot_be_are_refused(text, tmp_path):
    code, what = refusal("moe", *flags_of(tmp_path, text, 1, "--top-k", 9))
    assert (code, "9 of 8 experts cannot be chosen" in what) == (64, True), what
    code, what = refusal("moe", *flags_of(tmp_path, text, 1, "--balance", "hope"))
    assert (code, "balance" in what) == (64, True), what


def tilt(router):
    """Let two of the experts have the tokens on one side of a plane, and two those on the other."""
    order = torch.linspace(-1, 1, len(router.weight))
    with torch.no_grad():
        router.weight.copy_(order[:, None] * router.weight[0])
        if router.bias is not None:
            router.bias[0] += 0.1


def made_up(folder):
    """Write a text of made-up words, of which a few are frequent, and return its directory."""
    dice = random.Random(0)  # no text of the house: each of its changes would be another test
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(dice.choices(letters, k=dice.randint(2, 9))) for _ in range(300)]
    weights = [1 / (i + 1) for i in range(300)]
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(dice.choices(words, weights, k=150)))
    return folder


def worst_loads(monkeypatch, out, *flags, steps):
    """Return each step's largest load over the mean in a run of the recipe with tilted routers.

    Its model is a smaller one, with two layers of experts.
    """
    recipe = load("moe")
    build = recipe.build
    config = functools.partial(make_decoder_config, layers=3, width=64, mlp_width=192)

    def build_tilted(*given):
        stages, optimizer = build(*given)
        for name, router in stages[0].named_modules():
            if name.endswith("router"):
                tilt(router)
        return stages, optimizer

    recipe.build = build_tilted
    monkeypatch.setattr("trainkit.models.make_decoder_config", config)
    size = ["--rows", 8, "--microbatch", 8, "--row-length", 64, "--schedule-steps", steps]
    flags = [*flags_of(out, made_up(out.parent / "text"), steps), *size, *flags]
    with without_pictures(), with_short_texts():
        assert recipe.main([str(x) for x in [*flags, "--save-every", 999, "--eval-every", 0]]) == 0
    assert json.loads((out / "final.json").read_text())["step"] == steps
    return [line["load_over_mean"] for line in read_jsonl(out / "metrics.jsonl")]


WEIGHT = ["--loss-weight", 0.05]  # of the loss of balance: five times the usual one


# The bias alone balances a layer in models/test_experts.py, and is that of the line above.
@pytest.mark.parametrize(
    ("balance", "steps"), [pytest.param(["bias"], 100, marks=ALL), (["loss", *WEIGHT], 50)]
)
def test_experts_of_an_unbalanced_router_end_balanced(balance, steps, monkeypatch, tmp_path):
    worst = worst_loads(monkeypatch, tmp_path / "run", "--balance", *balance, steps=steps)
    assert max(worst[:5]) > 3
    assert max(worst[-5:]) <= 2


@pytest.mark.only_all
def test_experts_of_an_unbalanced_router_stay_so_without_either(monkeypatch, tmp_path):
    none = ["--balance", "loss", "--loss-weight", 0]
    worst = worst_loads(monkeypatch, tmp_path / "run", *none, steps=50)
    assert min(worst) > 2.5
