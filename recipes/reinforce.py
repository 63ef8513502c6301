"""Reinforce answers that a checker rewards: small sums, sampled by the model that learns them.

python recipes/reinforce.py                              # learns a little from examples first
torchrun --nproc-per-node 2 recipes/reinforce.py         # two, and the same losses
python recipes/reinforce.py --init MODEL --supervised 0  # a run or a Hugging Face folder
python recipes/reinforce.py --sampled answers.jsonl      # answers of another sampler

Three of four examples that the model first imitates forget to carry, and so it learns to forget as
well; the checker knows the sums, and its rewards alone make the rarer way the usual one. Sums are
written backwards, units first, which a small decoder learns in seconds.
"""

import functools
from pathlib import Path

import attrs
import numpy as np

import trainkit as tk
from trainkit.types import ConfigError, Cursor, Sample, StepBatch


@attrs.frozen(kw_only=True)
class RolloutOptions:
    """What is sampled between updates."""

    prompts: int = attrs.field(default=32, validator=tk.config.positive)
    """Problems in a rollout."""
    answers: int = attrs.field(default=8, validator=attrs.validators.ge(2))
    """Answers to each, whose rewards are compared with each other."""
    updates: int = attrs.field(default=2, validator=tk.config.positive)
    """Steps for each rollout, on a part of it each; the last is on answers so many steps old."""
    max_new_tokens: int = attrs.field(default=4, validator=tk.config.positive)
    """An answer is cut off after so many tokens, and then earns nothing."""
    clip: float = attrs.field(default=0.2, validator=tk.config.fraction)
    """How much likelier or less likely a token may become by the updates of a rollout."""
    sampled: Path | None = tk.config.option(None, on_resume="allow")
    """Answers of another sampler, .jsonl or .parquet: prompt, ids, logprobs, truncated."""


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Reinforce answers that a checker rewards; by default, to sums of two numbers."""

    out: Path = tk.config.option(Path("runs/reinforce"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(280, tk.config.positive, on_resume="ignore")
    """Stop after this step, a multiple of updates. Nothing else depends on it."""
    supervised: int = tk.config.option(200, tk.config.non_negative)
    """So many steps first imitate examples, which answer some of the problems."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder to begin with; by default new weights."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json with an EOS; by default that of init, or bytes."""
    size: str = "tiny"
    """A named model size, of new weights; see trainkit.models.list_decoder_sizes."""
    eval_every: int = tk.config.option(40, tk.config.positive, on_resume="allow")
    """Ask what is held out after the supervised steps, every so many steps, and at the end."""
    batch: tk.config.RowOptions = tk.config.RowOptions(
        row_length=64, rows=8, microbatch=32, multiple_of=4
    )
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=2e-3, schedule_steps=200)
    rollout: RolloutOptions = RolloutOptions()


def check(prompt, answer):
    """Return what an answer earns: 1 if it is the sum, units first, else 0."""
    return float(answer == str(sum(map(int, prompt.rstrip("=").split("+"))))[::-1])


def make_problems(cfg):
    """Return problems whose answers are shown, those that are asked, and those held out from both.

    Each with an answer; those that are shown with four, of which three forget to carry.
    """

    def problem(a, b):
        forgetful = a + b - 10 * (a % 10 + b > 9)
        return f"{a:02}+{b}=", str(a + b)[::-1], str(forgetful)[::-1]

    every = [problem(a, b) for a in range(100) for b in range(5, 10)]
    order = tk.sampling.shuffle_epochs(len(every), rows_per_step=len(every), seed=cfg.seed)
    every = [every[row] for row in order(0)]
    shown = [(x, y) for x, right, forgetful in every[100:400] for y in (right, *[forgetful] * 3)]
    return shown, *([(x, right) for x, right, _ in part] for part in (every[100:], every[:100]))


def pack(cfg, tokenizer, answered):
    """Return rows of problems and answers, of which the answers are trained on."""
    begin, end = [x for x in [tokenizer.bos_id] if x is not None], [tokenizer.eos_id]

    def sample(problem, answer):
        asked, said = [*begin, *tokenizer.encode(problem)], [*tokenizer.encode(answer), *end]
        return Sample([*asked, *said], np.arange(len(asked) + len(said)) >= len(asked))

    corpus = tk.data.make_corpus(sample(*pair) for pair in answered)
    size = {"multiple_of": cfg.batch.multiple_of, "overlong": "error", "seed": cfg.seed}
    return tk.PackedCorpus(corpus, tk.pack_bins(corpus.lengths, cfg.batch.row_length, **size))


def build(cfg, ps, model, path):
    """Return this rank's stages of the model, with its weights, and their optimizer."""
    plan = tk.parallel.make_decoder_plan(cfg.layout, **cfg.planned)
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    new = functools.partial(tk.models.init_weights, model, seed=cfg.seed)
    weights = tk.adapters.open_base_weights(path, axis=ps.world) if path else new()
    stages = tk.build_stages(
        make_model,
        ps,
        plan,
        weights=weights,
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,
    )
    how = {"precision": cfg.precision, "seed": cfg.seed}
    return stages, tk.optim.make_optimizer(stages, **cfg.optim.made, **how)


def bind_losses(cfg, stages):
    """Return forward_backward: the policy gradient of what was sampled, else the cross entropy."""
    added = tk.objectives.PolicyOptions(most_importance=2.0 if cfg.rollout.sampled else None)
    policy = tk.objectives.policy_gradient(
        tk.objectives.ppo_clip(*[cfg.rollout.clip] * 2), added=added
    )
    reinforce = tk.make_forward_backward(stages, policy, reduce=cfg.layout.reduce)
    imitate = tk.make_forward_backward(
        stages, tk.losses.next_token_linear, reduce=cfg.layout.reduce
    )

    def forward_backward(microbatches, *, denominator):
        was_sampled = "advantages" in microbatches[0]
        return (reinforce if was_sampled else imitate)(microbatches, denominator=denominator)

    return forward_backward


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    total = cfg.optim.schedule_steps
    lr_at = tk.schedules.cosine(cfg.optim.lr, warmup=cfg.optim.warmup, total=total, final=0.1)
    max_norm = cfg.optim.max_norm

    def train_step(state, batch):
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        lr, terms["loss"] = lr_at(state.step), terms.pop("policy", terms.get("loss"))
        applies = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        update = tk.clip_and_step(
            stages, optimizer, lr=lr, max_norm=max_norm, should_apply=applies, scale=scale
        )
        metrics = {**terms, **update.metrics, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def bind_sampler(cfg, ps, model, ask, tokenizer, problems):
    """Return sample(number), the answers of a rollout: this model's, or those of a file."""
    options, sampling = cfg.rollout, tk.generation.Sampling(seed=cfg.seed)
    size = options.prompts * options.answers
    if options.sampled:
        records = [record for _, record in tk.corpora.read_records(options.sampled)]
        return tk.generation.make_answer_reader(
            records, tokenizer=tokenizer, size=size, vocab_size=model.vocab_size, axis=ps.world
        )
    how = {"rows_per_step": options.prompts, "seed": cfg.seed}
    rows_at = tk.sampling.shuffle_epochs(len(problems), **how)

    def sample(number):
        prompts = [problems[row][0] for row in rows_at(number)]
        return ask(prompts, sampling=sampling, each=options.answers, first=number * size)

    return sample


def bind_rollout(cfg, ps, stages, sample, deal):
    """Return roll_out(number): microbatches of each update, and what the answers came to."""
    cut = {"capacity": cfg.batch.row_length, "multiple_of": cfg.batch.multiple_of}
    old = tk.generation.compute_old_logprobs

    def roll_out(number):
        answers = sample(number)
        checked = tk.generation.compute_rewards(check, answers, axis=ps.world)
        advantages = tk.generation.compute_advantages(answers, checked)
        corpus = tk.generation.make_answer_corpus(answers, advantages=advantages)
        parts = tk.generation.split_minibatches(corpus, cfg.rollout.updates, **cut)
        rows = [deal(part, np.arange(len(part))) for part in parts]
        # By the weights that sampled: before the first update.
        dealt = [tk.parallel.add_columns(stages, x, old) for x in rows]
        told = tk.generation.summarize_rollout(answers, checked)
        if cfg.rollout.sampled:
            every = [microbatch for part in dealt for microbatch in part]
            told["apart"] = tk.generation.check_logprobs(every, axis=ps.world)
        return dealt, told

    return roll_out


def bind_evaluation(cfg, ps, stages, ask, held):
    """Return evaluate(): how many greedy answers are right, and the loss of the right ones."""
    (problems, rows), greedy = held, tk.generation.Sampling(temperature=0.0)
    loss = tk.evaluation.make_evaluator(
        stages, rows, tk.losses.next_token_linear, rows_per_batch=cfg.batch.microbatch
    )

    def evaluate():
        checked = tk.generation.compute_rewards(
            check, ask(problems, sampling=greedy), axis=ps.world
        )
        success = sum(checked.rewards) / len(problems)
        return {**loss(), "success": success, "score": -success}

    return evaluate


def bind_batches(cfg, shown, deal, roll_out):
    """Return batches(state, event): what is trained on until weights may be saved again."""
    rows_at = tk.sampling.shuffle_epochs(len(shown), rows_per_step=cfg.batch.rows, seed=cfg.seed)

    def batches(state, event):
        batch = state.cursor.batch
        if state.step < cfg.supervised:
            dealt = [deal(shown, rows_at(batch))]
        else:
            number = -((cfg.supervised - batch) // cfg.rollout.updates)  # rounded up
            dealt, told = roll_out(number)
            event("rollout", step=state.step, rollout=number, **told)
        return [StepBatch(x, Cursor(batch + i)) for i, x in enumerate(dealt, start=1)]

    return batches


def train(cfg, run, tokenizer, model, first, context):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, changes = run.ps, tk.config.make_resume_rules(cfg, free=["context"])
    shown, asked, held = make_problems(cfg)
    shown = pack(cfg, tokenizer, shown)
    stages, optimizer = build(cfg, ps, model, first.path)
    size = {"rows_per_step": cfg.batch.rows, "precision": cfg.precision}
    run.log(tk.parallel.describe_run(stages, shown.bins, **size))
    forward_backward = bind_losses(cfg, stages)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    how = {"max_new_tokens": cfg.rollout.max_new_tokens, "context": cfg.batch.row_length}
    ask = functools.partial(tk.generation.sample_answers, stages, tokenizer=tokenizer, **how)
    how = {"place": ps.place, "device": ps.device, "pad_id": tokenizer.pad_id or 0}
    deal = functools.partial(
        tk.data.make_microbatches, rows_per_microbatch=cfg.batch.microbatch, **how
    )
    sample = bind_sampler(cfg, ps, model, ask, tokenizer, asked)
    roll_out = bind_rollout(cfg, ps, stages, sample, deal)
    batches = bind_batches(cfg, shown, deal, roll_out)
    held = [problem for problem, _ in held], pack(cfg, tokenizer, held)
    evaluate = bind_evaluation(cfg, ps, stages, ask, held)
    facts = {"model": attrs.asdict(model), "tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    facts |= tk.config.make_config_facts(cfg) | tk.checkpoint.hash_initial_weights(
        first, stages, ps
    )
    facts |= {"context": max(cfg.batch.row_length, context)}
    state = run.resume(stages, optimizer, facts=facts, changes=changes, request=cfg.resume)
    stop, around = None, {"steps": cfg.steps, "policy": cfg.policy}
    around |= {"checkpoints": cfg.checkpoints, "logging": cfg.logging}
    with run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop:
        if state.step == cfg.supervised == 0:
            state = loop.evaluate(state, evaluate)
        while state.step < cfg.steps and not stop:
            for batch in batches(state, loop.event):
                begun = state.step
                state, metrics = train_step(state, batch)
                state = loop.record(state, metrics, batch)
                if state.step <= begun:
                    break  # the run went back: the rest was sampled by weights that are gone
            done = state.step - cfg.supervised
            if done >= 0 and tk.schedules.is_due(
                done, cfg.eval_every, last=cfg.steps - cfg.supervised
            ):
                state = loop.evaluate(state, evaluate)
            stop = loop.checkpoint(state)
        if not stop:
            loop.event("result", **tk.sinks.compare_evaluations(run.dir, "eval/success"))
    if stop:
        return tk.run.EXIT_SAVED
    run.finish(state, stages, optimizer)
    return 0


def open_base(cfg):
    """Return weights to begin or go on with, the tokenizer, its name, the model, its context."""
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    if path := first.path:
        found = tk.hub.open_model(path, tokenizer=cfg.tokenizer, context=cfg.batch.row_length)
        first = first.resolved(found.path)
        return first, found.tokenizer, found.name, found.config, found.full_context
    tokenizer = tk.tokenizers.open_tokenizer(name := cfg.tokenizer or "bytes")
    words = tk.models.pad_vocab_size(tokenizer.vocab_size)
    model = tk.models.make_decoder_config(cfg.size, vocab_size=words)
    return first, tokenizer, name, model, cfg.batch.row_length


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    first, tokenizer, name, model, context = open_base(cfg)
    precision = tk.parallel.resolve_precision(cfg.precision)
    cfg = attrs.evolve(cfg, init=first.source, tokenizer=name, precision=precision)
    world, updates = tk.mesh.get_world_size(), cfg.rollout.updates
    problems = tk.parallel.problems(cfg.layout, model, cfg.batch, world=world)
    counts = [cfg.steps, cfg.supervised, cfg.checkpoints.save_every]
    if any(count % updates for count in counts):
        what = f"--steps, --supervised and --save-every are {counts}, not multiples of --updates"
        problems.append(ConfigError(f"{what} {updates}; a run is saved between rollouts alone"))
    tk.parallel.refuse(problems)
    with tk.open_run(cfg.out, **cfg.opened) as run:
        return train(cfg, run, tokenizer, model, first, context)


if __name__ == "__main__":
    tk.run.run_main(main)
