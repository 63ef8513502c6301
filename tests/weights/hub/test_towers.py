"""The text tower of a multimodal folder is trained, and everything else comes out as it was."""

import json

import attrs
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from weights.hub import published, tiny

from trainkit import hub
from trainkit.__main__ import main
from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.metrics.flops import decoder_flops
from trainkit.models import Decoder, call_model, call_routed
from trainkit.models.config import count_parameters, parameter_shapes
from trainkit.models.decoder import whole_logits
from trainkit.parallel import build_stages, check_layout
from trainkit.parallel.name_patterns import match_any
from trainkit.types import BatchShape, CheckpointError, ConfigError, Layout, TrainState
from trainkit.weights.checkpoint import save_checkpoint
from trainkit.weights.hub.configs import get_family
from trainkit.weights.hub.trained import make_tower_facts

IDS = torch.arange(40).view(2, 20)
# How releases of `transformers` and classes without a head have named the tensors of one folder.
NAMES = {
    "as it saves them": {},
    "since 4.52": {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "without a head": {"language_model.model.": "language_model.", "model.": ""},
}


def make_folder(home, row, names="as it saves them"):
    """Write a multimodal folder with the files of a processor, and return its model."""
    theirs = tiny.make_theirs(row)
    theirs.save_pretrained(home, max_shard_size="30KB" if len(row) % 2 else "5GB")
    if names != "as it saves them":
        tensors = read_tensors(home)
        if names == "as it has them in memory":  # with the experts of a layer in one tensor
            tensors = {name: x.clone() for name, x in theirs.state_dict().items()}
        for file in home.glob("model*"):
            file.unlink()
        for old, new in NAMES.get(names, {}).items():
            tensors = {
                new + k.removeprefix(old) if k.startswith(old) else k: x for k, x in tensors.items()
            }
        save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    (home / "preprocessor_config.json").write_text('{"size": 28}')
    return theirs


def read_tensors(home):
    return {k: x for file in home.glob("*.safetensors") for k, x in load_file(file).items()}


def read_tower(home):
    folder = hub.open_folder(home)
    weights = hub.open_folder_weights(folder, dtype=torch.float32)
    (model,) = build_stages(lambda: Decoder(folder.config), solo_parallel(), [], weights=weights)
    return model


def logits_of(model):
    call = call_model if model.config.experts is None else call_routed
    return whole_logits(call(model, batch_from_rows(IDS)))


def train_a_step(home, run, **facts):
    """Save a run of one step on the tower of a folder; return its model."""
    model = read_tower(home)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits_of(model).square().mean().backward()
    optimizer.step()
    facts = {"model": attrs.asdict(model.config), "config.tokenizer": "bytes", **facts}
    facts |= {"config.row_length": 128, **make_tower_facts(home)}
    save_checkpoint(run, TrainState(), [model], optimizer, solo_parallel(), facts=facts)
    return model


def export(capsys, *words):
    code = main(["export", *map(str, words)])
    return code, orjson.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("gemma3 tower", "as it saves them"),
        ("gemma3 tower", "without a head"),
        ("gemma3 tower, untied", "as it saves them"),
        ("gemma3 tower, untied", "since 4.52"),
        ("qwen3_vl", "as it saves them"),
        ("qwen3_vl", "without a head"),
        ("qwen3_vl, untied", "as it saves them"),
        ("gemma4", "as it saves them"),
        ("qwen3_5 tower", "as it saves them"),
        ("qwen3_5_moe tower", "as it has them in memory"),
    ],
)
def test_a_trained_tower_comes_back_in_its_folder(row, names, tmp_path, capsys):
    theirs = make_folder(tmp_path / "base", row, names)
    model = train_a_step(tmp_path / "base", tmp_path / "run")
    flags = ["--shard-bytes", 20_000, "--context", 100]
    assert export(capsys, tmp_path / "run", tmp_path / "out", *flags)[0] == 0
    before, after = read_tensors(tmp_path / "base"), read_tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    outside = hub.open_folder(tmp_path / "base").family.tower.tensors
    for name, x in before.items():
        constant = name.endswith("layer_scalar")
        assert torch.equal(after[name], x) == (constant or match_any(name, outside)), name
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 28}'
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("base", "out")]
    configs[0]["text_config"]["max_position_embeddings"] = 100
    assert configs[1] == configs[0]
    if names == "without a head":
        return  # a class without one loads it, and has no logits
    again = type(theirs).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        got, want = logits_of(model), again(input_ids=IDS).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert make_tower_facts(tmp_path / "run") == {"tower": str(tmp_path / "base")}


def test_tensors_outside_of_the_tower_keep_their_bits_in_any_dtype(tmp_path, capsys):
    """Of other types, without dimensions and not a number; the tower is cast, and they are not."""
    base = tmp_path / "base"
    make_folder(base, "gemma3 tower")
    tensors = read_tensors(base)
    for file in base.glob("model*"):
        file.unlink()
    strange = torch.tensor([0x7FC00001, -1, 7], dtype=torch.int32)
    tensors |= {
        "vision_tower.count": torch.tensor(3),
        "vision_tower.nan": strange.view(torch.float),
    }
    tensors["vision_tower.half"] = torch.ones(3, dtype=torch.bfloat16)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    train_a_step(base, tmp_path / "run")
    flags = "--dtype", "bfloat16"
    assert export(capsys, tmp_path / "run", tmp_path / "out", *flags)[0] == 0
    after = read_tensors(tmp_path / "out")
    for name, x in tensors.items():
        if name.startswith("language_model."):
            assert after[name].dtype == torch.bfloat16
        else:
            assert after[name].dtype == x.dtype
            assert (
                after[name].numpy(force=True).tobytes() == x.numpy(force=True).tobytes()
                if (x.dtype != torch.bfloat16)
                else torch.equal(after[name], x)
            )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_that_is_gone_or_another_is_refused_and_nothing_is_lost(tmp_path, capsys):
    make_folder(tmp_path / "base", "gemma3 tower")
    model = train_a_step(tmp_path / "base", tmp_path / "run")
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    run, out = tmp_path / "run", tmp_path / "out"
    code, report = export(capsys, run, out)
    assert (code, "copied from" in report["error"]) == (64, True)
    assert "--base" in report["hint"]
    assert not out.exists()
    make_folder(tmp_path / "other", "gemma3 tower, untied")
    code, report = export(capsys, run, out, "--base", tmp_path / "other")
    assert code == 64
    assert "its layers is 3" in report["error"]
    assert "tied is False" in report["error"]
    tiny.make_theirs("gemma3").save_pretrained(tmp_path / "text")
    code, report = export(capsys, run, out, "--base", tmp_path / "text")
    assert (code, "of a gemma3_text, and no multimodal" in report["error"]) == (64, True)
    assert export(capsys, run, out, "--base", moved)[0] == 0
    # The decoder alone needs no base.
    assert export(capsys, run, tmp_path / "alone", "--family", "gemma3_text")[0] == 0
    assert hub.open_folder(tmp_path / "alone").family.model_type == "gemma3_text"
    for name, p in read_tower(tmp_path / "alone").named_parameters():
        assert torch.equal(p, dict(model.named_parameters())[name]), name
    (moved / "model.safetensors.index.json").unlink(missing_ok=True)
    for file in moved.glob("*.safetensors"):
        file.unlink()
    tensors = {k: x for k, x in read_tensors(out).items() if "norm" not in k}
    save_file(tensors, moved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*norm.* of its text tower"):
        hub.export_folder(run, tmp_path / "no", context=128, base=moved)


def test_a_quantized_folder_takes_no_trained_tower(tmp_path):
    base = tmp_path / "base"
    make_folder(base, "qwen3_vl")
    train_a_step(base, tmp_path / "run")
    values = json.loads((base / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (base / "config.json").write_text(json.dumps(values | {"quantization_config": fp8}))
    with pytest.raises(ConfigError, match="is quantized, and the trained tower is not"):
        hub.export_folder(tmp_path / "run", tmp_path / "out", context=128)


def test_more_rows_of_the_vocabulary_go_into_the_folder(tmp_path):
    base = tmp_path / "base"
    theirs = make_folder(base, "qwen3_vl")
    folder = hub.open_folder(base)
    config = attrs.evolve(folder.config, vocab_size=80)
    weights = hub.resize_weights(
        hub.open_folder_weights(folder), folder.config, vocab_size=config.vocab_size
    )
    (model,) = build_stages(lambda: Decoder(config), solo_parallel(), [], weights=weights)
    rest = [model], torch.optim.SGD(model.parameters()), solo_parallel()
    facts = {"model": attrs.asdict(config)}
    path = save_checkpoint(tmp_path / "run", TrainState(), *rest, facts=facts)
    hub.export_folder(path, tmp_path / "out", context=128, base=base)
    again = type(theirs).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert again.config.text_config.vocab_size == 80
    with torch.no_grad():
        got, want = again(input_ids=IDS).logits[..., :64], theirs(input_ids=IDS).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", published.TOWERS)
def test_what_published_folders_say_is_read_as_transformers_reads_it(name, tmp_path):
    transformers = tiny.load_transformers()
    (tmp_path / "config.json").write_bytes(orjson.dumps(published.shrink_tower(name)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tiny.fill(theirs.eval())
    if name == "gemma-4-31b":  # divides no scores: trained norms have weights as small as this
        for key, x in theirs.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                x.data.mul_(len(x) ** -0.25)
    theirs.save_pretrained(tmp_path)
    # The published form of the file, with the tensors of today.
    (tmp_path / "config.json").write_bytes(orjson.dumps(published.shrink_tower(name)))
    with torch.no_grad():
        got, want = logits_of(read_tower(tmp_path)), theirs(IDS).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    values = published.TOWERS[name][0]
    full = hub.read_decoder_config(values)
    assert full.layers == values["text_config"]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("changes", "text", "problem"),
    [
        ({"text_config": None}, {}, "text_config is no table"),
        ({}, {"model_type": "qwen3"}, "model_type is 'qwen3', not 'qwen3_vl_text'"),
        ({"use_cross": True}, {}, "use_cross is True, an unknown key of qwen3_vl"),
        ({}, {"deepstack": True}, "deepstack is True, an unknown key of qwen3_vl"),
        ({}, {"rope_scaling": {"rope_type": "mrope"}}, "rope_type is 'mrope', not default"),
        ({"auto_map": {"AutoModel": "x.Y"}}, {}, "asks for code of the folder's own"),
        ({"tie_word_embeddings": 3}, {}, "tie_word_embeddings is 3"),
    ],
)
def test_what_a_multimodal_file_says_that_is_not_known_is_named(changes, text, problem):
    values = published.QWEN3_VL_4B
    values = values | {"text_config": values["text_config"] | text} | changes
    with pytest.raises(ConfigError, match=problem):
        hub.read_decoder_config(values)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256, not 0"),
        ({"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input is 256, not 0"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20, not 0"),
        ({"enable_moe_block": True, "num_experts": 128}, "enable_moe_block is True, not False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"rope_parameters": ...}, "rope_parameters are missing"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v must be true or false"),
        ({"num_global_key_value_heads": 5}, "of kv_heads that divide heads = 32"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "the same entries for each full layer"),
    ],
)
def test_a_gemma_4_that_needs_more_than_the_decoder_computes_is_refused(text, problem):
    """As E2B, E4B and 26B-A4B are, by the key that they need."""
    values = published.GEMMA4_31B["text_config"] | text
    values = {key: x for key, x in values.items() if x is not ...}
    with pytest.raises(ConfigError, match=problem):
        hub.read_decoder_config(published.GEMMA4_31B | {"text_config": values})


def test_a_tensor_of_no_tower_and_one_that_is_there_twice_are_named(tmp_path):
    make_folder(tmp_path, "qwen3_vl")
    tensors = read_tensors(tmp_path)
    norm = tensors["model.language_model.norm.weight"]
    for name, problem in (
        ("audio.weight", r"audio\.weight has no place in the model"),
        ("language_model.model.norm.weight", r"norm\.weight are there twice"),
    ):
        save_file(tensors | {name: norm + 1}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=problem):
            hub.open_folder_weights(hub.open_folder(tmp_path))


def test_a_decoder_alone_is_no_multimodal_model():
    config = hub.read_decoder_config(published.QWEN3_VL_4B)
    assert hub.write_decoder_config(config, context=8)["model_type"] == "qwen3"
    family = get_family("qwen3_vl")
    with pytest.raises(ConfigError, match="of which the decoder is a part: qwen3_vl_text") as error:
        hub.write_decoder_config(config, context=8, family=family)
    assert "base=" in error.value.hint


def test_a_decoder_with_two_sizes_of_heads_is_written_and_counted():
    config = hub.read_decoder_config(published.GEMMA4_31B)
    values = hub.write_decoder_config(config, context=1024)
    assert values["model_type"] == "gemma4_text"
    assert values["per_layer_config"]["59"] == {"head_dim": 512, "num_key_value_heads": 4}
    assert attrs.evolve(hub.read_decoder_config(values), head_dim=256) == config
    shapes = parameter_shapes(config)
    assert shapes["layers.0.attention.wv.weight"] == (16 * 256, 5376)
    assert shapes["layers.5.attention.wk.weight"] == (4 * 512, 5376)
    assert "layers.5.attention.wv.weight" not in shapes
    assert 30e9 < count_parameters(config) < 31.5e9
    with pytest.raises(ConfigError, match="4 key and value heads of full layers do not divide"):
        check_layout(Layout(tp=8), config, BatchShape(row_length=8, rows=1), world=8)
    one_kind = attrs.evolve(config, full_heads=None)
    # A token of the second half of a text, and not of another text, attends to the first half.
    flops = [
        decoder_flops(each, [64]) - decoder_flops(each, [32, 32]) for each in (config, one_kind)
    ]
    assert flops[0] * 6 == flops[1] * 7  # a sixth of the layers has heads of twice the size
