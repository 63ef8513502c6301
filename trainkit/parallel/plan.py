"""The plan of a decoder: every transform that a layout may ask for, in the order of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trainkit.parallel.attention import attention as chosen_attention
from trainkit.parallel.compiled import compiled as compiled_blocks
from trainkit.parallel.expert import expert
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.precision import DTYPES, precision
from trainkit.parallel.recompute import recompute as recomputed
from trainkit.parallel.sequence import sequence
from trainkit.parallel.tensor import tensor
from trainkit.parallel.transforms import Transform
from trainkit.types import Kernel, Layout


def decoder_plan(
    layout: Layout,
    *,
    dtype: str = "fp32",
    recompute: Literal["none", "selective", "full"] = "none",
    compiled: bool = False,
    attention: Sequence[Kernel] = (),
) -> list[Transform]:
    """Return the plan of a decoder, for `build_stages`: it fits any layout, one process too.

    Tensor, sequence and expert parallelism, the dtype of the computation, recomputation,
    compilation, FSDP. A transform whose axes have size 1 changes nothing, so that dense decoders
    and mixtures of experts have one plan. Quantisation and adapters stand before it:
    `[adapters.lora(one), *decoder_plan(layout)]`. For anything else write the list yourself.

    Args:
        layout: The layout: how FSDP shards.
        dtype: What is computed in, a name in `DTYPES`; see `choose_dtype`.
        recompute: What is computed again in the backward pass. Torch's generators are not restored
            for it: a decoder's noise is a function of a counter.
        compiled: Whether blocks are compiled.
        attention: Attention kernels in order of preference, see `parallel.attention`; by default
            what the model was made with.

    Raises:
        KeyError: There is no such dtype.
        ValueError: `recompute` is unknown.

    Examples:
        >>> [step.kind for step in decoder_plan(Layout(), compiled=True)]
        ['tensor', 'sequence', 'expert', 'precision', 'recompute', 'compiled', 'fsdp']
    """
    return [
        tensor(),
        *([chosen_attention(attention, dtype=DTYPES[dtype])] if attention else []),
        sequence(),
        expert(),
        precision(DTYPES[dtype]),
        recomputed(recompute, preserve_rng_state=False),
        *([compiled_blocks()] if compiled else []),
        fsdp(layout),
    ]
