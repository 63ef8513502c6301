"""The plan of a decoder: its order, its axes, and what it makes of one process."""

import pytest
import torch
from whole_step import CONFIG

from trainkit.batch import batch_from_rows
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, build_decoder, call_model, init_weights
from trainkit.parallel import build_stages, make_decoder_plan
from trainkit.parallel.precision import get_compute_dtype
from trainkit.parallel.transforms import OF_THE_WHOLE, ORDER
from trainkit.types import Layout, Precision


def test_it_has_every_kind_in_order_and_takes_care_of_every_axis():
    plan = make_decoder_plan(
        Layout(), recompute="full", offload=0, compiled=True, attention=["sdpa"]
    )
    others = {*OF_THE_WHOLE, "ddp"}  # users add ddp to FSDP, or use it instead
    assert [step.kind for step in plan] == [kind for kind in ORDER if kind not in others]
    covered = {axis for step in plan for axis in step.axes}
    assert covered == {*Layout().degrees} - {"pp"}  # which build_stages takes care of


def test_on_one_process_it_changes_nothing_but_what_it_is_asked_for():
    weights, ps = init_weights(CONFIG, seed=0), solo_parallel()
    plans = [
        make_decoder_plan(Layout()),
        make_decoder_plan(Layout(), precision=Precision(compute="bf16"), recompute="full"),
    ]
    plain, low = (
        build_stages(lambda: Decoder(CONFIG), ps, plan, weights=weights)[0] for plan in plans
    )
    batch = batch_from_rows(torch.arange(6)[None])
    assert torch.equal(call_model(plain, batch), call_model(build_decoder(CONFIG, seed=0), batch))
    assert (get_compute_dtype(plain), get_compute_dtype(low)) == (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="selective"):
        make_decoder_plan(Layout(), recompute="some")
