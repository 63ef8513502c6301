"""trainkit's own checkpoints: written once, verified by hash, read by any layout, never unpickled.

A checkpoint is a directory `step_00000012` that appears by one rename when it is complete:

- `rank_00000.safetensors`: the parts of tensors that one rank wrote;
- `index.json`: for every tensor its name, shape and dtype, and the boxes it was cut into;
- `state.json`: the counters of the run, and facts about it;
- `manifest.json`: size and sha256 of every other file, and of itself.

Verifying needs no torch, so this table of contents imports its files when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.checkpoint.diff import diff_checkpoints
    from trainkit.checkpoint.directory import run_identity
    from trainkit.checkpoint.export import export_checkpoint
    from trainkit.checkpoint.facts import Changes, Facts
    from trainkit.checkpoint.flight import Saved
    from trainkit.checkpoint.guard import guard_numbers, guarded_saves
    from trainkit.checkpoint.load import load_checkpoint, load_weights, read_facts, resume
    from trainkit.checkpoint.manifest import (
        find_checkpoint,
        list_checkpoints,
        read_manifest,
        verify_checkpoint,
    )
    from trainkit.checkpoint.replicas import canary, nonfinite_names, refuse_drift
    from trainkit.checkpoint.retention import Keeping, Listed, Retention, plan_retention
    from trainkit.checkpoint.rollback import roll_back
    from trainkit.checkpoint.save import require_space, save_checkpoint, saves, write_final
    from trainkit.checkpoint.sources import weights_from
    from trainkit.checkpoint.tensors import state_hash

__all__ = [
    "Changes",
    "Facts",
    "Keeping",
    "Listed",
    "Retention",
    "Saved",
    "canary",
    "diff_checkpoints",
    "export_checkpoint",
    "find_checkpoint",
    "guard_numbers",
    "guarded_saves",
    "list_checkpoints",
    "load_checkpoint",
    "load_weights",
    "nonfinite_names",
    "plan_retention",
    "read_facts",
    "read_manifest",
    "refuse_drift",
    "require_space",
    "resume",
    "roll_back",
    "run_identity",
    "save_checkpoint",
    "saves",
    "state_hash",
    "verify_checkpoint",
    "weights_from",
    "write_final",
]

_HOME = {
    "Changes": "facts",
    "Facts": "facts",
    "Keeping": "retention",
    "Listed": "retention",
    "Retention": "retention",
    "Saved": "flight",
    "canary": "replicas",
    "diff_checkpoints": "diff",
    "export_checkpoint": "export",
    "find_checkpoint": "manifest",
    "guard_numbers": "guard",
    "guarded_saves": "guard",
    "list_checkpoints": "manifest",
    "load_checkpoint": "load",
    "load_weights": "load",
    "nonfinite_names": "replicas",
    "plan_retention": "retention",
    "read_facts": "load",
    "read_manifest": "manifest",
    "refuse_drift": "replicas",
    "require_space": "save",
    "resume": "load",
    "roll_back": "rollback",
    "run_identity": "directory",
    "save_checkpoint": "save",
    "saves": "save",
    "state_hash": "tensors",
    "verify_checkpoint": "manifest",
    "weights_from": "sources",
    "write_final": "save",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
