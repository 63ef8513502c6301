"""PEFT's format: PEFT computes the same from our folders, and trainkit from PEFT's."""

import argparse
import importlib.util
import json
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from trainkit import adapters
from trainkit.batch import collate_bins
from trainkit.data import TokenCorpus
from trainkit.grads import get_named_parameters
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, call_routed
from trainkit.models.decoder import whole_logits
from trainkit.optim import adamw, decay_groups
from trainkit.packing import pack_bins
from trainkit.parallel import build_stages
from trainkit.post.adapters import Lora, lora, read_peft
from trainkit.post.adapters.export import merge_weights, read_adapters
from trainkit.post.adapters.peft import LowRankFactors, to_peft
from trainkit.tools.commands import export
from trainkit.types import CheckpointError, ConfigError, TrainState
from trainkit.weights.checkpoint import save_checkpoint
from trainkit.weights.hub import open_folder, open_folder_weights

SPEC = importlib.util.spec_from_file_location(
    "tiny", Path(__file__).parents[2] / "weights" / "hub" / "tiny.py"
)
tiny = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tiny)
LENGTH = 16
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def peft_config(modules, **options):
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=modules, **options
    )


THEIRS = {
    "lora, embedding and head": (
        "llama",
        ["q_proj", "down_proj"],
        partial(peft_config, modules_to_save=["embed_tokens", "lm_head"]),
    ),
    "tied": (
        "llama tied, scaled",
        ["v_proj"],
        partial(peft_config, use_rslora=True, modules_to_save=["embed_tokens", "lm_head"]),
    ),
    "tied by PEFT": (
        "llama tied, scaled",
        ["v_proj"],
        partial(peft_config, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "dora, biases": ("qwen2", ["q_proj", "o_proj"], partial(peft_config, use_dora=True)),
    "joined": (
        "phi3",
        ["qkv_proj", "gate_up_proj"],
        partial(peft_config, rank_pattern={"qkv_proj": 5}, alpha_pattern={"gate_up_proj": 3}),
    ),
    "joined, dora": ("phi3", ["qkv_proj"], partial(peft_config, use_dora=True)),
    "experts": ("mixtral", ["q_proj"], partial(peft_config, target_parameters=EXPERTS)),
    "experts, one weight": (
        "qwen3_moe some layers",
        ["q_proj"],
        partial(peft_config, target_parameters=EXPERTS[:1]),
    ),
    "latents": ("deepseek_v3", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"], peft_config),
}
ATTENTION = "layers.*.attention.w[qv]"
OURS = {
    "lora, embedding and head": (
        "llama",
        [Lora(ATTENTION, rank=3), Lora("**.down", rank=2, alpha=7)],
        "{embedding,head}",
    ),
    "tied": ("llama tied, scaled", [Lora(ATTENTION, rank=4, rank_stabilised=True)], "embedding"),
    "dora, biases": ("qwen2", [Lora(ATTENTION, rank=3, dora=True)], None),
    "joined, some": (
        "phi3",
        [Lora("**w[qk]", rank=3), Lora("**.up", rank=2), Lora("**gate", rank=1, alpha=3)],
        None,
    ),
    "joined, dora": ("phi3", [Lora("**w[qkv]", rank=2, dora=True)], "layers.*.mlp_norm"),
    "experts": (
        "mixtral",
        [
            Lora(ATTENTION, rank=2),
            Lora("**experts.{up,gate}", rank=2),
            Lora("**experts.down", rank=3),
        ],
        None,
    ),
    "experts, one weight": ("qwen3_moe some layers", [Lora("**experts.down", rank=3)], None),
    "latents": ("deepseek_v3", [Lora("**.{wq,kv_latent,k_rotary,wkv}", rank=2)], None),
    "heads that take turns": ("qwen3_next", [Lora("**w[qgo]", rank=2)], None),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The folder of a row's base, made once."""
    made = {}

    def base_of(row):
        if row not in made:
            made[row] = tmp_path_factory.mktemp("base")
            tiny.make_theirs(row).save_pretrained(made[row])
        return made[row]

    return base_of


def randomised_(named):
    torch.manual_seed(1)
    for name, p in named:
        if p.requires_grad and "magnitude" not in name:
            nn.init.normal_(p, std=0.2)
        elif p.requires_grad:
            with torch.no_grad():
                p.mul_(1 + 0.3 * torch.rand_like(p))


def theirs_of(base):
    return transformers.AutoModelForCausalLM.from_pretrained(
        base,
        attn_implementation="eager",
        experts_implementation="eager",  # the others know no fp64
        dtype=torch.float32,
    ).eval()


def ours_of(base, transforms, *, weights=lambda base: base):
    folder = open_folder(base)
    make_model = partial(Decoder, folder.config)
    found = weights(open_folder_weights(folder))
    (model,) = build_stages(make_model, solo_parallel(), transforms, weights=found)
    return model.eval()


def logits_of(model, ids):
    corpus = TokenCorpus(ids.flatten().numpy().astype("uint16"), [0, LENGTH, 2 * LENGTH], 64)
    batch = collate_bins(corpus, pack_bins(corpus.lengths, LENGTH), [0, 1])
    call = call_routed if model.config.experts else None
    with torch.no_grad():
        if call is not None:
            return whole_logits(call(model, batch))
        return model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans)


def check_alike(ours, theirs):
    """Compare logits in fp64: what is left are the roundings of stored and merged weights."""
    ours, theirs = ours.double(), theirs.double()
    ids = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(ids).logits
    far = (logits_of(ours, ids) - wanted).abs().max() / wanted.abs().max()
    assert far < 1e-5


@pytest.mark.filterwarnings("ignore")  # what PEFT says of tied weights
@pytest.mark.parametrize("row", THEIRS)
def test_what_peft_has_written_computes_the_same_here(row, bases, tmp_path):
    import peft

    kind, modules, make_config = THEIRS[row]
    base = bases(kind)
    settings = make_config(modules)
    theirs = peft.get_peft_model(theirs_of(base), settings).eval()
    randomised_(theirs.named_parameters())
    if "lm_head" in (settings.modules_to_save or ()) and "tied" in kind:
        saved = [p for name, p in theirs.named_parameters() if "modules_to_save" in name]
        saved[-1].data = saved[0].data.clone()
    theirs.save_pretrained(tmp_path)
    folder = open_folder(base)
    found = read_peft(tmp_path, folder.family, folder.config)
    add = lora(*found.loras, trained=found.trained, values=found.values)
    ours = ours_of(base, [add], weights=found.weights)
    check_alike(ours, theirs)
    plain = ours_of(base, [])
    with pytest.raises(AssertionError):
        check_alike(plain, theirs)  # the adapter does something


@pytest.mark.filterwarnings("ignore")  # what PEFT says of tied weights
def test_an_embedding_that_peft_trains_apart_from_its_tied_head_is_refused(bases, tmp_path):
    import peft

    base = bases("llama tied, scaled")
    settings = peft_config(["v_proj"], modules_to_save=["embed_tokens"])
    theirs = peft.get_peft_model(theirs_of(base), settings).eval()
    randomised_(theirs.named_parameters())
    own = theirs.base_model.model
    head, embedding = own.lm_head.weight, own.model.embed_tokens.modules_to_save.default.weight
    assert (head - embedding).abs().max() > 0.1  # PEFT's own head has not moved
    theirs.save_pretrained(tmp_path)
    folder = open_folder(base)
    with pytest.raises(CheckpointError, match="embed_tokens is trained and the head is not"):
        read_peft(tmp_path, folder.family, folder.config)


def saved_run(base, loras, trained, folder):
    """Write a checkpoint of our model with random adapters, and return the model."""
    ps = solo_parallel()
    ours = ours_of(base, [lora(*loras, trained=trained)])
    randomised_(get_named_parameters([ours]).items())
    facts = adapters.exclude_frozen_([ours], ps, source=base)
    facts |= {"model": attrs.asdict(ours.config)}
    optimizer = adamw(decay_groups(get_named_parameters([ours]), weight_decay=0.0), lr=0.1)
    save_checkpoint(folder, TrainState(), [ours], optimizer, ps, facts=facts)
    return ours


@pytest.mark.filterwarnings("ignore")  # what PEFT says of tied weights
@pytest.mark.parametrize("row", OURS)
def test_peft_computes_the_same_from_what_a_run_has_learnt(row, bases, tmp_path):
    import peft

    kind, loras, trained = OURS[row]
    base = bases(kind)
    ours = saved_run(base, loras, trained, tmp_path / "run")
    adapters.export_peft(tmp_path / "run", tmp_path / "there")
    theirs = peft.PeftModel.from_pretrained(theirs_of(base), tmp_path / "there").eval()
    check_alike(ours, theirs)
    back = read_peft(tmp_path / "there", open_folder(base).family, ours.config)
    add = lora(*back.loras, trained=back.trained, values=back.values)
    check_alike(ours_of(base, [add], weights=back.weights), theirs)
    saved = read_adapters(tmp_path / "run")
    weights = partial(merge_weights, saved)
    check_alike(ours_of(base, [], weights=weights), theirs)


# ------------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def written(bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    saved_run(bases("llama"), [Lora(ATTENTION, rank=3)], "head", folder / "run")
    adapters.export_peft(folder / "run", folder / "there")
    return folder / "there"


def changed(folder, written, *, settings=None, tensors=None):
    config = json.loads((written / "adapter_config.json").read_text()) | (settings or {})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    held = load_file(written / "adapter_model.safetensors")
    held = {name: x for name, x in (held | (tensors or {})).items() if x is not None}
    save_file(held, folder / "adapter_model.safetensors")
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_bias": True}, "lora_bias is True, which is not known here"),
        ({"use_better": {"x": 1}}, "use_better is {'x': 1}, which is not known here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', not 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern has '(', which is no regular"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern has '(', which is no regular"),
        ({"r": 5}, "q_proj has the rank 3, and adapter_config.json says 5"),
        ({"rank_pattern": {"q_proj": 2}}, "has the rank 3, and adapter_config.json"),
        ({"r": "3"}, "r is '3', not a whole number above 0"),
        ({"lora_alpha": None}, "lora_alpha is None, not a number above 0"),
        ({"lora_dropout": [0.1]}, "lora_dropout is [0.1], not a number in [0, 1)"),
        ({"alpha_pattern": [3]}, "alpha_pattern is [3], not a table of numbers"),
        ({"alpha_pattern": {"q": "3"}}, "not a table of numbers above 0"),
        ({"use_rslora": "false"}, "use_rslora is 'false', not true or false"),
        ({"use_dora": True}, "which are no adapter of 32 outputs"),
    ],
)
def test_settings_that_would_change_what_is_computed_are_refused_by_name(
    settings, message, bases, written, tmp_path
):
    folder = open_folder(bases("llama"))
    with pytest.raises((ConfigError, CheckpointError)) as refusal:
        read_peft(changed(tmp_path, written, settings=settings), folder.family, folder.config)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_B.weight": None}, "q_proj has one of lora_A and lora_B alone"),
        ({f"{Q}.lora_B.weight": torch.ones(31, 3)}, "no adapter of 32 outputs"),
        ({f"{Q}.lora_A.weight": torch.ones(3, 33)}, "32 outputs and 32 inputs"),
        ({f"{Q}x.lora_A.weight": torch.ones(3, 3)}, "q_projx.lora_A.weight of the"),
        ({f"{Q}.lora_embedding_A": torch.ones(3, 3)}, "of a kind that is not known"),
        ({"base_model.model.lm_head.weight": torch.ones(3, 32)}, "the shape [3, 32]"),
        ({"base_model.model.score.weight": torch.ones(3)}, "score.weight has no"),
    ],
)
def test_tensors_that_would_change_what_is_computed_are_refused_by_name(
    tensors, message, bases, written, tmp_path
):
    folder = open_folder(bases("llama"))
    with pytest.raises((ConfigError, CheckpointError)) as refusal:
        read_peft(changed(tmp_path, written, tensors=tensors), folder.family, folder.config)
    assert message in str(refusal.value)


def test_what_peft_has_no_place_for_is_refused(bases, tmp_path):
    mixed = [Lora("**wq", dora=True), Lora("**wv")]
    saved_run(bases("llama"), mixed, None, tmp_path / "mixed")
    with pytest.raises(ConfigError, match="DoRA in all of an adapter or in none"):
        adapters.export_peft(tmp_path / "mixed", tmp_path / "there")
    experts = [Lora("**experts.up", dora=True)]
    saved_run(bases("mixtral"), experts, None, tmp_path / "experts")
    with pytest.raises(ConfigError, match=r"PEFT has no DoRA for experts, and layers.0.mlp.exp"):
        adapters.export_peft(tmp_path / "experts", tmp_path / "there")
    saved_run(bases("phi3"), [Lora("**wq", dora=True)], None, tmp_path / "part")
    with pytest.raises(ConfigError, match=r"attention.wk; layers.0.attention.wv of it has no DoRA"):
        adapters.export_peft(tmp_path / "part", tmp_path / "there")
    saved_run(bases("phi3"), [Lora("**wq")], "layers.0.mlp.up", tmp_path / "half")
    with pytest.raises(ConfigError, match="gate_up_proj whole, and here it is trained in part"):
        adapters.export_peft(tmp_path / "half", tmp_path / "there")


def test_an_adapter_that_no_module_of_peft_holds_is_refused(bases):
    folder = open_folder(bases("llama"))
    factors = LowRankFactors(torch.ones(2, 32), torch.ones(32, 2), 1.0)
    known = {"layers.0.attention.wq": factors}
    for held in ({"layers.0.other": factors}, known | {"layers.0.other": factors}):
        with pytest.raises(ConfigError, match=r"no module for the adapters of layers\.0\.other;"):
            to_peft(held, {}, folder.family, folder.config, base=None)
    packed = open_folder(bases("gpt_oss"))
    held = {"layers.0.mlp.experts.up": factors}  # in turns with the gate, in one tensor
    with pytest.raises(ConfigError, match=r"no module for the adapters of layers\.0\.mlp\.experts"):
        to_peft(held, {}, packed.family, packed.config, base=None)
    with pytest.raises(ConfigError, match="no matrix has an adapter"):
        to_peft({}, {}, folder.family, folder.config, base=None)
    settings, _ = to_peft(known, {}, folder.family, folder.config, base=None)
    assert settings["target_modules"] == ["model.layers.0.self_attn.q_proj"]


# ------------------------------------------------------------------------------------ the command


def exported(*arguments):
    parser = argparse.ArgumentParser()
    export.add(parser)
    return export.run(parser.parse_args([*map(str, arguments)]))


@pytest.mark.filterwarnings("ignore")
def test_the_command_writes_a_folder_of_peft_or_a_whole_model(bases, tmp_path):
    import peft

    base, run = bases("llama"), tmp_path / "run"
    ours = saved_run(base, [Lora(ATTENTION, rank=3)], "head", run)
    report, _ = exported(run, tmp_path / "peft")
    assert report["from"].keys() == {"checkpoint", "step", "run", "state_hash"}
    check_alike(ours, peft.PeftModel.from_pretrained(theirs_of(base), tmp_path / "peft").eval())
    with pytest.raises(ConfigError, match="--dtype, --context would change nothing"):
        exported(run, tmp_path / "no", "--dtype", "bfloat16", "--context", 9)
    whole = "--merge", "--tokenizer", "bytes"
    exported(run, tmp_path / "whole", *whole, "--context", 128)
    merged = ours_of(tmp_path / "whole", [])
    check_alike(merged, peft.PeftModel.from_pretrained(theirs_of(base), tmp_path / "peft").eval())
    with pytest.raises(CheckpointError, match="is another base than the run's"):
        exported(run, tmp_path / "no", *whole, "--context", 9, "--base", tmp_path / "whole")
