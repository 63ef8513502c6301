"""A rank of a recipe, with the faults that a test has planned.

It starts in a process forked from multiprocessing's warm server, with RANK and the like in its
environment, as under torchrun or a scheduler. It runs the recipe by its own last lines, as
`python recipes/pretrain.py` does.
"""

import ast
import contextlib
import importlib
import inspect
import os
import signal
import sys
import time
from pathlib import Path

import attrs
import recipe_runs


@attrs.frozen
class Order:
    """The work of a rank: a recipe and its flags, its log files, and its faults."""

    recipe: str
    flags: list
    environ: dict
    log: Path
    faults: list
    surroundings: dict


def run_rank(order):
    """Become the rank that an order describes; does not return."""
    import torch

    from trainkit import models

    # In the child the first thread that needs the pool of threads makes it anew. If several do at
    # once, as in the backward pass of a CUDA build, torch 2.14 aborts.
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    os.environ.clear()  # the server's is as old as its first rank
    os.environ.update(order.environ)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, kind in ((1, ".out"), (2, ".err")):
        path = order.log.with_suffix(kind)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    for name, given in order.surroundings.items():
        SURROUNDINGS[name](given)
    recipe = recipe_runs.RECIPES / f"{order.recipe}.py"
    sys.argv = [str(recipe), *order.flags]
    sys.path.insert(0, str(recipe.parent))
    models.make_decoder_config = recipe_runs.nano_config
    module = recipe_runs.load(order.recipe)
    if order.faults:
        put_faults(module, order.faults)
    tree = ast.parse(recipe.read_text())
    main = next(node for node in tree.body if ast.unparse(node).startswith("if __name__ =="))
    exec(compile(ast.Module(main.body, []), recipe, "exec"), vars(module))


def put_faults(module, planned):
    """Put injectors around the recipe's train step, and those of batches around its loader."""
    make = module.make_train_step
    for name, given in planned:
        if name == "slow_batches":
            slow_loader(module.tk.data, given)
    planned = [x for x in planned if x[0] != "slow_batches"]

    def make_train_step(cfg, ps, stages, optimizer, *rest, **named):
        step = make(cfg, ps, stages, optimizer, *rest, **named)
        for name, given in planned:
            step = injector(name, given, stages=stages, optimizer=optimizer)(step)
        return step

    module.make_train_step = make_train_step


def slow_loader(data, given):
    """Make the recipe's batches slowly."""
    from trainkit.tools.testing import faults

    prefetch = data.prefetch_batches

    def slow_prefetch(make_batch, *rest, **named):
        return prefetch(faults.slow_batches(**given)(make_batch), *rest, **named)

    data.prefetch_batches = slow_prefetch


def injector(name, given, **live):
    """Return an injector by its name, with those of the live objects that it has parameters for."""
    from trainkit.tools.testing import faults

    if name == "memory_at":
        name, given = "fail_at", dict(given) | {"error": MemoryError("all of it is taken")}
    make = getattr(faults, name)
    parameters = inspect.signature(make).parameters
    given = dict(given) | {key: value for key, value in live.items() if key in parameters}
    return make(given.pop("at"), **given)


def limit_files(limit):
    """Let no file grow beyond a number of bytes, on one rank or on all."""
    import resource

    if limit is not None and limit.get("rank") in {None, int(os.environ["RANK"])}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit["bytes"],) * 2)


def slow_disk(seconds):
    """Make every fsync take some time."""
    fsync = os.fsync

    def slow(handle):
        time.sleep(seconds)
        fsync(handle)

    os.fsync = slow


def hung_disk(calls):
    """Let fsyncs of checkpoints hang after a number of them; a stop waits less for it."""
    from trainkit.run import watchdog

    fsync, left = os.fsync, iter(range(calls))

    def hang(handle):
        if (
            "/checkpoints/" in str(Path(f"/proc/self/fd/{handle}").readlink())
            and next(left, None) is None
        ):
            time.sleep(1000)
        fsync(handle)

    os.fsync = hang
    assert (watchdog._GRACE, watchdog._STILL) == (25.0, 10.0)
    watchdog._GRACE, watchdog._STILL = 4.0, 2.0


def no_pictures(_):
    """Draw nothing at the end of a run."""
    run = importlib.import_module("trainkit.run.open_run")  # the module, not its function

    assert run.plot_loss  # the name that a run calls; in another place it would still draw
    run.plot_loss = lambda *_: None


def believe_files(_):
    """Remove a protection: no byte of a checkpoint is compared with its hash."""
    from trainkit.weights.checkpoint import reading

    assert reading._check_sha256  # the name that a read calls; in another place it would still look
    reading._check_sha256 = lambda *_: None


def often(every):
    """Compare all replicas at this interval of steps."""
    from functools import partial

    from trainkit.weights.checkpoint import guard

    guard.make_replica_check = partial(guard.make_replica_check, interval=every, within=every)


def stop_alone(_):
    """Remove a protection: a rank that is stopped does not agree with the others."""
    run = importlib.import_module("trainkit.run.open_run")  # the module, not its function

    from trainkit.run.signals import Vote

    @contextlib.contextmanager
    def step_votes(stop_reason, *_, **__):
        yield lambda: Vote(stop_reason())

    run.open_step_vote = step_votes


def deaf(_):
    """Remove a protection: no step checks whether to stop."""
    run = importlib.import_module("trainkit.run.open_run")  # the module, not its function

    from trainkit.run.signals import Vote

    run.open_step_vote = lambda *_, **__: contextlib.nullcontext(lambda: Vote(None))


SURROUNDINGS = {
    "limit_files": limit_files,
    "slow_disk": slow_disk,
    "hung_disk": hung_disk,
    "no_pictures": no_pictures,
    "believe_files": believe_files,
    "often": often,
    "stop_alone": stop_alone,
    "deaf": deaf,
}
"""Changes around the recipe, by the name that an `Order` gives them."""
