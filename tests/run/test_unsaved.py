"""An error in a recipe's own code costs no step whose state is whole, and is still raised."""

import contextlib
import json
from functools import partial

import attrs
import pytest
import torch

from trainkit.run import Timeouts, open_run
from trainkit.run.sinks import LoggingOptions
from trainkit.types import Cursor, DataError, NumericsError, StepBatch
from trainkit.weights.checkpoint import CheckpointOptions, list_checkpoints, verify_checkpoint
from trainkit.weights.checkpoint.manifest import parse_step

pytestmark = pytest.mark.usefixtures("own_process")

TIMEOUTS = Timeouts(start_timeout=60.0)
LAST = 7
HALF_WRITTEN = ("within the step", "after the step")


def nothing_fails(step, place):
    """Be the recipe's own code, without a mistake."""


def train(folder, code=nothing_fails, *, log_every=1, background=False):
    """Train 7 steps, saving every 4, and call `code(step, place)` at three places of each.

    Returns the weights at the end, or those with which an error left them.
    """
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = CheckpointOptions(save_every=4, background_saves=background)
    logging = LoggingOptions(log_every=log_every)
    with contextlib.suppress(SystemExit), open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume([model], optimizer, facts={})
        with run.loop(
            state,
            [model],
            optimizer,
            steps=LAST,
            replay=None,
            checkpoints=checkpoints,
            logging=logging,
        ) as loop:
            while state.step < LAST:
                step = state.step + 1
                code(step, "before the step")
                model(torch.ones(1, 2)).square().sum().backward()
                optimizer.step(lambda step=step: code(step, "within the step"))
                optimizer.zero_grad()
                code(step, "after the step")
                state = attrs.evolve(state, step=step, cursor=Cursor(step))
                metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1}
                state = loop.record(state, metrics, StepBatch([], state.cursor))
                code(step, "after the line")
                loop.checkpoint(state)
    return model.weight.tolist()


def fail_at(step, place, error):
    """Return code of a recipe that raises an error at one place of one step."""

    def code(*at):
        if (step, place) == at:
            raise error

    return code


def saved_steps(folder):
    """Return the steps of the checkpoints that verify."""
    found = list_checkpoints(folder / "checkpoints")
    return sorted(parse_step(path) for path in found if not verify_checkpoint(path))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("train", [partial(train, background=True), partial(train, log_every=10)])
@pytest.mark.parametrize(
    "case",
    [
        ((7, "before the step", KeyError("colour")), [4, 6]),
        ((7, "before the step", DataError("document 3 is torn")), [4, 6]),
        ((7, "before the step", SystemExit(3)), [4, 6]),
        ((6, "after the line", KeyError("colour")), [4, 6]),
        ((4, "after the line", KeyError("colour")), [4]),
        ((5, "before the step", KeyError("colour")), [4]),  # it is saved already
        ((1, "before the step", KeyError("colour")), []),  # nothing was trained
        ((6, "within the step", KeyError("colour")), [4]),  # half written
        ((6, "after the step", KeyError("colour")), [4]),  # of no step that is known
        ((7, "before the step", NumericsError("diverged")), [4]),  # nobody wants to go on from it
    ],
)
def test_an_error_saves_what_is_whole(case, train, undisturbed, tmp_path, capsys):
    at, saved = case
    step, place, error = at
    train(tmp_path, fail_at(*at))
    said = capsys.readouterr().err
    assert saved_steps(tmp_path) == saved
    assert ("is saved in" in said) == (6 in saved or (step, place) == (4, "after the line"))
    assert ("after its optimizer step had started" in said) == (place in HALF_WRITTEN)
    if not isinstance(error, SystemExit):
        told = json.loads(said.splitlines()[-1].removeprefix("TRAINKIT_ERROR "))
        assert str(error) in told["what"]
    assert train(tmp_path) == undisturbed
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, LAST + 1))


def test_a_save_that_fails_leaves_the_error_what_it_was(tmp_path, capsys):
    def code(step, place):
        if (step, place) == (7, "before the step"):
            (tmp_path / "checkpoints").rename(tmp_path / "aside")
            (tmp_path / "checkpoints").touch()
            raise KeyError("colour")

    train(tmp_path, code)
    said = capsys.readouterr().err
    assert "warning: step 6 was not saved after the error" in said
    assert "KeyError: 'colour'" in said.splitlines()[-1]
