"""Damaged and hostile folders are rejected by name, before memory is allocated."""

import contextlib
import functools
import json
import math
import os
import resource
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from weights.hub import published, tiny

from trainkit import hub
from trainkit.models import DecoderConfig, init_weights
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.hub.configs import match_family
from trainkit.weights.hub.folder import make_family_links
from trainkit.weights.hub.links import get_foreign_shapes

CONFIG = DecoderConfig(vocab_size=64, width=16, layers=2, heads=2, kv_heads=2, mlp_width=32)
NAME = "model.layers.0.self_attn.q_proj.weight"
OLD = {"rope_parameters": None}
RARE_KEYS = ("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "auto_map")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4}}},
}
INDEX = "model.safetensors.index.json"


def make_folder(home, config=CONFIG, *, changes=()):
    """Write a good folder, but for changes of its `config.json`, without `transformers`."""
    family = match_family(config)
    values = hub.write_decoder_config(config, context=64) | dict(changes)
    home.mkdir()
    (home / "config.json").write_text(json.dumps(values))
    shapes = get_foreign_shapes(make_family_links(family, config))
    save_file(
        {name: torch.ones(shape) for name, shape in shapes.items()}, home / "model.safetensors"
    )
    return home


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "folder")


def shard(folder):
    """Cut a folder's file into two and an index; return the index."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    where = {}
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: whole[name] for name in part}, folder / f"{number}.safetensors")
        where |= dict.fromkeys(part, f"{number}.safetensors")
    return where


def write_index(folder, where):
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def weights_of(folder, **how):
    """Open a folder in no more memory than this process has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), hard))
    try:
        return hub.open_folder_weights(hub.open_folder(folder), **how)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def edit_header(folder, change):
    """Rewrite the header of a folder's file, whose tensors stay where they are."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_good_folder_is_read(folder):
    weights = weights_of(folder)
    assert torch.equal(weights("norm.weight", (16,), (0,)), torch.ones(16))
    where = shard(folder)
    write_index(folder, where)
    assert weights_of(folder).shapes == weights.shapes


# ------------------------------------------------------------------------------------- config.json


def test_every_problem_of_a_config_is_told_at_once(folder):
    values = json.loads((folder / "config.json").read_text())
    wrong = {
        "auto_map": {"AutoModel": "modeling_evil.Evil"},
        "quantization_config": {"quant_method": "bitsandbytes"},
        "hidden_act": "relu",
        "attention_bias": 1,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]},
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 0,
        "partial_rotary_factor": 0.5,
        "hidden_size": "16",
        "num_hidden_layers": 10**9,
        "tie_word_embeddings": 1,
    }
    del values["vocab_size"]
    (folder / "config.json").write_text(json.dumps(values | wrong))
    with pytest.raises(ConfigError) as caught:
        hub.open_folder(folder)
    problems = "; ".join(caught.value.got)
    for what in [*wrong, "vocab_size is missing"]:
        assert what.replace("rope_parameters", "rope_type is 'longrope'") in problems, what
    assert "which is never run" in problems


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gemma9"}, "unknown model_type 'gemma9'; .* is gemma2 .* llama, mistral"),
        ({"model_type": ["llama"]}, "unknown model_type"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, no number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, no number"),
        ({"num_key_value_heads": 3}, "kv_heads must be a divisor"),
        ({"head_dim": 10**12}, "head_dim is 10+, not from 0"),
        ({"rope_theta": 0.5, "rope_parameters": None}, "rope_theta is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "differ in rope_type"),
        (OLD | {"rope_scaling": {"type": "su", "rope_type": "yarn"}}, "and rope_type differ"),
        (OLD | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        (OLD | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "differ in rope_type"),
        ({"rope_scaling": [1]}, "is no table"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings is no number"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "weight_block_size is None; only fp8 in blocks",
        ),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt is 'e5m2'; only fp8"),
        ({"quantization_config": FP8 | {"weight_block_size": [0, 8]}}, r"is \[0, 8\]; only fp8"),
        ({"quantization_config": "fp8"}, "quant_method is None; only fp8"),
        ({"quantization_config": MODELOPT | {"quant_algo": "W4A8_AWQ"}}, "quant_algo is 'W4A8_AWQ"),
        ({"quantization_config": NVFP4 | {"format": "pack-quantized"}}, "format is 'pack-quanti"),
        ({"quantization_config": NVFP4 | {"transform_config": {"R1": {}}}}, "transform_config is"),
        ({"quantization_config": NVFP4 | {"sparsity_config": [1]}}, "sparsity_config is"),
        ({"quantization_config": NVFP4 | {"config_groups": {"g": {"weights": [4]}}}}, "config_gro"),
        (
            {"auto_map": {"AutoModel": "modeling_llama.LlamaModel", "AutoConfig": "evil.E"}},
            "code of",
        ),
        ({"auto_map": ["LlamaModel"]}, "auto_map asks for code"),
        ({"layer_types": ["chunked_attention"]}, "'chunked_attention' in layer 0, not full_att"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "'sliding_attention' in layer 1, not full_attention of llama, which mistral and qwen2",
        ),
        ({"layer_types": "full"}, "layer_types has 'full' in layer 0, not full_attention of llama"),
        ({"attn_logit_softcapping": 2.0}, "is 2.0, an unknown key of llama, which gemma2 and"),
        ({"mlp_biases": True}, "mlp_biases is True, an unknown key of llama, whose .* mlp_bias"),
        ({"no_such_thing": [7]}, r"no_such_thing is \[7\], an unknown key of llama: trainkit"),
        (
            OLD | {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type is 'longrope', not default or .* of llama, which phi3 has",
        ),
        (
            OLD | {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}},
            "rope: alpha is 3, an unknown key of linear",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_n_heads": 48, "logits_scaling": 8.0}
            | {"residual_multiplier": 0.2, "embedding_multiplier": 12.0},
            r"family is granitemoe \(Granite 3 MoE\), which has no mamba_n_heads = 48; the",
        ),
        ({"sliding_window": 32}, "sliding_window is 32, below max_position_embeddings 64"),
        ({"sliding_window": "32"}, "sliding_window is '32', no number"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(tmp_path, changes, match):
    with pytest.raises(ConfigError, match=match):
        hub.open_folder(make_folder(tmp_path / "folder", changes=changes))


ODD = [None, True, -1, 2.5, math.inf, math.nan, 10**30, "x", [], {}, [1], ["x"], {"a": 1}]


@pytest.mark.parametrize("name", published.FORMS)
def test_no_value_of_a_key_raises_another_error(name):
    values = published.shrunk(name)
    tables = {key: x for key, x in values.items() if isinstance(x, dict)}
    for odd in ODD:
        changed = [values | {key: odd} for key in {*values, *RARE_KEYS}]
        changed += [values | {k: x | {inner: odd}} for k, x in tables.items() for inner in x]
        for hostile in changed:
            with contextlib.suppress(ConfigError):
                hub.read_decoder_config(hostile)


LONG = {"type": "yarn", "short_factor": [1.0] * 8, "long_factor": [2] * 8}
SHARP = {"type": "yarn", "factor": 1.0, "attention_factor": 1.3}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
GLM_LITE = {key: 8 for key in tiny.OF_GLM_LITE if "num_" not in key and "eps" not in key}
MANY = [SLIDING, *[FULL] * 998, SLIDING]


@pytest.mark.parametrize(
    ("model_type", "changes", "match"),
    [
        ("mistral", {}, [0, 1]),
        ("mistral", {"sliding_window": None}, []),
        ("mistral", {"sliding_window": 0}, "window must be above 0"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096', no number"),
        ("mistral", {"layer_types": [FULL, SLIDING]}, "layer_types follow no pattern"),
        ("qwen2", {}, []),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, []),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, [1]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "is -1, not from 0"),
        ("qwen3", {"layer_types": [FULL, SLIDING]}, "no sliding_window is in use"),
        ("gemma2", {}, [0]),
        ("gemma2", {"layer_types": [FULL, SLIDING]}, [1]),
        (
            "gemma2",
            {"layer_types": [FULL, "chunked_attention"]},
            "'chunked_attention' in layer 1, not full",
        ),
        ("gemma2", {"layer_types": [SLIDING]}, "layer_types follow no pattern"),
        ("gemma3_text", {}, [0, 1]),
        ("gemma3_text", {"sliding_window_pattern": 1}, []),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq is 0"),
        (
            "gemma3_text",
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            "sliding layers: rope_type is not supported",
        ),
        ("phi3", {"rope_scaling": {"type": "su", "long_factor": [1]}}, "short_factor is missing"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": [1] * 7}}, "as many short as long"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": [0] * 8}}, "all above 0"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": 2}}, "is 2, no list of numbers"),
        ("phi3", {"rope_scaling": {**LONG, "short_factor": ["1"] * 8}}, "no list of numbers"),
        ("phi3", {"rope_scaling": LONG, "partial_rotary_factor": 0.5}, "of 4 factors, got Long"),
        ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 0}, "length >= 1"),
        ("phi3", {"rope_scaling": LONG}, []),
        (
            "phi3",
            {"rope_scaling": {"type": "partial", "factor": 2.0}},
            "'partial', not default or lo",
        ),
        ("phi3", {"partial_rotary_factor": 0}, "partial_rotary_factor is 0, not above 0"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, []),
        ("qwen3", {"rope_scaling": SHARP}, "attention_factor is 1.3 with factor 1.0: it must"),
        ("qwen3", {"rope_scaling": SHARP | {"factor": 2, "attention_factor": 0.7}}, "is 0.7 with"),
        # Before anything is counted layer by layer, and none of all pairs of numbers is tried.
        ("gemma3_text", {"num_hidden_layers": 10**12}, "num_hidden_layers is 10+, not from 0"),
        ("gemma2", {"num_hidden_layers": 1000, "layer_types": MANY}, "follow no pattern"),
        ("gemma3_text", {"rope_parameters": {SLIDING: "x"}}, "sliding layers are 'x', no table"),
        ("gpt2", {"n_inner": "4"}, "n_inner is '4': it must be a whole number"),
        ("olmo3", {}, [0, 1]),
        (
            "olmo3",
            {"num_hidden_layers": 5, "layer_types": [SLIDING, FULL] + [SLIDING] * 3},
            "no pat",
        ),
        ("smollm3", {"no_rope_layers": [0, 1]}, r"\[0, 1\]: a list of 1 and 0 for 2 layers, in wh"),
        ("smollm3", {"no_rope_layers": [1]}, r"is \[1\]: a list of 1 and 0 for 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 0]}, []),  # longer than it need be
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 8},
            "use_sliding_window is True",
        ),
        ("qwen3_5_text", {"layer_types": [LINEAR, FULL]}, []),
        ("qwen3_5_text", {"layer_types": [FULL, LINEAR]}, "layer_types follow no pattern"),
        ("qwen3_5_text", {"layer_types": [LINEAR]}, "layer_types follow no pattern"),
        ("qwen3_5_text", {"layer_types": [LINEAR, SLIDING]}, "'sliding_attention' in layer 1"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "3 key heads do not divide 32 value heads"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False, not True"),
        ("qwen3_5_text", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn', not default"),
        ("granite", {"attention_multiplier": 0}, "multiplier is 0: it must be a number above 0"),
        ("granite", {"residual_multiplier": "0.2"}, "residual_multiplier is '0.2', no number"),
        ("granite", {"logits_scaling": 0}, "logit_divisor must be above 0, got 0"),
        ("glm4_moe_lite", GLM_LITE | {"mlp_layer_types": ["sparse", "dense"]}, "then sparse ones"),
        (
            "glm4_moe_lite",
            GLM_LITE | {"first_k_dense_replace": 2},
            "the first layer alone is dense",
        ),
    ],
)
def test_a_key_that_is_missing_means_what_it_means_there(model_type, changes, match):
    values = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    values |= dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    values |= {"model_type": model_type, "max_position_embeddings": 8192, "num_hidden_layers": 2}
    if isinstance(match, list):
        assert hub.read_decoder_config(values | changes).sliding_layers == match
        return
    with pytest.raises(ConfigError, match=match):
        hub.read_decoder_config(values | changes)


def test_both_forms_of_rope_are_read_as_the_same():
    base = hub.write_decoder_config(CONFIG, context=64)
    rope = {**tiny.LLAMA3["rope_parameters"]}
    new = base | {"rope_parameters": rope, "rope_scaling": None}
    theta = rope.pop("rope_theta")
    old = base | {"rope_scaling": {**rope}, "rope_theta": theta} | OLD
    oldest = base | {"rope_scaling": {"type": rope.pop("rope_type"), **rope}} | OLD
    oldest["rope_theta"] = theta
    new["rope_parameters"] = {**rope, "rope_theta": theta, "rope_type": "llama3"}
    first, *others = (hub.read_decoder_config(values) for values in (new, old, oldest))
    assert first.rope_scaling.factor == 8.0
    assert [first, first] == others


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_config_that_is_no_table_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hub.open_folder(folder)


def test_a_pipe_and_a_link_are_not_followed(folder, tmp_path):
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        hub.open_folder(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"config\.json are links, which are not followed"):
        hub.open_folder(folder)


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h[NAME].update(dtype="I32"), f"{NAME} is of int32, no floating point"),
        (lambda h: h[NAME].update(dtype="F64"), "its shape needs"),
        (lambda h: h[NAME].update(dtype="F8_E8M0"), "unknown dtype"),
        (lambda h: h[NAME].update(shape=[16, 17]), "its shape needs"),
        (lambda h: h[NAME].update(shape=[8, 32]), r"has the shape \[8, 32\], not \[16, 16\]"),
        (lambda h: h[NAME].update(shape=[2**40, 2**40]), "its shape needs"),
        (lambda h: h[NAME].update(data_offsets=[0, 1024]), "belong to no tensor, or to two"),
        (lambda h: h[NAME].update(data_offsets=[2**40, 2**40 + 1024]), "no tensor, or to two"),
        (lambda h: h.update({"../up": h.pop(NAME)}), "odd name"),
        (lambda h: h.update({"extra.weight": h.pop(NAME)}), "extra.weight has no place"),
        (lambda h: json.dumps(h)[:-1] + f', "{NAME}": {json.dumps(h[NAME])}}}', "there twice"),
        (lambda _: "{" * 100_000, "model.safetensors"),
    ],
)
def test_a_header_that_lies_is_refused(folder, change, match):
    edit_header(folder, lambda header: ((found := change(header)) and found) or None)
    with pytest.raises(CheckpointError, match=match):
        weights_of(folder)


def test_a_header_longer_than_any_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="claims a header of 1099511627776 bytes"):
        weights_of(folder)


def test_half_precision_of_the_other_kind_is_refused(tmp_path):
    folder = make_folder(tmp_path / "folder", changes={"torch_dtype": "bfloat16"})
    whole = load_file(folder / "model.safetensors")
    save_file({name: x.half() for name, x in whole.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is of float16, and config\.json says bfloat16"):
        weights_of(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.update({NAME: "../0.safetensors"}), "no plain file name"),
        (lambda w: w.update({NAME: "/etc/passwd"}), "no plain file name"),
        (lambda w: w.update({NAME: "2.safetensors"}), "cannot be read"),
        (lambda w: w.update({NAME: 3}), "holds no weight_map"),
        (lambda w: w.pop(NAME), f"does not say that {NAME}"),
        (lambda w: w.update({NAME: "0.safetensors"}), "in 0.safetensors, which it is not"),
        (lambda w: w.update({"made.up": "1.safetensors"}), "made.up is in 1.safetensors, which it"),
    ],
)
def test_an_index_that_lies_or_leads_outside_is_refused(folder, change, match):
    where = shard(folder)
    change(where)
    write_index(folder, where)
    with pytest.raises(CheckpointError, match=match):
        weights_of(folder)


def test_an_index_with_a_key_twice_is_refused(folder):
    where = shard(folder)
    text = json.dumps(where)[:-1] + f', "{NAME}": "0.safetensors"}}'
    (folder / INDEX).write_text(f'{{"weight_map": {text}}}')
    with pytest.raises(CheckpointError, match="there twice"):
        weights_of(folder)


def test_a_link_to_a_file_elsewhere_is_not_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="links, which are not followed"):
        weights_of(folder)


def test_pickles_and_nothing_at_all_are_told(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which is not read"):
        weights_of(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        weights_of(folder)


# ------------------------------------------------------------------------------- what does not fit


def test_all_that_is_missing_or_left_over_or_of_another_shape_is_named(folder):
    whole = load_file(folder / "model.safetensors")
    whole["score.weight"] = whole.pop(NAME)
    whole["lm_head.weight"] = torch.ones(3, 16)
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        weights_of(folder)
    assert caught.value.got == [
        f"{NAME} of shape [16, 16] is missing",
        "lm_head.weight has the shape [3, 16], not [64, 16]",
        "score.weight has no place in the model",
    ]


@pytest.mark.parametrize("changes", [{"hidden_size": 1 << 30}, {"intermediate_size": 1 << 30}])
def test_sizes_that_the_tensors_have_not_are_refused_before_a_model_is_made(tmp_path, changes):
    folder = make_folder(tmp_path / "large", changes=changes)
    with pytest.raises(CheckpointError, match=r"sizes differ from config\.json"):
        hub.read_init_config(folder, vocab_size=64)


def test_what_may_be_missing_comes_from_elsewhere(folder):
    whole = load_file(folder / "model.safetensors")
    del whole["lm_head.weight"]
    whole["score.weight"] = torch.ones(2)
    save_file(whole, folder / "model.safetensors")
    read = functools.partial(weights_of, allow_missing=["lm_head.*"], allow_extra=["score.*"])
    with pytest.raises(ConfigError, match=r"lacks tensors for head\.weight"):
        read(folder)
    drawn = init_weights(CONFIG, seed=0)
    weights = read(folder, missing=drawn, dtype=torch.float64)
    head = weights("head.weight", (64, 16), (0, 0))
    assert torch.equal(head, drawn("head.weight", (64, 16), (0, 0)).double())
    assert weights("norm.weight", (16,), (0,)).dtype == torch.float64


def test_a_head_that_is_not_the_embedding_it_is_said_to_be_is_refused(tmp_path):
    folder = make_folder(tmp_path / "folder", attrs.evolve(CONFIG, tied=True))
    whole = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in whole
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"].clone()
    save_file(whole, folder / "model.safetensors")
    assert "head.weight" not in weights_of(folder).shapes
    whole["lm_head.weight"][63, 15] = 2
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        weights_of(folder)


def test_matrices_in_fp8_without_their_scales_are_refused_by_name(tmp_path):
    folder = make_folder(tmp_path / "folder", changes={"quantization_config": FP8})
    whole = load_file(folder / "model.safetensors")
    scale, spare = f"{NAME}_scale_inv", "model.norm.weight_scale_inv"
    wrong = {None: None, "shape": torch.ones(2, 1), "dtype": torch.ones(1, 1, dtype=torch.int8)}
    whole[NAME] = whole[NAME].to(torch.float8_e4m3fn)
    for given in wrong.values():
        held = whole if given is None else whole | {scale: given}
        save_file(held, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{NAME} is in fp8, but there is no {scale} of"):
            weights_of(folder)
    save_file(whole | {scale: torch.ones(1, 1), spare: torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{spare} has no place in the model"):
        weights_of(folder)
