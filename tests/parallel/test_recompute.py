"""What recomputation keeps by operation and by cost; what all modes share is in test_stages."""

import gc
from collections import Counter

import attrs
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainkit as tk
from tests.measured_step import StorageCount
from trainkit.models import Decoder, DecoderConfig, Sliding, init_weights
from trainkit.models.config import Norms
from trainkit.parallel import compile_blocks, recompute
from trainkit.parallel.recompute import groups_of, read_mode
from trainkit.parallel.recompute_budget import Result, choose, choose_fitting
from trainkit.types import ConfigError

CONFIG = DecoderConfig(vocab_size=32, width=32, layers=2, heads=4, kv_heads=4, mlp_width=64)
TOKENS = 2 * 48
aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def built(mode, config=CONFIG):
    (model,) = tk.build_stages(
        lambda: Decoder(config),
        tk.solo_parallel(),
        [recompute(mode, preserve_rng_state=False)],
        weights=init_weights(config, seed=0),
    )
    return model


def blocks_of(model):
    """Return the blocks' output for a batch, a function of hidden states."""
    batch = tk.batch.make_padding_batch(2, TOKENS // 2)

    def run(x):
        table = model._make_rotary(batch.position_ids, dtype=x.dtype)
        for block in model.layers.values():
            x = block(x, rotary=table, spans=batch.spans)
        return x

    return run


def hidden():
    return torch.randn(2, TOKENS // 2, 32, generator=torch.Generator().manual_seed(0))


class Calls(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def step(mode, config=CONFIG):
    """Return the second step's gradients, and how often products and attention ran in it."""
    model = built(mode, config)
    run = blocks_of(model)
    for _ in range(2):
        model.zero_grad()
        x = hidden().requires_grad_()
        with Calls() as calls:
            run(x).square().sum().backward()
    gradients = [x.grad, *(p.grad for p in model.layers.parameters())]
    return gradients, calls.seen[aten.mm.default], calls.seen[ATTENTION]


# Of a block's 7 products forward runs 7 and backward 14; what is not kept runs once more, but for
# the last, for whose result nobody asks.
AGAIN = {
    "none": (0, 0),
    "full": (6, 1),
    "selective": (0, 0),
    "attention": (6, 0),
    "products": (0, 1),
    "attention+products/2": (3, 0),
    "products/3": (4, 1),
    "0.99": (0, 0),
}


@pytest.mark.parametrize("mode", [*AGAIN, "0.3", "0.45", "0.01"])
def test_gradients_are_the_same_bit_for_bit_and_what_is_kept_runs_once(mode):
    want, gradients = step("none")[0], step(mode)
    assert all(map(torch.equal, gradients[0], want))
    if mode in AGAIN:
        again = gradients[1] / CONFIG.layers - 21, gradients[2] / CONFIG.layers - 1
        assert again == AGAIN[mode]


def test_of_every_so_many_results_the_first_is_kept():
    for mode, numbers in (("products/2", [0, 2, 4, 6]), ("products/3", [0, 3, 6])):
        keeps = read_mode(mode)
        assert [number for number in range(7) if keeps("products", number)] == numbers
        assert not keeps("attention", 0)


class Uneven(nn.Module):
    """A product of 64 numbers for each token, and one of 4."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x):
        return self.down(self.up(x).square()).square()


def test_the_second_of_two_results_is_computed_again_and_the_first_is_not():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": Uneven()})})
    recompute("products/2")(model, tk.solo_parallel())
    shapes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is aten.mm.default:
                shapes.append(tuple(out.shape))
            return out

    y = model["layers"]["0"](torch.ones(8, 4, requires_grad=True))
    with Products():
        y.sum().backward()
    assert shapes.count((8, 64)) == 1  # the gradient of up's result, and not up again
    assert shapes.count((8, 4)) == 2  # down again, and the gradient of the input


def test_of_two_results_as_dear_as_each_other_the_first_is_kept():
    results = [Result("products", number, inner=4, size=8) for number in range(2)]
    for order in (results, results[::-1]):
        keeps = choose_fitting(order, room=8)
        assert [keeps("products", number) for number in range(2)] == [True, False]


def test_attention_in_a_window_is_kept_as_well():
    config = attrs.evolve(CONFIG, sliding=Sliding(window=20))
    (want, _, once), (found, _, twice) = (step(mode, config) for mode in ("none", "attention"))
    assert all(map(torch.equal, found, want))
    assert twice == once > CONFIG.layers  # a call for the first queries, and one for the others


def saved_bytes(mode, config=CONFIG):
    """Return the bytes that the blocks hold for backward after the second forward pass."""
    model = built(mode, config)
    run = blocks_of(model)
    run(hidden().requires_grad_())
    x = hidden().requires_grad_()
    counter = StorageCount()
    for known in model.parameters():
        counter.see(known.detach())
    before = counter.now
    with counter:
        output = run(x)
    gc.collect()
    held = counter.now - before - output.nbytes
    del output
    return held


def test_what_is_kept_by_cost_fits_and_more_would_not():
    whole, least, most = saved_bytes("none"), saved_bytes("full"), saved_bytes("selective")
    largest = TOKENS * CONFIG.mlp_width * 4 * CONFIG.layers
    for budget in ("0.25", "0.5", "0.7"):
        room = float(budget) * whole
        held = saved_bytes(budget)
        assert held <= room
        assert held > min(room, most) - largest, budget
    assert saved_bytes("0.01") == least
    assert saved_bytes("0.99") == most < 0.6 * whole


def test_selective_keeps_no_result_that_a_sum_alone_takes():
    """Nor does it compute it again; a norm behind the MLP asks for it."""
    result = TOKENS * CONFIG.width * 4 * CONFIG.layers
    modes = {mode: saved_bytes(mode) for mode in ("selective", "attention+exchanges+products")}
    assert len({*modes.values()}) == 1
    normed = attrs.evolve(CONFIG, norms=Norms(place="around"))
    assert saved_bytes("selective", normed) >= saved_bytes("selective") + result


class Wide(nn.Module):
    """A product of inner width 4, and one of inner width 64, for whose results a square asks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 64, bias=False), nn.Linear(64, 4, bias=False)

    def forward(self, x):
        return self.down(self.up(x).square()).square()


# In numbers for each row: the input 4, up and its square 64 each, down 4.
@pytest.mark.parametrize(
    ("budget", "expected"), [(0.05, []), (0.5, [1]), (0.52, [1]), (0.6, [0, 1])]
)
def test_the_most_expensive_for_its_bytes_is_saved_first(budget, expected):
    x, groups = torch.ones(8, 4, requires_grad=True), groups_of(torch.device("cpu"))
    keeps = choose(Wide.forward, Wide(), ([x], {}), groups=groups, budget=budget)
    assert [number for number in range(3) if keeps("products", number)] == expected


def test_by_cost_nothing_is_kept_for_which_nobody_asks():
    """The result of the last product, though it is the dearest."""
    block = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Linear(64, 4, bias=False))
    x, groups = torch.ones(8, 4, requires_grad=True), groups_of(torch.device("cpu"))
    keeps = choose(nn.Sequential.forward, block, ([x], {}), groups=groups, budget=0.5)
    assert not keeps("products", 1)


def test_choosing_leaves_generators_as_they_are():
    drawn = {}
    for mode in ("none", "0.5"):
        model = nn.ModuleDict({"layers": nn.Sequential(nn.Sequential(Wide(), nn.Dropout()))})
        recompute(mode)(model, tk.solo_parallel())
        torch.manual_seed(0)
        nn.init.normal_(model["layers"][0][0].up.weight)
        nn.init.normal_(model["layers"][0][0].down.weight)
        drawn[mode] = model["layers"](torch.ones(8, 4, requires_grad=True))
    assert torch.equal(*drawn.values())


@pytest.mark.parametrize(
    "mode", ["some", "", "0", "0.0", "1.5", ".5", "attention/2", "products/0", "full+products", "1"]
)
def test_what_is_no_mode_is_refused(mode):
    with pytest.raises(ConfigError, match="recompute must be"):
        read_mode(mode)
    with pytest.raises(ConfigError, match="recompute must be"):
        tk.config.load_config(tk.config.RunConfig, ["--recompute", mode])


def test_a_recipe_takes_every_mode():
    for mode in ("none", "attention+products/2", "0.4"):
        cfg = tk.config.load_config(tk.config.RunConfig, ["--recompute", mode])
        assert cfg.recompute == mode


def test_compiled_blocks_cannot_choose_by_cost():
    with pytest.raises(ConfigError, match=r"compile_blocks: recompute\('0.4'\) chooses by cost"):
        compile_blocks()(built("0.4"), tk.solo_parallel())


@pytest.mark.only_all
@pytest.mark.parametrize("mode", ["selective", "attention+products/2"])
def test_compiled_blocks_keep_by_name(mode):
    model = built(mode)
    compile_blocks(backend="aot_eager")(model, tk.solo_parallel())
    x = hidden().requires_grad_()
    blocks_of(model)(x).square().sum().backward()
    want = step("none")[0]
    torch.testing.assert_close([x.grad, *(p.grad for p in model.layers.parameters())], want)
