"""Every family against `transformers`: import, logits and gradients, and export."""

import functools
import importlib
import re
import shutil
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from torch import nn
from weights.hub import published, tables, tiny

from trainkit import hub
from trainkit.attention.sdpa import sdpa
from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, build_decoder, call_model, call_routed
from trainkit.models.config import Sliding
from trainkit.models.decoder import Block, whole_logits
from trainkit.models.decoder_sizes import config_from_facts, list_decoder_sizes, make_decoder_config
from trainkit.models.rotary import rotary_frequencies, rotary_table
from trainkit.parallel import build_stages, check_layout
from trainkit.parallel.name_patterns import match_any
from trainkit.tools.testing import check_packing
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.types import BatchShape, CheckpointError, ConfigError, Layout, TrainState
from trainkit.weights.checkpoint import save_checkpoint
from trainkit.weights.hub.configs import match_family
from trainkit.weights.hub.folder import get_decoder_shapes, make_family_links
from trainkit.weights.hub.links import check_links, get_foreign_shapes, make_links, map_weights
from trainkit.weights.hub.towers import rename_tower


def read(folder, context=tiny.CONTEXT):
    """Return the decoder in a folder."""
    opened = hub.open_folder(folder, context=context)
    weights = hub.open_folder_weights(opened, dtype=torch.float32)
    (model,) = build_stages(lambda: Decoder(opened.config), solo_parallel(), [], weights=weights)
    return model


def ours_of(model, batch):
    call = call_model if model.config.experts is None else call_routed
    return whole_logits(call(model, batch))


def theirs_of(model, batch, *, packed):
    text = model.config.get_text_config()
    if packed and "linear_attention" in (getattr(text, "layer_types", None) or ()):
        return theirs_by_document(model, batch)
    mask = mask_of(model.config, batch.document_ids) if packed else None
    return model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=mask,
        use_cache=False,
    ).logits


def theirs_by_document(model, batch):
    """Return logits of each document alone: their state would go from one to the next."""
    found = torch.zeros(*batch.input_ids.shape, model.config.get_text_config().vocab_size)
    for row, documents in enumerate(batch.document_ids):
        for document in range(int(documents.max()) + 1):
            inside = documents == document
            ids = batch.input_ids[row, inside].unsqueeze(0)
            found[row, inside] = model(input_ids=ids, use_cache=False).logits[0]
    return found


def mask_of(config, documents):
    """Return the mask of packed documents, or that of each kind of layer."""
    config = config.get_text_config()
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    seen = (same & torch.ones_like(same).tril()).unsqueeze(1)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    masks = {
        kind: torch.zeros(seen.shape).masked_fill(~part, torch.finfo().min)
        for kind, part in {
            "full_attention": seen,
            "sliding_attention": seen & torch.ones_like(same).triu(1 - (window or len(same))),
        }.items()
    }
    if kinds:
        return masks
    return masks["full_attention" if window is None else "sliding_attention"]


def near(got, want, what):
    """Compare by max|a - b| / max|b|."""
    assert got.shape == want.shape, what
    # Without rotary positions the bias of keys has no gradient: 0 up to rounding, on both sides.
    assert (got - want).abs().max() <= tables.TOLERANCE * want.abs().max() + 1e-8, what


@pytest.mark.parametrize("row", [*tiny.ROWS, *tiny.TOWERS])
def test_logits_and_gradients_are_those_of_transformers(row, tmp_path):
    theirs = tiny.make_theirs(row)
    sharded = len(row) % 2 == 0
    theirs.save_pretrained(tmp_path / "a", max_shard_size="20KB" if sharded else "5GB")
    assert (tmp_path / "a" / "model.safetensors").exists() != sharded
    ours = read(tmp_path / "a")
    batch = decoder_batch(0)
    alone = batch_from_rows(batch.input_ids)
    with torch.no_grad():
        near(ours_of(ours, alone), theirs_of(theirs, alone, packed=False), "logits of one document")
    is_token = batch.document_ids >= 0
    logits = ours_of(ours, batch), theirs_of(theirs, batch, packed=True)
    near(logits[0][is_token], logits[1][is_token], "logits")
    for x in logits:
        nn.functional.cross_entropy(x.flatten(0, 1), batch.labels.flatten()).backward()
    there = tiny.make_theirs(row)
    with torch.no_grad():  # their gradients by the names that a folder has
        for p, its in zip(there.parameters(), theirs.parameters(), strict=True):
            if its.grad is not None:  # of a text the vision tower has none
                p.copy_(its.grad)
    there.save_pretrained(tmp_path / "gradients")
    want = dict(read(tmp_path / "gradients").named_parameters())
    for name, p in ours.named_parameters():
        near(p.grad, want[name].detach(), name)


KINDS = {kind: row for row, (kind, _) in reversed(tiny.ROWS.items())}


@pytest.mark.parametrize("row", KINDS.values())
def test_packed_documents_of_every_family_are_computed_as_each_alone(row):
    config = hub.read_decoder_config(tiny.make_config(row).to_dict(), context=tiny.CONTEXT)
    call = call_model if config.experts is None else call_routed
    assert check_packing(build_decoder(config, seed=0), call).documents == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_attention_and_its_norms_are_those_of_qwen3_next_in_any_dtype(dtype):
    """Zero-centred norms bit for bit; gated attention with partial rotary up to rounding."""
    tiny.load_transformers()
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = tiny.make_theirs("qwen3_next")
    config = hub.read_decoder_config(theirs.config.to_dict())
    layer = theirs.model.layers[3].to(dtype)
    ours = Block(config, attend=sdpa, name="layers.3", mlp=nn.Identity()).to(dtype)
    size, width = config.head_size, config.width
    state = dict(layer.self_attn.state_dict())
    heads = state.pop("q_proj.weight").view(config.heads, 2, size, width)
    state |= {f"w{x}.weight": heads[:, i].reshape(-1, width) for i, x in enumerate("qg")}
    names = {name: re.sub("([kvo])_proj", r"w\1", name) for name in state}
    ours.attention.load_state_dict({names[name]: x for name, x in state.items()})
    ours.attention_norm.load_state_dict(layer.input_layernorm.state_dict())
    x = torch.randn(2, 40, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    normal = layer.input_layernorm(x)
    assert torch.equal(ours.attention_norm(x), normal)
    batch = batch_from_rows(torch.zeros(2, 40, dtype=torch.int64))
    frequencies = rotary_frequencies(
        config.rotary_size, theta=config.rope_theta, dtype=torch.float32, device=x.device
    )
    table = rotary_table(batch.position_ids, frequencies)
    rotary = module.Qwen3NextRotaryEmbedding(theirs.config)(x, batch.position_ids)
    mask = torch.zeros(40, 40, dtype=dtype)
    mask = mask.masked_fill(~torch.ones(40, 40).tril().bool(), torch.finfo(dtype).min)
    want, _ = layer.self_attn(normal, rotary, mask[None, None])
    got = ours.attention(normal, rotary=table, spans=batch.spans)
    assert (got - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("row", tiny.ROWS)
def test_a_map_turned_gives_their_tensors_back_bit_for_bit(row, tmp_path):
    from safetensors.torch import load_file

    tiny.make_theirs(row).save_pretrained(tmp_path)
    folder = hub.open_folder(tmp_path)
    links, ours = make_family_links(folder.family, folder.config), get_decoder_shapes(folder.config)
    theirs = get_foreign_shapes(links)
    files = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in files.items()} == theirs
    back = map_weights(
        hub.open_folder_weights(folder), [link.swap_sides() for link in links], theirs
    )
    for name, x in files.items():
        assert torch.equal(back(name, theirs[name], (0,) * x.ndim), x), name
        if x.ndim == 2 and len(x) > 8:  # and any part of one
            assert torch.equal(back(name, (5, 3), (3, 2)), x[3:8, 2:5]), name
    assert set(ours) == {name for link in links for name in [link.ours.name]}


@pytest.mark.parametrize("row", [*tiny.ROWS, *tiny.TOWERS])
def test_tensors_in_memory_become_ours_and_theirs_again(row, tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = tiny.make_theirs(row)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    folder, state, values = hub.open_folder(tmp_path), theirs.state_dict(), theirs.config.to_dict()
    # Their experts have other names in memory than in a folder.
    if row.partition(" ")[0] in ("mixtral", "granitemoe"):
        with pytest.raises(CheckpointError, match=r"block_sparse_moe.* is missing") as error:
            hub.import_tensors(state, values)
        assert "save_pretrained writes one" in error.value.hint
        state = load_file(file)
    ours, want = hub.import_tensors(state, values), hub.open_folder_weights(folder)
    assert ours.keys() == get_decoder_shapes(folder.config).keys()
    # Published folders of Qwen3.5 have experts as in memory, and layers for further tokens.
    again = {name: x.clone() for name, x in state.items()}
    if "mtp.**" in folder.family.ignored_tensors:
        again["mtp.fc.weight"] = torch.ones(2, 2)
    (tmp_path / "packed").mkdir()
    save_file(again, tmp_path / "packed" / file.name)
    shutil.copy(tmp_path / "config.json", tmp_path / "packed")
    packed = hub.open_folder_weights(hub.open_folder(tmp_path / "packed"))
    for name, x in ours.items():
        box = tuple(x.shape), (0,) * x.ndim
        assert torch.equal(x, want(name, *box)), name
        assert torch.equal(x, packed(name, *box)), name
    tower = folder.family.tower
    if tower or folder.config.experts is not None:
        state = load_file(file)
    state = rename_tower(state, tower) if tower else state
    model = build_decoder(folder.config, seed=1)
    model.load_state_dict(ours, strict=folder.config.experts is None)
    back = hub.export_tensors(model.state_dict(), folder.config, family=folder.family)
    assert back.keys() <= state.keys()
    assert all(torch.equal(x, state[name]) for name, x in back.items())
    head = folder.family.names(folder.config)["head.weight"].name
    rest = {name for name in state if tower and match_any(name, tower.tensors)}
    assert state.keys() - back.keys() - rest <= ({head} if folder.config.tied else set())


def test_tensors_in_memory_that_are_not_the_models_are_named():
    model = build_decoder(make_decoder_config("tiny", layers=1, tied=True), seed=0)
    theirs = hub.export_tensors(model.state_dict(), model.config, family="llama")
    values = hub.write_decoder_config(model.config, context=64)
    embedding = theirs["model.embed_tokens.weight"]
    import_tensors = functools.partial(hub.import_tensors, values=values)
    ours = import_tensors(theirs | {"lm_head.weight": embedding})
    assert ours["embedding.weight"].data_ptr() == embedding.data_ptr()  # a view
    short = {name.removeprefix("model."): x for name, x in theirs.items()}
    assert import_tensors(short).keys() == ours.keys()
    for wrong, named in (
        ({"lm_head.weight": embedding + 1}, "differs from model.embed_tokens.weight"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight has the shape \[3\], not"),
        ({"model.norm.weight": torch.ones(128).int()}, "is of int32, no floating point"),
        ({"model.norm.bias": torch.ones(3)}, "model.norm.bias has no place in the model"),
    ):
        with pytest.raises(CheckpointError, match=named):
            import_tensors(theirs | wrong)
    lacking = {name: x for name, x in theirs.items() if "norm" not in name}
    with pytest.raises(CheckpointError, match=r"model.norm.weight of shape \[128\] is missing"):
        import_tensors(lacking)
    for wrong, named in (
        ({"norm.weight": torch.ones(3)}, r"norm.weight has the shape \[3\], not \[128\]"),
        ({"norm.bias": torch.ones(3)}, "norm.bias has no place in the decoder"),
    ):
        with pytest.raises(CheckpointError, match=named):
            hub.export_tensors(model.state_dict() | wrong, model.config)


def test_a_folder_of_a_model_without_a_head_leaves_out_the_first_part_of_names(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny.make_theirs("gpt2").save_pretrained(tmp_path)
    want = dict(read(tmp_path).named_parameters())
    file = tmp_path / "model.safetensors"
    short = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # the mask of causality, as OpenAI's have
    assert "wte.weight" in short
    save_file(short, file)
    for name, x in read(tmp_path).named_parameters():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("row", tiny.ROWS)
def test_a_config_that_is_written_is_read_by_transformers_and_by_us_as_the_same(row, tmp_path):
    made = tiny.make_theirs(row)
    made.save_pretrained(tmp_path / "a")
    folder = hub.open_folder(tmp_path / "a", context=tiny.CONTEXT)
    written = hub.write_decoder_config(folder.config, context=folder.context, family=folder.family)
    again = hub.read_decoder_config(written, context=tiny.CONTEXT)
    assert attrs.evolve(again, head_dim=folder.config.head_dim) == folder.config
    theirs = type(made.config).from_dict(written)
    skipped = {"dtype", "architectures", "initializer_range", "transformers_version", "layer_types"}
    skipped |= {"sliding_window", "num_nextn_predict_layers", "num_mtp_layers", "pad_token_id"}
    skipped |= {"bos_token_id", "eos_token_id", "_name_or_path", "rope_parameters", "head_dim"}
    if row == "qwen3_5_moe":  # which has no dense layers
        skipped.add("intermediate_size")
    got, want = theirs.to_dict(), made.config.to_dict()
    assert {k: got.get(k) for k in want if k not in skipped} == {
        k: want[k] for k in want if k not in skipped
    }


PAGES = Path(__file__).parents[3]


def test_the_pages_have_the_tables_that_are_made_here():
    for table, page in (
        (tables.make_family_table(), "docs/howto/hugging-face-folders.md"),
        (tables.make_short_family_table(), "README.md"),
    ):
        assert table in (PAGES / page).read_text(), f"{page} needs this table:\n{table}"
    count = f"| model families | {len(hub.FAMILIES)} |"
    for page in ("README.md", "docs/comparison.md"):
        assert count in (PAGES / page).read_text(), f"{page} needs {count}"


# Its attention has no gate, as all families with delta layers have.
@pytest.mark.parametrize("name", sorted(list_decoder_sizes().keys() - {"tiny-hybrid"}))
def test_every_size_has_a_family_that_computes_it(name):
    config = list_decoder_sizes()[name]
    families = {"tiny": "llama", "10m": "llama", "60m": "llama", "125m": "llama", "350m": "llama"}
    families |= {
        "mixtral-8x7b": "mixtral",
        "qwen3-30b-a3b": "qwen3_moe",
        "deepseek-v3": "deepseek_v3",
        "gpt-oss-20b": "gpt_oss",
        "gpt-oss-120b": "gpt_oss",
    }
    families |= {"qwen3-235b-a22b": "qwen3_moe"}
    want = families.get(name, name.split("-")[0].split(".")[0])
    found = match_family(config)
    assert found.model_type == want
    assert (
        hub.read_decoder_config(hub.write_decoder_config(config, context=64)).rope_scaling
        == config.rope_scaling
    )
    if config.layers * (config.experts.count if config.experts else 1) < 10_000:
        make_family_links(found, config)


def test_a_window_in_no_layer_is_no_window():
    sliding = Sliding(window=8, first=99)
    assert match_family(make_decoder_config("tiny", sliding=sliding)).model_type == "llama"


def test_a_decoder_of_no_family_is_told_why_of_each():
    config = attrs.evolve(list_decoder_sizes()["tiny"], qk_norm=True, qkv_bias=True)
    with pytest.raises(
        ConfigError, match=r"llama: its qk_norm is False.*qwen3: its qkv_bias"
    ) as it:
        match_family(config)
    assert len(it.value.got) == sum(family.tower is None for family in hub.FAMILIES)


@pytest.mark.parametrize("name", published.FORMS)
def test_what_published_folders_say_is_read_as_transformers_reads_it(name, tmp_path):
    values, transformers = published.shrunk(name), tiny.load_transformers()
    plain = {key: x for key, x in values.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_bytes(orjson.dumps(plain))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tiny.fill(theirs)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(orjson.dumps(values))
    ours, ids = read(tmp_path, context=None), torch.arange(40).view(2, 20)
    with torch.no_grad():
        near(ours_of(ours, batch_from_rows(ids)), theirs(ids).logits, name)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}


def quantize_folder(folder, block):
    """Store a folder's linear layers in fp8, as DeepSeek-V3's; return their values."""
    from safetensors.torch import load_file, save_file

    stored, values = {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        stored[name] = values[name] = x
        if "_proj" not in name:
            continue
        rows, columns = (torch.arange(n) // b for n, b in zip(x.shape, block, strict=True))
        scales = 0.5 + torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1)
        stored[name] = x.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        values[name] = stored[name].float() * scales[rows][:, columns]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = orjson.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = FP8 | {"weight_block_size": block}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    return values


@pytest.mark.parametrize(("row", "block"), [("qwen3", [8, 8]), ("deepseek_v3", [12, 20])])
def test_blocks_in_fp8_are_read_as_what_they_stand_for(row, block, tmp_path):
    """In any boxes: the last blocks of a matrix are smaller, and a box starts inside a block."""
    theirs = tiny.make_theirs(row)
    theirs.save_pretrained(tmp_path)
    values = quantize_folder(tmp_path, block)
    folder = hub.open_folder(tmp_path)
    links, theirs = (
        make_family_links(folder.family, folder.config),
        {k: x.shape for k, x in values.items()},
    )
    back = map_weights(
        hub.open_folder_weights(folder), [link.swap_sides() for link in links], theirs
    )
    for name, x in values.items():
        assert torch.equal(back(name, x.shape, (0,) * x.ndim), x), name
        if x.ndim == 2 and len(x) > 15:
            assert torch.equal(back(name, (9, 5), (6, 3)), x[6:15, 3:8]), name
    if row == "qwen3":  # whose matrices are whole blocks, as transformers wants them
        transformers = tiny.load_transformers()
        how = transformers.FineGrainedFP8Config(weight_block_size=block, dequantize=True)
        wanted = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=how, dtype=torch.float32
        )
        for name, x in wanted.state_dict().items():
            assert name not in values or torch.equal(x, values[name]), name


def pack_folder(folder):
    """Store the matrices of a folder's experts in MXFP4, as gpt-oss; return their values."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, values = {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        stored[name] = values[name] = x
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        del stored[name]
        experts, columns, rows = x.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 132, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales)
        assert values[name].shape == x.shape
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = orjson.loads((folder / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    return stored, values


def test_blocks_in_mxfp4_are_read_as_transformers_unpacks_them(tmp_path):
    """In any boxes: a box starts inside a block, and has one of two columns that take turns."""
    tiny.make_theirs("gpt_oss").save_pretrained(tmp_path)
    _, values = pack_folder(tmp_path)
    folder = hub.open_folder(tmp_path)
    links = make_family_links(folder.family, folder.config)
    ours = hub.open_folder_weights(folder)
    theirs = {name: x.shape for name, x in values.items()}
    back = map_weights(ours, [link.swap_sides() for link in links], theirs)
    for name, x in values.items():
        assert torch.equal(back(name, x.shape, (0,) * x.ndim), x), name
        if x.ndim == 3:
            assert torch.equal(back(name, (2, 40, 5), (1, 9, 3)), x[1:3, 9:49, 3:8]), name
            assert x.dtype == torch.bfloat16
    whole = values["model.layers.1.mlp.experts.gate_up_proj"]
    up = ours("layers.1.mlp.experts.up", (1, 7, 3), (2, 5, 30))
    assert torch.equal(up, whole[2:3, 30:33, 11:25:2].transpose(1, 2))


@pytest.mark.parametrize(
    ("part", "stored_instead"),
    [
        ("scales", None),
        ("scales", torch.ones(4, 64, 2)),
        ("blocks", torch.ones(4, 64, 2, 8).byte()),
    ],
)
def test_parts_in_mxfp4_that_do_not_fit_are_refused(part, stored_instead, tmp_path):
    from safetensors.torch import save_file

    tiny.make_theirs("gpt_oss").save_pretrained(tmp_path)
    stored, _ = pack_folder(tmp_path)
    name = f"model.layers.0.mlp.experts.down_proj_{part}"
    del stored[name]
    stored |= {} if stored_instead is None else {name: stored_instead}
    save_file(stored, tmp_path / "model.safetensors")
    match = r"down_proj of shape \[4, 64, 64\] is in MXFP4, but .* of shape \[4, 64, 2\], both"
    with pytest.raises(CheckpointError, match=match):
        hub.open_folder_weights(hub.open_folder(tmp_path))


def quantize_nvfp4(name, x, *, packer):
    """Return tensors for a matrix in nvfp4, as compressed-tensors or modelopt name them."""
    codes = torch.randint(16, x.shape)
    scales = (0.5 + torch.rand(len(x), x.shape[1] // 16)).to(torch.float8_e4m3fn)
    level = 0.3 + torch.rand(())
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.where(codes < 8, e2m1[codes % 8], -e2m1[codes % 8])
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    layer = name.removesuffix("weight")
    stored = {f"{name}_scale": scales, f"{layer}input_scale": torch.ones(())}
    if packer == "modelopt":
        stored |= {name: packed, f"{name}_scale_2": level, f"{layer}k_scale": torch.ones(())}
        scales = scales.float() * level
    else:
        stored |= {f"{name}_packed": packed, f"{name}_global_scale": level.view(1)}
        scales = scales.float() / level
    return stored, values * scales.repeat_interleave(16, 1)


def quantize_scaled_fp8(name, x, *, block):
    """Return tensors for a matrix in fp8 with a scale for each block; None is a whole side."""
    sides = [side or whole for side, whole in zip(block, x.shape, strict=True)]
    rows, columns = (torch.arange(n) // side for n, side in zip(x.shape, sides, strict=True))
    scales = 0.5 + torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1)
    stored = {name: x.to(torch.float8_e4m3fn), f"{name}_scale": scales if any(block) else scales[0]}
    return stored, stored[name].float() * scales[rows][:, columns]


def compressed(form, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", **weights}}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "sparsity_config": {},
        "transform_config": {},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4)
QUANTIZED = {
    "nvfp4 of compressed-tensors": (
        NVFP4,
        functools.partial(quantize_nvfp4, packer="compressed-tensors"),
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        functools.partial(quantize_nvfp4, packer="modelopt"),
    ),
    "fp8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        functools.partial(quantize_scaled_fp8, block=(None, None)),
    ),
    "fp8, a scale a row": (
        compressed("float-quantized", num_bits=8, block_structure=None),
        functools.partial(quantize_scaled_fp8, block=(1, None)),
    ),
    "fp8 in blocks of compressed-tensors": (
        compressed("float-quantized", num_bits=8, block_structure=[24, 20]),
        functools.partial(quantize_scaled_fp8, block=(24, 20)),
    ),
}


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_matrices_are_read_as_what_they_stand_for(form, tmp_path, caplog):
    """Any box of them, and what is trained is stored unquantized, which the reader says."""
    from safetensors.torch import load_file, save_file

    theirs = tiny.make_theirs("qwen3")
    theirs.save_pretrained(tmp_path)
    table, quantize = QUANTIZED[form]
    stored, values = {}, load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    for name, x in values.items():
        # The embedding and the head stay as they are, as in published folders.
        parts, values[name] = quantize(name, x) if "_proj" in name else ({name: x}, x)
        stored |= parts
    assert len(stored) > len(values)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = orjson.loads((tmp_path / "config.json").read_bytes())
    config["quantization_config"] = table
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    folder = hub.open_folder(tmp_path)
    links = make_family_links(folder.family, folder.config)
    shapes = {name: tuple(x.shape) for name, x in values.items()}
    back = map_weights(
        hub.open_folder_weights(folder), [link.swap_sides() for link in links], shapes
    )
    assert "bfloat16" in caplog.text
    for name, x in values.items():
        assert torch.equal(back(name, x.shape, (0,) * x.ndim), x), name
        if x.ndim == 2:
            assert torch.equal(back(name, (17, 17), (6, 3)), x[6:23, 3:20]), name
    hub.read_init_config(tmp_path, vocab_size=64)  # whose check of shapes sees whole matrices
    missing = next(name for name in stored if "_scale" in name and "put_" not in name)
    del stored[missing]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(missing)):
        hub.open_folder_weights(folder)


def test_longrope_chooses_its_factors_once_by_the_context(tmp_path):
    """Short ones unless a longer context is requested, and no longer text is computed with them."""
    row = "phi3 longrope, long, a part of each head"
    tiny.make_theirs(row).save_pretrained(tmp_path)
    for context in (None, 4, 3, 5):
        folder = hub.open_folder(tmp_path, context=context)
        scaling = folder.config.rope_scaling
        assert folder.context == context or (context is None and folder.context == 4)
        assert scaling.factors == (scaling.long if context == 5 else scaling.short)
        assert folder.config.max_length == max(folder.context, 4)
        assert config_from_facts(orjson.loads(orjson.dumps(attrs.asdict(folder.config)))) == (
            folder.config
        )
        with pytest.raises(
            ConfigError, match=f"context of {folder.config.max_length}; set row_length"
        ):
            check_layout(Layout(), folder.config, BatchShape(row_length=8, rows=1), world=1)
    assert hub.read_init_config(tmp_path, vocab_size=64, context=8).rope_scaling.context == 8
    for file, data in hub.make_tokenizer_files("bytes").items():
        (tmp_path / file).write_bytes(data)
    values = orjson.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(orjson.dumps(values | {"vocab_size": 271}))
    assert hub.open_model(tmp_path).context == 4
    assert hub.open_model(tmp_path, context=9).config.max_length == 9


def test_a_context_beyond_learned_positions_is_refused(tmp_path):
    config = list_decoder_sizes()["tiny"]
    learned = attrs.evolve(config, positions=16, head_dim=None)
    make_run = {"config.tokenizer": "bytes", "config.row_length": 16}
    facts = {**make_run, "model": attrs.asdict(learned)}
    model = build_decoder(learned, seed=0)
    rest = [model], torch.optim.SGD(model.parameters()), solo_parallel()
    save_checkpoint(tmp_path, TrainState(), *rest, facts=facts)
    assert hub.open_model(tmp_path).context == 16
    with pytest.raises(ConfigError, match=r"context of 17 tokens .* positions for 16"):
        hub.open_model(tmp_path, context=17)


def test_a_map_with_a_gap_is_refused_by_name():
    shapes = {"a": (4, 2), "b": (2, 2)}
    with pytest.raises(ConfigError, match="no name for b"):
        make_links({"a": hub.HFTensor("x")}, shapes, heads={}, rotary=0)
    table = {"a": hub.HFTensor("x"), "b": hub.HFTensor("y")}
    with pytest.raises(ConfigError, match=r"make_links: b must have a dimension, got"):
        make_links(table, {"a": (2,), "b": ()}, heads={}, rotary=0)
    links = make_links({"a": hub.HFTensor("x"), "b": hub.HFTensor("x")}, shapes, heads={}, rotary=0)
    with pytest.raises(ConfigError, match="x: 12 of 8 elements are linked"):
        check_links(links, shapes)


def test_a_transposed_and_joined_tensor_comes_back():
    shapes, table = {"q": (3, 2), "k": (4, 2)}, {}
    for name in shapes:
        table[name] = hub.HFTensor("qk", fused=True, transposed=True)
    links = make_links(table, shapes, heads={}, rotary=0)
    check_links(links, shapes)
    assert get_foreign_shapes(links) == {"qk": (2, 7)}
    whole = torch.arange(14.0).view(2, 7)
    stored = {"qk": whole}

    def cut(name, shape, offset):
        return stored[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    ours = map_weights(cut, links, shapes)
    assert torch.equal(ours("k", (4, 2), (0, 0)), whole[:, 3:].T)
    assert torch.equal(ours("k", (2, 1), (1, 1)), whole[1:, 4:6].T)
    stored |= {name: ours(name, shape, (0, 0)) for name, shape in shapes.items()}
    back = map_weights(cut, [link.swap_sides() for link in links], {"qk": (2, 7)})
    assert torch.equal(back("qk", (2, 4), (0, 2)), whole[:, 2:6])


def test_parts_that_take_turns_come_back():
    """Two heads of queries and gates, of 3 rows each, and channels of convolutions, [C, 1, W]."""
    shapes = {"q": (6, 2), "g": (6, 2), "a": (2, 4), "b": (3, 4)}
    turns = hub.HFTensor("qg", fused=True, groups=2)
    convs = hub.HFTensor("conv", fused=True, unit=1)
    table = {"q": turns, "missing": turns, "g": turns, "a": convs, "b": convs}
    links = make_links(table, shapes, heads={}, rotary=0)
    check_links(links, shapes)
    theirs = get_foreign_shapes(links)
    assert theirs == {"qg": (12, 2), "conv": (5, 1, 4)}
    whole, conv = torch.arange(24.0).view(12, 2), torch.arange(20.0).view(5, 1, 4)
    stored = {"qg": whole, "conv": conv}

    def cut(name, shape, offset):
        return stored[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    ours = map_weights(cut, links, shapes)
    heads = whole.view(2, 2, 3, 2)
    assert torch.equal(ours("q", (6, 2), (0, 0)), heads[:, 0].reshape(6, 2))
    assert torch.equal(ours("g", (3, 1), (2, 1)), heads[:, 1].reshape(6, 2)[2:5, 1:])
    assert torch.equal(ours("b", (2, 3), (1, 1)), conv[3:, 0, 1:])
    stored |= {name: ours(name, shape, (0, 0)) for name, shape in shapes.items()}
    back = map_weights(cut, [link.swap_sides() for link in links], theirs)
    assert torch.equal(back("qg", (7, 2), (2, 0)), whole[2:9])
    assert torch.equal(back("conv", (3, 1, 2), (1, 0, 1)), conv[1:4, :, 1:3])
    with pytest.raises(ConfigError, match="q: 4 of 5 elements are linked"):
        check_links(make_links({"q": turns}, {"q": (5,)}, heads={}, rotary=0), {"q": (5,)})
