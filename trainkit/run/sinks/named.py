"""How a run logs, and the optional sinks by the names of --sinks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs

from trainkit.run.sinks.mlflow import open_mlflow
from trainkit.run.sinks.ray import open_ray
from trainkit.run.sinks.tensorboard import open_tensorboard
from trainkit.run.sinks.trackio import open_trackio
from trainkit.run.sinks.wandb import open_wandb
from trainkit.types import ConfigError, OpenSink, non_negative, positive


@attrs.frozen
class ProfileSteps:
    """The steps of a run to profile, from the first to the last of them."""

    first: int
    last: int

    def __str__(self) -> str:
        is_one = self.first == self.last
        return f"step {self.first}" if is_one else f"steps {self.first} to {self.last}"

    @classmethod
    def parse(cls, text: str) -> ProfileSteps:
        """Return the steps of a text such as "10:13", or "10" for a single one.

        Raises:
            ConfigError: It is no such text, or ends before it begins.

        Examples:
            >>> ProfileSteps.parse("10:13"), str(ProfileSteps.parse("7"))
            (ProfileSteps(first=10, last=13), 'step 7')
        """
        match = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", text)
        if match is None:
            raise ConfigError(
                f"profile must name the first and the last step, such as 10:13, got {text!r}",
                where="profile",
                got=text,
                want="FIRST:LAST",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(
                f"profile must not end before it begins, got {text!r}",
                where="profile",
                got=text,
                want=f"{last}:{first}",
            )
        return cls(first, last)


def _check_profile(_options: Any, _field: Any, text: str) -> None:
    ProfileSteps.parse(text)


@attrs.frozen(kw_only=True)
class LoggingOptions:
    """How often a run reads its metrics, and where they go."""

    log_every: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    """Read the metrics of this many steps at once, a line each; by default 1 on a CPU, else 10.
    Bad steps are detected later: see the page "When numbers go bad"."""

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio", "ray"], ...] = ()
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, trackio, ray."""

    peak_flops: float | None = attrs.field(
        default=None, validator=attrs.validators.optional([positive, non_negative])
    )
    """FLOP/s of one device, for mfu in metrics.jsonl; by default the bf16 peak of a known GPU."""

    profile: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(_check_profile)
    )
    """The first and the last step to profile, as 10:13: a trace of each rank, in profiles."""

    anomaly: bool = False
    """Stop at the operation that first makes a NaN, and name it; every step is much slower. In
    fp16 that may be a step whose loss scale is too high, which is skipped without this."""

    layers_every: int = attrs.field(default=0, validator=non_negative)
    """Write statistics of every parameter, its gradient and its update, and of what every block
    returns, to layers.jsonl every so many steps; 0 for never."""

    capture: str | None = None
    """Write what these modules return in one step, and its gradients, to captures: a pattern of
    names, as 'layers.*.mlp'. The page "My loss differs from one rank" compares two runs with it."""

    capture_at: int = attrs.field(default=1, validator=positive)
    """The step of --capture."""

    sync_phases: bool = False
    """Wait for the device after each phase of a step, so that seconds by phase are the device's.
    The run is slower meanwhile."""


def named_sinks(
    names: Iterable[str], run_dir: str | Path, *, config: Mapping[str, Any] | None = None
) -> dict[str, OpenSink]:
    """Return the optional sinks by name, with their arguments bound but for `step`.

    Args:
        names: "tensorboard" (into `run_dir`/tensorboard), "wandb", "mlflow", "trackio" and
            "ray".
        run_dir: The run directory.
        config: The configuration that a sink shows with the run: plain values.

    Raises:
        ConfigError: There is no sink of that name.

    Examples:
        >>> list(named_sinks(["tensorboard"], "runs/run"))
        ['tensorboard']
    """
    makers: dict[str, OpenSink] = {
        "tensorboard": partial(open_tensorboard, Path(run_dir) / "tensorboard"),
        "wandb": partial(open_wandb, run_dir, config=config),
        "mlflow": partial(open_mlflow, run_dir, config=config),
        "trackio": partial(open_trackio, run_dir, config=config),
        "ray": partial(open_ray, run_dir),
    }
    names = list(names)
    for name in names:
        if name not in makers:
            raise ConfigError(f"named_sinks: no sink is called {name!r}; there are {[*makers]}")
    return {name: makers[name] for name in names}
