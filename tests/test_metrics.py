"""Metrics: one reduction, one transfer, and arithmetic that can be checked by hand."""

import inspect
import math
import time
from functools import partial
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from operators import OperatorMode, move

import trainkit as tk
from trainkit import metrics
from trainkit.data.corpus import make_corpus
from trainkit.data.packed import PackedCorpus
from trainkit.mesh import solo_parallel
from trainkit.metrics import (
    decoder_flops,
    expert_load_entropy,
    expert_load_ratio,
    make_expert_load_metrics,
    make_step_record,
    model_flops,
    model_flops_utilization,
    peak_flops,
    read_memory_stats,
    reduce,
    reduce_metrics,
    to_host,
    tokens_per_second,
)
from trainkit.models.config import Experts, Sliding, parameter_shapes
from trainkit.models.decoder_sizes import make_decoder_config
from trainkit.packing import pack_bins
from trainkit.run.sinks.tensorboard import scalars
from trainkit.tools.testing import run_ranks
from trainkit.types import Axis, Share

SUMS = {
    "loss": torch.tensor(1.5, dtype=torch.float64),
    "aux": torch.tensor(0.1, dtype=torch.float32),
    "aux/count": torch.tensor(2**53 - 1),
}


def test_reduce_metrics_on_one_rank_is_the_identity_and_a_new_dict():
    out = reduce_metrics(SUMS, solo_parallel().loss)
    assert out is not SUMS
    assert list(out) == list(SUMS)
    assert all(torch.equal(out[name], SUMS[name]) for name in SUMS)
    assert reduce_metrics({}, solo_parallel().loss) == {}


def test_reduce_metrics_makes_one_packed_sum_in_sorted_order(monkeypatch):
    calls = []

    def start_all_sum(x, axis):
        calls.append((x.clone(), axis.count))
        other = x.clone()
        other[1:4] = torch.tensor([0.25, -(2.0**52), 3.0])
        return lambda: x + other

    monkeypatch.setattr(reduce, "start_all_sum", start_all_sum)
    out = reduce_metrics(SUMS, Axis("loss", Share(0, 2)))
    ((packed, count),) = calls
    assert count == 2
    assert packed.dtype == torch.float64
    assert packed[2:4].tolist() == [2**53 - 1, 1.5]
    assert not packed[4:].any()
    assert {name: value.dtype for name, value in out.items()} == {
        name: value.dtype for name, value in SUMS.items()
    }
    assert list(out) == list(SUMS)
    assert out["loss"] == 4.5
    assert out["aux/count"].item() == 2**52 - 1
    assert out["aux"].item() == pytest.approx(0.35)


def test_ranks_send_from_the_axis_s_device_whatever_they_have_and_no_number_is_copied(monkeypatch):
    # The device "meta" stands for an accelerator: nothing on it can be read by the host.
    axis = Axis("loss", Share(0, 2), mesh=SimpleNamespace(device_type="meta"))
    sent = []

    def start_all_sum(x, _):
        sent.append((x.device, x.shape))
        return lambda: x

    monkeypatch.setattr(reduce, "start_all_sum", start_all_sum)
    here, there = torch.ones(()), torch.ones((), device="meta")
    names = []
    with OperatorMode(lambda operator, _: names.append(str(operator))):
        for sums in ({}, {"a": here}, {"a": there}, {"a": here, "b": there}):
            reduce_metrics(sums, axis)
    assert sent == [(torch.device("meta"), (256,))] * 4
    until = names[: names.index("aten.eq.Scalar")]
    assert "aten.fill_.Scalar" in until
    assert "aten.scalar_tensor.default" not in until


def reduced_where_a_rank_has_no_value():
    with tk.parallel_session() as ps:
        own = {"loss": torch.tensor(1.5), f"only/{ps.world.index}": torch.tensor(2)}
        few = own if ps.world.index else {"loss": torch.tensor(1.5)}
        found = []
        for sums in (own, few, few if ps.world.index else {}):
            try:
                found.append(reduce_metrics(sums, ps.loss))
            except ValueError as error:
                found.append(str(error))
        agreed = reduce_metrics({"only/1": torch.tensor(0)} | few, ps.loss)
        return found, {name: x.item() for name, x in agreed.items()}, reduce_metrics({}, ps.loss)


@pytest.mark.case("W9")
def test_ranks_with_different_names_are_refused_and_nobody_waits():
    for rank, (refused, agreed, nothing) in enumerate(
        run_ranks(reduced_where_a_rank_has_no_value, 2)
    ):
        own = "only/1" if rank else "loss"
        assert all(f"'{own}'" in text or rank == 0 for text in refused)
        for text in refused:
            assert text.startswith(
                "reduce_metrics: the ranks of 'loss' passed different names, here"
            )
        assert agreed == {"only/1": 2, "loss": 3.0}
        assert nothing == {}


def test_reduce_metrics_lets_go_of_the_graph_and_takes_any_shape(monkeypatch):
    monkeypatch.setattr(reduce, "start_all_sum", lambda x, axis: lambda: x * axis.count)
    attached = torch.tensor(1.0, requires_grad=True) * 2
    for axis in (solo_parallel().loss, Axis("loss", Share(0, 2))):
        assert not reduce_metrics({"loss": attached}, axis)["loss"].requires_grad
        load = torch.arange(600).view(2, 300)
        sums = reduce_metrics({"x": load, "loss": attached}, axis)
        assert torch.equal(sums["x"], load * axis.count)
        assert sums["loss"] == 2 * axis.count


class Transfers(OperatorMode):
    """Counts the reads of a single element, each of which would wait for an accelerator."""

    def __init__(self):
        super().__init__(self.watch)
        self.count = self.buffers = 0

    def watch(self, operator, _):
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        self.buffers += operator is torch.ops.aten.cat.default  # each with a transfer


PLACES = {"the host": lambda x: x, "a device": move}


@pytest.mark.parametrize("place", PLACES)
def test_to_host_keeps_kinds_and_order_and_reads_no_tensor_alone(place):
    mixed = {
        "skipped": torch.tensor(data=True),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "loss": torch.tensor(0.1, dtype=torch.float64, requires_grad=True),
        "lr": 3e-4,
        "tokens": torch.tensor(2**53 - 1),
        "step": 7,
        "norm": torch.tensor(float("nan")),
    }
    mixed = {k: PLACES[place](x) if isinstance(x, torch.Tensor) else x for k, x in mixed.items()}
    with Transfers() as transfers:
        host = to_host(mixed)
    assert (transfers.count, transfers.buffers) == (0, int(place == "a device"))
    assert list(host) == list(mixed)
    assert {name: type(value) for name, value in host.items()} == {
        "skipped": int, "half": float, "loss": float, "lr": float, "tokens": int, "step": int,
        "norm": float,
    }  # fmt: skip
    assert host["half"] == 0.5
    assert (host["loss"], host["tokens"], host["skipped"], host["step"]) == (0.1, 2**53 - 1, 1, 7)
    assert np.isnan(host["norm"])
    assert to_host({"lr": 1.0}) == {"lr": 1.0}
    assert to_host({}) == {}


@pytest.mark.parametrize("place", PLACES)
def test_to_host_makes_nested_lists_of_tables_with_the_same_transfer(place):
    table = PLACES[place](torch.tensor([[2**53 + 1, 0], [3, 4]]))
    mixed = {"load": table, "loss": torch.tensor(0.5), "column": table[:, 0]}
    mixed["none"] = torch.zeros(2, 0)
    with Transfers() as transfers:
        host = to_host(mixed)
    assert (transfers.count, transfers.buffers) == (0, int(place == "a device"))
    column = [2**53 + 1, 3]
    assert host == {"load": table.tolist(), "loss": 0.5, "column": column, "none": [[], []]}
    assert type(host["load"][0][0]) is int


# ------------------------------------------------------------------------------- loads of experts


def test_load_over_mean_and_entropy_by_hand():
    load = torch.tensor([[6, 0, 1, 1], [2, 2, 2, 2], [0, 0, 5, 0], [0, 0, 0, 0]])
    assert expert_load_ratio(load)[:3].tolist() == [3.0, 1.0, 4.0]
    shares = np.array([6, 1, 1]) / 8
    entropy = -(shares * np.log(shares)).sum() / np.log(4)
    assert expert_load_entropy(load)[:3].tolist() == pytest.approx([entropy, 1, 0])
    assert expert_load_ratio(load)[3].isnan()
    assert expert_load_entropy(load)[3].isnan()
    large = torch.tensor([2**40, 2**40 + 1])
    assert expert_load_ratio(large) > 1  # in fp32 it would be 1


def test_load_metrics_tell_each_layer_and_the_worst_without_waiting():
    load, biases = torch.tensor([[6, 0, 1, 1], [2, 2, 2, 2]]), torch.tensor([[0.1, -0.3], [0, 0.2]])
    with Transfers() as transfers:
        shown = make_expert_load_metrics(load, biases=biases, dropped=torch.tensor([1, 2]))
    assert transfers.count == 0
    assert all(x.ndim == 0 for x in shown.values())
    host = to_host(shown)
    names = ("load_over_mean", "load_entropy", "expert_bias", "dropped_share")
    assert list(host) == [name + end for name in names for end in ("", "/0", "/1")]
    assert [host["load_over_mean" + end] for end in ("", "/0", "/1")] == [3, 3, 1]
    assert host["load_entropy"] == host["load_entropy/0"] < host["load_entropy/1"] == 1
    assert host["expert_bias"] == host["expert_bias/0"] == pytest.approx(0.3)
    assert [host["dropped_share" + end] for end in ("", "/0", "/1")] == [0.25, 0.125, 0.25]
    assert make_expert_load_metrics(load).keys() == {x for x in host if x.startswith("load")}


def test_a_table_reaches_the_lines_and_no_curve(tmp_path):
    record = make_step_record({"loss": 1.0, "tokens": 4, "load": torch.tensor([[3, 1]])}, begin=0.0)
    with tk.sinks.open_jsonl(tmp_path / "metrics.jsonl") as sink:
        sink(1, record)
    assert tk.sinks.read_jsonl(tmp_path / "metrics.jsonl")[0]["load"] == [[3, 1]]
    assert "load" not in scalars(record)
    assert "loss" in scalars(record)


def test_tokens_per_second():
    assert tokens_per_second(500, 0.25) == 2000
    assert tokens_per_second(500, 0.0) == 0


small_flops = partial(model_flops, linear_parameters=10, layers=2, heads=3, head_dim=4)


def test_model_flops_by_hand():
    assert small_flops(lengths=[2, 3], attention="full") == 6 * 10 * 5 + 12 * 24 * 13
    assert small_flops(lengths=[2, 3]) == 6 * 10 * 5 + 12 * 24 * (3 + 6)
    assert small_flops(lengths=[]) == 0
    long = small_flops(lengths=np.array([10**6] * 4), attention="full")
    assert long == 6 * 10 * 4e6 + 12 * 24 * 4e12


@pytest.mark.parametrize("attention", ["causal", "full"])
def test_model_flops_count_what_torch_counts(attention):
    """A linear layer and plain attention, forward and backward, under torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens, heads, head_dim = 7, 2, 4
    width = heads * head_dim
    x = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(3 * width, width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (x @ weight.T).view(tokens, 3, heads, head_dim).permute(1, 2, 0, 3)
        (torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)).sum().backward()
    mine = model_flops(
        linear_parameters=weight.numel(),
        layers=1,
        heads=heads,
        head_dim=head_dim,
        lengths=[tokens],
        attention=attention,
    )
    unseen = 0 if attention == "full" else 12 * width * tokens * (tokens - 1) // 2
    assert mine == counter.get_total_flops() - unseen


def test_model_flops_refuses_an_unknown_convention():
    with pytest.raises(ValueError, match=r"model_flops: attention must be .* got 'half'"):
        small_flops(lengths=[1], attention="half")


def test_flops_of_a_decoder_count_active_experts_and_windows():
    config = make_decoder_config("tiny")
    lengths = [5, 40]
    heads = partial(model_flops, heads=config.heads, head_dim=config.head_size, lengths=lengths)
    shapes = parameter_shapes(config).items()
    matrices = [shape for name, shape in shapes if name.startswith("layers.") and len(shape) == 2]
    trained = sum(map(math.prod, matrices))
    trained += config.vocab_size * config.width  # the output head; the embedding is looked up
    assert decoder_flops(config, lengths) == heads(linear_parameters=trained, layers=config.layers)

    sliding = attrs.evolve(config, sliding=Sliding(window=8, full_every=2))
    windows = heads(linear_parameters=0, layers=2, window=8)
    assert decoder_flops(sliding, lengths) == windows + heads(linear_parameters=trained, layers=2)

    experts = Experts(count=4, top_k=1, renormalize=False, width=config.mlp_width)
    one_of_four = decoder_flops(attrs.evolve(config, experts=experts), lengths)
    routers = 6 * sum(lengths) * config.layers * 4 * config.width
    assert one_of_four == decoder_flops(config, lengths) + routers


def test_flops_utilization():
    assert model_flops_utilization(6e12, 3.0, peak=1e12, devices=4) == 0.5
    wrong = [(0.0, 1.0, 1), (1.0, -1.0, 1), (1.0, 1.0, 0), (1.0, math.nan, 1)]
    for seconds, peak, devices in wrong:
        with pytest.raises(ValueError, match="model_flops_utilization: seconds, peak and devices"):
            model_flops_utilization(1.0, seconds, peak=peak, devices=devices)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_the_most_specific_name_decides_the_peak(name, peak):
    assert peak_flops(name) == peak


def test_to_host_keeps_all_64_bits_of_an_integer():
    assert to_host({"hash": torch.tensor(2**63 - 1), "x": torch.tensor(0.5)})["hash"] == 2**63 - 1


def test_the_memory_of_a_process_is_what_it_holds():
    before = read_memory_stats(torch.device("cpu"))
    held = torch.ones(2**24)  # 64 MiB, written to
    now = read_memory_stats(torch.device("cpu"))
    assert now["memory"] - before["memory"] > 0.8 * held.nbytes
    assert now["memory_peak"] >= now["memory"]
    del held
    after = read_memory_stats(torch.device("cpu"))["memory_peak"]
    assert after >= now["memory_peak"] - 2**22  # which the kernel counts in batches


def test_an_accelerator_is_asked_for_its_peak_and_told_to_count_anew(monkeypatch):
    """Checked by signature only: there is no accelerator here."""
    calls = []
    names = ["memory_allocated", "memory_reserved", "max_memory_allocated"]
    for name in [*names, "reset_peak_memory_stats"]:
        signature = inspect.signature(getattr(torch.accelerator, name))
        signature.bind(torch.device("cuda", 0))
        answer = len(name)
        monkeypatch.setattr(
            torch.accelerator, name, lambda _, x=answer, n=name: calls.append(n) or x
        )
    found = read_memory_stats(torch.device("cuda", 0))
    assert found == {"memory": 16, "memory_reserved": 15, "memory_peak": 20}
    assert calls[-1] == "reset_peak_memory_stats"


def test_a_step_record_holds_every_bit():
    metrics = {"loss": torch.tensor(0.1), "lr": 0.25, "tokens": torch.tensor(50)}
    record = make_step_record(metrics | {"batch_hash": torch.tensor(-1)}, begin=0.0)
    assert float.fromhex(record["loss_hex"]) == record["loss"] == torch.tensor(0.1).item()
    assert record["lr_hex"] == "0x1.0000000000000p-2"
    assert record["batch_hash"] == "f" * 16
    assert "grad_norm_hex" not in record


def test_a_step_record_has_a_perplexity_where_the_loss_is_one_of_tokens():
    def perplexity_of(metrics):
        return make_step_record({"tokens": 1} | metrics, begin=0.0).get("perplexity")

    assert perplexity_of({"loss": 2.0}) == math.exp(2)
    assert perplexity_of({"loss": torch.tensor(1e4)}) == math.exp(20)
    assert math.isnan(perplexity_of({"loss": math.nan}))
    for other in ("pairs", "answers", "clipped"):
        assert perplexity_of({"loss": 2.0, other: 4}) is None
    assert perplexity_of({"lr": 0.1}) is None


@pytest.mark.parametrize("counted", ["tokens", "tokens_processed"])
def test_a_step_lasts_until_the_device_has_done_it(counted, monkeypatch):
    """What a device still works on when Python is done is waited for by the transfer alone."""
    to_cpu = torch.Tensor.cpu

    def when_done(values):
        time.sleep(0.2)
        return to_cpu(values)

    monkeypatch.setattr(torch.Tensor, "cpu", when_done)
    metrics = {"loss": 0.1, "tokens": 50, counted: move(torch.tensor(100))}
    record = make_step_record(metrics, begin=time.perf_counter())
    assert 0.2 <= record["seconds"] < 5
    assert record["tokens_per_second"] == 100 / record["seconds"]


def test_noise_and_signal_are_right_on_average_whatever_is_the_part():
    # All batches of four tokens that can be drawn, with as many again, from three gradients.
    gradients = torch.tensor([[1.0, -2.0], [4.0, 0.5], [-3.0, 2.5]], dtype=torch.float64)
    true = gradients.mean(0)
    wanted = float((gradients - true).square().sum(1).mean()), float(true.square().sum())
    drawn = gradients[torch.cartesian_prod(*[torch.arange(3)] * 4)]  # [81, 4, 2]
    whole = drawn.mean(1).square().sum(1)
    for size in (1, 2, 3):
        part = (drawn[:, :size].sum(1) / 4).square().sum(1)  # over the whole's denominator
        found = metrics.estimate_gradient_noise(part, torch.tensor(size), whole, torch.tensor(4))
        assert tuple(float(x.mean()) for x in found) == pytest.approx(wanted, rel=1e-12)


def test_tokens_that_are_trained_are_counted_apart_from_those_that_are_processed():
    batch = tk.batch.batch_from_rows(torch.arange(12).view(2, 6))  # of 12 tokens 10 have a label
    step = tk.StepBatch([batch], tk.Cursor(batch=5))
    trained = tk.count_valid_tokens([batch])
    state = tk.TrainState(step=3, tokens=100)
    moved, recorded = tk.advance(state, step, {"tokens": trained}, axis=solo_parallel().loss)
    assert (moved.step, int(moved.tokens), moved.cursor.batch) == (4, 110, 5)
    assert (int(recorded["tokens_total"]), int(recorded["tokens_processed"])) == (110, 12)


def test_documents_padding_and_the_batch_s_own_counts_are_recorded():
    corpus = make_corpus([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    packed = PackedCorpus(corpus, pack_bins(corpus.lengths, 6), {"web": 1, "code": 1})
    step = tk.make_step_batch(packed, lambda _: [1, 0], tk.Cursor(), rows_per_microbatch=1)
    axis = solo_parallel().loss
    _, recorded = tk.advance(tk.TrainState(), step, {"tokens": torch.tensor(6)}, axis=axis)
    assert (int(recorded["documents"]), int(recorded["tokens_processed"])) == (3, 9)
    assert float(recorded["padding"]) == pytest.approx(3 / 12)
    by_source = {name: x for name, x in recorded.items() if "/" in name}
    assert by_source == {"rows/web": 1, "rows/code": 1, "tokens/web": 6, "tokens/code": 3}
    record = metrics.make_step_record(recorded, begin=time.perf_counter() - 2.0)
    assert record["documents_per_second"] == 3 / record["seconds"]
    assert record["trained_tokens_per_second"] == 6 / record["seconds"]
    assert record["tokens_per_second"] == 9 / record["seconds"]


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        ("none", 0.0),
        ("selective", 0.0),
        ("products", "attention"),
        ("attention", "products"),
        ("attention+products/2", "half"),
        ("full", "both"),
    ],
)
def test_operations_of_recomputation_are_those_of_what_is_not_saved(mode, share):
    config = make_decoder_config("tiny")
    shapes = parameter_shapes(config).items()
    matrices = [shape for name, shape in shapes if name.startswith("layers.") and len(shape) == 2]
    lengths = [100, 156]
    products = 2.0 * sum(map(math.prod, matrices)) * 256
    head = 2.0 * config.vocab_size * config.width * 256
    attention = metrics.decoder_flops(config, lengths) / 3 - products - head
    wanted = {
        "attention": attention,
        "products": products,
        "half": products / 2,
        "both": products + attention,
    }
    found = metrics.recomputed_flops(config, lengths, mode)
    assert found == pytest.approx(wanted.get(share, share))
    assert metrics.recomputed_flops(config, lengths, "0.4") is None
