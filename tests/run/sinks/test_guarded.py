"""Sinks that are missing, raise or hang, at any moment: one warning each, and the run goes on."""

import contextlib
import io
import os
import re
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest

from trainkit import sinks
from trainkit.run.log import make_logger
from trainkit.run.sinks.guards import isolate_sinks, redacted
from trainkit.run.sinks.mlflow import open_mlflow
from trainkit.run.sinks.named import named_sinks
from trainkit.run.sinks.open_run_sinks import open_run_sinks
from trainkit.run.sinks.ray import open_ray
from trainkit.run.sinks.tensorboard import open_tensorboard
from trainkit.run.sinks.trackio import open_trackio
from trainkit.run.sinks.wandb import open_wandb
from trainkit.types import ConfigError, Share
from trainkit.weights.checkpoint.run_id import get_run_id

KEY = "0123456789abcdef0123456789abcdef01234567"
STEPS = 30


def nothing(*args, **kwargs):
    del args, kwargs


def raising(error):
    def fail(*args, **kwargs):
        del args, kwargs
        raise error

    return fail


def returning(value):
    def give(*args, **kwargs):
        del args, kwargs
        return value

    return give


@pytest.fixture
def hanging():
    """A function that hangs until the test is over."""
    over = threading.Event()

    def hang(*args, **kwargs):
        del args, kwargs
        over.wait(60)

    yield hang
    over.set()


@pytest.fixture
def server(monkeypatch):
    """A stub of wandb with a server that keeps, for each run, what it was sent, as the real one."""
    runs, opened = {}, []

    def init(*, id, resume, **options):  # noqa: A002 (wandb's own name)
        sent = runs.setdefault(id, [])
        assert resume == "allow"
        first = sent[-1][0] + 1 if sent else 0

        def log(values, *, step):
            assert not sent or step > sent[-1][0], "steps must rise"
            sent.append((step, values))

        run = types.SimpleNamespace(log=log, step=first, finish=nothing)
        opened.append((run, options))
        return run

    library = types.SimpleNamespace(init=init, runs=runs, opened=opened)
    monkeypatch.setitem(sys.modules, "wandb", library)
    return library


def write_run(folder, *, steps=STEPS, start=0, patience=1.0, **extra):
    """Log the steps of a run; return the longest that a line took, and what all of it took."""
    longest, begin = 0.0, time.monotonic()
    with open_run_sinks(
        folder, Share(0, 1), step=start, last=steps, extra=extra, patience=patience
    ) as (
        log,
        _,
    ):
        for step in range(start + 1, steps + 1):
            before = time.monotonic()
            log(step, {"loss": 1 / step, "note": "plain"})
            longest = max(longest, time.monotonic() - before)
    return longest, time.monotonic() - begin


@contextlib.contextmanager
def killed_and_rolled_back(folder, page, last):
    """Log 15 steps of a run that is killed and goes on; yield its last sink, rolled back, at 18."""
    for start, steps in ((0, 7), (4, 6), (4, 12), (12, 15)):  # killed after its checkpoint, twice
        write_run(folder, steps=steps, start=start, page=page, patience=30)
    assert warnings_of(folder) == []
    with last(step=15) as sink:
        for step in (16, 17, 15, 16, 17, 18):  # a roll-back: the server keeps what it has
            sink(step, {"train/loss": 0.0})
        yield sink


def steps_of(folder):
    return [line["step"] for line in sinks.read_jsonl(folder / "metrics.jsonl")]


def warnings_of(folder):
    told = sinks.read_jsonl(folder / "events.jsonl")
    return [event["what"] for event in told if event["event"] == "warning"]


@pytest.fixture
def break_wandb(server, monkeypatch, hanging):
    """A function that makes the stub fail in one of the ways that people have seen."""
    return partial(_break_wandb, library=server, monkeypatch=monkeypatch, hang=hanging)


def _break_wandb(kind, *, library, monkeypatch, hang):
    if kind == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif kind == "a folder called wandb":
        monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    elif kind == "no network":
        library.init = raising(ConnectionError("wandb: no route to api.wandb.ai"))
    elif kind == "bad key":
        library.init = raising(ValueError(f"401: API key {KEY} is not valid"))
    elif kind == "exits in init":
        library.init = raising(SystemExit(1))
    elif kind == "hangs in init":
        library.init = hang
    else:
        verb, _, place = kind.partition(" in ")
        fail = hang if verb == "hangs" else raising(RuntimeError("the service has gone"))
        calls = {"log": nothing, "finish": nothing} | {place: fail}
        library.init = returning(types.SimpleNamespace(step=0, **calls))


FAILURES = {
    "not installed": r'is off: ConfigError: wandb is missing: pip install "trainkit-lm\[sinks\]"',
    "a folder called wandb": r'is off: ConfigError: wandb is missing: pip install "trainkit-lm',
    "no network": "is off: ConnectionError: wandb: no route",
    "bad key": "is off: ValueError: 401: API key <WANDB_API_KEY> is not valid",
    "exits in init": "is off: SystemExit: 1",
    "hangs in init": "has not ended within",
    "hangs in log": "has not ended within",
    "raises in log": "is off: RuntimeError: the service has gone",
    "raises in finish": "is off: RuntimeError: the service has gone",
    "hangs in finish": "has not ended within",
}


@pytest.mark.case("W1", "W8", "L13")
@pytest.mark.parametrize("kind", FAILURES)
def test_a_page_that_fails_in_any_way_costs_one_warning(
    kind, tmp_path, monkeypatch, break_wandb, capfd
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    break_wandb(kind)
    longest, whole = write_run(tmp_path, wandb=partial(open_wandb, tmp_path), patience=0.3)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    (warning,) = warnings_of(tmp_path)
    assert re.match(f"the sink 'wandb' {FAILURES[kind]}", warning)
    assert longest < 5
    assert whole < 10
    out, err = capfd.readouterr()
    assert err == f"warning: {warning}\n"
    assert f"step {STEPS}/{STEPS}" in out
    assert KEY not in (tmp_path / "events.jsonl").read_text() + err + out


@pytest.mark.case("L13")
@pytest.mark.parametrize(
    ("library", "make", "extra"),
    [
        ("wandb", open_wandb, "sinks"),
        ("torch.utils.tensorboard", open_tensorboard, "sinks"),
        ("ray", open_ray, "ray"),
        ("mlflow", open_mlflow, "mlflow"),
        ("trackio", open_trackio, "trackio"),
    ],
)
def test_a_missing_library_names_what_to_install(library, make, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf'pip install "trainkit-lm\[{extra}\]"'), make(tmp_path):
        pass


@pytest.mark.case("W1")
def test_without_the_guard_a_page_that_fails_ends_the_run(tmp_path, break_wandb):
    break_wandb("raises in log")
    with pytest.raises(RuntimeError, match="gone"), open_wandb(tmp_path) as sink:
        sink(1, {"loss": 1.0})


# ------------------------------------------------------------------------------------ ray


class Gauge:
    """A stand-in for Ray's, which refuses other tags than those that it was made with."""

    values = {}  # noqa: RUF012 -- the test's own

    def __init__(self, name, description, tag_keys):
        assert (name, tag_keys) == ("trainkit", ("run", "name"))
        assert description

    def set(self, value, tags):
        assert tags.keys() == {"run", "name"}
        assert tags["run"] == "mine"
        self.values[tags["name"]] = value


@pytest.fixture
def ray(monkeypatch):
    """Return a stand-in for Ray in a process that is one of its workers."""
    library, metrics = types.ModuleType("ray"), types.ModuleType("ray.util.metrics")
    library.is_initialized = lambda: True
    monkeypatch.setattr(Gauge, "values", {})
    metrics.Gauge = Gauge
    monkeypatch.setitem(sys.modules, "ray", library)
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    return library


@pytest.mark.usefixtures("ray")
def test_ray_has_each_number_under_its_own_name_with_its_newest_value():
    with open_ray("runs/mine", step=6) as sink:
        assert Gauge.values == {"step": 6}
        sink(7, {"train/loss": 2.5, "train/batch_hash": "00ff", "train_loss": 3.5})
        sink(8, {"train/loss": 1.5})
    assert Gauge.values == {"step": 8, "train/loss": 1.5, "train_loss": 3.5}


def test_ray_s_sink_is_refused_outside_of_ray(ray):
    ray.is_initialized = lambda: False
    with pytest.raises(ConfigError, match="no cluster of Ray"), open_ray("runs/mine"):
        pytest.fail("it was opened")


# ------------------------------------------------------------------------------------ tensorboard


@pytest.mark.case("W2")
@pytest.mark.parametrize("place", ["open", "write", "close"])
def test_tensorboard_on_a_bad_disk_is_off_and_the_others_go_on(
    place, tmp_path, monkeypatch, server, capfd
):
    full = raising(OSError(28, "No space left on device"))
    writer = types.SimpleNamespace(
        add_scalar=full if place == "write" else nothing,
        close=full if place == "close" else nothing,
    )
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = full if place == "open" else returning(writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    write_run(
        tmp_path,
        tensorboard=partial(open_tensorboard, tmp_path / "events"),
        wandb=partial(open_wandb, tmp_path),
        patience=30,
    )
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    (warning,) = warnings_of(tmp_path)
    assert warning.startswith("the sink 'tensorboard' is off: OSError: [Errno 28] No space left")
    assert [step for step, _ in server.runs[get_run_id(tmp_path)["run"]]] == list(
        range(1, STEPS + 1)
    )
    assert capfd.readouterr().err.count("warning: ") == 1


def test_tensorboard_gets_numbers_and_hides_what_a_restart_repeats(tmp_path, monkeypatch):
    seen, made = [], []
    writer = types.SimpleNamespace(add_scalar=lambda *call: seen.append(call), close=nothing)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda *args, **kwargs: made.append((args, kwargs)) or writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with open_tensorboard(tmp_path, step=6) as sink:
        sink(7, {"loss": 2.5, "batch_hash": "00ff", "tokens": 3, "huge": 10**400, "no": None})
        for step in (8, 9, 7, 8):  # a roll-back
            sink(step, {"loss": 1.0})
    assert made == [((str(tmp_path),), {"purge_step": 7})] * 2
    assert seen[:2] == [("loss", 2.5, 7), ("tokens", 3, 7)]
    assert [step for _, _, step in seen[2:]] == [8, 9, 7, 8]


# ------------------------------------------------------------------------------------ wandb


@pytest.mark.case("E8")
def test_a_run_that_is_killed_and_goes_on_is_one_series_on_the_page(tmp_path, server):
    page = partial(open_wandb, tmp_path, config={"lr": 0.1})
    with killed_and_rolled_back(tmp_path, page, partial(open_wandb, tmp_path)):
        pass
    (identity,) = server.runs
    assert identity == get_run_id(tmp_path)["run"]
    assert [step for step, _ in server.runs[identity]] == list(range(1, 19))
    assert steps_of(tmp_path) == list(range(1, 16))
    _, options = server.opened[0]
    assert options["config"] == {"lr": 0.1}
    assert options["name"] == tmp_path.name
    told = sinks.read_jsonl(tmp_path / "events.jsonl")
    assert {event["run"] for event in told if event["event"] == "start"} == {identity}


def test_a_run_that_fails_is_marked_so_on_the_page(tmp_path, monkeypatch):
    codes = []
    run = types.SimpleNamespace(
        log=nothing, step=0, finish=lambda *, exit_code: codes.append(exit_code)
    )
    library = types.SimpleNamespace(init=returning(run))
    monkeypatch.setitem(sys.modules, "wandb", library)
    page = {"wandb": partial(open_wandb, tmp_path)}
    with isolate_sinks(page, log=pytest.fail, patience=30) as sink:
        sink(1, {})
    with contextlib.suppress(KeyError), isolate_sinks(page, log=pytest.fail, patience=30) as sink:
        raise KeyError
    assert codes == [0, 1]


@pytest.mark.case("L13")
def test_sinks_are_opened_by_their_names(tmp_path, server):
    chosen = named_sinks(["wandb"], tmp_path, config={"lr": 0.1})
    write_run(tmp_path, wandb=chosen["wandb"], patience=30)
    assert [step for step, _ in server.runs[get_run_id(tmp_path)["run"]]][-1] == STEPS
    with pytest.raises(ConfigError, match="no sink is called 'wandbb'"):
        named_sinks(["wandbb"], tmp_path)


# ------------------------------------------------------------------------------------ mlflow


class Mlflow:
    """A stand-in for MLflow's client and its server, which keeps what it was sent."""

    def __init__(self):
        self.entities = types.SimpleNamespace(Metric=lambda key, value, _, step: (key, value, step))
        self.MlflowException = RuntimeError
        self.MlflowClient = lambda: self
        self.experiments, self.runs = set(), {}
        self.requests = []

    def is_tracking_uri_set(self):
        return True

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        if name in self.experiments:
            raise self.MlflowException
        self.experiments.add(name)

    def search_runs(self, experiments, text):
        found = [run for run in self.runs.values() if run.experiment in experiments]
        identity = re.fullmatch("tags.`trainkit.run` = '(.*)'", text)[1]
        return [run for run in found if run.tags["trainkit.run"] == identity]

    def create_run(self, experiment, *, tags, run_name):
        run_id = str(len(self.runs))
        self.runs[run_id] = types.SimpleNamespace(
            experiment=experiment,
            tags=tags,
            name=run_name,
            info=types.SimpleNamespace(run_id=run_id),
            data=types.SimpleNamespace(params={}, metrics={}),
            rows=[],
            statuses=[],
        )
        return self.runs[run_id]

    def log_params(self, params, *, run_id):
        before = self.runs[run_id].data.params
        assert before.items() <= params.items(), "a parameter keeps its value"
        before.update({name: str(value) for name, value in params.items()})

    def log_batch(self, run_id, metrics):
        run = self.runs[run_id]
        self.requests.append({step for _, _, step in metrics})
        assert len(metrics) <= 1000, "the library would send them in several requests"
        for name, value, step in metrics:
            assert re.fullmatch(r"[/\w.\- :]+", name)
            run.rows.append((step, name, value))
            run.data.metrics[name] = value

    def update_run(self, run_id, status):
        self.runs[run_id].statuses.append(status)

    set_terminated = update_run


@pytest.fixture
def mlflow(monkeypatch):
    library = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    return library


@pytest.mark.case("E8")
def test_a_run_that_is_killed_and_goes_on_is_one_run_of_mlflow(tmp_path, mlflow):
    page = named_sinks(["mlflow"], tmp_path, config={"lr": 0.1, "model": {"width": 8}})
    changed = partial(open_mlflow, tmp_path, config={"lr": 0.2, "rows": 4})
    with killed_and_rolled_back(tmp_path, page["mlflow"], changed) as sink:
        sink(18, {"eval/acc,none": 0.5})
    (run,) = mlflow.runs.values()
    assert (run.experiment, run.name) == ("trainkit", tmp_path.name)
    assert run.tags == {"trainkit.run": get_run_id(tmp_path)["run"]}
    assert run.data.params == {"lr": "0.1", "model.width": "8", "rows": "4"}
    losses = [step for step, name, _ in run.rows if name == "train/loss"]
    assert losses == list(range(1, 19))
    assert (18, "eval/acc_none", 0.5) in run.rows
    assert run.statuses == ["RUNNING", "FINISHED"] * 5


def test_the_metrics_of_a_step_reach_mlflow_in_one_request(tmp_path, mlflow):
    """A kill between two requests would leave a part of a step, which would be sent again."""
    with open_mlflow(tmp_path) as sink:
        for step in range(1, 100):
            sink(step, {f"metric {i}": float(i) for i in range(30)})
    steps = [step for request in mlflow.requests for step in request]
    assert sorted(steps) == list(range(1, 100))
    assert len(mlflow.runs["0"].rows) == 99 * 31


def test_an_experiment_that_another_run_creates_meanwhile_is_used(tmp_path, mlflow):
    create = mlflow.create_experiment
    mlflow.create_experiment = lambda name: (create(name), create(name))
    with open_mlflow(tmp_path) as sink:
        sink(1, {"loss": 1.0})
    assert mlflow.runs["0"].experiment == "trainkit"


def test_two_directories_of_one_name_are_two_runs_of_mlflow(tmp_path, mlflow):
    for folder in (tmp_path / "a/run", tmp_path / "b/run"):
        folder.mkdir(parents=True)
        with open_mlflow(folder) as sink:
            sink(1, {"loss": 1.0})
    assert [run.name for run in mlflow.runs.values()] == ["run", "run"]


def test_a_run_that_fails_is_marked_so_in_mlflow(tmp_path, mlflow):
    page = {"mlflow": partial(open_mlflow, tmp_path)}
    with contextlib.suppress(KeyError), isolate_sinks(page, log=pytest.fail, patience=30) as sink:
        sink(1, {"loss": 1.0})
        raise KeyError
    assert mlflow.runs["0"].rows == [(1, "loss", 1.0), (1, "step", 1)]
    assert mlflow.runs["0"].statuses == ["RUNNING", "FAILED"]


def test_a_run_whose_last_lines_mlflow_refuses_is_ended_there(tmp_path, mlflow):
    stack = contextlib.ExitStack()
    sink = stack.enter_context(open_mlflow(tmp_path))
    sink(1, {"loss": 1.0})
    mlflow.log_batch = raising(OSError("full"))
    with pytest.raises(OSError, match="full"):
        stack.close()
    assert mlflow.runs["0"].statuses == ["RUNNING", "FINISHED"]


def test_mlflow_gets_lines_together_and_late_ones_too(tmp_path, mlflow, monkeypatch):
    clock = iter([0.0, 0.1, 0.2, 1.0, 1.0, 1.1])  # opened, three lines, sent, the fourth line
    batches, log_batch = [], mlflow.log_batch
    monkeypatch.setattr(time, "monotonic", lambda: next(clock, 2.0))

    def count(run_id, metrics):
        batches.append(len(metrics))
        log_batch(run_id, metrics)

    mlflow.log_batch = count
    with open_mlflow(tmp_path) as sink:
        for step in (1, 2, 3, 4):
            sink(step, {"loss": 1.0})
    assert batches == [6, 2]  # a second, the end


@pytest.mark.case("W1", "W8")
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("place", ["get_experiment_by_name", "log_batch", "set_terminated"])
def test_mlflow_that_fails_costs_one_warning(place, hangs, mlflow, tmp_path, request):
    request.getfixturevalue("monkeypatch").setenv("MLFLOW_TRACKING_TOKEN", KEY)
    fail = raising(ConnectionError(f"no route with {KEY}"))
    setattr(mlflow, place, request.getfixturevalue("hanging") if hangs else fail)
    write_run(tmp_path, mlflow=partial(open_mlflow, tmp_path), patience=0.3)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    (warning,) = warnings_of(tmp_path)
    off = "is off: ConnectionError: no route with <MLFLOW_TRACKING_TOKEN>"
    assert warning.startswith(f"the sink 'mlflow' {'has not ended' if hangs else off}")


def test_mlflow_asks_where_its_server_is(tmp_path, mlflow):
    """Its default, a database in the working directory, is another one for a requeued run."""
    mlflow.is_tracking_uri_set = lambda: False
    with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_URI"), open_mlflow(tmp_path):
        pytest.fail("it was opened")


# ------------------------------------------------------------------------------------ trackio


class Trackio:
    """A stand-in for Trackio with its database, which knows a run by its name."""

    def __init__(self):
        self.runs, self.configs, self.finished = {}, [], 0

    def init(self, *, project, name, config, resume, **off):
        assert resume == "allow"
        assert not any(off.values())  # no pages in a notebook, no threads that watch the device
        rows = self.runs.setdefault((project, name), [])
        self.configs.append(config)
        return types.SimpleNamespace(
            log=lambda values, *, step: rows.append((step, values)),
            finish=self.finish,
            _next_step=max((step + 1 for step, _ in rows), default=0),
        )

    def finish(self):
        self.finished += 1


@pytest.fixture
def trackio(monkeypatch):
    library = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", library)
    return library


@pytest.mark.case("E8")
def test_a_run_that_is_killed_and_goes_on_is_one_run_of_trackio(tmp_path, trackio):
    page = named_sinks(["trackio"], tmp_path, config={"lr": 0.1})
    with killed_and_rolled_back(tmp_path, page["trackio"], partial(open_trackio, tmp_path)) as sink:
        sink(18, {"eval/loss": 0.5})
    ((run, rows),) = trackio.runs.items()
    assert run == ("trainkit", f"{tmp_path.name}-{get_run_id(tmp_path)['run'][:8]}")
    assert [step for step, _ in rows] == [*range(1, 19), 18]
    assert rows[-1] == (18, {"eval/loss": 0.5})
    assert trackio.configs == [{"lr": 0.1}] * 4 + [{}]
    assert trackio.finished == 5


@pytest.mark.case("W1")
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("place", ["init", "finish"])
def test_trackio_that_fails_costs_one_warning(place, hangs, trackio, tmp_path, hanging):
    setattr(trackio, place, hanging if hangs else raising(OSError(28, "No space left on device")))
    write_run(tmp_path, trackio=partial(open_trackio, tmp_path), patience=0.3)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    (warning,) = warnings_of(tmp_path)
    off = "is off: OSError: [Errno 28] No space left on device"
    assert warning.startswith(f"the sink 'trackio' {'has not ended' if hangs else off}")


# ------------------------------------------------------------------------------------ the guard


def test_lines_arrive_in_order_as_they_were_when_they_were_logged():
    seen, values = [], {"loss": 0.0}

    def collect():
        return contextlib.nullcontext(lambda step, got: seen.append((step, got["loss"])))

    with isolate_sinks({"a": collect}, log=pytest.fail, patience=30) as sink:
        for step in range(200):
            values["loss"] = float(step)
            sink(step, values)
    assert seen == [(step, float(step)) for step in range(200)]


@pytest.mark.case("W1")
def test_a_sink_that_hangs_holds_a_bounded_number_of_lines_and_one_that_lags_misses_none(hanging):
    told, seen = [], []

    def hold():
        return contextlib.nullcontext(hanging)

    def lag():
        time.sleep(0.1)
        return contextlib.nullcontext(lambda step, _: seen.append(step))

    makers = {"stuck": hold, "stuck too": hold, "late": lag}
    begin = time.monotonic()
    with isolate_sinks(makers, log=told.append, room=50, patience=1.0) as sink:
        for step in range(40):
            sink(step, {})
        while len(seen) < 40:
            time.sleep(0.01)
        for step in range(40, 80):
            sink(step, {})
    assert seen == list(range(80))
    assert time.monotonic() - begin < 8  # once for both, not once for each
    assert told == [
        f"the sink '{name}' is 50 lines behind; it misses what is more than 50"
        for name in ("stuck", "stuck too")
    ]


@pytest.mark.case("W1")
def test_a_sink_that_hangs_is_told_about_while_the_run_goes_on(hanging, monkeypatch):
    told, clock = [], iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with isolate_sinks({"stuck": hanging}, log=told.append, lag=60, patience=2) as sink:
        for step in range(59):
            sink(step, {})
        assert told == []
        for step in range(59, 70):
            sink(step, {})
    (warning,) = told
    assert warning.startswith("the sink 'stuck' is 6")


def test_what_goes_wrong_inside_the_block_is_what_is_raised(hanging):
    told = []
    with (
        pytest.raises(KeyError, match="step 3"),
        isolate_sinks({"a": hanging, "b": raising(OSError("x"))}, log=told.append, patience=0.1),
    ):
        raise KeyError("step 3")
    assert len(told) == 2


@pytest.mark.case("W8")
def test_secrets_of_the_environment_are_not_told():
    environ = {
        "HF_TOKEN": "hf_0123456789",
        "WANDB_API_KEY": KEY,
        "PATH": "/usr/bin/env",
        "KEY": "a",
        "proxy_password": "open sesame",
    }
    text = f"login {KEY} with hf_0123456789 from /usr/bin/env failed"
    assert (
        redacted(text, environ) == "login <WANDB_API_KEY> with <HF_TOKEN> from /usr/bin/env failed"
    )
    assert redacted("407: open sesame", environ) == "407: <proxy_password>"


# ------------------------------------------------------------------------------------ stdout


@contextlib.contextmanager
def unread_stdout(monkeypatch):
    """Give this process a stdout whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield


@pytest.mark.case("E9")
def test_a_run_outlives_the_reader_of_its_output(tmp_path, monkeypatch, capfd):
    log = make_logger(Share(0, 2)).info
    with unread_stdout(monkeypatch):
        log("reading")
        write_run(tmp_path, patience=30)
        log("done")
        print("whoever else prints", flush=True)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert warnings_of(tmp_path) == []  # the first print has found it out
    assert capfd.readouterr().err == ""


@pytest.mark.case("E9")
def test_a_console_whose_reader_leaves_is_off_with_one_warning(tmp_path, monkeypatch, capfd):
    with unread_stdout(monkeypatch):
        write_run(tmp_path, patience=30)
        print("whoever else prints", flush=True)
    (warning,) = warnings_of(tmp_path)
    assert warning.startswith("the sink 'console' is off: BrokenPipeError")
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert capfd.readouterr().err == f"warning: {warning}\n"


@pytest.mark.case("E9")
@pytest.mark.parametrize("stream", [None, "closed", "full"])
def test_a_stdout_that_is_closed_missing_or_full_stops_nobody(stream, tmp_path, monkeypatch):
    closed = io.StringIO()
    closed.close()
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(Path("/dev/full").open("w")) if stream == "full" else None
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, {"closed": closed, "full": full}.get(stream))
        make_logger(Share(0, 1)).info("reading")
        write_run(tmp_path, patience=30)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stack.close()
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


def test_other_ranks_print_and_write_nothing(tmp_path, capfd):
    make_logger(Share(1, 2)).info("reading")
    with open_run_sinks(tmp_path, Share(1, 2), step=0, last=1) as (log, event):
        log(1, {})
        event("save", step=1)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
