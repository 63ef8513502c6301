"""Greedy text of every family is that of `transformers`, token for token."""

import pytest
import torch
from weights.hub import tiny

from trainkit import hub
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder
from trainkit.parallel import build_stages
from trainkit.post.generation import Sampling, generate

PROMPTS = [[3, 14, 15, 9, 26, 53], [58], [9, 7, 9, 32, 38, 46, 26, 43, 38, 32], [50, 28]]
NEW = 16  # more than any window but the widest holds after its prompt


def generate_by_transformers(model, ids, *, mask=None, repetition_penalty=1.0):
    config = tiny.load_transformers().GenerationConfig(
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        repetition_penalty=repetition_penalty,
    )
    return model.generate(ids, attention_mask=mask, generation_config=config)


def theirs_of(model):
    """Return what their generate makes of the prompts, padded on the left."""
    longest = max(map(len, PROMPTS))
    filled = [longest - len(prompt) for prompt in PROMPTS]
    ids = torch.tensor([[0] * n + p for n, p in zip(filled, PROMPTS, strict=True)])
    mask = torch.arange(longest) >= torch.tensor(filled).unsqueeze(1)
    out = generate_by_transformers(model, ids, mask=mask.long())
    return out[:, longest:].tolist()


def models_of(row, home):
    """Return a model of theirs, and ours that has read its folder."""
    theirs = tiny.make_theirs(row)
    theirs.save_pretrained(home)
    folder = hub.open_folder(home, context=tiny.CONTEXT)
    weights = hub.open_folder_weights(folder, dtype=torch.float32)
    (ours,) = build_stages(lambda: Decoder(folder.config), solo_parallel(), [], weights=weights)
    theirs.generation_config.eos_token_id = None
    return theirs, ours


def greedy_of(model, prompts, **sampling):
    """Return what our generate makes of prompts."""
    return [
        completion.ids
        for completion in generate(
            model,
            prompts,
            max_new_tokens=NEW,
            context=128,
            sampling=Sampling(temperature=0, **sampling),
        )
    ]


@pytest.mark.parametrize("row", [*tiny.FEW, *tiny.TOWERS])
def test_greedy_text_is_that_of_transformers(row, tmp_path):
    theirs, ours = models_of(row, tmp_path)
    found = greedy_of(ours, PROMPTS)
    assert found == theirs_of(theirs)
    assert len({*found[0]}) > 1


def test_a_penalty_of_what_stands_there_is_that_of_transformers(tmp_path):
    theirs, ours = models_of("llama", tmp_path)
    (found,) = greedy_of(ours, PROMPTS[:1], repetition_penalty=1.3)
    out = generate_by_transformers(theirs, torch.tensor(PROMPTS[:1]), repetition_penalty=1.3)
    assert [found] == out[:, len(PROMPTS[0]) :].tolist()
    assert [found] != greedy_of(ours, PROMPTS[:1])
