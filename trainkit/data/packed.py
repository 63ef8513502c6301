"""What there is to read: a corpus and its rows, or several as one table of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.data.cache import load_or_pack_bins
from trainkit.data.corpus import make_corpus
from trainkit.data.joined import ConcatCorpus, concat_corpora, fingerprint
from trainkit.packing import bins_hash, pack_bins, report_packing
from trainkit.types import SOLO, Bins, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

    from trainkit.data.corpus import TokenCorpus
    from trainkit.packing.bins import Overlong
    from trainkit.types import Axis, Corpus, IntArray


@attrs.frozen(eq=False)
class PackedCorpus:
    """A corpus and the rows that it is packed into: what there is to read.

    Attributes:
        corpus: All documents.
        bins: The rows, the same on all ranks.
        num_rows: For rows of several sources, how many there are of each, by name; they follow one
            another in this order. Batches then carry "source", the number of each token's source.
    """

    corpus: Corpus
    bins: Bins
    num_rows: Mapping[str, int] | None = attrs.field(default=None)

    @num_rows.validator
    def _check_num_rows(self, _: Any, num_rows: Mapping[str, int] | None) -> None:
        if num_rows is not None and sum(num_rows.values()) != len(self.bins):
            must = f"num_rows must add up to the {len(self.bins)} rows of bins"
            raise ValueError(f"Packed: {must}, got {dict(num_rows)}")

    def __len__(self) -> int:
        return len(self.bins)

    @property
    def report(self) -> dict[str, Any]:
        """How full the rows are, and so on: see `report_packing`."""
        return report_packing(self.bins)

    def source_of(self, rows: ArrayLike) -> IntArray | None:
        """Return the number of the source of each row, or None without `num_rows`."""
        if self.num_rows is None:
            return None
        return np.searchsorted(np.cumsum(list(self.num_rows.values())), rows, side="right")


def split_held_out(
    corpus: TokenCorpus | ConcatCorpus,
    held_out: ArrayLike,
    capacity: int,
    *,
    cache_dir: Path | str | None = None,
    axis: Axis = SOLO,
    tell: Callable[[str], object] | None = None,
    overlong: Overlong = "split",
    multiple_of: int = 1,
    seed: int | None = None,
) -> tuple[PackedCorpus, PackedCorpus]:
    """Pack a corpus into rows to train on and rows that are held out: no document is in both.

    Args:
        corpus: The corpus.
        held_out: Which documents are held out, bool `[N]`: `corpora.held_out_documents`, or
            `corpora.hold_out`.
        capacity: Tokens per row.
        cache_dir: As in `load_or_pack_bins`, and so all that follow.
        axis: The ranks that call this together.
        tell: Called with one sentence about each thing worth knowing.
        overlong: What becomes of a document longer than the capacity.
        multiple_of: A piece takes the next multiple of this many tokens.
        seed: The seed of the packing.

    Returns:
        The rows to train on, and those held out.

    Raises:
        ValueError: As `load_or_pack_bins`.
        DataError: As `load_or_pack_bins`.
        DiskError: As `load_or_pack_bins`.

    Effects:
        Those of `load_or_pack_bins`, twice: it keeps two plans, and communicates on `axis`.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> rows, held = split_held_out(make_corpus([[1, 2], [3], [4, 5]]), [False, True, False], 4)
        >>> rows.bins[0], held.bins[0]
        ([(0, 0, 2), (2, 0, 2)], [(1, 0, 1)])
    """
    how: dict[str, Any] = {"axis": axis, "tell": tell, "overlong": overlong, "seed": seed}
    how |= {"content": fingerprint(corpus), "multiple_of": multiple_of}
    trained = np.where(held_out, 0, corpus.lengths)
    rows, held = (
        PackedCorpus(corpus, load_or_pack_bins(cache_dir, lengths, capacity, **how))
        for lengths in (trained, corpus.lengths - trained)
    )
    return rows, held


def pack_examples(
    examples: Iterable[tuple[str, str]],
    capacity: int,
    *,
    tokenizer: Any,
    multiple_of: int = 1,
    seed: int | None = None,
) -> PackedCorpus:
    """Pack questions with their answers into rows, of which the answers are trained on.

    Args:
        examples: Each a question and its answer.
        capacity: Tokens per row; a longer example is refused.
        tokenizer: Its BOS, if it has one, begins a question, and its EOS ends an answer.
        multiple_of: As for `pack_bins`.
        seed: As for `pack_bins`.

    Raises:
        DataError: As `pack_bins`.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> rows = pack_examples([("1+1=", "2")], 8, tokenizer=make_byte_tokenizer())
        >>> rows.corpus.trained.tolist()
        [0, 0, 0, 0, 0, 1, 1]
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def encode(question: str, answer: str) -> Sample:
        asked = [*begin, *tokenizer.encode(question)]
        answered = [*tokenizer.encode(answer), tokenizer.eos_id]
        return Sample(
            np.array([*asked, *answered]), np.arange(len(asked) + len(answered)) >= len(asked)
        )

    corpus = make_corpus(encode(*example) for example in examples)
    bins = pack_bins(corpus.lengths, capacity, multiple_of=multiple_of, overlong="error", seed=seed)
    return PackedCorpus(corpus, bins)


def make_data_facts(packed: PackedCorpus) -> dict[str, Any]:
    """Return what a run must be continued with of what it reads, as facts for its checkpoints.

    Args:
        packed: A corpus in memory, or one of token files, and its rows.

    Returns:
        "files", a hash of each by name, "fingerprint" of the corpus and a hash of its "rows". The
        fingerprint is that of all that is in the files, which may be renamed: see
            `make_resume_rules`.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.packing import pack_bins
        >>> facts = make_data_facts(PackedCorpus(make_corpus([[1, 2]]), pack_bins([2], 4)))
        >>> list(facts), facts["files"]
        (['files', 'fingerprint', 'rows'], {})
    """
    corpus: Any = packed.corpus
    facts = {"files": corpus.sources, "fingerprint": fingerprint(corpus)}
    return facts | {"rows": bins_hash(packed.bins)}


def concat_packed(packed: Mapping[str, PackedCorpus]) -> PackedCorpus:
    """Join corpora that are packed each on its own into one table of rows.

    Packing each alone keeps a row to one corpus, so that a mixture of rows is one of tokens, as far
    as rows are full. No token is copied. Of one corpus no table is copied either; those of several
    are written anew, in memory of this process: 8 bytes for each document, 24 for each piece and 8
    for each row, also where the bins are mapped from a plan that processes share.

    Args:
        packed: Each by name, with bins of one `capacity` and `multiple_of`.

    Returns:
        All rows; those of each corpus follow those of the one before, and `num_rows` counts them.

    Raises:
        ValueError: There is no corpus, the bins differ in their measures, or bins name a document
            that their corpus does not have.

    Examples:
        >>> from trainkit.data.corpus import make_corpus
        >>> from trainkit.packing import pack_bins
        >>> web, code = make_corpus([[1, 2, 3], [4]]), make_corpus([[5, 6]])
        >>> mix = concat_packed(
        ...     {
        ...         "web": PackedCorpus(web, pack_bins([3, 1], 3)),
        ...         "code": PackedCorpus(code, pack_bins([2], 3)),
        ...     }
        ... )
        >>> mix.num_rows, mix.source_of([0, 1, 2]), mix.bins[2]
        ({'web': 2, 'code': 1}, array([0, 0, 1]), [(2, 0, 2)])
    """
    if not packed:
        raise ValueError("concat_packed: there is no corpus to join")
    _check_measures({name: part.bins for name, part in packed.items()})
    for name, part in packed.items():
        last, documents = part.bins.documents.max(initial=-1), len(part.corpus.offsets) - 1
        if last >= documents:
            what = f"the bins of {name!r} hold document {last}, its corpus has {documents}"
            raise ValueError(f"concat_packed: {what}; pack this corpus' own lengths")
    corpora: list[Any] = [part.corpus for part in packed.values()]
    tables = [part.bins for part in packed.values()]
    num_rows = {name: len(part) for name, part in packed.items()}
    if len(tables) == 1:
        return PackedCorpus(_as_joined(corpora[0]), tables[0], num_rows)
    bins = _join_bins(tables, [len(corpus.offsets) - 1 for corpus in corpora])
    return PackedCorpus(concat_corpora(corpora), bins, num_rows)


def _as_joined(corpus: TokenCorpus | ConcatCorpus) -> ConcatCorpus:
    """Return one corpus as a joined one, with its own offsets instead of a copy."""
    if isinstance(corpus, ConcatCorpus):
        return corpus
    return ConcatCorpus((corpus,), np.array([0, len(corpus.offsets) - 1]), corpus.offsets)


def _join_bins(tables: Sequence[Bins], documents: Sequence[int]) -> Bins:
    """Return the rows of several bins, whose corpora have so many documents, one after the other.

    Each array is written once, in place: tables of 10^9 documents leave no room for a second copy.
    """
    pieces = np.cumsum([0, *(len(bins.documents) for bins in tables)]).tolist()
    rows = np.cumsum([0, *(len(bins) for bins in tables)]).tolist()
    first_documents = np.cumsum([0, *documents]).tolist()
    offsets, numbers = np.zeros(rows[-1] + 1, np.int64), np.empty(pieces[-1], np.int64)
    for i, bins in enumerate(tables):
        np.add(bins.offsets[1:], pieces[i], out=offsets[rows[i] + 1 : rows[i + 1] + 1])
        np.add(bins.documents, first_documents[i], out=numbers[pieces[i] : pieces[i + 1]])
    return Bins(
        offsets,
        numbers,
        np.concatenate([bins.starts for bins in tables]),
        np.concatenate([bins.lengths for bins in tables]),
        capacity=tables[0].capacity,
        multiple_of=tables[0].multiple_of,
    )


def _check_measures(bins: Mapping[str, Bins]) -> None:
    (first, one), *others = bins.items()
    for name, other in others:
        for measure in ("capacity", "multiple_of"):
            have, want = getattr(other, measure), getattr(one, measure)
            if have != want:
                what = f"bins must have one {measure}: {first!r} has {want}, {name!r} has {have}"
                raise ValueError(f"concat_packed: {what}; pack them alike")
