"""Reinforcement learning from verifiable rewards (GRPO): a decoder learns to add numbers.

python reinforce.py                              # learns a little from examples first
torchrun --nproc-per-node 2 reinforce.py         # two, and the same losses
python reinforce.py --init MODEL --supervised 0  # a run or a Hugging Face folder
python reinforce.py --sampled answers.jsonl      # answers of another sampler

The model first imitates examples, of which three in four forget to carry, and so it mostly forgets
too. Then it samples answers of its own, and a function rewards the right ones: these rewards alone
make it carry. Sums are written backwards, units first, which a small decoder learns in seconds.

The frame is that of pretrain.py, whose comments explain it. The comments here are about rollouts.
"""

import functools
from pathlib import Path

import attrs
import numpy as np

import trainkit as tk


@attrs.frozen(kw_only=True)
class RolloutOptions:
    """A rollout: the answers that are sampled between updates."""

    prompts: int = attrs.field(default=32, validator=tk.config.positive)
    """Problems in a rollout."""
    answers: int = attrs.field(default=8, validator=attrs.validators.ge(2))
    """Answers per prompt, whose rewards are compared with each other."""
    updates: int = attrs.field(default=2, validator=tk.config.positive)
    """Steps per rollout, each on a part of it; the last part is this many steps old."""
    max_new_tokens: int = attrs.field(default=4, validator=tk.config.positive)
    """Tokens of the longest answer; a truncated one has a reward of 0."""
    clip: float = attrs.field(default=0.2, validator=tk.config.fraction)
    """PPO's clip range: the relative change of a token's probability that still adds gradient."""
    sampled: Path | None = tk.config.option(None, on_resume="allow")
    """Answers of another sampler, .jsonl or .parquet: prompt, ids, logprobs, truncated."""


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Reinforcement learning from verifiable rewards: sums of two numbers."""

    out: Path = tk.config.option(Path("runs/reinforce"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures."""
    steps: int = tk.config.option(280, tk.config.positive, on_resume="ignore")
    """Stop after this step, a multiple of updates. Nothing else depends on it."""
    supervised: int = tk.config.option(200, tk.config.non_negative)
    """The number of first steps, which imitate examples."""
    init: Path | None = tk.config.option(None, on_resume="allow")
    """A run, a checkpoint or a Hugging Face folder to start from; by default new weights."""
    tokenizer: str | None = tk.config.option(None, on_resume="allow")
    """bytes, or a tokenizer.json with an EOS; by default that of init, or bytes."""
    size: str = "tiny"
    """A named model size, of new weights; see trainkit.models.list_decoder_sizes."""
    eval_every: tk.schedules.Interval = tk.config.interval(40, on_resume="allow")
    """Steps between evaluations on held-out problems, from the end of the supervised steps on."""
    batch: tk.config.RowOptions = tk.config.RowOptions(
        row_length=64,
        rows=8,
        microbatch=32,
        multiple_of=4,
    )
    optim: tk.config.OptimizerOptions = tk.config.OptimizerOptions(lr=2e-3, schedule_steps=200)
    rollout: RolloutOptions = RolloutOptions()


def check(prompt, answer):
    """Return the reward of an answer: 1 if it is the sum, units first, else 0."""
    addends = map(int, prompt.rstrip("=").split("+"))
    return float(answer == str(sum(addends))[::-1])


def make_problems(cfg):
    """Return examples to imitate, problems to sample answers to, and held-out problems.

    All have the right answer; each example also has three that forget to carry.
    """

    def make_problem(a, b):
        forgetful = a + b - 10 * (a % 10 + b > 9)
        return f"{a:02}+{b}=", str(a + b)[::-1], str(forgetful)[::-1]

    problems = [make_problem(a, b) for a in range(100) for b in range(5, 10)]
    # One step of all rows is a permutation of them, the same on every rank.
    shuffle = tk.sampling.shuffle_epochs(
        len(problems),
        rows_per_step=len(problems),
        seed=cfg.seed,
    )
    problems = [problems[row] for row in shuffle(0)]
    # The first 100 problems are held out; examples are of the next 300.
    examples = [
        (problem, answer)
        for problem, right, forgetful in problems[100:400]
        for answer in (right, forgetful, forgetful, forgetful)
    ]
    solved = [(problem, right) for problem, right, _ in problems]
    return examples, solved[100:], solved[:100]


def build(cfg, ps, model, path):
    """Return this rank's part of the model, with its weights, and its optimizer."""
    plan = tk.parallel.make_decoder_plan(
        cfg.layout,
        precision=cfg.precision,
        recompute=cfg.recompute,
        compiled=cfg.compiled,
        attention=cfg.attention,
        offload=cfg.offload_activations,
    )
    weights = tk.models.init_weights(model, seed=cfg.seed)
    if path:
        weights = tk.adapters.open_base_weights(path, axis=ps.world)
    stages = tk.build_stages(
        functools.partial(tk.models.Decoder, model, head="hidden"),
        ps,
        plan,
        weights=weights,
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed,  # serves decoders with experts and without
    )
    optimizer = tk.optim.make_optimizer(
        stages,
        optimizer=cfg.optim.optimizer,
        lr=cfg.optim.lr,
        weight_decay=cfg.optim.weight_decay,
        options=cfg.optim.options,
        groups=cfg.optim.groups,
        mean=cfg.optim.mean,
        offload=cfg.optim.offload_optimizer,
        precision=cfg.precision,
        seed=cfg.seed,
    )
    return stages, optimizer


def make_forward_backward(cfg, stages):
    """Return forward_backward: the policy gradient of sampled answers, else the cross entropy."""
    # PPO's objective: a token adds no more to the gradient once the updates have made it 20 %
    # likelier, or less likely, than it was when it was sampled. Answers of another sampler have
    # importance weights, the trainer's probability over the sampler's, of at most 2.
    clip = tk.objectives.ppo_clip(cfg.rollout.clip, cfg.rollout.clip)
    importance = 2.0 if cfg.rollout.sampled else None
    sampler = tk.objectives.PolicyOptions(most_importance=importance)
    policy = tk.objectives.policy_gradient(clip, added=sampler)
    reinforce = tk.make_forward_backward(stages, policy, reduce=cfg.layout.reduce)
    imitate = tk.make_forward_backward(
        stages,
        tk.losses.next_token_linear,
        reduce=cfg.layout.reduce,
    )

    def forward_backward(microbatches, *, denominator):
        run = reinforce if "advantages" in microbatches[0] else imitate
        return run(microbatches, denominator=denominator)

    return forward_backward


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    # Warm up, and fall along a cosine to a tenth, which stays.
    lr_at = tk.schedules.cosine(
        cfg.optim.lr,
        warmup=cfg.optim.warmup,
        total=cfg.optim.schedule_steps,
        final=0.1,
    )

    def train_step(state, batch):
        # The tokens of answers, over all ranks. Prompts have no labels.
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        # The rest of the step is that of pretrain.py, for both kinds of steps.
        scale = tk.health.get_loss_scale(state.health, cfg.precision)
        sums = forward_backward(
            batch.microbatches, denominator=tk.batch.scale_denominator(tokens, scale)
        )
        tk.sync_sp_grads(stages, ps.sp_unfolded)
        terms = tk.losses.average_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        terms["loss"] = terms.pop("policy", terms.get("loss"))
        should_apply = tk.health.make_finite_check(
            terms["loss"], state.health, cfg.policy, tokens=tokens
        )
        lr = lr_at(state.step)
        update = tk.clip_and_step(
            stages,
            optimizer,
            lr=lr,
            max_norm=cfg.optim.max_norm,
            should_apply=should_apply,
            scale=scale,
        )
        metrics = {**terms, **update.metrics, "lr": lr, "tokens": tokens}
        return tk.advance(state, batch, metrics, axis=ps.loss)

    return train_step


def make_sampler(cfg, ps, model, sample_answers, tokenizer, problems):
    """Return sample(number): the answers of a rollout, of this model or from a file."""
    size = cfg.rollout.prompts * cfg.rollout.answers
    if cfg.rollout.sampled:
        return tk.generation.make_answer_reader(
            cfg.rollout.sampled,
            tokenizer=tokenizer,
            size=size,
            vocab_size=model.vocab_size,
            axis=ps.world,
        )
    rows_at = tk.sampling.shuffle_epochs(
        len(problems),
        rows_per_step=cfg.rollout.prompts,
        seed=cfg.seed,
    )

    def sample(number):
        # The noise of an answer is a function of the seed and its index: a resumed run samples
        # what it would have sampled, in any layout.
        return sample_answers(
            [problems[row][0] for row in rows_at(number)],
            answers_per_prompt=cfg.rollout.answers,
            first=number * size,
            seed=cfg.seed,
        )

    return sample


def make_rollouts(cfg, ps, stages, sample, make_batch):
    """Return roll_out(number, cursor): a batch for each update, and a report of the answers."""

    def roll_out(number, cursor):
        # GRPO: the advantage of an answer is its reward minus the mean reward of the answers to
        # the same prompt, over their standard deviation. There is no value network.
        answers = sample(number)
        checked = tk.generation.compute_rewards(check, answers, axis=ps.world)
        advantages = tk.generation.compute_advantages(answers, checked)
        # Each update takes a part of the answers. They are packed and sharded over ranks as any
        # corpus is; every token has its answer's advantage, in one more column.
        parts = tk.generation.split_rollout(
            answers,
            advantages,
            cfg.rollout.updates,
            capacity=cfg.batch.row_length,
            multiple_of=cfg.batch.multiple_of,
        )
        batches = []
        for part in parts:
            rows = np.arange(len(part))
            batch = make_batch(part, lambda _, rows=rows: rows, cursor)
            # The log-probabilities of the tokens by the weights that sampled them, before the
            # first update changes these: PPO compares with them.
            microbatches = tk.generation.add_old_logprobs(stages, batch.microbatches)
            batches.append(attrs.evolve(batch, microbatches=microbatches))
            cursor = batch.cursor
        report = checked.report(answers)
        if cfg.rollout.sampled:
            # Rejects answers of a sampler that has other weights than the trainer.
            report["apart"] = tk.generation.check_logprobs(
                [microbatch for batch in batches for microbatch in batch.microbatches],
                axis=ps.world,
            )
        return batches, report

    return roll_out


def make_evaluator(cfg, ps, stages, sample_answers, held_out, rows):
    """Return evaluate(): the share of right greedy answers, and the loss of right answers."""
    evaluate_loss = tk.evaluation.make_evaluator(
        stages,
        rows,
        tk.losses.next_token_linear,
        rows_per_batch=cfg.batch.microbatch,
    )

    def evaluate():
        # The most likely answers, so that an evaluation does not depend on noise.
        answers = sample_answers(
            [problem for problem, _ in held_out],
            temperature=0.0,
        )
        checked = tk.generation.compute_rewards(check, answers, axis=ps.world)
        success = sum(checked.rewards) / len(held_out)
        # The lower the score, the better the checkpoint.
        return {**evaluate_loss(), "success": success, "score": -success}

    return evaluate


def train(cfg, run, tokenizer, model, first, context):
    """Resume from the last checkpoint, or start, and train until `steps` or until a stop."""
    ps = run.ps
    examples, problems, held_out = make_problems(cfg)
    pack = functools.partial(
        tk.corpora.pack_examples,
        capacity=cfg.batch.row_length,
        tokenizer=tokenizer,
        multiple_of=cfg.batch.multiple_of,
        seed=cfg.seed,
    )
    rows = pack(examples)
    stages, optimizer = build(cfg, ps, model, first.path)
    run.describe(stages, rows.bins, rows_per_step=cfg.batch.rows, precision=cfg.precision)
    forward_backward = make_forward_backward(cfg, stages)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)

    # Samples answers, in rollouts and in evaluations. Prompts are sharded over the ranks that read
    # different rows; all ranks get all answers.
    sample_answers = functools.partial(
        tk.generation.sample_answers,
        stages,
        tokenizer=tokenizer,
        max_new_tokens=cfg.rollout.max_new_tokens,
        context=cfg.batch.row_length,
    )
    # Makes the microbatches of a step, from rows of examples or of a rollout.
    make_batch = functools.partial(
        tk.make_step_batch,
        rows_per_microbatch=cfg.batch.microbatch,
        data_shard=ps.data_shard,
        device=ps.device,
        pad_id=tokenizer.pad_id or 0,
    )
    rows_at = tk.sampling.shuffle_epochs(len(rows), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    sample = make_sampler(cfg, ps, model, sample_answers, tokenizer, problems)
    roll_out = make_rollouts(cfg, ps, stages, sample, make_batch)
    evaluate = make_evaluator(cfg, ps, stages, sample_answers, held_out, pack(held_out))

    state = run.resume(
        stages,
        optimizer,
        request=cfg.resume,
        config=cfg,
        model=model,
        tokenizer=tokenizer,
        rows=rows,
        first=first,
        facts={"context": max(cfg.batch.row_length, context)},
    )
    stop = None
    with run.loop(
        state,
        stages,
        optimizer,
        steps=cfg.steps,
        replay=forward_backward,
        checkpoints=cfg.checkpoints,
        logging=cfg.logging,
        policy=cfg.policy,
    ) as loop:
        # Without supervised steps the initial weights are evaluated.
        if state.step == cfg.supervised == 0:
            state = loop.evaluate(state, evaluate)
        while state.step < cfg.steps and not stop:
            # The batches up to the next possible save: one of examples, or those of a whole
            # rollout, since no checkpoint holds its answers.
            if state.step < cfg.supervised:
                batches = [make_batch(rows, rows_at, state.cursor)]
            else:
                # By the cursor, since a roll-back decreases the step. Rounded up: a rollout that
                # a roll-back interrupted is not sampled again.
                number = -((cfg.supervised - state.cursor.batch) // cfg.rollout.updates)
                batches, report = roll_out(number, state.cursor)
                loop.event("rollout", step=state.step, facts={"rollout": number, **report})
            for batch in batches:
                before = state.step
                state, metrics = train_step(state, batch)
                state = loop.record(state, metrics, batch)
                if state.step <= before:
                    break  # rolled back: the rest was sampled by weights that are gone
            if state.step >= cfg.supervised and loop.is_due(
                state,
                cfg.eval_every,
                since=cfg.supervised,
            ):
                state = loop.evaluate(state, evaluate)
            stop = loop.checkpoint(state)
        if not stop:
            loop.result("eval/success")  # the first and the last evaluation
    return run.finish(state, stages, optimizer, stop=stop)


def open_base(cfg):
    """Return the weights to start with, the tokenizer, its name, the model and its context."""
    first = tk.checkpoint.find_initial_weights(cfg.init, run_dir=cfg.out, request=cfg.resume)
    if first.path:
        base = tk.hub.open_model(first.path, tokenizer=cfg.tokenizer, context=cfg.batch.row_length)
        first = first.resolved(base.path)
        return first, base.tokenizer, base.name, base.config, base.full_context
    name = cfg.tokenizer or "bytes"
    tokenizer = tk.tokenizers.open_tokenizer(name)
    model = tk.models.make_decoder_config(cfg.size, num_ids=tokenizer.vocab_size)
    return first, tokenizer, name, model, cfg.batch.row_length


def main(argv=None):
    """Read the configuration, check it, open the process groups, and train."""
    cfg = tk.config.load_config(Config, argv)
    first, tokenizer, name, model, context = open_base(cfg)
    cfg = attrs.evolve(
        cfg,
        init=first.source,
        tokenizer=name,
        precision=tk.parallel.resolve_precision(cfg.precision),
    )
    # A checkpoint holds no answers: it is only complete between rollouts.
    every = cfg.checkpoints.save_every
    counts = [cfg.steps, cfg.supervised, *([int(every.value)] if every.unit == "steps" else [])]
    if any(count % cfg.rollout.updates for count in counts):
        raise ValueError(
            f"--steps, --supervised and --save-every are {counts}, not multiples of --updates "
            f"{cfg.rollout.updates}; a run is saved between rollouts alone"
        )
    tk.parallel.check_layout(cfg.layout, model, cfg.batch)
    with tk.open_run(
        cfg.out,
        layout=cfg.layout,
        timeouts=cfg.timeouts,
        numerics=cfg.numerics,
        config=cfg,
    ) as run:
        return train(cfg, run, tokenizer, model, first, context)


if __name__ == "__main__":
    tk.run.run_main(main)
