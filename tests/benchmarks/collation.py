"""Speed of collation alone and in training, evenness of deals by cost, what prefetching saves.

Run `python tests/benchmarks/collation.py`. Functions are timed in turns, and figures are medians of
the turns, so that a busy machine disturbs all alike. One thread each.
"""

import resource
import statistics
import time

import attrs
import numpy as np
import torch

from trainkit.batch.collate import _view_unsigned, _write_rows, collate_bins
from trainkit.batch.loops import copy_spans, write_spans
from trainkit.data import PackedCorpus, make_step_batch, prefetch_batches
from trainkit.data.corpus import TokenCorpus
from trainkit.packing import pack_bins, row_costs
from trainkit.sampling import assign_rows, shuffle_blocks, shuffle_epochs
from trainkit.types import Column, Cursor, Share, StepBatch

CAPACITY, TURNS = 8192, 21


def documents(number, longest, seed=0):
    """Truncated log-normal lengths, about 750 tokens on average."""
    lengths = np.random.default_rng(seed).lognormal(6, 1.2, number).astype(np.int64)
    return lengths.clip(1, longest)


def corpus_of(lengths, dtype, vocab_size=200):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(0).integers(0, vocab_size, offsets[-1]).astype(dtype)
    return TokenCorpus(tokens, offsets, vocab_size)


def seconds_in_turns(functions):
    """Call functions with the number of the turn, in turns: median seconds of each, by name.

    Each is called once before it is timed: what others left in the cache is no concern of its own,
    and the first call after them can take ten times as long.
    """
    turns = []
    for turn in range(TURNS):
        turns.append([])
        for function in functions.values():
            function(turn)
            start = time.perf_counter()
            for _ in range(5):
                function(turn)
            turns[-1].append((time.perf_counter() - start) / 5)
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    return dict(zip(functions, medians, strict=True))


def slices(corpus, bins, rows, out):
    """The five fields by numpy slices, one document after the other."""
    ids, labels, positions, document_ids, index = out
    count = np.arange(bins.capacity)
    for row, where in enumerate(rows.tolist()):
        begin = 0
        index[row] = count + row * bins.capacity
        for number, (document, start, length) in enumerate(bins[where]):
            tokens = corpus.read(document, start, length)
            place = slice(begin, begin + length)
            ids[row, place] = tokens
            labels[row, begin : begin + length - 1] = tokens[1:]
            labels[row, begin + length - 1] = -100
            positions[row, place] = count[:length]
            document_ids[row, place] = number
            begin += length
        ids[row, begin:], labels[row, begin:], document_ids[row, begin:] = 0, -100, -1
        positions[row, begin:] = count[: bins.capacity - begin]


def speeds(corpus, bins, rows):
    """Million tokens per second of each way, for `rows` rows at a time."""
    out = np.zeros((5, rows, CAPACITY), np.int64)
    four = np.zeros((4, rows, CAPACITY), np.int64)
    copy = np.zeros(rows * CAPACITY, corpus.tokens.dtype)
    groups = np.arange(len(bins) // rows * rows).reshape(-1, rows)
    layouts = [
        _write_rows(out, corpus, bins, group, np.arange(rows), pad_id=0)[0] for group in groups[:8]
    ]
    tokens, _ = _view_unsigned(corpus)

    def four_fields(turn):
        layout, fields = layouts[turn % len(layouts)], four.reshape(4, -1)
        write_spans(fields, layout, 0)
        copy_spans(*fields[:2], tokens, layout)

    def plain_copy(turn):
        copy[:] = corpus.tokens[turn * copy.size :][: copy.size]

    return {
        name: rows * CAPACITY / seconds / 1e6
        for name, seconds in seconds_in_turns(
            {
                "collate": lambda turn: collate_bins(corpus, bins, groups[turn % len(groups)]),
                "fill 5": out.fill,
                "fill 5 new": lambda turn: np.empty_like(out).fill(turn),
                "four fields": four_fields,
                "fill 4": four.fill,
                "slices": lambda turn: slices(corpus, bins, groups[turn % len(groups)], out),
                "copy tokens": plain_copy,
            }
        ).items()
    }


def collation():
    """Print each way beside its limit, which is to write so many int64 of anything."""
    print(
        f"packed rows of {CAPACITY}, five int64 fields, million tokens a second. fill: the limit,"
    )
    print("so many int64 a token written, in the same or in new memory; four fields: the compiled")
    print("loops alone, without token_index; slices: numpy, one document after the other")
    for scale, number in ((1, 20_000), (0.1, 200_000)):
        lengths = np.maximum(documents(number, CAPACITY) * scale, 1).astype(np.int64)
        bins = pack_bins(lengths, CAPACITY)
        for dtype in ("uint8", "uint16", "uint32"):
            corpus = corpus_of(lengths, dtype)
            for rows in (8, 16, 64):
                found = speeds(corpus, bins, rows)
                if (scale, dtype, rows) == (1, "uint8", 8):
                    names = "".join(f"{name:>12}" for name in found)
                    print(f"{'mean length':>12} {'dtype':8}{'rows':>4}{names}")
                figures = "".join(f"{x:12,.0f}" for x in found.values())
                print(f"{lengths.mean():12.0f} {dtype:8}{rows:4}{figures}")


def steady(batches=60):
    """Print what the thread of `prefetch_batches` pays for batches as training uses them up.

    The consumer holds one batch while others are made: their memory goes round, so that every batch
    lies where the cache does not have it. Time is the thread's own, without what it waits for.
    Memory that comes new from the system would show as page faults.
    """
    lengths = documents(20_000, CAPACITY)
    corpus, bins = corpus_of(lengths, "uint16"), pack_bins(lengths, CAPACITY)

    def collated(cursor, rows):
        first = cursor.batch * rows % (len(bins) - rows)
        part = collate_bins(corpus, bins, np.arange(first, first + rows))
        return StepBatch([part], Cursor(cursor.batch + 1))

    def stepped(cursor, rows):
        rows_at = shuffle_epochs(len(bins), rows_per_step=rows, seed=0)
        return make_step_batch(
            PackedCorpus(corpus, bins), rows_at, cursor, rows_per_microbatch=rows
        )

    print("\nin the thread of prefetch: million tokens a second, and page faults a batch")
    for rows in (4, 8, 16, 64, 128):
        parts = [f"{rows:4} rows"]
        for name, make in (("collate_bins", collated), ("make_step_batch", stepped)):
            spent = []

            def timed(cursor, make=make, rows=rows, spent=spent):
                begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
                batch = make(cursor, rows)
                after = resource.getrusage(resource.RUSAGE_THREAD)
                spent.append((time.thread_time() - begin, after.ru_minflt - before.ru_minflt))
                return batch

            with prefetch_batches(timed, Cursor()) as next_batch:
                for _ in range(batches):
                    held = next_batch()
                del held
            seconds, faults = zip(*spent[10:batches], strict=True)
            speed = rows * CAPACITY / statistics.median(seconds) / 1e6
            parts.append(f"{name} {speed:5.0f}, {statistics.mean(faults):6.1f} faults")
        print("; ".join(parts))


def with_columns(rows=64):
    """What four columns of fp32 add to the time, in new memory at each call, as steps make it."""
    lengths = documents(20_000, CAPACITY)
    plain, bins = corpus_of(lengths, "uint16"), pack_bins(lengths, CAPACITY)
    columns = {name: Column() for name in ("weights", "advantages", "logprobs", "reference")}
    random = np.random.default_rng(0)
    values = {name: random.random(len(plain.tokens), np.float32) for name in columns}
    full = attrs.evolve(plain, columns=columns, values=values)
    groups = np.arange(len(bins) // rows * rows).reshape(-1, rows)

    def collated(corpus):
        return lambda turn: collate_bins(corpus, bins, groups[turn % len(groups)])

    found = seconds_in_turns({"plain": collated(plain), "with columns": collated(full)})
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.items())
    ratio = found["with columns"] / found["plain"]
    print(f"\n{rows} rows of {CAPACITY}, 4 columns of fp32: {times}: {ratio:.2f} times (bar 1.8)")


def imbalance(table, costs):
    """What the dearest rank costs above the mean, and the dearest of each microbatch, summed."""
    work = np.where(table < 0, 0, costs[table]).sum(2)
    total = work.sum(1)
    return total.max() / total.mean() - 1, work.max(0).sum() / work.mean(0).sum() - 1


def deals(ranks=8, steps=200):
    bins = pack_bins(documents(1_000_000, 4096), 4096)
    costs = row_costs(bins)
    print(
        f"\n1,000,000 documents in rows of 4,096, {ranks} ranks: dearest rank above the mean, and"
    )
    print("the same of each microbatch; mean (largest) of 200 steps")
    for rows, width in ((4, 1), (4, 4), (8, 1), (16, 1), (16, 4), (32, 1)):
        num_rows, figures, times = rows * ranks, [], []
        rows_at = shuffle_epochs(len(bins), rows_per_step=num_rows, seed=0)
        for step in range(steps):
            chosen = rows_at(step)
            for given in (costs[chosen], None):
                start = time.perf_counter()
                shares = [
                    assign_rows(
                        num_rows, Share(rank, ranks), rows_per_microbatch=width, costs=given
                    )
                    for rank in range(ranks)
                ]
                times.append((time.perf_counter() - start) / ranks)
                figures.append(imbalance(np.stack(shares), costs[chosen]))
        balanced, plain = np.array(figures).reshape(steps, 2, 2).transpose(1, 2, 0) * 100
        print(
            f"{rows:3} rows a rank, {width} a microbatch: {balanced[0].mean():5.2f} % "
            f"({balanced[0].max():5.2f}), microbatches {balanced[1].mean():5.2f} %; contiguous "
            f"{plain[0].mean():5.2f} % ({plain[0].max():5.2f}), {plain[1].mean():5.2f} %; "
            f"{1e6 * statistics.median(times[::2]):.0f} us"
        )
    order = np.argsort(costs, kind="stable")
    for rows in (1, 2, 4, 8):
        rows_at = shuffle_blocks(order, block=ranks, rows_per_step=rows * ranks, seed=0)
        figures = []
        for step in range(steps):
            chosen = rows_at(step)
            shares = [
                assign_rows(
                    rows * ranks,
                    Share(rank, ranks),
                    rows_per_microbatch=rows,
                    costs=costs[chosen],
                )
                for rank in range(ranks)
            ]
            figures.append(100 * imbalance(np.stack(shares), costs[chosen])[0])
        mean, most = np.mean(figures), max(figures)
        print(f"{rows:3} rows a rank, drawn in blocks of {ranks}: {mean:5.2f} % ({most:5.2f})")


def prefetching(steps=30):
    """Time of a step that waits 30 ms for a device, with its batch made before it or beside it."""
    lengths = documents(20_000, CAPACITY)
    corpus, bins = corpus_of(lengths, "uint16"), pack_bins(lengths, CAPACITY)

    packed, rows_at = (
        PackedCorpus(corpus, bins),
        shuffle_epochs(len(bins), rows_per_step=64, seed=0),
    )

    def make_batch(cursor):
        return make_step_batch(packed, rows_at, cursor, rows_per_microbatch=8, noise_seed=0)

    def run(next_batch):
        start = time.perf_counter()
        for _ in range(steps):
            if next_batch is not None:
                next_batch()
            time.sleep(0.03)
        return 1e3 * (time.perf_counter() - start) / steps

    cursor = Cursor()

    def in_turn():
        nonlocal cursor
        cursor = make_batch(cursor).cursor

    turns = []
    for _ in range(5):
        alone, inside = run(None), run(in_turn)
        with prefetch_batches(make_batch, Cursor()) as next_batch:
            turns.append((alone, inside, run(next_batch)))
    alone, inside, prefetched = (statistics.median(column) for column in zip(*turns, strict=True))
    print(
        f"\nstep of 64 rows of {CAPACITY} with noise keys: {alone:.1f} ms without data, "
        f"{inside:.1f} ms with it made in turn, {prefetched:.1f} ms with prefetch"
    )


def main():
    torch.set_num_threads(1)
    collation()
    steady()
    for rows in (8, 64):
        with_columns(rows)
    deals()
    prefetching()


if __name__ == "__main__":
    main()
