"""Evaluate a run or a Hugging Face folder: log-probabilities, choices, perplexity, lm-eval.

python evaluate.py                                  # runs/pretrain, on text it has not seen
python evaluate.py --run FOLDER --perplexity texts.jsonl --choices questions.jsonl
python evaluate.py --score pairs.jsonl --out scores  # a line of JSON for each
torchrun --nproc-per-node 2 evaluate.py --tp 2      # the same numbers
python evaluate.py --tasks hellaswag arc_easy --limit 100
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
    """The number of solved examples before each question; by default the task's own."""
    limit: int = attrs.field(default=0, validator=tk.config.non_negative)
    """The number of questions of each task; 0 takes all."""
    out: Path | None = None
    """Where results go, a file for each kind; by default one in runs/evaluate."""
    tokenizer: str | None = None
    """bytes, or a tokenizer.json; by default the run's, or the folder's own."""
    context: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(tk.config.positive)
    )
    """The longest input, in tokens; by default that of the folder, or of the run or its base."""
    add_bos: bool | None = None
    """Start contexts with BOS; by default if the model's training texts did."""
    batch: int = attrs.field(default=8192, validator=tk.config.positive)
    """Tokens that go through the model at once, on each rank."""
    compute: str = attrs.field(default="auto", validator=tk.config.one_of("auto", "fp32", "bf16"))
    """The dtype of the computation; auto is bf16 on a GPU and fp32 on a CPU."""
    layout: tk.Layout = tk.config.option(tk.Layout())


def library(trained, add_bos):
    """Return texts of Python's library that pretrain.py holds out, and questions made of them.

    Which of four endings is that of the text? Guessing is right in 25 % of the cases.
    """
    whole = tk.corpora.open_library_corpus(trained.tokenizer)
    # A document is held out by a hash of its name, here and in pretrain.py.
    corpus, is_held_out = tk.corpora.hold_out(whole, one_in=40, piece=trained.context)
    lengths = corpus.lengths * is_held_out
    size = min(128, trained.context)
    # The first `size` tokens of each document, then the next ones, and so on: 200 texts in all.
    places = [
        (document, start)
        for start in range(0, 10 * size, size)
        for document in (lengths >= start + size).nonzero()[0]
    ]
    texts = [trained.tokenizer.decode(corpus.read(*place, size).tolist()) for place in places[:200]]
    # The wrong endings are those of other texts, which are Python as well.
    endings = [text[len(text) // 2 :] for text in texts]
    questions = [
        {
            "context": text[: len(text) // 2],
            # The right ending is the first, second, third or fourth in turn.
            "choices": [endings[(i + shift - i % 4) % len(texts)] for shift in range(4)],
            "answer": i % 4,
        }
        for i, text in enumerate(texts)
    ]
    encode_text = functools.partial(
        evaluation.make_text_item,
        tokenizer=trained.tokenizer,
        context=trained.context,
        add_bos=add_bos,
    )
    encode_question = functools.partial(
        evaluation.make_choice_item,
        tokenizer=trained.tokenizer,
        context=trained.context,
        add_bos=add_bos,
    )
    sources = {"library": tk.data.fingerprint(corpus)}
    return {
        "perplexity": ([encode_text({"text": text}) for text in texts], sources),
        "choices": ([encode_question(question) for question in questions], sources),
    }


def begins_with_bos(cfg, trained):
    """Return whether contexts start with BOS, as the model's training texts did."""
    return trained.adds_bos if cfg.add_bos is None else cfg.add_bos


def read(cfg, trained):
    """Return the items to score by kind, with hashes of their files; bad input is rejected here."""
    # Texts to score are read as those of a perplexity, but have no summary.
    readers = {
        "perplexity": evaluation.read_texts,
        "choices": evaluation.read_choices,
        "score": evaluation.read_texts,
    }
    items_by_kind = {}
    for kind, reader in readers.items():
        if path := getattr(cfg, kind):
            sources = {}
            items = reader(
                path,
                sources=sources,
                tokenizer=trained.tokenizer,
                context=trained.context,
                add_bos=begins_with_bos(cfg, trained),
            )
            items_by_kind[kind] = items, sources
    if items_by_kind or cfg.tasks:
        return items_by_kind
    return library(trained, begins_with_bos(cfg, trained))


def build(cfg, ps, trained):
    """Return this rank's part of the model, with its weights."""
    # Any layout gives the same numbers; a large model needs several ranks to fit.
    plan = tk.parallel.make_decoder_plan(cfg.layout, precision=tk.Precision(compute=cfg.compute))
    # Of a run of adapters these are the base and the adapters.
    return tk.adapters.build_trained_stages(
        trained.path,
        functools.partial(tk.models.Decoder, trained.config, head="hidden"),
        ps,
        plan,
        schedule=cfg.layout.schedule,
        call=tk.models.call_routed if trained.config.experts else tk.models.call_model,
    )


def make_writer(stages, trained):
    """Return the function that continues prompts for tasks of lm-eval that ask for texts."""

    # A task's options for its texts; `make_harness_model` passes them by these names.
    def write(prompts, *, max_new_tokens, temperature, stop):
        completions = tk.generation.generate(
            stages,
            prompts,
            max_new_tokens=max_new_tokens,
            context=trained.context,
            sampling=tk.generation.Sampling(temperature=temperature),
            stop_ids=[trained.tokenizer.eos_id],
            stop=stop,
            tokenizer=trained.tokenizer,
            vocab_size=trained.tokenizer.vocab_size,
        )
        return [completion.ids for completion in completions]

    return write


def evaluate(cfg, ps, trained, items_by_kind, manager):
    """Score what was read, and return the results; a line for each item goes to a file."""
    log = tk.run.make_logger(ps.world.share).info
    stages = build(cfg, ps, trained)
    add_bos = begins_with_bos(cfg, trained)
    # The log-probability of every token. Examples are packed into rows and spread over ranks.
    score = evaluation.make_scorer(stages, tokens_per_batch=cfg.batch)
    # An interrupted evaluation resumes: lines that were written with the same weights, texts and
    # settings are not computed again.
    # The hash of a state needs an optimizer; this one has no state.
    no_optimizer = torch.optim.SGD(tk.get_parameters(stages))
    facts = {
        "model": tk.state_hash(tk.TrainState(), stages, no_optimizer, ps),
        "compute": cfg.compute,
        "context": trained.context,
        "add_bos": add_bos,
        "tokenizer": tk.tokenizers.tokenizer_hash(trained.tokenizer),
    }
    results = {}
    for kind, (items, sources) in items_by_kind.items():
        # A question is right if its answer is the most likely choice; a text has a perplexity.
        is_choice = kind == "choices"
        make_record = evaluation.make_choice_record if is_choice else evaluation.make_text_record
        path = cfg.out / f"{kind}.jsonl"
        num_reused = evaluation.write_results(
            path,
            functools.partial(score_from, score, items, make_record),
            facts={**facts, "data": sources},
            axis=ps.world,
        )
        log(
            f"{kind}: {len(items)} lines are in {path}"
            + (f", {num_reused} were there" if num_reused else "")
        )
        if kind != "score":
            summarize = evaluation.accuracy if is_choice else evaluation.perplexity
            results[kind] = summarize(evaluation.read_results(path))
    if cfg.tasks:
        model = evaluation.make_harness_model(
            score,
            trained.tokenizer,
            context=trained.context,
            add_bos=add_bos,
            generate=make_writer(stages, trained),
        )
        results["tasks"] = evaluation.evaluate_tasks(
            model,
            cfg.tasks,
            manager,
            shots=cfg.shots,
            limit=cfg.limit,
        )
        log(f"tasks: {model.cut} contexts were cut on their left to {trained.context} tokens")
    return results


def score_from(score, items, make_record, start):
    """Yield the records of items from an index on."""
    return evaluation.score_in_groups(score, items, make_record, start=start)


def main(argv=None):
    """Read what to evaluate, check it, load the model, and evaluate it."""
    cfg = tk.config.load_config(Config, argv)
    # All that can be rejected is rejected before the weights are read.
    precision = tk.parallel.resolve_precision(tk.Precision(compute=cfg.compute))
    path = cfg.run or tk.hub.ensure_base_run()
    trained = tk.hub.open_model(path, tokenizer=cfg.tokenizer, context=cfg.context)
    tk.parallel.check_layout(cfg.layout, trained.config)
    name = f"{path.absolute().name}-{trained.path.name}"
    cfg = attrs.evolve(cfg, compute=precision.compute, out=cfg.out or Path("runs/evaluate") / name)
    items_by_kind = read(cfg, trained)
    manager = evaluation.open_tasks(cfg.tasks, include=cfg.include) if cfg.tasks else None
    tk.run.make_run_dir(cfg.out)
    # Nothing is trained, so a layout is all there is around it: no run directory, no checkpoints.
    with tk.parallel_session(cfg.layout) as ps:
        results = evaluate(cfg, ps, trained, items_by_kind, manager)
        if ps.world.index == 0:
            text = json.dumps(results, indent=2)
            # The file is replaced as a whole: a reader never sees half of it.
            with tk.files.atomic_write(cfg.out / "results.json", by="evaluate") as file:
                file.write(f"{text}\n".encode())
            print(text)


if __name__ == "__main__":
    tk.run.run_main(main)
