"""Offload a training state between two steps, so that a sampler can use the device's memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_iter

from trainkit.models.mixins import mix_in_, take_out_
from trainkit.parallel.grad_reduction import find_reducers, get_local
from trainkit.parallel.parameters import get_named_parameters
from trainkit.types import DiskError


@contextmanager
def offload_state(
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    to: Literal["host"] | Path = "host",
) -> Iterator[int]:
    """Free the memory of parameters, buffers and optimizer state for a `with` block.

    This is for a sampler that shares the device. On leaving, also by an error, all is back bit for
    bit in the same tensors: shards, views and ties stay as they are. Ranks do not communicate.
    Inside, a forward pass, a step, a save, and every other use of the values of these tensors are
    refused, since their memory is gone. `torch.tensor(x)`, `torch.as_tensor(x)` and FSDP's
    `unshard` give torch no chance to refuse; they may end the process.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        to: "host" for host memory, pinned if a GPU frees it; tensors that are there already, as
            with `cpu_offload`, stay. Or a folder, for a file without a name, which disappears when
            the block or the process ends; then tensors in host memory are offloaded too.

    Yields:
        The bytes that this rank has freed. Memory that torch may not resize stays: that of a mapped
        file, and on a CPU of tensors that share it with numpy.

    Raises:
        DiskError: The folder has no room, or is none; then nothing has changed.
        ValueError: A parameter has a gradient: call this between steps.
        RuntimeError: The state is offloaded already.

    Effects:
        Resizes the memory of all these tensors to nothing, and back; meanwhile they have the mixin
        `Offloaded`. Empties the allocator's cache on CUDA.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> with offload_state([model], torch.optim.SGD(model.parameters(), lr=0.1)) as freed:
        ...     print(freed)
        12
    """
    check_awake(stages, by="asleep")
    for name, p in get_named_parameters(stages).items():
        if p.grad is not None:
            raise ValueError(f"asleep: {name} has a gradient; finish the step, or set it to None")
    for stage in stages:
        for _, module in find_reducers(stage).fsdp:
            module.reshard()  # what an evaluation has left gathered
    tensors = _tensors_of(stages, optimizer)
    memory = [get_local(x.detach()).untyped_storage() for x in tensors]
    found = [*{x.data_ptr(): x for x in memory if x.nbytes() and x.resizable()}.values()]
    if to == "host":
        found = [x for x in found if x.device.type != "cpu"] or found
    with ExitStack() as stack:
        back = _to_host(found) if to == "host" else _to_disk(found, Path(to), stack)
        sizes = [x.nbytes() for x in found]
        stack.callback(_wake, found, sizes, back)
        for stage in stages:  # before FSDP's own hook, which would begin to gather
            hook = stage.register_forward_pre_hook(
                lambda *_: check_awake(stages, by="a step"), prepend=True
            )
            stack.callback(hook.remove)
        stack.callback(_unlock_, tensors)
        for x in tensors:
            mix_in_(x, Offloaded)
        for x in found:
            x.resize_(0)
        if any(x.device.type == "cuda" for x in found):
            torch.cuda.empty_cache()
        yield sum(sizes)


def check_awake(stages: Iterable[nn.Module], *, by: str) -> None:
    """Refuse to use a state that is offloaded.

    Raises:
        RuntimeError: A parameter's memory is not there; the message begins with `by`.

    Examples:
        >>> check_awake([nn.Linear(1, 1)], by="save_checkpoint")
    """
    for name, p in get_named_parameters(stages).items():
        if isinstance(p, Offloaded):
            raise RuntimeError(  # noqa: TRY004 (a state of the tensor, not a wrong type)
                f"{by}: the state is asleep, {name} is not in memory; leave the block of "
                "parallel.offload_state first"
            )


@torch.no_grad()
def _tensors_of(stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of a state, and the parts of them that this rank has, each once."""
    held: list[Any] = [x for stage in stages for x in (*stage.parameters(), *stage.buffers())]
    held += tree_iter([*optimizer.state.values()])
    found = [x for x in held if isinstance(x, Tensor)]
    return [*{id(x): x for x in (*found, *map(get_local, found))}.values()]


_ANSWERED = {Tensor.size, Tensor.numel, Tensor.dim} | {
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "nbytes", "requires_grad")
}
"""The functions of a tensor that need none of its values."""


class Offloaded:
    """Mixin of tensors whose memory is gone: it refuses all operations that need values."""

    @classmethod
    def __torch_function__(cls, func: Any, *given: Any) -> Any:
        """Raise for a function of torch, unless it needs no values."""
        if func in _ANSWERED:
            return torch._C._disabled_torch_function_impl(func, *given)  # noqa: SLF001
        raise RuntimeError(
            f"{resolve_name(func) or 'an operation'}: the state is asleep, and this tensor of "
            "it is not in memory; leave the block of parallel.offload_state first"
        )


def _unlock_(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        if isinstance(x, Offloaded):
            take_out_(x, Offloaded)


def _flat(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _to_host(found: Sequence[torch.UntypedStorage]) -> Callable[[int], Tensor]:
    copies = []
    for x in found:
        pinned = x.device.type == "cuda"
        copies.append(torch.empty(x.nbytes(), dtype=torch.uint8, pin_memory=pinned).copy_(_flat(x)))
    return copies.__getitem__


def _to_disk(
    found: Sequence[torch.UntypedStorage], folder: Path, stack: ExitStack
) -> Callable[[int], Tensor]:
    try:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        for x in found:
            # A copy: what numpy has seen of a tensor, torch does not resize again.
            file.write(_flat(x).to("cpu", copy=True).numpy().data)
        file.flush()
        file.seek(0)
    except OSError as error:
        raise DiskError(f"asleep: {folder} cannot take the state: {error}") from error

    def read(size: int) -> Tensor:
        part = torch.empty(size, dtype=torch.uint8)
        file.readinto(part.numpy().data)
        return part

    sizes = [x.nbytes() for x in found]
    return lambda number: read(sizes[number])


def _wake(
    found: Sequence[torch.UntypedStorage], sizes: Sequence[int], back: Callable[[int], Tensor]
) -> None:
    for number, (x, size) in enumerate(zip(found, sizes, strict=True)):
        x.resize_(size)
        _flat(x).copy_(back(number))
