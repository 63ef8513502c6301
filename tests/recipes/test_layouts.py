"""In every layout a recipe prints the numbers of one process, and goes on from any other layout."""

import functools

import pytest
import recipe_runs
from recipe_runs import assert_equal_runs, column, events, here, lines, load, refusal, several

from trainkit import schedules
from trainkit.parallel.check_layout import passes_to_itself
from trainkit.tools.testing import run_ranks

SMALL = [*recipe_runs.SMALL.split(), "--rows", 8, "--save-every", 3]
V = "zero_bubble_v" if passes_to_itself() else "interleaved_zero_bubble"  # what this torch can run
KEPT = f"--schedule {V} --no-reshard-after-forward"
DEGREES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
ALL = pytest.mark.only_all
SP = "--ring 2 --ulysses 2 --fold-sp ring"
LAYOUTS = [
    pytest.param(4, [f"--pp 2 --ring 2 --cpu-offload {KEPT}"], id="4"),
    # Both dimensions of a sequence, with another way to fold, are in long_context.py below.
    pytest.param(4, [SP, f"--pp 2 --dp-shard 2 --cpu-offload {KEPT}"], id="4, data", marks=ALL),
    # What these choose is chosen above, or below where a run goes on, or has replicas
    # (test_pretrain.py); any two of it stand beside each other in the certificate.
    pytest.param(
        2,
        ["--cpu-offload", "--pp 2", "--tp 2", "--ring 2", "--ulysses 2 --fold-sp none"],
        id="2, alone",
        marks=ALL,
    ),
    pytest.param(4, ["--pp 2 --tp 2", "--tp 2 --dp-replicate 2"], id="4, pairs", marks=ALL),
]
LAYERS = 4  # as many as this schedule has stages


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a directory with a little text in it, below 7 others."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        words = [f"word{(i * j) % 17} = {j}" for j in range(3 + i % 7)]
        (folder / str(i % 7)).mkdir(exist_ok=True)
        (folder / str(i % 7) / f"{i}.txt").write_text("\n".join(words))
    return folder


def flags_of(out, text, steps, layout=""):
    given = ["--out", out, "--data", text, "--steps", steps, "--sample", 3]
    return [*given, *SMALL, *layout.split()]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """Return the directory of a run of 2 steps on one process, its sample, and all it printed."""
    out = tmp_path_factory.mktemp("alone")
    code, printed = here(flags_of(out, text, 2), layers=LAYERS)
    assert code == 0, printed
    return out, written(printed), printed


def began(printed):
    """Return the line that says what a run is: its parameters, where it is, and its layout."""
    return next(line for line in printed.splitlines() if " parameters, " in line)


def written(printed):
    """Return what the model wrote at the end of a run."""
    before, _, _ = printed.partition("\nthe run is in")
    return before.rpartition("held out: ")[2].partition("\n")[2]


@pytest.mark.parametrize(("world", "layouts"), LAYOUTS)
def test_every_layout_prints_the_numbers_of_one_process(world, layouts, text, alone, tmp_path):
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    runs = [flags_of(out, text, 2, layout) for out, layout in zip(outs, layouts, strict=True)]
    start = functools.partial(several, layers=LAYERS)
    said, *others = run_ranks(start, world, runs, timeout=170)
    for (code, printed), out, layout in zip(said, outs, layouts, strict=True):
        assert code == 0, f"{layout}: {printed}"
        assert_equal_runs(out, alone[0], about=layout)
        for a, b in zip(events(out, "evaluation"), events(alone[0], "evaluation"), strict=True):
            loss = pytest.approx(b["eval/loss"], rel=1e-5)
            assert (a["eval/tokens"], a["eval/loss"]) == (b["eval/tokens"], loss)
        assert written(printed) == alone[1], layout
        assert began(printed).startswith(f"{began(alone[2]).removesuffix('1 rank')}{world} ranks: ")
        flags = [flag[2:].replace("-", "_") for flag in layout.split()]
        for flag, count in zip(flags, layout.split()[1:], strict=False):
            assert flag not in DEGREES or f"{flag} {count}" in began(printed), layout
    assert all(done == (0, "") for rank in others for done in rank)


@pytest.fixture(scope="module")
def moved(text, tmp_path_factory):
    """Return the directory of a run of two steps, each in a layout of its own; what it printed."""
    out, layouts = tmp_path_factory.mktemp("moved"), ["--pp 2", "--tp 2 --schedule gpipe"]
    runs = [flags_of(out, text, step, layout) for step, layout in enumerate(layouts, 1)]
    start = functools.partial(several, layers=LAYERS)
    done = run_ranks(start, 2, runs, timeout=170)[0]
    assert [code for code, _ in done] == [0, 0], done
    return out, [printed for _, printed in done]


def test_a_run_goes_on_in_other_layouts_with_the_same_batches(alone, moved):
    assert [event["step"] for event in events(moved[0], "resume")] == [0, 1]
    assert_equal_runs(moved[0], alone[0], about="pp, then tp")


def test_no_peak_of_memory_is_below_what_there_was_and_that_of_each_rank_is_known(moved):
    out, printed = moved
    for line in lines(out):
        assert line["memory_peak"] >= line["memory"]
    found = events(out, "memory")
    assert [(event["step"], len(event["memory_peak"])) for event in found] == [(1, 2), (2, 2)]
    for event, line, said in zip(found, lines(out), printed, strict=True):
        peaks = event["memory_peak"]
        assert max(peaks) == line["memory_peak"]
        assert line["memory_rank"] == peaks.index(max(peaks))
        assert f"on rank {line['memory_rank']}" in said


# ------------------------------------------------------------------------------- long_context.py

LONG = ["--row-length", 128, "--rows", 4, "--warmup", 2, "--schedule-steps", 8]


def long_flags(out, text, steps, layout=""):
    return ["--out", out, "--data", text, "--steps", steps, *LONG, *layout.split()]


def test_long_context_is_the_same_over_ring_and_ulysses_and_after_a_stop(text, tmp_path):
    code, printed = here(long_flags(tmp_path / "alone", text, 3), "long_context")
    assert code == 0, printed
    assert "7 documents of" in printed
    both, other = "--ring 2", "--ulysses 2 --fold-sp none"
    runs = [
        long_flags(tmp_path / "run", text, 2, both),
        long_flags(tmp_path / "run", text, 3, other),
    ]
    assert [code for code, _ in run_ranks(several, 2, runs, "long_context")[0]] == [0, 0]
    assert_equal_runs(tmp_path / "run", tmp_path / "alone", about=f"{both}, then {other}")
    losses = column(tmp_path / "run", "loss")
    assert losses[-1] < losses[0]
    rate = schedules.cosine(load("long_context").Config().optim.lr, warmup=2, total=8)
    assert column(tmp_path / "run", "lr") == [rate(step) for step in range(3)]


def test_long_context_refuses_a_directory_without_text_and_says_when_a_run_is_complete(
    text, tmp_path
):
    (tmp_path / "empty").mkdir()
    code, what = refusal("long_context", *long_flags(tmp_path / "none", tmp_path / "empty", 1))
    assert code == 65
    assert "empty: there is no file of text or records" in what
    for said in ("its loss is plotted in", "is complete at step 1"):
        code, printed = here(long_flags(tmp_path / "run", text, 1), "long_context")
        assert code == 0, printed
        assert said in printed


def test_the_documents_of_long_context_are_long():
    recipe = load("long_context")
    tokenizer = recipe.tk.tokenizers.open_tokenizer("bytes")
    corpus = recipe.open_documents(recipe.Config(), tokenizer)
    lengths = dict(zip(corpus.names, corpus.lengths.tolist(), strict=True))
    assert lengths["asyncio"] > 400_000
    in_long = sum(n for n in lengths.values() if n >= recipe.Config().batch.row_length)
    assert in_long > 0.95 * sum(lengths.values())
