"""Evaluate a run or a Hugging Face folder: log-probabilities, choices, perplexity, lm-eval.

python recipes/evaluate.py                                  # runs/pretrain, on text it has not seen
python recipes/evaluate.py --run FOLDER --perplexity texts.jsonl --choices questions.jsonl
python recipes/evaluate.py --score pairs.jsonl --out scores  # a line of JSON for each
torchrun --nproc-per-node 2 recipes/evaluate.py --tp 2      # the same numbers
python recipes/evaluate.py --tasks hellaswag arc_easy --limit 100
"""

import functools
import json
from pathlib import Path

import attrs
import torch

import trainkit as tk
from trainkit import evaluation


@attrs.frozen(kw_only=True)
class Config:
    """Evaluate a run or a Hugging Face folder: log-probabilities, choices, perplexity, lm-eval."""

    run: Path | None = None
    """A run, a checkpoint or a Hugging Face folder; by default runs/pretrain, or a small base."""
    perplexity: Path | None = None
    """Texts: a file, a folder, lines of JSON with a field text."""
    choices: Path | None = None
    """Lines of JSON: {"context": "...", "choices": ["...", "..."], "answer": 0}."""
    score: Path | None = None
    """Lines of JSON: {"context": "...", "continuation": "..."}, or texts."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval: pip install "trainkit-lm[eval]"."""
    include: Path | None = None
    """A folder with YAML files of further tasks."""
    shots: int | None = None
    """How many solved examples stand before a task's questions; by default as the task has it."""
    limit: int = attrs.field(default=0, validator=tk.config.non_negative)
    """Take only so many questions of each task; 0 takes all."""
    out: Path | None = None
    """Where results go, a file for each kind; by default one in runs/evaluate."""
    tokenizer: str | None = None
    """bytes, or a tokenizer.json; by default the run's, or the folder's own."""
    context: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(tk.config.positive)
    )
    """The most tokens the model is given; by default a folder's own, a run's rows or its base's."""
    add_bos: bool | None = None
    """Begin contexts with BOS; by default where the model's training texts did."""
    batch: int = attrs.field(default=8192, validator=tk.config.positive)
    """Tokens that go through the model at once, on each rank."""
    compute: str = attrs.field(default="auto", validator=tk.config.one_of("auto", "fp32", "bf16"))
    """What is computed in; auto is bf16 on a GPU and fp32 on a CPU."""
    layout: tk.Layout = tk.config.option(tk.Layout())


def library(trained, how):
    """Return texts of Python's library that pretrain.py holds out, and questions made of them.

    Which of four endings is that of the text? Who guesses is right in 25 % of the cases.
    """
    whole = tk.corpora.open_library_corpus(trained.tokenizer)
    corpus, is_held = tk.corpora.hold_out(whole, one_in=40, piece=trained.context)
    lengths, size = corpus.lengths * is_held, min(128, trained.context)
    places = [
        (i, at) for at in range(0, 10 * size, size) for i in (lengths >= at + size).nonzero()[0]
    ]
    texts = [trained.tokenizer.decode(corpus.read(*place, size).tolist()) for place in places[:200]]
    endings = [text[len(text) // 2 :] for text in texts]
    questions = [
        {
            "context": text[: len(text) // 2],
            "choices": [endings[(i + shift - i % 4) % len(texts)] for shift in range(4)],
            "answer": i % 4,
        }
        for i, text in enumerate(texts)
    ]
    sources = {"library": tk.data.fingerprint(corpus)}
    return {
        "perplexity": ([evaluation.make_text_item({"text": x}, **how) for x in texts], sources),
        "choices": ([evaluation.make_choice_item(x, **how) for x in questions], sources),
    }


def how_of(cfg, trained):
    """Return how texts become tokens that the model is given."""
    add_bos = trained.adds_bos if cfg.add_bos is None else cfg.add_bos
    return {"tokenizer": trained.tokenizer, "context": trained.context, "add_bos": add_bos}


def read(cfg, trained, how):
    """Return what is asked, by kind, and of what files; bad input is refused here."""
    readers = {"perplexity": "read_texts", "choices": "read_choices", "score": "read_texts"}
    asked = {}
    for kind, reader in readers.items():
        if path := getattr(cfg, kind):
            sources = {}
            asked[kind] = getattr(evaluation, reader)(path, sources=sources, **how), sources
    return asked if asked or cfg.tasks else library(trained, how)


def build(cfg, ps, trained):
    """Return this rank's stages of the model, with its weights."""
    plan = tk.parallel.make_decoder_plan(cfg.layout, precision=tk.Precision(compute=cfg.compute))
    make_model = functools.partial(tk.models.Decoder, trained.config, head="hidden")
    call = tk.models.call_routed if trained.config.experts else tk.models.call_model
    how = {"schedule": cfg.layout.schedule, "call": call}
    return tk.adapters.build_trained_stages(trained.path, make_model, ps, plan, **how)


def bind_write(stages, trained, context):
    """Return the function that continues prompts for lm-eval."""
    tokenizer = trained.tokenizer
    ids = {"stop_ids": [tokenizer.eos_id], "vocab_size": tokenizer.vocab_size}

    def write(prompts, *, temperature, **wish):
        how = {"context": context, "tokenizer": tokenizer, **ids, **wish}
        sampling = tk.generation.Sampling(temperature=temperature)
        found = tk.generation.generate(stages, prompts, sampling=sampling, **how)
        return [completion.ids for completion in found]

    return write


def evaluate(cfg, ps, trained, asked, manager):
    """Score all that is asked, and return what it comes to; lines go to files."""
    stages = build(cfg, ps, trained)
    log = tk.run.make_logger(ps.world.share).info
    how = how_of(cfg, trained)
    score = evaluation.make_scorer(stages, tokens_per_batch=cfg.batch)
    nothing = torch.optim.SGD(tk.get_parameters(stages))
    facts = {"model": tk.state_hash(tk.TrainState(), stages, nothing, ps), "compute": cfg.compute}
    facts |= {name: how[name] for name in ("context", "add_bos")}
    facts |= {"tokenizer": tk.tokenizers.tokenizer_hash(trained.tokenizer)}
    found = {}
    for kind, (items, sources) in asked.items():
        line = evaluation.make_choice_record if kind == "choices" else evaluation.make_text_record
        lines_from = functools.partial(restart, score, items, line)
        path = cfg.out / f"{kind}.jsonl"
        had = evaluation.write_results(
            path, lines_from, facts={**facts, "data": sources}, axis=ps.world
        )
        log(f"{kind}: {len(items)} lines are in {path}" + (f", {had} were there" if had else ""))
        if kind != "score":
            results = evaluation.accuracy if kind == "choices" else evaluation.perplexity
            found[kind] = results(evaluation.read_results(path))
    if cfg.tasks:
        write = bind_write(stages, trained, how["context"])
        model = evaluation.make_harness_model(score, **how, generate=write)
        limits = {"shots": cfg.shots, "limit": cfg.limit}
        found["tasks"] = evaluation.evaluate_tasks(model, cfg.tasks, manager, **limits)
        log(f"tasks: {model.cut} contexts were cut on their left to {how['context']} tokens")
    return found


def restart(score, items, line, start):
    """Yield the lines of items from a number on."""
    return evaluation.score_in_groups(score, items, line, start=start)


def main(argv=None):
    """Read what is asked, refuse what does not fit, load the model, evaluate it."""
    cfg = tk.config.load_config(Config, argv)
    precision = tk.parallel.resolve_precision(tk.Precision(compute=cfg.compute))
    cfg = attrs.evolve(cfg, compute=precision.compute)
    path = cfg.run or tk.hub.ensure_base_run(Path(__file__).parent)
    trained = tk.hub.open_model(path, tokenizer=cfg.tokenizer, context=cfg.context)
    world = tk.mesh.get_world_size()
    tk.parallel.refuse(tk.parallel.problems(cfg.layout, trained.config, world=world))
    name = f"{path.absolute().name}-{trained.path.name}"
    cfg = attrs.evolve(cfg, out=cfg.out or Path("runs/evaluate") / name)
    asked = read(cfg, trained, how_of(cfg, trained))
    manager = evaluation.open_tasks(cfg.tasks, include=cfg.include) if cfg.tasks else None
    cfg.out.mkdir(parents=True, exist_ok=True)
    with tk.parallel_session(cfg.layout) as ps:
        found = evaluate(cfg, ps, trained, asked, manager)
        if ps.world.index == 0:
            text = json.dumps(found, indent=2)
            with tk.files.atomic_write(cfg.out / "results.json", by="evaluate") as file:
                file.write(f"{text}\n".encode())
            print(text)


if __name__ == "__main__":
    tk.run.run_main(main)
