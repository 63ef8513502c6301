"""torch's pipeline stages and schedules, with trainkit's forward passes and gradient reduction.

Imported when a pipeline first runs: torch.distributed.pipelining takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from trainkit.parallel.grad_reduction import Reduction, find_reducers, reshards_after_forward
from trainkit.parallel.split import ScheduleKind
from trainkit.parallel.stage_ranks import StagePlace
from trainkit.phases import as_phase, measure_phase
from trainkit.types import Axis

Run = Callable[[nn.Module, int, tuple[Tensor, ...]], Any]
"""`run(stage, index, received) -> output`: the forward pass of a stage on a microbatch."""


class Stage(PipelineStage):
    """torch's stage with other inputs of the module, and another reduction of gradients.

    The module is hidden in a ModuleList, so that torch does not handle its FSDP units: it would
    reduce only at the end of a step, and only if the outermost module is one. The overridden
    methods have the same signatures in torch 2.11 to 2.15. If torch would split a backward pass
    wrongly (`splits_rightly`), the complete pass runs when the gradient of the input is due: the
    results are right, but gradients of weights fill no bubble.
    """

    def __init__(
        self,
        module: nn.Module,
        place: StagePlace,
        boundary: tuple[Tensor, ...],
        run: Run,
        reduction: Callable[[nn.Module], Reduction],
        *,
        axis: Axis,
        device: torch.device,
        splits_backward: bool,
    ) -> None:
        edge = tuple(x.requires_grad_() for x in boundary)
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        super().__init__(
            nn.ModuleList([module]),
            place.index,
            len(place.ranks),
            device,
            input_args=edge if place.index else (),
            output_args=(loss,) if place.last else edge,
            group=axis.group,
        )
        self.module = module
        self.run = run
        self.microbatch = 0
        self.reducers = find_reducers(module)
        self.reduction = reduction
        self.splits_backward = splits_backward
        self.splits_rightly = not splits_backward or splits_rightly()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Record the index of the microbatch, whose other inputs this stage looks up."""
        self.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> Any:
        """Run the stage on the tensors that it has received."""
        with measure_phase("forward"):
            return self.run(self.module, self.microbatch, args)

    @as_phase("backward")
    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run one backward pass with FSDP's reduction on or off."""
        # A split pass computes gradients of weights after FSDP's hooks have run, so that these
        # reduce nothing; `perform_reduce_grad` does at the end of the step.
        last = last_backward and not self.splits_backward
        for _, module in self.reducers.fsdp:
            module.set_is_last_backward(last)
            if not reshards_after_forward(module):  # the other microbatches' graphs need it
                module.set_reshard_after_backward(last, recurse=False)
        with self.reduction(self.module).microbatch(last=last, holds=self.splits_backward):
            if self.splits_rightly or backward_type == "full":
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                return (), None  # computed with the gradient of the input
            output = bwd_kwargs["stage_output"]
            if bwd_kwargs["output_grads"] is None:
                (output,) = output  # a full pass takes a loss, not a tuple of one
            bwd_kwargs = {**bwd_kwargs, "stage_output": output}
            return super().backward_maybe_with_nosync("full", bwd_kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients that no backward pass has reduced; nothing is scaled."""
        assert grad_scale_factor == 1
        for _, module in self.reducers.fsdp:
            module.set_is_last_backward(True)
            module.set_reshard_after_backward(True, recurse=False)
        self.reduction(self.module).reduce_left()

    def _post_metadata_inference_cleanup(self) -> None:
        """Leave gradients alone: torch clears FSDP's here, inferred or not (from 2.13 on)."""


class _SumAndDifference(torch.autograd.Function):
    """A node with two outputs, as compiled code and many fused operators have."""

    @staticmethod
    def forward(_: Any, a: Tensor, b: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return a + b, a - b

    @staticmethod
    def backward(_: Any, d_sum: Tensor, d_difference: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return d_sum + d_difference, d_sum - d_difference


@torch.enable_grad()
def splits_rightly() -> bool:
    """Return whether torch's split backward pass gives the right gradients: from 2.13 on it does.

    2.11 mixes up the outputs of a node that has several. 2.11 and 2.12 count a weight twice that is
    used in two places, one after the other.
    """
    from torch.distributed.pipelining import _backward  # noqa: PLC0415 (no public way)

    x, w = (nn.Parameter(torch.ones(1, device="cpu")) for _ in range(2))
    total, difference = _SumAndDifference.apply(x, w)
    try:
        _, groups = _backward.stage_backward_input(
            [total * w + 2 * difference], None, [x], iter([w])
        )
        _backward.stage_backward_weight(iter([w]), groups)
    except RuntimeError:
        return False
    return w.grad is not None and w.grad.item() == 1


def make_schedule(kind: ScheduleKind, stages: Sequence[Stage], microbatches: int) -> Any:
    """Return torch's schedule; the last stage's output is the loss already.

    Raises:
        ValueError: torch cannot run this number of microbatches.
    """

    def get_loss(output: Tensor, _: Tensor) -> Tensor:
        return output  # the last stage has computed it

    schedule = getattr(pipelining.schedules, kind.torch_name)
    stage_or_stages = stages[0] if kind.placement == "one" else list(stages)
    return schedule(stage_or_stages, microbatches, loss_fn=get_loss, scale_grads=False)


def run_schedule(schedule: Any, microbatches: int, *, splits_backward: bool) -> None:
    """Run all forward and backward passes of a step on this rank.

    Effects:
        Those of the stages.
    """
    from torch._functorch import config  # noqa: PLC0415 (for compiled blocks only)

    # A compiled backward pass must not reuse buffers that the second half of a split one reads.
    options: dict[str, Any] = {"donated_buffer": False} if splits_backward else {}
    with config.patch(options):
        # torch requires targets, one per microbatch; they are not used.
        schedule.step(target=torch.arange(microbatches), return_outputs=False)
