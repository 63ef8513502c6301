"""A process that has loaded the recipes once, and is forked for every rank that a test starts.

A fresh process takes seconds to import torch; one that is forked from here begins at once, with
RANK and its like in its environment, as torchrun or a scheduler would start it. It runs the recipe
by its own last lines, as `python recipes/pretrain.py` does.

It reads requests from its standard input, one line of JSON each, and writes lines of JSON: {"id",
"pid"} for each process that it has started, {"pid", "status"} for each that has ended. When its
input ends it kills what it has started, and ends.
"""

import ast
import contextlib
import gc
import inspect
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
LOADED = {}  # recipes that are read, and their flags, before a rank is forked


# -------------------------------------------------------------------------------------- the server


def serve():
    """Start processes as asked, until the input ends; return the request in each of them."""
    running, pending = set(), b""
    wakeup, noise = os.pipe()
    for end in (wakeup, noise):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(noise)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own affair
    say({"ready": os.getpid()})
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            reap(running)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(wakeup)
                os.close(noise)
                return request
            running.add(pid)
            say({"id": request["id"], "pid": pid})


def reap(running):
    """Tell of every process that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            running.discard(pid)
            say({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def say(fact):
    os.write(1, json.dumps(fact).encode() + b"\n")


def warm_up(folder):
    """Import what the recipes import, and let them compile what they compile; start no thread."""
    sys.path.insert(0, str(TESTS))
    import recipe_runs

    import trainkit as tk
    from trainkit import config, models, optim, sampling, sinks, tokenizers, types
    from trainkit.testing import preload

    assert preload.MODULES
    assert optim.__all__
    assert sinks.__all__
    text = Path(folder) / "warm"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"word {i}\n" * (i + 3))
    models.decoder_config = recipe_runs.nano_config
    LOADED["pretrain"] = recipe_runs.load("pretrain")
    config.load_config(LOADED["pretrain"].Config, ["--data", str(text)])
    corpus = tk.open_corpus(text, tokenizer=tokenizers.open_tokenizer("bytes"))
    bins = tk.pack_bins(corpus.lengths, 32, multiple_of=8)
    rows_at = sampling.rows_of_epochs(len(bins), rows_per_step=2, seed=0)
    batch = tk.step_batch(tk.Packed(corpus, bins), rows_at, types.Cursor(), rows_per_microbatch=1)
    assert tk.batch_hash(batch.microbatches) is not None
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()  # a rank's garbage collector need not walk, and so copy, what is there for good


# ---------------------------------------------------------------------------------- a started rank


def run_rank(request):
    """Become the rank that a request describes; does not return."""
    import torch

    # In the child: a pool of threads from before the fork is made anew by whoever asks first, and
    # where several threads do, as the backward pass of a build for CUDA does, torch 2.14 aborts.
    torch.set_num_threads(1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environ"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    os.dup2(os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    for name, given in request["surroundings"].items():
        SURROUNDINGS[name](given)
    import recipe_runs

    recipe = recipe_runs.RECIPES / f"{request['recipe']}.py"
    sys.argv = [str(recipe), *request["flags"]]
    sys.path[0] = str(recipe.parent)
    module = LOADED.get(request["recipe"]) or recipe_runs.load(request["recipe"])
    if request["faults"]:
        put_faults(module, request["faults"])
    tree = ast.parse(recipe.read_text())
    main = next(node for node in tree.body if ast.unparse(node).startswith("if __name__ =="))
    exec(compile(ast.Module(main.body, []), recipe, "exec"), vars(module))


def put_faults(module, planned):
    """Put injectors around the recipe's train step."""
    make = module.make_train_step

    def make_train_step(cfg, ps, stages, optimizer, *rest, **named):
        step = make(cfg, ps, stages, optimizer, *rest, **named)
        for name, given in planned:
            step = injector(name, given, stages=stages, optimizer=optimizer)(step)
        return step

    module.make_train_step = make_train_step


def injector(name, given, **live):
    """Return an injector by its name, given what it asks for of the live objects."""
    from trainkit.testing import faults

    if name == "memory_at":
        name, given = "fail_at", dict(given) | {"error": MemoryError("all of it is taken")}
    make = getattr(faults, name)
    wanted = inspect.signature(make).parameters
    given = dict(given) | {key: value for key, value in live.items() if key in wanted}
    return make(given.pop("at"), **given)


def limit_files(limit):
    """Let no file grow beyond so many bytes, on one rank or on all."""
    import resource

    if limit.get("rank") in {None, int(os.environ["RANK"])}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit["bytes"],) * 2)


def slow_disk(seconds):
    """Make every fsync take some time."""
    fsync = os.fsync

    def slow(handle):
        time.sleep(seconds)
        fsync(handle)

    os.fsync = slow


def no_pictures(_):
    """Draw nothing at the end of a run."""
    from trainkit.runtime import run

    assert run.plot_loss  # the name that a run calls; in another place it would still draw
    run.plot_loss = lambda *_: None


def believe_files(_):
    """Take a protection away: no byte of a checkpoint is compared with its hash."""
    from trainkit.checkpoint import manifest, reading

    manifest._hash_problems = lambda *_: []
    reading._must_match = lambda *_: None


def often(every):
    """Compare all of the replicas after so many steps."""
    from functools import partial

    from trainkit.checkpoint import guard

    guard.canary = partial(guard.canary, every=every, within=every)


def stop_alone(_):
    """Take a protection away: a rank that is told to stop asks nobody."""
    from trainkit.runtime import session

    @contextlib.contextmanager
    def stop_votes(asked, _):
        yield asked

    session.stop_votes = stop_votes


def deaf(_):
    """Take a protection away: no step asks whether to stop."""
    from trainkit.runtime import session

    session.stop_votes = lambda *_: contextlib.nullcontext(lambda: None)


SURROUNDINGS = {
    "limit_files": limit_files,
    "slow_disk": slow_disk,
    "no_pictures": no_pictures,
    "believe_files": believe_files,
    "often": often,
    "stop_alone": stop_alone,
    "deaf": deaf,
}
"""What a request may ask to be different around the recipe."""


if __name__ == "__main__":
    warm_up(sys.argv[1])
    run_rank(serve())
