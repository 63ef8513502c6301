"""The hardware of a rank: memory, FLOP/s and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

GIB = 2**30


@attrs.frozen
class Hardware:
    """The figures of one kind of device, and of the links between them.

    Args:
        name: The name in tables.
        memory: Bytes of one device, for one rank.
        flops: Dense floating-point operations per second of one device, for "bf16" and "fp32".
        intra_node: Bytes per second that a rank can send to others of its node, in one direction.
        inter_node: Bytes per second that a rank can send to other nodes, in one direction.
        ranks_per_node: Devices of a node.
        fused_norms: Whether a norm is one kernel, as on CUDA. On a CPU torch (from 2.11 on) runs
            several, and saves one more copy of the input for backward.

    Raises:
        ValueError: A figure is not positive, or there is no rate for fp32 or bf16.

    Examples:
        >>> from trainkit.tools.planning import get_hardware
        >>> attrs.evolve(get_hardware("h100"), name="one H100", ranks_per_node=1).ranks_per_node
        1
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    intra_node: float
    inter_node: float
    ranks_per_node: int
    fused_norms: bool = True

    def __attrs_post_init__(self) -> None:
        figures = (self.memory, self.intra_node, self.inter_node, self.ranks_per_node)
        # Not `any(figure <= 0)`, which NaN would pass.
        if not all(figure > 0 for figure in (*figures, *self.flops.values())):
            raise ValueError(f"Hardware: every figure must be positive, got {self}")
        if not {"fp32", "bf16"} <= set(self.flops):
            raise ValueError(f'Hardware: flops needs "fp32" and "bf16", got {sorted(self.flops)}')


def get_hardware(name: str) -> Hardware:
    """Return the figures of a known kind of device.

    FLOP/s and bandwidths are those of the makers' data sheets: tensor cores without structured
    sparsity; fp32 without TF32, which torch disables; half of NVLink's bidirectional bandwidth; one
    network card per device, of 200 Gbit/s per A100 and 400 Gbit/s per GPU of the others. Memory is
    what torch reports. "cpu" is a guess at two cores of a server that communicate by gloo.

    Args:
        name: "a100" (80 GB), "h100" (SXM), "h200", "b200" or "cpu", in any case.

    Raises:
        ValueError: There is no such device.

    Examples:
        >>> get_hardware("h100").memory / 2**30
        79.0
    """
    if name.lower() not in _HARDWARE:
        raise ValueError(
            f"get_hardware: no machine is named {name!r}; there are {', '.join(_HARDWARE)}"
        )
    return _HARDWARE[name.lower()]


_HARDWARE = {
    name: Hardware(
        name=name,
        memory=gib * GIB,
        flops={"bf16": bf16 * 1e12, "fp32": fp32 * 1e12},
        intra_node=intra_node * 1e9,
        inter_node=inter_node * 1e9,
        ranks_per_node=8,
    )
    for name, (gib, bf16, fp32, intra_node, inter_node) in {
        # GiB, bf16 and fp32 TFLOP/s, GB/s inside and between nodes
        "a100": (79, 312, 19.5, 300, 25),
        "h100": (79, 989, 67, 450, 50),
        "h200": (139, 989, 67, 450, 50),
        "b200": (178, 2250, 75, 900, 50),
    }.items()
}
_HARDWARE["cpu"] = Hardware(
    name="cpu",
    memory=16 * GIB,
    flops={"bf16": 50e9, "fp32": 100e9},
    intra_node=2e9,
    inter_node=1e9,
    ranks_per_node=8,
    fused_norms=False,
)
