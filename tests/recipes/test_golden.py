"""The recipes train on the batches that they have always trained on, to the same numbers.

`golden.json` holds 20 steps of each, on one process. Batch hashes and token counts are integers.
The steps are computed in fp64: processors take sums in different orders, which 20 steps in fp32
amplify to 1e-2 of a gradient norm, and 20 steps in fp64 to 1e-12.
"""

import json
from pathlib import Path

import attrs
import pytest
import torch
from recipe_runs import column, here

from trainkit import models, optim
from trainkit.mesh import solo_parallel
from trainkit.parallel import precision
from trainkit.text.tokenizers import open_tokenizer
from trainkit.types import TrainState
from trainkit.weights.checkpoint import save_checkpoint

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
FLAGS = "--steps 20 --schedule-steps 20 --rows 4 --microbatch 2 --warmup 2 --seed 5"
SIZES = {"pretrain": 32, "finetune": 64, "long_context": 128}


def write_data(folder):
    """Write what each recipe reads; return where it lies."""
    for i in range(60):
        words = [f"word{(i * j) % 17} = {j}" for j in range(3 + i % 7)]
        place = folder / "text" / str(i % 7)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.txt").write_text("\n".join(words))
    chats = [
        [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}."}]
        for i in range(60)
    ]
    lines = [json.dumps({"messages": messages}) for messages in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    text = folder / "text"
    return {"pretrain": text, "finetune": folder / "chats.jsonl", "long_context": text}


def untrained(folder):
    """Save a checkpoint of the weights that a run begins with which has nothing to begin with."""
    size = models.pad_vocab_size(open_tokenizer("bytes").vocab_size)
    model = models.build_decoder(models.make_decoder_config("tiny", vocab_size=size), seed=5)
    facts = {"model": attrs.asdict(model.config), "config.tokenizer": "bytes"}
    facts |= {"config.row_length": 64}
    optimizer = optim.adamw(model.parameters(), lr=1.0)
    save_checkpoint(folder, TrainState(), [model], optimizer, solo_parallel(), facts=facts)
    return folder


def flags_of(recipe, data, out):
    flags = [*FLAGS.split(), "--row-length", SIZES[recipe], "--data", data[recipe], "--out", out]
    flags += ["--init", untrained(out.parent / "begin")] if recipe == "finetune" else []
    return flags if recipe == "long_context" else [*flags, "--cache", "None", "--eval-every", 0]


@pytest.fixture
def fp64(monkeypatch):
    """Make models, and what `--storage fp32` stores and computes in, fp64."""
    monkeypatch.setitem(precision.DTYPES, "fp32", torch.float64)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("recipe", SIZES)
def test_twenty_steps_are_those_of_old(recipe, tmp_path):
    code, said = here(flags_of(recipe, write_data(tmp_path), tmp_path / "run"), recipe, layers=4)
    assert code == 0, said
    wanted = GOLDEN[recipe]
    for name in ("batch_hash", "tokens_total"):
        assert column(tmp_path / "run", name) == wanted[name], name
    for name in ("lr", "loss", "grad_norm"):
        assert column(tmp_path / "run", name) == pytest.approx(wanted[name], rel=1e-10), name
