r"""`python -m trainkit plan`: list the layouts of a model on a cluster, with memory and step time.

Nothing is trained and no process is started: all figures follow from shapes, by
`trainkit.tools.planning`.

A layout is a choice of the degrees of pipeline (pp), data (dp_replicate, dp_shard), sequence (ring,
ulysses), tensor (tp) and, for a model with experts, expert parallelism (ep). For each the command
estimates the memory of a rank, the bytes it sends per step and the step time, and gives the reason
where a layout does not fit. Experts are assumed to be balanced.

The columns: peak is the peak memory of a rank, in GiB. The next are the maxima of its parts, which
do not all coincide: parameters, gradients and optimizer state in fp32, activations saved for
backward (activ.), the output layer and the loss (logits), FSDP's gathered blocks and unreduced
gradients (gathered). Host memory (host) holds the first three with --cpu-offload, the third with
--offload-optimizer, and some activations with --offload-activations; the peak is always that of the
device. Memory is counted from the tensors of trainkit's decoder, within 10 % of what torch
measures. Sent is what one rank sends per step, in GB. The step time ranks layouts and is no
promise: it takes computation at --efficiency of the peak and communication at link speed, with
ring attention and FSDP overlapping computation.

Examples:
  python -m trainkit plan --size llama-3.1-8b --world 8 --hardware h100 --row-length 8192

  # a model of your own: a Hugging Face folder, or a run
  python -m trainkit plan --init ./my-model --world 8 --hardware h100 --row-length 8192

  # longer rows: only layouts with tensor parallelism of 2, with full recomputation
  python -m trainkit plan --size llama-3.1-8b --world 16 --row-length 131072 --rows 16 \
      --tp 2 --recompute full

  # between selective and full: save attention and every second matmul, or a fifth of all bytes
  python -m trainkit plan --size llama-3.1-8b --world 8 --row-length 32768 \
      --recompute attention+products/2 0.2

  # FSDP over dp_shard alone, not over the ring; its shards and the optimizer on the host
  python -m trainkit plan --size llama-3.1-8b --world 16 --row-length 65536 --rows 16 \
      --fold-sp none --cpu-offload

  # a mixture of experts, sharded over the 8 ranks of each machine
  python -m trainkit plan --size mixtral-8x7b --world 32 --row-length 8192 --ep 8

  # adapters on 4-bit matrices: only adapters have gradients and optimizer state
  python -m trainkit plan --size llama-3.1-8b --world 1 --row-length 4096 --method qlora --rank 32

  # your own machines: 4 GPUs of 24 GiB in each node
  python -m trainkit plan --size qwen3-4b --world 8 --hardware a100 --memory 24 --ranks-per-node 4

  # for a script
  python -m trainkit plan --size 10m --world 2 --hardware cpu --row-length 256 --json

FSDP reduces gradients once, after the last microbatch (--reduce last, the recipes' default), with
unsharded gradients until then; or after each one (--reduce each), which takes less memory and sends
more. The table has both where they differ, unless --reduce names one.

The recipes take the same flags as the table: --dp-shard 4 --tp 2 --reduce each.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainkit.types import ConfigError, Layout, Precision

if TYPE_CHECKING:
    from trainkit.models.config import DecoderConfig
    from trainkit.tools.planning.machines import Hardware


_DEGREES = tuple(Layout().degrees)
HELP = "list layouts for a model, with memory, communication and time"


def add(plan: argparse.ArgumentParser) -> None:
    """Add the command's flags to its parser."""
    work = plan.add_argument_group("model and training")
    _add_work(work)
    _add_memory(work)
    _add_sharding(work)
    _add_training(work)
    _add_machines(plan.add_argument_group("machines"))
    # None where a flag is not given, since 1 is a degree to ask for.
    only = plan.add_argument_group("only layouts with these degrees")
    for name in _DEGREES:
        only.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    shown = plan.add_argument_group("output")
    shown.add_argument("--limit", type=int, default=10, help="rows of the table (10); 0 for all")
    shown.add_argument("--json", action="store_true", help="print all plans as JSON, in bytes")


def _add_work(group: Any) -> None:
    group.add_argument("--size", help="a named model, such as llama-3.1-8b (tiny)")
    group.add_argument(
        "--init", metavar="FOLDER", help="take the model of a Hugging Face folder or a run"
    )
    group.add_argument("--vocab-size", type=int, metavar="V", help="override the vocabulary size")
    group.add_argument(
        "--row-length", type=int, default=4096, metavar="S", help="tokens per row (4096)"
    )
    group.add_argument(
        "--rows", type=int, metavar="B", help="rows per step, over all ranks (4 per rank)"
    )
    group.add_argument(
        "--microbatch", type=int, default=1, metavar="N", help="rows per microbatch of a rank (1)"
    )
    group.add_argument(
        "--documents", type=int, default=1, metavar="N", help="documents per row (1)"
    )


def _add_memory(group: Any) -> None:
    group.add_argument(
        "--recompute",
        nargs="+",
        default=["none", "selective", "full"],
        metavar="MODE",
        help="none, selective, full (default: all three); the operations whose outputs are saved, "
        "such as attention+products/2; or a fraction of the bytes, such as 0.4",
    )
    group.add_argument(
        "--offload-activations",
        type=int,
        metavar="BYTES",
        help="bytes of activations that stay on the device",
    )
    group.add_argument(
        "--storage", choices=("fp32", "bf16"), default="fp32", help="dtype of parameters (fp32)"
    )
    group.add_argument(
        "--reduction",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of FSDP's gradient reduction (fp32)",
    )
    group.add_argument(
        "--compute",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of computation (bf16; fp32 on cpu)",
    )
    group.add_argument(
        "--moments",
        choices=("fp32", "bf16", "8bit"),
        default="fp32",
        help="dtype of the optimizer's moments (fp32)",
    )


def _add_sharding(group: Any) -> None:
    group.add_argument("--schedule", default="1f1b", help="pipeline schedule (1f1b)")
    group.add_argument(
        "--reduce",
        nargs="+",
        choices=("last", "each"),
        default=["last", "each"],
        help="microbatch after which FSDP reduces gradients (both)",
    )
    group.add_argument(
        "--fold-sp",
        choices=("all", "ring", "ulysses", "none"),
        default="all",
        help="sequence axes that FSDP shards over, besides dp_shard (all)",
    )
    group.add_argument(
        "--cpu-offload",
        action="store_true",
        help="parameters, gradients and optimizer state in host memory",
    )
    group.add_argument(
        "--reshard-over",
        type=int,
        default=0,
        metavar="N",
        help="ranks that a block is resharded over after forward (0: all)",
    )
    group.add_argument(
        "--prefetch",
        type=int,
        default=0,
        metavar="N",
        help="blocks gathered ahead (0: FSDP's default)",
    )
    group.add_argument(
        "--separate-ends",
        action="store_true",
        help="gather embedding and head separately, when they are needed",
    )


def _parse_decay(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def _add_training(group: Any) -> None:
    group.add_argument("--optimizer", default="adamw", metavar="NAME", help="(adamw)")
    group.add_argument(
        "--optimizer-options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="the optimizer's hyperparameters",
    )
    group.add_argument(
        "--mean", type=_parse_decay, metavar="X", help="average the weights with this decay"
    )
    group.add_argument(
        "--offload-optimizer", action="store_true", help="optimizer state in host memory"
    )
    group.add_argument(
        "--loss",
        choices=("linear", "plain"),
        default="linear",
        help="compute logits in chunks, or all at once (linear)",
    )
    group.add_argument(
        "--method",
        choices=("full", "lora", "qlora"),
        default="full",
        help="train all parameters, or adapters on frozen matrices, with qlora in 4 bits (full)",
    )
    group.add_argument("--rank", type=int, default=16, help="rank of the adapters (16)")


def _add_machines(group: Any) -> None:
    group.add_argument("--world", type=int, default=1, metavar="N", help="ranks (1)")
    group.add_argument("--hardware", default="h100", help="a100, h100, h200, b200 or cpu (h100)")
    group.add_argument("--memory", type=float, metavar="GIB", help="override the memory of a rank")
    group.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="override the ranks per node"
    )
    group.add_argument(
        "--efficiency", type=float, default=0.5, help="fraction of peak FLOP/s achieved (0.5)"
    )
    group.add_argument(
        "--headroom", type=float, default=0.1, help="fraction of memory to leave free (0.1)"
    )


def run(options: argparse.Namespace) -> tuple[Any, int]:
    """Rank the layouts and return a table, or records for JSON, and the exit code."""
    # Imported here: they import torch.
    import attrs  # noqa: PLC0415

    from trainkit.optim import parse_options  # noqa: PLC0415
    from trainkit.tools.planning import Job, format_estimates, rank_layouts  # noqa: PLC0415

    config = _read_config(options)
    layouts = _list_layouts(options, config)
    machine = _make_hardware(options)
    job = Job(
        config=config,
        row_length=options.row_length,
        rows=options.rows or 4 * options.world,
        microbatch=options.microbatch,
        precision=Precision(
            storage=options.storage,
            # What "auto" of the recipes comes to.
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
        plan_prefix=_make_adapter_plan(options),
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
            # Neither is a field of an estimate.
            attrs.asdict(plan) | {"compute": job.precision.compute, "fits": plan.fits}
            for plan in plans
        ], 0
    table = format_estimates(plans, limit=options.limit or None)
    return f"{_describe_job(options, config)}\n\n{table}", 0


def _read_config(options: argparse.Namespace) -> DecoderConfig:
    """Return the configuration of --size, or of the folder or run of --init."""
    import attrs  # noqa: PLC0415 -- see run

    from trainkit.models.decoder_sizes import make_decoder_config  # noqa: PLC0415 -- see run
    from trainkit.weights.hub.trained import read_model_info  # noqa: PLC0415 -- see run

    if options.init is not None and options.size is not None:
        raise ConfigError(
            f"plan: --size {options.size} and --init {options.init} both name a model; give one",
            where="init",
        )
    if options.init is None:
        config = make_decoder_config(options.size or "tiny")
    else:
        config = read_model_info(options.init, context=options.row_length)
    if options.vocab_size is not None:
        config = attrs.evolve(config, vocab_size=options.vocab_size)
    return config


def _make_adapter_plan(options: argparse.Namespace) -> list[Any]:
    """Return the transforms that add adapters to all matrices of the blocks."""
    if options.method == "full":
        return []
    from trainkit.post.adapters import Lora, lora, quantized  # noqa: PLC0415 -- see run

    # All matrices of the blocks: queries, keys, values, outputs, and those of MLPs and experts.
    pattern = "layers.*.{attention,mlp,mlp.experts}.{w*,gate,up,down}"
    storage = [quantized("nf4")] if options.method == "qlora" else []
    return [*storage, lora(Lora(pattern, rank=options.rank))]


def _describe_job(options: argparse.Namespace, config: DecoderConfig) -> str:
    """Return the heading of the table: model, machines and rows per step."""
    # see run
    from trainkit.models.config import count_active_parameters, count_parameters  # noqa: PLC0415

    machine = _make_hardware(options)
    rows = options.rows or 4 * options.world
    total = count_parameters(config)
    active = count_active_parameters(config)
    # A token passes through some of the experts only.
    per_token = f" ({active / 1e6:,.1f} for a token)" if active < total else ""
    return (
        f"{options.init or options.size or 'tiny'}, {total / 1e6:,.1f} million parameters"
        f"{per_token}, on {options.world} x {machine.name} with {machine.memory / 2**30:g} GiB, "
        f"of which {options.headroom:.0%} stay free; steps of {rows} rows of "
        f"{options.row_length:,} tokens"
    )


def _make_hardware(options: argparse.Namespace) -> Hardware:
    """Return the machine of --hardware, with the figures that other flags override."""
    import attrs  # noqa: PLC0415 -- see run

    from trainkit.tools.planning import get_hardware  # noqa: PLC0415 -- see run

    machine = get_hardware(options.hardware)
    if options.memory is not None:
        machine = attrs.evolve(machine, memory=round(options.memory * 2**30))
    if options.ranks_per_node is not None:
        machine = attrs.evolve(machine, ranks_per_node=options.ranks_per_node)
    return machine


def _list_layouts(options: argparse.Namespace, config: DecoderConfig) -> list[Layout]:
    """Return the layouts of the world that have the requested degrees."""
    from trainkit.tools.planning import list_layouts  # noqa: PLC0415 -- see run

    if options.world < 1:
        raise ConfigError(
            f"plan: --world must be at least 1, got {options.world}",
            where="world",
            got=options.world,
        )
    degrees = {
        name: getattr(options, name) for name in _DEGREES if getattr(options, name) is not None
    }
    # All layouts share these options; their degrees are enumerated.
    like = Layout(
        fold_sp=options.fold_sp,
        schedule=options.schedule,
        cpu_offload=options.cpu_offload,
        reshard_over=options.reshard_over,
        prefetch=options.prefetch,
        separate_ends=options.separate_ends,
    )
    # ep divides the number of experts, so it is 1 without them.
    experts = 1 if config.experts is None else config.experts.count
    layouts = [
        layout
        for layout in list_layouts(options.world, like=like, experts=experts)
        if all(getattr(layout, name) == degree for name, degree in degrees.items())
    ]
    if not layouts:
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ConfigError(
            f"plan: no layout of {options.world} ranks has {text}, which must divide "
            f"{options.world}; change a degree or --world",
            where="world",
            got=options.world,
        )
    return layouts
