"""`python -m trainkit score MODEL CORPUS --out FILE.tokens`: a model's log-probabilities, stored.

A frozen reference or teacher goes over a corpus once; what it finds are columns of a token file, by
which others are trained without it. MODEL is a run, a checkpoint or a Hugging Face folder.

The log-probability of each token, "reference_logprobs":

  python -m trainkit score runs/pretrain books.tokens --out referenced.tokens

The 16 likeliest words in the place of each token and their log-probabilities, "teacher_ids" and
"teacher_logprobs", which objectives.stored_distillation reads:

  python -m trainkit score runs/pretrain books.tokens --out taught.tokens --top-k 16

A command that was killed goes on when it is given again: finished parts lie in OUT.parts until the
file is written.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from trainkit.files import say_on_stderr
from trainkit.types import ConfigError, Precision

HELP = "store a model's log-probabilities as columns of a token file"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command's flags to its parser."""
    parser.add_argument("model", type=Path, help="a run, a checkpoint or a Hugging Face folder")
    parser.add_argument("corpus", type=Path, help="a .tokens file, or what prepare takes")
    parser.add_argument("--out", type=Path, required=True, help="the file to make: NAME.tokens")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="store the K likeliest words in each place instead"
    )
    parser.add_argument(
        "--temperature", type=float, help="with --top-k: what logits are divided by (1)"
    )
    parser.add_argument(
        "--context",
        type=int,
        help="the most tokens that the model is given (by default "
        "what it is for: its row length, or the context of the folder that it began with)",
    )
    parser.add_argument(
        "--batch", type=int, default=8192, help="tokens that go through it at once (8192)"
    )
    parser.add_argument(
        "--part", type=int, default=1 << 17, help="tokens after which work is kept (131072)"
    )
    parser.add_argument(
        "--compute", choices=("auto", "fp32", "bf16"), default="auto", help="what is computed in"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what was written, and the exit code.

    Effects:
        Writes the token file, and OUT.parts while it works.
    """
    from trainkit import data, models, parallel  # noqa: PLC0415
    from trainkit.mesh import get_world_size, parallel_session  # noqa: PLC0415
    from trainkit.post import adapters, evaluation  # noqa: PLC0415 - torch
    from trainkit.text import corpora  # noqa: PLC0415 - torch
    from trainkit.weights import hub  # noqa: PLC0415 - torch

    if options.temperature is not None and options.top_k is None:
        raise ConfigError("score: --temperature is for --top-k: a reference is scored as it is")
    if get_world_size() > 1:
        raise ConfigError(f"score: one process does it, and there are {get_world_size()}")
    trained = hub.open_model(options.model, context=options.context, log=say_on_stderr)
    corpus = corpora.open_corpus(
        options.corpus, tokenizer=trained.tokenizer, template=trained.template
    )
    compute = parallel.resolve_precision(Precision(compute=options.compute)).compute
    temperature = options.temperature or 1.0
    make_model = functools.partial(models.Decoder, trained.config, head="hidden")
    with parallel_session() as ps:
        plan = [parallel.mixed_precision(parallel.DTYPES[compute])]
        stages = adapters.build_trained_stages(trained.path, make_model, ps, plan)
        how: dict[str, Any] = {"call": models.call_routed, "tokens_per_batch": options.batch}
        if options.top_k is None:
            measured = evaluation.make_logprob_columns(evaluation.make_scorer(stages, **how))
        else:
            how |= {"temperature": temperature}
            found = evaluation.make_top_k_scorer(stages, options.top_k, **how)
            measured = evaluation.make_top_k_columns(found, options.top_k)
        facts = {
            "model": _hash(stages, ps),
            "corpus": data.fingerprint(corpus),
            "compute": compute,
            "top_k": options.top_k,
            "temperature": temperature,
            "batch": options.batch,
        }
        size = {"context": trained.context, "part_tokens": options.part}
        kept = evaluation.score_corpus(
            measured, corpus, options.out, facts=facts, log=say_on_stderr, **size
        )
    told = {"path": str(options.out), "columns": [*measured[0]], "parts_reused": kept}
    return {**told, "tokens": int(corpus.offsets[-1]), "context": trained.context}, 0


def _hash(stages: Any, ps: Any) -> str:
    """Return the hash of a model's weights."""
    import torch  # noqa: PLC0415 - slow

    from trainkit.grads import get_parameters  # noqa: PLC0415 - torch
    from trainkit.types import TrainState  # noqa: PLC0415
    from trainkit.weights.checkpoint import state_hash  # noqa: PLC0415 - torch

    return state_hash(TrainState(), stages, torch.optim.SGD(get_parameters(stages)), ps)
