"""Tokenizers in the ways that families have them: the folder opens with the ids of transformers."""

import json

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from trainkit.text.tokenizers import encode_document, open_tokenizer
from trainkit.types import DataError

transformers = pytest.importorskip("transformers")
TEXTS = ["one two", " one", "  two\n\n one", "<s>one</s> two", "é\U0001f44b 12345", "", "<|tool|>x"]
BLANK = "\u2581"


def byte_level(bos):
    """Return a BPE over bytes, as Llama 3, Qwen and GPT-2 have; Llama 3 begins a text with bos."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    train(made, pre_tokenizers.ByteLevel.alphabet())
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return made


def sentence_piece(steps, decoder, pre_tokenizer=None):
    """Return a BPE over characters with bytes for the rest, as converted from SentencePiece."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = None if steps is None else normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoder
    train(made, [])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def train(made, alphabet):
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([f"one two one{BLANK}two {BLANK}one 12"] * 3, trainer)
    made.add_special_tokens(["<|tool|>"])


def llama2(prepend):
    steps = [normalizers.Prepend(BLANK)] if prepend else []
    steps.append(normalizers.Replace(" ", BLANK))
    back = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    back += [decoders.Strip(" ", 1, 0)] if prepend else []
    return sentence_piece(steps, decoders.Sequence(back))


WAYS = {
    "byte level": lambda: byte_level(bos=False),
    "byte level that begins with bos": lambda: byte_level(bos=True),
    "sentencepiece, legacy: a blank before a text": lambda: llama2(prepend=True),
    "sentencepiece without it, as Gemma": lambda: llama2(prepend=False),
    "sentencepiece, not legacy: Metaspace": lambda: sentence_piece(
        None,
        decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]),
        pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="first", split=False),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_opens_with_the_ids_of_transformers(way, tmp_path):
    made = WAYS[way]()
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"legacy": False}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = open_tokenizer(tmp_path)
    begins = made.post_processor is not None
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        # The post-processor's bos is the one that begins our documents; eos ends them too.
        want = theirs(text).input_ids if begins else [theirs.bos_token_id, *ids]
        assert encode_document(ours, text).tolist() == [*want, theirs.eos_token_id]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert [[*ids] for ids in ours.encode_batch(TEXTS)] == [ours.encode(text) for text in TEXTS]
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "spiece.model"])
def test_a_folder_without_tokenizer_json_is_refused_with_what_makes_one(name, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"tokenizer.json.*save_pretrained") as it:
        open_tokenizer(tmp_path)
    assert name in str(it.value)
