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
    from trainkit.checkpoint.load import load_checkpoint, load_weights, read_facts, resume
    from trainkit.checkpoint.manifest import (
        choose_checkpoint,
        find_checkpoint,
        list_checkpoints,
        prune_checkpoints,
        verify_checkpoint,
    )
    from trainkit.checkpoint.save import require_space, save_checkpoint, write_final
    from trainkit.checkpoint.tensors import state_hash

__all__ = [
    "choose_checkpoint",
    "find_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_weights",
    "prune_checkpoints",
    "read_facts",
    "require_space",
    "resume",
    "save_checkpoint",
    "state_hash",
    "verify_checkpoint",
    "write_final",
]

_HOME = {
    "choose_checkpoint": "manifest",
    "find_checkpoint": "manifest",
    "list_checkpoints": "manifest",
    "load_checkpoint": "load",
    "load_weights": "load",
    "prune_checkpoints": "manifest",
    "read_facts": "load",
    "require_space": "save",
    "resume": "load",
    "save_checkpoint": "save",
    "state_hash": "tensors",
    "verify_checkpoint": "manifest",
    "write_final": "save",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
