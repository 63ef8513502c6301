"""The table of optimizers that all are held to: how each is made, and what it does in plain words.

A row is a name of `OPTIMIZERS` with options, or several as one. A new optimizer is a formula in
`FORMULAS`; everything else follows.
"""

from functools import partial

import attrs
import torch
from torch import nn

from trainkit.noise.counters import normal
from trainkit.noise.hashing import make_key
from trainkit.noise.rounding import keys_at, round_rows, rounding_keys
from trainkit.optim import make_optimizer, orthogonalize, parse_groups, parse_options
from trainkit.optim.storage import encode_moment, read_moment
from trainkit.optim.table import OPTIMIZERS
from trainkit.parallel.name_patterns import name_matches
from trainkit.parallel.parameters import empty_rows_like, get_local_box
from trainkit.types import SOLO

SHAPES = {"up.weight": (3, 512), "head.weight": (4, 6), "norm.weight": (5,), "scale": ()}
LR, DECAY = 0.01, 0.1


# ------------------------------------------------- formulas in fp64: (p, g, memory, lr, decay) -> p


def plain_adamw(p, g, s, lr, decay):
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.95 * s.get("v", 0) + 0.05 * g * g
    u = s["m"] / (1 - 0.9**t) / ((s["v"] / (1 - 0.95**t)).sqrt() + 1e-8)
    return p - lr * (u + decay(u, p))


def plain_lion(p, g, s, lr, decay, *, betas=(0.9, 0.99)):
    u = (betas[0] * s.get("m", 0) + (1 - betas[0]) * g).sign()
    s["m"] = betas[1] * s.get("m", 0) + (1 - betas[1]) * g
    return p - lr * (u + decay(u, p))


def plain_momentum(p, g, s, lr, decay):
    s["m"] = 0.9 * s.get("m", 0) + g
    return p - lr * (s["m"] + decay(s["m"], p))


def plain_signsgd(p, g, s, lr, decay):
    del s
    return p - lr * (g.sign() + decay(g.sign(), p))


def plain_schedule_free(p, g, s, lr, decay):
    """Step y: gradients are taken there, z descends, x is the mean of all z."""
    s["t"] = t = s.get("t", 0) + 1
    z, x, total = s.get("z", p), s.get("x", p), s.get("total", 0.0)
    s["v"] = 0.95 * s.get("v", 0) + 0.05 * g * g
    u = g / ((s["v"] / (1 - 0.95**t)).sqrt() + 1e-8)
    s["z"] = z - lr * (u + decay(u, p))
    s["most"] = max(lr, s.get("most", 0.0))
    s["total"] = total + s["most"] ** 2
    c = s["most"] ** 2 / s["total"]
    s["x"] = (1 - c) * x + c * s["z"]
    return 0.1 * s["z"] + 0.9 * s["x"]


def plain_muon(p, g, s, lr, decay):
    if p.ndim < 2:
        return plain_adamw(p, g, s, lr, decay)
    s["m"] = 0.95 * s.get("m", 0) + 0.05 * g
    u = orthogonalize(0.95 * s["m"] + 0.05 * g) * 0.2 * max(p.shape) ** 0.5
    return p - lr * (u + decay(u, p))


FORMULAS = {
    "adamw": plain_adamw,
    "lion": plain_lion,
    "momentum": plain_momentum,
    "muon": plain_muon,
    "schedule-free": plain_schedule_free,
    "signsgd": plain_signsgd,
}


# ------------------------------------------------------------------------------------------- rows


class Named(nn.Module):
    """A module whose parameters have any names, all of hidden layers."""

    def __init__(self, named):
        super().__init__()
        self.by_name = named

    def named_parameters(self, *_, **__):
        return iter(self.by_name.items())


@attrs.frozen
class Row:
    """How an optimizer is made, as recipes say it."""

    optimizer: str = "adamw"
    options: tuple = ()
    groups: tuple = ()
    mean: float | None = None
    dtype: torch.dtype = torch.float64
    offload: bool = False

    def make(self, stages, *, axis=SOLO, **changes):
        """Return the optimizer of stages, or of parameters by name."""
        stages = [Named(stages)] if isinstance(stages, dict) else stages
        row = attrs.evolve(self, **changes)
        return make_optimizer(
            stages,
            lr=LR,
            optimizer=row.optimizer,
            weight_decay=DECAY,
            options=parse_options(row.options, optimizer=row.optimizer),
            groups=parse_groups(row.groups, optimizer=row.optimizer),
            mean=row.mean,
            seed=3,
            axis=axis,
            offload=row.offload,
        )

    def settings_of(self, name):
        """Return the settings of a parameter: its optimizer, its options, and its group's."""
        defaults = {"optimizer": self.optimizer, "lr_scale": 1.0, "weight_decay": DECAY}
        texts = list(self.options)
        for group in self.groups:
            pattern, *rest = group.split()
            if name_matches(name, pattern):
                own = [x for x in rest if x.startswith("optimizer=")]
                texts = ([] if own else texts) + rest
        return defaults | dict(x.split("=", 1) for x in texts)

    @property
    def asks_for_few_bits(self):
        return "moments=" in str((self.options, self.groups))


BF16 = torch.bfloat16
GROUPS = ("head.* lr_scale=0.5 weight_decay=0.3", "norm.* lr_scale=2 weight_decay=0.2")
TWO = ("{head,norm}.* optimizer=lion betas=(0.8,0.9)",)
ROWS = {
    **{name: Row(name) for name in OPTIMIZERS},
    "adamw, cautious": Row(options=("cautious=True",)),
    "lion, cautious": Row("lion", ("cautious=True",)),
    "adamw, bf16 moments": Row(options=("moments=bf16",)),
    "lion, bf16 moments": Row("lion", ("moments=bf16",)),
    "adamw, 8-bit moments": Row(options=("moments=8bit",)),
    "lion, 8-bit moments": Row("lion", ("moments=8bit",)),
    "schedule-free, 8-bit moments": Row("schedule-free", ("moments=8bit",)),
    "adamw, stochastic": Row(options=("rounding=stochastic",), dtype=BF16),
    "adamw, Kahan": Row(options=("rounding=kahan", "moments=8bit"), dtype=BF16),
    "adamw, groups": Row(groups=GROUPS),
    "adamw, mean": Row(mean=0.75),
    "two": Row(groups=TWO, options=("moments=8bit",)),
    "two, mean": Row("momentum", groups=TWO, mean=0.5),
}


# ------------------------------------------------------------------------ parameters and gradients


def made(dtype, seed=0):
    """Return parameters by name."""
    return {
        name: nn.Parameter(normal(make_key(seed, name), shape).to(dtype))
        for name, shape in SHAPES.items()
    }


def give_gradients_(named, step):
    """Give every parameter, or this rank's part of it, a gradient that its name and index say."""
    for name, p in named.items():
        box = get_local_box(p)
        p.grad = empty_rows_like(p.data, p.shape[-1] if p.dim() else 1, p.dtype)
        values = normal(make_key(step, "gradient", name), box.local.shape, box.offset)
        get_local_box(p.grad).local.copy_(values)


def rate(step):
    """Return a rate that changes from step to step, down and up."""
    return LR * (1 + step % 3)


def round_trip(x, kind, key, count, name):
    """Return what is left of a moment; test_storage.py proves the code of 8 bits."""
    if kind == "bf16":
        keys = rounding_keys(
            make_key(3, "rounding of moments", name), x.shape or (1,), (0,) * max(x.dim(), 1)
        )
        rounded = round_rows(
            x.float().reshape(-1),
            keys_at(keys, count),
            columns=x.shape[-1] if x.dim() else 1,
            begin=0,
            first=0,
            lower=key == "v_sq",
        )
        return rounded.double().view(x.shape)
    if kind != "8bit" or x.dim() < 2 or x.shape[-1] % 256:
        return x
    parts = {key: torch.empty(0, dtype=torch.uint8), f"{key}_scale": torch.empty(0)}
    return as_numbers(key, encode_moment(key, x.reshape(-1), parts, count)).view(x.shape)


def as_numbers(name, state):
    """Return a moment in fp64, flat."""
    entries = {x: state[x].reshape(-1) for x in (name, f"{name}_scale") if x in state}
    return read_moment(name, entries, torch.float64)


def step_plainly(row, values, memory, step, gradients):
    """Step fp64 values by name, with what is remembered of each."""
    for name, p in values.items():
        settings, s = row.settings_of(name), memory.setdefault(name, {})
        lr = rate(step) * float(settings["lr_scale"])
        decay = float(settings["weight_decay"]) if p.dim() > 1 else 0.0
        is_cautious = settings.get("cautious") == "True"

        def decayed(u, p, decay=decay, is_cautious=is_cautious):
            return decay * p * (u * p >= 0) if is_cautious else decay * p

        formula = FORMULAS[settings["optimizer"]]
        if "betas" in settings:
            formula = partial(formula, betas=(0.8, 0.9))
        values[name] = formula(p, gradients[name], s, lr, decayed)
        for x in s.keys() & {"m", "v"}:
            s[x] = round_trip(
                s[x], settings.get("moments"), {"m": "m", "v": "v_sq"}[x], step + 1, name
            )
        if row.mean is not None:
            new = values[name]
            s["mean"] = row.mean * s.get("mean", new) + (1 - row.mean) * new
    return values
