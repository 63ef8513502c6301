"""Joined corpora are the corpora one after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.batch import collate_bins
from trainkit.data.concat import ConcatCorpus, concat_corpora, fingerprint
from trainkit.data.corpus import make_corpus
from trainkit.packing import next_fit, pack_bins
from trainkit.text.corpora.open import count_document_labels, held_out_documents, is_held_out
from trainkit.text.corpora.tokens import write_corpus
from trainkit.types import IGNORED_LABEL, Sample

PARTS = st.lists(
    st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4), min_size=1, max_size=4
)


@given(PARTS)
def test_documents_follow_one_another(parts):
    corpus = concat_corpora(make_corpus(part) for part in parts)
    documents = [document for part in parts for document in part]
    assert corpus.lengths.tolist() == [len(document) for document in documents]
    read = [corpus.read(i, 0, len(document)).tolist() for i, document in enumerate(documents)]
    assert read == documents
    flat = make_corpus(documents)
    assert corpus.offsets.tolist() == flat.offsets.tolist()
    assert (corpus.offsets.dtype, corpus.first_documents.dtype) == (np.int64, np.int64)
    for k, part in enumerate(parts):
        begin, end = corpus.first_documents[k : k + 2]
        assert documents[begin:end] == part
    for document in (-1, len(documents)):
        with pytest.raises(ValueError, match=f"no document {document} of {len(documents)}"):
            corpus.read(document, 0, 0)


@given(PARTS)
def test_a_join_of_joins_is_flat(parts):
    corpora = [make_corpus(part) for part in parts]
    nested = concat_corpora([concat_corpora(corpora[:1]), *corpora[1:], concat_corpora(corpora)])
    assert nested.parts == (*corpora, *corpora)
    assert not any(isinstance(part, ConcatCorpus) for part in nested.parts)


def test_a_document_is_read_from_any_token_on():
    corpus = concat_corpora(make_corpus(part) for part in ([[1, 2]], [[3], [4, 5, 6]]))
    assert corpus.read(2, 1, 2).tolist() == [5, 6]
    assert corpus.read(0, 1, 1).tolist() == [2]


def test_nothing_cannot_be_joined():
    with pytest.raises(ValueError, match="no corpus to join"):
        concat_corpora([])


def test_a_joined_corpus_has_no_flat_tokens():
    corpus = concat_corpora([make_corpus([[1]])])
    assert not hasattr(corpus, "tokens")
    with pytest.raises(AttributeError, match="read its `parts`"):
        _ = corpus.tokens


def test_what_parts_say_is_said_of_all_where_all_say_it(tmp_path):
    named = make_corpus([[1], [2]], vocab_size=9, names=["a", "b"])
    other = make_corpus([[3]], vocab_size=5, names=["c"])
    both = concat_corpora([named, other])
    assert (both.names, both.vocab_size, both.digest) == (["a", "b", "c"], 9, None)
    plain = make_corpus([[3]])
    mixed = concat_corpora([named, plain])
    assert (mixed.names, mixed.vocab_size) == (None, None)
    files = [write_corpus(tmp_path / name / "a.tokens", [[1]]) for name in folders(tmp_path)]
    joined = concat_corpora(files)
    assert list(joined.sources) == ["a.tokens", "1:a.tokens"]
    assert joined.digest[:16] == fingerprint(joined)


def folders(path):
    for name in ("x", "y"):
        (path / name).mkdir()
        yield name


def test_documents_are_held_out_by_name_or_by_their_number_in_the_whole():
    parts = [make_corpus([[1]] * 30, names=[f"{k}-{i}" for i in range(30)]) for k in range(2)]
    corpus = concat_corpora(parts)
    assert held_out_documents(corpus).tolist() == [is_held_out(name) for name in corpus.names]
    numbered = concat_corpora([make_corpus([[1]] * 30)] * 2)
    whole = held_out_documents(make_corpus([[1]] * 60))
    assert held_out_documents(numbered).tolist() == whole.tolist()
    assert whole[:30].tolist() != whole[30:].tolist()


def test_a_joins_fingerprint_follows_its_parts_their_order_and_their_borders():
    one, two = make_corpus([[1], [2]]), make_corpus([[3]])
    joins = [[one, two], [two, one], [one], [one, two, two], [one, make_corpus([[4]])]]
    assert len({fingerprint(concat_corpora(parts)) for parts in joins}) == len(joins)
    assert fingerprint(concat_corpora([one, two])) == fingerprint(concat_corpora([one, two]))


def test_trainable_tokens_are_the_labels_of_a_batch(tmp_path):
    choices = [[True, False, True, True], [True, False], [], [False, True], [True]]
    samples = [Sample(np.arange(len(chosen)), np.array(chosen, bool)) for chosen in choices]
    written = write_corpus(tmp_path / "a.tokens", samples, vocab_size=9)
    corpus = concat_corpora([written, make_corpus([[1, 2, 3], [], [4]])])
    counts = count_document_labels(corpus)
    bins = pack_bins(corpus.lengths, 4, fit=next_fit, max_documents=1)
    labels = collate_bins(corpus, bins, range(len(bins)))["labels"]
    found = np.zeros(len(counts), np.int64)
    found[bins.documents] = (labels != IGNORED_LABEL).sum(1)
    assert counts.tolist() == found.tolist() == [2, 0, 0, 1, 0, 2, 0, 0]
