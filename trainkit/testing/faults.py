"""Faults to put into a run on purpose: what a trainer must survive, in the tests of anybody.

A training step is a function `(state, batch) -> (state, metrics)`. An injector is a function from a
step to a step that does as it did, but for one thing that goes wrong: so a library needs no hooks
for its tests, and a user's own loop can be tried in the same way.

    train_step = kill_at(7, rank=1)(make_train_step(cfg, ps, stages, optimizer))

`at` says when: the number of a step (the 7 that metrics.jsonl will call step 7, which begins with
`state.step == 6`), several of them, or a question about the state. A step that is taken again after
a rollback has the same number: `lambda state: state.cursor.batch == 6` follows the data instead.
`rank` says where: on one rank, on several, by default on all. Files have faults of their own.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.parallel.naming import box_of, canonical_name, named_parameters_of
from trainkit.types import StepBatch, TrainState

TrainStep = Callable[[TrainState, StepBatch], tuple[TrainState, Any]]
"""`TrainStep(state, batch) -> (state, metrics)`: all of one step, as a recipe writes it."""

Injector = Callable[[TrainStep], TrainStep]
"""From a train step to one in which something goes wrong."""

At = int | Collection[int] | Callable[[TrainState], bool]
"""When: the number of a step, several, or whether a step that begins with this state is meant."""

Ranks = int | Collection[int] | None
"""Where: a rank, several, or all of them."""

_PAGE = 4096


# ----------------------------------------------------------------------------------- when and where


def _is_due(at: At, ranks: Ranks, state: TrainState) -> bool:
    own = dist.get_rank() if dist.is_initialized() else 0
    if ranks is not None and own not in ({ranks} if isinstance(ranks, int) else ranks):
        return False
    if callable(at):
        return at(state)
    return state.step + 1 in ({at} if isinstance(at, int) else at)


def act_at(at: At, act: Callable[[TrainState], Any], *, rank: Ranks = None) -> Injector:
    """Return an injector that calls a function before a step: any fault that has no name here.

    Args:
        at: When; see the head of this module.
        act: Called with the state that the step begins with.
        rank: Where; by default on all ranks.

    Examples:
        >>> step = act_at({2, 4}, lambda state: print("before step", state.step + 1))(
        ...     lambda state, batch: (state, {})
        ... )
        >>> _ = [step(TrainState(step=done), None) for done in range(5)]
        before step 2
        before step 4
    """

    def wrap(train_step: TrainStep) -> TrainStep:
        def injected(state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
            if _is_due(at, rank, state):
                act(state)
            return train_step(state, batch)

        return injected

    return wrap


def act_after(at: At, act: Callable[[TrainState], Any], *, rank: Ranks = None) -> Injector:
    """Return an injector that calls a function after a step, before its caller hears of it.

    The parameters have moved and the counters of the caller have not.

    Args:
        at: When; see the head of this module.
        act: Called with the state that the step has come to.
        rank: Where; by default on all ranks.

    Examples:
        >>> step = act_after(1, lambda state: print("step 1 done"))(
        ...     lambda state, batch: (state, {})
        ... )
        >>> _ = step(TrainState(), None)
        step 1 done
    """

    def wrap(train_step: TrainStep) -> TrainStep:
        def injected(state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
            outcome = train_step(state, batch)
            if _is_due(at, rank, state):
                act(outcome[0])
            return outcome

        return injected

    return wrap


def _during(at: At, ranks: Ranks, around: Callable[[], AbstractContextManager[Any]]) -> Injector:
    def wrap(train_step: TrainStep) -> TrainStep:
        def injected(state: TrainState, batch: StepBatch) -> tuple[TrainState, Any]:
            with around() if _is_due(at, ranks, state) else nullcontext():
                return train_step(state, batch)

        return injected

    return wrap


# --------------------------------------------------------------------------- a rank that goes wrong


def fail_at(at: At, *, rank: Ranks = None, error: BaseException | None = None) -> Injector:
    """Return an injector that raises instead of taking a step.

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.
        error: What is raised, by default a RuntimeError that says so: a bug, memory, a bad sample.

    Examples:
        >>> step = fail_at(1, error=MemoryError("planned"))(lambda state, batch: (state, {}))
        >>> step(TrainState(), None)
        Traceback (most recent call last):
        ...
        MemoryError: planned
    """

    def fail(state: TrainState) -> None:
        raise error or RuntimeError(f"fail_at: a planned failure in step {state.step + 1}")

    return act_at(at, fail, rank=rank)


def exit_at(at: At, *, rank: Ranks = None, code: int = 0) -> Injector:
    """Return an injector that ends the process in good order: a rank that leaves its peers.

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.
        code: The exit code.

    Examples:
        >>> step = exit_at(1)(lambda state, batch: (state, {}))
        >>> step(TrainState(), None)
        Traceback (most recent call last):
        ...
        SystemExit: 0
    """
    return fail_at(at, rank=rank, error=SystemExit(code))


def signal_at(
    at: At,
    *,
    rank: Ranks = None,
    signum: int = signal.SIGTERM,
    times: int = 1,
    after: bool = False,
) -> Injector:
    """Return an injector that sends a signal to the rank's own process.

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.
        signum: The signal; SIGTERM is how schedulers ask a job to stop.
        times: How often it is sent.
        after: Send it after the step, before the caller hears of it, and not before the step.

    Examples:
        >>> before = signal.signal(signal.SIGUSR1, lambda *_: print("told to stop"))
        >>> step = signal_at(1, signum=signal.SIGUSR1)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        told to stop
        >>> _ = signal.signal(signal.SIGUSR1, before)
    """

    def send(_: TrainState) -> None:
        for _i in range(times):
            os.kill(os.getpid(), signum)

    return (act_after if after else act_at)(at, send, rank=rank)


def kill_at(at: At, *, rank: Ranks = None, after: bool = False) -> Injector:
    """Return an injector that ends the process at once, by SIGKILL: no handler, no last words.

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.
        after: Between the step's update and the caller's counters, and not before the step.

    Examples:
        >>> step = kill_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """
    return signal_at(at, rank=rank, signum=signal.SIGKILL, after=after)


def stop_at(at: At, *, rank: Ranks = None) -> Injector:
    """Return an injector that stops the process until somebody continues or kills it (SIGSTOP).

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.

    Examples:
        >>> step = stop_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """
    return signal_at(at, rank=rank, signum=signal.SIGSTOP)


def hang_at(at: At, *, rank: Ranks = None) -> Injector:
    """Return an injector that never comes back, though its process lives and has its threads.

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.

    Examples:
        >>> step = hang_at(7, rank=1)(lambda state, batch: (state, {}))
        >>> step(TrainState(step=6), None)[0].step  # this is rank 0
        6
    """

    def hang(_: TrainState) -> None:
        while True:
            time.sleep(3600)

    return act_at(at, hang, rank=rank)


def slow_at(at: At, *, rank: Ranks = None, seconds: float) -> Injector:
    """Return an injector that waits before a step: a straggler.

    Args:
        at: When; see the head of this module.
        rank: Where; by default on all ranks.
        seconds: How long.

    Examples:
        >>> begin = time.monotonic()
        >>> step = slow_at(1, seconds=0.02)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> time.monotonic() - begin >= 0.02
        True
    """
    return act_at(at, lambda _: time.sleep(seconds), rank=rank)


# ---------------------------------------------------------------------------- numbers that go wrong


def nan_loss_at(
    at: At, stages: Sequence[nn.Module], *, rank: Ranks = None, value: float = math.nan
) -> Injector:
    """Return an injector that makes the loss of a step NaN, and with it every gradient.

    What this rank's last stage returns is multiplied with `value`, in all microbatches.

    Args:
        at: When; see the head of this module.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        value: NaN, an infinity, or a number such as 10 for a spike.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> def train_step(state, batch):
        ...     return state, model(torch.ones(1)).item()
        >>> nan_loss_at(1, [model])(train_step)(TrainState(), None)[1]
        nan
        >>> math.isfinite(train_step(TrainState(), None)[1])
        True
    """

    def scaled(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # (hidden, output weight)
            return (output[0] * value, *output[1:])
        return output * value

    @contextmanager
    def poisoned() -> Iterator[None]:
        handle = stages[-1].register_forward_hook(scaled)
        try:
            yield
        finally:
            handle.remove()

    return _during(at, rank, poisoned)


def nan_gradient_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    value: float = math.nan,
) -> Injector:
    """Return an injector that puts a number into a gradient of a step; the loss stays finite.

    It is this rank's own gradient, of every microbatch, before ranks are summed over.

    Args:
        at: When; see the head of this module.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        element: Which element of the parameter, as the backward pass has it on this rank.
        value: NaN, or an infinity.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> def train_step(state, batch):
        ...     model(torch.ones(1)).sum().backward()
        ...     return state, model.bias.grad
        >>> nan_gradient_at(1, [model], name="bias")(train_step)(TrainState(), None)[1]
        tensor([nan])
    """

    def spoiled(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        _write(gradient, element, value)
        return gradient

    @contextmanager
    def poisoned() -> Iterator[None]:
        modules, leaf = _place_in_model(stages, name or _first_name(stages))
        handles: dict[int, Any] = {}

        # FSDP puts the gathered parameter in place for the forward pass: it is hooked when there.
        def hook(*_: Any) -> None:
            parameter = modules[-1].get_parameter(leaf)
            if id(parameter) not in handles:
                handles[id(parameter)] = parameter.register_hook(spoiled)

        for module in modules:
            handles[id(module)] = module.register_forward_pre_hook(hook)
        try:
            yield
        finally:
            for handle in handles.values():
                handle.remove()

    return _during(at, rank, poisoned)


def nan_parameter_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    value: float = math.nan,
) -> Injector:
    """Return an injector that overwrites an element of a parameter before a step.

    Args:
        at: When; see the head of this module.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        element: Which element of this rank's part.
        value: What is written.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> step = nan_parameter_at(1, [model])(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> model.weight.data
        tensor([[nan]])
    """

    def put(_: TrainState) -> None:
        _write(_parameter_of(stages, name), element, value)

    return act_at(at, put, rank=rank)


def nan_moment_at(
    at: At,
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    rank: Ranks = None,
    name: str | None = None,
    moment: str = "exp_avg",
    element: int = 0,
    value: float = math.nan,
) -> Injector:
    """Return an injector that overwrites an element of an optimizer's moment before a step.

    Args:
        at: When; see the head of this module.
        stages: This rank's stages.
        optimizer: Their optimizer, which has taken a step.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        moment: Which of the optimizer's tensors.
        element: Which element of this rank's part.
        value: What is written.

    Examples:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1)).sum().backward()
        >>> optimizer.step()
        >>> step = nan_moment_at(2, [model], optimizer)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(step=1), None)
        >>> optimizer.state[model.weight]["exp_avg"]
        tensor([[nan]])
    """

    def put(_: TrainState) -> None:
        _write(optimizer.state[_parameter_of(stages, name)][moment], element, value)

    return act_at(at, put, rank=rank)


def flip_bit_at(
    at: At,
    stages: Sequence[nn.Module],
    *,
    rank: Ranks = None,
    name: str | None = None,
    element: int = 0,
    bit: int = 20,
) -> Injector:
    """Return an injector that flips one bit of a parameter before a step: a replica that drifts.

    Args:
        at: When; see the head of this module.
        stages: This rank's stages.
        rank: Where; by default on all ranks.
        name: The parameter, by its name in the whole model; by default the first that this rank
            holds a part of.
        element: Which element of this rank's part.
        bit: Which bit of it; 0 is the last of the mantissa, which the next update may round away.

    Examples:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> step = flip_bit_at(1, [model], bit=22)(lambda state, batch: (state, {}))
        >>> _ = step(TrainState(), None)
        >>> model.weight.data
        tensor([[1.5000]])
    """

    def put(_: TrainState) -> None:
        local, place = _place(_parameter_of(stages, name), element)
        value = local[place].reshape(1).clone()
        value.view(torch.uint8)[bit // 8] ^= 1 << bit % 8  # the machine is little-endian
        local[place] = value[0]

    return act_at(at, put, rank=rank)


def _first_name(stages: Sequence[nn.Module]) -> str:
    """Return the name of the first parameter that is trained and has elements on this rank."""
    named = named_parameters_of(stages)
    return next(n for n, p in named.items() if p.requires_grad and box_of(p).local.numel())


def _parameter_of(stages: Sequence[nn.Module], name: str | None) -> nn.Parameter:
    named = named_parameters_of(stages)
    if name is not None and name not in named:
        raise _unknown(name, stages)
    return named[name or _first_name(stages)]


def _unknown(name: str, stages: Sequence[nn.Module]) -> ValueError:
    known = ", ".join(named_parameters_of(stages))
    return ValueError(f"faults: no parameter is called {name!r}; there are {known}")


def _place_in_model(stages: Sequence[nn.Module], name: str) -> tuple[list[nn.Module], str]:
    """Return the modules from a stage down to the one that owns a parameter, and its name there."""
    for stage in stages:
        for path, module in stage.named_modules():
            for leaf, _ in module.named_parameters(recurse=False):
                if canonical_name(f"{path}.{leaf}" if path else leaf) == name:
                    parts = path.split(".") if path else []
                    above = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
                    return [stage.get_submodule(part) for part in above], leaf
    raise _unknown(name, stages)


def _place(tensor: Tensor, element: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return this rank's part of a tensor, in its own memory, and the index of an element in it."""
    local = box_of(tensor).local
    if not 0 <= element < local.numel():
        raise ValueError(f"faults: this rank has {local.numel()} elements, none is {element}")
    return local, torch.unravel_index(torch.tensor(element), local.shape)


def _write(tensor: Tensor, element: int, value: float) -> None:
    local, place = _place(tensor, element)
    local[place] = value


# ------------------------------------------------------------------------------------------- files


def flip_bit(path: str | Path, bit: int) -> None:
    """Flip one bit of a file.

    Args:
        path: The file.
        bit: Which, from 0 to 8 x its size - 1.

    Effects:
        Changes the file in place.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "x")
        ...     _ = path.write_bytes(b"abc")
        ...     flip_bit(path, 9)
        ...     path.read_bytes()
        b'a`c'
    """
    with Path(path).open("r+b") as file:
        file.seek(bit // 8)
        value = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([value[0] ^ 1 << bit % 8]))


def truncate(path: str | Path, size: int) -> None:
    """Cut a file off after so many bytes.

    Effects:
        Changes the file in place.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"abc"), file.flush()
        ...     truncate(file.name, 1)
        ...     Path(file.name).read_bytes()
        b'a'
    """
    os.truncate(path, size)


def zero_page(path: str | Path, page: int) -> None:
    """Fill a page of a file with zeros, as a disk that has lost it returns it.

    Args:
        path: The file.
        page: Which 4 KiB of it; the last may be shorter.

    Effects:
        Changes the file in place, but for its size.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"abc"), file.flush()
        ...     zero_page(file.name, 0)
        ...     Path(file.name).read_bytes() == bytes(3)
        True
    """
    with Path(path).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(page * _PAGE)
        file.write(bytes(max(0, min(_PAGE, size - page * _PAGE))))


def swap_files(first: str | Path, second: str | Path) -> None:
    """Let two files change places: shards that were mixed up.

    Effects:
        Changes both.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     a, b = Path(folder, "a"), Path(folder, "b")
        ...     _ = a.write_text("1"), b.write_text("2")
        ...     swap_files(a, b)
        ...     a.read_text(), b.read_text()
        ('2', '1')
    """
    first, second = Path(first), Path(second)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def remove_file(path: str | Path) -> None:
    """Remove a file that ought to be there.

    Effects:
        Removes it; one that is missing already is none.

    Examples:
        >>> remove_file("/does/not/exist")
    """
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()


def add_file(path: str | Path, content: bytes = b"\0") -> None:
    """Add a file that ought not to be there.

    Effects:
        Writes it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     add_file(f"{folder}/extra")
        ...     [path.name for path in Path(folder).iterdir()]
        ['extra']
    """
    Path(path).write_bytes(content)
