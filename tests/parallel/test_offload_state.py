import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

import trainkit as tk
from tests.whole_step import Layout, build, corpus, input_of, step_function
from trainkit.optim import make_optimizer, use_averaged_parameters
from trainkit.parallel import offload_state
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.offload_state import Offloaded
from trainkit.tools.testing import run_ranks
from trainkit.types import DiskError
from trainkit.weights.checkpoint import save_checkpoint


def memory_of(stages, optimizer):
    tensors = [x for stage in stages for x in stage.parameters()]
    tensors += [x for held in optimizer.state.values() for x in held.values()]
    return [get_local(x.detach()) for x in tensors]


def trained(layout, ps, to=None):
    """Return the state after three steps, with sleep before each and at the end if `to` is set."""
    stages, optimizer = build(layout, ps)
    text, state = corpus(), tk.TrainState()
    bins = tk.pack_bins(text.lengths, 24, multiple_of=layout.multiple_of)
    train_step = step_function(layout, ps, stages, optimizer)
    for _ in range(3):
        if to is not None:
            before = memory_of(stages, optimizer)
            with offload_state(stages, optimizer, to=to) as freed:
                assert freed >= sum(x.nbytes for x in before) * 0.9
                assert not any(x.untyped_storage().nbytes() for x in before)
                assert to == "host" or not any(to.iterdir())
        state, _ = train_step(state, input_of(state.cursor, ps, layout, text=text, bins=bins))
    return [x.clone() for x in memory_of(stages, optimizer)]


LAYOUTS = [
    (Layout(2, recompute="selective"), tk.Layout(dp_shard=2), ("host", "disk")),
    (Layout(2, tp=2, vocab_size=32), tk.Layout(tp=2), ("disk",)),
    (Layout(2, pp=2, tied=True), tk.Layout(pp=2), ("host",)),
]


def in_layouts(folder):
    found = []
    for layout, degrees, places in LAYOUTS:
        with tk.parallel_session(degrees) as ps:
            want = trained(layout, ps)
            for place in places:
                slept = trained(layout, ps, folder if place == "disk" else place)
                found.append(all(map(torch.equal, want, slept)))
    return found


def test_in_every_layout_a_run_that_sleeps_is_the_run_that_does_not(tmp_path):
    for found in run_ranks(in_layouts, 2, tmp_path):
        assert found == [True] * 4


def small():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_offloaded_state_refuses_all_work_and_is_back_after_an_error(on_disk, tmp_path):
    model, optimizer = small()
    want = [x.clone() for x in memory_of([model], optimizer)]
    to = tmp_path if on_disk else "host"

    def sleeper():
        with offload_state([model], optimizer, to=to):
            with pytest.raises(RuntimeError, match=r"a step: the state is offloaded, 0\.weight"):
                model(torch.ones(1, 3))
            state, ps = tk.TrainState(), tk.solo_parallel()
            with pytest.raises(RuntimeError, match="save: the state is offloaded"):
                save_checkpoint(tmp_path / "run", state, [model], optimizer, ps)
            with (
                pytest.raises(RuntimeError, match="offload_state: the state is offloaded"),
                offload_state([model], optimizer),
            ):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sleeper()
    assert all(map(torch.equal, memory_of([model], optimizer), want))
    assert not [path for path in tmp_path.iterdir() if path.name != "run"]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def evaluate_the_mean(optimizer):
    with use_averaged_parameters(optimizer):
        pass


@pytest.mark.parametrize(
    "make",
    [
        partial(make_optimizer, offload=True),
        partial(make_optimizer, optimizer="lion"),
        partial(make_optimizer, mean=0.5),
    ],
)
def test_no_tensor_of_an_offloaded_state_can_be_used(make):
    model = nn.Linear(3, 2)
    model.register_buffer("table", torch.ones(2))
    optimizer = make([model], lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    want = [x.clone() for x in memory_of([model], optimizer)]
    moment = optimizer.state[model.weight]["exp_avg"]
    with offload_state([model], optimizer):
        assert (model.weight.shape, moment.numel(), model.table.nbytes) == ((2, 3), 6, 8)
        assert all(isinstance(x, Offloaded) for x in (model.weight, model.table, moment))
        for work in (
            optimizer.step,
            optimizer.zero_grad,
            *([lambda: evaluate_the_mean(optimizer)] if "mean" in make.keywords else []),
            lambda: tk.clip_and_step(model.parameters(), optimizer, lr=0.1, max_norm=1.0),
            lambda: nn.functional.linear(torch.ones(1, 3), model.weight),
            lambda: torch._foreach_norm([moment]),
            lambda: torch.ones(2).copy_(model.table),
            model.state_dict,
            lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
            lambda: copy.deepcopy(model),
            lambda: print(model.weight),
            moment.numpy,
            moment.tolist,
        ):
            with pytest.raises(RuntimeError, match="the state is offloaded"):
                work()
    assert all(map(torch.equal, memory_of([model], optimizer), want))
    assert (type(model.weight), type(moment)) == (nn.Parameter, torch.Tensor)


def test_a_gradient_and_a_folder_that_takes_nothing_are_refused(tmp_path):
    model, optimizer = small()
    want = [x.clone() for x in memory_of([model], optimizer)]
    with (
        pytest.raises(DiskError, match="cannot take the state"),
        offload_state([model], optimizer, to=tmp_path / "none"),
    ):
        pass
    assert all(map(torch.equal, memory_of([model], optimizer), want))
    model(torch.ones(1, 3)).sum().backward()
    with (
        pytest.raises(ValueError, match=r"offload_state: 0\.weight has a gradient"),
        offload_state([model], optimizer),
    ):
        pass
