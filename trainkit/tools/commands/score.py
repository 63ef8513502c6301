"""`python -m trainkit score MODEL CORPUS --out FILE.tokens`: store a model's log-probabilities.

A frozen reference or teacher reads a corpus once. Its log-probabilities become columns of a token
file, so that training needs no second model. MODEL is a run, a checkpoint or a Hugging Face folder.

The log-probability of each token, "reference_logprobs":

  python -m trainkit score runs/pretrain books.tokens --out referenced.tokens

The 16 most likely tokens at each position and their log-probabilities, "teacher_ids" and
"teacher_logprobs", which objectives.stored_distillation reads:

  python -m trainkit score runs/pretrain books.tokens --out taught.tokens --top-k 16

Give the same command again to resume after an interruption: finished parts stay in OUT.parts until
the file is written.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from trainkit.files import print_to_stderr
from trainkit.types import ConfigError, Precision

HELP = "store a model's log-probabilities as columns of a token file"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    parser.add_argument("model", type=Path, help="a run, a checkpoint or a Hugging Face folder")
    parser.add_argument("corpus", type=Path, help="a .tokens file, or any source of prepare")
    parser.add_argument("--out", type=Path, required=True, help="the file to write: NAME.tokens")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="store the K most likely tokens at each position"
    )
    parser.add_argument(
        "--temperature", type=float, help="with --top-k: divide logits by this (default 1)"
    )
    parser.add_argument(
        "--context",
        type=int,
        help="maximum number of tokens in the model's input (default: the run's row length, or "
        "the context of the folder it started from)",
    )
    parser.add_argument(
        "--batch", type=int, default=8192, help="tokens per forward pass (default 8192)"
    )
    parser.add_argument(
        "--part", type=int, default=1 << 17, help="tokens per saved part (default 131072)"
    )
    parser.add_argument(
        "--compute", choices=("auto", "fp32", "bf16"), default="auto", help="dtype of computation"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Score the corpus and return a report and the exit code.

    Effects:
        Writes the token file, and OUT.parts until it is complete.
    """
    from trainkit import data, models, parallel  # noqa: PLC0415
    from trainkit.mesh import get_world_size, parallel_session  # noqa: PLC0415
    from trainkit.parallel.precision import DTYPES  # noqa: PLC0415
    from trainkit.post import adapters, evaluation  # noqa: PLC0415 - torch
    from trainkit.text import corpora  # noqa: PLC0415 - torch
    from trainkit.weights import hub  # noqa: PLC0415 - torch

    if options.temperature is not None and options.top_k is None:
        raise ConfigError(
            "score: --temperature needs --top-k: a reference is scored at temperature 1"
        )
    if get_world_size() > 1:
        raise ConfigError(f"score: needs one process, but there are {get_world_size()}")
    trained = hub.open_model(options.model, context=options.context, log=print_to_stderr)
    corpus = corpora.open_corpus(
        options.corpus, tokenizer=trained.tokenizer, template=trained.template
    )
    compute = parallel.resolve_precision(Precision(compute=options.compute)).compute
    temperature = options.temperature or 1.0  # the flag's None is for the check above
    make_model = functools.partial(models.Decoder, trained.config, head="hidden")
    with parallel_session() as ps:
        plan = [parallel.mixed_precision(DTYPES[compute])]
        stages = adapters.build_trained_stages(trained.path, make_model, ps, plan)
        columns = _make_columns(options, stages, temperature)
        parts_reused = evaluation.score_corpus(
            columns,
            corpus,
            options.out,
            # All that the values depend on: a part with other facts is computed again.
            facts={
                "model": _hash_weights(stages, ps),
                "corpus": data.fingerprint(corpus),
                "compute": compute,
                "top_k": options.top_k,
                "temperature": temperature,
                "batch": options.batch,
            },
            log=print_to_stderr,
            context=trained.context,
            part_tokens=options.part,
        )
    return {
        "path": str(options.out),
        "columns": [*columns[0]],
        "parts_reused": parts_reused,
        "tokens": int(corpus.offsets[-1]),
        "context": trained.context,
    }, 0


def _make_columns(options: argparse.Namespace, stages: Any, temperature: float) -> Any:
    """Return the columns to store, and their measure."""
    from trainkit import models  # noqa: PLC0415
    from trainkit.post import evaluation  # noqa: PLC0415 - torch
    from trainkit.post.evaluation.columns import make_top_k_columns  # noqa: PLC0415
    from trainkit.post.evaluation.score import make_top_k_scorer  # noqa: PLC0415

    if options.top_k is None:
        score = evaluation.make_scorer(
            stages, call=models.call_routed, tokens_per_batch=options.batch
        )
        return evaluation.make_logprob_columns(score)
    score_top_k = make_top_k_scorer(
        stages,
        options.top_k,
        call=models.call_routed,
        tokens_per_batch=options.batch,
        temperature=temperature,
    )
    return make_top_k_columns(score_top_k, options.top_k)


def _hash_weights(stages: Any, ps: Any) -> str:
    import torch  # noqa: PLC0415 - slow

    from trainkit.grads import get_parameters  # noqa: PLC0415 - torch
    from trainkit.types import TrainState  # noqa: PLC0415
    from trainkit.weights.checkpoint import state_hash  # noqa: PLC0415 - torch

    # An SGD without momentum has no state, so this is a hash of the weights alone.
    return state_hash(TrainState(), stages, torch.optim.SGD(get_parameters(stages)), ps)
