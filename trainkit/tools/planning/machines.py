"""What a machine has: memory, arithmetic and wires, as plain figures that anyone can write down."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

GIB = 2**30


@attrs.frozen
class Hardware:
    """The figures of one kind of device, and of the wires between them.

    Args:
        name: What to call it.
        memory: Bytes of one device, for one rank.
        flops: Dense floating-point operations per second of one device, for "bf16" and "fp32".
        inside: Bytes per second that a rank can send to others of its node, in one direction.
        between: Bytes per second that a rank can send to other nodes, in one direction.
        ranks_per_node: Devices of a node.
        fused_norms: Whether a norm is one kernel, as on CUDA. On a CPU torch (from 2.11 on) takes
            several steps, and keeps one more copy of its input for backward.

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
    inside: float
    between: float
    ranks_per_node: int
    fused_norms: bool = True

    def __attrs_post_init__(self) -> None:
        figures = (self.memory, self.inside, self.between, self.ranks_per_node)
        if not all(figure > 0 for figure in (*figures, *self.flops.values())):
            raise ValueError(f"Hardware: every figure must be positive, got {self}")
        if not {"fp32", "bf16"} <= set(self.flops):
            raise ValueError(f'Hardware: flops needs "fp32" and "bf16", got {sorted(self.flops)}')


def get_hardware(name: str) -> Hardware:
    """Return the figures of a known kind of machine.

    Arithmetic and wires are the makers' data sheets': tensor cores without structured sparsity;
    fp32 without TF32, which torch leaves off; half of NVLink's two-way figure; one network card per
    device, of 200 Gbit/s per A100 and of 400 Gbit/s per GPU of the others. Memory is what torch
    reports. "cpu" is a guess at two cores of a server that talk by gloo.

    Args:
        name: "a100" (80 GB), "h100" (SXM), "h200", "b200" or "cpu", in any case.

    Raises:
        ValueError: There is no such name.

    Examples:
        >>> get_hardware("h100").memory / 2**30
        79.0
    """
    kinds = _known()
    if name.lower() not in kinds:
        raise ValueError(f"hardware: no machine is named {name!r}; there are {', '.join(kinds)}")
    return kinds[name.lower()]


def _known() -> dict[str, Hardware]:
    #        name, GiB, bf16 and fp32 TFLOP/s, GB/s inside and between nodes
    table = (
        ("a100", 79, 312, 19.5, 300, 25),
        ("h100", 79, 989, 67, 450, 50),
        ("h200", 139, 989, 67, 450, 50),
        ("b200", 178, 2250, 75, 900, 50),
    )
    devices = tuple(
        Hardware(
            name=name,
            memory=gib * GIB,
            flops={"bf16": bf16 * 1e12, "fp32": fp32 * 1e12},
            inside=inside * 1e9,
            between=between * 1e9,
            ranks_per_node=8,
        )
        for name, gib, bf16, fp32, inside, between in table
    )
    cpu = Hardware(
        name="cpu",
        memory=16 * GIB,
        flops={"bf16": 50e9, "fp32": 100e9},
        inside=2e9,
        between=1e9,
        ranks_per_node=8,
        fused_norms=False,
    )
    return {kind.name: kind for kind in (*devices, cpu)}
