"""A Hugging Face model through build_stages and the certificate, as the how-to shows it."""

import pytest
import torch
from whole_step import difference, full

import trainkit as tk
from trainkit import losses, parallel
from trainkit.batch import split_batch
from trainkit.mesh import solo_parallel
from trainkit.parallel.grad_reduction import sum_partial_
from trainkit.tools.testing import certify, run_ranks
from trainkit.tools.testing.builtin import decoder_batch
from trainkit.tools.testing.cases import LayoutCase
from trainkit.tools.testing.certificate import format_text
from trainkit.tools.testing.train import certificate_weights
from trainkit.types import CheckpointError, Layout
from trainkit.weights.checkpoint import open_weights
from trainkit.weights.convert import convert_weights

transformers = pytest.importorskip("transformers")


def make_model():
    """Return a model with a tied head, biases, and norms of queries and keys."""
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    return transformers.Qwen3ForCausalLM(config)


def call(model, batch):
    ids, positions = batch["input_ids"], batch["position_ids"]
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def plan(_ps, case):
    with torch.device("meta"):
        styles = parallel.read_hf_styles(make_model())
    sharded = parallel.fsdp(blocks="model.layers.*")
    kept = parallel.recompute(case.recompute, blocks="model.layers.*")
    return [parallel.tensor_parallel(styles), kept, sharded]


LAYOUTS = [
    LayoutCase(Layout(tp=2), recompute="full"),
    LayoutCase(Layout(dp_shard=2, reduce="each"), rows_per_microbatch=2),
    LayoutCase(Layout(dp_shard=2, tp=2), recompute="full"),
]


@pytest.mark.only_all  # the page that shows it is run, and the gradients below are of its documents
def test_it_gives_the_numbers_of_one_process_in_every_layout():
    found = certify(
        make_model, decoder_batch, LAYOUTS, plan=plan, loss=losses.next_token, call=call, steps=2
    )
    assert found.ok, format_text(found)


def own_gradient():
    """Return the gradient of all documents, each alone through the model as its makers call it."""
    (model,) = tk.build_stages(make_model, solo_parallel(), [], weights=certificate_weights)
    model, batch, total, count = model.double(), decoder_batch(0), 0, 0
    for row, documents in enumerate(batch.document_ids):
        for document in documents[documents >= 0].unique():
            ids, labels = (x[row, documents == document] for x in (batch.input_ids, batch.labels))
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += (labels >= 0).sum()
    (total / count).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def gradients(layout, reduce, recompute="none"):
    """Return the gradient of the same documents: packed, a row at a time, sharded over ranks."""
    with tk.parallel_session(layout) as ps:
        make = lambda: make_model().double()  # noqa: E731
        transforms = plan(ps, LayoutCase(recompute=recompute))
        stages = tk.build_stages(make, ps, transforms, weights=certificate_weights)
        rows = split_batch(decoder_batch(0), 1)[ps.dp.index :: ps.dp.count]
        tokens = tk.all_sum(tk.count_valid_tokens(rows), ps.loss)
        run = tk.make_forward_backward(stages, losses.next_token, call=call, reduce=reduce)
        run(rows, denominator=tokens)
        named = tk.get_named_parameters(stages)
        return {name: p.grad.full_tensor().numpy().copy() for name, p in named.items()}


KINDS = ("Llama", "Qwen3")


def model_of(kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=kind == "Qwen3",
        attention_bias=True,
        pad_token_id=3,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def own_step(kind, tp):
    """Return logits, loss and gradients of a small model made from a configuration."""
    with tk.parallel_session(tp=tp) as ps:
        model = model_of(kind)
        with torch.no_grad():  # norms and biases begin at 1 and 0, which hide mistakes
            for index, parameter in enumerate(model.parameters()):
                phases = torch.arange(parameter.numel()).view_as(parameter) + index
                parameter.add_(phases.sin(), alpha=0.1)
        parallel.tensor_parallel(parallel.read_hf_styles(model))(model, ps)
        ids = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        sum_partial_(model)
        return {
            "losses": [float(out.loss.detach())],
            "norms": [float(tk.grad_norm(model.parameters()))],
            "parameters": {"logits": out.logits.detach().numpy()}
            | {name: full(p.grad) for name, p in model.named_parameters()},
        }


def of_two_ranks():
    sharded = gradients(Layout(dp_shard=2), "each")
    tensor = gradients(Layout(tp=2), "last", recompute="full")
    return (sharded, tensor), {kind: own_step(kind, 2) for kind in KINDS}


@pytest.fixture(scope="module")
def on_two_ranks():
    """One start: every rank imports transformers, which takes longer than its steps."""
    return run_ranks(of_two_ranks, 2)[0]


def test_models_with_their_own_plan_give_the_numbers_of_one_process(on_two_ranks):
    for kind in KINDS:
        assert difference(on_two_ranks[1][kind], own_step(kind, 1)) < 1e-12, kind


def test_packed_sharded_and_accumulated_it_has_the_gradient_of_its_documents(on_two_ranks):
    wanted = own_gradient()
    for found in on_two_ranks[0]:
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            assert abs(found[name] - want).max() < 1e-12 * abs(want).max(), name


def test_its_own_folder_is_loaded_though_a_tied_head_is_not_in_it(tmp_path):
    made = make_model()
    made.save_pretrained(tmp_path / "model")
    convert_weights(tmp_path / "model", tmp_path / "weights")
    weights = open_weights(tmp_path / "weights")
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
        make_model, solo_parallel(), plan(None, LayoutCase()), weights=certificate_weights
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
