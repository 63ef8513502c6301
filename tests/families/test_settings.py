"""Numbers that nobody can mean are refused: NaN, infinity, -1 and 0 for each numeric setting.

The functions are found in the rooms' tables of contents. Each has a valid call in `CALLS`, and each
of its numeric parameters must refuse the bad values by name, but for those in `ALLOWED`, with the
reason beside them.
"""

import contextlib
import importlib
import inspect
import math
import re
from types import FunctionType

import pytest
import torch
from torch import nn

from trainkit.batch import make_padding_batch
from trainkit.losses import make_score_loss, next_token
from trainkit.mesh import solo_parallel
from trainkit.models import DecoderConfig, Experts, init_weights, softmax_topk
from trainkit.models.experts import balance_loss_sum, update_expert_bias
from trainkit.models.routers import add_jitter, apply_capacity, expert_capacity
from trainkit.noise import make_token_keys
from trainkit.optim.elementwise import ElementwiseOptimizer
from trainkit.parallel import offload_activations
from trainkit.post.adapters import quantized
from trainkit.post.generation import Sampling
from trainkit.post.objectives import k3
from trainkit.types import Hidden
from trainkit.weights.checkpoint.retention import Retention

NOT_LISTED = (
    balance_loss_sum,
    update_expert_bias,
    add_jitter,
    apply_capacity,
    expert_capacity,
)
"""Functions of `models` that are not in its table of contents, but are tried too."""

ROOMS = ("losses", "optim", "post.adapters", "post.objectives", "models", "schedules")
BAD = (math.nan, math.inf, -1, 0)
FINITE = {-1, 0}

SKIPPED_PARAMETERS = {
    "seed": "any integer names a stream of random numbers",
    "step": "a counter of the run, as the seed",
}
"""Parameters of these names are not tried, and why."""

SKIPPED = {
    "models.KVCache": "a record of slots, made by generation",
    "models.ExpertMlp": "a module of a decoder, whose Experts are tried",
    "models.Router": "a module of a decoder, whose Experts are tried",
    "models.make_norm": "a module of a decoder, whose DecoderConfig is tried",
    "schedules.Interval": "a record; parse_interval makes it, and options check it",
    "schedules.Counters": "a record of a run's counters",
    "schedules.parse_interval": "its number is the interval, any whole number of steps",
    "losses.make_vocabulary_axis": "its number is a dimension of the tensor",
}
"""Functions that are not tried, and why."""

ALLOWED = {
    ("objectives.PolicyOptions", "kl_weight"): ({0}, "0 only reports the divergence"),
    ("objectives.PolicyOptions", "most_importance"): ({math.inf}, "infinite, it truncates nothing"),
    ("objectives.importance_weights", "most"): ({math.inf}, "infinite, it truncates nothing"),
    ("objectives.ppo_clip", "low"): ({0}, "no ratio below 1 gains"),
    ("objectives.ppo_clip", "high"): ({0}, "no ratio above 1 gains"),
    ("objectives.cispo", "low"): ({0}, "no weight below 1"),
    ("objectives.cispo", "high"): ({0}, "no weight above 1"),
    ("objectives.policy_gradient", "entropy_weight"): (
        FINITE,
        "below 0 entropy is added to the loss",
    ),
    ("losses.add_router_losses", "balance"): ({0}, "0 only reports it"),
    ("losses.add_router_losses", "router_z"): ({0}, "0 only reports it"),
    ("objectives.dpo", "label_smoothing"): ({0}, "off"),
    ("objectives.simpo", "gamma"): ({0}, "no margin"),
    ("objectives.orpo", "weight"): ({0}, "the chosen answer's loss alone"),
    ("objectives.kto", "desirable_weight"): ({0}, "good answers do not count"),
    ("objectives.kto", "undesirable_weight"): ({0}, "bad answers do not count"),
    ("objectives.distillation", "beta"): ({0}, "the forward divergence"),
    ("objectives.stored_distillation", "beta"): ({0}, "the forward divergence"),
    ("objectives.gae", "discount"): ({0}, "nothing is expected of later steps"),
    ("objectives.gae", "trace"): ({0}, "one step ahead"),
    ("objectives.group_advantages", "eps"): ({0}, "the deviation as it is"),
    ("losses.token_logprobs", "min_p"): ({0}, "off"),
    ("optim.Muon", "parts_dim"): ({-1}, "columns"),
    ("schedules.is_due", "last"): ({*BAD}, "a step of the run, or one that never comes"),
    ("optim.make_optimizer", "mean"): ({0}, "the newest parameters alone"),
    ("optim.combine_optimizers", "mean"): ({0}, "the newest parameters alone"),
    ("adapters.Lora", "dropout"): ({0}, "off"),
    ("adapters.add_quantization_noise", "weights"): ({0}, "off"),
    ("adapters.add_quantization_noise", "norms"): ({0}, "off"),
    ("models.Experts", "capacity"): ({0}, "drops nothing"),
    ("models.Experts", "jitter"): ({0}, "off"),
    ("models.Experts", "hash_layers"): ({0}, "none"),
    ("models.Experts", "load_limit"): ({0}, "scales nothing"),
    ("models.Experts", "shared"): ({0}, "none"),
    ("models.Experts", "first"): ({0}, "the first layer"),
    ("models.Sliding", "first"): ({0}, "the first layer"),
    ("models.Sliding", "full_every"): ({0}, "none"),
    ("models.DecoderConfig", "dropout"): ({0}, "off"),
    ("models.YarnScaling", "mscale"): ({0}, "scores are not sharpened"),
    ("models.add_jitter", "amount"): ({0}, "off"),
    ("models.upcycle_weights", "noise"): ({0}, "copies are equal"),
    ("models.update_routers_", "rate"): ({0}, "biases stay"),
    ("models.update_expert_bias", "rate"): ({0}, "biases stay"),
}
"""Which bad values a parameter takes after all, and what they mean."""

ZERO = {
    "optim": {
        "lr": "nothing moves",
        "weight_decay": "off",
        "eps": "the root of the moment as it is",
        "momentum": "none",
        "betas[0]": "no momentum; but ScheduleFree's z follows from it",
        "betas[1]": "the newest gradient alone",
    },
    "schedules": {
        "lr": "nothing moves",
        "warmup": "none; but inverse_sqrt's rate follows from it",
        "warmup_from": "from 0",
        "final": "down to 0",
        "decay": "none",
        "stable": "nothing on the plateau",
        "every": "never",
    },
}
"""Settings that may be 0 wherever a room has them, and what that means."""

NOT_ZERO = {("optim.ScheduleFree", "betas[0]"), ("schedules.inverse_sqrt", "warmup")}
"""But these may not."""


def hidden():
    return {"hidden": torch.ones(2, 3), "weight": torch.ones(4, 3), "labels": torch.tensor([0, 1])}


def rewards():
    return {"rewards": torch.ones(2), "groups": torch.tensor([0, 0]), "num_groups": 1}


def weight():
    return nn.Parameter(torch.ones(2, 2))


def dense():
    return DecoderConfig(vocab_size=16, width=8, layers=1, heads=2, kv_heads=2, mlp_width=8)


def sparse():
    return DecoderConfig(
        vocab_size=16,
        width=8,
        layers=1,
        heads=2,
        kv_heads=2,
        mlp_width=8,
        experts=Experts(count=2, top_k=1, width=8, renormalize=False),
    )


def in_int8():
    model = nn.ModuleDict({"linear": nn.Linear(2, 2)})
    model["layers"] = nn.ModuleList([nn.ModuleDict({"mlp_norm": nn.LayerNorm(2)})])
    return quantized("int8", modules="linear")(model.requires_grad_(False), solo_parallel())


CALLS = {
    "objectives.PolicyOptions": lambda: {"kl": k3, "kl_weight": 0.1, "most_importance": 2.0},
    "objectives.cispo": dict,
    "objectives.ppo_clip": dict,
    "objectives.distillation": lambda: {"teacher": Hidden(torch.empty(0), torch.ones(4, 3))},
    "objectives.dpo": dict,
    "objectives.gae": lambda: {
        "rewards": torch.ones(1, 2),
        "values": torch.ones(1, 2),
        "document_ids": torch.zeros(1, 2, dtype=torch.int64),
    },
    "objectives.group_advantages": rewards,
    "objectives.importance_weights": lambda: {
        "old": torch.zeros(1),
        "sampler": torch.zeros(1),
        "most": 2.0,
    },
    "losses.chunk_loss": lambda: {"loss": next_token},
    "objectives.ipo": dict,
    "objectives.kto": dict,
    "objectives.leave_one_out": rewards,
    "losses.linear_cross_entropy": hidden,
    "objectives.orpo": dict,
    "objectives.policy_gradient": lambda: {"surrogate": lambda *args: args},
    "losses.add_router_losses": lambda: {"loss": next_token},
    "objectives.simpo": dict,
    "objectives.stored_distillation": dict,
    "losses.token_logprobs": hidden,
    "schedules.constant": lambda: {"lr": 0.1, "warmup": 2, "warmup_from": 0.5},
    "schedules.cosine": lambda: {"lr": 0.1, "warmup": 2, "total": 8},
    "schedules.cosine_restarts": lambda: {"lr": 0.1, "warmup": 2, "total": 8},
    "schedules.is_due": lambda: {"step": 3, "every": 2},
    "schedules.infinite": lambda: {
        "lr": 0.1,
        "warmup": 2,
        "cooldown": 2,
        "stable": 0.5,
        "anneal_from": 6,
        "anneal": 2,
    },
    "schedules.inverse_sqrt": lambda: {"lr": 0.1, "warmup": 2},
    "schedules.linear": lambda: {"lr": 0.1, "warmup": 2, "total": 8},
    "schedules.piecewise": lambda: {"lr": 0.1, "points": [(0, 1.0)]},
    "schedules.power": lambda: {"lr": 0.1, "warmup": 2, "total": 8},
    "schedules.rex": lambda: {"lr": 0.1, "warmup": 2, "total": 8},
    "schedules.warmup_stable_decay": lambda: {"lr": 0.1, "warmup": 2, "total": 8},
    "optim.Muon": lambda: {"params": [weight()], "lr": 0.1},
    "optim.adamw": lambda: {"params": [weight()], "lr": 0.1},
    "optim.decay_groups": lambda: {"named_parameters": {"weight": weight()}, "weight_decay": 0.1},
    "optim.make_optimizer": lambda: {"stages_or_model": nn.Linear(2, 2), "lr": 0.1},
    "optim.orthogonalize": lambda: {"matrices": torch.eye(2)},
    "optim.combine_optimizers": lambda: {"parts": [torch.optim.SGD([weight()], lr=0.1)]},
    "adapters.Lora": lambda: {"modules": "**"},
    "adapters.add_quantization_noise": lambda: {"stages": [in_int8()], "seed": 0, "step": 1},
    "models.DecoderConfig": lambda: {
        "vocab_size": 16,
        "width": 8,
        "layers": 1,
        "heads": 2,
        "kv_heads": 2,
        "mlp_width": 8,
    },
    "models.Delta": lambda: {"key_heads": 2, "value_heads": 4, "key_size": 8, "value_size": 8},
    "models.Experts": lambda: {"count": 4, "top_k": 2, "width": 8, "scores": "sigmoid"},
    "models.Latents": lambda: {"kv_rank": 4, "plain": 2, "rotary": 2, "values": 2},
    "models.FullHeads": lambda: {"size": 8, "kv_heads": 2},
    "models.LinearScaling": lambda: {"factor": 2.0},
    "models.Llama3Scaling": lambda: {"factor": 2.0},
    "models.LongRopeScaling": lambda: {
        "short": (1.0,),
        "long": (2.0,),
        "original_length": 8,
        "context": 16,
    },
    "models.ProportionalScaling": lambda: {"part": 0.5},
    "models.Sliding": lambda: {"window": 4},
    "models.YarnScaling": lambda: {"factor": 2.0, "original_length": 8},
    "models.update_routers_": lambda: {
        "stages": [],
        "counts": torch.ones(1, 2, dtype=torch.int64),
        "rate": 0.1,
    },
    "models.balance_loss_sum": lambda: {
        "routing": softmax_topk(torch.zeros(3, 4), 1),
        "load": torch.full((4,), 0.25),
        "experts": 4,
    },
    "models.expert_capacity": lambda: {"counts": torch.ones(2, dtype=torch.int64), "factor": 1.25},
    "models.add_jitter": lambda: {
        "x": torch.ones(2, 3),
        "noise_key": make_token_keys(torch.arange(2), seed=0, step=1),
        "name": "layers.0.mlp",
        "amount": 0.1,
    },
    "models.apply_capacity": lambda: {"routing": softmax_topk(torch.zeros(3, 4), 1), "capacity": 1},
    "models.make_decoder_config": lambda: {"name": "tiny", "num_ids": 9},
    "models.pad_vocab_size": lambda: {"size": 9},
    "models.biased_topk": lambda: {"logits": torch.zeros(3, 4), "top_k": 2},
    "models.hash_experts": lambda: {
        "token_ids": torch.arange(3),
        "experts": 4,
        "top_k": 2,
        "name": "layers.0.mlp",
    },
    "models.scale_by_load": lambda: {
        "routing": softmax_topk(torch.zeros(3, 4), 1),
        "load": torch.full((4,), 0.25),
        "factor": 1.0,
    },
    "models.softmax_topk": lambda: {"logits": torch.zeros(3, 4), "top_k": 2},
    "models.upcycle_weights": lambda: {
        "weights": init_weights(dense(), seed=0),
        "config": sparse(),
        "seed": 0,
    },
    "models.update_expert_bias": lambda: {
        "bias": torch.zeros(2),
        "counts": torch.ones(2, dtype=torch.int64),
        "rate": 0.1,
    },
}
for optimizer in ("Lion", "Momentum", "LowPrecisionAdamW", "ScheduleFree", "SignSGD"):
    CALLS[f"optim.{optimizer}"] = lambda: {"params": [weight()], "lr": 0.1}


def is_number(annotation):
    """Say whether a parameter takes a plain number, whatever else it takes."""
    text = str(annotation)
    parts = re.split(r"\s*\|\s*", re.sub(r"^<class '(.*)'>$|^ForwardRef\('(.*)'\)$", r"\1\2", text))
    return bool({"int", "float", "Each"} & {*parts})  # Each is float | Tensor


def settings_of(function):
    """Return the names of a function's numeric parameters, and of an optimizer's own options."""
    parameters = [*inspect.signature(function).parameters.values()]
    if hasattr(function, "rule"):
        parameters = [*inspect.signature(ElementwiseOptimizer).parameters.values()]
    names = [x.name for x in parameters if is_number(x.annotation)]
    names += ["betas[0]", "betas[1]"] if any(x.name == "betas" for x in parameters) else []
    for name, default in getattr(function, "options", {}).items():
        names += [name] if isinstance(default, float) else [f"{name}[0]", f"{name}[1]"]
    return [name for name in names if name not in SKIPPED_PARAMETERS]


def public_settings():
    """Yield every public function of the rooms that has numeric parameters, with their names."""
    for room in ROOMS:
        module = importlib.import_module(f"trainkit.{room}")
        own = [name for name, x in vars(module).items() if isinstance(x, FunctionType)]
        for name in getattr(module, "__all__", [x for x in own if not x.startswith("_")]):
            function = getattr(module, name)
            is_one = inspect.isroutine(function) or inspect.isclass(function)
            if is_one and (found := settings_of(function)):
                yield f"{module.__name__.rpartition('.')[-1]}.{name}", function, found
    for function in NOT_LISTED:
        yield f"models.{function.__name__}", function, settings_of(function)


FUNCTIONS = {name: (function, found) for name, function, found in public_settings()}


def call(name, changes=()):
    """Call a function as in `CALLS`, with other values for some parameters."""
    function, _ = FUNCTIONS[name]
    arguments = CALLS[name]()
    for parameter, value in changes:
        if parameter.endswith("]"):
            betas = [0.9, 0.95]
            betas[int(parameter[-2])] = float(value)
            arguments["betas"] = tuple(betas)
        else:
            arguments[parameter] = value
    made = function(**arguments)
    if isinstance(made, contextlib.AbstractContextManager):
        with made:
            pass
    return made


def test_every_function_with_numbers_has_a_call_or_a_reason_why_it_has_none():
    known = {*CALLS, *SKIPPED}
    assert {*FUNCTIONS} == known
    tried = {(name, setting) for name, (_, found) in FUNCTIONS.items() for setting in found}
    assert {*ALLOWED} <= tried


CASES = [
    (name, setting) for name, (_, found) in FUNCTIONS.items() for setting in found if name in CALLS
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_number_that_nobody_can_mean_is_refused_by_name(name, setting):
    call(name)
    allowed, _ = ALLOWED.get((name, setting), (set(), None))
    if setting in ZERO.get(name.split(".")[0], {}) and (name, setting) not in NOT_ZERO:
        allowed = {0}
    for value in BAD:
        if value in allowed:
            call(name, [(setting, value)])
        else:
            with pytest.raises(ValueError, match=re.escape(setting)):
                call(name, [(setting, value)])


@pytest.mark.parametrize("name", ["adamw", "Lion", "Momentum", "Muon", "LowPrecisionAdamW"])
@pytest.mark.parametrize("setting", ["lr", "weight_decay", "eps", "momentum"])
def test_a_group_of_an_optimizer_is_held_to_the_same_ranges(name, setting):
    function, found = FUNCTIONS[f"optim.{name}"]
    for value in (math.nan, -1.0) if setting in found else ():
        groups = [{"params": [weight()]}, {"params": [weight()], setting: value}]
        with pytest.raises(ValueError, match=setting):
            function(groups, lr=0.1)


def test_a_weight_of_a_term_is_finite():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="make_score_loss: nll must be finite"):
            make_score_loss({"nll": (lambda scores, _: scores.losses, value)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda bad: Sampling(repetition_penalty=bad), "repetition_penalty must be above 0"),
        (lambda bad: Retention(every=bad), "every must be at least 0"),
        (lambda bad: Retention(best=bad), "best must be at least 0"),
        (lambda bad: offload_activations(budget=bad), "budget is in bytes, at least 0"),
        (lambda bad: make_padding_batch(1, 4, multiple_of=bad), "multiple_of must be .*at least 1"),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1])
def test_other_rooms_refuse_such_numbers_too(make, message, bad):
    with pytest.raises(ValueError, match=message):
        make(bad)
