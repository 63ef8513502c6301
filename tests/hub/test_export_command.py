"""`python -m trainkit export`: a run becomes a folder that `transformers` loads, text and all."""

import attrs
import orjson
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit import hub
from trainkit.__main__ import main
from trainkit.batch import batch_of_rows
from trainkit.checkpoint import save_checkpoint
from trainkit.mesh import solo_parallel
from trainkit.models import build_decoder, call_model, decoder_config
from trainkit.tokenizers import open_tokenizer, save_tokenizer, tokenizer_hash, train_bpe
from trainkit.types import TrainState

transformers = pytest.importorskip("transformers")
CONFIG = decoder_config("tiny", layers=2)


def saved_run(home, config=CONFIG, tokenizer="bytes", **facts):
    """Save a run of a decoder as a recipe does; return its model."""
    model = build_decoder(config, seed=1)
    facts = {"config.tokenizer": str(tokenizer), "config.row_length": 256, **facts}
    facts |= {"model": attrs.asdict(config)}
    facts |= {"tokenizer": tokenizer_hash(open_tokenizer(tokenizer))}
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(home, TrainState(step=3), [model], optimizer, solo_parallel(), facts=facts)
    return model


def command(capsys, *words):
    """Run `python -m trainkit export`; return its exit code and what it prints."""
    code = main(["export", *map(str, words)])
    return code, orjson.loads(capsys.readouterr().out)


def test_an_exported_run_is_loaded_with_the_same_logits_and_the_same_ids(tmp_path, capsys):
    model = saved_run(tmp_path / "run")
    code, report = command(capsys, tmp_path / "run", tmp_path / "there", "--shard-bytes", 500_000)
    assert code == 0
    assert sum(name.endswith(".safetensors") for name in report["files"]) > 3
    files = (tmp_path / "there").glob("*.safetensors")
    assert all(file.stat().st_size < 520_000 for file in files)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    assert theirs.config.max_position_embeddings == 256
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 257
    said = tokenizer("def naïve(): <|im_end|>", return_tensors="pt").input_ids
    assert said[0].tolist() == open_tokenizer("bytes").encode("def naïve(): <|im_end|>")
    with torch.no_grad():
        got, want = call_model(model, batch_of_rows(said)), theirs(said).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert tokenizer.decode([256, 104, 105, 257], skip_special_tokens=True) == "hi"
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [
        256,
        257,
        258,
    ]


def test_what_is_exported_comes_in_again_as_it_was(tmp_path, capsys):
    model = saved_run(tmp_path / "run")
    command(capsys, tmp_path / "run", tmp_path / "there")
    folder = hub.open_folder(tmp_path / "there")
    assert attrs.evolve(folder.config, head_dim=None) == CONFIG
    weights = hub.folder_weights(folder)
    for name, p in model.named_parameters():
        assert torch.equal(weights(name, tuple(p.shape), (0,) * p.ndim), p), name


TEXTS = ["<|im_start|>a", "\ud7ff<think>\n\n</think>", "<|eot_id|><|eot_id|", " \x00\x7f\x80", ""]


@example(text="".join(TEXTS))
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(TEXTS)).map("".join)))
def test_the_bytes_of_any_text_have_equal_ids_there(text):
    from tokenizers import Tokenizer

    ours = open_tokenizer("bytes")
    theirs = Tokenizer.from_str(hub.tokenizer_files("bytes")["tokenizer.json"].decode())
    if any(name in text for name in ("<|bos|>", "<|eos|>", "<|pad|>")):
        return
    assert theirs.encode(text).ids == ours.encode(text)
    assert theirs.get_vocab_size() == ours.vocab_size
    assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_a_tokenizer_and_what_lies_beside_it_are_copied_through(tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    save_tokenizer(train_bpe(["low lower lowest"] * 3, vocab_size=270), base / "tokenizer.json")
    (base / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>", "model_max_length": 9}')
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5}')
    (base / "pytorch_model.bin").write_text("not copied")
    saved_run(tmp_path / "run", tokenizer=base)
    code, report = command(capsys, tmp_path / "run", tmp_path / "there", "--dtype", "bfloat16")
    assert code == 0
    assert "pytorch_model.bin" not in report["files"]
    for file in base.glob("*[!n]"):
        assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes()
    values = orjson.loads((tmp_path / "there" / "config.json").read_bytes())
    assert (values["eos_token_id"], values["torch_dtype"]) == ([1, 2], "bfloat16")


def test_a_tokenizer_file_alone_gets_the_files_that_name_its_roles(tmp_path):
    save_tokenizer(train_bpe(["low lower lowest"] * 3, vocab_size=270), tmp_path / "t.json")
    files = hub.tokenizer_files(tmp_path / "t.json")
    for name, data in files.items():
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / name).write_bytes(data)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    assert theirs.eos_token == "<|eos|>"
    assert theirs("lowest").input_ids == open_tokenizer(tmp_path / "t.json").encode("lowest")


def test_another_tokenizer_than_the_runs_is_refused(tmp_path, capsys):
    saved_run(tmp_path / "run")
    save_tokenizer(train_bpe(["low lower lowest"] * 3, vocab_size=270), tmp_path / "t.json")
    words = tmp_path / "run", tmp_path / "there", "--tokenizer", tmp_path / "t.json"
    code, report = command(capsys, *words)
    assert code == 65
    assert "another tokenizer than the run was trained with" in report["error"]
    assert not (tmp_path / "there").exists()


def test_a_folder_that_is_there_stays_unless_an_export_wrote_it(tmp_path, capsys):
    saved_run(tmp_path / "run")
    words = tmp_path / "run", tmp_path / "there"
    assert command(capsys, *words)[0] == 0
    assert command(capsys, *words)[0] == 64
    assert command(capsys, *words, "--overwrite")[0] == 0
    (tmp_path / "there" / "mine.txt").write_text("mine")
    code, report = command(capsys, *words, "--overwrite")
    assert (code, "mine.txt" in report["error"]) == (64, True)


def test_a_model_of_no_family_is_refused_with_the_reasons(tmp_path, capsys):
    saved_run(tmp_path / "run", attrs.evolve(CONFIG, qk_norm=True, qkv_bias=True))
    code, report = command(capsys, tmp_path / "run", tmp_path / "there")
    assert code == 64
    assert "no known family computes this decoder" in report["error"]


def test_files_of_no_size_are_refused(tmp_path, capsys):
    saved_run(tmp_path / "run")
    code, report = command(capsys, tmp_path / "run", tmp_path / "there", "--shard-bytes", 0)
    assert (code, "at least 1, got 0" in report["error"]) == (64, True)
