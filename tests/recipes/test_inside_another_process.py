"""A recipe's `main` in a process that is somebody else's: what it finds there, it leaves there."""

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import locale
import logging
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from recipe_runs import SMALL, lines, loaded, nano_config, with_short_texts, without_pictures

from trainkit import models, optim
from trainkit.mesh import solo_parallel
from trainkit.run import Timeouts, control_run, get_exit_code, open_run, watch_ranks, watchdog
from trainkit.text.tokenizers import open_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, ConfigError, DataError, PeerError, TrainState
from trainkit.weights.checkpoint import save_checkpoint

TIMEOUTS = Timeouts(start_timeout=60.0)
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
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.callbacks[:]),
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(_list_files()),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "directory": Path.cwd(),
        "umask": _read_umask(),
        "group": (os.getpgrp(), os.getsid(0), os.nice(0), os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(n) for n in range(16)],
        "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), locale.setlocale(0)),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "loggers": _list_loggers(),
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
            torch.get_num_interop_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.mkldnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_device(),
            np.geterr(),
        ),
        "hooks of all modules": [
            len(hooks)
            for name, hooks in vars(torch.nn.modules.module).items()
            if name.startswith("_global_") and isinstance(hooks, dict)
        ],
        "noise of torch": torch.get_rng_state().tolist(),
        "noise of numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002 -- the caller's
        "noise of Python": random.getstate(),
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


def _list_loggers():
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return [
        (logger.name, logger.level, logger.propagate, logger.handlers[:], logger.filters[:])
        for logger in loggers
        if isinstance(logger, logging.Logger)
    ]


def _list_files():
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            yield path.name, str(path.readlink())


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
        patch.setattr("trainkit.models.make_decoder_config", partial(nano_config, layers=2))
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
    rows = "--row-length 64 --rows 4 --microbatch 2 --warmup 1 --schedule-steps 8"
    rows = rows.split()
    small = [*SMALL.split(), "--eval-every", 0]
    sampling = "--supervised 2 --prompts 2 --answers 2 --updates 2 --save-every 2"
    sampling = sampling.split()
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


@attrs.frozen
class Twice:
    """Two runs of a recipe, the second with a peak, and this process around the second."""

    recipe: str
    out: Path
    printed: list[str]
    before: dict
    after: dict


@pytest.fixture(scope="module", params=RECIPES)
def twice(request, flags_of, tmp_path_factory):
    """Return both runs: the first call alone may import, and register what it has imported."""
    out, recipe = tmp_path_factory.mktemp(request.param), request.param
    first = call(recipe, flags_of(recipe, out / "first"))
    before = describe_process()
    peak = ["--peak-flops", 1e11] if recipe in (*TRAINING, "reinforce") else []
    second = call(recipe, [*flags_of(recipe, out / "second"), *peak])
    assert (first[0], second[0]) == (0, 0)
    return Twice(recipe, out, [first[1], second[1]], before, describe_process())


def test_a_recipe_leaves_the_process_of_another_as_it_was(twice):
    assert_unchanged(twice.before, twice.after)


def test_both_calls_have_the_same_numbers(twice):
    if twice.recipe == "generate":
        first, second = twice.printed
    elif twice.recipe == "evaluate":
        first, second = ((twice.out / x / "results.json").read_text() for x in ("first", "second"))
    else:
        first, second = (bits_of(twice.out / x) for x in ("first", "second"))
    assert first == second
    assert first


def bits_of(out):
    """Return of each line what every layout and every start must repeat."""
    return [
        {name: x for name, x in line.items() if name.endswith(("loss_hex", "norm_hex", "_hash"))}
        for line in lines(out)
    ]


TOTALS = (
    "time by phase: |.* tokens, .* in the loss, of .*padding|tokens by corpus: |memory: at most"
)
NAMED = ("pretrain", "mixture", "moe", "distill")  # whose corpora have names


def test_every_recipe_that_trains_has_what_a_step_costs(twice):
    if twice.recipe not in (*TRAINING, "reinforce"):
        return
    first, second = (lines(twice.out / name) for name in ("first", "second"))
    for line in (*first, *second):
        seconds = line["seconds"]
        assert line["tokens_per_second"] == line["tokens_processed"] / seconds
        assert line["trained_tokens_per_second"] == line["tokens"] / seconds
        assert line["documents_per_second"] == line["documents"] / seconds
        assert 0 < line["tokens"] <= line["tokens_processed"]
        assert 0 < line["documents"] <= line["tokens_processed"]
        assert 0 <= line["padding"] < 1
        assert line["memory_rank"] == 0
        assert 0 < line["memory"] <= line["memory_peak"]
        rows, tokens = (
            {name.removeprefix(kind): x for name, x in line.items() if name.startswith(kind)}
            for kind in ("rows/", "tokens/")
        )
        assert rows.keys() == tokens.keys()
        assert bool(rows) == (twice.recipe in NAMED)
        assert sum(tokens.values()) == (line["tokens_processed"] if rows else 0)
        is_per_token = twice.recipe != "preference" and "clipped" not in line
        assert line.get("perplexity") == (
            pytest.approx(math.exp(min(line["loss"], 20.0))) if is_per_token else None
        )
    for printed in twice.printed:
        found = [x for x in printed.splitlines() if re.match(f"{TOTALS}", x)]
        assert len(found) >= (4 if twice.recipe in NAMED else 3)
        assert max(map(len, found)) <= 80
    assert "mfu" not in first[0]
    # Distillation trains a twin too, a run of its own.
    runs = 2 if twice.recipe == "distill" else 1
    assert twice.printed[0].count("no mfu: the peak of this processor is not known") == runs
    assert "no mfu" not in twice.printed[1]
    assert all(0 < line["mfu"] <= line["hfu"] for line in second)


KEPT = ("signal handlers", "wake-up", "timer", "hooks", "faulthandler", "garbage", "environment")


def test_nothing_is_trapped_while_it_trains(tmp_path, monkeypatch):
    monkeypatch.delattr(watchdog, "_show_crashes")  # pytest itself has switched faulthandler on
    with seen_after_a_step(tmp_path) as (before, during):
        for name in (*KEPT, "streams", "blocked signals", "exit functions", "warnings"):
            assert during[name] == before[name], name
    assert_unchanged(before, describe_process())


@pytest.mark.usefixtures("own_process")
def test_in_a_process_of_its_own_signals_and_garbage_are_the_run_s(tmp_path):
    """What the test above looks at, it sees."""
    with seen_after_a_step(tmp_path) as (before, during):
        changed = {name for name, value in before.items() if during[name] != value}
    assert {"signal handlers", "wake-up", "garbage"} <= changed


@contextlib.contextmanager
def seen_after_a_step(folder):
    """Yield what was in this process before a run, and inside of its loop."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    before = describe_process()
    with open_run(folder, timeouts=TIMEOUTS) as run:
        state = run.resume([model], optimizer)
        with run.loop(state, [model], optimizer, steps=1, replay=None):
            yield before, describe_process()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("document 7 is torn"), 65),
        (ValueError("a flag"), 64),
        (KeyboardInterrupt(), 76),
        (ZeroDivisionError("a bug"), 70),
    ],
)
def test_an_error_is_raised_as_it_is_and_recorded_in_the_directory(error, code, tmp_path, capsys):
    before = describe_process()
    with pytest.raises(type(error)) as caught, open_run(tmp_path, timeouts=TIMEOUTS):
        raise error
    assert caught.value is error
    assert get_exit_code(error) == code
    assert type(error).__name__ in (tmp_path / "errors" / "rank_00000.txt").read_text()
    assert capsys.readouterr().err == ""  # it is the caller's to print
    assert_unchanged(before, describe_process())


def test_a_flag_or_a_directory_that_is_refused_is_an_error_with_its_code(flags_of, tmp_path):
    with pytest.raises(ConfigError) as caught:
        call("pretrain", ["--stpes", 2])
    assert get_exit_code(caught.value) == 64
    flags = flags_of("pretrain", tmp_path / "run")
    call("pretrain", flags)
    with pytest.raises(CheckpointError, match="seed") as caught:
        call("pretrain", [*flags, "--seed", 7])
    assert get_exit_code(caught.value) == 66


def test_a_request_stops_it_with_75_and_the_next_call_resumes(flags_of, tmp_path):
    """In a thread that is not the main one, as in a worker of Ray."""
    out = tmp_path / "run"
    flags = [*flags_of("pretrain", out), "--steps", 100_000]
    found = []
    thread = threading.Thread(target=lambda: found.append(call("pretrain", flags)))
    thread.start()
    while not (out / "metrics.jsonl").exists() and thread.is_alive():
        time.sleep(0.05)
    control_run(out, "stop")
    thread.join()
    [(code, printed)] = found
    assert code == 75
    assert "stopped after step" in printed
    step = lines(out)[-1]["step"]
    assert call("pretrain", [*flags, "--steps", step + 2])[0] == 0
    assert [line["step"] for line in lines(out)] == list(range(1, step + 3))


def test_a_reason_to_stop_may_be_the_caller_s(tmp_path):
    reasons = [None]
    with open_run(tmp_path, timeouts=TIMEOUTS, stop_reason=lambda: reasons[-1]) as run:
        assert run.stopping() is None
        reasons.append("the lease ends")
        assert run.stopping() == "the lease ends on rank 0"


def test_the_watch_ends_no_process_and_its_verdict_is_raised_at_the_next_phase(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    for name in ("end_process", "end_without_disk", "_show_crashes"):
        monkeypatch.delattr(watchdog, name)
    monkeypatch.delattr(watchdog.peers, "kill_member")
    messages = []
    world = solo_parallel().world

    def hang():
        with watch_ranks(tmp_path, world, owns_process=False, log=messages.append) as phase:
            phase("step 1", allow=0.05)
            while not messages:
                time.sleep(0.01)
            phase("step 2", allow=60)

    with pytest.raises(PeerError, match="rank 0") as caught:
        hang()
    assert messages == [f"error: {caught.value}"]
    assert "step 1" in messages[0]


def train_in_an_open_group(folder):
    """Train on this rank of a group that is open; return what has changed in the process."""
    group = dist.group.WORLD
    flags = ["--steps", 2, *SMALL.split(), "--eval-every", 0, "--data", folder / "text"]
    call("pretrain", [*flags, "--out", folder / "first"])
    before = describe_process()
    call("pretrain", [*flags, "--out", folder / "second"])
    after = describe_process()
    assert dist.group.WORLD is group
    total = torch.ones(1)
    dist.all_reduce(total)
    # Connections of groups that are closed go when gloo's own threads get to it.
    return total.item(), [x for x in before if x != "files" and after[x] != before[x]]


def test_a_process_group_that_is_open_is_used_and_stays(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n".join(f"{i} + 1 is {i + 1}" for i in range(400)))
    (tmp_path / "text" / "b.txt").write_text("\n".join(f"{i} - 1 is {i - 1}" for i in range(400)))
    assert run_ranks(train_in_an_open_group, 2, tmp_path) == [(2.0, [])] * 2
