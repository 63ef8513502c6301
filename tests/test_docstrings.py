"""Every function of the tables of contents has an example, and every example runs."""

import doctest
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import trainkit

PACKAGE = Path(__file__).parents[1] / "trainkit"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PRELOAD = "trainkit.tools.testing.preload"  # importing it loads what only a forkserver wants

# What has no example of its own, and why.
DISK = "works on the disk: docs/ show it, tests/checkpoint runs it"
BUCKET = "wants a server of buckets: docs/howto/store-in-a-bucket.md shows it"
ADAPTERS = "wants a model with adapters: docs/howto/adapters.md shows it"
WITHOUT_EXAMPLE = {
    "adapters.export_peft": ADAPTERS,
    "adapters.use_merged_adapters": ADAPTERS,
    "buckets.check_store": BUCKET,
    "buckets.clean_uploads": BUCKET,
    "buckets.delete_files": BUCKET,
    "buckets.get_bytes": BUCKET,
    "buckets.get_file": BUCKET,
    "buckets.get_range": BUCKET,
    "buckets.list_files": BUCKET,
    "buckets.list_objects": BUCKET,
    "buckets.put_bytes": BUCKET,
    "buckets.put_file": BUCKET,
    "checkpoint.open_guarded_saver": DISK,
    "checkpoint.load_checkpoint": DISK,
    "checkpoint.load_weights": DISK,
    "checkpoint.read_facts": DISK,
    "checkpoint.resume": DISK,
    "checkpoint.save_checkpoint": DISK,
    "checkpoint.open_saver": DISK,
    "config.fraction": "a validator, as `one_of` explains",
    "config.non_negative": "a validator, as `one_of` explains",
    "config.positive": "a validator, as `one_of` explains",
    "files.print_to_stderr": "writes to stderr: `say` has an example",
    "types.fraction": "a validator, as `one_of` explains",
    "types.non_negative": "a validator, as `one_of` explains",
    "types.positive": "a validator, as `one_of` explains",
    "corpora.open_library_corpus": "takes seconds: recipes/pretrain.py shows it",
    "corpora.open_tokens": "works on the disk: the example of write_corpus calls it",
    "files.commit_folder": "works on the disk: atomic_folder calls it",
    "files.recover_folder": "works on the disk: atomic_folder calls it",
    "files.remove_stale_files": "works on the disk: atomic_folder calls it",
    "files.convert_disk_errors": "works on the disk: write_corpus is built on it",
    "files.atomic_write": "works on the disk: write_corpus is built on it",
    "collectives.get_backends": "asks a process group: get_comm_device calls it",
    "mesh.axis_from_group": "wants a process group: docs/howto shows it",
    "plots.plot_expert_load": "draws a picture: docs/howto/train-experts.md shows it",
    "plots.plot_loss": "draws a picture",
    "pictures.plot_packing": "draws a picture: docs/howto/pack.md shows it",
    "sinks.open_run_sinks": "works on the disk: recipes/pretrain.py shows it",
    "tokenizers.save_tokenizer": "works on the disk: docs/howto/my-own-corpus.md shows it",
}


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = [module_of(path) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("name", [name for name in MODULES if name != PRELOAD])
def test_the_examples_of_a_module_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0


def functions_without_example(module):
    """Return the public functions of a room that have no example: a folder's are in `__all__`."""
    listed = getattr(module, "__all__", None)
    own = [name for name in vars(module) if name[0] != "_"]
    found = {name: getattr(module, name) for name in listed or own}
    return {
        name
        for name, value in found.items()
        if inspect.isfunction(value)
        and (listed or value.__module__ == module.__name__)
        and "Examples:\n" not in (inspect.getdoc(value) or "")
    }


def test_every_function_of_a_room_has_an_example_or_a_reason():
    found = {
        f"{room}.{name}"
        for room in trainkit.__all__
        if isinstance(getattr(trainkit, room), ModuleType)
        for name in functions_without_example(getattr(trainkit, room))
    }
    assert found == set(WITHOUT_EXAMPLE)


def test_a_function_without_an_example_is_found():
    room = ModuleType("room")
    exec('def bare():\n    """Return nothing."""', vars(room))
    assert functions_without_example(room) == {"bare"}
