"""Elementwise optimizers: an update rule of a few lines, applied in one pass over memory.

A rule is a pure function of scalars. On a CPU numba compiles it into one loop, which reads and
writes parameter, gradient and moments once, and decodes and encodes low-precision moments a chunk
at a time. On other devices the same lines run on tensors, with bitwise equal results.
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
from trainkit.optim.compiled_loops import make_rule_loop
from trainkit.optim.groups import check_numbers
from trainkit.optim.rounding_keys import Rows
from trainkit.optim.storage import (
    Moments,
    Rounding,
    empty_moment,
    encode_moment,
    get_step_dtype,
    is_in_blocks,
    make_offsets,
    read_moment,
    scale_name,
    write_unless_skipped_,
)
from trainkit.parallel.grad_reduction import check_dense, get_local
from trainkit.parallel.parameters import PlacedAlike, get_local_box, redistribute_like
from trainkit.types import check_choice

Coefficients = tuple[tuple[Any, ...], dict[str, Any]]
"""The coefficients of a rule in a step, and the counters after it; 0-d tensors on a device."""


# ---------------------------------------------------------------------------- functions for rules


def root(x: Any) -> Any:
    """Return the square root of a number, or of each element of a tensor."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def sign(x: Any) -> Any:
    """Return the sign of a number, or of each element of a tensor: -1, 0 or 1."""
    return x.sign() if isinstance(x, Tensor) else np.sign(x)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Select between two numbers, or elementwise between two tensors."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


# numba compiles these in place of the three above; it requires the same names of parameters.
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
    """Add weight decay to an update u: `decay * p` where u and p agree in sign, else `against * p`.

    With `against` = 0 the decay is cautious: it never opposes the update (Chen et al., "Cautious
    weight decay", 2025).
    """
    return u + where(u * p < 0, against * p, decay * p)


# ------------------------------------------------------------------------------------- optimizer


class ElementwiseOptimizer(torch.optim.Optimizer):
    """The base class of elementwise optimizers; a subclass defines the update rule.

    Parameters may be sharded in any way. A step can be skipped on the device (`found_inf`). Moments
    are in fp32 by default, also those of bf16 parameters.

    A subclass defines, with `rule` and `coefficients` pure functions:

    Attributes:
        moments: The names of its moments, at most two; a second moment's ends as "exp_avg_sq".
        copies: Those of the moments that start as copies of the parameter. They are never in low
            precision.
        counts: The names of its counters. "step" is added where stochastic rounding needs it.
        options: Its own options with their defaults.
        rule: `rule(p, g, *moments, coefficients) -> (p, *moments)`, arithmetic with `root`, `sign`,
            `where` and `decayed`. A literal would promote its operands to 64 bits, so constants
            come from `coefficients`.
        coefficients: `coefficients(group, counts)`, those of the rule in a step.
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
        """Set the options that all rules share.

        Args:
            params: Parameters, or groups of them as `decay_groups` returns.
            lr: The initial learning rate; `clip_and_step` sets it in every step.
            weight_decay: The decay of groups that set none; a parameter shrinks by lr *
                weight_decay per step.
            cautious: Whether decay is skipped where it opposes the update.
            moments: The format of moments; see `storage.Moments`.
            rounding: The rounding of bf16 parameters; see `storage.Rounding`.
            seed: The seed of stochastic rounding, which also depends on the parameter's name and
                the step.
            options: Options of the rule.

        Raises:
            TypeError: The rule has no such option.
            ValueError: An option is out of range, stochastic rounding lacks the names of
                parameters, or a layout splits a block of 8-bit moments.
        """
        name = type(self).__name__
        check_choice(get_args(Moments), name, moments=moments)
        check_choice(get_args(Rounding), name, rounding=rounding)
        if unknown := sorted(options.keys() - self.options.keys()):
            raise TypeError(f"{name}: there is no option {unknown[0]}; there are {[*self.options]}")
        options = {
            **self.options,
            **options,
            "lr": lr,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "moments": moments,
            "rounding": rounding,
            "seed": seed,
            # Counters are tensors on the device, and torch leaves them there when it loads them.
            "capturable": True,
        }
        # By the id of a parameter: the keys follow from its rows alone, and are made once.
        self._known_rows = dict[int, Rows]()
        super().__init__(list(params), options)
        for group in self.param_groups:
            check_numbers(name, group)
            if group["rounding"] == "stochastic" and "param_names" not in group:
                raise ValueError(
                    f"{name}: stochastic rounding needs the names of parameters; set them in each "
                    "group's `param_names`, as decay_groups does"
                )
            if {*self.moments} - {*self.copies}:
                # Raises where the layout splits a block.
                for p in group["params"]:
                    is_in_blocks(p, group["moments"])

    def __init_subclass__(cls, **options: Any) -> None:
        """List the tensors of the state in the order that the compiled loop takes."""
        super().__init_subclass__(**options)
        # The loop takes two moments; what a rule lacks gets a name that no state has.
        none = ("none", "none")
        moments = (*cls.moments, *none)[:2]
        scales = (*map(scale_name, cls.moments), *none)[:2]
        cls.parts_of_state = ("rest", *moments, *scales)

    @staticmethod
    def coefficients(
        group: Mapping[str, Any], counts: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Return the coefficients of the rule in this step, a tuple, and the counters after it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see `torch.optim.Optimizer.step`.

        Effects:
            Writes parameters and moments, unless `found_inf` is set and not 0.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            check_dense(group["params"], [group])
            counts = self.list_counts(group)
            # Most parameters have taken as many steps as the others, so coefficients are computed
            # once.
            get_coefficients = _cache_coefficients(self, group, counts)
            names = group.get("param_names") or [""] * len(group["params"])
            for name, p in zip(names, group["params"], strict=True):
                if p.grad is not None:
                    self._step_one(p, group, name, counts, get_coefficients, found_inf)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` without casting its tensors to the parameters' dtypes.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        load_as_saved_(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a loaded state; torch calls it for both."""
        super().__setstate__(state)
        self._known_rows = {}

    def list_counts(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of a parameter's counters, with "step" where rounding depends on it."""
        draws_by_step = group["rounding"] == "stochastic" or (
            group["moments"] != "fp32" and {*self.moments} - {*self.copies}
        )
        if draws_by_step and "step" not in self.counts:
            return ("step", *self.counts)
        return self.counts

    def _step_one(  # noqa: PLR0917 (all that a step reads)
        self,
        p: nn.Parameter,
        group: Mapping[str, Any],
        name: str,
        counts: tuple[str, ...],
        get_coefficients: Callable[..., Any],
        found_inf: Tensor | None,
    ) -> None:
        state = self.state[p]
        on_host = p.is_cpu
        if not state:
            state.update(self.make_state(p, group))
        # The host can read the flag, and needs no masked writes then.
        if on_host and found_inf is not None:
            if found_inf:
                return
            found_inf = None
        # Reading a counter on a device would be a host sync; there coefficients are fp64 tensors.
        counters = [float(state[x]) if on_host else state[x].double() for x in counts]
        coefficients, in_fp32, in_fp64, new_counts, step = get_coefficients(
            counters, on_host=on_host
        )
        for x, count in new_counts.items():
            if on_host:
                state[x].fill_(count)
            else:
                write_unless_skipped_(
                    state[x], torch.as_tensor(count, dtype=torch.float64), found_inf
                )
        grad = redistribute_like(p, p.grad)
        # In the order of `make_rule_loop`: parameter, gradient, rest, two moments, their scales.
        tensors = [p, grad, *map(state.get, self.parts_of_state)]
        shards = [None if x is None else get_local(x) for x in tensors]
        dtypes = _describe_dtypes(*[None if x is None else x.dtype for x in shards])
        is_stochastic = dtypes.p == torch.bfloat16 and group["rounding"] == "stochastic"
        rows = None
        if is_stochastic or dtypes.has_bf16_moments:
            rows = self._get_rows(p, group["seed"], name)
        # Moments in bf16 are always rounded stochastically, parameters only by that option.
        keys = rows if is_stochastic else None
        if on_host and dtypes.can_loop:
            # Of the parameter's width: numba would promote mixed widths to 64 bits.
            coefficients = in_fp64 if dtypes.p == torch.float64 else in_fp32
            self._step_in_loop(shards, dtypes, coefficients, keys, rows, step)
        else:
            self._step_tensors(shards, coefficients, keys, rows, step, found_inf)

    def _get_rows(self, p: nn.Parameter, seed: int, name: str) -> Rows:
        """Return the keys for stochastic rounding of this rank's shard of a parameter."""
        rows = self._known_rows.get(id(p))
        if rows is None or not rows.are_of(p, seed, name):
            rows = self._known_rows[id(p)] = Rows.of(p, seed, name)
        return rows

    def make_state(self, p: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        counts = self.list_counts(group)
        # fp64, in which the coefficients are computed from the counters.
        state = {x: torch.zeros((), device=p.device, dtype=torch.float64) for x in counts}
        for x in self.moments:
            state |= empty_moment(p, x, "fp32" if x in self.copies else group["moments"])
        for x in self.copies:
            get_local(state[x]).copy_(get_local_box(p).local)
        if group["rounding"] == "kahan" and p.dtype == torch.bfloat16:
            with PlacedAlike():
                state["rest"] = torch.zeros_like(p.data)
        return state

    def _step_in_loop(  # noqa: PLR0917 (all that a step reads and writes)
        self,
        shards: Sequence[Tensor | None],
        dtypes: _Dtypes,
        coefficients: tuple[Any, ...],
        keys: Rows | None,
        rows: Rows | None,
        step: Any,
    ) -> None:
        # The loop takes addresses, so tensors must be contiguous; copies are written back below.
        flat = [x if x is None or x.is_contiguous() else x.contiguous() for x in shards]
        size = cast("Tensor", flat[0]).numel()
        make_rule_loop(self.rule, len(self.moments))(
            size,
            tuple([0 if x is None else x.data_ptr() for x in flat]),
            dtypes.arrays,
            None if keys is None else keys.own_array,
            rows.moments_array if rows is not None and dtypes.has_bf16_moments else None,
            (0, 1, 0) if rows is None else (int(step), rows.columns, rows.first),
            make_offsets(step).numpy() if dtypes.has_scales else _INT32,
            coefficients,
        )
        for x, y in zip(shards, flat, strict=True):
            if x is not None and y is not None and x is not y and x is not shards[1]:
                x.copy_(y)  # never into the gradient

    def _step_tensors(  # noqa: PLR0917 (all that a step reads and writes)
        self,
        shards: Sequence[Tensor | None],
        coefficients: tuple[Any, ...],
        keys: Rows | None,
        rows: Rows | None,
        step: Any,
        found_inf: Tensor | None,
    ) -> None:
        # The parameter has the name "", which no part of its state can have.
        named = dict(zip(("", "grad", *self.parts_of_state), shards, strict=True))
        flat = {x: t.detach().reshape(-1) for x, t in named.items() if t is not None}
        dtype = get_step_dtype(flat[""].dtype)
        p = flat[""].to(dtype)
        if "rest" in flat:
            # Kahan: the parameter is the sum of two bf16 numbers.
            p = p + flat["rest"]
        moments = [read_moment(x, flat, dtype) for x in self.moments]
        stepped = self.rule(p, flat.pop("grad").to(dtype), *moments, coefficients)
        p, *moments = stepped if self.moments else (stepped,)
        results = {"": p if keys is None else keys.round(p, keys.own, step)}
        if "rest" in flat:
            results[""] = p.to(flat[""].dtype)
            # What rounding has cut off, for the next step.
            results["rest"] = p - results[""]
        for index, (x, values) in enumerate(zip(self.moments, moments, strict=True)):
            if rows is not None and flat[x].dtype == torch.bfloat16:
                results[x] = rows.round(values, rows.moments, step, lower=index == 1)
            else:
                results |= encode_moment(x, values, flat, step)
        for x, values in results.items():
            write_unless_skipped_(flat[x], values, found_inf)
            shard = named[x]
            # The reshape above has copied such a shard.
            if shard is not None and not shard.is_contiguous():
                shard.copy_(flat[x].view(shard.shape))


_ARRAYS = {
    torch.float64: np.empty(0, np.float64),
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.uint8: np.empty(0, np.uint8),
}
_INT32 = np.empty(0, np.int32)


@attrs.frozen
class _Dtypes:
    """The dtypes of the tensors of a parameter's step, as far as the step depends on them.

    `arrays` are empty arrays of these dtypes, by which numba knows the types of raw memory.
    """

    p: torch.dtype
    can_loop: bool
    arrays: tuple[Any, ...]
    has_bf16_moments: bool
    has_scales: bool


@functools.cache
def _describe_dtypes(*dtypes: torch.dtype | None) -> _Dtypes:
    """Describe the dtypes of parameter, gradient, rest, two moments and their scales, or None."""
    p, _, _, *moments, m_scales, v_scales = dtypes
    used = {*dtypes} - {None}
    arrays = [None if x is None else _ARRAYS.get(x) for x in dtypes[:5]]
    arrays += [None if x is None else _INT32 for x in (m_scales, v_scales)]
    assert p is not None
    return _Dtypes(
        p=p,
        # The loop computes in one width: fp64, or fp32 for all others.
        can_loop=used == {torch.float64} or used <= {torch.float32, torch.bfloat16, torch.uint8},
        arrays=tuple(arrays),
        has_bf16_moments=torch.bfloat16 in moments,
        has_scales=m_scales is not None or v_scales is not None,
    )


def _cache_coefficients(
    optimizer: ElementwiseOptimizer, group: Mapping[str, Any], names: Sequence[str]
) -> Callable[..., Any]:
    """Return a function from counters to the coefficients of a step, cached by the counters.

    It returns the coefficients as the rule has them, in fp32 and in fp64, the counters after the
    step, and the step (0 where there is no such counter).
    """
    cache: dict[Any, Any] = {}

    def get_coefficients(counts: list[Any], *, on_host: bool) -> Any:
        # On a device counters are tensors, which cannot be compared without waiting.
        key = tuple(counts) if on_host else None
        if key is not None and key in cache:
            return cache[key]
        coefficients, new_counts = optimizer.coefficients(
            group, dict(zip(names, counts, strict=True))
        )
        in_fp32 = tuple(map(np.float32, coefficients)) if on_host else ()
        in_fp64 = tuple(map(np.float64, coefficients)) if on_host else ()
        result = (coefficients, in_fp32, in_fp64, new_counts, new_counts.get("step", 0))
        if key is not None:
            cache[key] = result
        return result

    return get_coefficients
