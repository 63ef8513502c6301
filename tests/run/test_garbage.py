"""Garbage is collected after the steps that say so, in none, and as before afterwards."""

import contextlib
import gc
import threading
import weakref

import attrs
import pytest
import torch

import trainkit as tk
from trainkit import losses, models
from trainkit.batch import make_padding_batch
from trainkit.phases import record_phases
from trainkit.run import Timeouts, collect_manually, open_run
from trainkit.tools.testing import run_ranks

pytestmark = pytest.mark.usefixtures("own_process")


class Cycle:
    def __init__(self):
        self.own = self


@contextlib.contextmanager
def collections():
    """Yield the list of the generations that are collected."""
    seen = []

    def note(phase, info):
        seen.extend([info["generation"]] if phase == "start" else [])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def test_what_is_new_goes_every_n_steps_and_all_of_it_where_nobody_waits():
    with collections() as seen, collect_manually(every=3) as collect:
        kept = weakref.ref(Cycle())
        rest = [[] for _ in range(20_000)]  # enough for many automatic collections
        found = []
        for step in range(1, 11):
            collect(idle=step in (2, 5, 6, 8))
            found.append((list(seen), kept() is None))
            seen.clear()
    assert len(rest) == 20_000
    assert [generations for generations, _ in found] == [
        *([], [], [1], [], [2], [1], [], [2], [1], []),
    ]
    assert [gone for _, gone in found] == [False, False, *[True] * 8]


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_it_was_after_a_loop_however_it_ends(tmp_path, enabled):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    (gc.enable if enabled else gc.disable)()
    try:
        with (
            contextlib.suppress(SystemExit),
            open_run(tmp_path, timeouts=Timeouts(start_timeout=60.0)) as run,
            run.loop(run.resume([model], optimizer), [model], optimizer, steps=1, replay=None),
        ):
            inside = gc.isenabled()
            raise KeyboardInterrupt
        assert (inside, gc.isenabled()) == (False, enabled)
    finally:
        gc.enable()


def test_collections_of_other_threads_are_no_phase():
    with record_phases() as times, collect_manually():
        other = threading.Thread(target=gc.collect)
        other.start()
        other.join()
        assert set(times.read()) == {"other"}
        gc.collect()
        assert set(times.read()) == {"other", "garbage"}
    gc.collect()
    assert set(times.read()) == {"other"}


def left_by_a_step():
    """Return how many objects a step leaves that only hold one another: the least of five."""
    model = models.Decoder(
        models.make_decoder_config("tiny", vocab_size=256, layers=1), head="hidden"
    )
    params = tk.get_parameters([model])
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    batch = make_padding_batch(1, 8)
    batch = attrs.evolve(batch, labels=batch.input_ids)

    def left():
        gc.collect()
        tokens = tk.count_valid_tokens([batch])
        tk.forward_backward(model, [batch], losses.next_token_linear, denominator=tokens)
        tk.clip_and_step(params, optimizer, lr=1e-3, max_norm=1.0)
        return gc.collect()

    left()
    with collect_manually():
        return min(left() for _ in range(5))


def test_a_step_leaves_nothing_that_only_holds_itself():
    # In a process of its own: what other tests leave behind, and the runner's threads, make some.
    assert run_ranks(left_by_a_step, 1) == [0]
