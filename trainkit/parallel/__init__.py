"""Where a model's work happens: transforms of a plan, and the function that applies them."""

from trainkit.parallel.compiled import compiled
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.naming import (
    Box,
    blocks_of,
    box_of,
    canonical_name,
    named_buffers_of,
    named_parameters_of,
)
from trainkit.parallel.recompute import recompute
from trainkit.parallel.stages import Transform, build_stages, check_plan, materialize_

__all__ = [
    "Box",
    "Transform",
    "blocks_of",
    "box_of",
    "build_stages",
    "canonical_name",
    "check_plan",
    "compiled",
    "fsdp",
    "materialize_",
    "named_buffers_of",
    "named_parameters_of",
    "recompute",
]
