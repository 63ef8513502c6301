"""Import into layouts and export: every rank has its shards, and the bits are equal."""

import ctypes
import json
import os
import re
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from weights.hub import tiny

from trainkit import hub
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import Decoder
from trainkit.parallel import (
    build_stages,
    expert_parallel,
    fsdp,
    get_local_box,
    get_named_parameters,
    tensor_parallel,
)
from trainkit.parallel.parameters import get_named_buffers
from trainkit.tools.testing import run_ranks
from trainkit.types import DiskError, Layout, TrainState
from trainkit.weights.checkpoint import list_checkpoints, save_checkpoint
from trainkit.weights.checkpoint.sources import verify_weights
from trainkit.weights.hub.folder import get_decoder_shapes


def tensors_of(folder):
    """Return the tensors of a folder by name, whatever its files are."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype, name
        assert torch.equal(got[name], x), name


def in_and_out(home, rows):
    """Import a folder into each layout and export it with all ranks; return each one's findings."""
    seen = {}
    for name, (layout, _) in rows.items():
        with parallel_session(layout) as ps:
            seen[name] = _in_and_out(Path(home) / name, ps, layout)
    return seen


def _in_and_out(home, ps, layout):
    """Read a folder in a layout, compare this rank's boxes, and write it with all ranks."""
    folder = hub.open_folder(home / "a")
    config, whole = folder.config, hub.open_folder_weights(folder)
    plan = [tensor_parallel(), *([expert_parallel()] if config.experts else []), fsdp(layout)]
    weights = hub.open_folder_weights(folder, axis=ps.world)
    stages = build_stages(lambda: Decoder(config), ps, plan, weights=weights)
    named = {**get_named_parameters(stages), **get_named_buffers(stages)}
    seen = 0
    for name in get_decoder_shapes(config).keys() & named.keys():
        box = get_local_box(named[name])
        seen += box.local.numel()
        if box.local.numel():
            values = whole(name, tuple(box.local.shape), box.offset)
            assert torch.equal(box.local, values.to(box.local.dtype)), name
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()])
    facts = {"model": attrs.asdict(config)}
    path = save_checkpoint(home / "run", TrainState(), stages, optimizer, ps, facts=facts)
    family = folder.family.model_type
    report = hub.export_folder(
        path, home / "b", context=128, family=family, shard_bytes=9_000, axis=ps.world
    )
    same(dict(hub.stream_weights(stages, family=family, axis=ps.pp)), tensors_of(home / "a"))
    return seen, len(report["files"])


LAYOUTS = {
    "solo": (Layout(), "llama tied, scaled"),
    "fsdp, an uneven rest": (Layout(dp_shard=3), "qwen3"),
    "tp": (Layout(tp=2), "phi3"),
    "tp of transposed matrices and positions": (Layout(tp=2), "gpt2"),
    "pp, norms around": (Layout(pp=2), "gemma2"),
    "pp, tied": (Layout(pp=2), "llama tied, scaled"),
    "tp of latents": (Layout(tp=2), "deepseek_v3"),
    "tp of delta layers": (Layout(tp=2), "qwen3_next"),
    "fsdp of delta layers": (Layout(dp_shard=3), "qwen3_5"),
    "ep": (Layout(dp_shard=2, ep=2), "mixtral"),
    "ep, experts in one tensor": (Layout(dp_shard=2, ep=2), "granitemoe"),
    "ep of latents": (Layout(dp_shard=2, ep=2), "deepseek_v3"),
    "ep of experts in one tensor, in turns": (Layout(dp_shard=2, ep=2), "gpt_oss"),
    "tp of sinks": (Layout(tp=2), "gpt_oss"),
    "pp of experts": (Layout(pp=2), "qwen3_moe some layers"),
}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_folder_goes_into_a_layout_and_out_of_it_bit_for_bit(world, tmp_path):
    rows = {name: row for name, row in LAYOUTS.items() if row[0].world == world}
    theirs = {name: tiny.make_theirs(row) for name, (_, row) in rows.items()}
    for name, model in theirs.items():
        model.save_pretrained(tmp_path / name / "a", max_shard_size="20KB")
    ranks = run_ranks(in_and_out, world, str(tmp_path), rows)
    for name, model in theirs.items():
        assert all(seen[name][0] > 0 for seen in ranks), name
        assert ranks[0][name][1] > 3, name
        same(tensors_of(tmp_path / name / "b"), tensors_of(tmp_path / name / "a"))
        assert verify_weights(tmp_path / name / "b") == [], name
        again = type(model).from_pretrained(tmp_path / name / "b")
        same(again.state_dict(), model.state_dict())


def written(tmp_path, row, dtype=None):
    """Return a model after import and export, and the original."""
    theirs = tiny.make_theirs(row)
    theirs.save_pretrained(tmp_path / "a")
    _in_and_out(tmp_path, solo_parallel(), Layout())
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    family = hub.open_folder(tmp_path / "a").family.model_type
    hub.export_folder(checkpoint, tmp_path / "c", context=128, family=family, dtype=dtype)
    auto = tiny.load_transformers().AutoModelForCausalLM
    return auto.from_pretrained(tmp_path / "c"), theirs


@pytest.mark.parametrize("row", [x for x in tiny.FEW if x.values[0] in tiny.ROWS])
def test_transformers_loads_what_is_written_as_the_same_model(row, tmp_path):
    again, theirs = written(tmp_path, row)
    assert type(again) is type(theirs)
    same(again.state_dict(), theirs.state_dict())
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        got, want = (model(ids).logits for model in (again.eval(), theirs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_written_where_it_is_asked_for_and_read_into_fp32(tmp_path):
    again, theirs = written(tmp_path, "deepseek_v3", dtype="bfloat16")
    assert again.dtype == torch.bfloat16
    files = tensors_of(tmp_path / "c")
    biases = [name for name in files if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for name, x in files.items():
        assert x.dtype == (torch.float32 if name in biases else torch.bfloat16)
    folder = hub.open_folder(tmp_path / "c")
    (model,) = build_stages(
        lambda: Decoder(folder.config), solo_parallel(), [], weights=hub.open_folder_weights(folder)
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    want = theirs.model.norm.weight.bfloat16().float()
    assert torch.equal(model.norm.weight, want)


# ------------------------------------------------------------------------------------------ memory


def status(field):
    status_file = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status_file)[1]) * 1024


def peaks_of_reading(folders, share, ranks):
    """Read one rank's part of each folder; return the bytes at the peak, and those of the result.

    It is a rank of its own, whose peak nothing else has raised. What is freed goes back at once
    (else the heap that it was forked with decides), and code has run once before it is measured:
    the kernel counts the pages of libraries as it maps them.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    tensors, found = [], []
    for folder in folders:
        weights = hub.open_folder_weights(hub.open_folder(folder))
        for name, shape in weights.shapes.items():
            torch.empty(1, *shape[1:]).copy_(weights(name, (1, *shape[1:]), (0,) * len(shape)))
        Path("/proc/self/clear_refs").write_text("5")
        before, first_new = status("VmHWM"), len(tensors)
        for name, shape in weights.shapes.items():
            rows = -(-shape[0] // ranks)
            first = min(share * rows, shape[0])
            part = (min(rows, shape[0] - first), *shape[1:])
            tensors.append(torch.empty(part))
            tensors[-1].copy_(weights(name, part, (first, *(0 for _ in shape[1:]))))
        found.append((status("VmHWM") - before, sum(x.nbytes for x in tensors[first_new:])))
    return found


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs VmHWM reset")
def test_reading_takes_the_memory_of_one_file_beside_the_local_parameters(tmp_path):
    transformers = tiny.load_transformers()
    homes, wide = {"mixtral": 2, "qwen3": 4}, {}  # fp32 takes so many times as much as the files
    for row in homes:
        kind, changes = tiny.ROWS[row]
        sizes = {"hidden_size": 512, "intermediate_size": 1024}
        sizes |= {"vocab_size": 16_384} if row == "mixtral" else {"num_hidden_layers": 10}
        make_config = getattr(transformers, f"{kind}Config").from_dict
        made = make_config(tiny.SIZES | changes | sizes)
        theirs = getattr(transformers, f"{kind}ForCausalLM")(made).to(torch.bfloat16)
        theirs.save_pretrained(tmp_path / row, max_shard_size="20MB")
        wide[row] = theirs.num_parameters() * 4
    in_blocks_of_fp8(tmp_path / "qwen3")
    (found,) = run_ranks(peaks_of_reading, 1, [str(tmp_path / row) for row in homes], 1, 4)
    for (row, times), (used, local) in zip(homes.items(), found, strict=True):
        files = [file.stat().st_size for file in (tmp_path / row).glob("*.safetensors")]
        assert len(files) > 1
        assert sum(files) == pytest.approx(wide[row] / times, rel=0.1)
        assert local == pytest.approx(wide[row] / 4, rel=0.3)  # a quarter, in fp32
        assert used < local + max(files), row


def in_blocks_of_fp8(folder):
    """Put the matrices of a folder's files into fp8, with a scale for each block."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        for name in [name for name in held if "_proj" in name]:
            blocks = [-(-size // 128) for size in held[name].shape]
            held[name] = held[name].to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = torch.ones(blocks)
            index["weight_map"][f"{name}_scale_inv"] = file.name
        save_file(held, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


# --------------------------------------------------------------------------- when a rank does not


def exported(home, faults):
    """Write a folder with all ranks for each fault, which the second has; return the outcomes."""
    from trainkit.weights.checkpoint import export

    own, outcomes = export._write_shard, []
    with parallel_session(Layout(dp_shard=2)) as ps:
        for fault in faults:

            def write(path, *rest, fault=fault):
                if ps.world.index != 1 or fault == "none":
                    return own(path, *rest)
                if fault == "skips":
                    return {"bytes": 0, "sha256": ""}
                path.write_bytes(b"half a file")
                raise DiskError("this disk is full", where=str(path))

            export._write_shard = write
            there = f"{home}/{fault}"
            try:
                hub.export_folder(
                    f"{home}/run", there, context=128, shard_bytes=9_000, axis=ps.world
                )
                outcomes.append("written")
            except DiskError as error:
                outcomes.append(str(error))
    return outcomes


def test_where_a_rank_cannot_write_no_folder_appears_and_every_rank_says_so(tmp_path):
    theirs = tiny.make_theirs("llama")
    theirs.save_pretrained(tmp_path / "a")
    _in_and_out(tmp_path, solo_parallel(), Layout())
    before = sorted(path.name for path in tmp_path.iterdir())
    first, second = run_ranks(exported, 2, str(tmp_path), ("fails", "skips", "none"))
    assert "rank 1" in first[0]
    assert "this disk is full" in first[0]
    assert second[0] == "this disk is full"
    assert first[1:] == second[1:] == ["written", "written"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "none", "skips"])
    # A rank whose files are not there is found by what the tests above compare.
    same(tensors_of(tmp_path / "none"), tensors_of(tmp_path / "a"))
    assert verify_weights(tmp_path / "none") == []
    assert tensors_of(tmp_path / "skips").keys() < tensors_of(tmp_path / "a").keys()
    assert verify_weights(tmp_path / "skips")
