"""Parallelism and memory: the transforms of a plan, and the functions that apply them.

A transform changes how and where a module computes (`tensor_parallel`, `sequence_parallel`,
`expert_parallel`, `mixed_precision`, `recompute`, `offload_activations`, `compile_blocks`, `fsdp`,
`ddp`); `build_stages` applies a list of them. The executor of pipeline stages is here too.
"""

from trainkit.parallel.attention import set_attention
from trainkit.parallel.check_layout import check_layout
from trainkit.parallel.compile import compile_blocks
from trainkit.parallel.ddp import average_parameters, ddp, vote_signs
from trainkit.parallel.describe_run import describe_run
from trainkit.parallel.expert_parallel import expert_parallel
from trainkit.parallel.frozen_model import add_columns, make_output_head
from trainkit.parallel.fsdp import fsdp
from trainkit.parallel.generation_call import make_call
from trainkit.parallel.materialize import weights_from_module
from trainkit.parallel.offload import offload_activations
from trainkit.parallel.offload_state import offload_state
from trainkit.parallel.parameters import get_local_box, get_named_parameters
from trainkit.parallel.plan import make_decoder_plan
from trainkit.parallel.precision import autocast_call, mixed_precision, resolve_precision
from trainkit.parallel.recompute import recompute
from trainkit.parallel.sequence_parallel import sequence_parallel
from trainkit.parallel.stage_ranks import make_stages
from trainkit.parallel.stages import build_stages, split_layers
from trainkit.parallel.styles import ParallelStyle
from trainkit.parallel.tensor_parallel import read_hf_styles, tensor_parallel
from trainkit.parallel.transforms import Transform

__all__ = [
    "ParallelStyle",
    "Transform",
    "add_columns",
    "autocast_call",
    "average_parameters",
    "build_stages",
    "check_layout",
    "compile_blocks",
    "ddp",
    "describe_run",
    "expert_parallel",
    "fsdp",
    "get_local_box",
    "get_named_parameters",
    "make_call",
    "make_decoder_plan",
    "make_output_head",
    "make_stages",
    "mixed_precision",
    "offload_activations",
    "offload_state",
    "read_hf_styles",
    "recompute",
    "resolve_precision",
    "sequence_parallel",
    "set_attention",
    "split_layers",
    "tensor_parallel",
    "vote_signs",
    "weights_from_module",
]
