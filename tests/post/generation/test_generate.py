"""Generation: noise depends on seed, row and position alone, and the model is left unchanged."""

from functools import partial

import attrs
import pytest
import torch
from torch import nn

from trainkit.mesh import solo_parallel
from trainkit.models import build_decoder, call_model, call_routed
from trainkit.models.config import Experts, Latents
from trainkit.models.decoder_sizes import make_decoder_config
from trainkit.parallel import compile_blocks, make_call, make_stages
from trainkit.post.generation import Sampling, generate
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.types import NumericsError

CONFIG = make_decoder_config("tiny", width=32, layers=2, mlp_width=48, vocab_size=40)
GROUPED = attrs.evolve(CONFIG, kv_heads=2, qk_norm=True)
LATENT = attrs.evolve(
    CONFIG, kv_heads=4, latents=Latents(query_rank=12, kv_rank=8, plain=6, rotary=4, values=10)
)
ROUTED = attrs.evolve(CONFIG, experts=Experts(count=4, top_k=2, width=16, first=1))
PROMPT = [3, 1, 4, 1, 5]
PROMPTS = [PROMPT, [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]
GREEDY = Sampling(temperature=0)


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


def ids_of(*given, **how):
    return [found.ids for found in generate(*given, **how)]


def one(model, prompt, **how):
    ((ids),) = ids_of(model, [prompt], **how)
    return ids


def double(config):
    return build_decoder(config, seed=0).double()


def test_the_window_is_the_last_tokens_with_positions_from_zero():
    model = Counter()
    assert one(model, [1, 2], max_new_tokens=3, context=3, slide=True) == [3, 4, 5]
    assert model.seen == [
        ([[1, 2]], [[0, 1]], [2]),
        ([[1, 2, 3]], [[0, 1, 2]], [3]),
        ([[2, 3, 4]], [[0, 1, 2]], [3]),
    ]


def test_any_of_several_stop_ids_ends_a_text_and_is_left_out():
    assert one(Counter(), [1, 2], max_new_tokens=9, context=20, stop_ids=[8, 6, None]) == [3, 4, 5]
    (found,) = generate(Counter(), [[1, 2]], max_new_tokens=9, context=20, stop_ids=[3])
    assert (found.ids, found.text, found.ended) == ([], None, "stop_id")


def test_every_modules_mode_is_restored_even_after_an_error():
    model = Counter().train()
    model.child.eval()
    generate(model, [[1]], max_new_tokens=1, context=3)
    assert (model.training, model.child.training) == (True, False)
    with pytest.raises(ZeroDivisionError):
        generate(model, [[1]], max_new_tokens=1, context=3, call=lambda *_: 1 // 0)
    assert (model.training, model.child.training) == (True, False)


def test_a_call_adapts_a_foreign_model_whose_rows_are_run_by_themselves():
    table = nn.Embedding.from_pretrained(50 * torch.eye(10).roll(1, dims=1))
    table.weight.requires_grad_(requires_grad=False)
    assert ids_of(
        table,
        [[7], [1, 2]],
        max_new_tokens=3,
        context=5,
        call=lambda model, batch: model(batch["input_ids"]),
    ) == [[8, 9, 0], [3, 4, 5]]


# --------------------------------------------------------------------------------- with a cache


DRAWN = Sampling(seed=1, top_p=0.9, repetition_penalty=1.2)
CACHED = [(CONFIG, DRAWN), (GROUPED, GREEDY), (LATENT, DRAWN), (ROUTED, GREEDY)]
ALONE = [(CONFIG, GREEDY), (GROUPED, DRAWN), (LATENT, GREEDY), (ROUTED, DRAWN)]  # both of it above


@pytest.mark.parametrize(
    ("config", "sampling"),
    [*CACHED, *(pytest.param(*row, marks=pytest.mark.only_all) for row in ALONE)],
)
def test_a_cache_gives_the_text_of_computing_all_again(config, sampling):
    model = double(config)
    call = call_routed if config.experts else call_model
    cached = ids_of(model, PROMPTS, max_new_tokens=12, context=24, sampling=sampling)
    assert cached == ids_of(
        model, PROMPTS, max_new_tokens=12, context=24, sampling=sampling, call=call
    )
    stop = {cached[0][3], cached[2][7]}  # rows leave, and one of those that stay was the last
    stopped = generate(
        model, PROMPTS, max_new_tokens=12, context=24, sampling=sampling, stop_ids=stop
    )
    for found, ids in zip(stopped, cached, strict=True):
        end = next((i for i, token in enumerate(ids) if token in stop), len(ids))
        assert found.ids == ids[:end]
        assert found.ended == ("length" if end == len(ids) else "stop_id")
    slide = partial(
        ids_of, model, PROMPTS, max_new_tokens=14, context=10, slide=True, sampling=sampling
    )
    assert slide() == slide(call=call)
    stop = {slide()[2][3]}  # the longest leaves
    assert slide(stop_ids=stop) == slide(stop_ids=stop, call=call)


def test_a_rows_text_depends_on_its_id_and_not_on_its_batch():
    model = double(CONFIG)
    together = ids_of(model, PROMPTS, max_new_tokens=10, context=24)
    for i, prompt in enumerate(PROMPTS):
        assert ids_of(model, [prompt], max_new_tokens=10, context=24, row_ids=[i]) == [together[i]]
    order = [2, 0, 3, 1]
    shuffled = ids_of(
        model, [PROMPTS[i] for i in order], max_new_tokens=10, context=24, row_ids=order
    )
    assert shuffled == [together[i] for i in order]
    twice = ids_of(model, [PROMPT, PROMPT], max_new_tokens=10, context=24)
    assert twice[0] != twice[1]
    assert twice[0] == together[0]


def test_a_cache_never_grows_and_a_step_runs_over_one_token_a_row():
    model, sizes, held = double(CONFIG), [], set()
    forward = model.forward

    def watched(ids, *, cache, **how):
        out = forward(ids, cache=cache, **how)
        sizes.append(ids.shape[1])
        held.update((x.data_ptr(), x.shape) for x in cache.keys.values())
        assert out.shape[1] == len(PROMPTS)  # logits of the last tokens only
        return out

    model.forward = watched
    generate(model, PROMPTS, max_new_tokens=6, context=14)
    assert sizes == [sum(map(len, PROMPTS)), *[len(PROMPTS)] * 5]
    assert len(held) == CONFIG.layers
    assert {shape for _, shape in held} == {(4, 4, 14, 8)}


def test_a_compiled_decoder_and_a_layout_of_one_rank_write_the_same():
    model = double(attrs.evolve(CONFIG, layers=1))
    want = ids_of(model, PROMPTS, max_new_tokens=2, context=16)
    assert want == ids_of(
        model,
        PROMPTS,
        max_new_tokens=2,
        context=16,
        call=make_call(make_stages([model], solo_parallel())),
    )
    compile_blocks(backend="eager")(model, solo_parallel())
    assert want == ids_of(model, PROMPTS, max_new_tokens=2, context=16)


def test_greedy_takes_the_likeliest_token_of_the_logits():
    model = build_decoder(CONFIG, seed=0)
    first = one(model, PROMPT, max_new_tokens=4, context=16, sampling=GREEDY)
    again = one(model, PROMPT, max_new_tokens=4, context=16, sampling=attrs.evolve(GREEDY, seed=9))
    top = one(model, PROMPT, max_new_tokens=4, context=16, sampling=Sampling(top_k=1, seed=9))
    assert first == again == top
    longer = PROMPT + first[:2]
    assert one(model, longer, max_new_tokens=2, context=16, sampling=GREEDY) == first[2:]


def test_draws_are_functions_of_seed_and_place():
    model = build_decoder(CONFIG, seed=0)
    draw = partial(one, model, context=16)
    first = draw(PROMPT, max_new_tokens=8, sampling=Sampling(seed=1))
    torch.manual_seed(0)
    assert first == draw(PROMPT, max_new_tokens=8, sampling=Sampling(seed=1))
    assert first != draw(PROMPT, max_new_tokens=8, sampling=Sampling(seed=2))
    # A text that is continued gets the tokens of an uninterrupted run.
    assert first[3:] == draw(PROMPT + first[:3], max_new_tokens=5, sampling=Sampling(seed=1))


@pytest.mark.parametrize("head", ["logits", "hidden"])
def test_no_id_that_only_rounds_the_vocabulary_up_is_drawn(head):
    model = build_decoder(CONFIG, seed=0, head=head)
    draw = partial(one, model, PROMPT, max_new_tokens=30, context=40)
    hot = Sampling(temperature=3.0, seed=1)
    assert max(draw(sampling=hot)) >= 7
    assert max(draw(vocab_size=7, sampling=hot)) == 6
    # Filters and argmax apply to the distribution over the smaller vocabulary.
    top = attrs.evolve(hot, top_k=20, repetition_penalty=1.1)
    assert max(draw(vocab_size=7, sampling=top)) == 6
    assert max(draw(sampling=GREEDY)) >= 7 > max(draw(vocab_size=7, sampling=GREEDY))
    assert draw(vocab_size=40, sampling=hot) == draw(sampling=hot)


def test_none_is_drawn_of_none():
    model = build_decoder(CONFIG, seed=0)
    assert ids_of(model, [PROMPT], max_new_tokens=0, context=16) == [[]]
    assert generate(model, [], max_new_tokens=5, context=16) == []


def test_hidden_and_logits_models_write_the_same_text():
    for config in (CONFIG, attrs.evolve(CONFIG, tied=False)):
        texts = [
            one(build_decoder(config, seed=0, head=head), PROMPT, max_new_tokens=6, context=16)
            for head in ("logits", "hidden")
        ]
        assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------------- text


def spelled(text):
    """Return a function that generates with a model of a fixed text, whatever the prompt."""
    ids = [*text.encode(), 257]

    def call(_, batch):
        place = batch["input_ids"].shape[1] - 2
        return 50 * nn.functional.one_hot(torch.tensor([[*[0] * (place + 1), ids[place]]]), 259)

    def run(*, stop, stream=None):
        (completion,) = generate(
            nn.Linear(1, 1),
            [[65, 66]],
            max_new_tokens=len(ids),
            context=99,
            stop_ids=[257],
            tokenizer=make_byte_tokenizer(),
            call=lambda model, batch: call(model, batch).float(),
            stop=stop,
            stream=stream,
        )
        return completion

    return run


def test_text_is_streamed_in_whole_characters_and_ends_before_a_stop_string():
    pieces = []
    found = spelled("né, x\nQ: y")(stop=["\n\n", "\nQ:", "zz"], stream=lambda *x: pieces.append(x))
    assert (found.text, found.ids, found.ended) == ("né, x", [*"né, x".encode()], "stop")
    assert pieces == [(0, x) for x in "né, x"]
    pieces.clear()
    found = spelled("a\n€z")(stop=["\nQ"], stream=lambda *x: pieces.append(x))
    assert (found.text, found.ended) == ("a\n€z", "stop_id")
    assert pieces == [(0, "a"), (0, "\n€"), (0, "z")]  # what may begin a stop string waits
    assert spelled("ab\n")(stop=["\nQ"]).text == "ab\n"  # and comes in the end
    assert spelled("ab")(stop="b").text == "a"


# ---------------------------------------------------------------------------------------- refused


class Unused(nn.Module):
    """It must not be run."""

    def __init__(self):
        super().__init__()
        self.config = CONFIG


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([1, 2], "prompts must be rows of token ids, got 1"),
        (["ab"], "prompts must be rows of token ids, got 'ab'"),
        ([[1, 40]], r"prompt 0 has ids from 1 to 40; the model's are in \[0, 40\)"),
        ([[-1]], "prompt 0 has ids from -1 to -1"),
        ([[1], [1, 2, 3, 4]], "prompt 1 has 4 tokens, which with 1 new ones exceed the conte"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_computed(prompts, match):
    with pytest.raises(ValueError, match=match):
        generate(Unused(), prompts, max_new_tokens=1, context=4)


ONE_PROMPT = partial(generate, prompts=[[1]], max_new_tokens=1, context=4)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (partial(ONE_PROMPT, max_new_tokens=-1), "max_new_tokens must be at least 0, got -1"),
        (partial(ONE_PROMPT, context=0), "context must be at least 1, got 0"),
        (partial(ONE_PROMPT, vocab_size=0), "vocab_size must be at least 1, got 0"),
        (partial(ONE_PROMPT, row_ids=[1, 2]), "1 prompts but 2 row_ids"),
        (partial(ONE_PROMPT, stop=["x"]), "stop= needs a tokenizer"),
        (partial(ONE_PROMPT, stream=print), "stream= needs a tokenizer"),
        (partial(ONE_PROMPT, stop=["x", ""]), "a stop string is empty"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(run, match):
    with pytest.raises(ValueError, match=match):
        run(Unused())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1)])
def test_logits_that_are_nan_end_it_by_name(sampling):
    model = build_decoder(CONFIG, seed=0)
    model.norm.weight.data[3] = torch.nan
    with pytest.raises(NumericsError, match="a logit of row 0 is NaN after 0 new tokens"):
        generate(model, PROMPTS, max_new_tokens=2, context=16, sampling=sampling)
