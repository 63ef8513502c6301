"""What trainkit relies on in torch that has no public name: listed here, and looked for.

A name that is gone must fail here, and not wherever a part of trainkit falls silent for want of it.
"""

import ast
import inspect
import io
import sys
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainkit
from trainkit.tools.testing import run_ranks

PACKAGE = Path(trainkit.__file__).parent
STANDARD = {"os._exit", "sys._current_frames"}  # documented by Python under these names


@attrs.frozen
class Private:
    """`where` is a Python expression that finds it, with the names of `things`."""

    where: str
    files: str
    why: str
    since: tuple[int, int] = (2, 11)

    @property
    def name(self):
        return self.where.rpartition(".")[2]


PRIVATE = [
    Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "attention/blocks.py",
        "the kernel for CPUs; the public front does not return the log-sum-exp",
    ),
    Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "attention/blocks.py",
        "its backward, with the log-sum-exp of all blocks",
    ),
    Private(
        "torch.ops.aten._flash_attention_forward",
        "attention/blocks.py parallel/recompute.py",
        "the kernel for GPUs; the public front takes no log-sum-exp in backward",
    ),
    Private(
        "torch.ops.aten._flash_attention_backward", "attention/blocks.py", "its backward, as above"
    ),
    Private(
        "torch._scaled_mm",
        "post/adapters/float8.py",
        "products in float8: the entry that torchao 0.18 calls too",
    ),
    Private(
        "torch._assert_async",
        "models/experts.py",
        "an assertion on the device, without a host sync; the public ones read a value",
    ),
    Private(
        "agent._pcontext",
        "tools/commands/launch.py",
        "the processes whose exit codes torchrun's agent keeps to itself after a signal",
    ),
    Private("torch._foreach_norm", "grads.py", "norms of all gradients in one launch"),
    Private("torch._foreach_mul_", "grads.py", "clips all gradients in one launch"),
    Private(
        "torch._foreach_copy_", "weights/checkpoint/snapshot.py", "copies all boxes in one call"
    ),
    Private(
        "optimizer._step_supports_amp_scaling", "grads.py", "who can skip a step on the device"
    ),
    Private(
        "torch.optim.AdamW._init_group",
        "optim/adamw.py",
        "the tensors of a step, before they are given to the kernel",
    ),
    Private(
        "dist.distributed_c10d._abort_process_group",
        "mesh/session.py",
        "lets go of groups whose work will never end",
    ),
    Private(
        "dist.distributed_c10d._resolve_process_group",
        "tools/testing/ledger.py",
        "the group that a functional collective names",
    ),
    Private("boxed._type", "tools/testing/ledger.py", "whether an argument is a group in a box"),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "parallel/recompute_budget.py tools/testing/ledger.py run/find_nan.py",
        "sees every operator; documented nowhere else",
    ),
    Private(
        "torch.distributed.tensor.debug._clear_python_sharding_prop_cache",
        "mesh/session.py",
        "DTensor's memory of meshes whose groups are gone",
    ),
    Private(
        "torch.distributed.tensor.debug._clear_sharding_prop_cache",
        "mesh/session.py",
        "the same, and what C++ remembers",
        since=(2, 13),
    ),
    Private(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "parallel/parameters.py",
        "which part of a whole tensor a rank holds",
    ),
    Private(
        "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
        "parallel/parameters.py",
        "which part each of the others holds",
    ),
    Private(
        "module._non_persistent_buffers_set",
        "parallel/parameters.py",
        "which buffers are not saved",
    ),
    Private(
        "module._parameters",
        "parallel/grad_reduction.py parallel/parameters.py",
        "parameters behind what hides them, and every place of a shared one",
    ),
    Private("module._buffers", "parallel/parameters.py", "every place of a shared buffer"),
    Private(
        "contract._get_registry",
        "parallel/grad_reduction.py",
        "whether `replicate` has been applied",
    ),
    Private(
        "sharded._get_fsdp_state",
        "parallel/grad_reduction.py parallel/stage_forward.py",
        "everything below that begins with `state`",
    ),
    Private(
        "state._fsdp_param_group",
        "parallel/grad_reduction.py",
        "the divide factor, and what reduces gradients",
    ),
    Private(
        "state._fsdp_param_groups",
        "parallel/grad_reduction.py",
        "the same, where units may have several",
        since=(2, 13),
    ),
    Private("state._device", "parallel/stage_forward.py", "where an offloaded unit computes"),
    Private("state._is_root", "parallel/grad_reduction.py", "whose callback ends a backward pass"),
    Private("state._lazy_init", "parallel/grad_reduction.py", "prepares an unused unit"),
    Private(
        "state._root_post_backward_final_callback",
        "parallel/grad_reduction.py",
        "ends the backward passes of a step",
    ),
    Private("unit._init_mp_dtypes", "parallel/grad_reduction.py", "the dtype that a group sums in"),
    Private(
        "unit._init_mp_dtypes",
        "post/adapters/freeze.py",
        "what a group reduces in, of which all was frozen before",
    ),
    Private(
        "fsdp_param._unsharded_param",
        "parallel/grad_reduction.py",
        "whether a unit was gathered, and what gets zeros where there is no gradient",
    ),
    Private("unit._all_gather_result", "parallel/grad_reduction.py", "whether a unit was gathered"),
    Private("replicated._comm_hooks", "parallel/grad_reduction.py", "whether DDP sums or averages"),
    Private(
        "stage._post_metadata_inference_cleanup",
        "parallel/torch_pipeline.py",
        "overridden: it clears gradients that have been added up",
        since=(2, 13),
    ),
    Private(
        "torch.distributed.pipelining._backward",
        "parallel/torch_pipeline.py",
        "tried once: does a split backward pass give the gradient of a whole one?",
    ),
    Private(
        "torch._functorch.config",
        "parallel/torch_pipeline.py",
        "buffers of compiled backward passes that run twice",
    ),
    Private(
        "torch.distributed.pipelining._schedule_visualizer.get_schedule_ops",
        "tools/pictures/pipeline.py",
        "what torch's schedules run, for the picture",
    ),
    Private(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "weights/convert/pickled.py",
        "where a tensor lies, in the .metadata of others' checkpoints",
    ),
    Private(
        "torch.serialization._get_layout",
        "weights/convert/pickled.py",
        "a name that .metadata holds",
    ),
    Private(
        "loaded._checkpoint_offset",
        "weights/convert/pickled.py",
        "where a tensor's bytes lie in its file, when none is read",
    ),
    Private(
        "torch.ops._c10d_functional",
        "collectives.py parallel/recompute.py",
        "an exchange whose result selective recomputation can keep",
    ),
    Private("torch._C", "parallel/offload_state.py run/profiling.py", "which has the next"),
    Private(
        "torch._C._disabled_torch_function_impl",
        "parallel/offload_state.py",
        "what a tensor whose memory is away says of its size and kind",
    ),
    Private(
        "torch.utils._pytree.tree_iter",
        "parallel/offload_state.py parallel/recompute_budget.py parallel/packing_leaks.py",
        "the tensors in what a block is given, a model or operator gives, an optimizer remembers",
    ),
    Private(
        "torch.Tensor._version", "parallel/offload.py", "whether a saved tensor has been changed"
    ),
    Private(
        "torch.UntypedStorage._cdata", "parallel/grad_reduction.py", "which memory a tensor is in"
    ),
    Private(
        "torch.utils._pytree.tree_leaves",
        "run/find_nan.py",
        "the tensors that an operator is given and gives",
    ),
    Private("op._schema", "run/find_nan.py", "which arguments an operator writes"),
    Private(
        "torch.cuda.memory._record_memory_history",
        "run/profiling.py",
        "a snapshot of memory, as torch's own pages make it",
    ),
    Private("torch.cuda.memory._dump_snapshot", "run/profiling.py", "the same"),
    Private("torch._C._autograd", "run/profiling.py", "which has the next"),
    Private(
        "torch._C._autograd._enable_record_function",
        "run/profiling.py",
        "leaves operations out of a trace; the public switch prints a warning each time",
    ),
    Private("module._forward_hooks", "parallel/recompute.py", "FSDP's, which it must not see"),
    Private("module._forward_pre_hooks", "parallel/recompute.py", "the same"),
    Private(
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        "parallel/recompute.py",
        "whether selective recomputation is looking on",
    ),
    Private(
        "torch.utils._python_dispatch._pop_mode_temporarily",
        "parallel/recompute.py",
        "looks away while FSDP gathers",
    ),
]
# of Hugging Face's models, of named tuples, and of a run of Trackio
OTHERS = {"_tp_plan", "_replace", "_fields", "_next_step"}
LISTED = {(file, p.name) for p in PRIVATE for file in p.files.split()}


# ------------------------------------------------------------------------------- is it all there?


def things():
    """Return what the expressions begin with, made on one rank."""
    import torch._functorch.config
    import torch.distributed._composable.contract
    import torch.distributed.checkpoint.filesystem
    import torch.distributed.pipelining._backward
    import torch.distributed.pipelining._schedule_visualizer
    import torch.distributed.tensor._utils
    import torch.distributed.tensor.debug
    import torch.nn.attention.varlen
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.nn.parallel import DistributedDataParallel

    from trainkit.parallel.grad_reduction import fsdp_groups

    module, group = nn.Linear(1, 1), dist.group.WORLD
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=True)
    sharded = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
    sharded.unshard()
    return {
        "torch": torch,
        "dist": dist,
        "contract": sys.modules["torch.distributed._composable.contract"],
        "group": group,
        "boxed": group.boxed(),
        "loaded": loaded.untyped_storage(),
        "module": module,
        "optimizer": torch.optim.AdamW(module.parameters(), fused=True),
        "sharded": sharded,
        "state": sharded._get_fsdp_state(),
        "unit": fsdp_groups(sharded)[0],
        "fsdp_param": fsdp_groups(sharded)[0].fsdp_params[0],
        "replicated": DistributedDataParallel(module),
        "stage": PipelineStage(nn.ModuleList([module]), 0, 1, torch.device("cpu"), group=group),
        "op": torch.ops.aten.add.Tensor,
        "agent": LocalElasticAgent(
            WorkerSpec(role="", local_world_size=1, rdzv_handler=mock.Mock(), entrypoint=print),
            logs_specs=DefaultLogsSpecs(),
        ),
    }


def missing():
    """Return what is gone, and what `Stage` overrides that torch's stage does not have."""
    from torch.distributed.pipelining import PipelineStage

    from trainkit.parallel.torch_pipeline import Stage

    found, known = [], things()
    for private in PRIVATE:
        try:
            eval(private.where, dict(known))
        except AttributeError as error:
            if torch.__version__ >= private.since:
                found.append(f"{private.where}, for {private.files}: {private.why} ({error})")
    methods = {name for name, value in vars(Stage).items() if inspect.isfunction(value)}
    own = {name for name in methods if f"self.{name}(" in inspect.getsource(Stage)}
    later = {p.name for p in PRIVATE if torch.__version__ < p.since}
    return found, sorted(methods - own - later - set(dir(PipelineStage)))


def test_every_private_name_of_torch_is_still_there():
    assert run_ranks(missing, 1) == [([], [])]


# ------------------------------------------------------------------------------- is it all listed?


def private_names(text):
    """Return the names beginning with one underscore that a file takes from others."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            found |= {node.attr} if ast.unparse(node) not in STANDARD else set()
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {name for name in _imported(node) if "._" in f".{name}"}
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
            named = node.args[1:2]  # none of `getattr(*pair)`
            found |= {str(x.value) for x in named if isinstance(x, ast.Constant)}
    last = {name.rpartition(".")[2] for name in found if "._" in f".{name}" and "__" not in name}
    return last - own


def _imported(node):
    """Return the dotted names of an import of torch's; a private module counts, not what it has."""
    module = getattr(node, "module", None)
    names = [alias.name for alias in node.names]
    full = names if module is None else [f"{module}.{name}" for name in names]
    return [name for name in full if name.startswith("torch")]


def test_every_private_name_that_trainkit_uses_is_listed_and_none_besides():
    found = set()
    for path in sorted(
        {*PACKAGE.rglob("*.py")} - {PACKAGE / "noise/jit.py"}
    ):  # numba's: test_noise
        file = path.relative_to(PACKAGE).as_posix()
        found |= {(file, name) for name in private_names(path.read_text()) - OTHERS}
    overridden = {
        ("optim/adamw.py", "_init_group"),
        ("parallel/grad_reduction.py", "_init_mp_dtypes"),
        ("parallel/torch_pipeline.py", "_post_metadata_inference_cleanup"),
    }
    assert sorted(found ^ (LISTED - overridden)) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("torch._foreach_add_(x, 1)", {"_foreach_add_"}),
        ("getattr(module, '_fsdp', None)", {"_fsdp"}),
        ("from torch.utils._pytree import tree_map", {"tree_map"}),
        ("from torch.distributed import _tools", {"_tools"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("os._exit(1), x.__dict__, x.public", set()),
        ("class A:\n    def _own(self): self._x = self._own()", set()),
        ("from trainkit.grads import _norms", set()),
    ],
)
def test_a_private_name_is_found(text, names):
    assert private_names(text) == names
