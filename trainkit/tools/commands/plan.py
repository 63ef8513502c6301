r"""`python -m trainkit plan`: which layouts a model has on some machines, and what each would cost.

Nothing is trained and nothing is started: all figures follow from shapes, by
`trainkit.tools.planning`.

It lists the ways to spread a model over ranks, as degrees of pipeline (pp), data (dp_replicate,
dp_shard), sequence (ring, ulysses), tensor (tp) and expert parallelism (ep, where a model has
experts), with the memory each rank needs, what it sends in a step, and an estimate of the step's
time; and says what does not fit, and why. Experts are taken to be balanced.

The columns: peak is the most that a rank holds at any moment, in GiB. The next are the largest of
each kind, which are not all there at once: parameters, gradients and optimizer state in fp32, what
waits for backward (activ.), the output layer and the loss (logits), FSDP's gathered blocks and
gradients that are not reduced yet (gathered). With --cpu-offload the first three are in the memory
of the host (host), with --offload-optimizer the third, with --offload-activations a part of what
waits for backward, and the peak is that of the device. Memory is counted from what trainkit's
decoder keeps, and within 10 % of what torch measures. Sent is what
one rank sends in a step, in GB. The step's time is an estimate that puts layouts in an order, not a
promise: arithmetic at --efficiency of the peak, communication at the speed of the wires, where the
ring's and FSDP's run beside arithmetic.

Examples:
  python -m trainkit plan --size llama-3.1-8b --world 8 --hardware h100 --row-length 8192

  # a model of your own: a Hugging Face folder, or a run
  python -m trainkit plan --init ./my-model --world 8 --hardware h100 --row-length 8192

  # longer rows: only layouts with tensor parallelism of 2, with everything computed again
  python -m trainkit plan --size llama-3.1-8b --world 16 --row-length 131072 --rows 16 \
      --tp 2 --recompute full

  # between selective and full: attention and every second product are kept, or a fifth of all bytes
  python -m trainkit plan --size llama-3.1-8b --world 8 --row-length 32768 \
      --recompute attention+products/2 0.2

  # FSDP over dp_shard alone, not over the ring; its shards and the optimizer on the host
  python -m trainkit plan --size llama-3.1-8b --world 16 --row-length 65536 --rows 16 \
      --fold-sp none --cpu-offload

  # a mixture of experts, dealt to 8 ranks of each machine
  python -m trainkit plan --size mixtral-8x7b --world 32 --row-length 8192 --ep 8

  # adapters beside matrices of 4 bits: only adapters have gradients and optimizer state
  python -m trainkit plan --size llama-3.1-8b --world 1 --row-length 4096 --method qlora --rank 32

  # your own machines: 4 GPUs of 24 GiB in each node
  python -m trainkit plan --size qwen3-4b --world 8 --hardware a100 --memory 24 --ranks-per-node 4

  # for a script
  python -m trainkit plan --size 10m --world 2 --hardware cpu --row-length 256 --json

FSDP reduces gradients once, after the last microbatch (--reduce last, the recipes' default), and
until then every rank holds them whole; or after each one (--reduce each), which takes less memory
and sends more. Where they differ both are in the table, unless --reduce names one.

A layout from the table goes to a recipe as it stands: --dp-shard 4 --tp 2 --reduce each.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainkit.types import ConfigError, Layout, Precision

if TYPE_CHECKING:
    from trainkit.models.config import DecoderConfig
    from trainkit.tools.planning import Hardware


_DEGREES = tuple(Layout().degrees)
HELP = "list layouts for a model, with memory, communication and time"


def add(plan: argparse.ArgumentParser) -> None:
    """Describe the command's flags to its parser."""
    _add_work(plan.add_argument_group("what is trained"))
    _add_machines(plan.add_argument_group("what it runs on"))
    only = plan.add_argument_group("only layouts with these degrees")
    for name in _DEGREES:
        only.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    shown = plan.add_argument_group("what is printed")
    shown.add_argument("--limit", type=int, default=10, help="lines of a table (10); 0 for all")
    shown.add_argument("--json", action="store_true", help="print all plans as JSON, in bytes")


def _add_work(group: Any) -> None:
    group.add_argument("--size", help="a named model, such as llama-3.1-8b (tiny)")
    group.add_argument(
        "--init", metavar="FOLDER", help="a Hugging Face folder or a run, for its model instead"
    )
    group.add_argument("--vocab-size", type=int, metavar="V", help="another size of vocabulary")
    group.add_argument("--row-length", type=int, default=4096, metavar="S", help="tokens (4096)")
    group.add_argument(
        "--rows", type=int, metavar="B", help="rows of a step, over all ranks (4 for each rank)"
    )
    group.add_argument(
        "--microbatch", type=int, default=1, metavar="N", help="rows at a time on a rank (1)"
    )
    group.add_argument(
        "--documents", type=int, default=1, metavar="N", help="documents of a row (1)"
    )
    group.add_argument(
        "--recompute",
        nargs="+",
        default=["none", "selective", "full"],
        metavar="MODE",
        help="none, selective, full (all three); what is kept; or how much of it: 0.4",
    )
    group.add_argument(
        "--offload-activations", type=int, metavar="BYTES", help="that stay on the device"
    )
    few, help_of = ("fp32", "bf16"), {"storage": "what parameters are kept in (fp32)"}
    help_of["reduction"] = "what FSDP sums gradients in (fp32)"
    for name, text in help_of.items():
        group.add_argument(f"--{name}", choices=few, default="fp32", help=text)
    more = (*few, "fp16")
    group.add_argument("--compute", choices=more, help="what is computed in (bf16; fp32 on cpu)")
    kinds = (*few, "8bit")
    group.add_argument(
        "--moments", choices=kinds, default="fp32", help="what the optimizer remembers in (fp32)"
    )
    _add_training(group)
    group.add_argument("--schedule", default="1f1b", help="of a pipeline (1f1b)")
    group.add_argument(
        "--reduce",
        nargs="+",
        choices=("last", "each"),
        default=["last", "each"],
        help="after which microbatch FSDP reduces gradients (both)",
    )
    group.add_argument(
        "--fold-sp",
        choices=("all", "ring", "ulysses", "none"),
        default="all",
        help="which of ring and Ulysses FSDP shards over, besides dp_shard (all)",
    )
    group.add_argument(
        "--cpu-offload",
        action="store_true",
        help="parameters, gradients and optimizer state in host memory",
    )
    group.add_argument(
        "--reshard-over", type=int, default=0, metavar="N", help="ranks that keep a block (0)"
    )
    group.add_argument(
        "--prefetch", type=int, default=0, metavar="N", help="blocks gathered ahead (0: FSDP's way)"
    )
    group.add_argument(
        "--ends-apart", action="store_true", help="embedding and head gathered when needed"
    )


def _part(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def _add_training(group: Any) -> None:
    group.add_argument("--optimizer", default="adamw", metavar="NAME", help="what steps (adamw)")
    group.add_argument(
        "--optimizer-options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="of the optimizer",
    )
    group.add_argument("--mean", type=_part, metavar="X", help="a mean of the weights is kept")
    group.add_argument("--offload-optimizer", action="store_true", help="its state in host memory")
    group.add_argument(
        "--loss", choices=("linear", "plain"), default="linear", help="logits by chunks, or whole"
    )
    group.add_argument(
        "--method",
        choices=("full", "lora", "qlora"),
        default="full",
        help="train all, or adapters beside frozen matrices, these in 4 bits (full)",
    )
    group.add_argument("--rank", type=int, default=16, help="of the adapters (16)")


def _add_machines(group: Any) -> None:
    group.add_argument("--world", type=int, default=1, metavar="N", help="ranks (1)")
    group.add_argument("--hardware", default="h100", help="a100, h100, h200, b200 or cpu (h100)")
    group.add_argument("--memory", type=float, metavar="GIB", help="of a rank, instead of its own")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="instead of its own")
    group.add_argument(
        "--efficiency", type=float, default=0.5, help="part of the peak that is reached (0.5)"
    )
    group.add_argument(
        "--headroom", type=float, default=0.1, help="part of memory that is kept free (0.1)"
    )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Return what to print, a table or records for JSON, and the exit code."""
    # Imported here: they import torch.
    import attrs  # noqa: PLC0415

    from trainkit.optim import parse_options  # noqa: PLC0415
    from trainkit.tools.planning import Job, format_estimates, rank_layouts  # noqa: PLC0415

    config = _config(options)
    layouts, machine = _layouts(options, config), _hardware(options)
    job = Job(
        config=config,
        row_length=options.row_length,
        rows=options.rows or 4 * options.world,
        microbatch=options.microbatch,
        precision=Precision(
            storage=options.storage,
            compute=options.compute or ("fp32" if machine.name == "cpu" else "bf16"),
            reduction=options.reduction,
            moments=options.moments,
        ),
        optimizer=options.optimizer,
        optimizer_options=parse_options(options.optimizer_options, optimizer=options.optimizer),
        mean=options.mean is not None,
        offload_optimizer=options.offload_optimizer,
        offload_activations=options.offload_activations,
        loss=options.loss,
        documents=options.documents,
        begins=_begins(options),
    )
    plans = rank_layouts(
        job,
        layouts,
        machine,
        recompute=options.recompute,
        reduce=options.reduce,
        efficiency=options.efficiency,
        headroom=options.headroom,
    )
    if options.json:
        return [
            attrs.asdict(one) | {"compute": job.precision.compute, "fits": one.fits}
            for one in plans
        ], 0
    return (
        f"{_heading(options, config)}\n\n{format_estimates(plans, limit=options.limit or None)}",
        0,
    )


def _config(options: argparse.Namespace) -> DecoderConfig:
    """Return the model of --size, or that of the folder or run that --init names."""
    import attrs  # noqa: PLC0415 -- see run

    from trainkit.models.decoder_sizes import make_decoder_config  # noqa: PLC0415 -- see run
    from trainkit.weights.hub import read_model_info  # noqa: PLC0415 -- see run

    if options.init is not None and options.size is not None:
        raise ConfigError(
            f"plan: --size {options.size} and --init {options.init} both name a model; give one",
            where="init",
        )
    words = {} if options.vocab_size is None else {"vocab_size": options.vocab_size}
    if options.init is None:
        return make_decoder_config(options.size or "tiny", **words)
    return attrs.evolve(read_model_info(options.init, context=options.row_length), **words)


def _begins(options: argparse.Namespace) -> list[Any]:
    """Return what the plan of a method begins with: adapters of all of a block's matrices."""
    if options.method == "full":
        return []
    from trainkit.post.adapters import Lora, lora, quantized  # noqa: PLC0415 -- see run

    pattern = r"layers\.\d+\.(attention|mlp|mlp\.experts)\.(w\w+|gate|up|down)"
    held = [quantized("nf4")] if options.method == "qlora" else []
    return [*held, lora(Lora(pattern, rank=options.rank))]


def _heading(options: argparse.Namespace, config: DecoderConfig) -> str:
    """Return one line that says what was planned: the model, the machines, the rows."""
    # see run
    from trainkit.models.config import count_active_parameters, count_parameters  # noqa: PLC0415

    machine, rows = _hardware(options), options.rows or 4 * options.world
    every, active = count_parameters(config), count_active_parameters(config)
    met = f" ({active / 1e6:,.1f} for a token)" if active < every else ""
    return (
        f"{options.init or options.size or 'tiny'}, {every / 1e6:,.1f} million parameters{met}, on "
        f"{options.world} x {machine.name} with {machine.memory / 2**30:g} GiB, of which "
        f"{options.headroom:.0%} stay free; steps of {rows} rows of {options.row_length:,} tokens"
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    import attrs  # noqa: PLC0415 -- see run

    from trainkit.tools.planning import get_hardware  # noqa: PLC0415 -- see run

    own = {
        "memory": None if options.memory is None else round(options.memory * 2**30),
        "ranks_per_node": options.ranks_per_node,
    }
    given = {name: figure for name, figure in own.items() if figure is not None}
    return attrs.evolve(get_hardware(options.hardware), **given)


def _layouts(options: argparse.Namespace, config: DecoderConfig) -> list[Layout]:
    """Return the layouts of the world that have the degrees asked for."""
    from trainkit.tools.planning import list_layouts  # noqa: PLC0415 -- see run

    asked = {name: getattr(options, name) for name in _DEGREES}
    fixed = {name: degree for name, degree in asked.items() if degree is not None}
    names = ("fold_sp", "schedule", "cpu_offload")
    names += ("reshard_over", "prefetch", "ends_apart")
    experts = 1 if config.experts is None else config.experts.count
    like = Layout(**{name: getattr(options, name) for name in names})
    found = [
        layout
        for layout in list_layouts(options.world, like=like, experts=experts)
        if all(getattr(layout, name) == degree for name, degree in fixed.items())
    ]
    if options.world < 1:
        raise ConfigError(
            f"plan: --world must be at least 1, got {options.world}",
            where="world",
            got=options.world,
        )
    if not found:
        text = " x ".join(f"{name} {degree}" for name, degree in fixed.items())
        raise ConfigError(
            f"plan: no layout of {options.world} ranks has {text}, which must divide "
            f"{options.world}; change a degree or --world",
            where="world",
            got=options.world,
        )
    return found
