"""A second, frozen model: its outputs become columns of the batch."""

import functools

import attrs
import torch
from torch import nn

from trainkit.batch import make_padding_batch
from trainkit.mesh import parallel_session
from trainkit.models import Decoder, init_weights, make_decoder_config
from trainkit.parallel import add_columns, build_stages, fsdp, make_output_head, tensor_parallel
from trainkit.tools.testing import run_ranks
from trainkit.types import Layout, drop_routing

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 48, "vocab_size": 64}


def keep(output, _):
    return {"out": getattr(drop_routing(output), "hidden", output)}


def test_a_reference_drops_nothing_and_has_no_gradient_and_keeps_its_mode():
    model = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5), nn.Linear(64, 1)).train()
    model[2].eval()
    batch = attrs.evolve(make_padding_batch(1, 4), extra={"weights": torch.ones(1, 4)})

    def call(model, batch):
        return model(batch["weights"].unsqueeze(-1))

    ((once,), (twice,)) = (add_columns(model, [batch], keep, call=call) for _ in range(2))
    assert torch.equal(once["out"], twice["out"])
    assert torch.equal(once["out"], model[2](model[0](batch["weights"].unsqueeze(-1))))
    assert not once["out"].requires_grad
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert once["weights"] is batch["weights"]
    assert "out" not in batch


def of_layouts(layouts):
    """Return what the columns of a batch and the head come to in each layout, where they are."""
    found = []
    for layout in layouts:
        with parallel_session(layout) as ps:
            config = make_decoder_config("tiny", **SMALL)
            make_model = functools.partial(Decoder, config, head="hidden")
            plan = [tensor_parallel(), fsdp(layout)]
            stages = build_stages(make_model, ps, plan, weights=init_weights(config, seed=3))
            ids = torch.arange(8)[None]
            batch = attrs.evolve(make_padding_batch(1, 8), input_ids=ids)
            head = make_output_head(stages, batch)
            [own] = add_columns(stages, [batch], keep)
            if "out" in own:
                logits = own["out"] @ head.weight.T
                found.append((head.axis.index, head.axis.count, logits.tolist()))
            else:
                assert not len(head.weight)
                found.append(None)
    return found


def test_hidden_states_and_the_head_are_those_of_one_process_in_any_layout():
    layouts = [Layout(dp_shard=2), Layout(tp=2), Layout(pp=2)]
    ((_, _, whole),) = of_layouts([Layout()])
    whole = torch.tensor(whole)
    for rank, each in enumerate(run_ranks(of_layouts, 2, layouts)):
        for layout, found in zip(layouts, each, strict=True):
            assert (found is None) == (layout.pp == 2 and rank == 0)
            if found is not None:
                index, count, logits = found
                assert count == layout.tp
                want = whole.chunk(count, -1)[index]
                assert torch.tensor(logits).sub(want).abs().max() < 1e-5 * want.abs().max()
