"""The plan of a decoder: every transform that a layout may ask for, in the order of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.parallel.attention import set_attention
from trainkit.parallel.compile import compile_blocks
from trainkit.parallel.expert_parallel import expert_parallel
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.offload import offload_activations
from trainkit.parallel.precision import DTYPES, mixed_precision, resolve_precision
from trainkit.parallel.recompute import recompute as recompute_blocks
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.tensor_parallel import tensor_parallel
from trainkit.parallel.transforms import Transform
from trainkit.types import Kernel, Layout, Precision


def make_decoder_plan(
    layout: Layout,
    *,
    precision: Precision | None = None,
    recompute: str = "none",
    offload: int | None = None,
    compiled: bool = False,
    attention: Sequence[Kernel] = (),
) -> list[Transform]:
    """Return the plan of a decoder for `build_stages`, in any layout, also a single process.

    It has tensor, sequence and expert parallelism, mixed precision, recomputation, compilation and
    FSDP. A transform whose axes have size 1 changes nothing, so dense decoders and mixtures of
    experts have the same plan. Quantization and adapters come before it:
    `[adapters.lora(spec), *make_decoder_plan(layout)]`. For anything else write the list yourself.

    Args:
        layout: The layout, for the options of FSDP.
        precision: The dtypes of storage, computation and reduction; by default all fp32.
        recompute: The results that are recomputed in backward; see `parallel.recompute`. Torch's
            generators are not restored for it: a decoder's noise is a function of a counter.
        offload: Bytes of activations that stay on the device, while the rest is offloaded to host
            memory; None offloads nothing. See `parallel.offload_activations`.
        compiled: Whether blocks are compiled.
        attention: Attention kernels in order of preference, see `parallel.set_attention`; by
            default those of the model.

    Raises:
        ConfigError: `recompute` is unknown.

    Examples:
        >>> [step.kind for step in make_decoder_plan(Layout(), compiled=True)]
        ['tensor', 'sequence', 'expert', 'precision', 'recompute', 'compiled', 'fsdp']
    """
    precision = resolve_precision(precision or Precision(compute="fp32"))
    return [
        # First: the transforms after it see sharded matrices.
        tensor_parallel(),
        *([set_attention(attention, dtype=DTYPES[precision.compute])] if attention else []),
        # It wraps the kernel that was chosen before.
        sequence_parallel(),
        expert_parallel(),
        mixed_precision(DTYPES[precision.compute], storage=DTYPES[precision.storage]),
        # Around the casts of weights, which are repeated in backward instead of saved.
        recompute_blocks(recompute, preserve_rng_state=False),
        *([] if offload is None else [offload_activations(budget=offload)]),
        # Compiled with all of that, but without FSDP's hooks, which communicate.
        *([compile_blocks()] if compiled else []),
        fsdp(layout, reduce_dtype=DTYPES[precision.reduction]),
    ]
