"""One thread per process, the same examples every time, and no process left behind."""

import gc
import io
import os
import random
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch: sums keep their order, and two cores their peace
# Warnings are errors in the processes that tests start too: ranks, recipes. But torch's compiler
# reads `.grad` of tensors that are no leaves, makes what it warns of, and tells what it leaves out.
_COMPILER = (
    "ignore:Dynamo does not know how to trace:UserWarning",
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning",
)
os.environ["PYTHONWARNINGS"] = ",".join(("error", *_COMPILER))
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "faults")]  # helpers

_LEFT_OUT = "only --all runs it"

# The heap of torch, transformers and 6,000 tests is walked less often: 14 % of the families' time.
gc.set_threshold(20_000, 20, 50)

hypothesis.settings.register_profile(
    "trainkit", derandomize=True, deadline=None, max_examples=50, database=None, print_blob=False
)
hypothesis.settings.load_profile("trainkit")


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="all rows of every family, not those of every pair"
    )


def pytest_configure(config):
    """Draw the seed of the fault tests' choices before workers start, which take it from here.

    So do they which rows of a family are to run; see every_pair.py.
    """
    if config.getoption("--all"):
        os.environ["TRAINKIT_ALL_ROWS"] = "1"
    os.environ.setdefault("TRAINKIT_FAULT_SEED", str(random.SystemRandom().randrange(10**6)))
    if os.environ.get("TRAINKIT_ALL_EXTRAS"):  # .ci/run installs them: nothing may be skipped
        pytest.importorskip = import_or_fail


def import_or_fail(name, **how):
    """Import what a test asks for, as `pytest.importorskip`, but where it is absent, fail."""
    try:
        return _importorskip(name, **how)
    except pytest.skip.Exception as error:
        raise ImportError(f"{error}; with TRAINKIT_ALL_EXTRAS it must be installed") from error


_importorskip = pytest.importorskip


@pytest.fixture(params=["on the host", "on the device"])
def verdict(request, monkeypatch):
    """Let a step read on the host whether it applies, as on a CPU, or on no account, as on a GPU.

    There the optimizer is handed the verdict as `found_inf`.
    """
    if request.param == "on the device":
        monkeypatch.setattr("trainkit.grads.can_read_values", lambda _: False)


@pytest.fixture(name="own_process")
def _own_process():
    """Let this process be a recipe's own, as it is inside `run_main`."""
    from own_process import own_process

    with own_process():
        yield


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("only_all") and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason=_LEFT_OUT))


def pytest_collection_finish(session):
    """Leave what stays for good out of every later walk of the garbage collector."""
    del session
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report for report in skipped if _LEFT_OUT in str(report.longrepr)]
    if left_out:
        count = f"{len(left_out)} tests were left out"
        terminalreporter.write_line(f"{count}, which `pytest --all` runs")
    seed = os.environ["TRAINKIT_FAULT_SEED"]
    terminalreporter.write_line(f"faults were chosen by TRAINKIT_FAULT_SEED={seed}")


_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def _parents():
    """Return {pid: parent pid} of the living processes of this machine (zombies left out)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return parents


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def living_children():
    """Return {pid: command} of what this process started: multiprocessing's servers excepted."""
    parents = _parents()
    children = {pid: _command(pid) for pid, parent in parents.items() if parent == os.getpid()}
    servers = {pid for pid, command in children.items() if any(s in command for s in _SERVERS)}
    forked = {pid: _command(pid) for pid, parent in parents.items() if parent in servers}
    return {pid: command for pid, command in (children | forked).items() if pid not in servers}


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left():
    before = set(living_children())
    yield
    left = {pid: name for pid, name in living_children().items() if pid not in before and name}
    assert not left, f"the tests left processes behind: {left}"


@pytest.fixture
def asked_of_the_disk(monkeypatch):
    """Count the calls that read a disk, by name."""
    counts = Counter()

    def counting(name, function):
        def counted(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return counted

    for home, name in ((os, "listdir"), (os, "scandir"), (os, "stat"), (os, "open"), (io, "open")):
        monkeypatch.setattr(home, name, counting(name, getattr(home, name)))
    return counts
