"""Where a model's work happens: transforms of a plan, and the functions that apply them.

A transform says what becomes of a module (`tensor`, `sequence`, `recompute`, `compiled`, `fsdp`);
`build_stages` applies a list of them. The losses of a vocabulary that is spread over ranks, and
what runs the stages of a pipeline, are here too.
"""

from trainkit.parallel.check import check_layout
from trainkit.parallel.compiled import compiled
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.generation import bind_call
from trainkit.parallel.naming import (
    Box,
    blocks_of,
    box_of,
    canonical_name,
    named_buffers_of,
    named_parameters_of,
)
from trainkit.parallel.recompute import recompute
from trainkit.parallel.sequence import sequence
from trainkit.parallel.split import layer_ranges, rank_of_stages, split_layers
from trainkit.parallel.stages import Transform, build_stages, check_plan, materialize_
from trainkit.parallel.start import start_lines
from trainkit.parallel.styles import Style
from trainkit.parallel.tensor import hf_styles, tensor
from trainkit.parallel.vocabulary import (
    next_token,
    next_token_linear,
    vocabulary_cross_entropy,
    vocabulary_cross_entropy_per_token,
    vocabulary_linear_cross_entropy,
    vocabulary_linear_cross_entropy_per_token,
    vocabulary_z_loss,
    z_term,
)

__all__ = [
    "Box",
    "Style",
    "Transform",
    "bind_call",
    "blocks_of",
    "box_of",
    "build_stages",
    "canonical_name",
    "check_layout",
    "check_plan",
    "compiled",
    "fsdp",
    "hf_styles",
    "layer_ranges",
    "materialize_",
    "named_buffers_of",
    "named_parameters_of",
    "next_token",
    "next_token_linear",
    "rank_of_stages",
    "recompute",
    "sequence",
    "split_layers",
    "start_lines",
    "tensor",
    "vocabulary_cross_entropy",
    "vocabulary_cross_entropy_per_token",
    "vocabulary_linear_cross_entropy",
    "vocabulary_linear_cross_entropy_per_token",
    "vocabulary_z_loss",
    "z_term",
]
