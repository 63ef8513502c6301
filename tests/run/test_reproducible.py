"""One call sets what the same bits need on CUDA, before it is too late for it."""

import os

import pytest
import torch

from trainkit.batch import make_padding_batch
from trainkit.models import Decoder, DecoderConfig
from trainkit.run import open_run, set_numerics, use_deterministic
from trainkit.types import Numerics


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_it_asks_for_errors_and_not_for_warnings():
    """With `warn_only` the flash kernels stay as they are, and only say so."""
    use_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_decoder_trains_with_it():
    use_deterministic()
    config = DecoderConfig(vocab_size=16, width=8, layers=1, heads=2, kv_heads=1, mlp_width=16)
    model = Decoder(config)
    batch = make_padding_batch(2, 4)
    model(batch.input_ids, position_ids=batch.position_ids, spans=batch.spans).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_comes_before_cuda_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="before anything touches CUDA"):
        use_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    use_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_run_sets_and_says_how_exact_it_computes(tmp_path, capsys):
    try:
        with open_run(tmp_path, numerics=Numerics(matmul="high")):
            assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        set_numerics(Numerics())
    assert torch.get_float32_matmul_precision() == "highest"
    assert "products of fp32 high, algorithms any" in capsys.readouterr().out
