"""Rollouts: rewards within a time limit, and corpora of the sampled tokens."""

import contextlib
import math
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import torch

from trainkit.data import make_microbatches
from trainkit.models import build_decoder, call_routed, make_decoder_config
from trainkit.models.config import Experts
from trainkit.post.generation import (
    Answer,
    check_logprobs,
    compute_advantages,
    compute_old_logprobs,
    compute_rewards,
    make_answer_corpus,
    make_answer_reader,
    read_answers,
    sample_answers,
    split_minibatches,
)
from trainkit.post.generation.rewards import Rewards
from trainkit.post.objectives import policy_gradient, ppo_clip
from trainkit.text.tokenizers import make_byte_tokenizer, train_bpe
from trainkit.text.tokenizers.special import BOS, EOS
from trainkit.types import IGNORED_LABEL, DataError

BYTES = make_byte_tokenizer()


def answer(text, *, truncated=False, group=0):
    ids = [*BYTES.encode(text), *([] if truncated else [BYTES.eos_id])]
    return Answer("1+1=", [BYTES.bos_id, *BYTES.encode("1+1=")], text, ids, group, truncated)


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_checker_that_raises_or_hangs_costs_its_answer_alone(where):
    if where == "main thread":
        check_rewards_of_a_bad_checker(hang=9)
        return
    threads = threading.active_count()
    with ThreadPoolExecutor(1) as pool:  # as in a worker of Ray; a call of C is not interrupted
        pool.submit(check_rewards_of_a_bad_checker, hang=0.001).result()
    assert threading.active_count() == threads


def test_a_timer_that_the_process_has_goes_on_after_a_checker():
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        compute_rewards(lambda *_: 1.0, [answer("2")])
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def check_rewards_of_a_bad_checker(hang):
    shown = []

    def checker(_, text):
        shown.append(text)
        if text == "raises":
            raise ZeroDivisionError("no")
        if text == "is no number":
            return float("nan")
        while text == "hangs":  # and does not let itself be interrupted by what is an Exception
            with contextlib.suppress(Exception):
                time.sleep(hang)
        return float(text == "2")

    texts = ["2", "raises", "hangs", "", "is no number", "3", "2"]
    answers = [*map(answer, texts), answer("2", truncated=True)]
    handler, begin = signal.getsignal(signal.SIGALRM), time.monotonic()
    found = compute_rewards(checker, answers, seconds=0.05)
    assert time.monotonic() - begin < 3
    assert found.rewards == [1, 0, 0, 0, 0, 0, 1, 0]
    assert (found.raised, found.hung) == (2, 1)
    assert shown == texts  # an empty answer is one; what was cut off earns nothing
    assert found.first_failure == "it raised ZeroDivisionError: no for '1+1=', 'raises'"
    report = found.report(answers)
    assert (report["reward"], report["empty"], report["truncated"]) == (0.25, 1, 1)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_advantage_is_that_of_its_group_in_whatever_order_answers_come():
    groups, rewards = [0, 0, 0, 1, 1, 2, 2, 2], [1.0, 0.0, 0.0, 0.5, 0.25, 0.0, 1.0, 1.0]
    answers = [answer(str(n), group=group) for n, group in enumerate(groups)]
    whole = compute_advantages(answers, Rewards(rewards))
    for group in range(3):
        own = torch.tensor([r for r, g in zip(rewards, groups, strict=True) if g == group]).double()
        want = (own - own.mean()) / (own.std() + 1e-4)
        torch.testing.assert_close(whole[[g == group for g in groups]], want)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 6, 2, 7], [0, 2, 4, 6, 1, 3, 5, 7]):
        given = [answers[n] for n in order], Rewards([rewards[n] for n in order])
        torch.testing.assert_close(compute_advantages(*given), whole[order])


def test_each_label_has_what_was_known_of_its_token():
    answers = [answer("2"), answer("31", truncated=True, group=1), answer("", group=2)]
    given = [[-0.1, -0.2], [-0.3, -0.4], [-0.5]]
    answers = [attrs.evolve(x, logprobs=own) for x, own in zip(answers, given, strict=True)]
    corpus = make_answer_corpus(answers, advantages=torch.tensor([1.0, -2.0, 3.0]))
    (packed,) = split_minibatches(corpus, 1, capacity=32, multiple_of=4)
    (batch,) = make_microbatches(packed, [0], rows_per_microbatch=1)
    trained, logits = batch["labels"] != IGNORED_LABEL, torch.randn(1, 32, 272)
    assert batch["labels"][trained].tolist() == [50, 257, 51, 49, 257]
    wanted = [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert batch["sampler_logprobs"][trained].tolist() == pytest.approx(wanted)
    assert batch["advantages"][trained].tolist() == [1, 1, -2, -2, 3]
    batch = {**batch, **compute_old_logprobs(logits, batch)}
    own = logits.log_softmax(-1)[trained, batch["labels"][trained]]
    assert torch.equal(batch["old_logprobs"][trained], own)
    _, terms = policy_gradient(ppo_clip())(logits, batch)
    assert terms["clipped/count"] == 5
    assert terms["old_kl"] == 0  # every ratio is 1


def test_a_log_probability_above_0_is_no_column():
    answers = [attrs.evolve(answer("2"), logprobs=[-0.1, own]) for own in (0.0, 0.3)]
    assert len(make_answer_corpus(answers[:1], advantages=[1.0]).lengths) == 1
    with pytest.raises(
        DataError, match=r"answer 1 has the log-probability 0\.3; it must be at most 0"
    ):
        make_answer_corpus(answers, advantages=[1.0, 1.0])


def test_every_answer_is_in_one_minibatch():
    answers = [answer("7" * (n % 4), group=n // 2) for n in range(11)]
    corpus = make_answer_corpus(answers, advantages=np.zeros(11))
    parts = split_minibatches(corpus, 3, capacity=24)
    documents = [sorted(part.bins.documents.tolist()) for part in parts]
    assert documents == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    with pytest.raises(ValueError, match=r"minibatch.*at least 1, got 12 and 0"):
        split_minibatches(corpus, 12, capacity=24)
    with pytest.raises(ValueError, match="capacity"):
        split_minibatches(corpus, 3, capacity=4)


def test_the_nth_answer_is_the_same_whatever_is_sampled_beside_it():
    model = build_decoder(
        make_decoder_config("tiny", layers=1, width=32, heads=2, kv_heads=2), seed=0
    )
    prompts = ["1+1=", "22+3=", "4="]
    whole = sample_answers(
        model,
        prompts,
        answers_per_prompt=2,
        first=100,
        tokenizer=BYTES,
        max_new_tokens=3,
        context=16,
        seed=3,
    )
    assert [x.group for x in whole] == [0, 0, 1, 1, 2, 2]
    assert [x.prompt for x in whole] == [p for p in prompts for _ in range(2)]
    assert list(whole[0].ids) != list(whole[1].ids)
    alone = sample_answers(
        model,
        prompts[1:2],
        answers_per_prompt=2,
        first=102,
        tokenizer=BYTES,
        max_new_tokens=3,
        context=16,
        seed=3,
    )
    assert [x.ids for x in alone] == [x.ids for x in whole[2:4]]
    others = sample_answers(
        model,
        prompts,
        answers_per_prompt=2,
        first=106,
        tokenizer=BYTES,
        max_new_tokens=3,
        context=16,
        seed=3,
    )
    assert [x.ids for x in others] != [x.ids for x in whole]
    for x in whole:
        assert x.truncated == (x.ids[-1] != BYTES.eos_id)
        assert BYTES.decode(x.ids) == x.text


def record(**changes):
    return {"prompt": "1+1=", "answer": "2", "logprobs": [-0.5, -0.25]} | changes


def test_answers_of_another_sampler_are_read():
    records = [record(), record(truncated=True, logprobs=[-1.0]), record(prompt="3=")]
    found = read_answers(records, tokenizer=BYTES)
    assert [x.group for x in found] == [0, 0, 1]
    assert [x.ids for x in found] == [[50, 257], [50], [50, 257]]
    assert found[0].prompt_ids == [256, *b"1+1="]


def test_rollouts_are_read_as_they_are_needed_and_a_list_once_more():
    records = [record(answer=str(n), prompt=f"{n // 2}=") for n in range(7)]
    for given in (records, iter(records)):
        read = make_answer_reader(given, tokenizer=BYTES, size=2)
        assert [[x.text, x.group] for x in read(0)] == [["0", 0], ["1", 0]]
        assert [x.text for x in read(2)] == ["4", "5"]  # a run that goes on passes over the others
        with pytest.raises(DataError, match="rollout 3 needs answers 6 to 7, but there are 7;"):
            read(3)
        if given is records:
            assert [x.text for x in read(1)] == ["2", "3"]
        else:
            with pytest.raises(DataError, match="answers 2 to 3, but the iterator is at 7;"):
                read(1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answer": None}, "record 4 has answer=None"),
        ({"truncated": "false"}, "record 4 has truncated='false'; it must be true or false"),
        ({"logprobs": None}, "has 2 tokens that need logprobs, but logprobs: None"),
        ({"logprobs": [-0.5]}, "4 has 1 log-probabilities, but its answer '2' is encoded into 2"),
        ({"choices": [[[0, 1]]] * 5}, "has 7 tokens that need choices, but choices: 5;"),
        ({"answer": "", "truncated": True, "logprobs": []}, "has 0 tokens"),
        ({"answer": "\ud800", "logprobs": [-1.0] * 4}, "comes back from its tokens as"),
        *(
            ({"logprobs": [-0.5, bad]}, f"record 4 has the log-probability {bad!r} for token 1")
            for bad in (12, 0.3, 1e-9, math.nan, -math.inf, True, False, "-0.5", None)
        ),
        ({"ids": [50, 257], "logprobs": [-0.5]}, "has 2 tokens that need logprobs"),
        ({"ids": [50]}, "record 4 is not truncated, but its ids end with 50; .* EOS, 257, unless"),
        ({"ids": [50, 257], "truncated": True}, "record 4 is truncated, but its ids end with 257"),
        ({"ids": [51, 257]}, "record 4 has the answer '2', but its ids decode to '3'"),
        *(
            ({name: bad}, f"record 4 has {name}=.*; it must be a list of token ids.* from 0 to 258")
            for name in ("ids", "prompt_ids")
            for bad in ([], "2", 50, [259], [-1], [50.0], [True], [None])
        ),
    ],
)
def test_a_record_that_cannot_be_trained_on_is_refused(changes, says):
    class Lossy:
        bos_id, eos_id, vocab_size = 256, 257, 259
        encode = staticmethod(lambda text: list(text.encode(errors="replace")))
        decode = staticmethod(BYTES.decode)

    with pytest.raises(DataError, match=says):
        read_answers([record(), record() | changes], tokenizer=Lossy(), first=3)


def test_the_tokens_that_were_drawn_are_those_that_are_trained():
    """The tokenizer makes others of the same text."""
    tokenizer = train_bpe(["12 123 1234 23 234 34"] * 4, vocab_size=300, special=(BOS, EOS))
    whole, drawn = tokenizer.encode("123"), [tokenizer.encode(x)[0] for x in "123"]
    assert tokenizer.decode(drawn) == tokenizer.decode(whole) == "123"
    assert len(drawn) > len(whole)
    ids, logprobs = [*drawn, tokenizer.eos_id], [-0.1, -0.2, -0.3, -0.4]
    given = {"prompt": "123", "prompt_ids": drawn, "ids": ids, "logprobs": logprobs}
    for answer in ({}, {"answer": "123"}):
        (found,) = read_answers([given | answer], tokenizer=tokenizer)
        assert (found.prompt_ids, found.ids, found.text) == (drawn, ids, "123")
    text = {"prompt": "123", "answer": "123", "logprobs": logprobs}
    want = (
        f"record 0 has 4 log-probabilities, but its answer '123' is encoded into {len(whole) + 1}"
    )
    with pytest.raises(DataError, match=f'{want} tokens.*give the sampled tokens as "ids"'):
        read_answers([text], tokenizer=tokenizer)
    other = given | {"prompt_ids": [*whole]}
    assert [x.group for x in read_answers([given, given, other], tokenizer=tokenizer)] == [0, 0, 1]


def test_a_word_that_only_the_model_has_may_have_been_drawn():
    given = record(ids=[300, 257], answer=None)
    assert read_answers([given], tokenizer=BYTES, vocab_size=320)[0].ids == [300, 257]
    with pytest.raises(DataError, match="from 0 to 258"):
        read_answers([given], tokenizer=BYTES)


def test_a_sampler_that_is_not_the_trainer_is_refused():
    labels = torch.tensor([[-100, 2, 3], [4, -100, 5]])
    sampler = torch.tensor([[9.0, -0.5, -0.25], [-0.5, 9.0, -0.25]])
    own = sampler + torch.tensor([[-9.0, 0.0, -0.06], [0.02, -9.0, 0.0]])
    batches = [{"labels": x, "sampler_logprobs": y} for x, y in zip(labels, sampler, strict=True)]
    apart = [x | {"old_logprobs": y} for x, y in zip(batches, own, strict=True)]
    assert check_logprobs([*apart, batches[0]]) == pytest.approx(0.02)
    for wrong in (-2.5, float("nan")):
        other = batches[0] | {"old_logprobs": torch.tensor([0.0, wrong, -0.25])}
        with pytest.raises(DataError, match=r"above the tolerance 0\.1"):
            check_logprobs([other, apart[1]])


def test_experts_that_a_sampler_took_are_those_that_are_trained():
    experts = Experts(count=4, top_k=2, width=8)
    model = build_decoder(
        make_decoder_config("tiny", layers=2, width=32, heads=2, kv_heads=2, experts=experts),
        seed=0,
    )
    taken = [[[n % 4, (n + 1) % 4], [n % 4, (n + 2) % 4]] for n in range(6)]  # two layers, two each
    given = read_answers([record(choices=taken)], tokenizer=BYTES)
    (packed,) = split_minibatches(make_answer_corpus(given, advantages=[1.0]), 1, capacity=16)
    (batch,) = make_microbatches(packed, [0], rows_per_microbatch=1)
    chosen, own = call_routed(model, batch), call_routed(model, attrs.evolve(batch, extra={}))
    whole = torch.tensor([*taken, taken[-1]])  # the last token is a label, and no input
    want = [torch.bincount(whole[:, layer].flatten(), minlength=4).tolist() for layer in range(2)]
    assert chosen.sums[:, 3:].tolist() == want
    assert own.sums[:, 3:].tolist() != want
