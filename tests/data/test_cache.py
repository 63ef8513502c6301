"""Plans on disk: the same bins as packing, never a broken one, whatever happens to the disk."""

import errno
import fcntl
import functools
import hashlib
import itertools
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch.distributed as dist
from hypothesis import given
from strategies import corpus_of, packings

from trainkit import files
from trainkit.batch import collate_bins
from trainkit.data import cache
from trainkit.data.cache import load_or_pack_bins
from trainkit.mesh import axis_from_group
from trainkit.packing import make_balanced_fit, next_fit, pack_bins, report_packing
from trainkit.tools.testing import run_ranks
from trainkit.types import DiskError

ARRAYS = ("offsets", "documents", "starts", "lengths")
LENGTHS = np.random.default_rng(0).integers(0, 90, 400)
CAPACITY = 32
WANT = pack_bins(LENGTHS, CAPACITY)
kept_bins = functools.partial(
    load_or_pack_bins, lengths=LENGTHS, capacity=CAPACITY, content="c0ffee"
)


def assert_same(bins, want=WANT):
    assert (bins.capacity, bins.multiple_of) == (want.capacity, want.multiple_of)
    for name in ARRAYS:
        got = getattr(bins, name)
        assert got.dtype == np.int64
        assert np.array_equal(got, getattr(want, name)), name


def own_fit(calls=None, *, version=1, name="own_fit", before=lambda: None, step=1):
    """Return a fit that puts each piece in a bin of its own, and writes down its calls."""

    def fit(lengths, capacity, *, max_documents):
        del capacity, max_documents
        before()
        if calls is not None:
            calls.append(len(lengths))
        return np.arange(len(lengths))[::step]

    fit.version, fit.__name__ = version, name
    return fit


def is_mapped(bins):
    """Say whether bins lie in a file: as plain arrays, of which slices are ten times as fast."""
    assert {type(getattr(bins, name)) for name in ARRAYS} == {np.ndarray}
    return not bins.offsets.flags.writeable


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def plan_in(folder):
    """Return the only plan in a cache."""
    (name,) = names(folder)
    return folder / name


def header_of(plan):
    """Return what the first line of a plan says."""
    return orjson.loads(plan.read_bytes().split(b"\n", 1)[0])


def reseal(plan, data=None, **changes):
    """Change a plan as somebody would who knows how it protects itself."""
    header, arrays = plan.read_bytes().split(b"\n", 1)
    header, arrays = orjson.loads(header), arrays if data is None else data
    header["key"] |= changes.pop("key", {})
    header |= {"sha256": hashlib.sha256(arrays).hexdigest()} | changes
    plan.write_bytes(orjson.dumps(header) + b"\n" + arrays)


# ------------------------------------------------------------------------------------- hit and key


@given(packings())
def test_a_kept_plan_is_what_packing_gives(tmp_path_factory, packing):
    folder = tmp_path_factory.mktemp("cache")
    want = packing.pack()
    for _ in range(2):
        bins = packing.pack(load_or_pack_bins, cache_dir=folder, content="x")
        assert_same(bins, want)
        assert is_mapped(bins)
    assert len(names(folder)) == 1


def test_the_second_call_does_not_pack_and_says_nothing(tmp_path):
    calls, messages = [], []
    for _ in range(2):
        bins = kept_bins(tmp_path, fit=own_fit(calls), log=messages.append)
    assert len(calls) == 1
    assert messages == [f"wrote the packing of {len(bins)} rows to {plan_in(tmp_path)}"]


def test_mapped_bins_serve_as_others_do(tmp_path):
    bins, corpus = kept_bins(tmp_path), corpus_of(LENGTHS)
    with pytest.raises(ValueError, match="read-only"):
        bins.lengths[0] = 1
    assert report_packing(bins) == report_packing(WANT)
    assert [bins[row] for row in range(len(bins))] == [WANT[row] for row in range(len(WANT))]
    found, want = (collate_bins(corpus, b, [3, 0]) for b in (bins, WANT))
    for name in ("input_ids", "labels", "position_ids", "document_ids"):
        assert found[name].tolist() == want[name].tolist()


HELD_OUT = LENGTHS * (np.arange(len(LENGTHS)) != 7)
packed = functools.partial(pack_bins, LENGTHS, CAPACITY)
own_packed = functools.partial(packed, fit=own_fit())
own_kept = functools.partial(kept_bins, fit=own_fit())
OTHERS = [  # each with the bins that it must have
    (functools.partial(own_kept, content="c0ffee0"), own_packed()),
    (functools.partial(own_kept, lengths=HELD_OUT), pack_bins(HELD_OUT, CAPACITY, fit=own_fit())),
    (
        functools.partial(own_kept, lengths=LENGTHS[::-1]),
        pack_bins(LENGTHS[::-1], CAPACITY, fit=own_fit()),
    ),
    (functools.partial(own_kept, capacity=64), pack_bins(LENGTHS, 64, fit=own_fit())),
    (functools.partial(kept_bins, fit=own_fit(name="other")), own_packed()),
    (functools.partial(kept_bins, fit=own_fit(version=2)), own_packed()),
    (functools.partial(kept_bins, fit=own_fit(version="2")), own_packed()),
    (functools.partial(kept_bins, fit=make_balanced_fit(2)), packed(fit=make_balanced_fit(2))),
    (functools.partial(kept_bins, fit=make_balanced_fit(3)), packed(fit=make_balanced_fit(3))),
    (functools.partial(own_kept, group_size=7), own_packed(group_size=7)),
    (functools.partial(own_kept, overlong="drop"), own_packed(overlong="drop")),
    (functools.partial(own_kept, multiple_of=2), own_packed(multiple_of=2)),
    (functools.partial(own_kept, max_documents=3), own_packed(max_documents=3)),
    (functools.partial(own_kept, seed=0), own_packed(seed=0)),
    (functools.partial(own_kept, seed=1), own_packed(seed=1)),
]


@pytest.mark.case("P4")
def test_everything_that_shapes_a_plan_is_in_its_name_and_in_its_first_line(tmp_path, monkeypatch):
    own_kept(tmp_path)
    for count, (keep, bins) in enumerate(OTHERS, start=2):
        assert_same(keep(tmp_path), bins)
        assert len(names(tmp_path)) == count
    monkeypatch.setattr(cache, "FORMAT", 0)
    own_kept(tmp_path)
    assert len(names(tmp_path)) == len(OTHERS) + 2
    keys = [header_of(path)["key"] for path in tmp_path.iterdir()]
    parts = "content capacity fit fit_version group_size overlong multiple_of max_documents seed"
    for part in (*parts.split(), "format", "lengths_sha256"):
        assert len({str(key[part]) for key in keys}) > 1, part


def test_one_plan_has_one_name_however_its_integers_are_written(tmp_path):
    for lengths in (
        LENGTHS,
        LENGTHS.tolist(),
        LENGTHS.astype(np.int32),
        np.repeat(LENGTHS, 2)[::2],
    ):
        assert_same(load_or_pack_bins(tmp_path, lengths, np.int64(CAPACITY), content="c0ffee"))
    assert len(names(tmp_path)) == 1


def test_no_documents_make_a_plan_of_no_rows(tmp_path):
    for lengths in ([], [0, 0], np.zeros(0, np.int32)):
        for _ in range(2):
            assert len(load_or_pack_bins(tmp_path, lengths, 8, content="x")) == 0
    with pytest.raises(ValueError, match="must be integers"):  # the plan of none is not theirs
        load_or_pack_bins(tmp_path, [1.5], 8, content="x")


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (
            functools.partial(kept_bins, capacity=0),
            "capacity must be an integer of at least 1, got 0",
        ),
        (functools.partial(kept_bins, capacity=32.0), "capacity must be an integer"),
        (functools.partial(kept_bins, group_size=-1), "group_size must be"),
        (functools.partial(kept_bins, multiple_of=5), "no multiple of multiple_of=5"),
        (functools.partial(kept_bins, max_documents=True), "max_documents must be"),
        (functools.partial(kept_bins, max_documents=float("nan")), "max_documents must be"),
        (functools.partial(kept_bins, overlong="skip"), "got 'skip'"),
        (functools.partial(kept_bins, overlong="error"), "document 0 has 76 tokens"),
        (functools.partial(kept_bins, lengths=[1.0]), "lengths must be integers"),
        (functools.partial(kept_bins, lengths=[[1]]), "one dimension"),
        (functools.partial(kept_bins, lengths=[[1], [1, 2]]), "not a ragged one"),
        (functools.partial(kept_bins, lengths=[3, -1]), "document 1 has length -1"),
    ],
)
def test_what_packing_refuses_is_refused_before_anything_is_written(tmp_path, keep, message):
    with pytest.raises(ValueError, match=message):
        keep(tmp_path / "new")
    assert names(tmp_path) == []
    kept_bins(tmp_path)
    with pytest.raises(ValueError, match=message):  # a plan that is there hides nothing
        keep(tmp_path)
    assert len(names(tmp_path)) == 1


def test_a_fit_without_a_version_is_refused_where_its_plan_would_be_kept(tmp_path):
    def foreign(lengths, capacity, *, max_documents):
        return next_fit(lengths, capacity, max_documents=max_documents)

    with pytest.raises(ValueError, match="the fit foreign has no attribute `version`"):
        kept_bins(tmp_path / "cache", fit=foreign)
    with pytest.raises(ValueError, match="add one"):
        kept_bins(tmp_path / "cache", fit=functools.partial(foreign))
    assert names(tmp_path) == []
    assert_same(kept_bins(None, fit=foreign), pack_bins(LENGTHS, CAPACITY, fit=next_fit))


# -------------------------------------------------------------------------------------- what breaks


@pytest.fixture
def quick(monkeypatch):
    """Let nothing wait for the disk: a thousand plans are written, none outlives the test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def assert_rebuilt(folder, before):
    """Open the plan again: it must have been seen to be damaged, and be as it was before."""
    messages = []
    bins = kept_bins(folder, log=messages.append)
    assert_same(bins)
    assert is_mapped(bins)
    assert len(messages) == 1
    assert messages[0].startswith(f"rebuilt the packing of {len(WANT)} rows in {folder}"), messages
    assert plan_in(folder).read_bytes() == before
    return messages[0]


def flipped(data, rng):
    place, bit = rng.integers(len(data)), rng.integers(8)
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


def cut(data, rng):
    return data[: rng.integers(len(data))]


def zeroed(data, rng):
    page = rng.integers(-(-len(data) // 4096)) * 4096
    return data[:page] + bytes(len(data[page : page + 4096])) + data[page + 4096 :]


def longer(data, rng):
    return data + rng.bytes(8)


@pytest.mark.case("P3")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("damage", "times"), [(flipped, 200), (cut, 200), (zeroed, 9), (longer, 1)]
)
def test_a_damaged_plan_is_never_used_but_built_again(tmp_path, damage, times):
    rng = np.random.default_rng(0)
    kept_bins(tmp_path)
    plan = plan_in(tmp_path)
    before = plan.read_bytes()
    for _ in range(times):
        broken = damage(before, rng)
        if broken != before:
            plan.write_bytes(broken)
            messages = assert_rebuilt(tmp_path, before)
            if len(broken) > len(before):
                assert f"{len(broken)} bytes instead of {len(before)}" in messages


@pytest.mark.case("P3")
@pytest.mark.usefixtures("quick")
def test_every_bit_of_the_first_line_counts(tmp_path):
    kept_bins(tmp_path)
    plan = plan_in(tmp_path)
    before = plan.read_bytes()
    for place in range(len(before.split(b"\n", 1)[0].rstrip())):
        plan.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        assert_rebuilt(tmp_path, before)


def huge(path):
    with path.open("wb") as file:
        file.truncate(2 << 30)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("instead", [os.mkfifo, huge, lambda path: path.write_text("[]")])
def test_what_is_no_plan_is_replaced(tmp_path, instead):
    kept_bins(tmp_path)
    plan = plan_in(tmp_path)
    before = plan.read_bytes()
    plan.unlink()
    instead(plan)
    assert_rebuilt(tmp_path, before)
    plan.unlink()
    plan.symlink_to("nowhere")
    assert is_mapped(kept_bins(tmp_path))
    assert plan_in(tmp_path).read_bytes() == before


def test_a_folder_in_the_place_of_a_plan_is_left_alone(tmp_path):
    kept_bins(tmp_path)
    plan = plan_in(tmp_path)
    plan.unlink()
    plan.mkdir()
    assert_packed_in_memory(tmp_path, "Is a directory")
    assert plan.is_dir()


@pytest.mark.case("P9")
def test_a_plan_of_another_format_has_another_name_and_in_this_ones_place_is_replaced(
    tmp_path, monkeypatch
):
    kept_bins(tmp_path)
    before = plan_in(tmp_path).read_bytes()
    reseal(plan_in(tmp_path), key={"format": 1})
    assert "format is 1 instead of 2" in assert_rebuilt(tmp_path, before)
    monkeypatch.setattr(cache, "FORMAT", 3)
    kept_bins(tmp_path)
    assert len(names(tmp_path)) == 2


@pytest.mark.case("P4")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"content": "beef"}, "content is 'beef' instead of 'c0ffee'"),
        ({"seed": 4}, "seed is 4 instead of None"),
        ({"more": 1}, "more is 1 instead of 'nothing'"),
        ({"capacity": 64}, "capacity is 64 instead of 32"),
    ],
)
def test_a_plan_of_another_key_is_never_used_and_the_part_named(tmp_path, changes, named):
    kept_bins(tmp_path)
    before = plan_in(tmp_path).read_bytes()
    reseal(plan_in(tmp_path), key=changes)
    assert named in assert_rebuilt(tmp_path, before)


@pytest.mark.parametrize(
    "changes", [{"rows": "3"}, {"rows": None}, {"pieces": -1}, {"key": []}, {"more": 1}]
)
def test_a_forged_first_line_is_no_way_in(tmp_path, changes):
    kept_bins(tmp_path)
    before = plan_in(tmp_path).read_bytes()
    header, arrays = before.split(b"\n", 1)
    plan_in(tmp_path).write_bytes(orjson.dumps(orjson.loads(header) | changes) + b"\n" + arrays)
    assert_rebuilt(tmp_path, before)


def test_offsets_that_no_packing_writes_are_not_used_with_the_right_hash(tmp_path):
    kept_bins(tmp_path)
    before = plan_in(tmp_path).read_bytes()
    arrays = before.split(b"\n", 1)[1]
    for place, value in ((0, 1), (5, 0), (len(WANT), int(WANT.offsets[-2]))):
        at = 8 * place
        data = arrays[:at] + np.int64(value).tobytes() + arrays[at + 8 :]
        reseal(plan_in(tmp_path), data)
        assert "offsets do not rise from 0 to" in assert_rebuilt(tmp_path, before)


# --------------------------------------------------------------------- killed, and several at once


def test_all_of_a_plan_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    seen, sync, replace = [], os.fsync, Path.replace

    def synced(handle):
        sync(handle)
        seen.append(Path(f"/proc/self/fd/{handle}").readlink().name.split("-")[0])

    def replaced(path, target):
        seen.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    kept_bins(tmp_path / "cache")
    staging = f".{plan_in(tmp_path / 'cache').name}.staging"
    assert seen == [staging, staging, "replace", "cache"]


WRITING = {"_write", "atomic_write", "remove_stale_files", "fsync_folder"}
WRITERS = {cache.__file__, files.__file__}


def traced(work, before_line):
    """Do `work`, and call `before_line` before every line of writing."""

    def trace(frame, event, _):
        code = frame.f_code
        if code.co_name not in WRITING or code.co_filename not in WRITERS:
            return None
        if event == "line":
            before_line()
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)


def lines_with_another_disk(folder, work):
    """Do `work`; return the first of the lines of writing that find the same below a folder.

    A killed process leaves what is on the disk, so of those that find the same one is enough.
    """
    seen = []

    def look():
        seen.append({path: path.lstat().st_size for path in folder.rglob("*")})

    traced(work, look)
    return [line for line, found in enumerate(seen) if line == 0 or found != seen[line - 1]]


def killed_at(line, work):
    """Do `work` in a fork, killed before a line of writing; return whether it was."""
    process = os.fork()
    if process == 0:
        lines = itertools.count()
        try:
            traced(work, lambda: next(lines) == line and os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1] == signal.SIGKILL


@pytest.mark.case("P2")
@pytest.mark.parametrize("damaged", [False, True])
def test_killed_anywhere_it_leaves_a_whole_plan_or_none(tmp_path, monkeypatch, damaged):
    """Killed where there is no plan, and where a damaged one is to be replaced."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here waits for the disk
    kept_bins(tmp_path / "clean")
    clean, cache = plan_in(tmp_path / "clean"), tmp_path / "cache"

    def prepare():
        shutil.rmtree(cache, ignore_errors=True)
        if damaged:
            shutil.copytree(tmp_path / "clean", cache)
            (cache / clean.name).write_bytes(b"")

    keep = functools.partial(kept_bins, cache)
    prepare()
    lines = lines_with_another_disk(cache, keep)
    assert len(lines) > 3
    for line in lines:
        prepare()
        assert killed_at(line, keep)
        if not damaged and (cache / clean.name).exists():
            assert (cache / clean.name).read_bytes() == clean.read_bytes()
        for _ in range(2):
            bins = kept_bins(cache)
            assert_same(bins)
            assert is_mapped(bins)
        assert names(cache) == [clean.name]
        assert (cache / clean.name).read_bytes() == clean.read_bytes()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    stay = [".a.bins.staging-00000000", ".plan-notes", "notes"]
    for name in (*stay, ".b.bins.staging-00000000"):
        (tmp_path / name).write_text("")
    with (tmp_path / stay[0]).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept_bins(tmp_path)
    assert set(stay) < set(names(tmp_path))
    assert len(names(tmp_path)) == len(stay) + 1


@pytest.mark.parametrize("broken", [False, True])
def test_who_comes_second_keeps_the_same_plan_again(tmp_path, broken):
    """While one packs, another keeps the same plan, whole or broken."""
    first = []

    def meanwhile():
        bins = kept_bins(tmp_path, fit=own_fit())
        if broken:
            plan_in(tmp_path).write_bytes(b"")
        else:
            first.append(bins)

    want = pack_bins(LENGTHS, CAPACITY, fit=own_fit())
    for bins in [kept_bins(tmp_path, fit=own_fit(before=meanwhile)), *first]:
        assert_same(bins, want)  # what the first has mapped stays as it was
        assert is_mapped(bins)
    assert len(names(tmp_path)) == 1


# ------------------------------------------------------------------------ where nothing can be kept


def assert_packed_in_memory(cache_dir, reason):
    messages = []
    bins = kept_bins(cache_dir, log=messages.append)
    assert_same(bins)
    assert not is_mapped(bins)
    assert [reason in line for line in messages] == [True], messages


@pytest.mark.case("P6")
def test_where_nothing_can_be_written_it_packs_in_memory_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert_packed_in_memory(tmp_path / "file", "File exists")
    assert_packed_in_memory(tmp_path / "file" / "below", "Not a directory")
    assert_packed_in_memory("/proc/nowhere", "/proc/nowhere")
    assert (tmp_path / "file").read_text() == ""

    def read_only(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", read_only)
    assert_packed_in_memory(tmp_path / "cache", "Read-only file system")
    assert names(tmp_path / "cache") == []


def test_a_plan_that_is_there_is_used_where_nothing_can_be_written(tmp_path, monkeypatch):
    kept_bins(tmp_path)
    monkeypatch.setattr(Path, "mkdir", None)
    monkeypatch.setattr(os, "fsync", None)
    assert is_mapped(kept_bins(tmp_path))


def test_without_a_cache_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = []
    assert_same(kept_bins(None, log=messages.append))
    assert (messages, names(tmp_path)) == ([], [])


def assert_disk_full(folder):
    with pytest.raises(DiskError, match=r"needs \d+ bytes; \d+ bytes are free") as caught:
        kept_bins(folder)
    assert caught.value.code == 74
    assert caught.value.want > 8 * len(WANT.documents) * 3
    assert caught.value.got > 0
    assert str(folder) in str(caught.value)
    assert names(folder) == []


@pytest.mark.case("P5")
def test_a_full_disk_is_told_with_what_is_needed_and_nothing_is_left(tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert_disk_full(tmp_path / "limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_disk_full(tmp_path / "full")


# -------------------------------------------------------------------------------------------- ranks


def maps_of(path):
    """Return the inode of a file that this process has mapped, or None."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return int(line.split()[4])
    return None


def error_of(work):
    try:
        work()
    except Exception as error:  # noqa: BLE001 (compared by the test)
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("make", [files.atomic_write, files.atomic_folder])
@pytest.mark.parametrize("moment", ["before it is locked", "before it has its name"])
def test_what_is_being_made_is_not_taken_for_dead(tmp_path, monkeypatch, make, moment):
    """Another process removes what is abandoned, at the two moments that are worst."""
    removed = []

    def removing(function):
        def run(*args, **options):
            if not removed:
                removed.append(sorted(path.name for path in tmp_path.iterdir()))
                files.remove_stale_files(tmp_path.glob(".*.staging-*"))
            return function(*args, **options)

        return run

    if moment == "before it is locked":
        monkeypatch.setattr(files, "_lock", removing(files._lock))
    for name in ("replace", "rename") if moment == "before it has its name" else ():
        monkeypatch.setattr(Path, name, removing(getattr(Path, name)))
    with make(tmp_path / "made", by="test") as made:
        (made.write if make is files.atomic_write else made.joinpath("file").write_bytes)(b"whole")
    assert len(removed[0]) == 1
    (found,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert found.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    """The null device, by another name: a rename over it would succeed as root."""
    (tmp_path / "null").symlink_to("/dev/null")
    with (
        pytest.raises(DiskError, match=r"test: .*null is a device, .*: write to another path"),
        files.atomic_write(tmp_path / "null", by="test"),
    ):
        pytest.fail("the work is done before it is refused")
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


def on_ranks(folder):
    """Return, by the name of a case, what this rank saw."""
    axis = axis_from_group(dist.group.WORLD)
    messages, calls, rank = [], [], axis.index
    cached = functools.partial(kept_bins, axis=axis, log=messages.append)
    bins = cached(folder / "one", fit=own_fit(calls))
    assert_same(bins, pack_bins(LENGTHS, CAPACITY, fit=own_fit()))
    seen = {"calls": len(calls), "inode": maps_of(plan_in(folder / "one"))}
    seen["inode on disk"] = plan_in(folder / "one").stat().st_ino
    seen["messages"] = messages.copy()
    messages.clear()
    bins = cached(folder / f"of {rank}")
    assert_same(bins)
    seen["elsewhere"] = is_mapped(bins), messages.copy()
    messages.clear()
    (folder / "file").touch()
    bins = cached(folder / "file")
    assert_same(bins)
    seen["nowhere"] = is_mapped(bins), messages.copy()
    assert_same(cached(None))
    lengths = LENGTHS if rank == 0 else HELD_OUT
    seen["lengths"] = error_of(lambda: cached(folder / "two", lengths=lengths))
    moody = own_fit(step=1 if rank == 0 else -1)
    seen["moody"] = error_of(lambda: cached(None, fit=moody))
    seen["bad"] = error_of(lambda: cached(folder / "two", lengths=[-1]))
    seen["left"] = (folder / "two").exists()
    seen["at once"] = build_at_once(folder / "at once", 6)
    return seen


def build_at_once(folder, times):
    for number in range(times):
        if number % 2 and dist.get_rank() == 0:
            kept_bins(folder / f"{number}")
            plan_in(folder / f"{number}").write_bytes(b"")
        dist.barrier()
        bins = kept_bins(folder / f"{number}")
        assert_same(bins)
        assert is_mapped(bins)
    dist.barrier()
    return [names(folder / f"{number}") for number in range(times)]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return run_ranks(on_ranks, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.case("P1")
def test_processes_that_build_at_once_leave_one_plan_and_all_use_it(of_ranks):
    first, second = (seen["at once"] for seen in of_ranks)
    assert first == second == [first[0]] * 6
    assert len(first[0]) == 1


def test_ranks_map_one_file_that_rank_0_keeps_and_fail_together(of_ranks):
    first, second = of_ranks
    assert (first["calls"], second["calls"]) == (1, 0)
    assert first["inode"] == second["inode"] == first["inode on disk"]
    assert (len(first["messages"]), second["messages"]) == (1, [])
    assert first["elsewhere"][0] is True
    assert second["elsewhere"][0] is False
    assert "does not see rank 0's packing" in second["elsewhere"][1][0]
    assert first["nowhere"][0] is second["nowhere"][0] is False
    assert (len(first["nowhere"][1]), second["nowhere"][1]) == (1, [])
    for seen in (first, second):
        kind, message = seen["lengths"]
        assert (kind, "rank 1 asks for another packing" in message) == ("DataError", True)
        assert "lengths_sha256" in message
        kind, message = seen["moody"]
        assert (kind, "rank 1 has other bins than rank 0" in message) == ("DataError", True)
        assert "length -1" in seen["bad"][1]
        assert not seen["left"]
