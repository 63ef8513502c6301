"""What layouts cannot do with experts yet; what they can is in the certificate."""

import attrs
import pytest
import torch

from trainkit.mesh import solo_parallel
from trainkit.models import Decoder
from trainkit.parallel import sequence, tensor
from trainkit.planning import Job
from trainkit.testing.builtin import CONFIG, EXPERTS, LATENT
from trainkit.types import Axis, ConfigError, Share


@pytest.mark.parametrize(("axis", "transform"), [("tp", tensor), ("ring", sequence)])
def test_documents_that_ranks_would_share_are_not_balanced_apart(axis, transform):
    with torch.device("meta"):
        model = Decoder(attrs.evolve(CONFIG, experts=EXPERTS), balance="document")
    ps = attrs.evolve(solo_parallel(), **{axis: Axis(axis, Share(0, 2))})
    with pytest.raises(ConfigError, match=r'layers.1.mlp balances its experts by "document"'):
        transform()(model, ps)


def test_a_plan_says_that_it_knows_neither_experts_nor_latents():
    with pytest.raises(ConfigError, match="a plan does not know yet what experts need"):
        Job(config=attrs.evolve(CONFIG, experts=EXPERTS), row_length=64, rows=8)
    with pytest.raises(ConfigError, match="a plan does not know yet what latent attention needs"):
        Job(config=LATENT, row_length=64, rows=8)
