"""What a frozen model finds of each token of a corpus, computed once and stored beside it.

A reference's log-probabilities and a teacher's likeliest words are columns of a token file, so that
training needs the model no more. The corpus is cut into parts of whole documents, where follows
from the corpus alone; a run that was killed goes on after the parts that it has written, to the
same file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from trainkit.collectives import run_on_all_ranks
from trainkit.data.concat import concat_corpora, fingerprint
from trainkit.data.corpus import iterate_documents
from trainkit.data.packed import PackedCorpus
from trainkit.files import atomic_write, convert_disk_errors
from trainkit.post.evaluation.examples import Example, make_rolling_windows
from trainkit.post.evaluation.score import ExampleScores, Scorer, TopWords, make_scorer
from trainkit.text.corpora.tokens import SUFFIX, open_tokens, write_corpus
from trainkit.text.prepare.prepare import check_output, lock_output
from trainkit.types import (
    SOLO,
    Axis,
    Column,
    ConfigError,
    DataError,
    IntArray,
    Log,
    ParallelState,
    Sample,
    Stages,
    check_range,
    log_warning,
)
from trainkit.weights.checkpoint.run_state import hash_weights

Values = Mapping[str, np.ndarray[Any, Any]]

Measure = Callable[[Sequence[Example]], Sequence[Values]]
"""From examples to the columns of each one's counting tokens by name, `[scored, ...]`."""


def make_logprob_columns(score: Scorer) -> tuple[dict[str, Column], Measure]:
    """Return the column "reference_logprobs" of a score, and what measures it.

    Examples:
        >>> columns, _ = make_logprob_columns(lambda examples: [])
        >>> columns["reference_logprobs"].dtype
        'float32'
    """

    def measure(examples: Sequence[Example]) -> list[Values]:
        return [{"reference_logprobs": found.logprobs} for found in score(examples)]

    return {"reference_logprobs": Column("float32")}, measure


def make_top_k_columns(top_words: TopWords, top_k: int) -> tuple[dict[str, Column], Measure]:
    """Return the columns that `objectives.stored_distillation` reads, and what measures them.

    Examples:
        >>> columns, _ = make_top_k_columns(lambda examples: [], 4)
        >>> columns["teacher_ids"]
        Column(dtype='int32', inner=(4,), of='label')
    """

    def measure(examples: Sequence[Example]) -> list[Values]:
        names = "teacher_ids", "teacher_logprobs"
        return [dict(zip(names, found, strict=True)) for found in top_words(examples)]

    kinds = {"teacher_ids": "int32", "teacher_logprobs": "float32"}
    return {name: Column(kind, (top_k,)) for name, kind in kinds.items()}, measure


def score_corpus(
    measured: tuple[Mapping[str, Column], Measure],
    corpus: Any,
    out: Path | str,
    *,
    context: int,
    facts: Mapping[str, Any],
    axis: Axis = SOLO,
    part_tokens: int = 1 << 17,
    log: Log = log_warning,
) -> int:
    """Write a corpus as a token file with columns more; return how many parts were there already.

    Each token is given those before it in its document, `context` of them at most: of a longer
    document the windows are those of `make_rolling_windows`. The first token of a document is
    predicted by nothing, and its values are 0; no batch has them, since it is nobody's label.

    Args:
        measured: The columns and what finds them: `make_logprob_columns`, or `make_top_k_columns`.
        corpus: A `TokenCorpus`, or a `ConcatCorpus` of several; columns that it has are kept.
        out: The file to make, which ends in `.tokens`.
        context: The most tokens that the model is given.
        facts: What the columns follow from: hashes of the model and of the corpus, settings; as
            JSON has it. Parts of other facts are made anew.
        axis: The ranks that measure together, all of which must call this: `ps.world`.
        part_tokens: About how many tokens a part has, which decides how much work is lost.
        log: Called with a sentence about parts that are used again, or not, on the first rank.

    Raises:
        ConfigError: The corpus has such a column already, or another process makes the file.
        DataError: The corpus cannot be read.
        DiskError: A file cannot be written.
        ValueError: A number is below 1, or the name of the file is of another kind. All are raised
            on every rank.

    Effects:
        Writes `out` on the first rank, and `OUT.parts` while it works, which stays for the next run
        if it fails. Communicates on `axis`.

    Examples:
        >>> import tempfile
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.post.evaluation.score import ExampleScores
        >>> half = lambda examples: [ExampleScores(np.full(x.scored, -0.5), True) for x in examples]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     out, corpus = Path(folder) / "a.tokens", make_corpus([[1, 2, 3], [4]])
        ...     _ = score_corpus(make_logprob_columns(half), corpus, out, context=8, facts={})
        ...     open_tokens(out).values
        {'reference_logprobs': array([ 0. , -0.5, -0.5,  0. ], dtype=float32)}
    """
    check_range("score_corpus", at_least=1, context=context, part_tokens=part_tokens)
    (columns, measure), out = measured, Path(out)
    check_output(out)
    if twice := sorted({*columns} & {*corpus.columns}):
        what = f"the corpus has the column {', '.join(twice)} already"
        raise ConfigError(f"score_corpus: {what}", hint="score the corpus that it was made from")
    how = {"columns": {**corpus.columns, **columns}, "vocab_size": corpus.vocab_size}
    facts = {**facts, "context": context, "part_tokens": part_tokens}
    folder, cuts = out.with_name(f"{out.name}.parts"), _cuts(corpus.offsets, part_tokens)
    paths = [folder / f"part_{number:08d}{SUFFIX}" for number in range(len(cuts) - 1)]
    parts = list(zip(paths, pairwise(cuts), strict=True))
    first_rank, documents = partial(_on_first_rank, axis), iterate_documents(corpus)
    with ExitStack() as lock:
        first_rank(lambda: lock.enter_context(lock_output(out, function="score_corpus")))
        first_rank(lambda: _begin(folder, facts, log))
        had = first_rank(lambda: [_is_finished(p, corpus.lengths[a:b], log) for p, (a, b) in parts])
        for (path, (first, last)), is_there in zip(parts, had, strict=True):
            own = [*islice(documents, last - first)]
            if not is_there:
                scored = [*_scored(own, columns, measure, context)]
                first_rank(partial(write_corpus, path, scored, **how))
        if any(had):
            first_rank(lambda: log(f"{folder}: {sum(had)} of {len(paths)} parts were there"))
        first_rank(lambda: _join(paths, out, corpus, how))
    return sum(had)


def score_reference(
    stages: Stages,
    rows: PackedCorpus,
    path: Path,
    *,
    ps: ParallelState,
    is_new: bool,
    facts: Mapping[str, Any],
    announce: Callable[[], object] = lambda: None,
    log: Log = log_warning,
) -> PackedCorpus:
    """Return rows with the column "reference_logprobs": what a model says of each token.

    The reference of DPO and its kin is the model as it is before the first step. A run that is
    continued reads the file that it made then, since the weights have moved.

    Args:
        stages: This rank's stages.
        rows: The rows; all documents of their corpus are scored.
        path: The token file.
        ps: The layout.
        is_new: Whether to score, or to read the file.
        facts: What the log-probabilities follow from beside the weights and the corpus.
        announce: Called before examples are scored, which may take some time.
        log: Called with sentences about the work.

    Returns:
        The same rows of the corpus in the file.

    Effects:
        Those of `score_corpus`, if it is new.
    """
    corpus: Any = rows.corpus
    if is_new:
        score = make_scorer(stages)

        def score_aloud(examples: Sequence[Example]) -> list[ExampleScores]:
            announce()
            return score(examples)

        log(f"scoring {len(corpus.lengths)} answers with the first weights, into {path}")
        known = {"weights": hash_weights(stages, ps), "corpus": fingerprint(corpus)}
        score_corpus(
            make_logprob_columns(score_aloud),
            corpus,
            path,
            facts={**known, **facts},
            context=rows.bins.capacity,
            axis=ps.world,
            log=log,
        )
    return PackedCorpus(open_tokens(path), rows.bins)


def _on_first_rank(axis: Axis, work: Callable[[], Any]) -> Any:
    """Return what JSON holds of what is done on the first rank alone; all raise if it does.

    Effects:
        Those of `work`; communicates as `run_on_all_ranks`.
    """

    def own() -> Any:
        done = work() if axis.index == 0 else None
        return done if isinstance(done, list) else None

    return run_on_all_ranks(own, axis)[0]


def _join(paths: Sequence[Path], out: Path, corpus: Any, how: Any) -> None:
    """Write the parts as one file, made with what the corpus was made with, and delete them."""
    whole = concat_corpora(open_tokens(path, check="none") for path in paths)
    write_corpus(
        out,
        iterate_documents(whole),
        tokenizer_hash=getattr(corpus, "tokenizer_hash", None),
        template_hash=getattr(corpus, "template_hash", None),
        made_with=getattr(corpus, "made_with", None),
        **how,
    )
    shutil.rmtree(paths[0].parent)


def _cuts(offsets: IntArray, part_tokens: int) -> list[int]:
    """Return the first document of each part, and the number of documents."""
    firsts = np.searchsorted(offsets[:-1], np.arange(0, max(1, offsets[-1]), part_tokens))
    return np.unique([0, *firsts, len(offsets) - 1]).tolist()


def _begin(folder: Path, facts: Mapping[str, Any], log: Log) -> None:
    """Make the folder of parts; those of other facts go."""
    path, want = folder / "facts.json", orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)
    if folder.is_dir() and (not path.is_file() or path.read_bytes() != want):
        log(f"{folder}: its parts are of another model, corpus or setting, and are made anew")
        shutil.rmtree(folder)
    with convert_disk_errors(folder, by="score_corpus"):
        folder.mkdir(exist_ok=True)
    if not path.is_file():
        with atomic_write(path, by="score_corpus") as file:
            file.write(want)


def _is_finished(path: Path, lengths: IntArray, log: Log) -> bool:
    if not path.is_file():
        return False
    try:
        return np.array_equal(open_tokens(path, check="full").lengths, lengths)
    except DataError as error:
        log(f"made anew: {error}")
        return False


def _scored(
    documents: Sequence[Any], columns: Mapping[str, Column], measure: Measure, context: int
) -> Iterator[Sample]:
    """Yield documents with what is measured of their tokens."""
    samples = [x if isinstance(x, Sample) else Sample(x, np.ones(len(x), bool)) for x in documents]
    windows = [
        make_rolling_windows(x.tokens[1:].tolist(), prefix=int(x.tokens[0]), context=context)
        if len(x.tokens) > 1
        else []
        for x in samples
    ]
    found = iter(measure([window for each in windows for window in each]))
    for sample, each in zip(samples, windows, strict=True):
        parts = [next(found) for _ in each]
        values = {
            name: np.concatenate(
                [
                    np.zeros((min(1, len(sample.tokens)), *column.inner), column.dtype),
                    *(part[name].astype(column.dtype) for part in parts),
                ]
            )
            for name, column in columns.items()
        }
        yield Sample(sample.tokens, sample.trained, {**(sample.columns or {}), **values})
