"""Unusual folders, made by `transformers`, are trained and exported, or rejected with a reason."""

import json
import shutil

import attrs
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from weights.hub import tiny

import trainkit as tk
from trainkit import adapters, hub
from trainkit.__main__ import main
from trainkit.models.decoder import Decoder, whole_logits
from trainkit.text.tokenizers.hf import map_letters_to_bytes
from trainkit.types import CheckpointError, ConfigError, DataError, TrainState

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def folder_of(home, *, kind="ForCausalLM", words=60, shard_size="5GB"):
    """Write a tiny Llama and a tokenizer of fewer ids than it has rows."""
    transformers, changes = tiny.load_transformers(), tiny.ROWS["llama"][1]
    config = transformers.LlamaConfig.from_dict(tiny.SIZES | changes | {"pad_token_id": 0})
    model = getattr(transformers, f"Llama{kind}")(config)
    model.save_pretrained(home, max_shard_size=shard_size)
    vocabulary = {letter: i for i, letter in enumerate(sorted(map_letters_to_bytes())[:words])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(home / "tokenizer.json"))
    return home


def say(home, *left_out, **changes):
    file = home / "config.json"
    values = {k: x for k, x in json.loads(file.read_text()).items() if k not in left_out}
    file.write_text(json.dumps(values | changes))


def through(home, out):
    """Train a folder for two steps, export it; return what `transformers` makes of it, and ours."""
    trained, ps = hub.open_model(home), tk.solo_parallel()
    make_model = lambda: Decoder(trained.config, head="hidden")  # noqa: E731
    stages = tk.build_stages(make_model, ps, [], weights=adapters.open_base_weights(home))
    params = tk.get_parameters(stages)
    optimizer = tk.optim.adamw(params, lr=1e-2)
    batch = tk.batch.batch_from_rows(torch.arange(32).view(2, 16))
    run = tk.make_forward_backward(stages, tk.losses.next_token_linear)
    for _ in range(2):
        run([batch], denominator=tk.count_valid_tokens([batch]))
        tk.clip_and_step(params, optimizer, lr=1e-2, max_norm=1.0)
    facts = {"model": attrs.asdict(trained.config), "config.tokenizer": str(home)}
    facts |= {"config.row_length": 16}
    tk.save_checkpoint(out / "run", TrainState(step=2), stages, optimizer, ps, facts=facts)
    assert main(["export", str(out / "run"), str(out / "there")]) == 0
    auto = tiny.load_transformers()
    theirs = auto.AutoModelForCausalLM.from_pretrained(out / "there")
    with torch.no_grad():
        got, ours = theirs(batch.input_ids).logits, whole_logits(tk.call_model(stages[0], batch))
    torch.testing.assert_close(got, ours, rtol=1e-5, atol=1e-5)
    return auto.AutoTokenizer.from_pretrained(out / "there"), trained.tokenizer


def with_nothing_said(home):
    say(home, "rope_parameters", "dtype", "tie_word_embeddings", rope_scaling=None, rope_theta=50.0)


def with_older_names(home):
    say(home, "rope_parameters", "dtype", torch_dtype="bfloat16", rope_scaling={"type": "default"})


def with_added_tokens(home):
    (home / "added_tokens.json").write_text(json.dumps({"<|x|>": 60}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    (home / "chat_template.jinja").write_text(TEMPLATE)


def with_a_file_twice(home):
    shards = sorted(home.glob("*.safetensors"))
    shutil.copy(shards[0], home / "copy.safetensors")  # which no index names


@pytest.mark.parametrize(
    "change", [with_nothing_said, with_older_names, with_added_tokens, with_a_file_twice]
)
def test_what_is_said_in_other_words_is_trained_and_exported(change, tmp_path):
    size = "20KB" if change is with_a_file_twice else "5GB"
    home = folder_of(tmp_path / "folder", shard_size=size)
    change(home)
    theirs, ours = through(home, tmp_path)
    text = "AB<|x|>A"
    assert theirs(text).input_ids == ours.encode(text)
    assert (60 in ours.encode(text)) == (change is with_added_tokens)
    copied = (tmp_path / "there" / "chat_template.jinja").exists()
    assert copied == (change is with_added_tokens)


def with_rope_of_another_kind(home):
    say(home, rope_parameters=None, rope_theta=50.0, rope_scaling={"type": "ntk", "factor": 2.0})


def in_a_pickle(home):
    (home / "model.safetensors").rename(home / "pytorch_model.bin")


def of_sentencepiece(home):
    (home / "tokenizer.json").rename(home / "tokenizer.model")


def lacking_a_shard(home):
    sorted(home.glob("*.safetensors"))[1].unlink()


def with_a_shard_in_place_of_another(home):
    first, second, *_ = sorted(home.glob("*.safetensors"))
    shutil.copy(first, second)


def that_lists_added_tokens(home):
    (home / "added_tokens.json").write_text('["<|x|>"]')


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (with_rope_of_another_kind, ConfigError, "rope_type is 'ntk', not default or linear"),
        (in_a_pickle, CheckpointError, "pytorch_model.bin, a pickle, .* checkpoint convert"),
        (of_sentencepiece, DataError, "has tokenizer.model, and no tokenizer.json, .* writes one"),
        (lacking_a_shard, CheckpointError, "model-00002-of-0000.\\.safetensors cannot be read"),
        (with_a_shard_in_place_of_another, CheckpointError, "in model-00002-.*, which it is not"),
        (that_lists_added_tokens, DataError, "added_tokens.json: no JSON object of tokens"),
    ],
)
def test_what_cannot_be_read_is_refused_by_what_it_is(change, error, match, tmp_path):
    size = "20KB" if "shard" in change.__name__ else "5GB"
    home = folder_of(tmp_path / "folder", shard_size=size)
    change(home)
    with pytest.raises(error, match=match):
        adapters.open_base_weights(hub.open_model(home).path)


def test_a_model_with_another_head_is_called_what_it_is(tmp_path):
    home = folder_of(tmp_path / "folder", kind="ForSequenceClassification")
    match = r"says \['LlamaForSequenceClassification'\], but LlamaForCausalLM is supported; lm_h"
    with pytest.raises(CheckpointError, match=match):
        hub.open_folder_weights(hub.open_folder(home))
