"""Two steps as a recipe takes them, from a corpus, give the same numbers on one rank and on many.

Which layouts do is for the certificate to say (test_certificate.py); here is what it takes for
granted: that `make_step_batch` deals the rows, and that one process is right.
"""

import functools

import pytest
import torch
from torch import nn
from whole_step import (
    CAPACITY,
    ROWS,
    Layout,
    build,
    corpus,
    difference,
    input_of,
    model_config,
    run_steps,
)

import trainkit as tk
from trainkit.models import Decoder, init_weights
from trainkit.tools.testing import run_ranks
from trainkit.types import Cursor

LAYOUTS = {
    "3 sharded, blank rows, uneven shards": Layout(3),
    "4 sharded, one rank with no valid token": Layout(4),
    "2 x 2 hybrid, reduced each microbatch": Layout(4, dp_replicate=2, reduce="each"),
    "1, four microbatches at once": Layout(1, rows_per_microbatch=4),
    "1, blank row": Layout(1, rows_per_microbatch=3),
}


@functools.cache
def reference(**changes):
    return run_steps(Layout(**changes))


def several(layouts):
    return {name: run_steps(layout) for name, layout in layouts.items()}


@functools.cache
def found_on(world):
    """All layouts of a world in one start of its ranks."""
    chosen = {name: layout for name, layout in LAYOUTS.items() if layout.world == world}
    return run_ranks(several, world, chosen)[0] if world > 1 else several(chosen)


@pytest.mark.case("S1", "S2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_process_in_fp64(name):
    found = found_on(LAYOUTS[name].world)[name]
    assert difference(found, reference()) < 1e-12
    assert found["hashes"] == reference()["hashes"]
    assert found["tokens"] == reference()["tokens"]


def test_dropout_changes_the_numbers():
    assert difference(reference(dropout=0.3), reference()) > 1e-3


def plain_pytorch_steps(*, steps=2):
    """The same steps written out: one batch, one mean, torch's own clip and AdamW."""
    config, solo = model_config(Layout()), tk.solo_parallel()
    model, weights = Decoder(config).double(), init_weights(config, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights(name, p.shape, (0,) * p.dim()))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, foreach=False)
    text, layout = corpus(), Layout(rows_per_microbatch=ROWS)
    bins = tk.pack_bins(text.lengths, CAPACITY)
    losses, norms = [], []
    for step in range(steps):
        (batch,) = input_of(Cursor(step), solo, layout, text=text, bins=bins).microbatches
        logits = model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100
        )
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def test_the_step_is_a_plain_full_batch_pytorch_step():
    assert difference(reference(), plain_pytorch_steps()) < 1e-12


def test_a_wrong_factor_cannot_hide():
    """The negative control: what the comparison must catch."""
    found = reference()
    for key in ("losses", "norms"):
        wrong = [2 * value for value in found[key]]
        assert difference({**found, key: wrong}, found) > 0.9


# ---------------------------------------------------------------- planted mistakes


def averaged_instead_of_summed():
    with tk.parallel_session() as ps:
        stages, optimizer = build(Layout(), ps)
        for module in stages[0].modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(2.0)
        from whole_step import step_function

        text = corpus()
        bins = tk.pack_bins(text.lengths, CAPACITY)
        batch = input_of(Cursor(), ps, Layout(), text=text, bins=bins)
        step_function(Layout(), ps, stages, optimizer)(tk.TrainState(), batch)


def test_a_module_that_averages_is_refused_by_name():
    with pytest.raises(RuntimeError, match=r"layers\.0.*averages|the model itself.*averages"):
        run_ranks(averaged_instead_of_summed, 2)
