"""Run EleutherAI's `lm-eval` on a model in any layout; it is imported on first use.

The harness has three requests, which map to functions of this package: log-likelihoods to
`make_scorer`, those of long texts to its sums over `make_rolling_windows`, and generated texts to a
function of the caller.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trainkit.post.evaluation.examples import (
    encode_with_bos,
    get_prefix_id,
    make_example,
    make_rolling_windows,
)
from trainkit.post.evaluation.score import Scorer
from trainkit.types import ConfigError, Tokenizer, check_range, needs_extra

Generate = Callable[..., Sequence[Sequence[int]]]
"""`Generate(prompts, *, max_new_tokens, temperature, stop) -> the new token ids of each prompt`.

`prompts` are lists of token ids; a text may end at any of the strings in `stop`.
"""

_DEFAULT_MAX_TOKENS = 256  # of tasks without a length, as with lm-eval's own models
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def make_harness_model(
    score: Scorer,
    tokenizer: Tokenizer,
    *,
    context: int,
    generate: Generate | None = None,
    rows: int = 16,
    add_bos: bool = False,
) -> Any:
    """Wrap a model as an `lm_eval.api.model.LM`.

    Its results equal those of the harness's `hf` model on the same weights and ids. It receives all
    requests on every rank and shards them itself, so the harness sees one process. Its attribute
    `cut` counts truncated contexts.

    Args:
        score: The model's scorer, from `make_scorer`.
        tokenizer: The model's tokenizer.
        context: Maximum number of tokens in the model's input; longer contexts are truncated on
            their left.
        generate: Generates texts; without it, tasks that need it raise ConfigError.
        rows: Maximum number of prompts in a call of `generate`; the longest come first.
        add_bos: Prepend BOS to contexts, as `transformers` does if the tokenizer's config says so.

    Raises:
        ConfigError: `lm-eval` is missing: `pip install "trainkit-lm[eval]"`.

    Examples:
        >>> import numpy as np
        >>> from trainkit.post.evaluation.score import ExampleScores
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> score = lambda examples: [ExampleScores(-np.ones(x.scored), False) for x in examples]
        >>> model = make_harness_model(score, make_byte_tokenizer(), context=8)
        >>> from lm_eval.api.instance import Instance
        >>> ask = lambda kind, *args: [Instance(kind, {}, args, 0)]
        >>> model.loglikelihood(ask("loglikelihood", "a", " bc"), disable_tqdm=True)
        [(-3.0, False)]
        >>> model.loglikelihood_rolling(ask("loglikelihood_rolling", "twelve bytes"))
        [-12.0]
    """
    with needs_extra("eval"):
        from lm_eval.api.model import TemplateLM  # noqa: PLC0415 - an extra

    class TrainkitModel(_Requests, TemplateLM):
        pass

    check_range("make_harness_model", at_least=1, rows=rows)
    return TrainkitModel(
        score, tokenizer, context=context, generate=generate, rows=rows, add_bos=add_bos
    )


class _Requests:
    """The harness's three requests, as a mixin for its TemplateLM, which is imported on use.

    TemplateLM splits texts into pairs of context and continuation.
    """

    cache_hook: Any

    def __init__(
        self,
        score: Scorer,
        tokenizer: Tokenizer,
        *,
        context: int,
        generate: Generate | None,
        rows: int,
        add_bos: bool,
    ) -> None:
        super().__init__()
        self.score = score
        # TemplateLM has an attribute `tokenizer` for one of transformers, which it would use.
        self.own_tokenizer = tokenizer
        self.context = context
        self.generate = generate
        self.rows = rows
        self.add_bos = add_bos
        self.cut = 0

    @property
    def eot_token_id(self) -> Any:
        return getattr(self.own_tokenizer, "eos_id", None)

    @property
    def prefix_token_id(self) -> int:
        return get_prefix_id(self.own_tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return type(self.own_tokenizer).__name__

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        # lm-eval passes False for a text without context, and prepends the prefix itself.
        add_bos = self.add_bos and add_special_tokens is not False
        return encode_with_bos(self.own_tokenizer, string, add_bos=add_bos)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        # A request is the pair of texts, which keys lm-eval's cache, and the ids of each.
        examples = [make_example(a, b, context=self.context) for _, a, b in requests]
        self.cut += sum(example.cut > 0 for example in examples)
        results = [(scores.logprob, scores.greedy) for scores in self.score(examples)]
        # lm-eval's own cache of results, if it is on.
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], result)
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        del disable_tqdm
        windows = [
            make_rolling_windows(
                self.tok_encode(request.args[0]),
                prefix=self.prefix_token_id,
                context=self.context,
            )
            for request in requests
        ]
        # One call for all windows, so that they are packed into full batches.
        scores = iter(self.score([window for of_text in windows for window in of_text]))
        logprobs = [sum(next(scores).logprob for _ in of_text) for of_text in windows]
        for request, logprob in zip(requests, logprobs, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, logprob)
        return logprobs

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        if self.generate is None:
            raise ConfigError(
                "make_harness_model: a task needs generated texts, but there is no generate=",
                where="generate",
                hint="give generate=",
            )
        # Requests with the same options are generated in one call.
        by_options: dict[_GenerateOptions, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(_parse_options(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for options, indices in by_options.items():
            prompts = {i: self._encode_prompt(requests[i].args[0], options) for i in indices}
            # The longest first: prompts of similar lengths waste few steps, and a batch that is too
            # large for the memory fails at once.
            order = sorted(indices, key=lambda i: -len(prompts[i]))
            for start in range(0, len(order), self.rows):
                batch = order[start : start + self.rows]
                completions = self.generate(
                    [prompts[i] for i in batch],
                    max_new_tokens=options.max_new_tokens,
                    temperature=options.temperature,
                    stop=list(options.stop),
                )
                for index, ids in zip(batch, completions, strict=True):
                    text = self.own_tokenizer.decode(ids)
                    # Another `generate` than ours may return the stop string, too.
                    for stop in filter(None, options.stop):
                        text = text.split(stop, maxsplit=1)[0]
                    texts[index] = text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _encode_prompt(self, prompt: str, options: _GenerateOptions) -> list[int]:
        max_length = self.context - options.max_new_tokens
        if max_length < 1:
            raise ConfigError(
                f"make_harness_model: a task needs {options.max_new_tokens} tokens, but the "
                f"model's context is {self.context}",
                got=options.max_new_tokens,
                want=f"at most {self.context - 1}",
                hint="give max_gen_toks in the task's generation_kwargs",
            )
        # The end of a prompt is what the answer continues.
        return self.tok_encode(prompt)[-max_length:] or [self.prefix_token_id]


@attrs.frozen
class _GenerateOptions:
    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...]


def _parse_options(generation_kwargs: Mapping[str, Any]) -> _GenerateOptions:
    """Return the arguments of `Generate` from a task's generation_kwargs.

    Raises ConfigError for unknown ones.
    """
    # What remains after the known options would silently change a task's figures.
    unknown = dict(generation_kwargs)
    until = unknown.pop("until", None) or []
    lengths = [value for name in _LENGTHS if (value := unknown.pop(name, None)) is not None]
    temperature = unknown.pop("temperature", None)
    do_sample = unknown.pop("do_sample", None)
    if unknown:
        raise ConfigError(
            f"make_harness_model: a task needs {', '.join(sorted(unknown))}, which generate does "
            "not support",
            where="generation_kwargs",
            got=sorted(unknown),
            want=["until", "do_sample", "temperature", *_LENGTHS],
        )
    if do_sample is None:  # as with lm-eval's hf model: a temperature asks for sampling
        do_sample = bool(temperature)
    if not do_sample:
        temperature = 0.0
    return _GenerateOptions(
        max_new_tokens=int(lengths[0]) if lengths else _DEFAULT_MAX_TOKENS,
        temperature=1.0 if temperature is None else float(temperature),
        stop=(until,) if isinstance(until, str) else tuple(until),
    )


def open_tasks(names: Sequence[str], *, include: Path | str | None = None) -> Any:
    """Return a `TaskManager` of lm-eval that has the given tasks.

    Args:
        names: Names of tasks or of groups of them, or paths of YAML files.
        include: A folder with YAML files of tasks. If it has all of them, lm-eval's thousands are
            not loaded, which would take half a minute.

    Raises:
        ConfigError: `lm-eval` is missing, or has no such task; the message lists similar names.

    Effects:
        Reads the YAML files of tasks.

    Examples:
        >>> open_tasks(["lamda"], include="/does/not/exist")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: open_tasks: there is no folder /does/not/exist
    """
    with needs_extra("eval"):
        from lm_eval.tasks import TaskManager  # noqa: PLC0415 - an extra
    if include is not None and not Path(include).is_dir():
        raise ConfigError(f"open_tasks: there is no folder {include}", where="include")
    include_path = None if include is None else str(include)
    for include_defaults in (False, True):  # lm-eval's own tasks take half a minute to load
        manager = TaskManager(include_path=include_path, include_defaults=include_defaults)
        missing = [x for x in names if not (Path(x).is_file() or manager.match_tasks([x]))]
        if not missing:
            return manager
    similar = [x for name in missing for x in difflib.get_close_matches(name, manager.all_tasks)]
    raise ConfigError(
        f"open_tasks: lm-eval has no task {', '.join(missing)}",
        where="tasks",
        got=missing,
        hint=f"similar names: {', '.join(similar)}" if similar else "see `lm-eval ls tasks`",
    )


def evaluate_tasks(
    model: Any, names: Sequence[str], manager: Any, *, shots: int | None = None, limit: int = 0
) -> dict[str, dict[str, Any]] | None:
    """Evaluate a model on tasks of `lm-eval`.

    Args:
        model: From `make_harness_model`; all of its ranks call this.
        names: Names of tasks.
        manager: The manager of these tasks, from `open_tasks`.
        shots: Number of few-shot examples; by default that of the task.
        limit: Maximum number of questions per task; 0 takes all.

    Returns:
        {task: {metric: value}} on the first rank of a host, None on others.

    Raises:
        ConfigError: `lm-eval` is missing.

    Effects:
        The harness seeds the generators of Python, numpy and torch, logs, and loads data: for most
        of its tasks from a hub.

    Examples:
        >>> evaluate_tasks(None, ["lambada"], None)
        Traceback (most recent call last):
        ...
        TypeError: The value of `model` passed to simple_evaluate() was of type ...
    """
    with needs_extra("eval"):
        import lm_eval  # noqa: PLC0415 - an extra
    report = lm_eval.simple_evaluate(
        model,
        tasks=list(names),
        task_manager=manager,
        num_fewshot=shots,
        limit=limit or None,
        # No standard errors: those of some metrics are resampled, which takes long.
        bootstrap_iters=0,
        log_samples=False,
    )
    return None if report is None else report["results"]
