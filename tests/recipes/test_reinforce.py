"""recipes/reinforce.py: it samples, trains and goes on with the same answers, in any layout."""

import functools
import json

import pytest
from recipe_runs import column, events, here, lines, refusal, several

from trainkit import adapters, evaluation, generation, hub
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder
from trainkit.post.evaluation.examples import make_example
from trainkit.tools.testing import run_ranks

SMALL = "--supervised 4 --prompts 4 --answers 4 --warmup 2 --schedule-steps 8 --save-every 2"
SMALL = [*SMALL.split(), "--rows", 4, "--microbatch", 2, "--eval-every", 4]
REPORTED = ("rollout", "reward", "answers", "empty", "truncated", "raised", "hung")


def flags(out, steps, *more):
    return ["--out", out, "--steps", steps, *SMALL, *more]


def rollouts(out):
    return [[event[name] for name in REPORTED] for event in events(out, "rollout")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of a run of 4 steps that imitate and 4 that reinforce."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, said = here(flags(out, 8), "reinforce")
    assert code == 0, said
    return out


def test_a_rollout_is_trained_on_in_parts_and_is_fresh_at_the_first(whole):
    assert [event[0] for event in rollouts(whole)] == [0, 1]
    assert [event["step"] for event in events(whole, "rollout")] == [4, 6]
    assert all(event[2] == 16 for event in rollouts(whole))
    first, second = lines(whole)[4], lines(whole)[5]
    assert abs(first["old_kl"]) < 1e-9  # the weights that sampled are those that are trained
    assert first["clipped"] == 0
    assert second["old_kl"] > 1e-7  # one update old
    assert "clipped" not in lines(whole)[3]


def test_it_says_what_it_has_learned_since_it_imitates_no_more(whole):
    (result,), found = events(whole, "result"), events(whole, "evaluation")
    assert [event["step"] for event in found] == [4, 8]
    assert result["metric"] == "eval/success"
    assert [result["before"], result["after"]] == [event["eval/success"] for event in found]


def test_it_begins_with_the_weights_of_a_run_and_is_measured_before_its_first_step(whole, tmp_path):
    code, said = here(flags(tmp_path, 2, "--init", whole, "--supervised", 0), "reinforce")
    assert code == 0, said
    first, last = events(tmp_path, "evaluation")
    known = events(whole, "evaluation")[-1]
    assert (first["step"], last["step"]) == (0, 2)
    assert [first[f"eval/{x}"] for x in ("loss", "success")] == [
        known[f"eval/{x}"] for x in ("loss", "success")
    ]
    assert rollouts(tmp_path)[0][0] == 0


def test_stopped_it_goes_on_to_the_same_bits_and_samples_the_same(whole, tmp_path):
    for steps in (6, 8):
        code, said = here(flags(tmp_path / "run", steps), "reinforce")
        assert code == 0, said
    for name in ("batch_hash", "loss_hex", "grad_norm_hex"):
        assert column(tmp_path / "run", name) == column(whole, name)
    assert rollouts(tmp_path / "run") == rollouts(whole)
    assert (tmp_path / "run/final.json").read_text() == (whole / "final.json").read_text()


@pytest.mark.parametrize(
    "layouts",
    [
        ["--tp 2"],
        pytest.param(["", "--pp 2 --microbatch 1", "--ring 2"], marks=pytest.mark.only_all),
    ],
)
def test_two_ranks_sample_the_same_and_learn_the_same(layouts, whole, tmp_path):
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    runs = [flags(out, 6, *x.split()) for out, x in zip(outs, layouts, strict=True)]
    for (code, said), out in zip(run_ranks(several, 2, runs, "reinforce")[0], outs, strict=True):
        assert code == 0, said
        assert rollouts(out) == rollouts(whole)[:1]
        assert column(out, "tokens") == column(whole, "tokens")[:6]
        for name in ("loss", "grad_norm"):
            wanted = pytest.approx(column(whole, name)[:6], rel=1e-4, abs=1e-5)
            assert column(out, name) == wanted, name


def test_the_answers_of_another_sampler_serve_if_it_has_the_trainer_s_weights(tmp_path):
    out, path = tmp_path / "run", tmp_path / "answers.jsonl"
    assert here(flags(out, 4), "reinforce")[0] == 0
    trained = hub.open_model(out)
    make_model = functools.partial(Decoder, trained.config)
    model = adapters.build_trained_stages(trained.path, make_model, solo_parallel(), [])
    texts = [(f"{n}+1=", text) for n in range(4) for text in ("1", "", f"{n + 1}", "12")]
    read = [{"prompt": p, "answer": a, "logprobs": [0.0] * (len(a) + 1)} for p, a in texts]
    answers = generation.read_answers(read, tokenizer=trained.tokenizer)
    examples = [make_example(x.prompt_ids, x.ids, context=64) for x in answers]
    given = [x.logprobs.tolist() for x in evaluation.make_scorer(model)(examples)]

    def write(logprobs):
        drawn = [{"ids": x.ids, "prompt_ids": x.prompt_ids} for x in answers]
        found = [
            {**r, **(ids if number % 2 else {}), "logprobs": x}
            for number, (r, ids, x) in enumerate(zip(read, drawn, logprobs, strict=True))
        ]
        path.write_text("\n".join(map(json.dumps, found)))

    write([[x - 0.5 for x in own] for own in given])
    code, what = refusal("reinforce", *flags(out, 6, "--sampled", path))
    assert (code, "by 0.5 nats" in what) == (65, True), what
    write([*given[:5], [0.3, *given[5][1:]], *given[6:]])  # 0.02 nats in the mean
    code, what = refusal("reinforce", *flags(out, 6, "--sampled", path))
    assert (code, "record 5 has the log-probability 0.3" in what) == (65, True), what
    write(given)
    code, said = here(flags(out, 6, "--sampled", path), "reinforce")
    assert code == 0, said
    assert rollouts(out)[-1] == [0, 5 / 16, 16, 4, 0, 0, 0]
    assert lines(out)[4]["truncated"] == 0  # no weight of importance was cut
    code, what = refusal("reinforce", *flags(out, 8, "--sampled", path))
    assert (code, "rollout 1 needs answers 16 to 31" in what) == (65, True), what


def test_a_run_that_could_not_be_saved_between_rollouts_is_refused(tmp_path):
    code, what = refusal("reinforce", *flags(tmp_path / "run", 8, "--save-every", 3))
    assert (code, "[8, 4, 3], not multiples of --updates 2" in what) == (64, True), what
