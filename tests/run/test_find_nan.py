"""The operation that first makes a NaN is named; what may be infinite or unread is no fault."""

import pytest
import torch
from recipe_runs import column, error_of, here

from trainkit.models import Decoder
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


# ------------------------------------------------------------------------------------- in a recipe


class _Divide(torch.autograd.Function):
    """Gives what it gets, and 0 / 0 in the backward pass."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 0 / 0


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("spoil", [lambda x: x * 0 / 0, _Divide.apply], ids=["forward", "backward"])
def test_a_recipe_names_the_step_of_the_nan(spoil, tmp_path, monkeypatch):
    passes, forward = [], Decoder.forward

    def spoil_fourth(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        passes.append(torch.is_grad_enabled())
        if passes.count(True) != 4:  # one for each step
            return output
        return output._replace(hidden=spoil(output.hidden))

    monkeypatch.setattr(Decoder, "forward", spoil_fourth)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a line of text\n" * 200)
    flags = f"--data {corpus} --out {tmp_path / 'run'} --cache None --row-length 32 --rows 2"
    flags += " --microbatch 2 --steps 6 --eval-every 0 --anomaly"
    code, output = here(flags.split(), layers=1)
    error = error_of(output)
    assert (code, error["step"]) == (67, 4), output
    assert error["what"].startswith("find_first_nan: in step 4 aten.div.Tensor makes ")
    assert column(tmp_path / "run", "step") == [1, 2, 3]
    assert "(in phase 'step 4')" in (tmp_path / "run/ranks/failure.json").read_text()
