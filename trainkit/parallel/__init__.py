"""Where a model's work happens: transforms of a plan, and the functions that apply them.

A transform says what becomes of a module (`tensor`, `sequence`, `expert`, `precision`,
`recompute`, `offload`, `compiled`, `fsdp`, `ddp`); `build_stages` applies a list of them. What runs
the stages of a pipeline is here too.
"""

from trainkit.parallel.attention import attention, attention_line
from trainkit.parallel.check_layout import problems, refuse
from trainkit.parallel.compile import compiled
from trainkit.parallel.ddp import average_parameters, ddp, signs_of_votes
from trainkit.parallel.dtypes import (
    DTYPES,
    autocast,
    choose_precision,
    compute_dtype,
    precision,
    set_grad_dtype,
)
from trainkit.parallel.experts import expert
from trainkit.parallel.frozen import output_head, with_columns
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.generation import bind_call
from trainkit.parallel.materialize import materialize_, weights_of
from trainkit.parallel.names import (
    Box,
    blocks_of,
    box_of,
    canonical_name,
    named_buffers_of,
    named_parameters_of,
)
from trainkit.parallel.offload import offload, to_host
from trainkit.parallel.offload_state import asleep
from trainkit.parallel.places import place_stages
from trainkit.parallel.plan import decoder_plan
from trainkit.parallel.recompute import recompute
from trainkit.parallel.sequence_parallel import sequence
from trainkit.parallel.split import layer_ranges, rank_of_stages
from trainkit.parallel.stages import build_stages, split_layers
from trainkit.parallel.start import start_lines
from trainkit.parallel.styles import Style
from trainkit.parallel.tensor_parallel import hf_styles, tensor
from trainkit.parallel.transforms import Transform, check_plan

__all__ = [
    "DTYPES",
    "Box",
    "Style",
    "Transform",
    "asleep",
    "attention",
    "attention_line",
    "autocast",
    "average_parameters",
    "bind_call",
    "blocks_of",
    "box_of",
    "build_stages",
    "canonical_name",
    "check_plan",
    "choose_precision",
    "compiled",
    "compute_dtype",
    "ddp",
    "decoder_plan",
    "expert",
    "fsdp",
    "hf_styles",
    "layer_ranges",
    "materialize_",
    "named_buffers_of",
    "named_parameters_of",
    "offload",
    "output_head",
    "place_stages",
    "precision",
    "problems",
    "rank_of_stages",
    "recompute",
    "refuse",
    "sequence",
    "set_grad_dtype",
    "signs_of_votes",
    "split_layers",
    "start_lines",
    "tensor",
    "to_host",
    "weights_of",
    "with_columns",
]
