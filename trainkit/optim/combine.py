"""Several optimizers as one, and an exponential moving average of what they step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.storage import write_unless_skipped_
from trainkit.parallel.grad_reduction import get_local
from trainkit.types import check_range


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that step, save and load as one; see `combine_optimizers`."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], mean: float | None) -> None:
        """Take over the groups and the state of the parts."""
        self.parts, self.mean = tuple(parts), mean
        for part in parts:
            # A part that keeps a mean of its own (`ScheduleFree`) needs no second one.
            has_mean = "mean" in getattr(part, "copies", ())
            for group in part.param_groups:
                # For people and checkpoints; the part is found by its position.
                group["optimizer"] = type(part).__name__
                group["mean"] = None if has_mean else mean
                # torch requires that all groups have names, or none.
                group.setdefault("param_names", [""] * len(group["params"]))
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        """Give the parts this one's groups and state: the same objects, not equal ones."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    # Checkpoints find this by its name, to see what state such an optimizer has.
    def again(self, parts: Sequence[torch.optim.Optimizer]) -> CombinedOptimizer:
        """Combine other optimizers in the same way."""
        return CombinedOptimizer(parts, self.mean)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If torch's fused SGD skips its first step, its momentum buffer stays uninitialized.
        can = (getattr(part, "_step_supports_amp_scaling", False) for part in self.parts)
        return all(can) and not any(isinstance(part, torch.optim.SGD) for part in self.parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part, in order; see `torch.optim.Optimizer.step`.

        Effects:
            Writes parameters and state, unless `found_inf` is set and not 0.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        found_inf = getattr(self, "found_inf", None)
        # An optimizer initializes a parameter whose state is empty, which a mean would prevent.
        means = {
            p: state.pop("mean") for p, state in self.state.items() if state.keys() == {"mean"}
        }
        for part in self.parts:
            if found_inf is not None:
                vars(part)["found_inf"] = found_inf
            try:
                part.step()
            finally:
                vars(part).pop("found_inf", None)
        for p, mean in means.items():
            self.state[p]["mean"] = mean
        self._update_means(found_inf)
        return loss

    @torch.no_grad()
    def _update_means(self, found_inf: Tensor | None) -> None:
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf:
            return
        for group in self.param_groups:
            decay: float | None = group["mean"]
            for p in group["params"]:
                if decay is None or p.grad is None:
                    continue
                # fp32: a bf16 mean would not move by a thousandth of a difference.
                value = p.data.to(torch.promote_types(p.dtype, torch.float32))
                mean = get_local(self.state[p].setdefault("mean", value.clone()))
                updated = torch.lerp(mean, get_local(value), 1 - decay)
                write_unless_skipped_(mean, updated, found_inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`; the parts share the new groups and state.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        load_as_saved_(self, state_dict)
        # torch has replaced groups and state, and the parts still have the old ones.
        self._share()


def combine_optimizers(
    parts: Sequence[torch.optim.Optimizer], *, mean: float | None = None
) -> torch.optim.Optimizer:
    """Combine several optimizers into one, whose step is a step of each, in order.

    It shares groups and state with them: a learning rate that is set in one place is set in the
    other, after loading too, and a checkpoint has all of them. The "optimizer" of a group is the
    class that steps it.

    Args:
        parts: The optimizers, one or more.
        mean: The decay rate, such as 0.999, of an exponential moving average of the parameters over
            steps. It starts from the parameters after the first step, and is stored in fp32;
            `use_averaged_parameters` evaluates it. A part that keeps a mean of its own
            (`ScheduleFree`) continues with that.

    Raises:
        ValueError: There is no part, one is a combined optimizer, a parameter is in two of them, or
            `mean` is not in [0, 1).

    Examples:
        >>> a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> optimizer = combine_optimizers(
        ...     [torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=0.2)]
        ... )
        >>> (a + b).backward()
        >>> optimizer.param_groups[0]["lr"] = 0.5
        >>> optimizer.step()
        >>> a.item(), round(b.item(), 3)
        (0.5, 0.798)
    """
    if not parts or any(isinstance(part, CombinedOptimizer) for part in parts):
        got = "none" if not parts else "one that is combined already"
        raise ValueError(f"combine_optimizers: parts must be optimizers, got {got}")
    check_range("combine_optimizers", at_least=0, below=1, mean=mean)
    return CombinedOptimizer(parts, mean)


@contextmanager
@torch.no_grad()
def use_averaged_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the parameters by their averages within a `with` block.

    The averages are the optimizer's state "mean": the moving average of
    `combine_optimizers(mean=)`, or x of `ScheduleFree`. Parameters without one stay. Evaluate and
    export inside the block; do not step or save a checkpoint there.

    Args:
        optimizer: Any optimizer.

    Effects:
        Writes the parameters, and restores them bit for bit at the end.

    Examples:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = combine_optimizers([torch.optim.SGD([weight], lr=0.5)], mean=0.75)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> with use_averaged_parameters(optimizer):
        ...     weight.detach().clone()
        tensor([0.3750])
        >>> weight.detach()
        tensor([0.])
    """
    originals: dict[nn.Parameter, Tensor] = {}
    try:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if "mean" in optimizer.state.get(p, {}):
                originals[p] = get_local(p.data).clone()
                get_local(p.data).copy_(get_local(optimizer.state[p]["mean"]))
        yield
    finally:
        for p, values in originals.items():
            get_local(p.data).copy_(values)


def load_as_saved_(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Replace state that `load_state_dict` has cast to the parameters' dtypes by the saved tensors.

    Effects:
        Replaces tensors of the optimizer's state.
    """
    # torch numbers the parameters of all groups in order; the saved state has these numbers as
    # keys.
    saved = (x for group in state_dict["param_groups"] for x in group["params"])
    params = (p for group in optimizer.param_groups for p in group["params"])
    for p, index in zip(params, saved, strict=True):
        for key, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[p][key] = value.to(p.device, copy=True)
