"""Recipes as a user starts them: in a process of their own, or in this one, a second faster."""

import contextlib
import functools
import importlib.util
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from own_process import own_process

from trainkit import generation
from trainkit.models import make_decoder_config
from trainkit.run import report_errors

RECIPES = Path(__file__).parents[1] / "recipes"
SMALL = "--cache None --row-length 32 --rows 4 --microbatch 2 --warmup 2 --schedule-steps 8"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(recipe, *flags, ranks=1, **options):
    """Start a recipe; return the process."""
    launcher = [sys.executable] if ranks == 1 else TORCHRUN
    command = [*launcher, str(RECIPES / f"{recipe}.py"), *map(str, flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def run(recipe, *flags, code=0, **options):
    """Run a recipe to its end; return what it printed, or said on stderr if it had to fail."""
    process = start(recipe, *flags, **options)
    out, err = process.communicate(timeout=170)
    assert process.returncode == code, err
    return out if code == 0 else err


def nano_config(_, *, layers=1, width=32, heads=4, kv_heads=2, mlp_width=48, **overrides):
    """Return, for any size, the figures of a model that trains a step in milliseconds."""
    return make_decoder_config(
        "tiny",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        **overrides,
    )


def load(recipe):
    """Import a recipe, anew each time: a test may change it."""
    path = RECIPES / f"{recipe}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{recipe}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


loaded = functools.cache(load)  # tyro reads the docstrings of fields once for each class


def with_layers(count):
    """Patch the sizes of decoders: all have so many layers, which is what a step's time goes by."""
    return mock.patch(
        "trainkit.models.make_decoder_config", partial(make_decoder_config, layers=count)
    )


def with_short_texts():
    """Patch what recipes write at their end, which takes longer than a few steps: 16 tokens."""

    def shortened(own):
        def short(*given, max_new_tokens, **how):
            return own(*given, max_new_tokens=min(max_new_tokens, 16), **how)

        return short

    return mock.patch.multiple(
        "trainkit.post.generation",
        generate=shortened(generation.generate),
        sample_text=shortened(generation.sample_text),
        answer_questions=shortened(generation.answer_questions),
    )


def without_pictures():
    """Patch what draws a run's loss and load, which takes longer than its steps."""
    return mock.patch.multiple(
        importlib.import_module("trainkit.run.open_run"),
        plot_loss=mock.DEFAULT,
        plot_expert_load=mock.DEFAULT,
    )


def without_folds():
    """Patch what folds long messages, which tests look for in one piece."""
    return mock.patch("trainkit.run.log.fold_lines", lambda text, **_: text)


def here(flags, recipe="pretrain", *, layers=2, drawn=False, folded=False):
    """Run a recipe in this process; return its exit code, and what it printed or said on stderr.

    Its loss and load are drawn, and its messages folded, only on request.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        with_layers(layers),
        with_short_texts(),
        contextlib.nullcontext() if drawn else without_pictures(),
        contextlib.nullcontext() if folded else without_folds(),
    ):
        try:
            with own_process(), report_errors():  # as `run_main` does, which would end the process
                code = loaded(recipe).main([str(flag) for flag in flags])
        except SystemExit as end:
            return end.code, err.getvalue()
    return code or 0, out.getvalue()


def several(runs, recipe="pretrain", **options):
    """Run a recipe once for each list of flags, on the same ranks; return what `here` does."""
    return [here(flags, recipe, **options) for flags in runs]


def assert_equal_runs(found, wanted, *, steps=None, about=""):
    """Compare two runs that may have had different layouts, step by step, or so many first steps.

    Of the run that is wanted there may be more steps.
    """
    for name in ("step", "batch_hash", "tokens", "tokens_total", "lr"):
        assert column(found, name) == column(wanted, name)[:steps], about
    for name in ("loss", "grad_norm"):
        assert column(found, name) == pytest.approx(column(wanted, name)[:steps], rel=1e-5), about


def refusal(recipe, *flags):
    """Run a recipe that has to fail in this process; return its exit code and what it says."""
    code, output = here(flags, recipe)
    assert code, output
    error = error_of(output)
    assert error["code"] == code
    return code, error["what"]


def error_of(stderr):
    """Return what the last line of stderr says to programs."""
    last = stderr.rstrip().splitlines()[-1]
    assert last.startswith("TRAINKIT_ERROR ")
    return json.loads(last.removeprefix("TRAINKIT_ERROR "))


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(out, name):
    every = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in every if event["event"] == name]


def column(out, name):
    return [line[name] for line in lines(out)]
