"""The precision of fp32 matrix products, and deterministic algorithms on CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from trainkit.types import Numerics

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_numerics(numerics: Numerics) -> None:
    """Set the precision of fp32 matrix products and, if requested, deterministic algorithms.

    Raises:
        ValueError: See `use_deterministic`.

    Effects:
        Sets torch's switches for this process.

    Examples:
        >>> set_numerics(Numerics(matmul="high"))
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> set_numerics(Numerics())
    """
    torch.set_float32_matmul_precision(numerics.matmul)
    if numerics.deterministic:
        use_deterministic()


@contextlib.contextmanager
def use_numerics(numerics: Numerics | None) -> Iterator[None]:
    """Set the numerics inside the block, and restore torch's own settings; nothing for None.

    Raises:
        ValueError: See `use_deterministic`.

    Effects:
        Those of `set_numerics`, undone at the end, also after an error.

    Examples:
        >>> with use_numerics(Numerics(matmul="high")):
        ...     torch.get_float32_matmul_precision()
        'high'
        >>> torch.get_float32_matmul_precision()
        'highest'
    """
    if numerics is None:
        yield
        return
    matmul = torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # pyrefly: ignore[missing-attribute]
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    try:
        set_numerics(numerics)
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # pyrefly: ignore[missing-attribute]
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def use_deterministic() -> None:
    """Make torch use deterministic algorithms, and raise where it has none.

    On a CPU trainkit is deterministic without it. On CUDA the backward pass of flash and of
    memory-efficient attention and some sums of gradients are not. It costs speed; how much depends
    on the device. Bits still depend on the device, the layout and the versions of torch and its
    libraries.

    Raises:
        ValueError: CUDA is in use already and the workspace of cuBLAS is not configured.

    Effects:
        Sets torch's switches for this process, and CUBLAS_WORKSPACE_CONFIG unless it is set. Call
        it once on every rank, before the process group and the model.

    Examples:
        >>> use_deterministic()
        >>> torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.use_deterministic_algorithms(False)  # back again, for what runs after this

    References:
        PyTorch's notes on reproducibility; cuBLAS's on its workspace.
    """
    if _WORKSPACE not in os.environ and torch.cuda.is_initialized():
        raise ValueError(
            f"deterministic: CUDA is in use already, and cuBLAS reads {_WORKSPACE} when it starts; "
            f"call deterministic() before anything touches CUDA, or set {_WORKSPACE}=:4096:8"
        )
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # trainkit never reads uninitialized memory, so filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]
    torch.backends.cudnn.benchmark = False
