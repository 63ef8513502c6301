"""What a step communicates, counted; and the counts that trainkit promises."""

import functools
import math

import pytest
import torch
import torch.distributed as dist

import trainkit as tk
from trainkit.collectives import _ALL_GATHER, _REDUCE_SCATTER
from trainkit.losses import next_token_linear
from trainkit.models.config import parameter_shapes
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import ROWS, SHALLOW, decoder_batch, decoder_of, decoder_plan
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.tools.testing.ledger import Collective, CollectiveLedger, count_collectives
from trainkit.tools.testing.train import certificate_optimizer, certificate_weights
from trainkit.types import Layout

LAYERS = SHALLOW.layers
UNITS = LAYERS + 1  # of FSDP: the blocks, and the other modules as one
PARAMETERS = sum(map(math.prod, parameter_shapes(SHALLOW).values()))
TENSORS = 11 * LAYERS + 3  # each has a flag of 8 bytes: the ranks that have its gradient
ORDER = 16  # two more numbers compare the order of gathers
ROUNDS = ROWS // 2  # microbatches where all ranks have all rows
TWO = [
    LayoutCase(Layout(dp_shard=2)),
    LayoutCase(Layout(dp_shard=2, reduce="each")),
    LayoutCase(Layout(dp_replicate=2)),
    LayoutCase(Layout(tp=2)),
    LayoutCase(Layout(ring=2)),
    LayoutCase(Layout(ring=2, fold_sp="none")),
    LayoutCase(Layout(ulysses=2, fold_sp="none")),
    LayoutCase(Layout(pp=2)),
]
FOUR = [
    LayoutCase(Layout(dp_replicate=2, dp_shard=2)),
    LayoutCase(Layout(dp_replicate=2, dp_shard=2, reduce="each")),
]


def ledgers_of(case):
    """Return the ledgers of a step's forward and backward, and of the rest of it."""
    with tk.parallel_session(case.layout) as ps:
        stages = tk.build_stages(
            functools.partial(decoder_of, SHALLOW),
            ps,
            decoder_plan(ps, case),
            weights=certificate_weights,
        )
        params, optimizer = tk.get_parameters(stages), certificate_optimizer(stages, ps.pp)
        run = tk.make_forward_backward(
            stages, next_token_linear, reduce=case.layout.reduce, call=tk.call_with_noise
        )
        rows = 4 // case.world
        batches = distribute_batch(decoder_batch(0), ps.data_shard, rows_per_microbatch=rows)

        def finish():
            tk.sync_sp_grads(params, ps.sp_unfolded)
            tk.clip_and_step(params, optimizer, lr=0.1, max_norm=1.0, axis=ps.pp)

        tokens = tk.all_sum(tk.count_valid_tokens(batches), ps.loss)
        run(batches, denominator=tokens)  # so that set-up is not in the counted step
        finish()
        first = count_collectives(lambda: run(batches, denominator=tokens), ps)
        return first, count_collectives(finish, ps)


def ledgers_of_all(cases):
    return {case.name: ledgers_of(case) for case in cases}


@pytest.fixture(scope="module")
def ledgers():
    return run_ranks(ledgers_of_all, 2, TWO)[0] | run_ranks(ledgers_of_all, 4, FOUR)[0]


def counts_of(ledger):
    return {(row.axis, row.kind): row.count for row in ledger.rows}


def test_sharded_gradients_are_reduced_once_per_unit_and_step(ledgers):
    rounds = ROWS // 4
    first, last = ledgers["dp2"]
    assert counts_of(first) == {
        ("dp_shard", "all_gather"): rounds * (2 * LAYERS + 1),  # the root stays between the two
        ("dp_shard", "reduce_scatter"): UNITS,
        ("dp_shard", "all_reduce"): 1,  # who has gradients
    }
    assert first.bytes("dp_shard", "reduce_scatter") == 4 * PARAMETERS
    assert first.bytes("dp_shard", "all_reduce") == 8 * TENSORS + ORDER
    assert counts_of(last) == {("dp_shard", "all_reduce"): 1}  # the norm


def test_reducing_once_saves_all_but_one_of_the_reductions(ledgers):
    once, each = (ledgers[name][0] for name in ("dp2", "dp2, reduce each"))
    rounds = ROWS // 4
    assert each.count("dp_shard", "reduce_scatter") == rounds * UNITS
    saved = each.bytes("dp_shard", "reduce_scatter") / once.bytes("dp_shard", "reduce_scatter")
    assert saved == rounds


def test_replicas_are_summed_once_per_unit_and_step_and_gather_nothing(ledgers):
    first, last = ledgers["replica2"]
    assert counts_of(first) == {("dp_replicate", "all_reduce"): UNITS + 1}
    assert first.bytes("dp_replicate", "all_reduce") == 4 * PARAMETERS + 8 * TENSORS
    assert last.rows == ()


@pytest.mark.parametrize("reduce", ["last", "each"])
def test_a_hybrid_sums_shards_over_replicas_once_per_step(ledgers, reduce):
    suffix = "" if reduce == "last" else ", reduce each"
    rounds = ROWS // 4
    first, _ = ledgers[f"replica2 x dp2{suffix}"]
    assert counts_of(first) == {
        ("dp_shard", "all_gather"): rounds * (2 * LAYERS + 1),
        ("dp_shard", "reduce_scatter"): UNITS * (1 if reduce == "last" else rounds),
        ("dp_shard", "all_reduce"): 1,
        ("dp_replicate", "all_reduce"): UNITS + 1,
    }
    assert first.bytes("dp_replicate", "all_reduce") == 4 * PARAMETERS // 2 + 8 * TENSORS


def test_tensor_parallel_blocks_gather_and_scatter_twice_each_way(ledgers):
    first, last = ledgers["tp2"]
    crossings = ROUNDS * 2 * (2 * LAYERS + 1)  # two in a block, one around all; and back
    assert counts_of(first) == {
        ("tp", "reduce_scatter"): crossings,
        ("tp", "all_gather"): crossings,
        ("tp", "all_reduce"): 2 * ROUNDS + 1,  # the cross entropy, and the partial gradients
    }
    assert counts_of(last) == {("tp", "all_reduce"): 1}


def test_a_ring_passes_on_keys_and_values_and_gradients_travel_in_one_buffer(ledgers):
    first, last = ledgers["ring2, fold none"]
    passes = ROUNDS * LAYERS * 4  # keys and values on, and back; then their gradients
    assert counts_of(first) == {("ring", "send"): passes, ("ring", "receive"): passes}
    assert counts_of(last) == {("ring", "all_reduce"): 1}
    folded, _ = ledgers["ring2"]
    assert folded.count("ring", "reduce_scatter") == UNITS
    assert folded.count("ring", "send") == passes


def test_ulysses_exchanges_once_before_and_once_after_attention(ledgers):
    first, last = ledgers["ulysses2, fold none"]
    assert counts_of(first) == {("ulysses", "all_to_all"): ROUNDS * LAYERS * 4}  # and in backward
    assert counts_of(last) == {("ulysses", "all_reduce"): 1}


def test_a_pipeline_sends_a_hidden_state_per_microbatch_and_edge(ledgers):
    first, last = ledgers["pp2, 1f1b"]
    assert first.count("pp", "send") == first.count("pp", "receive") == ROUNDS
    assert first.count("pp", "broadcast") == 1  # the terms of the loss
    assert {row.kind for row in first.rows} <= {"send", "receive", "broadcast", "all_gather"}
    assert counts_of(last) == {("pp", "all_reduce"): 1}


def test_there_is_none_on_an_axis_of_size_1_and_none_on_a_group_of_no_axis(ledgers):
    rows = [row for pair in ledgers.values() for ledger in pair for row in ledger.rows]
    assert {row.size for row in rows} == {2}
    assert "other" not in {row.axis for row in rows}


def every_kind():
    """Return the ledger of one call of each kind, on a group of no axis."""
    x, parts = torch.ones(4), [torch.ones(4) for _ in range(2)]
    other = 1 - dist.get_rank()

    def call():
        dist.all_reduce(x)
        dist.all_gather(parts, x)
        _ALL_GATHER(torch.ones(8), x)
        _REDUCE_SCATTER(torch.ones(2), x)
        dist.all_to_all_single(torch.ones(4), x)
        dist.broadcast(x, 0)
        dist.barrier()
        works = [dist.isend(x, other), dist.irecv(torch.ones(4), other)]
        for work in works:
            work.wait()

    return count_collectives(call)


def test_every_kind_is_counted_with_the_bytes_of_the_whole_tensor():
    found = {(row.kind, row.count, row.bytes) for row in run_ranks(every_kind, 2)[0].rows}
    assert found >= {
        ("all_reduce", 1, 16),
        ("all_gather", 2, 64),
        ("reduce_scatter", 1, 16),
        ("all_to_all", 1, 16),
        ("broadcast", 1, 16),
        ("send", 1, 16),
        ("receive", 1, 16),
    }
    assert "barrier" in {kind for kind, _, _ in found}


def test_a_ledger_is_read_by_axis_and_kind():
    ledger = CollectiveLedger(
        (Collective("tp", 2, "send", 3, 24), Collective("pp", 2, "send", 1, 8))
    )
    assert ledger.count("tp", "send"), ledger.bytes("pp", "send") == (3, 8)
    assert ledger.count("tp", "receive") == 0
