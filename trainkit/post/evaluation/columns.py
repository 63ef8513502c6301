"""Score a corpus with a frozen model once, and store the values as columns of a token file.

With a reference's log-probabilities or a teacher's top-k tokens in the file, training does not need
that model. The corpus is split into parts of complete documents; boundaries depend on the corpus
alone, so an interrupted run resumes after its last part and writes the same file.
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
from trainkit.post.evaluation.score import ExampleScores, Scorer, TopKScorer, make_scorer
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
    Sample,
    Stages,
    check_range,
    log_warning,
)

Values = Mapping[str, np.ndarray[Any, Any]]

Measure = Callable[[Sequence[Example]], Sequence[Values]]
"""`Measure(examples) -> {column: values [scored, ...]}` of each example's scored tokens."""


def make_logprob_columns(score: Scorer) -> tuple[dict[str, Column], Measure]:
    """Return the column "reference_logprobs", and its `Measure` by a scorer.

    Examples:
        >>> columns, _ = make_logprob_columns(lambda examples: [])
        >>> columns["reference_logprobs"].dtype
        'float32'
    """

    def measure(examples: Sequence[Example]) -> list[Values]:
        return [{"reference_logprobs": scores.logprobs} for scores in score(examples)]

    return {"reference_logprobs": Column("float32")}, measure


def make_top_k_columns(score: TopKScorer, top_k: int) -> tuple[dict[str, Column], Measure]:
    """Return the columns of `objectives.stored_distillation`, and their `Measure` by a scorer.

    Examples:
        >>> columns, _ = make_top_k_columns(lambda examples: [], 4)
        >>> columns["teacher_ids"]
        Column(dtype='int32', inner=(4,), of='label')
    """

    def measure(examples: Sequence[Example]) -> list[Values]:
        return [
            {"teacher_ids": ids, "teacher_logprobs": logprobs} for ids, logprobs in score(examples)
        ]

    # k words of 8 bytes for each token, a multiple of the corpus itself.
    columns = {
        "teacher_ids": Column("int32", (top_k,)),
        "teacher_logprobs": Column("float32", (top_k,)),
    }
    return columns, measure


def score_corpus(
    columns: tuple[Mapping[str, Column], Measure],
    corpus: Any,
    out: Path | str,
    *,
    context: int,
    facts: Mapping[str, Any],
    axis: Axis = SOLO,
    part_tokens: int = 1 << 17,
    log: Log = log_warning,
) -> int:
    """Write a corpus with additional columns to a token file; return the number of reused parts.

    The context of a token are the tokens before it in its document; a document longer than
    `context` is scored in the windows of `make_rolling_windows`. The first token of a document has
    no context and gets the value 0, which no loss reads: it is the label of no token.

    Args:
        columns: From `make_logprob_columns` or `make_top_k_columns`.
        corpus: A `TokenCorpus`, or a `ConcatCorpus` of several; its own columns are copied.
        out: The file to write, `NAME.tokens`.
        context: Maximum number of tokens in the model's input.
        facts: All that the columns depend on, as JSON values: hashes of model and corpus, settings.
            Parts with other facts are computed again.
        axis: The ranks that compute together, all of which must call this: `ps.world`.
        part_tokens: Approximate size of a part, the most work that an interruption loses.
        log: Called on the first rank with messages about reused parts.

    Raises:
        ConfigError: The corpus has such a column already, or another process writes the file.
        DataError: The corpus cannot be read.
        DiskError: A file cannot be written.
        ValueError: A number is below 1, or the file has another suffix. All are raised on every
            rank.

    Effects:
        Writes `out` on the first rank, and `OUT.parts` meanwhile, which remains for the next run
        after a failure. Communicates on `axis`.

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
    new_columns, measure = columns
    out = Path(out)
    check_output(out)
    # Otherwise scores by an earlier model would be lost without a word.
    if duplicates := sorted({*new_columns} & {*corpus.columns}):
        raise ConfigError(
            f"score_corpus: the corpus has the column {', '.join(duplicates)} already",
            hint="score the corpus that it was made from",
        )
    all_columns = {**corpus.columns, **new_columns}
    # A part that was scored with other facts, these included, is scored again.
    facts = {**facts, "context": context, "part_tokens": part_tokens}
    folder = out.with_name(f"{out.name}.parts")
    parts = _list_parts(folder, corpus.offsets, part_tokens)
    on_first_rank = partial(_run_on_first_rank, axis)
    documents = iterate_documents(corpus)
    with ExitStack() as lock:  # entered within a lambda, on the first rank alone
        # Two processes would delete each other's parts.
        on_first_rank(lambda: lock.enter_context(lock_output(out, function="score_corpus")))
        on_first_rank(lambda: _prepare_folder(folder, facts, log))
        # One list for all ranks: those that differed would call different collectives.
        reused = on_first_rank(
            lambda: [_is_finished(path, corpus.lengths[a:b], log) for path, (a, b) in parts]
        )
        for (path, (start, end)), is_finished in zip(parts, reused, strict=True):
            # Taken from the iterator even if they are not scored, to reach the next part.
            selected = [*islice(documents, end - start)]
            if not is_finished:
                # All ranks compute together; the first one writes.
                samples = [*_score_documents(selected, new_columns, measure, context)]
                on_first_rank(
                    partial(
                        write_corpus,
                        path,
                        samples,
                        columns=all_columns,
                        vocab_size=corpus.vocab_size,
                    )
                )
        on_first_rank(lambda: _concat_parts([path for path, _ in parts], out, corpus, all_columns))
    if any(reused) and axis.index == 0:
        log(f"{folder}: reused {sum(reused)} of {len(parts)} parts")
    return sum(reused)


def score_reference(
    stages: Stages,
    rows: PackedCorpus,
    path: Path,
    *,
    is_new: bool,
    facts: Mapping[str, Any],
    announce: Callable[[], object] = lambda: None,
    log: Log = log_warning,
) -> PackedCorpus:
    """Add the column "reference_logprobs" to rows: log-probabilities by the initial weights.

    The reference model of DPO and related losses is the model before the first step. A resumed run
    reads the file that it wrote then, since the weights have changed.

    Args:
        stages: This rank's stages.
        rows: The rows; all documents of their corpus are scored.
        path: The token file.
        is_new: Whether to score and write the file, or to read it.
        facts: What the log-probabilities depend on, besides the corpus: a hash of the weights.
        announce: Called before the examples of each part are scored, which may take a while.
        log: Called with messages.

    Returns:
        The same rows, of the corpus in the file.

    Effects:
        Those of `score_corpus`, if the run is new.

    Examples:
        >>> import tempfile
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.mesh import solo_parallel
        >>> from trainkit.models import build_decoder, make_decoder_config
        >>> from trainkit.packing import pack_bins
        >>> from trainkit.parallel import make_stages
        >>> stages = make_stages(
        ...     [build_decoder(make_decoder_config("tiny"), seed=0)], solo_parallel()
        ... )
        >>> rows = PackedCorpus(make_corpus([[1, 2, 3]]), pack_bins([3], 4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "reference.tokens"
        ...     found = score_reference(stages, rows, path, is_new=True, facts={}, log=[].append)
        ...     list(found.corpus.columns)
        ['reference_logprobs']
    """
    corpus: Any = rows.corpus
    if is_new:
        score = make_scorer(stages)

        # Part by part, so that no watchdog takes the scoring of a long file for a hang.
        def announce_and_score(examples: Sequence[Example]) -> list[ExampleScores]:
            announce()
            return score(examples)

        log(f"scoring {len(corpus.lengths)} answers with the initial weights, into {path}")
        score_corpus(
            make_logprob_columns(announce_and_score),
            corpus,
            path,
            facts={"corpus": fingerprint(corpus), **facts},
            context=rows.bins.capacity,
            axis=stages.world,
            log=log,
        )
    return PackedCorpus(open_tokens(path), rows.bins)


def _run_on_first_rank(axis: Axis, work: Callable[[], Any]) -> Any:
    """Run `work` on the first rank, and return its list, if it returns one, on all ranks.

    An error is raised on all ranks.
    """

    def run() -> Any:
        result = work() if axis.index == 0 else None
        # Only lists are for all ranks: a lock or a path stays on the first one.
        return result if isinstance(result, list) else None

    return run_on_all_ranks(run, axis)[0]


def _concat_parts(
    paths: Sequence[Path], out: Path, corpus: Any, columns: Mapping[str, Column]
) -> None:
    """Write the parts as one file, with the metadata of the corpus, and delete them."""
    # Not checked again: they were written or verified a moment ago.
    parts = concat_corpora(open_tokens(path, check="none") for path in paths)
    write_corpus(
        out,
        iterate_documents(parts),
        tokenizer_hash=getattr(corpus, "tokenizer_hash", None),
        template_hash=getattr(corpus, "template_hash", None),
        made_with=getattr(corpus, "made_with", None),
        columns=columns,
        vocab_size=corpus.vocab_size,
    )
    shutil.rmtree(paths[0].parent)


def _list_parts(
    folder: Path, offsets: IntArray, part_tokens: int
) -> list[tuple[Path, tuple[int, int]]]:
    """Return the path of each part, and its documents from start to end."""
    # A part starts with the first document at or after a multiple of part_tokens.
    multiples = np.arange(0, max(1, offsets[-1]), part_tokens)
    firsts = np.searchsorted(offsets[:-1], multiples)
    # `unique`, because a document longer than a part covers several multiples.
    bounds = np.unique([0, *firsts, len(offsets) - 1]).tolist()
    paths = [folder / f"part_{index:08d}{SUFFIX}" for index in range(len(bounds) - 1)]
    return list(zip(paths, pairwise(bounds), strict=True))


def _prepare_folder(folder: Path, facts: Mapping[str, Any], log: Log) -> None:
    """Make the folder of parts, and delete parts that were computed with other facts."""
    # Sorted keys, so that equal facts have equal bytes.
    path = folder / "facts.json"
    expected = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)
    if folder.is_dir() and (not path.is_file() or path.read_bytes() != expected):
        log(f"{folder}: its parts are of another model, corpus or setting; computing them again")
        shutil.rmtree(folder)
    with convert_disk_errors(folder, by="score_corpus"):
        folder.mkdir(exist_ok=True)
    if not path.is_file():  # after the removal of old parts: facts never describe other parts
        with atomic_write(path, by="score_corpus") as file:
            file.write(expected)


def _is_finished(path: Path, lengths: IntArray, log: Log) -> bool:
    if not path.is_file():
        return False
    try:
        # In full: a file that an interruption left may be damaged anywhere.
        return np.array_equal(open_tokens(path, check="full").lengths, lengths)
    except DataError as error:
        log(f"computing a part again: {error}")
        return False


def _score_documents(
    documents: Sequence[Any], columns: Mapping[str, Column], measure: Measure, context: int
) -> Iterator[Sample]:
    """Yield documents with their measured columns."""
    samples = [x if isinstance(x, Sample) else Sample(x, np.ones(len(x), bool)) for x in documents]
    windows_by_document = [
        make_rolling_windows(x.tokens[1:].tolist(), prefix=int(x.tokens[0]), context=context)
        if len(x.tokens) > 1
        else []
        for x in samples
    ]
    # All windows of a part in one call, so that they are packed into full batches.
    measured = iter(measure([window for windows in windows_by_document for window in windows]))
    for sample, windows in zip(samples, windows_by_document, strict=True):
        values = [next(measured) for _ in windows]
        new_columns = {
            name: np.concatenate(
                [  # the first token of a document has no context, and is no label
                    np.zeros((min(1, len(sample.tokens)), *column.inner), column.dtype),
                    *(x[name].astype(column.dtype) for x in values),
                ]
            )
            for name, column in columns.items()
        }
        yield Sample(sample.tokens, sample.loss_mask, {**(sample.columns or {}), **new_columns})
