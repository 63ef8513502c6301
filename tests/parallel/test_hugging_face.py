"""A Hugging Face model through build_stages and the certificate, as the how-to shows it."""

import pytest
import torch

from trainkit import losses, parallel
from trainkit.checkpoint import weights_from
from trainkit.convert import convert_weights
from trainkit.mesh import solo_parallel
from trainkit.testing import certify
from trainkit.testing.builtin import decoder_batch
from trainkit.testing.cases import Case
from trainkit.testing.certificate import as_text
from trainkit.testing.train import certificate_weights
from trainkit.types import CheckpointError, Layout

transformers = pytest.importorskip("transformers")


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def make_model():
    """Return a model with a tied head, biases, and norms of queries and keys."""
    more = {"tie_word_embeddings": True, "attention_bias": True}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **more))


def call(model, batch):
    ids, positions = batch["input_ids"], batch["position_ids"]
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def plan(_ps, case):
    with torch.device("meta"):
        styles = parallel.hf_styles(make_model())
    sharded = parallel.fsdp(blocks="model.layers.*")
    kept = parallel.recompute(case.recompute, blocks="model.layers.*")
    return [parallel.tensor(styles), kept, sharded]


LAYOUTS = [
    Case(Layout(tp=2), recompute="full"),
    Case(Layout(dp_shard=2, reduce="each"), rows_per_microbatch=2),
]
TOGETHER = [Case(Layout(dp_shard=2, tp=2), recompute="full")]


# Every rank imports transformers, which takes longer than its steps.
@pytest.mark.parametrize("cases", [LAYOUTS, pytest.param(TOGETHER, marks=pytest.mark.only_all)])
def test_it_gives_the_numbers_of_one_process_in_every_layout(cases):
    found = certify(
        make_model, decoder_batch, cases, plan=plan, loss=losses.next_token, call=call, steps=2
    )
    assert found.ok, as_text(found)


def test_its_own_folder_is_loaded_though_a_tied_head_is_not_in_it(tmp_path):
    made = make_model()
    made.save_pretrained(tmp_path / "model")
    convert_weights(tmp_path / "model", tmp_path / "weights")
    weights = weights_from(tmp_path / "weights")
    (built,) = parallel.build_stages(make_model, solo_parallel(), [], weights=weights)
    assert built.lm_head.weight is built.model.embed_tokens.weight
    assert len(list(built.parameters())) == len(list(made.parameters()))
    batch = decoder_batch(0)
    torch.testing.assert_close(call(built, batch), call(made, batch), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"weights: there is no lm_head.weight"):
        parallel.build_stages(untied, solo_parallel(), [], weights=weights)


def untied():
    model = make_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def test_built_by_stages_it_is_the_model_that_transformers_makes():
    (built,) = parallel.build_stages(
        make_model, solo_parallel(), plan(None, Case()), weights=certificate_weights
    )
    made = make_model()
    made.load_state_dict(built.state_dict())
    batch = decoder_batch(0)
    torch.testing.assert_close(call(built, batch), call(made, batch), rtol=0, atol=0)


def test_a_packed_row_has_the_sum_of_the_losses_of_its_documents():
    model, batch = make_model().double(), decoder_batch(0)
    alone = 0
    for row, documents in enumerate(batch.document_ids):
        for document in documents.unique():
            names = ("input_ids", "position_ids", "labels")
            one = {name: batch[name][row : row + 1, documents == document] for name in names}
            alone += losses.next_token(call(model, one), one)[0].item() * bool(document >= 0)
    whole = losses.next_token(call(model, batch), batch)[0].item()
    assert whole == pytest.approx(alone, rel=1e-12)
