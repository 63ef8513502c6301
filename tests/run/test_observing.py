"""What a run does around its steps by default: how often ranks talk, and what the host reads."""

import torch
from operators import OperatorMode
from torch import nn

import trainkit as tk
from trainkit.batch import batch_from_rows
from trainkit.run.sinks import LoggingOptions
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor, StepBatch
from trainkit.weights.checkpoint import CheckpointOptions

EVERY, STEPS = 5, 19


def count_operators(folder):
    """Return the collectives and the reads of single numbers by step and function of the loop."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = batch_from_rows(torch.arange(34).view(2, 17))
    found = {}
    with tk.open_run(folder) as run:
        state = run.resume(model, optimizer)
        with run.loop(
            state,
            model,
            optimizer,
            steps=100,
            replay=lambda *_, **__: {},
            checkpoints=CheckpointOptions(save_every=100),
            logging=LoggingOptions(log_every=EVERY),
        ) as loop:
            for step in range(1, STEPS + 1):
                seen = found[step] = {"advance": [], "record": [], "checkpoint": []}
                place = "advance"

                def watch(operator, _):
                    if operator.namespace in {"c10d", "_c10d_functional"}:
                        seen[place].append(operator._opname)  # noqa: B023 (called in this step)
                    elif operator is torch.ops.aten._local_scalar_dense.default:
                        seen[place].append("read")  # noqa: B023

                batch = StepBatch([rows], Cursor(step))
                metrics = {"loss": torch.tensor(2.5), "grad_norm": torch.tensor(1.0)}
                metrics |= {"lr": 0.1, "tokens": torch.tensor(32), "skipped": torch.tensor(0)}
                with OperatorMode(watch):
                    state, metrics = tk.advance(state, batch, metrics, axis=run.ps.loss)
                    place = "record"
                    state = loop.record(state, metrics, batch)
                    place = "checkpoint"
                    loop.checkpoint(state)
    return found


def test_a_step_talks_twice_and_reads_nothing_between_two_lines(tmp_path):
    for found in run_ranks(count_operators, 2, tmp_path / "run"):
        for seen in found.values():
            assert seen["advance"] == ["allreduce_"]  # four numbers in one
            assert seen["checkpoint"] == ["allreduce_"]  # the vote and the clock
        records = {step: seen["record"] for step, seen in found.items() if seen["record"]}
        # Memory and health of all ranks with the first line, and with one of every 10 steps.
        assert records.pop(1) == records.pop(15) == ["_allgather_base_"]
        # The comparison of replicas, in every tenth step: an object is its length and its bytes.
        assert records == {10: ["allgather_", "read", "read", "allgather_"] * 2}
