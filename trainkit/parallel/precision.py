"""Mixed precision: compute in bf16 or fp16 on fp32 parameters, rounding alike in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trainkit.models.mixins import Forward, wrap_forward_
from trainkit.parallel.check_modules import refuse_max_norm
from trainkit.parallel.grad_reduction import replicates, sum_in_grad_dtype_
from trainkit.parallel.notes import Note
from trainkit.parallel.parameters import find_blocks, unhide_
from trainkit.parallel.transforms import Transform
from trainkit.types import Call, ParallelState, Precision

_COMPUTE = Note[torch.dtype | None]("compute_dtype", default=None)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of a `Precision` by name."""


def resolve_precision(precision: Precision, device: torch.device | str | None = None) -> Precision:
    """Replace `compute="auto"` by the dtype for a device.

    Args:
        precision: Its "auto" becomes bf16 on accelerators, and fp32 on a CPU and on NVIDIA GPUs
            before Ampere (2020), which cannot multiply in bf16.
        device: By default the first GPU, or the CPU without one.

    Examples:
        >>> resolve_precision(Precision(), "cpu").compute
        'fp32'
    """
    if precision.compute != "auto":
        return precision
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # Compute capability 8.0 is Ampere.
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return attrs.evolve(precision, compute="fp32" if is_old or device.type == "cpu" else "bf16")


def mixed_precision(
    compute: torch.dtype | None,
    *,
    storage: torch.dtype = torch.float32,
    blocks: str = "layers.*",
) -> Transform:
    """Return the transform that stores parameters in one dtype and computes in another.

    The forward pass uses parameters cast to `compute`; their gradients are cast back, and
    accumulated in fp32. With `fsdp` later in the plan, units gather their parameters in `compute`
    and reduce gradients in fp32. Both round at the same places, so that layouts differ only by the
    order of sums.

    Floating-point inputs of the model are cast too. Unlike autocast, it casts the inputs of no
    operation: a norm or a softmax that needs fp32 casts by itself, as those of the decoder and of
    Hugging Face's models do.

    Args:
        compute: The dtype of the computation: bf16, or fp16, for which a step must scale its loss
            (`health.get_loss_scale`). None changes nothing: the model is trained in the dtype that
            it was made in.
        storage: The dtype of the parameters. Those in bf16 get gradients in fp32, in which
            microbatches and ranks are summed; their optimizer must round as with
            `optim.storage.Rounding`.
        blocks: The name pattern of the blocks, as for `fsdp`.

    Returns:
        A transform for `build_stages`. It converts floating-point parameters to `storage`, as those
        of many Hugging Face models are made in fp16 or bf16.

    Raises:
        ConfigError: When applied: an embedding has a `max_norm`.

    References:
        Micikevicius et al., "Mixed precision training" (2018).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = mixed_precision(torch.bfloat16)(nn.Linear(2, 1), solo_parallel())
        >>> model(torch.ones(1, 2)).dtype, model.weight.dtype
        (torch.bfloat16, torch.float32)
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if compute is None:
            return module
        refuse_max_norm(module, by="mixed_precision")
        for parameter in module.parameters():
            if parameter.dtype in {torch.float16, torch.bfloat16, torch.float32} - {storage}:
                stored = nn.Parameter(parameter.detach().to(storage), parameter.requires_grad)
                # With its notes, which are attributes that torch does not copy.
                vars(stored).update(vars(parameter))
                # Assigning to `parameter.data` would not change the dtype of a DTensor.
                torch.utils.swap_tensors(parameter, stored)
        _COMPUTE.write_(module, compute)
        if ps.fsdp.count == 1 and not replicates(module, ps):  # else fsdp() gathers them cast
            units = find_blocks(module, blocks)
            inside = {part for unit in units for part in unit.modules()}
            for unit in units:
                _cast_parameters_(unit, list(unit.modules()), compute)
            _cast_parameters_(module, [x for x in module.modules() if x not in inside], compute)
        wrap_forward_(module, cast_inputs)
        return module

    def cast_inputs(forward: Forward) -> Forward:
        def cast(x: Any) -> Any:
            return x.to(compute) if isinstance(x, Tensor) and x.is_floating_point() else x

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            cast_kwargs = {name: cast(x) for name, x in kwargs.items()}
            return forward(self, *map(cast, args), **cast_kwargs)

        return call

    return Transform(apply, kind="precision")


def set_grad_dtype(params: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
    """Set the dtype of the gradients of parameters, to accumulate those of bf16 parameters in fp32.

    By default a bf16 parameter accumulates microbatches in bf16, where a term below 1/256 of the
    sum is lost. The sum, norm and clipping of the gradients then use this dtype too, and
    `clip_and_step` rounds them once before the step, as most optimizers require. Parameters stored
    in fp32 do not need it.

    Args:
        params: Parameters, after the model is built: building makes new ones. FSDP units that shard
            some of them must know it too; see `sum_in_grad_dtype_`.
        dtype: The dtype of their gradients.

    Effects:
        Sets torch's `grad_dtype` of each parameter, and its `.grad` to None.

    Examples:
        >>> p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> set_grad_dtype([p])
        >>> (p * 3).sum().backward()
        >>> p.grad
        tensor([3.])
    """
    for p in params:
        p.grad = None
        p.grad_dtype = dtype


def widen_gradients_(module: nn.Module) -> None:
    """Set fp32 gradients for the parameters that `mixed_precision` stores in bf16.

    Effects:
        Those of `set_grad_dtype` and `sum_in_grad_dtype_`.
    """
    # Frozen parameters too: they may be trained later.
    stored = [p for p in module.parameters() if p.dtype == torch.bfloat16]
    if get_compute_dtype(module) and stored:
        set_grad_dtype(stored)
        sum_in_grad_dtype_(module)


def autocast_call(call: Call, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Return a call that runs a model under torch's autocast; the loss is outside of it.

    This is for models that do not cast to fp32 themselves: autocast chooses the dtype of each
    operation. For all others `mixed_precision` is cheaper (it casts a weight once), is the same in
    every layout, and lets FSDP gather in the lower dtype.

    Args:
        call: Calls the model with a batch: `call_model`, or your own function.
        dtype: bf16, or fp16, for which a step must scale its loss (`health.get_loss_scale`).

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> cast = autocast_call(lambda model, batch: model(batch["x"]))
        >>> cast(model, {"x": torch.ones(1, 2)}).dtype
        torch.bfloat16
    """

    def cast(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        device = next(x.device for x in batch.values() if isinstance(x, Tensor))
        with torch.autocast(device.type, dtype=dtype):
            return call(model, batch)

    return cast


def get_compute_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype in which `mixed_precision` lets a model compute, or None without it.

    Examples:
        >>> get_compute_dtype(nn.Linear(2, 1))
    """
    return _COMPUTE.read(module)


def _cast_parameters_(module: nn.Module, parts: Sequence[nn.Module], compute: torch.dtype) -> None:
    """Let a module's forward pass see the parameters of some of its parts cast, each once."""
    paths = {part: path for path, part in module.named_modules()}
    slots: dict[nn.Parameter, list[tuple[str, str]]] = {}  # a tied parameter has several
    for part in parts:
        for name, parameter in part.named_parameters("", recurse=False, remove_duplicate=False):
            if parameter.is_floating_point() and {parameter.dtype, compute} != {torch.float32}:
                slots.setdefault(parameter, []).append((paths[part], name))

    def cast_parameters(forward: Forward) -> Forward:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # By path at each call: a copy of the module has parts of its own.
            tied = [
                [(self.get_submodule(path), name) for path, name in places]
                for places in slots.values()
            ]
            for owners in tied:
                first, first_name = owners[0]
                cast = getattr(first, first_name)
                # A view if the dtype is the same: its gradient is rounded once, as FSDP's is.
                cast = cast.view_as(cast) if cast.dtype == compute else cast.to(compute)
                for part, name in owners:
                    # An attribute of an instance hides the parameter of the same name.
                    object.__setattr__(part, name, cast)
            try:
                return forward(self, *args, **kwargs)
            finally:
                for part, name in (owner for owners in tied for owner in owners):
                    unhide_(part, name)

        return call

    if slots:
        wrap_forward_(module, cast_parameters)
