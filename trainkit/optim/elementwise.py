"""Optimizers that step every element alone: a rule of a few lines, in one pass over memory.

A rule is a pure function of numbers. On a CPU numba makes one loop of it, which reads and writes
parameter, gradient and moments once, and decodes and encodes those in fewer bits a chunk at a time;
elsewhere the same lines run on whole tensors, with the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast, get_args

import attrs
import numpy as np
import torch
from numba.extending import overload, register_jitable
from torch import Tensor, nn

from trainkit.optim.combine import load_as_saved_
from trainkit.optim.compiled_loops import rule_loop
from trainkit.optim.groups import check_numbers
from trainkit.optim.rounding_keys import Rows
from trainkit.optim.storage import (
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
from trainkit.parallel.grad_reduction import check_dense, local_of
from trainkit.parallel.parameters import PlacedAlike, get_local_box, placed_as
from trainkit.types import check_choice

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


class ElementwiseOptimizer(torch.optim.Optimizer):
    """What all optimizers that step every element alone share; one of them says its rule.

    A subclass has `moments`, the names of what it remembers of an element (two at most; the name of
    a second moment ends as "exp_avg_sq"), those of them that begin as `copies` of the parameter and
    are never in few bits; `counts`, the names of the numbers that its rule goes by ("step" is
    counted for any rule where rounding draws by it); `rule(p, g, *moments, numbers) -> (p,
    *moments)`, arithmetic with `root`, `sign`, `where` and `decayed`; `options` of its own, with
    what holds otherwise; and `numbers(group, counts)`, what follows from a group's options and from
    what is counted. Rule and numbers are pure. A literal in a rule is of 64 bits, and makes so what
    it touches: give numbers instead.

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
        check_choice(get_args(Moments), name, moments=moments)
        check_choice(get_args(Rounding), name, rounding=rounding)
        if unknown := sorted(options.keys() - self.options.keys()):
            raise TypeError(f"{name}: there is no option {unknown[0]}; there are {[*self.options]}")
        options = {**self.options, **options}
        options |= {"lr": lr, "weight_decay": weight_decay, "cautious": cautious}
        options |= {"moments": moments, "rounding": rounding, "seed": seed, "capturable": True}
        self._known_rows = dict[int, Rows]()
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

    def __init_subclass__(cls, **options: Any) -> None:
        """List what is remembered beside counts, in the order in which the loop takes it."""
        super().__init_subclass__(**options)
        scales = map(scale_name, cls.moments)
        none = ("none", "none")
        cls.parts_of_state = ("rest", *(*cls.moments, *none)[:2], *(*scales, *none)[:2])

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
        refused = getattr(self, "found_inf", None)
        for group in self.param_groups:
            check_dense(group["params"], [group])
            counts = self.counts_of(group)
            numbers = _shared_numbers(self, group, counts)
            names = group.get("param_names") or [""] * len(group["params"])
            for name, p in zip(names, group["params"], strict=True):
                if p.grad is not None:
                    self._step_one(p, group, name, counts, numbers, refused)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, in the dtypes that it has.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        load_as_saved_(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was copied or loaded; torch calls it for both."""
        super().__setstate__(state)
        self._known_rows = {}

    def counts_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what is counted of a parameter: the step too where rounding draws by it."""
        draws = group["rounding"] == "stochastic" or (
            group["moments"] != "fp32" and {*self.moments} - {*self.copies}
        )
        return ("step", *self.counts) if draws and "step" not in self.counts else self.counts

    def _step_one(  # noqa: PLR0917 (all that a step reads)
        self,
        p: nn.Parameter,
        group: Mapping[str, Any],
        name: str,
        counts: tuple[str, ...],
        numbers: Callable[..., Any],
        refused: Tensor | None,
    ) -> None:
        state, on_host = self.state[p], p.is_cpu
        if not state:
            state.update(self.begun(p, group))
        if on_host and refused is not None:
            if refused:
                return
            refused = None
        before = [float(state[x]) if on_host else state[x].double() for x in counts]
        told, in_fp32, in_fp64, counted, step = numbers(before, on_host=on_host)
        for x, count in counted.items():
            if on_host:
                state[x].fill_(count)
            else:
                _put_(state[x], torch.as_tensor(count, dtype=torch.float64), refused)
        held = [local_of(p), local_of(placed_as(p, p.grad)), *map(state.get, self.parts_of_state)]
        held = [None if x is None else local_of(x) for x in held]
        kinds = _kinds_of(*[None if x is None else x.dtype for x in held])
        is_drawn = kinds.p == torch.bfloat16 and group["rounding"] == "stochastic"
        rows = self._rows(p, group["seed"], name) if is_drawn or kinds.has_narrow_moments else None
        keys = rows if is_drawn else None
        if on_host and kinds.can_loop:
            told = in_fp64 if kinds.p == torch.float64 else in_fp32
            self._step_in_loop(held, kinds, told, keys, rows, step)
        else:
            self._step_whole(held, told, keys, rows, step, refused)

    def _rows(self, p: nn.Parameter, seed: int, name: str) -> Rows:
        """Return the keys by which this rank's part of a parameter is rounded at random."""
        known = self._known_rows.get(id(p))
        if known is None or not known.are_of(p, seed, name):
            known = self._known_rows[id(p)] = Rows.of(p, seed, name)
        return known

    def begun(self, p: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what is remembered of a parameter before its first step."""
        counts = self.counts_of(group)
        made = {x: torch.zeros((), device=p.device, dtype=torch.float64) for x in counts}
        for x in self.moments:
            made |= empty_moment(p, x, "fp32" if x in self.copies else group["moments"])
        for x in self.copies:
            local_of(made[x]).copy_(get_local_box(p).local)
        if group["rounding"] == "kahan" and p.dtype == torch.bfloat16:
            with PlacedAlike():
                made["rest"] = torch.zeros_like(p.data)
        return made

    def _step_in_loop(  # noqa: PLR0917 (all that a step reads and writes)
        self,
        held: Sequence[Tensor | None],
        kinds: _Kinds,
        numbers: tuple[Any, ...],
        keys: Rows | None,
        rows: Rows | None,
        step: Any,
    ) -> None:
        flat = [x if x is None or x.is_contiguous() else x.contiguous() for x in held]
        size = cast("Tensor", flat[0]).numel()
        rule_loop(self.rule, len(self.moments))(
            size,
            tuple([0 if x is None else x.data_ptr() for x in flat]),
            kinds.arrays,
            None if keys is None else keys.own_array,
            rows.moments_array if rows is not None and kinds.has_narrow_moments else None,
            (0, 1, 0) if rows is None else (int(step), rows.columns, rows.first),
            up_of(step).numpy() if kinds.has_scales else _INT32,
            numbers,
        )
        for x, y in zip(held, flat, strict=True):
            if x is not None and y is not None and x is not y and x is not held[1]:
                x.copy_(y)  # never into the gradient

    def _step_whole(  # noqa: PLR0917 (all that a step reads and writes)
        self,
        held: Sequence[Tensor | None],
        numbers: tuple[Any, ...],
        keys: Rows | None,
        rows: Rows | None,
        step: Any,
        refused: Tensor | None,
    ) -> None:
        named = dict(zip(("", "grad", *self.parts_of_state), held, strict=True))
        flat = {x: t.detach().reshape(-1) for x, t in named.items() if t is not None}
        dtype = wide(flat[""].dtype)
        p = flat[""].to(dtype)
        if "rest" in flat:
            p = p + flat["rest"]
        moments = [read_moment(x, flat, dtype) for x in self.moments]
        stepped = self.rule(p, flat.pop("grad").to(dtype), *moments, numbers)
        p, *moments = stepped if self.moments else (stepped,)
        found = {"": p if keys is None else keys.rounded(p, keys.own, step)}
        if "rest" in flat:
            found[""] = p.to(flat[""].dtype)
            found["rest"] = p - found[""]
        for index, (x, values) in enumerate(zip(self.moments, moments, strict=True)):
            if rows is not None and flat[x].dtype == torch.bfloat16:
                found[x] = rows.rounded(values, rows.moments, step, lower=index == 1)
            else:
                found |= written_moment(x, values, flat, step)
        for x, values in found.items():
            _put_(flat[x], values, refused)
            whole = named[x]
            if whole is not None and not whole.is_contiguous():
                whole.copy_(flat[x].view(whole.shape))


def _put_(out: Tensor, values: Tensor, refused: Tensor | None) -> None:
    """Write values, but where a step is refused: never by a factor of 0, for 0 times NaN is NaN."""
    out.copy_(values if refused is None else torch.where(refused > 0, out, values.to(out.dtype)))


_ARRAYS = {
    torch.float64: np.empty(0, np.float64),
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.uint8: np.empty(0, np.uint8),
}
_INT32 = np.empty(0, np.int32)


@attrs.frozen
class _Kinds:
    """What follows from the dtypes of the tensors that a step of a parameter reads and writes."""

    p: torch.dtype
    can_loop: bool
    arrays: tuple[Any, ...]
    has_narrow_moments: bool
    has_scales: bool


@functools.cache
def _kinds_of(*dtypes: torch.dtype | None) -> _Kinds:
    """Return this of parameter, gradient, rest, two moments and their scales; None for none."""
    p, _, _, *moments, m_scales, v_scales = dtypes
    there, narrow = {*dtypes} - {None}, {torch.float32, torch.bfloat16, torch.uint8}
    can_loop = there == {torch.float64} or there <= narrow
    arrays = [None if x is None else _ARRAYS.get(x) for x in dtypes[:5]]
    arrays += [None if x is None else _INT32 for x in (m_scales, v_scales)]
    has_scales = m_scales is not None or v_scales is not None
    assert p is not None
    return _Kinds(p, can_loop, tuple(arrays), torch.bfloat16 in moments, has_scales)


def _shared_numbers(
    optimizer: ElementwiseOptimizer, group: Mapping[str, Any], names: Sequence[str]
) -> Callable[..., Any]:
    """Return a function from counts to what a step uses, computed once for equal counts.

    That is the numbers as they are, in fp32 and in fp64, the counts after the step, and the step (0
    where it is not counted).
    """
    known: dict[Any, Any] = {}

    def numbers(counts: list[Any], *, on_host: bool) -> Any:
        key = tuple(counts) if on_host else None
        if key is None or key not in known:
            named = dict(zip(names, counts, strict=True))
            told, counted = optimizer.numbers(group, named)
            in_loop = (tuple(map(kind, told)) for kind in (np.float32, np.float64))
            found = (told, *(in_loop if on_host else ((), ())), counted, counted.get("step", 0))
            if key is None:
                return found
            known[key] = found
        return known[key]

    return numbers
