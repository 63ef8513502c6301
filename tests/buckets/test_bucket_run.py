"""A run whose directory is a URL is a run: it stops, and goes on elsewhere, bit for bit."""

import contextlib
import importlib
import json
import shutil
import signal

import pytest
import torch
from bucket_server import KEY, SECRET
from torch import nn

from trainkit.buckets import cache_folder, list_files, open_store
from trainkit.run import EXIT_SAVED, Timeouts, open_run
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor, StepBatch, TrainState
from trainkit.weights.checkpoint import (
    CheckpointOptions,
    find_initial_weights,
    read_resume_facts,
    state_hash,
)
from trainkit.weights.checkpoint.bucket_runs import list_remote

# In the process of somebody else `open_run` traps no signal, and raises errors as they are.
pytestmark = pytest.mark.usefixtures("own_process")
TIMEOUTS = Timeouts(start_timeout=60.0, step_timeout=60.0, grace=20.0)
OPTIONS = CheckpointOptions(save_every=2, keep=2)


def train(url, steps, stop_at=None, request="auto"):
    """Train a line on numbers that are a function of the step; return the hash of the state."""
    find_initial_weights(None, run_dir=url, request=request)
    read_resume_facts(url, request)
    with open_run(url, timeouts=TIMEOUTS, config={"out": str(url), "lr": 0.1}) as run:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = run.resume(model, optimizer, request=request, facts={"lr": 0.1})
        stop = None
        with run.loop(
            state, model, optimizer, steps=steps, replay=lambda *_: {}, checkpoints=OPTIONS
        ) as loop:
            while state.step < steps and not stop:
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(state.step))
                loss = (model(x) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                batch = StepBatch([], Cursor(state.cursor.batch + 1))
                state = TrainState(step=state.step + 1, cursor=batch.cursor)
                metrics = {"loss": loss.detach(), "grad_norm": torch.ones(()), "tokens": 8}
                state = loop.record(state, metrics, batch)
                if state.step == stop_at and run.ps.world.index == 0:
                    signal.raise_signal(signal.SIGTERM)
                stop = loop.checkpoint(state)
        return state_hash(state, [model], optimizer, run.ps), run.stop_code if stop else 0


@pytest.fixture
def url(bucket, monkeypatch):
    monkeypatch.chdir(cache_folder("runs", "s3://a").parents[3])  # tmp_path
    return bucket[2]


def test_it_goes_on_where_nothing_of_it_is(url, tmp_path, capfd):
    whole, _ = train(tmp_path / "local", 8)
    half, code = train(url, 8, stop_at=5)
    assert (half != whole, code) == (True, EXIT_SAVED)
    folder = cache_folder("runs", url)
    store = open_store(url)
    assert list_remote(list_files(store)) == ["step_00000005", "step_00000004"]
    shutil.rmtree(folder)
    assert train(url, 8) == (whole, 0)
    sizes = list_files(store)
    assert list_remote(sizes) == ["step_00000008", "step_00000006"]
    for name in ("metrics.jsonl", "events.jsonl", "config.toml", "run.json"):
        assert sizes[name] == (folder / name).stat().st_size
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert f'out = "{url}"' in (folder / "config.toml").read_text()
    printed = "".join(capfd.readouterr())
    # Lines of a log end at 80 columns.
    assert f"the run works in {folder}, which is copied to {url}" in " ".join(printed.split())
    texts = [
        printed,
        *(x.read_bytes().decode("latin1") for x in tmp_path.rglob("*") if x.is_file()),
    ]
    assert not [text for text in texts if KEY in text or SECRET in text]
    assert not list(tmp_path.glob("s3:*"))


def test_never_starts_again_and_sets_the_bucket_aside(url):
    train(url, 4)
    shutil.rmtree(cache_folder("runs", url))
    train(url, 3, request="never")
    assert list_remote(list_files(open_store(url))) == ["step_00000003", "step_00000002"]
    # The newest is that of the new run, which goes on.
    assert train(url, 4)[1] == 0


def test_a_bucket_that_cannot_be_used_ends_the_run_before_its_first_step(url, capfd):
    url = f"{url.partition('://')[0]}://gone-0/run"
    with pytest.raises(SystemExit) as end, open_run(url, timeouts=TIMEOUTS):
        pytest.fail("it was opened")
    assert end.value.code == 64
    assert "there is no bucket gone-0" in capfd.readouterr().err
    assert not cache_folder("runs", url).exists()


@pytest.mark.parametrize("how", ["end", "stop", "error"])
def test_the_end_waits_for_the_bucket_as_long_as_a_stop_lets_it(tmp_path, monkeypatch, how):
    waits, stops = [], []
    module = importlib.import_module("trainkit.run.open_run")

    @contextlib.contextmanager
    def note_patience(*_, get_patience, **__):
        try:
            yield None
        finally:
            if how == "stop":  # while it waits
                stops.append("asked")
            waits.append(get_patience())

    monkeypatch.setattr(module, "open_mirror", note_patience)
    with (
        contextlib.suppress(SystemExit),
        open_run(tmp_path / "run", timeouts=TIMEOUTS, stop_reason=lambda: (stops or [None])[0]),
    ):
        if how == "error":
            raise ValueError
    (seconds,) = waits
    assert seconds == TIMEOUTS.start_timeout if how == "end" else 1.0 <= seconds <= TIMEOUTS.grace


def test_two_ranks_share_the_folder_and_one_copies_it(url):
    first = run_ranks(train, 2, url, 2)
    shutil.rmtree(cache_folder("runs", url))
    again = run_ranks(train, 2, url, 4)
    assert first[0][1] == again[0][1] == 0
    assert list_remote(list_files(open_store(url))) == ["step_00000004", "step_00000002"]
