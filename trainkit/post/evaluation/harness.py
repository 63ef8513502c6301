"""EleutherAI's `lm-eval` on a model of ours, in any layout; nothing of it is imported before.

The harness asks three things of a model, and each is a function of this room: log-likelihoods are
`make_scorer`, those of long texts its sums over `make_rolling_windows`, and texts come from
whatever writes them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.post.evaluation.examples import (
    get_prefix_id,
    make_example,
    make_rolling_windows,
    with_bos,
)
from trainkit.post.evaluation.score import Scorer
from trainkit.types import ConfigError, Tokenizer, check_range, needs_extra

Generate = Callable[..., Sequence[Sequence[int]]]
"""`Generate(prompts, *, max_new_tokens, temperature, stop) -> the new token ids of each prompt`.

`prompts` are lists of token ids, `stop` texts after which a text may end early.
"""

_MOST_TOKENS = 256  # that are written where a task does not say, as with lm-eval's own models
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
    """Return a model as `lm-eval` takes it: an `lm_eval.api.model.LM`.

    Its numbers are those of the harness's own `hf` model on the same weights and ids. It takes all
    requests on every rank and shares them out itself, so that to the harness there is one process.
    Its attribute `cut` counts the contexts that were too long.

    Args:
        score: The model, from `make_scorer`.
        tokenizer: Its tokenizer.
        context: The most tokens that it is given; longer contexts are cut on their left.
        generate: What writes texts; without it a task that needs it is refused.
        rows: How many prompts `generate` is given at a time, at most; the longest come first.
        add_bos: Begin contexts with BOS, as `transformers` does for tokenizers that say so.

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

    class TrainkitModel(_Answers, TemplateLM):
        pass

    check_range("make_harness_model", at_least=1, rows=rows)
    write = None if generate is None else partial(_in_batches, generate, rows=rows)
    return TrainkitModel(score, tokenizer, context, write, add_bos)


class _Answers:
    """The three questions of the harness, to be mixed with its class, which is not imported here.

    How texts are cut into pairs is the harness's own.
    """

    cache_hook: Any

    def __init__(
        self,
        score: Scorer,
        tokenizer: Tokenizer,
        context: int,
        generate: Generate | None,
        add_bos: bool,
    ) -> None:
        super().__init__()
        self.score, self.words, self.context = score, tokenizer, context
        self.generate, self.add_bos, self.cut = generate, add_bos, 0

    @property
    def eot_token_id(self) -> Any:
        return getattr(self.words, "eos_id", None)

    @property
    def prefix_token_id(self) -> int:
        return get_prefix_id(self.words)

    @property
    def tokenizer_name(self) -> str:
        return type(self.words).__name__

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return with_bos(self.words, string, add=self.add_bos and add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        examples = [make_example(a, b, context=self.context) for _, a, b in requests]
        self.cut += sum(example.cut > 0 for example in examples)
        answers = [(found.logprob, found.greedy) for found in self.score(examples)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        del disable_tqdm
        asked = [request.args for request in requests]
        windows = [
            make_rolling_windows(
                self.tok_encode(text), prefix=self.prefix_token_id, context=self.context
            )
            for (text,) in asked
        ]
        found = iter(self.score([window for each in windows for window in each]))
        sums = [sum(next(found).logprob for _ in each) for each in windows]
        for args, total in zip(asked, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        if self.generate is None:
            raise ConfigError(
                "make_harness_model: a task asks for texts, and nothing here writes them",
                where="generate",
                hint="give generate=",
            )
        asked = [request.args for request in requests]
        texts = _written(asked, self.tok_encode, self.words, self.generate, context=self.context)
        for args, text in zip(asked, texts, strict=True):
            self.cache_hook.add_partial("generate_until", args, text)
        return texts


def _written(
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    encode: Callable[[str], list[int]],
    tokenizer: Tokenizer,
    generate: Generate,
    *,
    context: int,
) -> list[str]:
    """Return the text after each prompt, up to what ends it; prompts of equal wishes together."""
    kinds: dict[str, list[int]] = {}
    wishes = [_wishes(said) for _, said in asked]
    for number, wish in enumerate(wishes):
        kinds.setdefault(repr(wish), []).append(number)
    texts = [""] * len(asked)
    for numbers in kinds.values():
        wish = wishes[numbers[0]]
        room = context - wish["max_new_tokens"]
        if room < 1:
            raise ConfigError(
                f"make_harness_model: a task wants {wish['max_new_tokens']} tokens, and the model "
                f"sees {context} at once",
                got=wish["max_new_tokens"],
                want=f"at most {context - 1}",
                hint="give max_gen_toks in the task's generation_kwargs",
            )
        prompts = [
            encode(asked[number][0])[-room:] or [get_prefix_id(tokenizer)] for number in numbers
        ]
        for number, ids in zip(numbers, generate(prompts, **wish), strict=True):
            texts[number] = _before(tokenizer.decode(ids), wish["stop"])
    return texts


def _in_batches(
    generate: Generate, prompts: Sequence[list[int]], *, rows: int, **wish: Any
) -> list[Sequence[int]]:
    """Return what follows each prompt, prompts of like lengths together."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    found: dict[int, Sequence[int]] = {}
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        texts = generate([prompts[number] for number in chosen], **wish)
        found |= zip(chosen, texts, strict=True)
    return [found[number] for number in range(len(prompts))]


def _wishes(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `generate` takes of a task's generation_kwargs; refuse what it does not."""
    left, until = dict(said), said.get("until") or []
    left.pop("until", None)
    lengths = [value for name in _LENGTHS if (value := left.pop(name, None)) is not None]
    temperature, samples = left.pop("temperature", None), left.pop("do_sample", None)
    if left:
        raise ConfigError(
            f"make_harness_model: a task wants {', '.join(sorted(left))}, which the model does not "
            "know",
            where="generation_kwargs",
            got=sorted(left),
            want=["until", "do_sample", "temperature", *_LENGTHS],
        )
    if samples is None:
        samples = bool(temperature)
    return {
        "max_new_tokens": int(lengths[0]) if lengths else _MOST_TOKENS,
        "temperature": float(1.0 if temperature is None else temperature) if samples else 0.0,
        "stop": [until] if isinstance(until, str) else list(until),
    }


def _before(text: str, stop: Sequence[str]) -> str:
    for word in stop:
        if word:
            text = text.split(word, maxsplit=1)[0]
    return text


def open_tasks(names: Sequence[str], *, include: Path | str | None = None) -> Any:
    """Return lm-eval's `TaskManager` that knows some tasks.

    Args:
        names: Names of tasks or of groups of them, or paths of YAML files.
        include: A folder with YAML files of tasks. If all are there, lm-eval's own thousands are
            not looked through, which takes half a minute.

    Raises:
        ConfigError: `lm-eval` is missing, or does not know a task; the nearest names are told.

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
    own = None if include is None else str(include)
    for include_defaults in (False, True):
        manager = TaskManager(include_path=own, include_defaults=include_defaults)
        missing = [x for x in names if not (Path(x).is_file() or manager.match_tasks([x]))]
        if not missing:
            return manager
    near = [x for name in missing for x in difflib.get_close_matches(name, manager.all_tasks)]
    raise ConfigError(
        f"open_tasks: lm-eval has no task {', '.join(missing)}",
        where="tasks",
        got=missing,
        hint=f"near it are {', '.join(near)}" if near else "`lm-eval ls tasks` lists what it has",
    )


def evaluate_tasks(
    model: Any, names: Sequence[str], manager: Any, *, shots: int | None = None, limit: int = 0
) -> dict[str, dict[str, Any]] | None:
    """Return what `lm-eval` measures of a model, by task and metric.

    Args:
        model: From `make_harness_model`; every rank that it is spread over calls this.
        names: Names of tasks.
        manager: What knows them, from `open_tasks`.
        shots: How many solved examples stand before each question; by default as the task has it.
        limit: Take only so many questions of each task; 0 takes all.

    Returns:
        {task: {metric: value}}; None but on the first rank of a host.

    Raises:
        ConfigError: `lm-eval` is missing.

    Effects:
        The harness seeds the generators of Python, numpy and torch, logs, and loads data, of most
        of its own tasks from a hub.

    Examples:
        >>> evaluate_tasks(None, ["lambada"], None)
        Traceback (most recent call last):
        ...
        TypeError: The value of `model` passed to simple_evaluate() was of type ...
    """
    with needs_extra("eval"):
        import lm_eval  # noqa: PLC0415 - an extra
    found = lm_eval.simple_evaluate(
        model,
        tasks=list(names),
        task_manager=manager,
        num_fewshot=shots,
        limit=limit or None,
        bootstrap_iters=0,
        log_samples=False,
    )
    return None if found is None else found["results"]
