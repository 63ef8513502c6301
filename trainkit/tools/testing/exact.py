"""A model of integers, for which the order of summation must not change a bit.

Weights, inputs and targets are small integers, the loss is a square, and the number of valid tokens
is a power of two. Every partial sum of a loss or a gradient is then an integer over that power,
which fp64 represents exactly. The optimizer keeps weights at -1, 0 or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.batch import collate_bins
from trainkit.data.corpus import TokenCorpus
from trainkit.grads import get_parameters
from trainkit.losses import declare_terms
from trainkit.noise import counters
from trainkit.noise.hashing import make_key
from trainkit.packing import pack_bins
from trainkit.parallel.parameters import get_local_box
from trainkit.types import IGNORED_LABEL, Axis, Batch

VOCABULARY = 8
WIDTH = 8
LAYERS = 4
ROWS = 8
LENGTH = 16


class ExactBlock(nn.Module):
    """A residual block without a nonlinearity: x + down(up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`."""
        return x + self.down(self.up(x))


class ExactModel(nn.Module):
    """An embedding, some blocks and a head, all linear."""

    def __init__(self) -> None:
        super().__init__()
        # None on the pipeline stages that have no such end.
        self.embedding: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): ExactBlock() for i in range(LAYERS)})
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ids `[B, S]` to outputs `[B, S, V]`; a pipeline stage does its part of that."""
        x = input_ids if self.embedding is None else self.embedding(input_ids)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def boundary(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the shape and dtype of a pipeline stage's output, as a tensor on meta."""
        shape = (*batch["labels"].shape, WIDTH)
        return torch.empty(shape, dtype=torch.float64, device="meta")


def split_exact(model: Any, num_stages: int) -> list[ExactModel]:
    """Split the model into pipeline stages with the same number of blocks.

    Examples:
        >>> [list(stage.layers) for stage in split_exact(ExactModel(), 2)]
        [['0', '1'], ['2', '3']]
    """
    size = LAYERS // num_stages
    stages = [ExactModel() for _ in range(num_stages)]
    for index, stage in enumerate(stages):
        names = [str(i) for i in range(index * size, (index + 1) * size)]
        stage.layers = nn.ModuleDict({name: model.layers[name] for name in names})
        stage.embedding = model.embedding if index == 0 else None
        stage.head = model.head if index == num_stages - 1 else None
    return stages


def call_exact(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call the model with a batch's ids.

    Examples:
        >>> call_exact(lambda ids: ids, {"input_ids": 3})
        3
    """
    return model(batch["input_ids"])


@declare_terms("loss")
def squares(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the squared error of outputs `[B, S, V]`, whose targets are 4 at the label and else 0.

    Examples:
        >>> total, _ = squares(torch.zeros(1, 2, 8), {"labels": torch.tensor([[1, -100]])})
        >>> total
        tensor(16.)
    """
    labels = batch["labels"]
    valid = labels != IGNORED_LABEL
    wanted = 4 * nn.functional.one_hot(labels.clamp(min=0), output.shape[-1])
    total = ((output - wanted).square() * valid.unsqueeze(-1)).sum()
    return total, {"loss": total.detach()}


def exact_weights(name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Return -1, 0 or 1 for every element, a function of the parameter's name and the index.

    Examples:
        >>> exact_weights("w", (8, 8), (0, 0)).unique()
        tensor([-1.,  0.,  1.])
    """
    # `+ 0.0` turns -0.0 into 0.0.
    values = counters.normal(make_key(0, name), shape, offset)
    return values.mul_(0.6).round_().clamp_(-1, 1) + 0.0


def exact_batch(step: int) -> Batch:
    """Return the global batch of a step: 8 rows of 16 tokens, 64 of which have a label.

    Examples:
        >>> [int((row >= 0).sum()) for row in exact_batch(0).labels]
        [16, 0, 3, 13, 16, 8, 0, 8]
    """
    # 128 tokens in 8 documents, each as long as a row.
    random = np.random.default_rng(step)
    tokens = random.integers(0, VOCABULARY, ROWS * LENGTH)
    corpus = TokenCorpus(tokens, np.arange(0, ROWS * LENGTH + 1, LENGTH))
    batch = collate_bins(corpus, pack_bins(corpus.lengths, LENGTH), np.arange(ROWS))
    # 16 + 3 + 13 + 16 + 8 + 8 = 64 labels, a power of two, by which fp64 divides exactly.
    lengths = torch.tensor([16, 0, 3, 13, 16, 8, 0, 8]).unsqueeze(1)
    # Any targets serve; 7 minus a token is in the vocabulary and never the token itself.
    labels = torch.where(torch.arange(LENGTH) < lengths, 7 - batch.input_ids, IGNORED_LABEL)
    return attrs.evolve(batch, labels=labels)


class IntegerSteps(torch.optim.Optimizer):
    """Moves weights cyclically through -1, 0 and 1: by the rounded gradient, modulo 3.

    It does not descend, which would need more bits at every step. But any unit of any gradient
    changes a weight, and weights stay small.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        """Take one step."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # the update is elementwise, so local shards suffice
                    local, grad = get_local_box(p).local, get_local_box(p.grad).local
                    # (w - g + 1) mod 3 is 0, 1 or 2.
                    moved = local - (grad * group["lr"]).round() + 1
                    local.copy_(moved.remainder(3) - 1)


def integer_steps(stages: Sequence[nn.Module], axis: Axis) -> torch.optim.Optimizer:
    """Return an optimizer of integer weights; the learning rate scales gradients to integers.

    Effects:
        None, but those of its steps.

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.data = torch.tensor([[1.0, 0.0]])
        >>> model.weight.grad = torch.tensor([[0.5, 2.5]])
        >>> optimizer = integer_steps([model], solo_parallel().pp)
        >>> optimizer.param_groups[0]["lr"] = 2.0  # the number of valid tokens
        >>> optimizer.step()
        >>> model.weight.data
        tensor([[0., 1.]])
    """
    del axis
    return IntegerSteps(get_parameters(stages))
