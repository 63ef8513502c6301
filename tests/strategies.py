"""Hypothesis strategies for what trainkit's functions take."""

from functools import partial

import attrs
import numpy as np
from hypothesis import strategies as st

from trainkit.batch import collate_bins
from trainkit.data import TokenCorpus
from trainkit.packing import best_fit, first_fit, next_fit, pack_bins
from trainkit.types import Fit, Share


def lengths(max_value=40, min_size=0, max_size=30):
    """Lengths of documents, empty and overlong ones among them."""
    return st.lists(st.integers(0, max_value), min_size=min_size, max_size=max_size)


@attrs.frozen
class Packing:
    """Lengths of documents, and the other arguments of `pack_bins`."""

    lengths: list[int]
    capacity: int
    fit: Fit
    group_size: int
    overlong: str
    multiple_of: int
    max_documents: int | None
    seed: int | None

    def pack(self, function=pack_bins, **options):
        """Pack the lengths with `pack_bins`, or with another function of its arguments."""
        return function(
            lengths=self.lengths,
            capacity=self.capacity,
            fit=self.fit,
            group_size=self.group_size,
            overlong=self.overlong,
            multiple_of=self.multiple_of,
            max_documents=self.max_documents,
            seed=self.seed,
            **options,
        )


@st.composite
def packings(draw, *, multiple_of=None, min_pieces=0):
    """A `Packing` whose arguments make sense together."""
    multiple_of = draw(st.sampled_from([1, 1, 2, 4, 6])) if multiple_of is None else multiple_of
    capacity = multiple_of * draw(st.integers(1, 12))
    chosen = draw(lengths(max_value=3 * capacity))
    chosen += draw(st.lists(st.integers(1, capacity), min_size=min_pieces, max_size=min_pieces))
    return Packing(
        lengths=chosen,
        capacity=capacity,
        fit=draw(st.sampled_from([best_fit, first_fit, next_fit])),
        group_size=draw(st.sampled_from([0, 1, 3, 7, 100])),
        overlong=draw(st.sampled_from(["split", "truncate", "drop"])),
        multiple_of=multiple_of,
        max_documents=draw(st.sampled_from([None, None, 1, 2, 3])),
        seed=draw(st.sampled_from([None, None, 0, 1])),
    )


def corpus_of(sizes, vocab_size=1000):
    """A corpus whose tokens tell where they come from (up to the vocabulary)."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return TokenCorpus((np.arange(offsets[-1]) % vocab_size).astype(np.uint16), offsets, vocab_size)


@st.composite
def packed(draw, *, multiple_of=None, min_pieces=1):
    """(corpus, bins): at least one row."""
    packing = draw(packings(multiple_of=multiple_of, min_pieces=min_pieces))
    return corpus_of(packing.lengths), packing.pack()


@st.composite
def batches(draw, *, multiple_of=None, blanks=True):
    """A batch of one to four rows, blank ones among them."""
    corpus, bins = draw(packed(multiple_of=multiple_of))
    rows = st.integers(-1 if blanks else 0, len(bins) - 1)
    chosen = draw(st.lists(rows, min_size=1, max_size=4))
    places = [number if row >= 0 else -1 for number, row in enumerate(chosen)]
    return collate_bins(corpus, bins, chosen, pad_id=999, row_positions=places)


def shares(max_count=8):
    """Any part of up to `max_count`."""
    counts = st.integers(1, max_count)
    return counts.flatmap(lambda n: st.integers(0, n - 1).map(partial(Share, count=n)))
