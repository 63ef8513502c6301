"""A save is complete or absent: what it writes, in which order, under which name and mode."""

import functools
import os
import stat
import threading
import types
from pathlib import Path

import attrs
import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from whole_step import Layout, build

import trainkit as tk
from trainkit import files
from trainkit.parallel.parameters import get_local_box
from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, ConfigError, Cursor, DiskError, NumericsError
from trainkit.weights.checkpoint import background_save as flight
from trainkit.weights.checkpoint import list_checkpoints, snapshot, verify_checkpoint, write
from trainkit.weights.checkpoint.boxes import DTYPES
from trainkit.weights.checkpoint.manifest import is_sealed, read_manifest
from trainkit.weights.checkpoint.run_id import fork_run, get_run_id
from trainkit.weights.checkpoint.run_state import get_run_tensors, state_hash
from trainkit.weights.checkpoint.save import open_saver, save_checkpoint

SOLO = tk.solo_parallel()
HEALTH = {"skips": 2.0, "losses": [3.5, 2.5]}


def small_run(step=1, width=3):
    """Return the arguments of a checkpoint: counters, stages, optimizer, layout."""
    torch.manual_seed(0)
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(step):
        model(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return tk.TrainState(step, 7, Cursor(step, (1, 2)), HEALTH), [model], optimizer, SOLO


def tensors_in(path):
    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}


# ------------------------------------------------------------------------------ what is written


def test_a_manifest_says_which_run_which_configuration_and_which_state(tmp_path):
    run = small_run()
    path = save_checkpoint(tmp_path, *run, config={"lr": 0.1, "seed": 3}, score=1.5)
    manifest = read_manifest(path)
    assert manifest["version"] == 2
    assert manifest["run"] == get_run_id(tmp_path)["run"]
    assert manifest["config"] == {"lr": 0.1, "seed": 3}
    assert manifest["state_hash"] == state_hash(*run)
    assert (manifest["score"], manifest["torch"]) == (1.5, torch.__version__)
    assert verify_checkpoint(path) == []


def test_what_health_remembers_is_in_the_hash_and_comes_back(tmp_path):
    state, *rest = small_run()
    assert state_hash(state, *rest) != state_hash(tk.TrainState(1, 7, state.cursor), *rest)
    save_checkpoint(tmp_path, state, *rest)
    found = tk.resume(tmp_path, tk.TrainState(), *rest, log=lambda _: None)
    assert found.health == HEALTH
    assert state_hash(found, *rest) == state_hash(state, *rest)


def test_parameters_of_which_nothing_is_remembered_are_named(tmp_path):
    state, (model,), optimizer, ps = small_run()
    for names in ([], ["bias"]):
        path = save_checkpoint(tmp_path, state, [model], optimizer, ps)
        saved = orjson.loads((path / "state.json").read_bytes())["optimizer"]
        assert saved["untouched"] == names
        optimizer.state.pop(model.bias, None)


class One(nn.Module):
    """One parameter of any name and shape, one buffer of any dtype."""

    def __init__(self, *, name="w", shape=(2, 3), dtype=torch.float32):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        self.register_buffer("held", torch.ones(3, 2).to(dtype))


SAVED_DTYPES = [getattr(torch, name) for name in DTYPES]


@pytest.mark.case("K25", "M1")
@pytest.mark.parametrize(
    "make_model",
    [
        *(functools.partial(One, dtype=dtype) for dtype in SAVED_DTYPES),
        functools.partial(One, name="größe é漢"),
        functools.partial(One, name="a/b"),
        functools.partial(One, shape=()),
        functools.partial(One, shape=(0, 4)),
    ],
    ids=lambda make_model: str(make_model.keywords),
)
def test_whatever_is_saved_is_read_back(make_model, tmp_path):
    ends = []
    for _ in range(2):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        rest = [model], optimizer, SOLO
        state = tk.resume(tmp_path, tk.TrainState(), *rest, log=lambda _: None)
        if not ends:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            model.held.zero_()
            save_checkpoint(tmp_path, state, *rest)
        ends.append(state_hash(state, *rest))
    assert ends[0] == ends[1]


@pytest.mark.case("K25")
@pytest.mark.parametrize(
    "model",
    [
        One(name="a\nb"),
        One(name="a" * 1200),
        One(shape=(1,) * 17),
        One(dtype=torch.complex64),
    ],
    ids=["newline", "long", "dimensions", "complex"],
)
def test_what_could_not_be_read_back_is_not_saved(model, tmp_path):
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"save_checkpoint: .*(named|valid shape|complex64)"):
        save_checkpoint(tmp_path, tk.TrainState(), [model], optimizer, SOLO)
    assert not list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.case("X8", "M3")
@pytest.mark.parametrize("protected", [True, False])
def test_parts_that_are_not_the_whole_are_never_committed(protected, tmp_path, monkeypatch):
    """A layout that leaves rows out must fail when it saves, not when it resumes."""
    model = nn.Linear(3, 2)
    rest = [model], torch.optim.SGD(model.parameters()), SOLO

    def half(tensor, **options):
        box = get_local_box(tensor, **options)
        return attrs.evolve(box, local=box.local[:1])

    monkeypatch.setattr("trainkit.weights.checkpoint.run_state.get_local_box", half)
    if protected:
        with pytest.raises(CheckpointError, match="of its"):
            save_checkpoint(tmp_path, tk.TrainState(), *rest)
        assert not list_checkpoints(tmp_path / "checkpoints")
    else:  # the negative control
        monkeypatch.setattr(write, "find_index_problems", lambda *_: [])
        save_checkpoint(tmp_path, tk.TrainState(), *rest)
        with pytest.raises(CheckpointError):
            tk.resume(tmp_path, tk.TrainState(), *rest, log=lambda _: None)


def test_a_configuration_that_is_not_plain_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="config holds what JSON does not"):
        save_checkpoint(tmp_path, *small_run(), config={"out": object()})


@pytest.mark.parametrize("bytes_per_file", [1, 64, 1 << 27])
def test_files_are_safetensors_whatever_their_number(tmp_path, monkeypatch, bytes_per_file):
    monkeypatch.setattr(snapshot, "_FILE_BYTES", bytes_per_file)
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool]
    module = nn.Module()
    for index, dtype in enumerate(dtypes):
        module.register_buffer(f"b{index}", torch.arange(6).reshape(2, 3).to(dtype))
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    module.register_buffer("scalar", torch.tensor(5))
    module.weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(module.parameters())
    path = save_checkpoint(tmp_path, tk.TrainState(step=1), [module], optimizer, SOLO)
    found, wanted = tensors_in(path), get_run_tensors([module], optimizer)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), wanted[name].float()) for name in wanted)
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (bytes_per_file < 1 << 27)
    assert verify_checkpoint(path) == []
    if bytes_per_file > 64:
        (file,) = path.glob("*.safetensors")
        save_file({name: x.contiguous() for name, x in wanted.items()}, tmp_path / "theirs")
        assert len(file.read_bytes()) == pytest.approx((tmp_path / "theirs").stat().st_size, abs=8)


@pytest.mark.case("K25")
def test_saved_and_loaded_and_saved_again_it_is_the_same(tmp_path):
    first = save_checkpoint(tmp_path, *small_run(3))
    _, stages, optimizer, ps = small_run(1)
    for _ in range(2):
        state = tk.resume(tmp_path, tk.TrainState(), stages, optimizer, ps, log=lambda _: None)
        again = save_checkpoint(tmp_path, state, stages, optimizer, ps)
        assert read_manifest(again) == read_manifest(first)


@pytest.mark.case("K25")
def test_control_what_is_not_loaded_shows(tmp_path):
    first = save_checkpoint(tmp_path, *small_run(3))
    again = save_checkpoint(tmp_path, small_run(3)[0], *small_run(1)[1:])
    assert read_manifest(again)["state_hash"] != read_manifest(first)["state_hash"]


def sharded(run_dir):
    with tk.parallel_session(pp=2) as ps:
        stages, optimizer = build(Layout(tied=True), ps)
        state = tk.TrainState(step=1, health=HEALTH)
        path = save_checkpoint(run_dir, state, stages, optimizer, ps)
        return read_manifest(path)["state_hash"], state_hash(state, stages, optimizer, ps)


def test_the_hash_that_threads_add_up_is_that_of_the_state_in_every_layout(tmp_path):
    stages, optimizer = build(Layout(tied=True), SOLO)
    whole = state_hash(tk.TrainState(step=1, health=HEALTH), stages, optimizer, SOLO)
    assert set(run_ranks(sharded, 4, tmp_path)) == {(whole, whole)}


# ---------------------------------------------------------------------------------- which run


def test_a_directory_keeps_its_identity_when_the_file_is_lost_or_damaged(tmp_path):
    save_checkpoint(tmp_path, *small_run())
    known = get_run_id(tmp_path)
    file = tmp_path / "run.json"
    good = file.read_bytes()
    for damaged in (b"", b"{}", good.replace(known["run"].encode(), b"0" * 32)):
        file.write_bytes(damaged)
        assert get_run_id(tmp_path) == known
        assert file.read_bytes() == good
    file.unlink()
    assert get_run_id(tmp_path) == known


def test_a_fork_has_an_identity_of_its_own_and_names_its_parent(tmp_path):
    parent = {**get_run_id(tmp_path), "step": 3, "path": "elsewhere"}
    fork = fork_run(tmp_path, parent)
    assert fork["run"] != parent["run"]
    path = save_checkpoint(tmp_path, *small_run())
    assert read_manifest(path)["parent"] == get_run_id(tmp_path)["parent"] == parent


# ------------------------------------------------------------------------- never into what exists


@pytest.mark.case("K5")
def test_a_step_saved_again_gets_a_name_above_all_of_its_own(tmp_path):
    run = small_run()
    paths = [save_checkpoint(tmp_path, *run) for _ in range(3)]
    assert [path.name[13:] for path in paths] == ["", "-1", "-2"]
    paths[0].rename(tmp_path / "gone")
    assert save_checkpoint(tmp_path, *run).name == "step_00000001-3"
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step_00000001-3"


@pytest.mark.case("K5")
@pytest.mark.parametrize("protected", [True, False])
def test_a_save_of_an_old_step_that_fails_leaves_the_old_one(tmp_path, monkeypatch, protected):
    path = save_checkpoint(tmp_path, *small_run())
    if not protected:  # as torch's: the new files go to where the old ones are
        monkeypatch.setattr(write, "remove_staging", lambda _: None)
        monkeypatch.setattr(write, "_reserve", lambda path, _: path.write_bytes(b""))
        monkeypatch.setattr(flight, "remove_staging", lambda _: None)
        where = Path.mkdir
        monkeypatch.setattr(Path, "mkdir", lambda self, **_: where(self, exist_ok=True))
        into = functools.partial(write.Destination, staging=path)
        monkeypatch.setattr(
            "trainkit.weights.checkpoint.save.Destination",
            lambda run_dir, ranks, **_: into(run_dir, ranks=ranks),
        )
    monkeypatch.setattr(write, "commit", lambda *_: 1 / 0)
    monkeypatch.setattr(flight, "commit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path, *small_run(2))
    assert (verify_checkpoint(path) == []) == protected


@pytest.mark.case("F5")
def test_what_is_being_written_lies_beside_what_it_will_be(tmp_path, monkeypatch):
    seen = []
    commit = flight.commit
    monkeypatch.setattr(flight, "commit", lambda *a: (seen.append(a[1].staging), commit(*a))[1])
    path = save_checkpoint(tmp_path, *small_run())
    assert seen[0].parent == path.parent
    assert [entry.name for entry in path.parent.iterdir() if entry.name[0] == "."] == []


# ----------------------------------------------------------------------------------- in order


def order_of(tmp_path, monkeypatch):
    """Return the names of the files that a save synced or renamed, in order."""
    events = []
    fsync, rename = os.fsync, Path.rename

    def traced_fsync(handle):
        events.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def traced_rename(self, target):
        events.append(("rename", Path(target).name))
        return rename(self, target)

    get_run_id(tmp_path)
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    save_checkpoint(tmp_path, *small_run())
    return events


def durable_before_it_is_named(events):
    """Return whether each file is on the disk before what refers to it."""
    made = [name for kind, name in events if kind == "fsync"]
    places = [i for i, (kind, _) in enumerate(events) if kind == "rename"]
    wanted = ["rank_00000.safetensors", "state.json", "index.json", "manifest.json"]
    return (
        len(places) == 1
        and [name for name in made if name in wanted] == wanted
        and events[places[0] - 1][1].startswith(".staging-")
        and events[places[0] + 1] == ("fsync", "checkpoints")
    )


@pytest.mark.case("F8")
def test_data_then_manifest_then_directory_then_name_then_parent(tmp_path, monkeypatch):
    assert durable_before_it_is_named(order_of(tmp_path, monkeypatch))


@pytest.mark.case("F8")
def test_control_a_directory_that_is_not_synced_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fsync_folder", lambda _: None)
    assert not durable_before_it_is_named(order_of(tmp_path, monkeypatch))


@pytest.mark.case("K20")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_all_files_have_the_mode_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        path = save_checkpoint(tmp_path / "run", *small_run())
    finally:
        os.umask(before)
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask
    assert verify_checkpoint(path) == []


# ------------------------------------------------------------------------------ finite numbers


def poisoned(where, value):
    state, (model,), optimizer, ps = small_run()
    with torch.no_grad():
        {
            "model/weight": model.weight,
            "optimizer/exp_avg/bias": optimizer.state[model.bias]["exp_avg"],
        }[where].view(-1)[1] = value
    return state, [model], optimizer, ps


@pytest.mark.case("N6")
@pytest.mark.parametrize("where", ["model/weight", "optimizer/exp_avg/bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_is_never_committed(tmp_path, where, value):
    with pytest.raises(NumericsError, match=f"{where} is not finite .element 1"):
        save_checkpoint(tmp_path, *poisoned(where, value))
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.case("N6")
def test_control_without_the_look_it_is_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_check_finite", lambda _: None)
    path = save_checkpoint(tmp_path, *poisoned("model/weight", float("nan")))
    assert not torch.isfinite(tensors_in(path)["model/weight"]).all()


@pytest.mark.case("N6")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_every_dtype_is_looked_at_and_large_numbers_are_no_infinities(tmp_path, dtype):
    most = torch.finfo(dtype).max
    largest = torch.tensor([-most, most, most], dtype=torch.float64).to(dtype)
    module = nn.ParameterDict({"x": nn.Parameter(largest, requires_grad=False)})
    arguments = [module], torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), SOLO
    arguments[1].param_groups[0]["params"] = []
    save_checkpoint(tmp_path, tk.TrainState(step=1), *arguments)
    integers = {1: torch.int8, 2: torch.int16, 8: torch.int64}[dtype.itemsize]
    for sign in (0, torch.iinfo(integers).min):
        module["x"].data[2] = float("nan")
        module["x"].data.view(integers)[2] ^= sign
        with pytest.raises(NumericsError, match=r"model/x is not finite \(element 2"):
            save_checkpoint(tmp_path, tk.TrainState(step=2), *arguments)


def test_a_mask_of_infinities_is_no_fault(tmp_path):
    model = nn.BatchNorm1d(2)
    model.running_mean[0] = -float("inf")
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(tmp_path, tk.TrainState(step=1), [model], optimizer, SOLO)
    model.running_mean[0] = float("nan")
    with pytest.raises(NumericsError, match="running_mean"):
        save_checkpoint(tmp_path, tk.TrainState(step=1), [model], optimizer, SOLO)


def test_health_that_json_cannot_hold_is_refused(tmp_path):
    state = tk.TrainState(health={"losses": [1.0, float("nan")]})
    with pytest.raises(ValueError, match=r"health\['losses'\]"):
        save_checkpoint(tmp_path, state, *small_run()[1:])


# ----------------------------------------------------------------------------------- on ranks


def fails_on_rank_1(run_dir):
    """Save, fail, save: return the result of each save, and the number of threads at the end."""
    import resource

    with tk.parallel_session() as ps:
        stages, optimizer = build(Layout(), ps)
        first = save_checkpoint(run_dir, tk.TrainState(step=1), stages, optimizer, ps)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ps.world.index == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        try:
            save_checkpoint(run_dir, tk.TrainState(step=2), stages, optimizer, ps)
            error = None
        except DiskError as failure:
            error = str(failure)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        tk.all_sum(torch.ones(1), ps.world)  # rank 0 has removed what it had to
        names = [path.name for path in (Path(run_dir) / "checkpoints").iterdir()]
        tk.all_sum(torch.ones(1), ps.world)
        last = save_checkpoint(run_dir, tk.TrainState(step=3), stages, optimizer, ps)
        return first.name, error, sorted(names), last.name, threading.active_count()


@pytest.mark.case("K6")
def test_a_file_too_large_on_one_rank_fails_the_save_on_all(tmp_path):
    found = run_ranks(fails_on_rank_1, 2, tmp_path)
    assert "EFBIG" in found[1][1]
    assert "rank 1: save_checkpoint" in found[0][1]
    for first, _, names, last, threads in found:
        assert names == ["latest", "step_00000001"]
        assert (first, last, threads) == ("step_00000001", "step_00000003", 1)
    newest = list_checkpoints(tmp_path / "checkpoints")
    assert [verify_checkpoint(path) for path in newest] == [[], []]


def fails_unseen(run_dir):
    """Save while rank 1 cannot write, which no rank learns: what torch does (FAULTS.md, fact 7)."""
    with tk.parallel_session() as ps:
        stages, optimizer = build(Layout(), ps)
        flight.all_max = lambda flags, _: torch.zeros_like(flags)
        if ps.world.index == 1:
            flight.write_rank = lambda *_: None
        write.find_index_problems = lambda *_: []
        write._read_report = lambda path: (
            orjson.loads(path.read_bytes())
            if path.exists()
            else {
                "tensors": {},
                "scalars": {},
                "untouched": [],
                "files": {},
                "hashes": {},
                "components": {},
                "replicas": {},
            }
        )
        write.suppress = None
        unlink = Path.unlink
        Path.unlink = lambda self, **_: unlink(self, missing_ok=True)
        return str(save_checkpoint(run_dir, tk.TrainState(step=1), stages, optimizer, ps))


@pytest.mark.case("K6")
def test_control_without_the_agreement_a_part_is_committed(tmp_path):
    (path, _) = run_ranks(fails_unseen, 2, tmp_path)
    held = sum(x.numel() for x in tensors_in(Path(path)).values())
    stages, optimizer = build(Layout(), SOLO)
    assert held < sum(x.numel() for x in get_run_tensors(stages, optimizer).values())


def test_reports_are_sealed_and_gone_after_a_commit(tmp_path, monkeypatch):
    seen = []
    read = write._read_report
    monkeypatch.setattr(
        write,
        "_read_report",
        lambda p: (seen.append(is_sealed(orjson.loads(p.read_bytes()))), read(p))[1],
    )
    path = save_checkpoint(tmp_path, *small_run())
    assert seen == [True]
    assert sorted(file.suffix for file in path.iterdir()) == [".json"] * 3 + [".safetensors"]


@pytest.mark.case("Z5")
def test_many_small_tensors_are_saved_in_bounded_time(tmp_path):
    model = nn.ParameterList(torch.ones(2) for _ in range(1000))
    optimizer = torch.optim.SGD(model.parameters())
    with open_saver(tmp_path, [model], optimizer, SOLO, background=False) as (save, saved):
        save(tk.TrainState(step=1))
        (outcome,) = saved()
    assert outcome.seconds < 10
    assert len(tensors_in(outcome.path)) == 1000


@pytest.mark.case("Z4")
def test_a_snapshot_takes_the_memory_of_the_state_once(tmp_path):
    model = nn.Linear(1 << 10, 1 << 12)  # 16 MiB, and twice that in moments
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1 << 10)).sum().backward()
    optimizer.step()
    take = snapshot.make_snapshot_taker([model], optimizer, SOLO)
    held = sum(file.data.nbytes for file in take(tk.TrainState(), {}).files)
    assert held == sum(x.nbytes for x in get_run_tensors([model], optimizer).values())
    assert (
        verify_checkpoint(save_checkpoint(tmp_path, tk.TrainState(), [model], optimizer, SOLO))
        == []
    )


def test_pinned_memory_is_no_larger_than_what_it_holds(monkeypatch):
    calls = []
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda place, size, _: calls.append(("pin", place, size)),
        cudaHostUnregister=lambda place: calls.append(("let go", place)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    data = np.empty(5000, np.uint8)
    snapshot._pin(data)
    place, view = data.ctypes.data, torch.from_numpy(data)[100:200]
    del data
    assert calls == [("pin", place, 5000)]
    del view
    assert calls[1:] == [("let go", place)]
