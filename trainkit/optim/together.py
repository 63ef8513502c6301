"""Several optimizers as one, a mean of what they move, and what is evaluated in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.optim.elementwise import load_as_saved_
from trainkit.parallel.reduction import local_of


class Together(torch.optim.Optimizer):
    """Several optimizers that step, save and load as one; see `together`."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], mean: float | None) -> None:
        """Take the parts, whose groups and state are those of the whole from now on."""
        self.parts = tuple(parts)
        for part in parts:
            for group in part.param_groups:
                group |= {"optimizer": type(part).__name__, "mean": mean}
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
        return Together(parts, self.param_groups[0]["mean"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return all(getattr(part, "_step_supports_amp_scaling", False) for part in self.parts)

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
                mean = local_of(state.setdefault("mean", now.clone()))
                moved = torch.lerp(mean, local_of(now), 1 - stays)
                mean.copy_(moved if refused is None else torch.where(refused > 0, mean, moved))

    def average(self, p: nn.Parameter) -> Tensor | None:
        """Return the mean of a parameter, or what the part that moves it evaluates."""
        if "mean" in self.state.get(p, {}):
            return self.state[p]["mean"]
        found = (part for part in self.parts if any(p is q for q in _parameters(part)))
        average = getattr(next(found), "average", None)
        return None if average is None else average(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; the parts go on sharing groups and state.

        Effects:
            Replaces the state and the options of the groups.
        """
        super().load_state_dict(state_dict)
        load_as_saved_(self, state_dict)
        self._share()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def together(
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
            held in fp32, and `averaged` puts it in their place.

    Raises:
        ValueError: There is no part, one is one of several already, a parameter is in two of them,
            or `mean` is not in [0, 1).

    Examples:
        >>> a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> optimizer = together([torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=0.2)])
        >>> (a + b).backward()
        >>> optimizer.param_groups[0]["lr"] = 0.5
        >>> optimizer.step()
        >>> a.item(), round(b.item(), 3)
        (0.5, 0.798)
    """
    if not parts or any(isinstance(part, Together) for part in parts):
        found = "none" if not parts else "one that is several already"
        raise ValueError(f"together: parts must be optimizers, got {found}")
    if mean is not None and not 0 <= mean < 1:
        raise ValueError(f"together: mean must be in [0, 1), got {mean}")
    return Together(parts, mean)


@contextmanager
@torch.no_grad()
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put what an optimizer evaluates into the place of the parameters, and put them back after.

    That is the mean of `together(mean=)`, or x of `ScheduleFree`; parameters of which there is
    neither stay. Evaluate and export inside; a step or a save inside would take it for the
    parameters.

    Args:
        optimizer: Any optimizer.

    Effects:
        Writes the parameters, and in the end the bits that they had, which are kept meanwhile.

    Examples:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = together([torch.optim.SGD([weight], lr=0.5)], mean=0.75)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> with averaged(optimizer):
        ...     weight.detach().clone()
        tensor([0.3750])
        >>> weight.detach()
        tensor([0.])
    """
    average, kept = getattr(optimizer, "average", None), dict[nn.Parameter, Tensor]()
    try:
        for p in _parameters(optimizer):
            if average is not None and (found := average(p)) is not None:
                kept[p] = local_of(p.data).clone()
                local_of(p.data).copy_(local_of(found))
        yield
    finally:
        for p, values in kept.items():
            local_of(p.data).copy_(values)
