"""Foreign checkpoints are converted: equal bits, no code executed, nothing read outside."""

import contextlib
import functools
import io
import os
import pickle
import random
import resource
import runpy
import shutil
import struct
import subprocess
import time
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import TensorProperties

from trainkit.tools.testing import run_ranks
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.checkpoint.sources import open_weights
from trainkit.weights.checkpoint.tensor_files import check_crc
from trainkit.weights.convert import foreign, pickled
from trainkit.weights.convert.foreign import read_foreign_tensors
from trainkit.weights.convert.weights import convert_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def apart():
    """Let a test read pickles as a user does, in a separate process."""


@pytest.fixture(autouse=True)
def here(request, monkeypatch):
    """Read pickles in this process: starting another takes seconds, and there are hundreds."""
    if "apart" not in request.fixturenames:
        monkeypatch.setattr(foreign, "_read_pickles", pickled.describe)


def save_sharded(folder):
    """Write a checkpoint as a user of FSDP2 does: model, optimizer and objects, from two ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, dtype=torch.float64))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    parts = get_state_dict(model, optimizer)
    extra = {"step": 3, "note": {"who": ["me"], "ids": torch.arange(4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": parts[0], "optim": parts[1], **extra}, checkpoint_id=folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(functools.partial(save_sharded, folder), 2)
    return folder


@pytest.fixture
def sharded(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "dcp"))


def torchs(folder):
    """Return the tensors that torch reads from a directory, by name."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def whole(weights, name, x):
    return weights(name, tuple(x.shape), (0,) * x.dim())


def assert_same(folder, wanted):
    weights = open_weights(folder)
    for name, x in wanted.items():
        found = whole(weights, name, x)
        assert found.dtype == x.dtype, name
        bits = [v.contiguous().reshape(-1).view(torch.uint8) for v in (found, x)]
        assert torch.equal(*bits), name


# ------------------------------------------------------------------------------------------- good


@pytest.mark.case("M10")
def test_a_key_that_stands_twice_in_a_header_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    for twice in ('"dtype":"F32","dtype":"I32"', '"dtype" : "F32", "dtype" : "I32"'):
        text = f'{{"a:b":{{{twice},"shape":[1],"data_offsets":[0,4]}}}}'.encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        with pytest.raises(CheckpointError, match="'dtype' stands there twice"):
            convert_weights(file, tmp_path / "out")
    safetensors.torch.save_file({"a:b": torch.ones(1)}, file, metadata={"x:y": "z::"})
    convert_weights(file, tmp_path / "out")


def test_a_sharded_directory_of_torch_is_converted_bit_for_bit(sharded, tmp_path):
    wanted = torchs(sharded)
    report = convert_weights(sharded, tmp_path / "all", shard_bytes=200)
    assert_same(tmp_path / "all", wanted)
    assert report["kind"] == "torch.distributed.checkpoint"
    assert {"step", "note.who"} <= set(report["skipped"])
    convert_weights(sharded, tmp_path / "model", prefix="model.", dtype="bfloat16")
    model = {n.removeprefix("model."): x for n, x in wanted.items() if n.startswith("model.")}
    assert len(model) == 4
    assert_same(tmp_path / "model", {name: x.bfloat16() for name, x in model.items()})
    with pytest.raises(CheckpointError, match=r"no tensor whose name begins with 'modle.'; some"):
        convert_weights(sharded, tmp_path / "none", prefix="modle.")
    with pytest.raises(ConfigError, match="exists already"):
        convert_weights(sharded, tmp_path / "model")


def odd_tensors():
    """Return tensors of every kind that torch.save does not change."""
    x = torch.arange(24.0).view(4, 6)
    return {
        "plain": x,
        "transposed": x.t(),
        "view": x[1:3, 2:],
        "steps": x[::2, ::3],
        "parameter": nn.Parameter(x * 2),
        "half": x.bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "float8": x.to(torch.float8_e4m3fn),
        "words": torch.ones(3, dtype=torch.uint16),
        "mask": x > 3,
        "shared": x,
    }


@pytest.mark.case("M10")
def test_a_file_of_torch_is_converted_bit_for_bit(tmp_path):
    tensors = odd_tensors()
    held = {"model": tensors, "epoch": 3, "list": [torch.ones(2), None], "name": "me"}
    torch.save(held, tmp_path / "a.pt")
    report = convert_weights(tmp_path / "a.pt", tmp_path / "all")
    assert report["skipped"] == ["epoch", "list.1", "name"]
    wanted = {f"model.{name}": x.detach() for name, x in tensors.items()}
    assert_same(tmp_path / "all", wanted | {"list.0": torch.ones(2)})
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "b.pth")
    assert convert_weights(tmp_path / "b.pth", tmp_path / "b")["tensors"] == 2


def test_folders_as_the_hub_has_them_are_converted(tmp_path):
    tensors = {"a": torch.rand(3), "b": torch.rand(2)}
    for kind in ("bin", "plain", "index"):
        folder = tmp_path / kind
        folder.mkdir()
        for number, (name, x) in enumerate(tensors.items()):
            if kind == "bin":
                torch.save({name: x}, folder / f"pytorch_model-{number}.bin")
            else:
                safetensors.torch.save_file({name: x}, folder / f"{number}.safetensors")
        if kind == "index":
            places = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
            text = str({"weight_map": places}).replace("'", '"')
            (folder / "model.safetensors.index.json").write_text(text)
            torch.save({"c": tensors["a"]}, folder / "optimizer.bin")
        convert_weights(folder, tmp_path / f"{kind}-out")
        assert_same(tmp_path / f"{kind}-out", tensors)
    convert_weights(tmp_path / "plain/0.safetensors", tmp_path / "one")
    assert_same(tmp_path / "one", {"a": tensors["a"]})
    for name in ("../plain/0.safetensors", "a/b.safetensors", "gone.safetensors", "1.safetensors"):
        (tmp_path / "index/model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "%s"}}' % name  # noqa: UP031 - braces are JSON's
        )
        with pytest.raises(CheckpointError, match=r"plain file name|cannot be read|it is not"):
            convert_weights(tmp_path / "index", tmp_path / "bad")


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no .metadata, .safetensors or .bin in it"):
        convert_weights(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not there"):
        convert_weights(tmp_path / "nowhere", tmp_path / "out")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="older ones are not read"):
        convert_weights(tmp_path / "old.pt", tmp_path / "out")
    torch.save({"a": 1}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="holds no tensor by a name"):
        convert_weights(tmp_path / "none.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- K16


class Evil:
    """Attacks that a pickle can try when it is loaded."""

    def __init__(self, what, marker):
        self.what, self.marker = what, str(marker)

    def __reduce__(self):
        write = f"open({self.marker!r}, 'w').close()"
        return {
            "system": (os.system, (f"touch '{self.marker}'",)),
            "eval": (eval, (write,)),
            "exec": (exec, (write,)),
            "popen": (subprocess.getoutput, (f"touch '{self.marker}'",)),
            "runpy": (runpy.run_path, (self.marker + ".py",)),
            "open": (open, (self.marker, "w")),
        }[self.what]


def opcodes(marker, kind):
    """Return a pickle that runs code by other opcodes than REDUCE of a known name."""
    touch = b"touch '" + str(marker).encode() + b"'"
    word = b"\x8c" + bytes([len(touch)]) + touch
    return {
        "inst": b"(" + word + b"ios\nsystem\n.",
        "obj": b"(cos\nsystem\n" + word + b"o.",
        "dotted": b"\x80\x04\x8c\x08builtins\x8c\x0a__import__\x93\x8c\x02os\x85R0"
        b"\x8c\x02os\x8c\x06system\x93" + word + b"\x85R.",
        "build": b"cos\nsystem\n" + word + b"\x85R}b.",
    }[kind]


PAYLOADS = ["system", "eval", "exec", "popen", "runpy", "open"]
PAYLOADS += ["inst", "obj", "dotted", "build"]


def payload(kind, marker):
    Path(f"{marker}.py").write_text(f"open({str(marker)!r}, 'w').close()")
    if kind in ("inst", "obj", "dotted", "build"):
        return opcodes(marker, kind)
    return pickle.dumps(Evil(kind, marker), protocol=2)  # torch.save's


def with_pickle(path, data):
    """Put a pickle into a file of torch.save, with the CRC it needs."""
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, held in members.items():
            archive.writestr(name, data if name.endswith("data.pkl") else held)


@pytest.mark.case("K16")
@pytest.mark.parametrize("kind", PAYLOADS)
def test_no_payload_runs_and_torch_would_have_run_it(kind, sharded, tmp_path):
    marker = tmp_path / "executed"
    evil = payload(kind, marker)
    with_pickle(tmp_path / "evil.pt", evil)
    (sharded / ".metadata").write_bytes(evil)
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(evil)
    (folder / "model.safetensors.index.json").write_bytes(evil)
    for source in (tmp_path / "evil.pt", sharded, folder):
        with pytest.raises(CheckpointError, match=str(source)):
            convert_weights(source, tmp_path / "out")
        assert not marker.exists()
    # Without our reader: torch itself executes both, the second when weights_only is off.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in (
            lambda: FileSystemReader(sharded).read_metadata(),
            lambda: torch.load(tmp_path / "evil.pt", weights_only=False),
        ):
            marker.unlink(missing_ok=True)
            try:
                held = load()
            except Exception:  # noqa: BLE001 - what it is after it has run is no matter
                held = None
            if isinstance(held, io.IOBase):
                held.close()
            assert marker.exists()


@pytest.mark.case("K16")
def test_an_object_beside_the_tensors_is_skipped_and_never_opened(tmp_path):
    marker = tmp_path / "executed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.ones(3), "evil": Evil("eval", marker)}
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        marker.unlink(missing_ok=True)
        report = convert_weights(tmp_path / "dcp", tmp_path / "out")
        assert report["skipped"] == ["evil"]
        assert_same(tmp_path / "out", {"w": torch.ones(3)})
        assert not marker.exists()
        dcp.load({"w": torch.ones(3), "evil": 0}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert marker.exists()  # torch has run it


@pytest.mark.case("K16")
def test_an_evil_pickle_in_the_place_of_a_tensor_is_refused(sharded, tmp_path):
    marker = tmp_path / "executed"
    with_pickle(tmp_path / "evil.pt", payload("eval", marker))
    evil = (tmp_path / "evil.pt").read_bytes()
    edit_metadata(sharded, lambda _, place: place_at(place, 0, len(evil)))
    for file in sharded.glob("*.distcp"):
        file.write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"mentions '(builtins.)?eval'"):
        convert_weights(sharded, tmp_path / "out")
    assert not marker.exists()


def member_of(path):
    """Return the pickle of an enum's member by Python 3.11.2: getattr(module.kind, member)."""
    words = ["builtins", "getattr", *path]
    one, get, module, kind, name = (b"\x8c" + bytes([len(x)]) + x.encode() for x in words)
    return one + get + b"\x93" + module + kind + b"\x93" + name + b"\x86R"


MEMORY_FORMAT = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")


@pytest.mark.case("K16")
def test_a_member_of_an_enum_is_read_as_python_3_11_2_writes_it(sharded, tmp_path, monkeypatch):
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    member = pickle.loads(b"\x80\x04" + member_of([*MEMORY_FORMAT, "TORCH_CHANNELS_LAST"]) + b".")
    assert member is encoding.TORCH_CHANNELS_LAST
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda x, _: (getattr, (encoding, x.name)))
    edit_metadata(sharded)
    written = (sharded / ".metadata").read_bytes()
    assert b"getattr" in written
    assert pickle.dumps(encoding.TORCH_CONTIGUOUS_FORMAT)[:2] == b"\x80\x04"
    convert_weights(sharded, tmp_path / "out")
    assert_same(tmp_path / "out", torchs(sharded))


@pytest.mark.case("K16")
@pytest.mark.parametrize(
    "path",
    [
        *((*MEMORY_FORMAT, name) for name in ("__reduce__", "mro", "_member_map_", "NO")),
        ("torch", "float32", "to_complex"),
        ("torch", "Size", "__subclasses__"),
        ("torch.distributed.checkpoint.metadata", "Metadata", "__init__"),
        ("torch.serialization", "_get_layout", "__globals__"),
    ],
)
def test_getattr_of_anything_but_a_member_of_an_enum_is_refused(path, sharded, tmp_path):
    data = b"\x80\x04" + member_of(path) + b"."
    if path[2] != "NO":
        pickle.loads(data)  # pickle itself would go along
    (sharded / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"mentions 'builtins.getattr'"):
        convert_weights(sharded, tmp_path / "out")


@pytest.mark.case("K16")
@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x80\x02", b".", b"a.", b"]q\x00h\x01.", b"K\x01K\x02R.", b"}K\x01a."),
        *(b"Ncos\nsystem\nb.", b"]}b.", b"K\x01(K\x02u.", b"(K\x01K\x02K\x03d."),
    ],
)
def test_a_broken_pickle_is_refused_in_words(data, sharded, tmp_path):
    with_pickle(tmp_path / "broken.pt", data)
    (sharded / ".metadata").write_bytes(data)
    for source in (tmp_path / "broken.pt", sharded):
        with pytest.raises(CheckpointError, match=r"is refused: .*; nothing of it was executed"):
            convert_weights(source, tmp_path / "out")


@pytest.mark.usefixtures("apart")
@pytest.mark.case("K16")
def test_pickles_are_read_in_a_process_of_their_own(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(pickled, "describe", None)
    convert_weights(sharded, tmp_path / "out")
    assert_same(tmp_path / "out", torchs(sharded))


def told_by(source):
    """Return the output of the process that reads pickles, and the bytes by which it has grown."""
    pickled._allowed_names()  # what torch takes by itself is no matter
    before, output = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, io.BytesIO()
    with contextlib.redirect_stdout(SimpleNamespace(buffer=output)):
        pickled.main(source)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return orjson.loads(output.getvalue()), grown * 1024


@pytest.mark.usefixtures("apart")
@pytest.mark.case("K18")
def test_that_process_has_a_bounded_memory(sharded, tmp_path, monkeypatch):
    with (sharded / "sparse.distcp").open("wb") as file:
        file.truncate(2**30)
    (sharded / ".metadata").write_bytes(b"\x80\x04" + b"\x8f" * 4_000_000 + b".")  # 860 MB of sets
    ((report, grown),) = run_ranks(told_by, 1, sharded)
    assert grown < 500_000_000
    answer = SimpleNamespace(returncode=0, stdout=orjson.dumps(report))
    monkeypatch.setattr(foreign.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(CheckpointError, match=r"takes over \d+ bytes to describe"):
        convert_weights(sharded, tmp_path / "out")


@pytest.mark.usefixtures("apart")
def test_a_process_that_ends_says_of_which_file(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    monkeypatch.setattr(foreign.sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match=r"a.pt ended the process that read it \(1\)"):
        convert_weights(tmp_path / "a.pt", tmp_path / "out")


# ------------------------------------------------------------------------------------------- K17


def edit_metadata(folder, change=None, edit=None):
    """Rewrite `.metadata` with torch's own classes: the places of items, or all of it."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if change is not None:
        metadata.storage_data = {k: change(k, v) for k, v in metadata.storage_data.items()}
    if edit is not None:
        edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def place_at(place, start, length):
    return _StorageInfo(place.relative_path, start, length)


@pytest.mark.case("K17")
@pytest.mark.parametrize(
    "name",
    ["../outside.distcp", "/etc/passwd", "a/../../x", "a\0b", "", "..", "C:\\x", "sub/x.distcp"],
)
def test_a_metadata_that_leads_outside_is_refused(name, sharded, tmp_path, monkeypatch):
    shutil.copy(sharded / "__0_0.distcp", tmp_path / "outside.distcp")
    moved = functools.partial(_moved, name)
    edit_metadata(sharded, moved)
    opened = []
    open_os = os.open
    monkeypatch.setattr(os, "open", lambda p, *rest: opened.append(str(p)) or open_os(p, *rest))
    with pytest.raises(CheckpointError, match="no plain file name"):
        convert_weights(sharded, tmp_path / "out")
    assert opened == [str(sharded / ".metadata")]


def _moved(name, _, place):
    return _StorageInfo(name, place.offset, place.length)


@pytest.mark.case("K17")
def test_torch_itself_reads_outside(written, sharded, tmp_path):
    (tmp_path / "secret").mkdir()
    shutil.move(sharded / "__0_0.distcp", tmp_path / "secret/__0_0.distcp")
    clean = torchs(written)
    edit_metadata(
        sharded,
        lambda _, place: (
            _StorageInfo("../secret/__0_0.distcp", place.offset, place.length)
            if place.relative_path == "__0_0.distcp"
            else place
        ),
    )
    found = torchs(sharded)  # no error: it has read a file outside
    assert all(torch.equal(found[name], x) for name, x in clean.items())
    with pytest.raises(CheckpointError, match="no plain file name"):
        convert_weights(sharded, tmp_path / "out")


@pytest.mark.case("K17")
def test_links_pipes_and_missing_files_are_refused(sharded, tmp_path):
    shard = sharded / "__0_0.distcp"
    outside = tmp_path / "outside.distcp"
    shard.rename(outside)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read"):
        convert_weights(sharded, tmp_path / "out")
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is no regular file"):
        convert_weights(sharded, tmp_path / "out")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is no regular file"):
        convert_weights(sharded, tmp_path / "out")
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is no regular file"):
        convert_weights(sharded, tmp_path / "out")
    shard.unlink()
    shutil.copy(outside, shard)
    convert_weights(sharded, tmp_path / "out")


# ------------------------------------------------------------------------------------------- K18


def bomb_claims(folder):
    """A tensor of 2^50 elements by a stride of zero, of overlapping strides, of a large shape."""
    x = torch.ones(2)
    for number, (shape, stride) in enumerate(
        [((2**25, 2**25), (0, 0)), ((2**20, 2**20), (1, 1)), ((2**50,), (1,)), ((2**61,), (1,))]
    ):
        path = folder / f"claims{number}.pt"
        torch.save({"a": x}, path)
        with zipfile.ZipFile(path) as archive:
            program = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
        at = program.index(b"K\x02\x85")
        sizes, steps = (pickle.dumps(v, protocol=2)[2:-1] for v in (shape, stride))
        # shape, then stride, stand as one tuple each where the short ones were
        end = program.index(b"K\x01\x85", at)
        tail = program[end + 3 :]
        tail = tail[2:] if tail[:1] == b"q" else tail
        middle = program[at + 3 : end]
        middle = middle[2:] if middle[:1] == b"q" else middle
        with_pickle(path, program[:at] + sizes + middle + steps + tail)


def bomb_pickles(folder):
    """Nests, loops and a table that grows twofold with every line."""
    nested = b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."
    loop = b"\x80\x02]q\x00h\x00a."
    doubling = b"\x80\x02]q\x00" + b"".join(
        b"]q" + bytes([n + 1]) + b"(" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"e"
        for n in range(100)
    )
    deep = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    for name, data in {
        "nest": nested,
        "loop": loop,
        "double": doubling + b".",
        "deep": deep,
    }.items():
        with_pickle(folder / f"{name}.pt", data)


def bomb_zips(folder):
    """A compressed member, a zip in a zip, overlapping members, a directory of any size."""
    torch.save({"a": torch.ones(2)}, folder / "plain.pt")
    data = (folder / "plain.pt").read_bytes()
    with zipfile.ZipFile(folder / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(300_000_000))
    with zipfile.ZipFile(folder / "nested.pt", "w") as archive:
        archive.writestr("x/data.pkl", (folder / "packed.pt").read_bytes())
    end = data.rindex(b"PK\5\6")
    begin = struct.unpack("<I", data[end + 16 : end + 20])[0]
    size = struct.unpack("<I", data[end + 12 : end + 16])[0]
    directory = data[begin : begin + size]
    for name, length in (("huge.pt", 2**31), ("past.pt", size + 4096)):
        forged = data[:end] + data[end : end + 12] + struct.pack("<I", length) + data[end + 16 :]
        (folder / name).write_bytes(forged.replace(b"PK\6\7", b"PK\0\0"))
    twice = data[:begin] + directory * 2 + data[begin + size :]
    end = twice.rindex(b"PK\5\6")
    twice = twice[: end + 12] + struct.pack("<I", 2 * size) + twice[end + 16 :]
    (folder / "twice.pt").write_bytes(twice.replace(b"PK\6\7", b"PK\0\0"))


def refuse_bombs(folder):
    """Return {file: (seconds, message)} of every bomb, and the growth of this process in bytes."""
    foreign._read_pickles = pickled.describe
    torch.save({"a": torch.ones(2)}, folder.with_name("good.pt"))
    convert_weights(folder.with_name("good.pt"), folder.with_name("good"))
    pickled._allowed_names()  # what torch takes by itself is no matter
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pickled._limit_process()
    found = {}
    for path in sorted(folder.iterdir()):
        begin = time.process_time()
        try:
            convert_weights(path, folder.with_name("out"))
            message = "no error"
        except CheckpointError as error:
            message = error.what
        except MemoryError:
            message = f"no memory for {path.name}"
        found[path.name] = (time.process_time() - begin, message)
    return found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.case("K18")
def test_bombs_are_refused_in_no_time_and_little_memory(sharded, tmp_path):
    folder = tmp_path / "bombs"
    folder.mkdir()
    bomb_claims(folder)
    bomb_pickles(folder)
    bomb_zips(folder)
    (folder / "plain.pt").unlink()
    for name in ("sparse", "many", "name"):
        (folder / name).mkdir()
    with (folder / "sparse/.metadata").open("wb") as file:
        file.truncate(2**30)
    (folder / "many/.metadata").write_bytes(b"\x80\x04" + b"N" * 60_000_000 + b".")
    twofold = b"]" + b"".join(b"\x94](h%ch%ce" % (n, n) for n in range(60))
    (folder / "name/.metadata").write_bytes(b"\x80\x04" + twofold + b"\x8c\x01x\x93.")
    claims = Path(shutil.copytree(sharded, folder / "claims"))
    edit_metadata(claims, edit=_claim)
    deep = folder / "json"
    deep.mkdir()
    (deep / "a.safetensors").write_bytes(b"")
    (deep / "model.safetensors.index.json").write_bytes(b'{"weight_map":' + b"[" * 100_000)
    found, grown = run_ranks(functools.partial(refuse_bombs, folder), 1)[0]
    assert len(found) == 18
    print({name: f"{seconds:.2f} s" for name, (seconds, _) in found.items()}, grown)
    for name, (seconds, message) in found.items():
        assert name in message, (name, message)
        assert seconds < 2, name
    assert grown < 500_000_000


def _claim(metadata):
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([2**30, 2**29])


# ----------------------------------------------------------------------------------- damaged bytes


@pytest.mark.case("K3", "K4")
def test_a_damaged_item_is_refused_where_torch_says_nothing(sharded, tmp_path):
    clean = torchs(sharded)
    found = read_foreign_tensors(sharded)
    chance = random.Random(0)
    silent = 0
    for name in sorted(found.tensors):
        for extent in found.tensors[name].extents:
            good = extent.path.read_bytes()
            bad = bytearray(good)
            place = chance.randrange(extent.start * 8, (extent.start + extent.size) * 8)
            bad[place // 8] ^= 1 << place % 8
            extent.path.write_bytes(bad)
            with pytest.raises(CheckpointError, match=r"damaged bytes at \d+"):
                convert_weights(sharded, tmp_path / "out")
            loaded = torchs(sharded)
            silent += not all(torch.equal(loaded[n], x) for n, x in clean.items())
            extent.path.write_bytes(good)
    assert silent > 10  # torch loads other numbers, and says nothing


@pytest.mark.case("K3", "K4")
def test_any_other_damage_is_refused_or_harmless(sharded, tmp_path, monkeypatch):
    wanted = torchs(sharded)
    chance = random.Random(1)
    shard = sharded / "__0_0.distcp"
    good = shard.read_bytes()
    for number in range(24):
        bad = bytearray(good)
        if number % 3 == 0:
            bad = bad[: chance.randrange(len(bad))]
        elif number % 3 == 1:
            place = chance.randrange(len(bad))
            bad[place : place + 64] = bytes(len(bad[place : place + 64]))
        else:
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        shard.write_bytes(bad)
        out = tmp_path / f"out{number}"
        try:
            convert_weights(sharded, out)
        except CheckpointError:
            assert not out.exists()
        else:
            assert_same(out, wanted)  # a byte between two tensors
    shard.write_bytes(good)
    # The control: without the CRCs a flipped bit goes through.
    extent = read_foreign_tensors(sharded).tensors["model.0.weight"].extents[0]
    bad = bytearray(extent.path.read_bytes())
    bad[extent.start] ^= 1
    extent.path.write_bytes(bad)
    with pytest.raises(CheckpointError, match="CRC-32"):
        check_crc(extent)
    monkeypatch.setattr("trainkit.weights.convert.weights.check_crc", lambda _: None)
    convert_weights(sharded, tmp_path / "control")
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "control", wanted)


@pytest.mark.case("K4", "K17", "K18")
@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda m: m.state_dict_metadata["model.0.weight"].chunks.pop(), "hold 20 of its 35"),
        (lambda m: m.storage_data.pop(next(iter(m.storage_data))), "says not where"),
        (
            lambda m: m.state_dict_metadata["model.0.weight"].chunks.append(
                m.state_dict_metadata["model.0.weight"].chunks[0]
            ),
            "overlap",
        ),
        (
            lambda m: setattr(
                m.state_dict_metadata["model.0.weight"],
                "properties",
                TensorProperties(dtype=torch.int32),
            ),
            r"holds float32\[4, 5\] where model.0.weight should be int32",
        ),
        (lambda m: setattr(m, "storage_data", None), "is refused: AttributeError"),
        (lambda m: setattr(m, "state_dict_metadata", {"../x": 1}), "odd name"),
        (lambda m: setattr(m, "state_dict_metadata", {"x": 1}), "is refused: AttributeError"),
    ],
)
def test_a_metadata_that_lies_about_its_tensors_is_refused(edit, match, sharded, tmp_path):
    edit_metadata(sharded, edit=edit)
    with pytest.raises(CheckpointError, match=match):
        convert_weights(sharded, tmp_path / "out")
    assert not (tmp_path / "out").exists()
