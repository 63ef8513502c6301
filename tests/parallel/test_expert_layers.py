"""A decoder with experts in every layout that has no expert parallelism."""

import attrs
import pytest
import torch

from trainkit.losses import next_token_linear, routed
from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, Experts, call_routed
from trainkit.parallel import sequence, tensor
from trainkit.planning import Job
from trainkit.testing import certify
from trainkit.testing.builtin import CONFIG, decoder_batch, decoder_plan
from trainkit.testing.cases import Case
from trainkit.testing.certificate import as_text
from trainkit.types import Axis, ConfigError, Layout, Share

EXPERTS = Experts(
    count=8,
    chosen=2,
    width=16,
    shared=16,
    first=1,
    scores="sigmoid",
    biased=True,
    groups=4,
    groups_chosen=2,
)


class Tilted(Decoder):
    """A decoder whose routers have loads and biases, as after some steps."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        for layer in self.layers.values():
            router = getattr(layer.mlp, "router", None)
            if router is not None and router.load.device.type != "meta":
                router.load.copy_(torch.linspace(0.02, 0.23, 8))
                router.bias.copy_(torch.linspace(0.1, -0.1, 8))


def make_model():
    return Tilted(attrs.evolve(CONFIG, experts=EXPERTS), head="hidden")


def padded_batch(step):
    """Return rows of which the last quarter is padding in every other one."""
    batch = decoder_batch(step)
    is_padding = torch.zeros_like(batch.labels, dtype=torch.bool)
    is_padding[::2, 48:] = True
    documents = batch.document_ids.masked_fill(is_padding, -1)
    labels = batch.labels.masked_fill(is_padding, -100)
    return attrs.evolve(batch, document_ids=documents, labels=labels)


LOSS = routed(next_token_linear, balance=0.5, router_z=0.1)


def loss(output, batch):
    return LOSS(output, batch)


loss.terms = LOSS.terms

CASES = [
    Case(rows_per_microbatch=3),
    Case(recompute="full"),
    Case(Layout(dp_shard=2)),
    Case(Layout(tp=2)),
    Case(Layout(pp=2)),
    Case(Layout(ring=2, fold_sp="none")),
    Case(Layout(ulysses=2)),
    Case(Layout(dp_replicate=2, dp_shard=2), recompute="full"),
    Case(Layout(pp=2, tp=2)),
    Case(Layout(pp=2, dp_shard=2, schedule="zero_bubble_v", reshard_after_forward=False)),
    Case(Layout(dp_shard=2, tp=2), recompute="selective"),
]


def test_it_gives_the_numbers_of_one_process_in_every_layout():
    found = certify(
        make_model, padded_batch, CASES, plan=decoder_plan, loss=loss, call=call_routed, steps=2
    )
    assert found.ok, "\n".join([as_text(found), *(row.traceback for row in found.red)])


@pytest.mark.parametrize(("axis", "transform"), [("tp", tensor), ("ring", sequence)])
def test_documents_that_ranks_would_share_are_not_balanced_apart(axis, transform):
    with torch.device("meta"):
        model = Decoder(attrs.evolve(CONFIG, experts=EXPERTS), balance="document")
    ps = attrs.evolve(solo_parallel(), **{axis: Axis(axis, Share(0, 2))})
    with pytest.raises(ConfigError, match=r'layers.1.mlp balances its experts by "document"'):
        transform()(model, ps)


def test_a_plan_says_that_it_does_not_know_experts():
    with pytest.raises(ConfigError, match="a plan does not know yet what experts need"):
        Job(config=attrs.evolve(CONFIG, experts=EXPERTS), row_length=64, rows=8)
