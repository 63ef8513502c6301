"""Noise is a function of the step, the place and the feature of the whole model."""

import pytest
import torch

from trainkit import noise

X = torch.ones(2, 3, 12)
KEYS = noise.token_keys(torch.arange(6).view(2, 3), seed=1, step=4)


def dropped(x=X, keys=KEYS, *, name="layers.0.mlp", **options):
    return noise.dropout(x, keys, name=name, p=0.5, **{"width": 12, **options})


def test_every_place_and_every_step_has_a_mask_of_its_own():
    later = noise.token_keys(torch.arange(6).view(2, 3), seed=1, step=5)
    masks = [dropped(), dropped(name="layers.1.mlp"), dropped(keys=later)]
    for i, mask in enumerate(masks):
        others = masks[:i] + masks[i + 1 :]
        assert all((mask != other).float().mean() > 0.2 for other in others)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_part_of_the_features_drops_what_the_whole_drops_there(parts):
    size = 12 // parts
    cut = [dropped(x, offset=i * size) for i, x in enumerate(X.chunk(parts, -1))]
    assert torch.equal(torch.cat(cut, -1), dropped())


@pytest.mark.parametrize("offset", [None, -1, 7, 12])
def test_a_part_that_does_not_say_which_it_is_is_refused(offset):
    for p in (0.0, 0.5):
        with pytest.raises(ValueError, match=r"dropout: x has 6 of the 12 features .* offset="):
            noise.dropout(X[..., :6], KEYS, name="mlp", p=p, width=12, offset=offset)
    with pytest.raises(ValueError, match=r"dropout: x has 12 of the 12"):
        dropped(offset=1)
