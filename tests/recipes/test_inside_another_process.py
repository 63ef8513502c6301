"""A recipe's `main` in a process that is somebody else's: what it finds there, it leaves there."""

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from recipe_runs import SMALL, loaded, nano_config, with_short_texts, without_pictures

from trainkit import models, optim
from trainkit.mesh import solo_parallel
from trainkit.run import control_run, get_exit_code, watch_ranks
from trainkit.text.tokenizers import open_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, DataError, PeerError, TrainState
from trainkit.weights.checkpoint import list_checkpoints, save_checkpoint
from trainkit.run import watchdog

TRAINING = ("pretrain", "mixture", "moe", "long_context", "distill", "finetune", "preference")
RECIPES = (*TRAINING, "reinforce", "evaluate", "generate")


def describe_process():
    """Return all that a guest could change in this process, by name."""
    return {
        "signal handlers": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wake-up": _read_wakeup(),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0],
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace()),
        "faulthandler": faulthandler.is_enabled(),
        "exit functions": atexit._ncallbacks(),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:], gc.get_freeze_count()),
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(_list_files()),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "directory": os.getcwd(),
        "umask": _read_umask(),
        "streams": [
            (s, vars(s).get("write"), vars(s).get("flush"))
            for s in (sys.stdout, sys.stderr, sys.stdin)
        ],
        "arguments": sys.argv[:],
        "path": sys.path[:],
        "warnings": warnings.filters[:],
        "process group": dist.group.WORLD,
        "groups": dict(dist.distributed_c10d._world.pg_map),
        "numbers": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_device(),
        ),
        "noise": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "file of __main__": getattr(sys.modules["__main__"], "__file__", None),
    }


def _read_wakeup():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    return before


def _read_umask():
    before = os.umask(0o77)
    os.umask(before)
    return before


def _list_files():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            yield name, os.readlink(f"/proc/self/fd/{name}")


def assert_unchanged(before, after):
    for name, value in before.items():
        assert after[name] == value, name


def call(recipe, flags):
    """Call a recipe's `main` as a stranger does; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        without_pictures(),
        with_short_texts(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("trainkit.models.make_decoder_config", nano_config)
        code = loaded(recipe).main([str(flag) for flag in flags])
    assert "TRAINKIT_ERROR" not in err.getvalue()
    return code or 0, out.getvalue()


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory):
    """Return `flags(recipe, out)`: a run of 2 steps, or what is there to evaluate."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").mkdir()
    for number in range(20):
        text = "\n".join(f"{i} + 1 is {i + 1}, as you know." for i in range(number, number + 9))
        (home / f"text/{number}.txt").write_text(text)
        (home / f"text/{number}.py").write_text(text)
    pairs = [{"prompt": f"{i}?", "chosen": f"{i + 1}.", "rejected": "No."} for i in range(40)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": f"{i + 1}."},
            ]
        }
        for i in range(40)
    ]
    texts = [{"text": text} for text in ("as you know", "1 + 1 is 2")]
    for name, records in (("pairs", pairs), ("chats", chats), ("texts", texts)):
        (home / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    size = models.pad_vocab_size(open_tokenizer("bytes").vocab_size)
    model = models.build_decoder(nano_config("tiny", vocab_size=size), seed=5)
    facts = {"model": attrs.asdict(model.config), "config.tokenizer": "bytes"}
    facts |= {"config.row_length": 64}
    optimizer = optim.adamw(model.parameters(), lr=1.0)
    base = home / "base"
    save_checkpoint(base, TrainState(), [model], optimizer, solo_parallel(), facts=facts)
    text = home / "text"
    rows = "--row-length 64 --rows 4 --microbatch 2 --warmup 1 --schedule-steps 8".split()
    small = [*SMALL.split(), "--eval-every", 0]
    sampling = "--supervised 2 --prompts 2 --answers 2 --updates 2 --save-every 2".split()
    flags = {
        "pretrain": [*small, "--data", text],
        "mixture": [*small, "--data", text, home / "texts.jsonl"],
        "moe": [*small, "--data", text],
        "long_context": [*rows, "--data", text],
        "distill": [*small, "--data", text, "--teacher", base, "--layers", 1, "--width", 32],
        "finetune": [*rows, "--data", home / "chats.jsonl", "--init", base, "--eval-every", 0],
        "preference": [*rows, "--data", home / "pairs.jsonl", "--init", base, "--eval-every", 0],
        "reinforce": [*sampling, *rows[2:], "--eval-every", 0],
        "evaluate": ["--run", base, "--perplexity", home / "texts.jsonl", "--batch", 64],
        "generate": ["--run", base, "--tokens", 4],
    }

    def make(recipe, out):
        if recipe == "generate":
            return flags[recipe]
        if recipe == "evaluate":
            return [*flags[recipe], "--out", out]
        steps = 4 if recipe == "reinforce" else 2
        return ["--steps", steps, *flags[recipe], "--out", out]

    return make


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_leaves_the_process_of_another_as_it_was(recipe, flags_of, tmp_path):
    """Twice, for what the first call alone may do: import, and register what it has imported."""
    assert call(recipe, flags_of(recipe, tmp_path / "first"))[0] == 0
    before = describe_process()
    assert call(recipe, flags_of(recipe, tmp_path / "second"))[0] == 0
    assert_unchanged(before, describe_process())
