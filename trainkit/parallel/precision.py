"""Compute in bf16 or fp16 on fp32 parameters, with the same roundings in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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
"""What a `Precision` calls the dtypes that can be computed in."""


def resolve_precision(precision: Precision, device: torch.device | str | None = None) -> Precision:
    """Return a precision whose `compute` is no "auto", as recipes do first of all.

    Args:
        precision: Its "auto" becomes bf16 on accelerators, and fp32 on a CPU and on NVIDIA GPUs
            before Ampere (2020), which cannot multiply in bf16.
        device: By default the first GPU, or the CPU where there is none.

    Examples:
        >>> resolve_precision(Precision(), "cpu").compute
        'fp32'
    """
    if precision.compute != "auto":
        return precision
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return attrs.evolve(precision, compute="fp32" if old or device.type == "cpu" else "bf16")


def mixed_precision(
    compute: torch.dtype | None,
    *,
    storage: torch.dtype = torch.float32,
    blocks: str = "layers.*",
) -> Transform:
    """Return the transform that keeps parameters in one dtype and computes in another.

    In the forward pass parameters are seen cast; gradients are cast back, and added up in fp32.
    Under `fsdp`, which stands later in the plan, units gather their parameters in that dtype and
    reduce gradients in fp32. Both round at the same places, so the layouts differ by the order of
    sums alone.

    Floating-point inputs of the model are cast too; nothing else is. Unlike autocast it casts no
    operation's inputs: a norm or a softmax that must be exact asks for fp32 itself, as those of the
    decoder and of Hugging Face's models do.

    Args:
        compute: The dtype to compute in, bf16 as a rule, or fp16, for which a step must scale its
            loss (`health.get_loss_scale`); None changes nothing, and a model is then trained in the
            dtype that it was made in.
        storage: The dtype to keep parameters in. Those of bf16 get their gradients in fp32, in
            which microbatches and ranks add up. The optimizer must round as
            `optim.storage.Rounding` says.
        blocks: The name pattern of the blocks, as for `fsdp`.

    Returns:
        A transform for `build_stages`. Parameters made in fp16 or bf16, as those of many Hugging
        Face models are, become fp32, or what `storage` says.

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
        refuse_max_norm(module, by="precision")
        for parameter in module.parameters():
            if parameter.dtype in {torch.float16, torch.bfloat16, torch.float32} - {storage}:
                stored = nn.Parameter(parameter.detach().to(storage), parameter.requires_grad)
                vars(stored).update(vars(parameter))
                # Not `parameter.data = ...`: that of a DTensor leaves its dtype as it was.
                torch.utils.swap_tensors(parameter, stored)
        _COMPUTE.write_(module, compute)
        if ps.fsdp.count == 1 and not replicates(module, ps):  # else fsdp() gathers them cast
            units = find_blocks(module, blocks)
            inside = {part for unit in units for part in unit.modules()}
            for unit in units:
                _show_cast_(unit, list(unit.modules()), compute)
            _show_cast_(module, [x for x in module.modules() if x not in inside], compute)
        wrap_forward_(module, partial(_casting_inputs, compute))
        return module

    return Transform(apply, kind="precision")


def set_grad_dtype(params: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
    """Let the gradients of parameters be in a dtype of their own: those of bf16 added up in fp32.

    Without it a parameter that is stored in bf16 adds its microbatches up in bf16, where what
    is below 1/256 of the sum is lost. Their sum, norm and clip are then in the wider dtype too;
    `clip_and_step` rounds once, before the step, as most optimizers want it. Parameters that are
    stored in fp32, with `mixed_precision` or without, do not need it.

    Args:
        params: Parameters; call it after the model is built, which makes them anew. Of those that
            FSDP shards, its units must know it too: see `sum_in_grad_dtype_`.
        dtype: The dtype of their gradients.

    Effects:
        Sets torch's `grad_dtype` of each, and its `.grad` to None.

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
    """Let what `mixed_precision` keeps in bf16 have its gradients in fp32.

    Effects:
        That of `set_grad_dtype`, on parts that ranks of `tensor` hold too.
    """
    # Frozen ones too: they may be trained later.
    stored = [p for p in module.parameters() if p.dtype == torch.bfloat16]
    if compute_dtype(module) and stored:
        set_grad_dtype(stored)
        sum_in_grad_dtype_(module)


def autocast_call(call: Call, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Return a call that runs a model under torch's autocast; its loss stays outside.

    For models that ask for nothing in fp32 themselves: autocast knows by the operation what rounds
    well. `mixed_precision` is cheaper for those that do (it casts a weight once), is the same in
    every layout, and lets FSDP gather in the lower dtype.

    Args:
        call: How a batch enters the model: `call_model`, or your own.
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


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that `mixed_precision` has a model compute in; None is its parameters' own.

    Examples:
        >>> compute_dtype(nn.Linear(2, 1))
    """
    return _COMPUTE.read(module)


def _show_cast_(module: nn.Module, parts: Sequence[nn.Module], compute: torch.dtype) -> None:
    """Show the own parameters of some parts of a module cast, during the module's forward."""
    paths = {part: path for path, part in module.named_modules()}
    places: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for part in parts:
        for name, parameter in part.named_parameters("", recurse=False, remove_duplicate=False):
            if parameter.is_floating_point() and {parameter.dtype, compute} != {torch.float32}:
                places.setdefault(parameter, []).append((paths[part], name))
    if places:
        wrap_forward_(module, partial(_showing_cast, list(places.values()), compute))


def _showing_cast(
    places: Sequence[Sequence[tuple[str, str]]], compute: torch.dtype, forward: Forward
) -> Forward:
    """Return a forward pass that sees parameters cast; one that is in several places, once."""

    # An attribute of an instance hides the parameter of that name for as long as it is there.
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tied = [[(self.get_submodule(path), name) for path, name in each] for each in places]
        for (first, name), *others in tied:
            cast = getattr(first, name)
            # A view, where the dtype is the same: its gradient is rounded once, as FSDP's is.
            cast = cast.view_as(cast) if cast.dtype == compute else cast.to(compute)
            for part, other in ((first, name), *others):
                object.__setattr__(part, other, cast)
        try:
            return forward(self, *args, **kwargs)
        finally:
            for part, name in (place for each in tied for place in each):
                unhide_(part, name)

    return call


def _casting_inputs(compute: torch.dtype, forward: Forward) -> Forward:
    def cast(x: Any) -> Any:
        return x.to(compute) if isinstance(x, Tensor) and x.is_floating_point() else x

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

    return call
