"""Which kernel attends: the first of a list that takes what a model asks, and why no other does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs
import torch
from torch import Tensor

from trainkit.attention.blocks import flash_takes, written_out
from trainkit.attention.flex import flex
from trainkit.attention.inputs import check_inputs
from trainkit.attention.sdpa import sdpa
from trainkit.attention.untraced import untraced
from trainkit.attention.varlen import varlen
from trainkit.types import Attend, ConfigError, Kernel, Spans, check_choice


@attrs.frozen(eq=False)
class Chosen:
    """A kernel, and why those that were asked for before it were not taken."""

    name: str
    attend: Attend
    refused: Mapping[str, str]

    def __str__(self) -> str:
        """Say both in words."""
        why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"{self.name} ({why})" if why else self.name


def choose_kernel(
    names: Sequence[Kernel],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_size: int,
    window: int | None = None,
    softcap: float | None = None,
) -> Chosen:
    """Return the first of some kernels that takes what a model asks of its attention.

    It is asked once, when a model is built; no step asks again.

    Args:
        names: Kernels in order of preference; see `types.Kernel`.
        device: Where the model runs.
        dtype: What queries, keys and values are.
        head_size: Of the widest of them.
        window: How many keys a query sees at most; None for all.
        softcap: What scores are kept between; None for nothing.

    Returns:
        Its `attend` for the model; as text, what a start should say.

    Raises:
        ValueError: A name is unknown.
        ConfigError: None of them does; it has each one's reason.

    Examples:
        >>> asked = {"device": "cpu", "dtype": torch.float32, "head_size": 64}
        >>> print(choose_kernel(("varlen", "flash", "math"), **asked))
        flash (varlen: it runs on CUDA alone)
        >>> choose_kernel(("varlen", "flash"), **asked, softcap=50.0)
        Traceback (most recent call last):
        trainkit.types.ConfigError: attention: none of these kernels takes heads of 64 in fp32 on
        cpu with a soft cap of 50.0: varlen: it runs on CUDA alone; flash: it knows no soft caps:
        ...
    """
    refused: dict[str, str] = {}
    device = torch.device(device)
    for name in names:
        check_choice(get_args(Kernel), "attention", kernel=name)
        # On CUDA torch's attention gives flash no mask; its form for packed documents has windows.
        packed = window is not None and (name, device.type) == ("flash", "cuda")
        kernel = "varlen" if packed else name
        reason = _refusal(kernel, device, dtype, head_size, masked=window is not None)
        if not reason and softcap is not None and name not in ("flex", "sdpa", "math"):
            reason = "it knows no soft caps"
        if not reason:
            return Chosen(name, _attend_of(kernel), refused)
        refused[name] = reason
    seen = f" in a window of {window}" if window is not None else ""
    seen += f" with a soft cap of {softcap}" if softcap is not None else ""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise ConfigError(
        f"attention: none of these kernels takes heads of {head_size} in {_short(dtype)} on "
        f"{device.type}{seen}: {reasons or 'there are none'}",
        where="attention",
        got=list(names),
        hint="add sdpa or math at the end, which take everything",
    )


_BACKENDS = {
    "flash": ("FLASH_ATTENTION",),
    "efficient": ("EFFICIENT_ATTENTION",),
    "cudnn": ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION"),  # it refuses a document of one token
}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _refusal(
    name: str, device: torch.device, dtype: torch.dtype, head_size: int, *, masked: bool
) -> str:
    """Return why a kernel does not take tensors, or an empty text."""
    if name in ("sdpa", "math") or (name, device.type) == ("flash", "cpu"):
        return ""
    if device.type != "cuda":
        if (name, device.type) == ("flex", "cpu"):
            return "torch has no backward pass of it for a CPU"
        return "it runs on CUDA alone"
    what = f"not {_short(dtype)} and heads of {head_size}"
    if name == "flex":
        known = dtype in (torch.float32, torch.float16, torch.bfloat16) and head_size >= 16
        return "" if known else f"it takes fp32, fp16 and bf16, and heads of 16 and more, {what}"
    like = torch.empty(1, 1, 16, head_size, dtype=dtype, device=device)
    if name == "varlen":
        must = "it takes fp16 and bf16, and heads that 8 divides up to 256, from Ampere on"
        return "" if flash_takes(like) else f"{must}, {what}"
    backend = torch.backends.cuda
    takes = getattr(backend, f"can_use_{name}_attention")
    mask = like.new_zeros(16, 16) if masked else None
    with _only(name):
        asked = backend.SDPAParams(like, like, like, mask, 0.0, not masked, False)
        return "" if takes(asked) else f"torch does not take it here, {what}"


def _only(name: str) -> Any:
    """Return a context in which torch's attention has one kernel, and one for what it refuses."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 -- with its user alone

    return sdpa_kernel([getattr(SDPBackend, x) for x in _BACKENDS[name]], set_priority=True)


def _attend_of(name: str) -> Attend:
    if name in _BACKENDS:

        def attend(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **how: Any) -> Tensor:
            with _only(name):
                return sdpa(q, k, v, spans=spans, **how)

        return untraced(attend)
    made: dict[str, Attend] = {"varlen": varlen, "sdpa": sdpa, "math": untraced(_math)}
    return flex() if name == "flex" else made[name]


def _math(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **how: Any) -> Tensor:
    q, k, v, scale = check_inputs(q, k, v, spans=spans, **how)
    return written_out(q, k, v, spans=spans, **how | {"scale": scale})
