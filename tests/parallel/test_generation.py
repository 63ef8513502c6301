"""A text is the same in every layout, for the same seed."""

from functools import partial

import attrs
import numpy as np
import pytest
import torch
from whole_step import CONFIG

import trainkit as tk
from trainkit.batch import make_padding_batch
from trainkit.models import Decoder, call_model, call_routed, init_weights
from trainkit.models.call import CachedCall
from trainkit.models.config import Experts
from trainkit.parallel import (
    expert_parallel,
    fsdp,
    make_call,
    make_stages,
    sequence_parallel,
    tensor_parallel,
)
from trainkit.post.generation import Sampling, generate, generate_sharded
from trainkit.post.generation.call_together import call_together, is_sharded_model
from trainkit.text.tokenizers.bytes import ByteTokenizer, make_byte_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import NumericsError

SMALL = attrs.evolve(CONFIG, vocab_size=32, attention_sinks=True)
ROUTED = attrs.evolve(SMALL, experts=Experts(count=4, top_k=2, width=16, bias=True, clamp=1.0))
PROMPTS = [[3, 1, 4], [5, 9, 2, 6, 5]]
LAYOUTS = [
    pytest.param(
        2,
        [
            tk.Layout(pp=2),
            tk.Layout(tp=2),
            tk.Layout(ring=2),
            tk.Layout(ulysses=2),
            tk.Layout(),
            tk.Layout(ep=2),
        ],
        id="2",
    ),
    pytest.param(4, [tk.Layout(pp=2, tp=2), tk.Layout(ring=2, ulysses=2)], id="4"),
    pytest.param(
        4,
        [tk.Layout(tp=2, ep=2), tk.Layout(pp=2, ring=2)],
        id="4, others",
        marks=pytest.mark.only_all,
    ),
]


def written(layout, number=0, *, is_routed):
    """Return texts, of which some end early and some outgrow the window, and a window's logits."""
    config = attrs.evolve(ROUTED if is_routed else SMALL, tied=number % 2 == 1)
    stop_ids, sampling = [6, 14, 16], Sampling(seed=1)
    draw = partial(generate, max_new_tokens=4, stop_ids=stop_ids, sampling=sampling)
    draw_sharded = partial(generate_sharded, max_new_tokens=4, stop_ids=stop_ids, sampling=sampling)
    with tk.parallel_session(layout) as ps:
        stages = tk.build_stages(
            lambda: Decoder(config, head=("logits", "hidden")[number % 2]).double(),
            ps,
            [tensor_parallel(), sequence_parallel(), expert_parallel(), fsdp()],
            weights=init_weights(config, seed=0),
        )
        call = make_call(stages)
        cached = draw(stages[0], PROMPTS, context=11, call=call)
        of_rows = make_call(stages, sharded=True)
        sharded = draw_sharded(stages[0], PROMPTS, context=11, call=of_rows, axis=ps.dp)
        assert sharded == cached
        slid = draw(stages[0], PROMPTS, context=7, slide=True, call=call)
        anew = make_call(stages, call=call_routed if is_routed else call_model)
        again = draw(stages[0], PROMPTS[:1], context=11, call=anew)
        assert again == cached[:1]
        batch = {**make_padding_batch(1, 5), "input_ids": torch.arange(5)[None]}
        batch["document_ids"] = torch.zeros_like(batch["input_ids"])
        with torch.no_grad():
            logits = anew(stages[0], batch)
        assert all(module.training for stage in stages for module in stage.modules())
        return [(found.ids, found.ended) for found in cached + slid], logits.numpy().copy()


def all_of(layouts):
    return [written(layout, i, is_routed=layout.ep > 1) for i, layout in enumerate(layouts)]


@pytest.mark.parametrize(("world", "layouts"), LAYOUTS)
def test_every_layout_writes_the_same_text_with_the_same_logits_on_every_rank(world, layouts):
    wanted = {}
    for rank in run_ranks(all_of, world, layouts):
        for i, (texts, logits) in enumerate(rank):
            kind = i % 2, layouts[i].ep > 1
            if kind not in wanted:
                wanted[kind] = written(tk.Layout(), i, is_routed=kind[1])
            text, whole = wanted[kind]
            assert texts == text, layouts[i]
            assert logits.shape == whole.shape == (1, 5, 32)
            assert abs(logits - whole).max() < 1e-12 * abs(whole).max()
    assert {ended for texts, _ in wanted.values() for _, ended in texts} == {"stop_id", "length"}


def skewed():
    """Let each rank's logits differ, as the order of a sum may let them, and draw.

    Return what the ranks draw together, what this one draws alone, and what they draw of one prompt
    and of two, which each has a rank of its own for.
    """
    with tk.parallel_session(dp_shard=2) as ps:
        weights = init_weights(SMALL, seed=ps.world.index)
        (model,) = tk.build_stages(lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=weights)
        draw = partial(generate, max_new_tokens=6, context=11)
        together = draw(model, PROMPTS, call=make_call(make_stages([model], ps)))
        draw_sharded = partial(
            generate_sharded,
            max_new_tokens=6,
            context=11,
            call=make_call(make_stages([model], ps), sharded=True),
            axis=ps.dp,
        )
        alone = draw(model, PROMPTS)
        return together, alone, [draw_sharded(model, some) for some in (PROMPTS[:1], PROMPTS)]


def test_every_rank_draws_what_one_rank_draws():
    first, second = run_ranks(skewed, 2)
    assert first[0] == second[0]


def test_a_prompt_is_answered_by_the_rank_that_it_belongs_to():
    """A rank without prompts runs the first one along, and what it draws does not count."""
    (_, first, of_first), (_, second, of_second) = run_ranks(skewed, 2)
    assert of_first == of_second == [first[:1], [first[0], second[1]]]
    assert first[0] != second[0]


def sharded_rows(model, prompts, stop_id):
    """Return the texts of each rank's prompts, and how many rows it ran each time."""
    with tk.parallel_session(dp_shard=2) as ps:
        call, seen = make_call(make_stages([model], ps), sharded=True), []

        def counted(model, batch):
            seen.append(batch["input_ids"].shape[1])
            return call(model, batch)

        draw_sharded = partial(
            generate_sharded,
            max_new_tokens=4,
            context=11,
            stop_ids=[stop_id],
            axis=ps.dp,
            sampling=Sampling(seed=1),
            call=CachedCall(counted),
        )
        found = [draw_sharded(model, some) for some in prompts]
        with pytest.raises(ValueError, match="prompt 1 is empty"):  # which the other rank had
            draw_sharded(model, [[1], []])
        return found, seen


def rows_with_bad_ids(model, prompts):
    """Return what is refused, and what ids in a numpy array and in a list generate."""
    with tk.parallel_session(dp_shard=2) as ps:
        draw = partial(generate_sharded, model, prompts, max_new_tokens=2, context=11, axis=ps.dp)
        refused = []
        for row_ids in ([7], [7, 8, 9, 10], []):
            with pytest.raises(ValueError, match="row_ids") as caught:
                draw(row_ids=row_ids)
            refused.append(str(caught.value))
        return refused, draw(row_ids=np.array([7, 8, 9])), draw(row_ids=[7, 8, 9])


def test_a_wrong_number_of_row_ids_is_refused_on_every_rank_and_an_array_is_accepted():
    (model,) = tk.build_stages(
        lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=init_weights(SMALL, seed=0)
    )
    first, second = run_ranks(rows_with_bad_ids, 2, model, [*PROMPTS, [2]])
    assert first == second
    assert first[1] == first[2]


def error_of_a_nan(model):
    """Let the logits of the second rank become NaN after two tokens, and return the error."""
    with tk.parallel_session(dp_shard=2) as ps:
        call, calls = make_call(make_stages([model], ps), sharded=True), []

        def spoiled(model, batch):
            calls.append(batch)
            logits = call(model, batch)
            return logits * float("nan") if ps.dp.index == 1 and len(calls) > 2 else logits

        with pytest.raises(NumericsError, match="row 0 is NaN after 2 new tokens") as caught:
            generate_sharded(
                model,
                PROMPTS,
                max_new_tokens=5,
                context=11,
                axis=ps.dp,
                call=CachedCall(spoiled),
            )
        return str(caught.value), len(calls)


def test_a_nan_of_one_rank_ends_every_rank():
    (model,) = tk.build_stages(
        lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=init_weights(SMALL, seed=0)
    )
    (first, calls), (second, others) = run_ranks(error_of_a_nan, 2, model)
    assert "rank 1" in first
    assert "rank 1" not in second
    assert calls == others == 3  # none goes on after another has failed


class FailingTokenizer(ByteTokenizer):
    """Decodes nothing."""

    def decode(self, ids):
        raise KeyError("no such piece", ids)


def errors_of_one_rank(model, kind):
    """Return the error that each rank raises when the second one alone has an error."""
    with tk.parallel_session(dp_shard=2) as ps:
        is_second = ps.world.index == 1

        def fail(*_):
            raise KeyError("no such piece")

        draw = partial(generate_sharded, model, PROMPTS, axis=ps.dp)
        if kind == "stream":
            draw = partial(generate, make_stages([model], ps), PROMPTS)
        tokenizer = make_byte_tokenizer()
        more = {
            "call": {"call": call_model if not is_second else fail},
            "tokenizer": {"tokenizer": FailingTokenizer() if is_second else tokenizer},
            "stream": {"tokenizer": tokenizer, "stream": fail if is_second else None},
        }[kind]
        with pytest.raises(Exception, match="no such piece") as caught:
            draw(max_new_tokens=5, context=11, **more)
        assert draw(max_new_tokens=2, context=11)  # the ranks are together again
        return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("kind", ["call", "tokenizer", "stream"])
def test_an_error_of_one_rank_ends_every_rank(kind):
    (model,) = tk.build_stages(
        lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=init_weights(SMALL, seed=0)
    )
    first, second = run_ranks(errors_of_one_rank, 2, model, kind)
    assert first == ("RuntimeError", "rank 1 failed: " + ": ".join(second))
    assert second[0] == "KeyError"


def error_inside_of_a_call():
    """Let a call that communicates fail on the second rank, then let that rank say so."""
    with tk.parallel_session(dp_shard=2) as ps:

        def work(call):
            return [call(None, {}) for _ in range(2)]

        def call(*_):
            if ps.world.index == 1:
                raise KeyError("inside")

        def explain(_):
            raise ValueError("explained")

        together = partial(call_together, axis=ps.world, communicates=True)
        if ps.world.index == 0:
            with pytest.raises(ValueError, match="rank 1: explained"):
                together(work, call)
            return True
        with pytest.raises(KeyError, match="inside"):  # it has waited for nobody
            together(work, call)
        with pytest.raises(ValueError, match="explained"):
            together(explain, call)
        return True


def test_an_error_inside_of_collectives_raises_at_once():
    assert run_ranks(error_inside_of_a_call, 2) == [True, True]


def knows_a_sharded_model():
    with tk.parallel_session(dp_shard=2) as ps:
        weights = init_weights(SMALL, seed=0)
        sharded = tk.build_stages(lambda: Decoder(SMALL), ps, [fsdp()], weights=weights)
        whole = make_stages([Decoder(SMALL)], ps)
        return is_sharded_model(sharded), is_sharded_model(sharded[0]), is_sharded_model(whole)


def test_a_model_that_needs_other_ranks_is_known():
    assert run_ranks(knows_a_sharded_model, 2) == [(True, True, False)] * 2


def test_prompts_are_sharded_over_ranks_which_run_as_often_as_each_other():
    weights = init_weights(SMALL, seed=0)
    (model,) = tk.build_stages(lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=weights)
    prompts = [[*PROMPTS, [2]], PROMPTS[:1]]  # the second rank has none of the second ones
    draw = partial(generate, max_new_tokens=4, context=11, sampling=Sampling(seed=1))
    stop_id = draw(model, PROMPTS)[1].ids[1]
    wanted = [draw(model, some, stop_ids=[stop_id]) for some in prompts]
    (first, rows), (second, others) = run_ranks(sharded_rows, 2, model, prompts, stop_id)
    assert first == second == wanted
    assert (rows[0], others[0]) == (len(PROMPTS[0]) + 1, len(PROMPTS[1]))
    assert len(rows) == len(others)
    assert len({x.ended for x in wanted[0]}) == 2  # so that some end before others


def test_more_than_one_document_is_refused():
    (model,) = tk.build_stages(
        lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=init_weights(SMALL, seed=0)
    )
    call = make_call(make_stages([model], tk.solo_parallel()), call=call_model)
    with pytest.raises(ValueError, match="2 rows with 2 documents"):
        call(model, make_padding_batch(2, 4))
