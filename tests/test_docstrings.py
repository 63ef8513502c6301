"""Every function of the tables of contents has an example, and every example runs."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import trainkit

PACKAGE = Path(__file__).parents[1] / "trainkit"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PRELOAD = "trainkit.testing.preload"  # importing it loads what only a forkserver wants

# What has no example of its own, and why.
DISK = "writes to disk; docs/tutorial and docs/howto show it, and tests/checkpoint runs it"
WITHOUT_EXAMPLE = {
    "trainkit.attention.varlen.flash_varlen": "needs a GPU",
    "trainkit.checkpoint.load.load_checkpoint": DISK,
    "trainkit.checkpoint.load.load_weights": DISK,
    "trainkit.checkpoint.load.read_facts": DISK,
    "trainkit.checkpoint.load.resume": DISK,
    "trainkit.checkpoint.manifest.prune_checkpoints": DISK,
    "trainkit.checkpoint.save.save_checkpoint": DISK,
    "trainkit.checkpoint.save.write_final": DISK,
    "trainkit.config.write_config": "writes to disk; the example of read_config calls it",
    "trainkit.data.tokens.open_tokens": "reads a file; the example of write_corpus calls it",
    "trainkit.data.tokens.verify_tokens": "reads a file; says nothing when all is well",
    "trainkit.mesh.axis_from_group": "wants a process group; docs/howto shows it",
    "trainkit.sinks.plot.plot_loss": "draws a picture",
    "trainkit.sinks.run.run_sinks": "writes to disk; recipes/pretrain.py shows it",
    "trainkit.step.evaluate": "wants a model and data; docs/tutorial shows it",
}
