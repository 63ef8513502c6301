"""Offloading of a training state between two steps, so that a sampler can use the memory."""

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

    A sampler on the same device can then use it. At the end, also after an error, everything is
    back bit for bit in the same tensors: shards, views and ties are unchanged. Ranks do not
    communicate.

    Inside, a forward pass, an optimizer step, a save, and any other use of the values raise an
    error, since their memory is freed. `torch.tensor(x)`, `torch.as_tensor(x)` and FSDP's `unshard`
    bypass that check; they may end the process.

    Args:
        stages: This rank's stages.
        optimizer: The optimizer of their parameters.
        to: "host" for host memory, pinned for tensors of a GPU; tensors that are in host memory
            already, as with `cpu_offload`, stay. Or a folder, for a temporary file that is removed
            at the end of the block or of the process; then tensors in host memory are offloaded
            too.

    Yields:
        The bytes that this rank has freed. Memory that torch cannot resize stays: a mapped file,
        and on a CPU tensors that share memory with numpy.

    Raises:
        DiskError: The folder has no room, or does not exist; then nothing has changed.
        ValueError: A parameter has a gradient: call this between steps.
        RuntimeError: The state is offloaded already.

    Effects:
        Resizes the storages of all these tensors to zero and back; meanwhile the tensors have the
        mixin `Offloaded`. Empties the allocator's cache on CUDA.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> with offload_state([model], torch.optim.SGD(model.parameters(), lr=0.1)) as freed:
        ...     print(freed)
        12
    """
    check_awake(stages, by="offload_state")
    for name, p in get_named_parameters(stages).items():
        if p.grad is not None:
            raise ValueError(
                f"offload_state: {name} has a gradient; finish the step, or set it to None"
            )
    for stage in stages:
        for _, module in find_reducers(stage).fsdp:
            module.reshard()  # an evaluation may have left parameters gathered
    tensors = _list_tensors(stages, optimizer)
    every = [get_local(x.detach()).untyped_storage() for x in tensors]
    # Views and ties share a storage, which is copied once.
    by_address = {x.data_ptr(): x for x in every if x.nbytes() and x.resizable()}
    storages = list(by_address.values())
    if to == "host":
        # If all of it is in host memory, it is copied all the same: CPUs then behave as GPUs do.
        storages = [x for x in storages if x.device.type != "cpu"] or storages
    sizes = [x.nbytes() for x in storages]
    with ExitStack() as stack:
        read = _copy_to_host(storages) if to == "host" else _write(storages, Path(to), stack)
        stack.callback(_restore, storages, sizes, read)
        for stage in stages:  # ahead of FSDP's own hook, which would start to gather
            hook = stage.register_forward_pre_hook(
                lambda *_: check_awake(stages, by="a step"), prepend=True
            )
            stack.callback(hook.remove)
        for x in tensors:
            mix_in_(x, Offloaded)
            stack.callback(take_out_, x, Offloaded)
        for x in storages:
            x.resize_(0)
        if any(x.device.type == "cuda" for x in storages):
            torch.cuda.empty_cache()
        yield sum(sizes)


def check_awake(stages: Iterable[nn.Module], *, by: str) -> None:
    """Raise RuntimeError if a state is offloaded, before it is used.

    Raises:
        RuntimeError: A parameter is not in memory; the message starts with `by`.

    Examples:
        >>> check_awake([nn.Linear(1, 1)], by="save_checkpoint")
    """
    for name, p in get_named_parameters(stages).items():
        if isinstance(p, Offloaded):
            raise RuntimeError(  # noqa: TRY004 (a state of the tensor, not a wrong type)
                f"{by}: the state is offloaded, {name} is not in memory; leave the block of "
                "parallel.offload_state first"
            )


@torch.no_grad()  # with gradients, `to_local` of a DTensor would return a new tensor
def _list_tensors(stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of a state and the local shards of its DTensors, each once."""
    values: list[Any] = []
    for stage in stages:
        values += [*stage.parameters(), *stage.buffers()]
    values += tree_iter([*optimizer.state.values()])
    tensors = [x for x in values if isinstance(x, Tensor)]
    by_id = {id(x): x for x in (*tensors, *map(get_local, tensors))}
    return list(by_id.values())


_ANSWERED = {Tensor.size, Tensor.numel, Tensor.dim} | {
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "nbytes", "requires_grad")
}
"""The functions of a tensor that read none of its values."""


class Offloaded:
    """Mixin of tensors whose memory is freed: every operation that reads values raises."""

    @classmethod
    def __torch_function__(cls, func: Any, *given: Any) -> Any:
        """Raise for a function of torch, unless it reads no values."""
        if func in _ANSWERED:
            return torch._C._disabled_torch_function_impl(func, *given)  # noqa: SLF001
        raise RuntimeError(
            f"{resolve_name(func) or 'an operation'}: the state is offloaded, and this tensor of "
            "it is not in memory; leave the block of parallel.offload_state first"
        )


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_to_host(storages: Sequence[torch.UntypedStorage]) -> Callable[[int], Tensor]:
    """Copy storages, and return a function that returns the copy of an index."""
    copies = []
    for x in storages:
        is_pinned = x.device.type == "cuda"
        copy = torch.empty(x.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
        copies.append(copy.copy_(_as_bytes(x)))
    return copies.__getitem__


def _write(
    storages: Sequence[torch.UntypedStorage], folder: Path, stack: ExitStack
) -> Callable[[int], Tensor]:
    """Write storages to a file, and return a function that reads them back, in order."""
    sizes = [x.nbytes() for x in storages]
    try:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        for x in storages:
            # A copy: torch does not resize a storage any more that numpy has seen.
            file.write(_as_bytes(x).to("cpu", copy=True).numpy().data)
        file.flush()
        file.seek(0)
    except OSError as error:
        raise DiskError(f"offload_state: {folder} cannot take the state: {error}") from error

    def read(index: int) -> Tensor:
        values = torch.empty(sizes[index], dtype=torch.uint8)
        file.readinto(values.numpy().data)
        return values

    return read


def _restore(
    storages: Sequence[torch.UntypedStorage], sizes: Sequence[int], read: Callable[[int], Tensor]
) -> None:
    for index, (x, size) in enumerate(zip(storages, sizes, strict=True)):
        x.resize_(size)
        _as_bytes(x).copy_(read(index))
