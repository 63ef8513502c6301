"""`python -m trainkit export`: `transformers` loads the folder, tokenizer included."""

import importlib.util
import json
from pathlib import Path

import attrs
import orjson
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit import hub
from trainkit.__main__ import main
from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.models import build_decoder, call_model, call_routed, make_decoder_config
from trainkit.models.decoder import whole_logits
from trainkit.post.evaluation.examples import encode_continuation
from trainkit.text.chat import (
    JINJA_SOURCES,
    encode_chat,
    find_stop_ids,
    make_jinja_template,
    read_stop_ids,
    read_template,
)
from trainkit.text.chat.templates import TEMPLATES
from trainkit.text.tokenizers import (
    encode_document,
    open_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_bpe,
)
from trainkit.types import TrainkitError, TrainState
from trainkit.weights.checkpoint import save_checkpoint

transformers = pytest.importorskip("transformers")
CONFIG = make_decoder_config("tiny", layers=2)
GOLDEN = Path(__file__).parents[2] / "text" / "chat" / "golden"


def saved_run(home, config=CONFIG, tokenizer="bytes", router_bias=0.0, facts=()):
    """Save a run of a decoder as a recipe does, without facts that are None; return its model."""
    model = build_decoder(config, seed=1)
    for name, x in model.named_buffers():
        if name.endswith("router.bias"):
            x.copy_(router_bias * torch.sin(torch.arange(x.numel())))
    facts = {
        "config.tokenizer": str(tokenizer),
        "config.row_length": 256,
        "model": attrs.asdict(config),
        "tokenizer": tokenizer_hash(open_tokenizer(tokenizer)),
        **dict(facts),
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(home, TrainState(step=3), [model], optimizer, solo_parallel(), facts=facts)
    return model


def command(capsys, *words):
    """Run `python -m trainkit export`; return its exit code and its output."""
    code = main(["export", *map(str, words)])
    return code, orjson.loads(capsys.readouterr().out)


def test_a_run_that_began_with_a_folder_keeps_its_context(tmp_path, capsys):
    saved_run(tmp_path / "run", facts={"context": 1024})
    assert command(capsys, tmp_path / "run", tmp_path / "there")[0] == 0
    assert hub.open_folder(tmp_path / "there").values["max_position_embeddings"] == 1024
    flags = [tmp_path / "run", tmp_path / "there", "--overwrite", "--context", 512]
    assert command(capsys, *flags)[0] == 0
    assert hub.open_folder(tmp_path / "there").values["max_position_embeddings"] == 512
    found = hub.open_model(tmp_path / "run", context=64)
    assert (found.context, found.full_context) == (64, 1024)
    assert hub.open_model(tmp_path / "run").context == 1024


NO_FLAGS = {"config.tokenizer": None, "config.row_length": None}


def test_the_run_of_a_script_without_flags_says_what_model_it_is(tmp_path, capsys):
    run = tmp_path / "run"
    saved_run(run, facts=NO_FLAGS | {"context": 48})
    assert command(capsys, run, tmp_path / "there")[0] == 0
    assert hub.open_folder(tmp_path / "there").values["max_position_embeddings"] == 48
    found = hub.open_model(run)
    assert (found.config, found.name, found.context) == (CONFIG, "bytes", 48)
    assert hub.open_model(run, context=32).context == 32


@pytest.mark.parametrize(
    ("facts", "error", "given"),
    [
        ({"model": None}, "does not say its model", {}),
        ({"tokenizer": None}, "does not name its tokenizer", {"tokenizer": "bytes"}),
        ({"context": None}, "does not say how long the texts of its", {"context": 9}),
    ],
)
def test_what_a_run_does_not_say_is_asked_for(facts, error, given, tmp_path, capsys):
    run = tmp_path / "run"
    saved_run(run, facts=NO_FLAGS | {"context": 48} | facts)
    code, report = command(capsys, run, tmp_path / "there")
    assert code in (64, 65, 66)
    assert error in report["error"]
    assert next((f"--{name}" for name in given), "run.resume(..., model=config") in report["hint"]
    with pytest.raises(TrainkitError, match=error):
        hub.open_model(run)
    if given:
        assert hub.open_model(run, **given).config == CONFIG
        words = [word for name, x in given.items() for word in (f"--{name}", x)]
        assert command(capsys, run, tmp_path / "there", *words)[0] == 0


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
    ids = tokenizer("def naïve(): <|im_end|>", return_tensors="pt").input_ids
    assert ids[0].tolist() == [256, *open_tokenizer("bytes").encode("def naïve(): <|im_end|>")]
    with torch.no_grad():
        got, want = call_model(model, batch_from_rows(ids)), theirs(ids).logits
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
    weights = hub.open_folder_weights(folder)
    for name, p in model.named_parameters():
        assert torch.equal(weights(name, tuple(p.shape), (0,) * p.ndim), p), name


TEXTS = ["<|im_start|>a", "\ud7ff<think>\n\n</think>", "<|eot_id|><|eot_id|", " \x00\x7f\x80", ""]


@example(text="".join(TEXTS))
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(TEXTS)).map("".join)))
def test_the_bytes_of_any_text_have_equal_ids_there(text):
    from tokenizers import Tokenizer

    ours = open_tokenizer("bytes")
    theirs = Tokenizer.from_str(hub.make_tokenizer_files("bytes")["tokenizer.json"].decode())
    if any(name in text for name in ("<|bos|>", "<|eos|>", "<|pad|>")):
        return
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)
    assert theirs.encode(text).ids == [ours.bos_id, *ours.encode(text)]
    assert theirs.get_vocab_size() == ours.vocab_size
    assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_a_tokenizer_and_what_lies_beside_it_are_copied_through(tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    pieces = train_bpe(["low lower lowest"] * 3, vocab_size=270, special=["<s>", "<|eos|>"])
    save_tokenizer(pieces, base / "tokenizer.json")
    config = '{"eos_token": "<|eos|>", "model_max_length": 9}'
    (base / "tokenizer_config.json").write_text(config)
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
    files = hub.make_tokenizer_files(tmp_path / "t.json")
    for name, data in files.items():
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / name).write_bytes(data)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    assert theirs.eos_token == "<|eos|>"
    ours = open_tokenizer(tmp_path / "t.json")
    assert theirs("lowest").input_ids == [ours.bos_id, *ours.encode("lowest")]
    again = hub.make_tokenizer_files(tmp_path / "there")  # which begins texts with BOS already
    assert again["tokenizer.json"] == files["tokenizer.json"]


def like_gpt2(home):
    """Make a folder whose tokenizer has a BOS that also ends documents, but does not add it."""
    home.mkdir()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = train_bpe(["low lower lowest"] * 3, vocab_size=270, special=special)
    save_tokenizer(made, home / "tokenizer.json")
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False}
    config |= {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    assert theirs("lowest").input_ids == open_tokenizer(home).encode("lowest")  # without
    return home


def test_what_names_a_bos_and_adds_none_has_it_after_texts_and_not_after_conversations(
    tmp_path, capsys
):
    home = like_gpt2(tmp_path / "base")
    saved_run(tmp_path / "run", tokenizer=home, facts={"config.template": "chatml"})
    assert command(capsys, tmp_path / "run", tmp_path / "there")[0] == 0
    assert not hub.open_model(tmp_path / "run").adds_bos
    assert not hub.open_model(tmp_path / "there").adds_bos


@pytest.mark.parametrize("name", ["bytes", "t.json", "gpt2"])
def test_a_run_and_its_export_are_given_the_same_ids(name, tmp_path, capsys):
    if name == "gpt2":
        name = like_gpt2(tmp_path / name)
    elif name != "bytes":
        save_tokenizer(train_bpe(["low lower lowest"] * 3, vocab_size=270), tmp_path / name)
        name = tmp_path / name
    saved_run(tmp_path / "run", tokenizer=name)
    assert command(capsys, tmp_path / "run", tmp_path / "there")[0] == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    run, folder = (hub.open_model(tmp_path / each) for each in ("run", "there"))
    assert run.adds_bos
    assert folder.adds_bos
    for text in ("lowest é", ""):
        pairs = [
            encode_continuation(each.tokenizer, text, " more", add_bos=each.adds_bos)
            for each in (run, folder)
        ]
        assert pairs[0] == pairs[1]
        assert tokenizer(text).input_ids == encode_document(run.tokenizer, text)[:-1].tolist()


def spoken(name):
    """Return the golden conversations of a native template."""
    rows = json.loads((GOLDEN / f"{name}.json").read_text())
    assert any(row.get("tools") for row in rows) == (name != "chatml")
    return rows


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_of_a_run_gives_the_same_ids_in_transformers(name, tmp_path):
    for file, data in hub.make_tokenizer_files("bytes", template=name).items():
        (tmp_path / file).write_bytes(data)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), open_tokenizer("bytes")
    again = read_template(tmp_path)
    for row in spoken(name):
        messages, arguments = row["messages"], row.get("arguments", {})
        segments = TEMPLATES[name](
            messages,
            add_generation_prompt=row.get("add_generation_prompt", False),
            tools=row.get("tools"),
            **arguments,
        )
        want = ours.encode("".join(segment.text for segment in segments))
        hf_names = {"date": "date_string"}  # the same argument is called otherwise there
        got = theirs.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=row.get("add_generation_prompt", False),
            tools=row.get("tools"),
            **{hf_names.get(key, key): value for key, value in arguments.items()},
        )
        assert got == want, row["name"]
        if not arguments and any(message["role"] == "assistant" for message in messages):
            masks = [
                encode_chat(
                    messages, ours, template=each, tools=row.get("tools")
                ).loss_mask.tolist()
                for each in (TEMPLATES[name], again)
            ]
            assert masks[0] == masks[1], row["name"]
    stops = sorted([ours.eos_id, *find_stop_ids(ours, TEMPLATES[name])])
    assert read_stop_ids(tmp_path) == (*stops,)
    assert find_stop_ids(ours, again) == find_stop_ids(ours, TEMPLATES[name])


def test_what_a_template_refuses_its_jinja_refuses():
    user, calls = {"role": "user", "content": "a"}, [{"name": "f", "arguments": {}}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    wrong = {
        "chatml": [([user], [{}]), ([user, called], None)],
        "llama3": [([user, called | {"tool_calls": calls * 2}], None)],
        "qwen3": [([user, {"role": "developer", "content": "a"}], None)],
    }
    wrong["llama3"] += [([{"role": "system", "content": "a"}], [{}]), ([called], [{}])]
    for name, cases in wrong.items():
        native, jinja = TEMPLATES[name], make_jinja_template(JINJA_SOURCES[name], stop="<|im_end|>")
        for messages, tools in cases:
            for template in (native, jinja):
                with pytest.raises(ValueError, match=r"no place|not know|at a time|the tools"):
                    template(messages, tools=tools)


def test_a_folders_template_goes_through_and_another_takes_its_place(tmp_path, capsys):
    base, other = tmp_path / "base", tmp_path / "other"
    for home, home_source in ((base, "{{ 'x' + eos_token }}"), (other, JINJA_SOURCES["qwen3"])):
        home.mkdir()
        for file, data in hub.make_tokenizer_files("bytes").items():
            (home / file).write_bytes(data)
        (home / "chat_template.jinja").write_text(home_source)
    more = base / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ 'y' + eos_token }}")
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 257], "top_k": 5}')
    saved_run(tmp_path / "run", tokenizer=base, facts={"config.template": str(base)})
    base.rename(tmp_path / "moved")
    code, _ = command(
        capsys, tmp_path / "run", tmp_path / "there", "--tokenizer", tmp_path / "moved"
    )
    assert code == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    messages = [{"role": "user", "content": "a"}]
    for tools, want in ((None, "x"), ([{"name": "f"}], "y")):
        got = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        ours = read_template(tmp_path / "there")(messages, tools=tools)
        assert got == f"{want}<|eos|>" == "".join(segment.text for segment in ours)
    for template in (str(other), "qwen3"):
        files = hub.make_tokenizer_files(tmp_path / "moved", template=template)
        assert files["chat_template.jinja"].decode() == JINJA_SOURCES["qwen3"]
        assert b"chat_template" not in files["tokenizer_config.json"]
        ids = [3, 257, *find_stop_ids(open_tokenizer("bytes"), TEMPLATES["qwen3"])]
        generation = {"eos_token_id": ids, "top_k": 5}
        assert orjson.loads(files["generation_config.json"]) == generation


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


def recipe(name):
    """Return a recipe as a module."""
    path = Path(__file__).parents[3] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_of_the_recipe_for_experts_is_loaded_by_transformers(tmp_path, capsys):
    moe = recipe("moe")
    config = attrs.evolve(moe.choose_model(moe.Config(), open_tokenizer("bytes")), layers=2)
    model = saved_run(tmp_path / "run", config, router_bias=0.3)
    code, _ = command(capsys, tmp_path / "run", tmp_path / "there")
    assert code == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there").eval()
    assert theirs.config.model_type == "glm4_moe"
    ids = torch.arange(60).view(2, 30)
    with torch.no_grad():
        got, want = whole_logits(call_routed(model, batch_from_rows(ids))), theirs(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_model_of_no_family_is_refused_with_the_reasons(tmp_path, capsys):
    saved_run(tmp_path / "run", attrs.evolve(CONFIG, qk_norm=True, qkv_bias=True))
    code, report = command(capsys, tmp_path / "run", tmp_path / "there")
    assert code == 64
    assert "no known family computes this decoder" in report["error"]


def test_files_of_no_size_are_refused(tmp_path, capsys):
    saved_run(tmp_path / "run")
    code, report = command(capsys, tmp_path / "run", tmp_path / "there", "--shard-bytes", 0)
    assert (code, "at least 1, got 0" in report["error"]) == (64, True)
