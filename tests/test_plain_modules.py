"""Every function that takes a `Stages` also takes what trainkit did not build: modules, parameters.

The module is a bare `nn.Linear`, the optimizer a bare `torch.optim.AdamW`, and there is no process
group; on two ranks plain parameters come with an `Axis`.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainkit as tk
from trainkit.data.corpus import make_corpus
from trainkit.losses import next_token
from trainkit.optim import make_optimizer
from trainkit.parallel import add_columns, describe_run, make_call, make_output_head, make_stages
from trainkit.post.evaluation import make_evaluator
from trainkit.post.generation import generate, sample_answers
from trainkit.text.tokenizers import make_byte_tokenizer
from trainkit.tools.testing import run_ranks
from trainkit.types import Hidden, Precision

WORDS = 8


def call(model, batch):
    """Give a linear layer one-hot tokens, so that it is a model of bigrams."""
    return model(nn.functional.one_hot(batch["input_ids"], WORDS).float())


def linear():
    torch.manual_seed(0)
    return nn.Linear(WORDS, WORDS)


def packed():
    corpus = make_corpus([[1, 2, 3], [4, 5], [6, 7, 1, 2]])
    return tk.PackedCorpus(corpus, tk.pack_bins(corpus.lengths, 4))


def batches():
    return list(tk.make_eval_batches(packed(), rows_per_batch=1))


def gradients(model):
    forward_backward = tk.make_forward_backward(model, next_token, call=call)
    return forward_backward(batches(), denominator=tk.count_valid_tokens(batches()))


def test_a_step_of_a_linear_layer():
    assert not dist.is_initialized()
    model, by_hand = linear(), linear()
    adamw = torch.optim.AdamW(model.parameters())
    sums = gradients(model)
    tk.sync_sp_grads(model, tk.solo_parallel().sp_unfolded)
    norm = tk.grad_norm(model)
    assert norm == tk.grad_norm(model.parameters()) == tk.clip_grads_(model, max_norm=None)
    update = tk.clip_and_step(model, adamw, lr=1e-2, max_norm=0.5)
    assert update.norm == norm
    assert bool(update.applied)
    assert all(p.grad is None for p in model.parameters())

    total = tk.count_valid_tokens(batches())
    loss = sum(next_token(call(by_hand, batch), batch)[0] for batch in batches()) / total
    loss.backward()
    torch.testing.assert_close(sums["loss"] / total, loss.detach())
    nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
    torch.optim.AdamW(by_hand.parameters(), lr=1e-2).step()
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_plain_parameters_are_clipped_and_stepped_as_their_module_is():
    moved = []
    for given in (lambda model: model, lambda model: model.parameters(), nn.Module.parameters):
        model = linear()
        gradients(model)
        sgd = torch.optim.SGD(model.parameters())
        tk.clip_and_step(given(model), sgd, lr=0.1, max_norm=1.0)
        moved.append(model.weight.detach().clone())
    assert all(torch.equal(weight, moved[0]) for weight in moved)


def test_an_optimizer_by_name_takes_a_module():
    model = linear()
    optimizer = make_optimizer(model, lr=0.1)
    gradients(model)
    assert bool(tk.clip_and_step(model, optimizer, lr=0.1, max_norm=1.0).applied)


def test_an_evaluation_of_a_linear_layer():
    model = linear()
    evaluate = make_evaluator(model, packed(), next_token, rows_per_batch=1, call=call)
    found = tk.to_host(tk.evaluate(model, batches(), next_token, call=call))
    assert evaluate() == found
    assert found["tokens"] == 6


def test_text_of_a_linear_layer():
    model = linear()
    text = generate(model, [[1, 2]], max_new_tokens=3, context=8, call=call)
    stages = make_stages([model], tk.solo_parallel(), call=call)
    assert text == generate(stages, [[1, 2]], max_new_tokens=3, context=8)
    anew = generate(model, [[1, 2]], max_new_tokens=3, context=8, call=make_call(stages))
    assert text == anew
    tokenizer = make_byte_tokenizer()
    words = nn.Linear(1, tokenizer.vocab_size)
    (answer,) = sample_answers(
        words,
        ["a"],
        tokenizer=tokenizer,
        max_new_tokens=2,
        context=8,
        call=lambda model, batch: model(batch["input_ids"].unsqueeze(-1).float()),
    )
    assert 1 <= len(answer.ids) <= 2


def test_columns_and_the_head_of_a_frozen_linear_layer():
    model = linear()

    def hidden(model, batch):
        return Hidden(call(model, batch), model.weight)

    (batch,) = add_columns(model, batches()[:1], lambda output, _: {"teacher": output}, call=call)
    assert batch["teacher"].shape == (1, 4, WORDS)
    assert torch.equal(make_output_head(model, batch, call=hidden).weight, model.weight)


def test_start_lines_of_a_linear_layer():
    lines = describe_run(linear(), packed().bins, rows_per_step=1, precision=Precision())
    assert lines.startswith("72 parameters, all trained, in fp32 on cpu, 1 rank\n")


def test_a_checkpoint_of_a_linear_layer(tmp_path):
    ps, state = tk.solo_parallel(), tk.TrainState(step=1)
    model, again = linear(), nn.Linear(WORDS, WORDS)
    adamw = torch.optim.AdamW(model.parameters())
    gradients(model)
    tk.clip_and_step(model, adamw, lr=1e-2, max_norm=1.0)
    tk.save_checkpoint(tmp_path, state, model, adamw, ps)
    other = torch.optim.AdamW(again.parameters())
    resumed = tk.resume(tmp_path, tk.TrainState(), again, other, ps)
    assert resumed.step == 1
    assert tk.state_hash(state, model, adamw, ps) == tk.state_hash(resumed, again, other, ps)
    assert torch.equal(model.weight, again.weight)


def on_an_axis():
    """Step one parameter a rank, as stages of a pipeline do, and sum gradients over ranks."""
    with tk.parallel_session(pp=2) as ps:
        p = nn.Parameter(torch.zeros(1))
        p.grad = torch.tensor([3.0 + ps.pp.index])  # 3 and 4
        norm = float(tk.grad_norm([p], axis=ps.pp))
        adamw = torch.optim.AdamW([p])
        update = tk.clip_and_step([p], adamw, lr=0.1, max_norm=1.0, axis=ps.pp)
        moment = float(adamw.state[p]["exp_avg"]) / 0.1  # the clipped gradient
    with tk.parallel_session(ring=2, fold_sp="none") as ps:
        q = nn.Parameter(torch.zeros(2))
        q.grad = torch.full((2,), 1.0 + ps.ring.index)
        tk.sync_sp_grads([q], ps.sp_unfolded)
    return norm, float(update.norm), moment, float(q.grad.sum())


def test_plain_parameters_and_an_axis_on_two_ranks():
    first, second = run_ranks(on_an_axis, 2)
    assert first == pytest.approx((5.0, 5.0, 3 / 5, 6.0), rel=1e-5)
    assert second == pytest.approx((5.0, 5.0, 4 / 5, 6.0), rel=1e-5)


def with_an_axis():
    """Evaluate a plain module on rows that two ranks share, and write texts that they share."""
    with tk.parallel_session() as ps:
        model = linear()
        evaluate = make_evaluator(
            model, packed(), next_token, rows_per_batch=1, axis=ps.loss, call=call
        )
        return evaluate()


def test_ranks_share_the_rows_of_a_plain_module():
    evaluate = make_evaluator(linear(), packed(), next_token, rows_per_batch=1, call=call)
    for found in run_ranks(with_an_axis, 2):
        assert found == pytest.approx(evaluate(), rel=1e-6)


def test_a_list_of_modules_in_place_of_parameters_is_refused_by_the_function_that_was_called():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for name, call in {
        "grad_norm": tk.grad_norm,
        "clip_grads_": lambda modules: tk.clip_grads_(modules, max_norm=1.0),
        "clip_and_step": lambda modules: tk.clip_and_step(modules, optimizer, lr=1, max_norm=1.0),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: params must be .* get_parameters"):
            call([model])
