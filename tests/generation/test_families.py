"""Greedy text of every family is that of `transformers`, token for token."""

import pytest
import torch
from hub import tiny

from trainkit import hub
from trainkit.generation import Sampling, generate
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder
from trainkit.parallel import build_stages

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 14, 15, 9, 26, 53], [58], [9, 7, 9, 32, 38, 46, 26, 43, 38, 32], [50, 28]]
NEW = 40
THEIRS = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def theirs_of(model):
    """Return what their generate makes of the prompts, filled up at the left."""
    longest = max(map(len, PROMPTS))
    filled = [longest - len(prompt) for prompt in PROMPTS]
    ids = torch.tensor([[0] * n + p for n, p in zip(filled, PROMPTS, strict=True)])
    mask = torch.arange(longest) >= torch.tensor(filled).unsqueeze(1)
    out = model.generate(ids, attention_mask=mask.long(), **THEIRS)
    return out[:, longest:].tolist()


@pytest.mark.parametrize("row", tiny.ROWS)
def test_greedy_text_is_that_of_transformers(row, tmp_path):
    theirs = tiny.make_theirs(row, transformers)
    theirs.save_pretrained(tmp_path)
    folder = hub.open_folder(tmp_path, context=tiny.CONTEXT)
    weights = hub.folder_weights(folder, dtype=torch.float32)
    (ours,) = build_stages(lambda: Decoder(folder.config), solo_parallel(), [], weights=weights)
    theirs.generation_config.eos_token_id = None
    for penalty in (1.0, 1.3):
        sampling = Sampling(temperature=0, repetition_penalty=penalty)
        how = {"max_new_tokens": NEW, "context": 128, "sampling": sampling}
        found = [completion.ids for completion in generate(ours, PROMPTS, **how)]
        if penalty == 1.0:
            assert found == theirs_of(theirs)
        else:  # theirs takes the filling for a part of the text
            out = theirs.generate(torch.tensor(PROMPTS[:1]), repetition_penalty=penalty, **THEIRS)
            assert found[0] == out[0, len(PROMPTS[0]) :].tolist()
        assert len({*found[0]}) > 1
