"""Several optimizers as one, a mean of what they move, and what is evaluated in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.storage import write_unless_skipped_
from trainkit.parallel.grad_reduction import get_local
from trainkit.types import check_range


class Together(torch.optim.Optimizer):
    """Several optimizers that step, save and load as one; see `combine_optimizers`."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], mean: float | None) -> None:
        """Take the parts, whose groups and state are those of the whole from now on."""
        self.parts, self.mean = tuple(parts), mean
        for part in parts:
            for group in part.param_groups:
                group |= {"optimizer": type(part).__name__, "mean": mean}
                if "mean" in getattr(part, "copies", ()):
                    group["mean"] = None
                group.setdefault("param_names", [""] * len(group["params"]))  # all have, or none
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

    def again(self, parts: Sequence[torch.optim.Optimizer]) -> Together:
        """Return the same of other optimizers."""
        return Together(parts, self.mean)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A fused SGD that skips its first step keeps whatever its momentum's memory held before.
        can = (getattr(part, "_step_supports_amp_scaling", False) for part in self.parts)
        return all(can) and not any(isinstance(part, torch.optim.SGD) for part in self.parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every part take its step, in order; see `torch.optim.Optimizer.step`.

        Effects:
            Writes parameters and state, unless `found_inf` is set and not 0.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        refused = getattr(self, "found_inf", None)
        # To its optimizer a parameter of which only the mean is known is new.
        means = {p: held.pop("mean") for p, held in self.state.items() if held.keys() == {"mean"}}
        for part in self.parts:
            vars(part).update({} if refused is None else {"found_inf": refused})
            try:
                part.step()
            finally:
                vars(part).pop("found_inf", None)
        for p, mean in means.items():
            self.state[p]["mean"] = mean
        self._move_means(refused)
        return loss

    @torch.no_grad()
    def _move_means(self, refused: Tensor | None) -> None:
        if refused is not None and refused.device.type == "cpu" and refused:
            return
        for group in self.param_groups:
            stays: float | None = group["mean"]
            for p in group["params"]:
                if stays is None or p.grad is None:
                    continue
                state, now = self.state[p], p.data.to(torch.promote_types(p.dtype, torch.float32))
                mean = get_local(state.setdefault("mean", now.clone()))
                moved = torch.lerp(mean, get_local(now), 1 - stays)
                write_unless_skipped_(mean, moved, refused)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; the parts go on sharing groups and state.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        load_as_saved_(self, state_dict)
        self._share()


def combine_optimizers(
    parts: Sequence[torch.optim.Optimizer], *, mean: float | None = None
) -> torch.optim.Optimizer:
    """Return one optimizer of several: a step of it is a step of each, in order.

    Its groups and its state are theirs, the same objects: a rate that is set in one place is set in
    the other, after loading too, and a checkpoint holds all of them. A group's "optimizer" says
    whose it is.

    Args:
        parts: The optimizers, one or more.
        mean: Keep an exponentially weighted mean of the parameters over steps, of which this much
            stays in a step: 0.999 say. It begins as the parameters are after the first step, is
            held in fp32, and `use_averaged_parameters` puts it in their place. A part that keeps a
            mean of its own (`ScheduleFree`) goes on with that.

    Raises:
        ValueError: There is no part, one is one of several already, a parameter is in two of them,
            or `mean` is not in [0, 1).

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
    if not parts or any(isinstance(part, Together) for part in parts):
        found = "none" if not parts else "one that is several already"
        raise ValueError(f"together: parts must be optimizers, got {found}")
    check_range("together", at_least=0, below=1, mean=mean)
    return Together(parts, mean)


@contextmanager
@torch.no_grad()
def use_averaged_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put what an optimizer evaluates into the place of the parameters, and put them back after.

    That is its state "mean": of `combine_optimizers(mean=)`, or x of `ScheduleFree`; parameters
    without one stay. Evaluate and export inside; a step or a save inside would take it for the
    parameters.

    Args:
        optimizer: Any optimizer.

    Effects:
        Writes the parameters, and in the end the bits that they had, which are kept meanwhile.

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
    kept: dict[nn.Parameter, Tensor] = {}
    try:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if "mean" in optimizer.state.get(p, {}):
                kept[p] = get_local(p.data).clone()
                get_local(p.data).copy_(get_local(optimizer.state[p]["mean"]))
        yield
    finally:
        for p, values in kept.items():
            get_local(p.data).copy_(values)


def load_as_saved_(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give an optimizer the state of a `state_dict` again, which torch casts to parameters' dtypes.

    Effects:
        Replaces tensors of the optimizer's state.
    """
    saved = (x for group in state_dict["param_groups"] for x in group["params"])
    own = (p for group in optimizer.param_groups for p in group["params"])
    for p, index in zip(own, saved, strict=True):
        for key, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[p][key] = value.to(p.device, copy=True)
