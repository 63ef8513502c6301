"""What the pages and --help promise of --allow-change is so: each name is tried on a run."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from recipe_runs import column, events, here, loaded, refusal

from trainkit.run import set_numerics
from trainkit.run.config import make_resume_rules
from trainkit.types import Numerics

ROOT = Path(__file__).parents[2]
WRITTEN = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PAGES = [ROOT / "README.md", *WRITTEN]
TRAINING = ["distill", "finetune", "long_context", "moe", "preference", "pretrain", "reinforce"]
OTHER = {
    "lr": ["1e-3"],
    "warmup": ["3"],
    "schedule-steps": ["40"],
    "weight-decay": ["0.3"],
    "max-norm": ["0.5"],
    "optimizer": ["lion"],
    "optimizer-options": ["eps=1e-6"],
    "optimizer-groups": ["norm.* lr_scale=0.5"],
    "mean": ["0.9"],
    "linears": ["qat_int8_int4"],
    "compute": ["bf16"],
    "moments": ["bf16"],
    "reduction": ["bf16"],
    "matmul": ["high"],
}


@pytest.fixture(autouse=True)
def numerics():
    """Put back how exact this process computes, which a run with other flags sets."""
    yield
    set_numerics(Numerics())


def words(text):
    """Return the names of flags in a text, as they are written on a command line."""
    return {word.replace("_", "-") for word in re.findall(r"[a-z][a-z_-]*[a-z]|lr", text)}


def promised_on_pages():
    names = set()
    for page in PAGES:
        text = page.read_text()
        names |= set(re.findall(r"--allow-change ([a-z_-]+)", text))
        for row in re.findall(r"^\|(.*)\| refused, but for `--allow-change", text, re.MULTILINE):
            names |= words(" ".join(re.findall(r"`([^`]+)`", row)))
    # Components of one's own are no flag: their page has tests of its own.
    return (names) - {"components"}


def promised_by_help(recipe):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        loaded(recipe).main(["--help"])
    text = re.sub(r"[^\w.,:-]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue()))
    (names,) = re.findall(r"this run may be continued with another value of: ([\w, -]+)\.", text)
    return words(names)


@pytest.mark.parametrize("recipe", TRAINING)
def test_what_help_promises_may_change(recipe):
    names = promised_by_help(recipe)
    assert names == {"lr", "warmup", "schedule-steps", "weight-decay", "max-norm"}
    flagged = {name.replace("_", "-") for name in make_resume_rules(loaded(recipe).Config()).ask}
    assert names | promised_on_pages() - {"linears"} <= flagged
    # Plain layers do not read linear-modules, and nothing makes torch less deterministic again.
    assert flagged - {"linear-modules", "deterministic"} <= OTHER.keys()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return the flags of a run of one step."""
    home = tmp_path_factory.mktemp("begun")
    (home / "text.txt").write_text("\n\n".join(f"{n} + 1 is {n + 1}." for n in range(99)))
    flags = "--cache None --row-length 64 --rows 2 --microbatch 2 --warmup 2 --schedule-steps 8"
    flags = [*flags.split(), "--data", home / "text.txt", "--eval-every", 0, "--out", home / "run"]
    code, said = here([*flags, "--steps", 1], layers=1)
    assert code == 0, said
    return flags


def test_every_promise_is_tried_below():
    names = promised_on_pages() | promised_by_help("pretrain")
    assert {"lr", "schedule-steps", "max-norm", "linears"} <= names <= OTHER.keys()


@pytest.mark.parametrize("name", OTHER)
def test_another_value_is_refused_and_with_leave_it_is_taken_and_told(name, begun):
    out = begun[-1]
    at = column(out, "step")[-1]
    changed = [*begun, "--steps", at + 1, "--save-every", 1000, f"--{name}", *OTHER[name]]
    code, what = refusal("pretrain", *changed)
    assert (code, f"(--allow-change {name} resumes with it)" in what) == (66, True), what
    again = ["--resume", out / "checkpoints" / "step_00000001", "--out", out.parent / name]
    code, said = here([*changed, *again, "--allow-change", name], layers=1)
    assert code == 0, said
    assert column(out.parent / name, "step") == [2]
    plain = name.replace("-", "_")
    (told,) = [event["messages"] for event in events(out.parent / name, "resume")]
    assert any(f"its config.{plain} is " in line for line in told)


def test_another_rate_is_the_rate_that_is_taken(begun):
    out = begun[-1].parent / "rate"
    again = ["--resume", begun[-1] / "checkpoints" / "step_00000001", "--out", out]
    changed = ["--lr", 2e-3, "--schedule-steps", 100, "--warmup", 4]
    allow = ["--allow-change", "lr", "schedule-steps", "warmup"]
    code, said = here([*begun, *again, *changed, *allow, "--steps", 2], layers=1)
    assert code == 0, said
    assert column(out, "lr") == [1e-3]
