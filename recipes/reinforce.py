"""Reinforce answers that a checker rewards: small sums, sampled by the model that learns them.

python recipes/reinforce.py                              # learns a little from examples first
torchrun --nproc-per-node 2 recipes/reinforce.py         # two, and the same losses
python recipes/reinforce.py --sampled answers.jsonl      # answers of another sampler
"""

import functools
from pathlib import Path

import attrs
import numpy as np
import torch

import trainkit as tk
from trainkit.types import ConfigError, Cursor, Sample, StepBatch


@attrs.frozen(kw_only=True)
class RolloutOptions:
    """What is sampled between updates."""

    prompts: int = attrs.field(default=32, validator=tk.config.positive)
    """Problems in a rollout."""
    answers: int = attrs.field(default=8, validator=tk.config.positive)
    """Answers to each, whose rewards are compared with each other."""
    updates: int = attrs.field(default=2, validator=tk.config.positive)
    """Steps for each rollout, on a part of it each; the last is on answers so many steps old."""
    max_new_tokens: int = attrs.field(default=5, validator=tk.config.positive)
    """An answer is cut off after so many tokens, and then earns nothing."""
    clip: float = attrs.field(default=0.2, validator=tk.config.fraction)
    """How much likelier or less likely a token may become by the updates of a rollout."""
    seconds: float = tk.config.option(1.0, tk.config.positive, change="free")
    """How long the checker may take for an answer."""
    sampled: Path | None = tk.config.option(None, change="free")
    """Answers of another sampler, .jsonl or .parquet: prompt, answer, logprobs, truncated."""


@attrs.frozen(kw_only=True)
class Config(tk.config.RunConfig):
    """Reinforce answers that a checker rewards; by default, to sums of two numbers."""

    out: Path = tk.config.option(Path("runs/reinforce"), change="no fact")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""
    steps: int = tk.config.option(400, tk.config.positive, change="no fact")
    """Stop after this step, a multiple of updates. Nothing else depends on it."""
    supervised: int = tk.config.option(100, tk.config.positive)
    """So many steps first learn from some of the problems, whose answers are shown."""
    tokenizer: str = "bytes"
    """bytes, or a tokenizer.json with a BOS and an EOS."""
    size: str = "tiny"
    """A named model size; see trainkit.models.decoder_sizes."""
    eval_every: int = tk.config.option(100, tk.config.positive, change="free")
    """Ask what is held out after the supervised steps, every so many steps, and at the end."""
    batch: tk.config.RowOptions = tk.config.RowOptions(row_length=64, rows=16, multiple_of=4)
    optim: tk.config.OptimOptions = tk.config.OptimOptions(lr=3e-3, schedule_steps=100)
    rollout: RolloutOptions = RolloutOptions()


def check(prompt, answer):
    """Return what an answer earns: 1 if it is the sum, else 0."""
    return float(answer == str(sum(map(int, prompt.rstrip("=").split("+")))))


def make_problems(cfg):
    """Return (prompt, answer) pairs: shown with answers, asked for them, and held out from both."""
    every = [(f"{a}+{b}=", str(a + b)) for a in range(100) for b in range(10)]
    order = tk.sampling.rows_of_epochs(len(every), rows_per_step=len(every), seed=cfg.seed)
    every = [every[row] for row in order(0)]
    return every[200:800], every[200:], every[:200]


def encode(cfg, tokenizer, problems):
    """Return problems with their answers, of which the answers' tokens count."""
    begin, end = [tokenizer.bos_id], [tokenizer.eos_id]
    ids = [[tokenizer.encode(text) for text in problem] for problem in problems]
    how = {"context": cfg.batch.row_length}
    return [tk.evaluation.make_example([*begin, *x], [*y, *end], **how) for x, y in ids]


def pack_shown(cfg, tokenizer, problems):
    """Return rows of examples, which end in three ways: the checker takes but one of them."""
    shown = encode(cfg, tokenizer, [(x, y + end) for x, y in problems for end in ("", ".", "!")])
    samples = [Sample(x.ids, np.arange(len(x.ids)) >= len(x.ids) - x.scored) for x in shown]
    corpus = tk.corpora.memory_corpus(samples)
    size = {"multiple_of": cfg.batch.multiple_of, "overlong": "error", "seed": cfg.seed}
    return tk.Packed(corpus, tk.pack_bins(corpus.lengths, cfg.batch.row_length, **size))


def build(cfg, ps, model):
    """Return this rank's stages of the model and their optimizer."""
    plan = [
        tk.parallel.tensor(),
        tk.parallel.sequence(),
        tk.parallel.precision(tk.parallel.DTYPES[cfg.dtype]),
        tk.parallel.recompute(cfg.recompute, preserve_rng_state=False),
        *([tk.parallel.compiled()] if cfg.compiled else []),
        tk.parallel.fsdp(cfg.layout),
    ]
    make_model = functools.partial(tk.models.Decoder, model, head="hidden")
    weights = tk.models.init_weights(model, seed=cfg.seed)
    stages = tk.build_stages(make_model, ps, plan, weights=weights, schedule=cfg.layout.schedule)
    named, decay = tk.named_parameters_of(stages), cfg.optim.weight_decay
    return stages, tk.optim.adamw(tk.optim.decay_groups(named, weight_decay=decay), lr=cfg.optim.lr)


def bind_losses(cfg, ps, stages):
    """Return forward_backward: the policy gradient of what was sampled, else the cross entropy."""
    order = {"axis": ps.pp, "schedule": cfg.layout.schedule, "reduce": cfg.layout.reduce}
    added = tk.losses.Added(most_importance=2.0 if cfg.rollout.sampled else None)
    policy = tk.losses.policy_gradient(tk.losses.clipped(*[cfg.rollout.clip] * 2), added=added)
    reinforce = tk.bind_forward_backward(stages, policy, **order)
    imitate = tk.bind_forward_backward(stages, tk.losses.next_token_linear, **order)

    def forward_backward(microbatches, *, denominator):
        was_sampled = "advantages" in microbatches[0]
        return (reinforce if was_sampled else imitate)(microbatches, denominator=denominator)

    return forward_backward


def make_train_step(cfg, ps, stages, optimizer, forward_backward):
    """Return train_step(state, batch) -> (state, metrics): all of one step, in order."""
    params, total = tk.parameters_of(stages), cfg.optim.schedule_steps
    lr_at = tk.schedules.cosine(cfg.optim.lr, warmup=cfg.optim.warmup, total=total, final=0.1)
    clip = {"max_norm": cfg.optim.max_norm, "axis": ps.pp, "world": ps.world}

    def train_step(state, batch):
        tokens = tk.all_sum(tk.count_valid_tokens(batch.microbatches), ps.loss)
        sums = forward_backward(batch.microbatches, denominator=tokens)
        tk.sync_sp_grads(params, ps.sp_unfolded)
        terms = tk.losses.mean_terms(tk.reduce_metrics(sums, ps.loss), tokens)
        terms["loss"] = terms.pop("policy", terms.get("loss"))
        applies = tk.health.step_test(terms["loss"], state.health, cfg.policy, tokens=tokens)
        lr = lr_at(state.step)
        update = tk.clip_and_step(params, optimizer, lr=lr, applies=applies, **clip)
        metrics = {**terms, "grad_norm": update.norm, "skipped": ~update.applied, "lr": lr}
        return tk.advance(state, batch, {**metrics, "tokens": tokens}, axis=ps.loss)

    return train_step


def bind_sampler(cfg, ask, tokenizer, problems):
    """Return sample(number), the answers of a rollout: this model's, or those of a file."""
    options, sampling = cfg.rollout, tk.generation.Sampling(seed=cfg.seed)
    size = options.prompts * options.answers
    if options.sampled:
        records = [record for _, record in tk.corpora.read_records(options.sampled)]
        answers = tk.generation.read_answers(records, tokenizer=tokenizer)
        return functools.partial(tk.generation.nth_rollout, answers, size=size)
    how = {"rows_per_step": options.prompts, "seed": cfg.seed}
    rows_at = tk.sampling.rows_of_epochs(len(problems), **how)

    def sample(number):
        prompts = [problems[row][0] for row in rows_at(number)]
        return ask(prompts, sampling=sampling, each=options.answers, first=number * size)

    return sample


def bind_rollout(cfg, ps, sample, score):
    """Return roll_out(number): rows for each update, with advantages, and what it came to."""
    cut = {"capacity": cfg.batch.row_length, "multiple_of": cfg.batch.multiple_of}

    def roll_out(number):
        answers = sample(number)
        how = {"seconds": cfg.rollout.seconds, "axis": ps.world}
        checked = tk.generation.check_answers(check, answers, **how)
        how = {"context": cfg.batch.row_length}
        examples = [tk.evaluation.make_example(x.prompt_ids, x.ids, **how) for x in answers]
        old = [found.logprobs for found in score(examples)]
        if cfg.rollout.sampled and number == 0:
            tk.generation.check_logprobs(answers, old)
        rewards = torch.tensor(checked.rewards, dtype=torch.float64)
        groups, count = torch.tensor([x.group for x in answers]), answers[-1].group + 1
        advantages = tk.losses.group_advantages(rewards, groups, num_groups=count)
        corpus = tk.generation.answer_corpus(answers, old_logprobs=old, advantages=advantages)
        told = tk.generation.report_answers(answers, checked)
        return tk.generation.minibatches(corpus, cfg.rollout.updates, **cut), told

    return roll_out


def bind_evaluation(cfg, ps, ask, score, problems):
    """Return evaluate(): how many greedy answers are right, and the loss of the right ones."""
    greedy, how = tk.generation.Sampling(temperature=0.0), {"seconds": cfg.rollout.seconds}
    prompts, examples = problems

    def evaluate():
        said = ask(prompts, sampling=greedy)
        checked = tk.generation.check_answers(check, said, axis=ps.world, **how)
        success = sum(checked.rewards) / len(prompts)
        tokens = sum(example.scored for example in examples)
        loss = -sum(found.logprob for found in score(examples)) / tokens
        return {"loss": loss, "tokens": tokens, "success": success, "score": -success}

    return evaluate


def bind_batches(cfg, run, tokenizer, shown, roll_out):
    """Return batches(state, event): what is trained on until weights may be saved again."""
    rows_at = tk.sampling.rows_of_epochs(len(shown), rows_per_step=cfg.batch.rows, seed=cfg.seed)
    how = {"place": run.ps.place, "device": run.ps.device, "pad_id": tokenizer.pad_id or 0}
    how |= {"rows_per_microbatch": cfg.batch.microbatch}
    deal = functools.partial(tk.data.deal_rows, **how)

    def batches(state, event):
        batch = state.cursor.batch
        if state.step < cfg.supervised:
            dealt = [deal(shown, rows_at(batch))]
        else:
            number = -((cfg.supervised - batch) // cfg.rollout.updates)  # rounded up
            parts, told = roll_out(number)
            event("rollout", step=state.step, rollout=number, **told)
            dealt = [deal(part, np.arange(len(part))) for part in parts]
        return [StepBatch(x, Cursor(batch + i)) for i, x in enumerate(dealt, start=1)]

    return batches


def train(cfg, run, tokenizer, model):
    """Go on from the last checkpoint, or begin, and train until `steps` or until a stop."""
    ps, (to_show, to_ask, held) = run.ps, make_problems(cfg)
    shown = pack_shown(cfg, tokenizer, to_show)
    stages, optimizer = build(cfg, ps, model)
    size = {"rows_per_step": cfg.batch.rows, "dtype": cfg.dtype}
    run.say(tk.parallel.start_lines(stages, ps, shown.bins, **size))
    forward_backward = bind_losses(cfg, ps, stages)
    train_step = make_train_step(cfg, ps, stages, optimizer, forward_backward)
    axes = {"place": ps.place, "axis": ps.loss, "pp": ps.pp, "tp": ps.tp}
    score = tk.evaluation.bind_score(stages, **axes, pad_id=tokenizer.pad_id or 0)
    how = {"max_new_tokens": cfg.rollout.max_new_tokens, "context": cfg.batch.row_length}
    how |= {"tokenizer": tokenizer, "call": tk.parallel.bind_call(stages, ps)}
    ask = functools.partial(tk.generation.sample_answers, stages[0], **how)
    roll_out = bind_rollout(cfg, ps, bind_sampler(cfg, ask, tokenizer, to_ask), score)
    batches = bind_batches(cfg, run, tokenizer, shown, roll_out)
    problems = [prompt for prompt, _ in held], encode(cfg, tokenizer, held)
    evaluate = bind_evaluation(cfg, ps, ask, score, problems)
    facts = tk.config.config_facts(cfg) | {"model": attrs.asdict(model)}
    facts |= {"tokenizer": tk.tokenizers.tokenizer_hash(tokenizer)}
    how = {"facts": facts, "changes": tk.config.changes_of(cfg), "request": cfg.resume}
    state, stop = run.resume(stages, optimizer, **how), None
    around = {"steps": cfg.steps, "keeping": cfg.keeping, "policy": cfg.policy}
    with run.loop(state, stages, optimizer, replay=forward_backward, **around) as loop:
        while state.step < cfg.steps and not stop:
            for batch in batches(state, loop.event):
                begun = state.step
                state, metrics = train_step(state, batch)
                state = loop.after(state, metrics, batch)
                if state.step <= begun:
                    break  # the run went back: the rest was sampled by weights that are gone
            done, last = state.step - cfg.supervised, cfg.steps - cfg.supervised
            if done >= 0 and tk.schedules.due(done, cfg.eval_every, last=last):
                state = loop.evaluated(state, evaluate)
            stop = loop.keep(state)
        if not stop:
            loop.event("result", **tk.sinks.before_and_after(run.dir, "eval/success"))
    if stop:
        return tk.runtime.SAVED
    run.finish(state, stages, optimizer)
    return 0


def main(argv=None):
    """Read the configuration, refuse a layout that does not fit, open the process groups, train."""
    cfg = tk.config.load_config(Config, argv)
    cfg = attrs.evolve(cfg, dtype=tk.parallel.choose_dtype(cfg.dtype))
    tokenizer = tk.tokenizers.open_tokenizer(cfg.tokenizer)
    vocab_size = tk.models.round_up_vocabulary(tokenizer.vocab_size)
    model = tk.models.decoder_config(cfg.size, vocab_size=vocab_size)
    problems = tk.parallel.problems(cfg.layout, model, cfg.batch, world=tk.mesh.world_size())
    counts, updates = [cfg.steps, cfg.supervised, cfg.keeping.save_every], cfg.rollout.updates
    if any(count % updates for count in counts):
        what = f"--steps, --supervised and --save-every are {counts}, not multiples of --updates"
        problems.append(ConfigError(f"{what} {updates}; a run is saved between rollouts alone"))
    tk.parallel.refuse(problems)
    told = tk.config.plain_values(cfg)
    with tk.open_run(cfg.out, layout=cfg.layout, limits=cfg.limits, config=told) as run:
        return train(cfg, run, tokenizer, model)


if __name__ == "__main__":
    tk.runtime.leave(main)
