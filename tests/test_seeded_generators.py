"""torch's own dropout: a function of the seed, the step and the rank's place while it is seeded."""

import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.noise import seed_generators
from trainkit.parallel import recompute
from trainkit.types import Share


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))])
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.layers[0](x * self.gain)


def step_of(model, *, step, share, stage=0, microbatches=2):
    """Return the masks of a step's microbatches, and the gradient that they leave."""
    masks = []

    def loss(y, _):
        masks.append(y.detach())
        return y.sum(), {}

    model.zero_grad()
    with seed_generators(5, step=step, share=share, stage=stage):
        batches = [{"x": torch.ones(64)}] * microbatches
        tk.forward_backward(
            model,
            batches,
            loss,
            denominator=torch.tensor(1),
            call=lambda model, batch: model(batch["x"]),
        )
    return torch.stack(masks), model.gain.grad


@pytest.mark.parametrize("mode", ["none", "full"])
def test_torch_s_own_dropout_is_repeated_by_a_resumed_run_and_differs_between_ranks(mode):
    model = recompute(mode)(Model(), tk.solo_parallel())
    here, there = Share(0, 2), Share(1, 2)
    before = torch.get_rng_state()
    masks, grad = step_of(model, step=3, share=here)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(masks.sum(0), grad)  # the second forward pass dropped the same
    assert not torch.equal(*masks)
    torch.rand(7)  # another run, whose generator is elsewhere
    assert torch.equal(step_of(model, step=3, share=here)[0], masks)
    assert not torch.equal(step_of(model, step=4, share=here)[0], masks)
    assert not torch.equal(step_of(model, step=3, share=there)[0], masks)
    assert not torch.equal(step_of(model, step=3, share=here, stage=1)[0], masks)


def fails_after_drawing():
    torch.rand(3)
    raise ZeroDivisionError


def test_generators_are_set_back_after_a_failure():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seed_generators(0, step=0, share=Share(0, 1)):
        fails_after_drawing()
    assert torch.equal(torch.get_rng_state(), before)
