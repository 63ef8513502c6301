"""The choice of a model's attention kernels, one for each kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainkit.attention.choose import KernelChoice, choose_kernel
from trainkit.parallel.notes import Note
from trainkit.parallel.transforms import Transform
from trainkit.types import ConfigError, Kernel, ParallelState

_KERNEL = Note[KernelChoice | None]("attention", default=None)


def set_attention(names: Sequence[Kernel], *, dtype: torch.dtype) -> Transform:
    """Return the transform that sets the first attention kernel that supports each layer.

    It applies to every submodule with an `Attend` in its attribute `attend` and a `head_size`, such
    as the decoder's attention. The kernel must support the layer's head size, `window`, `softcap`
    and `sinks`; layers of one kind share it. `describe_run` reports the choice.

    Args:
        names: Kernels in order of preference; see `attention.choose_kernel`.
        dtype: The dtype of the computation.

    Returns:
        A transform for `build_stages`. Parameters keep their names.

    Raises:
        ConfigError: When applied: no kernel supports a layer; there is no such submodule; or the
            layout has a ring, which has kernels of its own.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.models import Decoder, make_decoder_config
        >>> model = Decoder(make_decoder_config("tiny", vocab_size=256, layers=2))
        >>> made = set_attention(["varlen", "flash"], dtype=torch.float32)(model, solo_parallel())
        >>> describe_attention([made])
        'attention: 2 layers by flash (varlen: it runs only on CUDA)'
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        # vars: an attribute of the instance, not a method or a submodule of that name
        layers = [x for x in module.modules() if callable(vars(x).get("attend"))]
        layers = [x for x in layers if hasattr(x, "head_size") or hasattr(x, "widest_head")]
        if not layers:
            raise ConfigError(
                f"set_attention: {', '.join(names)} cannot be chosen, no submodule has attributes "
                "'attend' and 'head_size'; leave attention out",
                where="attention",
                got=list(names),
            )
        if ps.ring.count > 1:
            raise ConfigError(
                f"set_attention: {', '.join(names)} cannot be chosen, ring = {ps.ring.count} has "
                "kernels of its own; leave attention out",
                where="attention",
                got=list(names),
            )
        # Layers of one kind share the function, and with it its cache, such as flex's masks.
        made: dict[tuple[Any, ...], KernelChoice] = {}
        for layer in layers:
            window = getattr(layer, "window", None)
            softcap = getattr(layer, "softcap", None)
            # Heads of latent attention have keys and values of different sizes.
            head_size: Any = getattr(layer, "widest_head", None) or layer.head_size
            sinks = getattr(layer, "sinks", None) is not None
            kind = (window, softcap, sinks, head_size)
            if kind not in made:
                made[kind] = choose_kernel(
                    names,
                    device=ps.device,
                    dtype=dtype,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                    head_size=head_size,
                )
            vars(layer)["attend"] = made[kind].attend
            _KERNEL.write_(layer, made[kind])
        return module

    return Transform(apply, kind="attention")


def describe_attention(stages: Sequence[nn.Module]) -> str:
    """Describe the kernels chosen, with the numbers of layers and the reasons; "" without a choice.

    Args:
        stages: This rank's stages.

    Examples:
        >>> describe_attention([nn.Linear(1, 1)])
        ''
    """
    chosen = [str(kernel) for stage in stages for kernel in _KERNEL.read_all(stage)]
    kinds = [f"{chosen.count(kind)} layers by {kind}" for kind in dict.fromkeys(chosen)]
    return f"attention: {', '.join(kinds)}" if kinds else ""
