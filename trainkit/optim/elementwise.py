"""Optimizers that step every element alone: a rule of a few lines, in one pass over memory.

A rule is a pure function of numbers. On a CPU numba makes one loop of it, which reads and writes
parameter, gradient and moments once, and decodes and encodes those in fewer bits a chunk at a time;
elsewhere the same lines run on whole tensors, with the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from numba.extending import overload, register_jitable
from torch import Tensor, nn

from trainkit.noise.hashing import key_of
from trainkit.noise.rounding import keys_at, rounded_rows, rounding_keys
from trainkit.optim.groups import check_numbers
from trainkit.optim.loops import rule_loop
from trainkit.optim.storage import (
    BLOCK,
    Moments,
    Rounding,
    empty_moment,
    is_in_blocks,
    read_moment,
    scale_name,
    up_of,
    wide,
    written_moment,
)
from trainkit.optim.together import load_as_saved_
from trainkit.parallel.naming import Box, PlacedAlike, box_of, placed_as
from trainkit.parallel.reduction import local_of
from trainkit.types import among

Numbers = tuple[tuple[Any, ...], dict[str, Any]]
"""What a rule is told in a step, and the counts after it: 0-d tensors on an accelerator."""


# -------------------------------------------------------------------------------- words of a rule


def root(x: Any) -> Any:
    """Return the square root of a number, or of every element."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def sign(x: Any) -> Any:
    """Return -1, 0 or 1 for a number, or for every element."""
    return x.sign() if isinstance(x, Tensor) else np.sign(x)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Return one of two numbers, or for every element one of two tensors'."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


# What numba puts in their place where it compiles a rule; it compares the arguments.
@overload(root)
def _root(x: Any) -> Any:  # noqa: ARG001
    def root_of_number(x: Any) -> Any:
        return np.sqrt(x)

    return root_of_number


@overload(sign)
def _sign(x: Any) -> Any:  # noqa: ARG001
    def sign_of_number(x: Any) -> Any:
        return np.sign(x)

    return sign_of_number


@overload(where)
def _where(condition: Any, yes: Any, no: Any) -> Any:  # noqa: ARG001
    def one_of_numbers(condition: Any, yes: Any, no: Any) -> Any:
        return yes if condition else no

    return one_of_numbers


@register_jitable
def decayed(u: Any, p: Any, decay: Any, against: Any) -> Any:
    """Return an update with weight decay: `decay` of p where the two agree, else `against` of it.

    Where `against` is 0 the decay is cautious (Chen et al. 2025, Cautious Weight Decay): it never
    works against the update.
    """
    return u + where(u * p < 0, against * p, decay * p)


# ------------------------------------------------------------------------------------- optimizer


class Elementwise(torch.optim.Optimizer):
    """What all optimizers that step every element alone share; one of them says its rule.

    A subclass has `moments`, the names of what it remembers of an element (two at most; the name of
    a second moment ends as "exp_avg_sq"), those of them that begin as `copies` of the parameter and
    are never in few bits; `rule(p, g, *moments, numbers) -> (p, *moments)`, arithmetic with `root`,
    `sign`, `where` and `decayed`; `options` of its own, with what holds otherwise; and
    `numbers(group, counts)`, what follows from a group's options and from what is counted. Rule and
    numbers are pure. A literal in a rule is of 64 bits, and makes so what it
    touches: give numbers instead.

    Parameters may be sharded in any way; a step can be skipped on the device (`found_inf`); moments
    are in fp32 unless somebody asks for less, also those of parameters in bf16.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    copies: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[tuple[str, ...]] = ("step",)
    options: ClassVar[Mapping[str, Any]] = {}
    rule: ClassVar[Any]

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        cautious: bool = False,
        moments: Moments = "fp32",
        rounding: Rounding = "nearest",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Take what all of them have.

        Args:
            params: Parameters, or groups of them as `decay_groups` returns.
            lr: The rate until somebody sets another, as `clip_and_step` does in every step.
            weight_decay: For groups that do not say; lr * weight_decay of a parameter goes per
                step.
            cautious: Decay only where it does not work against the update.
            moments: How moments are kept: see `storage.Moments`.
            rounding: What becomes of small steps of parameters in bf16: see `storage.Rounding`.
            seed: What random rounding follows from, beside the parameter's name and the step.
            options: Those of the rule.

        Raises:
            TypeError: The rule has no such option.
            ValueError: An option is out of range, random rounding has no names to go by, or a
                layout cuts a block of 8-bit moments.
        """
        name = type(self).__name__
        among(get_args(Moments), name, moments=moments)
        among(get_args(Rounding), name, rounding=rounding)
        if unknown := sorted(options.keys() - self.options.keys()):
            raise TypeError(f"{name}: there is no option {unknown[0]}; there are {[*self.options]}")
        options = {**self.options, **options}
        options |= {"lr": lr, "weight_decay": weight_decay, "cautious": cautious}
        options |= {"moments": moments, "rounding": rounding, "seed": seed, "capturable": True}
        super().__init__(list(params), options)
        for group in self.param_groups:
            check_numbers(name, group)
            if group["rounding"] == "stochastic" and "param_names" not in group:
                raise ValueError(
                    f"{name}: stochastic rounding draws by the names of parameters; give them in "
                    "each group's `param_names`, as decay_groups does"
                )
            if {*self.moments} - {*self.copies}:
                for p in group["params"]:
                    is_in_blocks(p, group["moments"])

    @staticmethod
    def numbers(
        group: Mapping[str, Any], counts: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Return what the rule is told in this step, a tuple, and the counts after it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see `torch.optim.Optimizer.step`.

        Effects:
            Writes parameters and moments, unless `found_inf` is set and not 0.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for name, p in zip(names, group["params"], strict=True):
                if p.grad is not None:
                    self._step_one(p, group, name)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, in the dtypes that it has.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        load_as_saved_(self, state_dict)

    def _step_one(self, p: nn.Parameter, group: Mapping[str, Any], name: str) -> None:
        state, on_host = self.state[p], p.device.type == "cpu"
        if not state:
            state.update(self.begun(p, group))
        refused = getattr(self, "found_inf", None)
        if on_host and refused is not None:
            if refused:
                return
            refused = None
        counts = {x: float(state[x]) if on_host else state[x].double() for x in self.counts}
        numbers, counted = self.numbers(group, counts)
        for x, count in counted.items():
            _put_(state[x], torch.as_tensor(count, dtype=torch.float64), refused)
        box = box_of(p)
        held = {"": box.local} | {x: local_of(t) for x, t in state.items() if x not in counts}
        flat = {x: t.reshape(-1) for x, t in held.items()}
        grad = local_of(placed_as(p, p.grad)).reshape(-1)
        rounded = _rounding(box, group, name, counted["step"])
        if on_host and _can_loop(grad, *flat.values()):
            self._step_in_loop(flat, grad, numbers, rounded, counted["step"])
        else:
            self._step_whole(flat, grad, numbers, rounded, counted["step"], refused)
        for x, t in held.items():
            if not t.is_contiguous():
                t.copy_(flat[x].view(t.shape))

    def begun(self, p: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what is remembered of a parameter before its first step."""
        made = {x: torch.zeros((), device=p.device, dtype=torch.float64) for x in self.counts}
        for x in self.moments:
            made |= empty_moment(p, x, "fp32" if x in self.copies else group["moments"])
        for x in self.copies:
            local_of(made[x]).copy_(box_of(p).local)
        if group["rounding"] == "kahan" and p.dtype == torch.bfloat16:
            with PlacedAlike():
                made["rest"] = torch.zeros_like(p.data)
        return made

    def _step_in_loop(
        self,
        flat: Mapping[str, Tensor],
        grad: Tensor,
        numbers: tuple[Any, ...],
        rounded: Mapping[str, Any] | None,
        step: Any,
    ) -> None:
        kind = np.float64 if grad.dtype == torch.float64 else np.float32
        kept = {x: _array(t) for x, t in flat.items()}
        names = (*self.moments, "", "")[:2]
        moments = [kept[x] if x else None for x in names]
        scales = [flat.get(scale_name(x)) for x in names]
        scales = [None if x is None else x.view(torch.int32).numpy() for x in scales]
        keys = None if rounded is None else rounded["keys"].numpy().astype(np.uint32)
        noise = None if rounded is None else np.empty(BLOCK, np.uint32)
        at = (0, 0) if rounded is None else (rounded["columns"], rounded["first"])
        work = tuple(np.empty(BLOCK, kind) for _ in names)
        how = (tuple(scales), keys, at, up_of(step).numpy())
        how += (work, tuple(x.view(np.int32) for x in work), noise, tuple(map(kind, numbers)))
        run = rule_loop(self.rule, len(self.moments))
        run(kept[""], _array(grad), kept.get("rest"), *moments, *how)

    def _step_whole(  # noqa: PLR0917 (all that a step reads and writes)
        self,
        flat: Mapping[str, Tensor],
        grad: Tensor,
        numbers: tuple[Any, ...],
        rounded: dict[str, Any] | None,
        step: Any,
        refused: Tensor | None,
    ) -> None:
        dtype = wide(flat[""].dtype)
        p = flat[""].to(dtype)
        if "rest" in flat:
            p = p + flat["rest"]
        moments = [read_moment(x, flat, dtype) for x in self.moments]
        stepped = self.rule(p, grad.to(dtype), *moments, numbers)
        p, *moments = stepped if self.moments else (stepped,)
        found = {"": p if rounded is None else rounded_rows(p, begin=0, **rounded)}
        if "rest" in flat:
            found[""] = p.to(flat[""].dtype)
            found["rest"] = p - found[""]
        for x, values in zip(self.moments, moments, strict=True):
            found |= written_moment(x, values, flat, step)
        for x, values in found.items():
            _put_(flat[x], values, refused)


def _put_(out: Tensor, values: Tensor, refused: Tensor | None) -> None:
    """Write values, but where a step is refused: never by a factor of 0, for 0 times NaN is NaN."""
    out.copy_(values if refused is None else torch.where(refused > 0, out, values.to(out.dtype)))


def _can_loop(p: Tensor, *others: Tensor) -> bool:
    """Return whether a compiled loop knows the dtypes that a step reads and writes."""
    narrow = {torch.float32, torch.bfloat16, torch.uint8}
    return {x.dtype for x in (p, *others)} <= ({p.dtype} if p.dtype == torch.float64 else narrow)


def _array(x: Tensor) -> Any:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _rounding(box: Box, group: Mapping[str, Any], name: str, step: Any) -> dict[str, Any] | None:
    """Return what `rounded_rows` rounds a parameter at random by; None to nearest."""
    local = box.local
    if group["rounding"] != "stochastic" or local.dtype != torch.bfloat16:
        return None
    shape, offset = tuple(local.shape) or (1,), tuple(box.offset) or (0,)
    keys = keys_at(_row_keys(group["seed"], name, shape, offset, local.device), step)
    return {"keys": keys, "columns": shape[-1], "first": offset[-1]}


@functools.lru_cache(maxsize=10_000)
def _row_keys(
    seed: int, name: str, shape: tuple[int, ...], offset: tuple[int, ...], device: torch.device
) -> Tensor:
    return rounding_keys(key_of(seed, "rounding", name), shape, offset).to(device)
