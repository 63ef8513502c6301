"""A text is the same in every layout, for the same seed."""

import attrs
import pytest
import torch
from whole_step import CONFIG

import trainkit as tk
from trainkit.batch import blank_batch
from trainkit.models import Decoder, generate, init_weights
from trainkit.parallel import fsdp
from trainkit.parallel.generation import bind_call
from trainkit.parallel.sequence import sequence
from trainkit.parallel.tensor import tensor
from trainkit.testing import run_ranks

SMALL = attrs.evolve(CONFIG, vocab_size=32)
LAYOUTS = {
    2: [{"pp": 2}, {"tp": 2}, {"ring": 2}, {"ulysses": 2}, {}],
    4: [{"pp": 2, "tp": 2}, {"pp": 2, "ring": 2}, {"ring": 2, "ulysses": 2}, {"tp": 2}],
}


def written(degrees, head="logits"):
    """Return a text that outgrows its window, and the logits of a window of odd length."""
    config = attrs.evolve(SMALL, tied=head == "hidden")
    with tk.parallel_session(**degrees) as ps:
        stages = tk.build_stages(
            lambda: Decoder(config, head=head).double(),
            ps,
            [tensor(), sequence(), fsdp()],
            weights=init_weights(config, seed=0),
        )
        call = bind_call(stages, ps)
        ids = generate(stages[0], [3, 1, 4], max_new_tokens=6, context=7, seed=1, call=call)
        batch = blank_batch(1, 5)
        with torch.no_grad():
            logits = call(stages[0], {**batch, "input_ids": torch.arange(5)[None]})
        assert all(module.training for stage in stages for module in stage.modules())
        return ids, logits.numpy().copy()


def all_of(layouts):
    from torch.distributed.tensor import debug

    found = []
    for i, degrees in enumerate(layouts):
        found.append(written(degrees, ("logits", "hidden")[i % 2]))
        getattr(debug, "_clear_sharding_prop_cache", debug._clear_python_sharding_prop_cache)()
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_writes_the_same_text_with_the_same_logits_on_every_rank(world):
    wanted = written({}), written({}, "hidden")
    for rank in run_ranks(all_of, world, LAYOUTS[world]):
        for i, (ids, logits) in enumerate(rank):
            text, whole = wanted[i % 2]
            assert ids == text
            assert logits.shape == whole.shape == (1, 5, 32)
            assert abs(logits - whole).max() < 1e-12 * abs(whole).max()


def test_more_than_one_document_is_refused():
    (model,) = tk.build_stages(
        lambda: Decoder(SMALL), tk.solo_parallel(), [], weights=init_weights(SMALL, seed=0)
    )
    with pytest.raises(ValueError, match="2 rows with 2 documents"):
        bind_call([model], tk.solo_parallel())(model, blank_batch(2, 4))
