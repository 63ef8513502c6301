"""Generation: the draws are functions of seed and place, and the model is left as it was."""

import attrs
import pytest
import torch
from torch import nn

from trainkit.mesh import solo_parallel
from trainkit.models import build_decoder, call_model
from trainkit.models.generate import draw, generate
from trainkit.models.sizes import decoder_config
from trainkit.parallel.generation import bind_call

CONFIG = decoder_config("tiny", width=32, layers=2, mlp_width=48, vocab_size=40)
PROMPT = [3, 1, 4, 1, 5]


class Counter(nn.Module):
    """A model whose next token is the last one plus one; it notes what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.child = nn.Linear(1, 1)
        self.seen = []

    def forward(self, input_ids, *, position_ids, spans):
        self.seen.append((input_ids.tolist(), position_ids.tolist(), spans.lengths.tolist()))
        assert not self.training
        assert not torch.is_grad_enabled()
        return 50 * nn.functional.one_hot((input_ids + 1) % 10, 10).float()


def test_the_window_is_the_last_tokens_with_positions_from_zero():
    model = Counter()
    assert generate(model, [1, 2], max_new_tokens=3, context=3) == [3, 4, 5]
    assert model.seen == [
        ([[1, 2]], [[0, 1]], [2]),
        ([[1, 2, 3]], [[0, 1, 2]], [3]),
        ([[2, 3, 4]], [[0, 1, 2]], [3]),
    ]


def test_the_stop_id_ends_the_text_and_is_left_out():
    assert generate(Counter(), [1, 2], max_new_tokens=9, context=3, stop_id=6) == [3, 4, 5]
    assert generate(Counter(), [1, 2], max_new_tokens=9, context=3, stop_id=3) == []


def test_every_modules_mode_is_restored_even_after_an_error():
    model = Counter().train()
    model.child.eval()
    generate(model, [1], max_new_tokens=1, context=3)
    assert (model.training, model.child.training) == (True, False)
    with pytest.raises(ZeroDivisionError):
        generate(model, [1], max_new_tokens=1, context=3, call=lambda *_: 1 // 0)
    assert (model.training, model.child.training) == (True, False)


def test_a_call_adapts_a_foreign_model():
    table = nn.Embedding.from_pretrained(50 * torch.eye(10).roll(1, dims=1))
    table.weight.requires_grad_(requires_grad=False)
    ids = generate(
        table, [7], max_new_tokens=3, context=4, call=lambda model, batch: model(batch["input_ids"])
    )
    assert ids == [8, 9, 0]


def test_greedy_takes_the_likeliest_token_of_the_logits():
    model = build_decoder(CONFIG, seed=0)
    first = generate(model, PROMPT, max_new_tokens=4, context=16, temperature=0)
    again = generate(model, PROMPT, max_new_tokens=4, context=16, temperature=0, seed=9)
    top = generate(model, PROMPT, max_new_tokens=4, context=16, top_k=1, seed=9)
    assert first == again == top
    assert (
        generate(model, PROMPT + first[:2], max_new_tokens=2, context=16, temperature=0)
        == first[2:]
    )


def test_draws_are_functions_of_seed_and_place():
    model = build_decoder(CONFIG, seed=0)
    options = {"context": 16, "temperature": 1.0}
    first = generate(model, PROMPT, max_new_tokens=8, seed=1, **options)
    torch.manual_seed(0)
    assert first == generate(model, PROMPT, max_new_tokens=8, seed=1, **options)
    assert first != generate(model, PROMPT, max_new_tokens=8, seed=2, **options)
    # Going on with the text so far draws what an uninterrupted run draws.
    assert first[3:] == generate(model, PROMPT + first[:3], max_new_tokens=5, seed=1, **options)


@pytest.mark.parametrize("head", ["logits", "hidden"])
def test_no_id_that_only_rounds_the_vocabulary_up_is_drawn(head):
    model = build_decoder(CONFIG, seed=0, head=head)
    options = {"max_new_tokens": 30, "context": 8, "temperature": 3.0, "seed": 1}
    assert max(generate(model, PROMPT, **options)) >= 7
    few = generate(model, PROMPT, vocab_size=7, **options)
    assert max(few) == 6
    # What is left is a distribution of its own, and the likeliest token is the likeliest of it.
    assert max(generate(model, PROMPT, vocab_size=7, **options, top_k=20)) == 6
    greedy = options | {"temperature": 0.0}
    assert (
        max(generate(model, PROMPT, **greedy))
        >= 7
        > max(generate(model, PROMPT, vocab_size=7, **greedy))
    )
    assert generate(model, PROMPT, vocab_size=40, **options) == generate(model, PROMPT, **options)


def test_the_text_is_uploaded_once_and_none_is_drawn_of_none(monkeypatch):
    uploads = []
    upload = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: uploads.append(a) or upload(*a, **k))
    model = build_decoder(CONFIG, seed=0)
    for call in (call_model, bind_call([model], solo_parallel())):
        uploads.clear()
        assert len(generate(model, PROMPT, max_new_tokens=5, context=16, call=call)) == 5
        assert len(uploads) == 1
    assert generate(model, PROMPT, max_new_tokens=0, context=16) == []


def test_hidden_and_logits_models_write_the_same_text():
    for config in (CONFIG, attrs.evolve(CONFIG, tied=False)):
        texts = [
            generate(build_decoder(config, seed=0, head=head), PROMPT, max_new_tokens=6, context=16)
            for head in ("logits", "hidden")
        ]
        assert texts[0] == texts[1]


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 3.0, -1.0, 2.0])
    places = (torch.arange(4000) + 0.5) / 4000
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 2)):
        tokens = [draw(logits, float(p), temperature=temperature, top_k=top_k) for p in places]
        kept = logits.masked_fill(logits < 2, -torch.inf) if top_k else logits
        want = torch.softmax(kept / temperature, 0)
        got = torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)
        torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


def test_the_end_of_the_range_is_a_token():
    assert draw(torch.zeros(7), 1 - 2**-53, temperature=1.0) == 6
    assert draw(torch.tensor([0.0, -torch.inf]), 1 - 2**-53, temperature=1.0) == 0


@pytest.mark.parametrize(
    ("prompt", "change", "match"),
    [
        ([], {}, "the prompt is empty"),
        ([1], {"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ([1], {"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ([1], {"top_k": 0}, "top_k must be at least 1, got 0"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ([1], {"context": 0}, "context must be at least 1, got 0"),
        ([1], {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(prompt, change, match):
    with pytest.raises(ValueError, match=match):
        generate(Counter(), prompt, **({"max_new_tokens": 1, "context": 4} | change))
