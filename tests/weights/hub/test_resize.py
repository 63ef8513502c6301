"""A vocabulary gets more rows: equal bits in any layout, and `transformers` loads the result."""

import attrs
import pytest
import torch
from weights.hub import tiny

from trainkit import hub
from trainkit.batch import batch_from_rows
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import Decoder, build_decoder, call_model, init_weights, make_decoder_config
from trainkit.parallel import (
    build_stages,
    fsdp,
    get_local_box,
    get_named_parameters,
    tensor_parallel,
)
from trainkit.text.tokenizers import add_tokens, open_hf_tokenizer, save_tokenizer, train_bpe
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, DataError, Layout, TrainState
from trainkit.weights.checkpoint import save_checkpoint

LAYOUTS = (Layout(tp=2), Layout(dp_shard=2), Layout(pp=2))
NAMES = ("embedding.weight", "head.weight")


def test_any_box_of_new_rows_has_the_bits_of_the_whole():
    config = make_decoder_config("tiny", vocab_size=9000, width=64)
    weights = init_weights(config, seed=0)
    whole = weights(NAMES[0], (9000, 64), (0, 0))
    more = hub.resize_weights(weights, config, vocab_size=9008)
    new = more(NAMES[0], (9008, 64), (0, 0))
    assert torch.equal(new[:9000], whole)
    want = whole.double().mean(0).float().expand(8, 64)
    torch.testing.assert_close(new[9000:], want, rtol=1e-5, atol=1e-8)
    for first, rows, column, columns in ((8990, 18, 3, 7), (9001, 2, 0, 1), (5, 9, 60, 4)):
        part = more(NAMES[0], (rows, columns), (first, column))
        assert torch.equal(part, new[first : first + rows, column : column + columns])
    assert torch.equal(more("norm.weight", (64,), (0,)), torch.ones(64))
    larger = attrs.evolve(config, vocab_size=9008)
    noise = init_weights(larger, seed=3)
    drawn = hub.resize_weights(weights, config, vocab_size=9008, new=noise)
    got = drawn(NAMES[0], (9008, 64), (0, 0))
    assert torch.equal(got, torch.cat([whole, noise(NAMES[0], (8, 64), (9000, 0))]))


def test_fewer_rows_are_refused():
    config = make_decoder_config("tiny", vocab_size=64)
    with pytest.raises(ConfigError, match="63 rows are fewer than the 64"):
        hub.resize_weights(init_weights(config, seed=0), config, vocab_size=63)


def load(home, layout):
    """Read a folder into a larger vocabulary; return the tensors of this rank that are wrong."""
    folder = hub.open_folder(home)
    config = attrs.evolve(folder.config, vocab_size=70)
    whole = hub.resize_weights(hub.open_folder_weights(folder), folder.config, vocab_size=70)
    found, wrong = 0, []
    with parallel_session(layout) as ps:
        plan = [tensor_parallel(), fsdp(layout)]
        weights = hub.open_folder_weights(folder, axis=ps.world)
        made = hub.resize_weights(weights, folder.config, vocab_size=70)
        empty = build_stages(
            lambda: Decoder(config), ps, plan, weights=init_weights(config, seed=0)
        )
        hub.load_folder_weights(home, empty, vocab_size=70, axis=ps.world)
        for stages in (build_stages(lambda: Decoder(config), ps, plan, weights=made), empty):
            for name, p in get_named_parameters(stages).items():
                box = get_local_box(p)
                want = (
                    whole(name, tuple(box.local.shape), box.offset) if box.local.numel() else None
                )
                found += want is not None
                wrong += [name] if want is not None and not torch.equal(box.local, want) else []
    return found, wrong


def load_all(homes, layouts):
    return [load(home, layout) for home in homes for layout in layouts]


def test_a_folder_goes_into_a_larger_vocabulary_in_any_layout(tmp_path):
    homes = {row: str(tmp_path / row) for row in ("qwen3", "phi3")}
    for row, home in homes.items():
        tiny.make_theirs(row).save_pretrained(home)
        assert hub.open_folder(home).config.tied == (row == "qwen3")
    for rank in run_ranks(load_all, 2, [*homes.values()], LAYOUTS):
        for found, wrong in rank:
            assert found > 4
            assert wrong == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_model_and_its_tokenizer_are_loaded_by_transformers(tied, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    plain = train_bpe(["low lower lowest"] * 3, vocab_size=265)
    save_tokenizer(plain, base / "tokenizer.json")
    more = add_tokens(plain, ["<|call|>", "<|done|>"])
    small = make_decoder_config("tiny", layers=1, vocab_size=plain.vocab_size, tied=tied)
    larger = attrs.evolve(small, vocab_size=more.vocab_size + 5)
    weights = hub.resize_weights(init_weights(small, seed=0), small, vocab_size=larger.vocab_size)
    (model,) = build_stages(lambda: Decoder(larger), solo_parallel(), [], weights=weights)
    optimizer = torch.optim.SGD(model.parameters())
    facts = {"model": attrs.asdict(larger)}
    path = save_checkpoint(
        tmp_path / "run", TrainState(), [model], optimizer, solo_parallel(), facts=facts
    )
    files = hub.make_tokenizer_files(base, tokenizer=more)
    hub.export_folder(path, tmp_path / "there", context=64, files=files)
    transformers = tiny.load_transformers()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    text = "lower<|call|>low<|done|>"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == [more.bos_id, *more.encode(text)]
    assert open_hf_tokenizer(tmp_path / "there").encode(text) == more.encode(text)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "lowerlow"
    assert theirs.config.vocab_size == larger.vocab_size
    with torch.no_grad():
        got, want = theirs(ids).logits, call_model(model, batch_from_rows(ids))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    old = build_decoder(small, seed=0)
    for own, its in zip(model.parameters(), old.parameters(), strict=True):
        assert torch.equal(own[: len(its)], its)


def test_a_tokenizer_with_more_ids_than_rows_is_refused_unless_more_rows_are_asked_for(tmp_path):
    tiny.make_theirs("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has 271 ids, and the embedding of .* has 64 rows"):
        hub.read_init_config(tmp_path, vocab_size=271)
    assert hub.read_init_config(tmp_path, vocab_size=271, resize=True).vocab_size == 272
    assert hub.read_init_config(tmp_path, vocab_size=60, resize=True).vocab_size == 64


def test_a_token_that_is_an_ordinary_one_cannot_become_special():
    plain = train_bpe(["low lower lowest"] * 3, vocab_size=265)
    with pytest.raises(DataError, match="'low' is empty, or an ordinary token"):
        add_tokens(plain, ["low"])
    again = add_tokens(add_tokens(plain, ["<|a|>"]), ["<|eos|>", "<|a|>"])
    assert again.special_ids["<|a|>"] == plain.vocab_size
    assert again.vocab_size == plain.vocab_size + 1
    assert "<|a|>" not in plain.special_ids
