"""Frozen parameters: by pattern, by step, in any layout, and after a resume."""

from functools import partial

import attrs
import pytest
import torch

from trainkit.grads import clip_and_step, get_named_parameters, get_parameters
from trainkit.losses import next_token_linear
from trainkit.mesh import parallel_session, solo_parallel
from trainkit.models import Decoder
from trainkit.models.config import parameter_shapes
from trainkit.optim import adamw
from trainkit.parallel import build_stages, fsdp, mixed_precision, tensor_parallel
from trainkit.parallel.parameters import get_local_box
from trainkit.post.adapters import (
    Freeze,
    Lora,
    apply_freeze_,
    exclude_frozen_,
    lora,
    make_freeze_facts,
    select_frozen,
)
from trainkit.step import make_forward_backward
from trainkit.tools.testing import run_ranks
from trainkit.tools.testing.builtin import CONFIG, decoder_batch
from trainkit.tools.testing.distribute_batch import distribute_batch
from trainkit.tools.testing.train import certificate_weights
from trainkit.types import ConfigError, Layout

CONFIG = attrs.evolve(CONFIG, layers=3)
NAMES = list(parameter_shapes(CONFIG))
BASE = [Freeze("layers.**"), Freeze("**norm**", frozen=False)]
SCHEDULE = {
    2: [Freeze("layers.[12].**", frozen=False), Freeze("embedding.*")],
    1: [Freeze("layers.2.**", frozen=False)],
    3: [Freeze("layers.2.mlp**")],
}


def test_the_last_word_of_all_steps_so_far_counts():
    frozen = [select_frozen(NAMES, BASE, SCHEDULE, step) for step in range(4)]
    up = "layers.{}.mlp.up.weight"
    assert [up.format(2) in f for f in frozen] == [True, False, False, True]
    assert [up.format(1) in f for f in frozen] == [True, True, False, False]
    assert ["embedding.weight" in f for f in frozen] == [False, False, True, True]
    assert "layers.0.attention_norm.weight" not in frozen[0]
    assert make_freeze_facts(BASE, SCHEDULE) == make_freeze_facts(
        BASE, dict(sorted(SCHEDULE.items()))
    )


def test_the_order_of_what_says_the_same_is_no_fact():
    words = [Freeze("head.*"), Freeze("norm.*"), Freeze("head.weight", frozen=False)]
    other = [words[1], words[0], words[1], words[2]]
    assert make_freeze_facts(words, {3: words}) == make_freeze_facts(other, {3: other})
    assert make_freeze_facts(words, {}) != make_freeze_facts(
        words[::-1], {}
    )  # of head.weight the last word
    names = ["head.weight", "norm.weight"]
    assert select_frozen(names, words, {}, 0) == select_frozen(names, other, {}, 0)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("hea", "matches the name of no parameter"), ("{head", "without its other half")],
)
def test_a_pattern_that_is_wrong_later_raises_at_once(pattern, message):
    with pytest.raises(ConfigError, match=message):
        select_frozen(NAMES, [], {1000: [Freeze(pattern)]}, 0)


def test_a_base_that_no_checkpoint_holds_stays_frozen():
    ps = solo_parallel()
    stages = build_stages(
        partial(Decoder, CONFIG), ps, [lora(Lora("**wq"))], weights=certificate_weights
    )
    exclude_frozen_(stages, ps, source=None)
    with pytest.raises(ConfigError, match=r"embedding.weight; .* would be trained"):
        apply_freeze_(stages, [])


def trained_in(layout):
    """Return the parameters after four steps, of which each trains others."""
    with parallel_session(layout) as ps:
        make_model = lambda: Decoder(CONFIG, head="hidden").double()  # noqa: E731
        plan = [tensor_parallel(), fsdp()]
        stages = build_stages(make_model, ps, plan, weights=certificate_weights)
        optimizer = adamw(get_parameters(stages), lr=1e-2, eps=1e-4)
        run = make_forward_backward(stages, next_token_linear)
        for step in range(4):
            apply_freeze_(stages, select_frozen(NAMES, BASE, SCHEDULE, step))
            run(
                distribute_batch(decoder_batch(step), ps.data_shard, rows_per_microbatch=2),
                denominator=torch.tensor(50.0, dtype=torch.float64),
            )
            clip_and_step(get_parameters(stages), optimizer, lr=1e-2, max_norm=0.5, axis=ps.pp)
        return {name: get_local_box(p) for name, p in get_named_parameters(stages).items()}


LAYOUTS = [Layout(dp_shard=2), Layout(tp=2), Layout(pp=2)]


def check_against(wanted):
    for layout in LAYOUTS:
        for name, box in trained_in(layout).items():
            whole = wanted[name]
            for dim, (start, size) in enumerate(zip(box.offset, box.local.shape, strict=True)):
                whole = whole.narrow(dim, start, size)
            assert torch.allclose(box.local, whole, rtol=1e-11, atol=1e-11), (layout, name)


def test_what_changes_between_steps_is_trained_alike_in_every_layout():
    wanted = {name: box.local for name, box in trained_in(Layout()).items()}
    never = "layers.0.mlp.up.weight"
    first = certificate_weights(never, wanted[never].shape, (0, 0))
    assert torch.equal(wanted[never], first.double())
    run_ranks(check_against, 2, wanted)


def kinds_of_gradients(layout):
    """Return the dtypes of gradients in bf16, of what was built frozen and then trained."""

    def make_model():
        model = Decoder(CONFIG, head="hidden")
        model.layers["1"].attention.wq.requires_grad_(False)
        return model

    with parallel_session(layout) as ps:
        precision = mixed_precision(torch.bfloat16, storage=torch.bfloat16)
        stages = build_stages(make_model, ps, [precision, fsdp()], weights=certificate_weights)
        run = make_forward_backward(stages, next_token_linear)
        for step in range(2):
            if step:
                apply_freeze_(stages, [])
            batch = distribute_batch(decoder_batch(step), ps.data_shard, rows_per_microbatch=2)
            run(batch, denominator=torch.tensor(50.0))
        return {p.grad.dtype for p in get_parameters(stages)}


def test_what_is_frozen_at_first_and_kept_in_bf16_has_its_gradients_in_fp32_later():
    assert kinds_of_gradients(Layout()) == {torch.float32}
    assert run_ranks(kinds_of_gradients, 2, Layout(dp_shard=2)) == [{torch.float32}] * 2
