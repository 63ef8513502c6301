"""The operation that first makes a NaN is named; what may be infinite or unread is no fault."""

import pytest
import torch

from trainkit.phases import measure_phase, record_phases
from trainkit.run.find_nan import find_first_nan
from trainkit.types import NumericsError


def test_the_first_operation_is_named_and_not_what_follows():
    x = torch.tensor([-1.0, 4.0])
    message = r"aten\.sqrt.* makes 1 NaN of 2 values"
    with pytest.raises(NumericsError, match=message) as caught, find_first_nan():
        (x.sqrt() * 2).sum()
    assert "x.sqrt()" in str(caught.traceback[0].statement) + str(caught.traceback[1].statement)


def test_a_backward_pass_is_watched_too():
    x = torch.zeros(2, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Error detected in"),  # torch prints the forward pass
        pytest.raises(NumericsError, match=r"makes 2 NaN"),
        find_first_nan(),
    ):
        (x.sqrt() * 0).sum().backward()


def test_an_operation_that_writes_into_a_list_of_tensors_is_named():
    # As an optimizer does; such an operator returns nothing.
    x = [torch.zeros(2), torch.ones(1)]
    with pytest.raises(NumericsError, match=r"aten\._foreach_div_.* makes 2 NaN"), find_first_nan():
        torch._foreach_div_(x, x)


def test_an_argument_that_is_nan_already_is_somebody_else_s_fault():
    x = torch.tensor([torch.nan])
    with find_first_nan():
        (x * 2).sum()
        torch.full((2,), torch.nan)
        torch.scalar_tensor(torch.nan)  # FSDP's scalar for parameters without a gradient


def test_masks_of_infinity_and_memory_that_nobody_has_read_are_no_fault():
    with find_first_nan():
        scores = torch.zeros(1, 4).masked_fill(
            torch.tensor([[False, True, True, True]]), -torch.inf
        )
        assert scores.softmax(-1).sum() == 1
        torch.empty(1000).fill_(1.0)
        torch.empty_like(scores)
        torch.full((4,), 255, dtype=torch.uint8).view(torch.float32)  # bytes, as those of a file


def test_nothing_is_left_when_the_block_ends():
    with pytest.raises(KeyError), find_first_nan():
        raise KeyError
    assert not torch.is_anomaly_enabled()
    assert torch.zeros(1).div(0).isnan().all()


def test_evaluations_and_samples_are_not_watched():
    x = torch.zeros(2)
    with record_phases(), find_first_nan():
        with measure_phase("sample"), measure_phase("forward"):
            _ = x / x
        with pytest.raises(NumericsError), measure_phase("forward"):
            _ = x / x
