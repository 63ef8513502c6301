"""Train language models with functions: any layout gives the numbers of one process.

This file is the table of contents, in the order of a training step. It is lazy: `import trainkit`
loads neither torch nor numba, and a name is imported from its home when it is first used. Families
stay behind their module: `tk.losses`, `tk.schedules`, `tk.models`, `tk.attention`, and so on.

Examples:
    >>> import trainkit as tk
    >>> bins = tk.pack_bins([5, 3, 4], capacity=8)
    >>> len(bins)
    2
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit import attention as attention
    from trainkit import batch as batch
    from trainkit import chat as chat
    from trainkit import checkpoint as checkpoint
    from trainkit import collectives as collectives
    from trainkit import config as config
    from trainkit import convert as convert
    from trainkit import corpora as corpora
    from trainkit import data as data
    from trainkit import files as files
    from trainkit import grads as grads
    from trainkit import hashing as hashing
    from trainkit import health as health
    from trainkit import jit as jit
    from trainkit import layout as layout
    from trainkit import losses as losses
    from trainkit import mesh as mesh
    from trainkit import metrics as metrics
    from trainkit import models as models
    from trainkit import noise as noise
    from trainkit import optim as optim
    from trainkit import packing as packing
    from trainkit import parallel as parallel
    from trainkit import pictures as pictures
    from trainkit import planning as planning
    from trainkit import prepare as prepare
    from trainkit import runtime as runtime
    from trainkit import sampling as sampling
    from trainkit import schedules as schedules
    from trainkit import sinks as sinks
    from trainkit import step as step
    from trainkit import testing as testing
    from trainkit import tokenizers as tokenizers
    from trainkit import types as types
    from trainkit.batch import batch_hash as batch_hash
    from trainkit.batch import collate_bins as collate_bins
    from trainkit.batch import count_tokens as count_tokens
    from trainkit.batch import count_valid_tokens as count_valid_tokens
    from trainkit.batch import shift_labels as shift_labels
    from trainkit.batch import to_device as to_device
    from trainkit.checkpoint import resume as resume
    from trainkit.checkpoint import save_checkpoint as save_checkpoint
    from trainkit.checkpoint import state_hash as state_hash
    from trainkit.collectives import agree as agree
    from trainkit.collectives import all_max as all_max
    from trainkit.collectives import all_sum as all_sum
    from trainkit.collectives import broadcast as broadcast
    from trainkit.corpora import open_corpus as open_corpus
    from trainkit.corpora import write_corpus as write_corpus
    from trainkit.data import Packed as Packed
    from trainkit.data import eval_batches as eval_batches
    from trainkit.data import step_batch as step_batch
    from trainkit.grads import blame as blame
    from trainkit.grads import clip_and_step as clip_and_step
    from trainkit.grads import clip_grads_ as clip_grads_
    from trainkit.grads import grad_norm as grad_norm
    from trainkit.grads import named_parameters_of as named_parameters_of
    from trainkit.grads import parameters_of as parameters_of
    from trainkit.grads import sum_gradients_ as sum_gradients_
    from trainkit.grads import sync_sp_grads as sync_sp_grads
    from trainkit.layout import contiguous_shard as contiguous_shard
    from trainkit.layout import shard_batch as shard_batch
    from trainkit.layout import shard_sequence as shard_sequence
    from trainkit.layout import zigzag_shard as zigzag_shard
    from trainkit.layout import zigzag_unshard as zigzag_unshard
    from trainkit.mesh import axis_from_group as axis_from_group
    from trainkit.mesh import parallel_session as parallel_session
    from trainkit.mesh import solo_parallel as solo_parallel
    from trainkit.metrics import advance as advance
    from trainkit.metrics import reduce_metrics as reduce_metrics
    from trainkit.metrics import to_host as to_host
    from trainkit.models import call_model as call_model
    from trainkit.models import call_with_noise as call_with_noise
    from trainkit.packing import pack_bins as pack_bins
    from trainkit.parallel import build_stages as build_stages
    from trainkit.prepare import prepare_corpus as prepare_corpus
    from trainkit.runtime import open_run as open_run
    from trainkit.step import bind_forward_backward as bind_forward_backward
    from trainkit.step import evaluate as evaluate
    from trainkit.step import forward_backward as forward_backward
    from trainkit.step import forward_only as forward_only
    from trainkit.types import Axis as Axis
    from trainkit.types import Batch as Batch
    from trainkit.types import Bins as Bins
    from trainkit.types import Cursor as Cursor
    from trainkit.types import Layout as Layout
    from trainkit.types import ParallelState as ParallelState
    from trainkit.types import Place as Place
    from trainkit.types import Share as Share
    from trainkit.types import Spans as Spans
    from trainkit.types import StepBatch as StepBatch
    from trainkit.types import TrainState as TrainState
    from trainkit.types import Update as Update

_CONTENTS = {
    "types": (
        "Axis Batch Bins Cursor Layout ParallelState Place Share Spans StepBatch TrainState Update"
    ),
    "jit": "",
    "hashing": "",
    "noise": "",
    "packing": "pack_bins",
    "sampling": "",
    "layout": "zigzag_shard zigzag_unshard contiguous_shard shard_batch shard_sequence",
    "batch": ("collate_bins shift_labels count_valid_tokens count_tokens batch_hash to_device"),
    "losses": "",
    "schedules": "",
    "health": "",
    "files": "",
    "tokenizers": "",
    "chat": "",
    "corpora": "open_corpus write_corpus",
    "prepare": "prepare_corpus",
    "collectives": "all_sum all_max broadcast agree",
    "mesh": "parallel_session solo_parallel axis_from_group",
    "data": "Packed step_batch eval_batches",
    "attention": "",
    "models": "call_model call_with_noise",
    "parallel": "build_stages",
    "optim": "",
    "step": "forward_backward bind_forward_backward forward_only evaluate",
    "grads": (
        "parameters_of named_parameters_of sum_gradients_ sync_sp_grads grad_norm clip_grads_ "
        "clip_and_step blame"
    ),
    "metrics": "advance reduce_metrics to_host",
    "checkpoint": "save_checkpoint resume state_hash",
    "convert": "",
    "sinks": "",
    "pictures": "",
    "runtime": "open_run",
    "config": "",
    "planning": "",
    "testing": "",
}
_HOMES = {name: module for module, names in _CONTENTS.items() for name in names.split()}

__all__ = [*_HOMES, *_CONTENTS]  # noqa: PLE0604 -- read off the table above


def __getattr__(name: str) -> Any:
    """Import `name` from its home, once (PEP 562)."""
    if name in _CONTENTS:
        return import_module(f"trainkit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'trainkit' has no attribute {name!r}")
    value = getattr(import_module(f"trainkit.{_HOMES[name]}"), name)
    globals()[name] = value  # so that the next use costs a dictionary lookup
    return value


def __dir__() -> list[str]:
    """List the table of contents."""
    return sorted({*globals(), *__all__})
