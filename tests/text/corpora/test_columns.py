"""Columns: the values of a token go with it, or with its label, wherever it is read."""

import json
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import packings

from trainkit.batch import batch_hash, collate_bins, shard_batch, split_batch
from trainkit.batch.shards import contiguous_shard, shard_sequence
from trainkit.data import (
    PackedCorpus,
    concat_corpora,
    fingerprint,
    iterate_documents,
    make_corpus,
    make_microbatches,
    prefetch_batches,
)
from trainkit.packing import pack_bins
from trainkit.text.chat import pack_pairs
from trainkit.text.corpora import hold_out, open_corpus, open_tokens, write_corpus
from trainkit.text.corpora.token_file import BLOCK, encode_header, read_token_header
from trainkit.text.corpora.token_file import get_header_fields as header_facts
from trainkit.text.prepare import prepare_corpus
from trainkit.text.streams import make_document_opener, pack_stream
from trainkit.text.tokenizers import make_byte_tokenizer, make_sample_encoder
from trainkit.types import (
    IGNORED_LABEL,
    Column,
    ConfigError,
    Cursor,
    DataError,
    DataShard,
    Sample,
    Share,
    StepBatch,
)

COLUMNS = {
    "weights": Column("float32"),
    "logprobs": Column("float16", (1,)),
    "ranks": Column("int64"),
    "groups": Column("int8"),
    "routing": Column("uint16", (3,), of="token"),
    "seen": Column("uint32", of="token"),
    "kinds": Column("uint8", (2,), of="token"),
}


def values_of(ids):
    """What the columns hold of tokens: a function of their ids, never 0."""
    ids = np.asarray(ids)
    return {
        "weights": (ids + 0.5).astype(np.float32),
        "logprobs": -(ids[:, None] % 1000 + 1).astype(np.float16) / 4,
        "ranks": ids + 2**40,
        "groups": (ids % 100 - 100).astype(np.int8),
        "routing": (ids[:, None] * 3 + [1, 2, 3]).astype(np.uint16),
        "seen": (ids + 2**31).astype(np.uint32),
        "kinds": (ids[:, None] % 100 + [1, 7]).astype(np.uint8),
    }


def samples_of(sizes, loss_mask=lambda ids: np.ones(len(ids), bool)):
    """Documents of these sizes, whose tokens are numbered through."""
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return [Sample(ids, loss_mask(ids), values_of(ids)) for ids in parts]


def corpus_of(sizes):
    return make_corpus(samples_of(sizes), columns=COLUMNS)


def check(batch):
    """See that each place of a batch has the values of its token, and of its next token."""
    labels, tokens = batch["labels"], batch["document_ids"] >= 0
    for name, column in COLUMNS.items():
        stands = labels != IGNORED_LABEL if column.of == "label" else tokens
        ids = torch.where(stands, labels if column.of == "label" else batch["input_ids"], 0)
        want = torch.from_numpy(values_of(ids.flatten().numpy())[name].astype(np.float64))
        want = want.view(*labels.shape, *column.inner)
        keep = stands.view(*labels.shape, *(1 for _ in column.inner))
        assert torch.equal(batch[name].double(), torch.where(keep, want, 0)), name


def facts_of(batches):
    """A line (token, label, values) of each token of batches, in the order of the tokens."""
    lines = []
    for batch in batches:
        where = batch["document_ids"] >= 0
        fields = (batch[name][where].double() for name in ("input_ids", "labels", *COLUMNS))
        lines.append(np.column_stack([x.numpy() for x in fields]))
    found = np.concatenate(lines)
    return found[found[:, 0].argsort(kind="stable")].tolist()


def plain_facts(corpus, bins):
    """The same of rows, written out piece by piece, as tokens are numbered through."""
    lines = []
    for document, start, length in (piece for row in range(len(bins)) for piece in bins[row]):
        tokens = int(corpus.offsets[document]) + start + np.arange(length)
        own, following = values_of(tokens), values_of(tokens + 1)
        labels = tokens + 1
        labels[-1] = IGNORED_LABEL
        fields = [tokens, labels]
        for name, column in COLUMNS.items():
            if column.of == "label":
                following[name][-1] = 0
            fields.append(own[name] if column.of == "token" else following[name])
        lines.append(np.column_stack(fields).astype(np.float64))
    return sorted(np.concatenate(lines).tolist())


# ------------------------------------------------------------------------------ rows and parts


@settings(max_examples=15)
@given(packings(min_pieces=1), st.sampled_from([1, 2, 3]))
def test_every_token_keeps_what_stands_beside_it_in_any_packing_and_any_shard(packing, count):
    corpus = corpus_of(packing.lengths)
    bins = packing.pack()
    rows = [*range(len(bins)), *[-1] * (len(bins) % 2)]
    whole = collate_bins(corpus, bins, rows, pad_id=1, row_positions=rows)
    check(whole)
    want, parts = plain_facts(corpus, bins), split_batch(whole, 1)
    assert facts_of([whole]) == facts_of(parts) == want
    ring = count if packing.multiple_of % (2 * count) == 0 else 1
    ulysses = count if bins.capacity // ring % count == 0 else 1
    ranks = [(Share(r, ring), Share(u, ulysses)) for r in range(ring) for u in range(ulysses)]
    for cut in (
        [shard_sequence(part, ring=r, ulysses=u) for part in parts for r, u in ranks],
        [shard_batch(whole, Share(r, ulysses), split=contiguous_shard) for r in range(ulysses)],
    ):
        assert facts_of(cut) == want
        hashes = sum(int(batch_hash([part])) for part in cut)
        assert (hashes - int(batch_hash([whole]))) % 2**64 == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_pairs_that_are_packed_side_by_side_keep_their_columns(sizes):
    corpus = corpus_of([size for size in sizes for _ in range(2)])
    bins = pack_pairs(corpus.lengths, 24, multiple_of=2)
    batch = collate_bins(corpus, bins, range(len(bins)))
    check(batch)
    assert facts_of([batch]) == plain_facts(corpus, bins)


def test_a_label_that_is_not_trained_keeps_what_belongs_to_it():
    samples = [attrs.evolve(x, loss_mask=x.tokens % 2 == 0) for x in samples_of([5, 4])]
    batch, plain = (
        collate_bins(x, pack_bins(x.lengths, 8), [0, 1])
        for x in (make_corpus(samples, columns=COLUMNS), corpus_of([5, 4]))
    )
    assert (batch.labels == IGNORED_LABEL).sum() > (plain.labels == IGNORED_LABEL).sum()
    for name in COLUMNS:
        assert torch.equal(batch[name], plain[name]), name


def test_samples_of_a_queue_files_and_parts_of_corpora_give_the_same_batch(tmp_path):
    samples = samples_of([7, 0, 30, 5, 1, 12])
    queue = make_corpus(samples, columns=COLUMNS)
    path = tmp_path / "a.tokens"
    written = write_corpus(path, samples, columns=dict(reversed(COLUMNS.items())), vocab_size=200)
    bare = make_corpus(iterate_documents(attrs.evolve(queue, loss_mask=None)), columns=COLUMNS)
    halves = [make_corpus(part, columns=COLUMNS) for part in (samples[:3], samples[3:])]
    again = write_corpus(tmp_path / "b.tokens", iterate_documents(written), columns=written.columns)
    assert written.columns == queue.columns == COLUMNS
    bins = pack_bins(queue.lengths, 16, multiple_of=2)
    rows = [*range(len(bins)), -1]
    want = collate_bins(queue, bins, rows, row_positions=rows)
    assert list(want.extra) == sorted(COLUMNS)
    assert [want[name].dtype for name in ("routing", "seen")] == [torch.int32, torch.int64]
    for corpus in (
        written,
        open_tokens(path, check="full"),
        open_corpus(path),
        concat_corpora(halves),
        again,
        bare,
    ):
        batch = collate_bins(corpus, bins, rows, row_positions=rows)
        for name, x in want.items():
            assert name == "spans" or torch.equal(batch[name], x), name
        assert batch_hash([batch]) == batch_hash([want])
    cut, _ = hold_out(queue, piece=4)
    check(collate_bins(cut, pack_bins(cut.lengths, 8), [0, 1, 2]))


def test_dealing_and_prefetching_carry_columns_beside_what_they_add():
    corpus = corpus_of([5, 9, 3, 8, 2])
    bins = pack_bins(corpus.lengths, 12, multiple_of=4)
    packed = PackedCorpus(corpus, bins, {"a": 1, "b": len(bins) - 1})
    places = [DataShard(Share(r, 2), ring=Share(k, 2)) for r in range(2) for k in range(2)]
    shard = partial(make_microbatches, packed, range(len(bins)), rows_per_microbatch=1)
    parts = [part for data_shard in places for part in shard(data_shard=data_shard)]
    assert all("source" in part for part in parts)
    assert facts_of(parts) == plain_facts(corpus, bins)
    batches = [StepBatch(shard(), Cursor(1)), None]
    with prefetch_batches(
        lambda cursor: batches[cursor.batch], Cursor(), device="cpu"
    ) as next_batch:
        assert facts_of(next_batch().microbatches) == plain_facts(corpus, bins)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=12),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from([1, 4]),
)
def test_a_stream_cuts_and_drops_columns_with_their_documents(sizes, overlong, multiple_of):
    samples = samples_of(sizes)
    steps = pack_stream(
        make_document_opener(lambda: iter(samples)),
        Cursor(),
        capacity=16,
        rows=3,
        seed=0,
        buffer_rows=3,
        columns=COLUMNS,
        overlong=overlong,
        multiple_of=multiple_of,
    )
    seen = []
    for step in steps:
        for batch in make_microbatches(step.packed, range(3), rows_per_microbatch=3):
            check(batch)
            seen += batch.input_ids[batch.document_ids >= 0].tolist()
    firsts = {"split": None, "truncate": 16, "drop": 0}[overlong]
    expected = [x.tokens if len(x.tokens) <= 16 else x.tokens[:firsts] for x in samples]
    assert sorted(seen) == sorted(int(token) for tokens in expected for token in tokens)


def test_a_window_whose_columns_have_changed_is_refused():
    samples = samples_of([16] * 8)

    def steps_from(cursor):
        return pack_stream(
            lambda n: iter(samples[n:]),
            cursor,
            capacity=16,
            rows=2,
            seed=0,
            buffer_rows=4,
            columns=COLUMNS,
        )

    first = next(steps_from(Cursor()))
    next(steps_from(first.cursor))
    other = {**samples[1].columns, "weights": np.zeros(16)}
    samples[1] = attrs.evolve(samples[1], columns=other)
    with pytest.raises(DataError, match="window from document 0 on"):
        next(steps_from(first.cursor))


# ------------------------------------------------------------------------------ hashes


def test_hashes_of_batches_and_corpora_see_columns(tmp_path):
    def made(name="a", column=Column(), change=0.0):  # noqa: B008 (immutable)
        values = {name: np.arange(1, 6) + change}
        return make_corpus([Sample(np.arange(5), np.ones(5, bool), values)], columns={name: column})

    def hash_of(corpus):
        return int(batch_hash([collate_bins(corpus, pack_bins(corpus.lengths, 8), [0])]))

    plain = make_corpus([Sample(np.arange(5), np.ones(5, bool))])
    others = [made(name="b"), made(change=0.5), made(column=Column(of="token")), plain]
    assert len({hash_of(corpus) for corpus in (made(), *others)}) == 5
    others.append(made(column=Column("float16")))
    assert len({fingerprint(corpus) for corpus in (made(), *others)}) == 6
    files = [
        write_corpus(tmp_path / "a.tokens", iterate_documents(corpus), columns=corpus.columns)
        for corpus in (made(), *others)
    ]
    assert len({fingerprint(corpus) for corpus in files}) == 6
    batch = collate_bins(made(), pack_bins([5], 8), [0])
    keys = attrs.evolve(
        batch, extra={**batch.extra, "source": batch.labels, "noise_key": batch.labels}
    )
    assert batch_hash([keys]) == batch_hash([batch])


# ------------------------------------------------------------------------------ files and records


def test_a_file_without_columns_is_of_the_version_before_them(tmp_path):
    for columns, version in (({}, 2), (COLUMNS, 3)):
        samples = [attrs.evolve(x, columns=columns and x.columns) for x in samples_of([3, 4])]
        path = tmp_path / f"{version}.tokens"
        write_corpus(path, samples, columns=columns)
        with path.open("rb") as file:
            assert json.loads(file.read(BLOCK)[48:].strip(b"\0"))["version"] == version


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([["weights", "float64", [], "label"]], "dtype must be one of"),
        ([["weights", "float32", [0], "label"]], "inner must be"),
        ([["weights", "float32", [2**62], "label"]], "bytes instead of"),
        ([["weights", "float32", [], "batch"]], "of must be one of"),
        ([["labels", "float32", [], "label"]], "no column can be called 'labels'"),
        ([["weights", "float32"]], "columns that cannot be: not enough values"),
        ([["weights", "float16", [], "label"]], "bytes instead of"),
        (None, "columns that cannot be: 'NoneType'"),
        ([[3, "float32", [], "label"]], "no column can be called 3"),
    ],
)
def test_columns_of_a_header_that_lies_are_refused(tmp_path, columns, message):
    path = tmp_path / "a.tokens"
    values = {"weights": np.arange(3)}
    write_corpus(
        path, [Sample(np.arange(3), np.ones(3, bool), values)], columns={"weights": Column()}
    )
    with path.open("rb") as file:
        facts = header_facts(read_token_header(file, path))
    path.write_bytes(encode_header(facts | {"columns": columns}) + path.read_bytes()[BLOCK:])
    with pytest.raises(DataError, match=message):
        open_tokens(path)


def records_of(samples):
    for sample in samples:
        lists = {name: x.tolist() for name, x in sample.columns.items()}
        yield {"ids": sample.tokens.tolist(), "answer": sample.loss_mask.tolist(), **lists}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_come_from_records_and_through_prepare(tmp_path, suffix):
    records = list(records_of(samples_of([4, 0, 6], loss_mask=lambda ids: ids % 3 > 0)))
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=1)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    make = partial(make_sample_encoder, tokens="ids", loss_mask="answer", columns=COLUMNS)
    opened = open_corpus(path, encode=make(make_byte_tokenizer()))
    out = tmp_path / "a.tokens"
    prepare_corpus(
        path, out, tokenizer=make_byte_tokenizer(), make_encode=make, chunk_bytes=1, workers=1
    )
    for corpus in (opened, open_tokens(out, check="full")):
        assert corpus.lengths.tolist() == [4, 0, 6]
        assert corpus.loss_mask.tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
        assert corpus.columns == COLUMNS
        for name, values in values_of(np.arange(10)).items():
            assert corpus.values[name].tolist() == values.tolist(), name
            assert not corpus.values[name].flags.writeable
    all_trained = make_sample_encoder(tokens="ids", columns=COLUMNS)(records[0])
    assert all_trained.loss_mask.all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"tokens": [1, 2], "w": [0.5]},
            r"line 1: w must be float32 \(2,\), for 2 tokens, got .*\(1,\)",
        ),
        ({"tokens": [1, 2]}, "no field 'w'; found tokens"),
        ({"tokens": [1], "w": [None]}, r"w must be float32 \(1,\), .* got object"),
        ({"tokens": [[1]], "w": [[1]]}, "integers in one dimension"),
    ],
)
def test_a_record_without_its_columns_is_named_with_its_line(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    encode = make_sample_encoder(columns={"w": Column()})
    with pytest.raises(DataError, match=message):
        open_corpus(tmp_path / "a.jsonl", encode=encode)
    with pytest.raises(DataError, match="'answer' must be booleans, or 0 and 1"):
        make_sample_encoder(loss_mask="answer")({"tokens": [1], "answer": [0.5]})


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (Column(), [1.0], r"w must be float32 \(2,\), for 2 tokens, got float64 \(1,\)"),
        (Column(inner=(2,)), [1.0, 2.0], r"w must be float32 \(2, 2\)"),
        (Column(), [1.0, np.nan], "w at token 1 is nan, which does not fit"),
        (Column(), [1.0, -np.inf], "w at token 1 is -inf"),
        (Column(), [1e39, 1.0], r"w at token 0 is 1e\+39"),
        (Column("float16", (2,)), [[1, 2], [3, 70_000]], r"token 1 is \[3, 70000\], .* float16"),
        (Column("uint8"), [255, 256], "w at token 1 is 256, .* column of uint8"),
        (Column("int64"), np.array([1, 2**63], np.uint64), "w at token 1 is 9223372036854775808"),
        (Column("uint32"), [-1, 1], "w at token 0 is -1"),
        (Column("int8"), [1.0, 2.0], r"w must be int8 \(2,\), .* got float64"),
        (Column(), ["a", "b"], "w must be float32"),
        (Column(), [[1.0], [2.0, 3.0]], r"w is no array of float32 \(2,\): "),
        (Column(), torch.ones(2, requires_grad=True), "w is no array of float32"),
        (Column(), None, "has the columns none; its corpus has w"),
    ],
)
def test_values_that_a_column_cannot_have_are_refused_by_document(
    tmp_path, column, values, message
):
    good = Sample(np.arange(0), np.ones(0, bool), {"w": []})
    bad = Sample(np.arange(2), np.ones(2, bool), None if values is None else {"w": values})
    columns, path = {"w": column}, tmp_path / "a.tokens"
    for make in (
        lambda: make_corpus([good, bad], columns=columns),
        lambda: write_corpus(path, [good, bad], columns=columns),
        lambda: list(
            pack_stream(
                lambda _: iter([good, bad]),
                Cursor(),
                capacity=8,
                rows=1,
                seed=0,
                columns=columns,
            )
        ),
    ):
        with pytest.raises(DataError, match=f"document 1.*{message}"):
            make()
    assert list(tmp_path.iterdir()) == []


def test_all_documents_and_all_parts_have_the_columns_that_are_declared():
    sample, plain = samples_of([3])[0], Sample(np.arange(3), np.ones(3, bool))
    with pytest.raises(
        DataError, match=r"document 0 has the columns groups, .*; its corpus has none"
    ):
        make_corpus([sample])
    for other in (plain, [1, 2]):
        with pytest.raises(DataError, match="document 0 has the columns none"):
            make_corpus([other], columns=COLUMNS)
    with pytest.raises(DataError, match=r"corpus 1 \[\] has the columns none; corpus 0 \[\] has"):
        concat_corpora([corpus_of([3]), make_corpus([plain])])
    for make in (make_corpus, partial(write_corpus, "a.tokens")):
        with pytest.raises(ValueError, match="no column can be called 'noise_key'"):
            make([], columns={"noise_key": Column()})
    for make in (
        partial(Column, dtype="bfloat16"),
        partial(Column, inner=(2, 3)),
        partial(Column, inner=(1.5,)),
        partial(Column, of="row"),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()


def test_values_that_do_not_fit_their_corpus_are_refused():
    corpus = corpus_of([4])
    bins = pack_bins(corpus.lengths, 4)
    for values in ({}, {"weights": np.zeros(3, np.float32)}, {"weights": np.zeros(4)}):
        broken = attrs.evolve(corpus, values=corpus.values | {"weights": None} | values)
        with pytest.raises(DataError, match=r"column 'weights' must be float32 \(4,\), got"):
            collate_bins(broken, bins, [0])
