"""Tensor parallelism: the matrices of each layer sharded over `ps.tp`, by name patterns.

Parameters are DTensors, so that FSDP2, the gradient norm, checkpoints and the optimizer know which
shard a rank holds. Modules compute on plain tensors with explicit collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

from torch import Tensor, nn

from trainkit.batch.shards import contiguous_shard
from trainkit.collectives import all_gather_replicated, sum_forward
from trainkit.models.decoder import Decoder
from trainkit.models.experts import ExpertMlp, check_whole_documents
from trainkit.models.mixins import Forward, wrap_forward_
from trainkit.parallel.check_modules import refuse_max_norm
from trainkit.parallel.grad_reduction import mark_partial_
from trainkit.parallel.name_patterns import match_any, name_matches
from trainkit.parallel.parameters import canonical_name
from trainkit.parallel.styles import (
    STYLES,
    ParallelStyle,
    local_padding,
    shard_,
    style_problem,
    sums_problem,
)
from trainkit.parallel.transforms import Transform
from trainkit.types import Axis, ConfigError, Hidden, ParallelState, RoutedOutput, VocabularyAxis

DECODER_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "vocabulary_scattered",
        # Each norm sees its rank's tokens; "gather" makes complete sequences of them for the
        # matrices, and "row_scattered" sums and shards the output.
        "layers.*.attention_norm": "partial",
        "layers.*.attention": "gather",
        "layers.*.attention.w[qkvg]": "column_inside",
        "layers.*.attention.[qk]_norm": "partial",
        "layers.*.attention.wo": "row_scattered",
        "layers.*.attention_out_norm": "partial",
        "layers.*.mlp_norm": "partial",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate": "column_inside",
        "layers.*.mlp.up": "column_inside",
        "layers.*.mlp.down": "row_scattered",
        "layers.*.mlp_out_norm": "partial",
        "norm": "partial_gathered",
        # `norm` has gathered the tokens already, and sums the gradient over ranks in its backward.
        "head": "column_inside",
    }
)
"""The styles of `models.Decoder`.

Hidden states are `[B, S / tp, D]` between blocks, so that the work of norms, dropout and residual
additions is sharded too (Korthikanti et al., 2022). The model returns full logits `[B, S, V]`, or a
`Hidden` with this rank's rows of the weight, `[V / tp, D]`, and the axis. Learned positions and
norms over all heads have further styles.
"""

LATENT_STYLES: Mapping[str, str] = MappingProxyType(
    {name: style for name, style in DECODER_STYLES.items() if name != "layers.*.attention"}
    | {
        "layers.*.attention.*_latent": "partial",
        "layers.*.attention.*_latent_norm": "partial_gathered",
        "layers.*.attention.k_rotary": "partial_gathered",
        "layers.*.attention.wkv": "column_inside",
    }
)
"""The styles of a decoder with `Latents`: each rank computes the latents of its own tokens, and the
latents are gathered instead of the hidden states, which are larger.
"""

DELTA_STYLES: Mapping[str, str] = MappingProxyType(
    {
        **DECODER_STYLES,
        "layers.*.attention.wb": "column_inside",
        "layers.*.attention.wa": "heads",
        "layers.*.attention.[qkv]_conv": "heads",
        "layers.*.attention.gated_norm": "partial",
    }
)
"""The styles of a decoder with delta layers, whose gates and convolutions belong to heads."""

# By the names that the plans of several transformers releases use.
_HF_STYLES = {
    "colwise": "column",
    "colwise_rep": "column_gathered",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial",
}


def tensor_parallel(styles: Mapping[str, str | ParallelStyle] | None = None) -> Transform:
    """Return the transform that shards matrices over `ps.tp`; it comes first in a plan.

    The module is on the meta device, as in `build_stages`, or holds its weights, equal on all
    ranks, of which each rank then keeps its shard. All parameters become DTensors.

    Parameters without a style stay replicated, and their gradients count as complete. A module
    without matrices that sees only a part of the features, between a "column" and a "row", needs
    the style "partial": an activation with a weight, a norm of heads. A `Decoder` returns full
    logits, or a `Hidden` that knows the axis, with any styles. The output head of another model
    needs "column_gathered" for losses on full logits, or "column" for losses with `axis=ps.tp`.

    Args:
        styles: Names of `STYLES`, or `ParallelStyle` records, by module name pattern, in which `*`
            stands for one component: {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}.
            The pattern "" is the module itself, for parameters that it holds directly. None takes
            the styles of `models.Decoder`; `read_hf_styles(model)` returns those of a Hugging Face
            model.

    Returns:
        A transform for `build_stages`. It changes nothing if `ps.tp` has size 1.

    Raises:
        ConfigError: When applied, before anything is sent: a style is unknown or does not fit its
            module; the styles would visibly sum a gradient twice or not at all; a pattern matches
            nothing (without pipeline stages); two patterns match one module; a number of heads or a
            dimension does not divide by tp; an embedding has a `max_norm`; or a style shards a
            parameter that its module computes (`weight_norm`). In the forward pass: a module reads
            a parameter of another module, of which it would see only a shard.

    References:
        Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing activation
        recomputation in large transformer models" (2022).

    Examples:
        >>> from trainkit.mesh import solo_parallel
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        >>> tensor_parallel({"0": "column", "1": "row"})(model, solo_parallel()) is model
        True
    """

    def apply(module: nn.Module, ps: ParallelState) -> nn.Module:
        if ps.tp.count == 1 and styles is None:
            return module  # a user's own styles are checked on one rank too
        matched = _match_styles(module, styles, is_stage=ps.pp.count > 1)
        by_name = {name: style for name, (_, style) in matched.items()}
        problem = sums_problem(module, by_name)
        if problem is not None:
            raise ConfigError(f"tensor_parallel: {problem}", where="tp")
        if ps.tp.count == 1:
            return module
        check_whole_documents(module, "tensor_parallel")
        refuse_max_norm(module, by="tensor_parallel")
        modules = dict(module.named_modules())
        # All checks come first: a module that is half sharded is of no use.
        for name, (pattern, style) in matched.items():
            _check_module(name, modules, pattern, style, ps.tp)
        _shard_parameters_(module, by_name, ps.tp)
        if isinstance(module.forward, MethodType):  # a user may have set a plain function
            wrap_forward_(module, _explain_mixed_tensors)
        # A rank then has S / tp tokens between blocks, and as many of every input per token.
        has_parts = any(style.sequence_sharded for style in by_name.values())
        if has_parts and hasattr(module, "sequence_parts"):
            module.sequence_parts = ps.tp.count  # pyrefly: ignore[bad-argument-type]
            module.register_forward_pre_hook(_make_token_slicer(ps.tp), with_kwargs=True)
        if isinstance(module, Decoder) and module.norm is not None:  # the last stage
            module.register_forward_hook(_make_output_hook(ps.tp))
        return module

    return Transform(apply, kind="tensor", axes=("tp",))


def read_hf_styles(model: Any) -> dict[str, str]:
    """Return the styles for `tensor_parallel` from the plan of a Hugging Face model.

    Logits are gathered, for losses on full logits; {**read_hf_styles(model), "lm_head": "column"}
    leaves them sharded, for `losses.cross_entropy(logits, labels, axis=ps.tp)`.

    Args:
        model: A `transformers` model with a tensor-parallel plan, not sharded.

    Returns:
        Styles by name pattern, without the patterns that match nothing in this model.

    Raises:
        ConfigError: The model has no plan, its plan has a style that is unknown here, or a norm of
            queries or keys is neither in the plan nor over single heads.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)})
        >>> model._tp_plan = {"up": "colwise", "down": "rowwise"}
        >>> read_hf_styles(model)
        {'up': 'column', 'down': 'row'}
    """
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"read_hf_styles: {type(model).__name__} brings no tensor-parallel plan; write one, as "
            '{"model.layers.*.mlp.up_proj": "column", ...}',
            where="tp",
        )
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        # A plan also names parts that this variant of the model lacks.
        if not any(name_matches(name, pattern) for name in names):
            continue
        if style not in _HF_STYLES:
            raise ConfigError(
                f"read_hf_styles: the plan of {type(model).__name__} has {style!r} at {pattern!r}, "
                "which tensor_parallel() has no style for (it knows "
                f"{', '.join(_HF_STYLES)})",
                where=pattern,
                got=style,
                want=list(_HF_STYLES),
            )
        styles[pattern] = _HF_STYLES[style]
    return styles | _find_head_norms(model, styles)


def _find_head_norms(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return styles for the norms of queries and keys that a plan omits, as older ones do.

    Replicated, they would silently get the gradient of one rank's heads.
    """
    modules = dict(model.named_modules())
    norms: dict[str, str] = {}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if last not in ("q_norm", "k_norm") or match_any(name, styles):
            continue
        sizes = {p.shape[-1] for p in module.parameters()}
        if sizes - {_head_size(modules[parent])}:
            raise ConfigError(
                f"read_hf_styles: {name!r} is no norm of single heads, and the plan of "
                f"{type(model).__name__} does not say how it is sharded; write a plan for this "
                "model",
                where=name,
            )
        norms[name] = "partial"
    return norms


# ------------------------------------------------------------------------------------------ checks


def _get_decoder_styles(module: nn.Module) -> Mapping[str, str]:
    if not isinstance(module, Decoder):
        raise ConfigError(
            f"tensor_parallel: there is no ready plan for a {type(module).__name__}; pass one, as "
            'tensor_parallel({"layers.*.up": "column", "layers.*.down": "row"}) or '
            "tensor_parallel(read_hf_styles(model))",
            where="tp",
        )
    styles = DECODER_STYLES if module.config.latents is None else LATENT_STYLES
    styles = styles if module.config.delta is None else DELTA_STYLES
    styles = {**styles, "positions": "partial_sliced"}
    if module.config.qk_norm == "wide":
        styles["layers.*.attention.[qk]_norm"] = "wide_norm"
    if module.config.attention_sinks:
        styles["layers.*.attention"] = "gather_heads"
    return styles


def _match_styles(
    module: nn.Module, styles: Mapping[str, str | ParallelStyle] | None, *, is_stage: bool
) -> dict[str, tuple[str, ParallelStyle]]:
    """Return (pattern, style) by module name; a pipeline stage need not match every pattern."""
    modules = dict(module.named_modules())
    names = [name for name in modules if name]
    layers = [name for name, part in modules.items() if isinstance(part, ExpertMlp)]
    # Experts are not sharded over tp: each rank computes its own tokens with all of a layer.
    in_experts = {x for x in modules for layer in layers if f"{x}.".startswith(f"{layer}.")}
    matched: dict[str, tuple[str, ParallelStyle]] = {}
    for pattern, style in (_get_decoder_styles(module) if styles is None else styles).items():
        if isinstance(style, str) and style not in STYLES:
            raise ConfigError(
                f"tensor_parallel: there is no style {style!r}, as given for {pattern!r}; there "
                f"are {', '.join(STYLES)}",
                where=pattern,
                got=style,
                want=list(STYLES),
            )
        matching = [x for x in names if name_matches(x, pattern) and x not in in_experts]
        matching = matching if pattern else [""]
        if not matching and not is_stage and styles is not None:
            raise ConfigError(
                f"tensor_parallel: no submodule's name matches {pattern!r}; take the pattern out, "
                f"or correct it (names are such as {', '.join(names[:3])})",
                where=pattern,
            )
        for name in matching:
            if name in matched:
                raise ConfigError(
                    f"tensor_parallel: {name!r} is matched by two patterns, {matched[name][0]!r} "
                    f"and {pattern!r}; leave one",
                    where=name,
                )
            matched[name] = pattern, STYLES[style] if isinstance(style, str) else style
    for name, part in modules.items():  # an adapter is sharded as its matrix is
        derive_style = getattr(part, "derive_style", None)
        # An adapter's name is its matrix's, "lora" and its own.
        owner = name.rsplit(".", 2)[0]
        if callable(derive_style) and owner in matched:
            matched[name] = matched[owner][0], derive_style(matched[owner][1])
    has_parts = any(style.sequence_sharded for _, style in matched.values())  # of the tokens
    style = STYLES["partial" if has_parts else "replicated"]
    return matched | dict.fromkeys(sorted(in_experts), ("experts", style))


def _check_module(
    name: str, modules: Mapping[str, nn.Module], pattern: str, style: ParallelStyle, axis: Axis
) -> None:
    """Raise ConfigError if a style does not fit a module, or a parameter does not divide."""
    module = modules[name]
    problem = style_problem(module, style)
    if problem is not None:
        raise ConfigError(
            f"tensor_parallel: the style of the pattern {pattern!r} does not fit {name!r}: "
            f"{problem}",
            where=name,
        )
    for key in style.shard_dims:
        _check_is_parameter(module, key, name, pattern=pattern)
    # Attention needs whole heads: their number must divide, not only the number of rows. Attention
    # itself has an element for each head.
    size = _head_size(module) or _head_size(modules.get(name.rpartition(".")[0]))
    size = None if "sinks" in style.shard_dims else size
    for key, parameter in module.named_parameters(recurse=False):
        dim = style.shard_dims.get(key)
        if dim is None:
            continue
        count = parameter.shape[dim]
        text = f"dimension {dim} of '{name}.{key}' is {count}, which does"
        if size and dim == 0 and count % size == 0:
            count = count // size
            text = f"{name!r} has {count} heads, which do"
        if count % axis.count:
            raise ConfigError(
                f"tensor_parallel: {text} not divide into {axis.count} equal parts for tp = "
                f"{axis.count}; choose tp among the divisors of {count}",
                where=f"{name}.{key}",
                got=count,
                want=f"a multiple of {axis.count}",
            )


def _check_is_parameter(module: nn.Module, key: str, name: str, *, pattern: str) -> None:
    """Raise ConfigError if a module computes this tensor from parameters, as `weight_norm` does."""
    own = dict(module.named_parameters(recurse=False))
    if key in own or hasattr(module, "shard_by_style_") or getattr(module, key, None) is None:
        return
    starts = (f"{key}_", f"parametrizations.{key}.")
    sources = ", ".join(x for x, _ in module.named_parameters() if x.startswith(starts))
    raise ConfigError(
        f"tensor_parallel: '{name}.{key}' is no parameter, but computed in each forward pass"
        f"{f' from {sources}' if sources else ''}, which the style of the pattern {pattern!r} "
        "cannot shard; take that off before (torch.nn.utils.parametrize.remove_parametrizations, "
        "or torch.nn.utils.remove_weight_norm), or leave the module without a style",
        where=f"{name}.{key}",
        got=sources,
        want="a parameter",
    )


def _head_size(module: nn.Module | None) -> int | None:
    """Return the size of a head in an attention module or matrix, trainkit's or Hugging Face's."""
    for name in ("head_size", "head_dim"):
        size = getattr(module, name, None)
        if isinstance(size, int) and size > 0:
            return size
    return None


# ------------------------------------------------------------------------------------------- shard


def _shard_parameters_(module: nn.Module, styles: Mapping[str, ParallelStyle], axis: Axis) -> None:
    """Make every parameter a DTensor, and let modules with parameters or a style use `shard_`."""
    dtensors: dict[int, tuple[int | None, nn.Parameter]] = {}  # tied parameters stay tied
    for name, child in module.named_modules():
        style = styles.get(name, STYLES["replicated"])
        shard_by_style: Any = getattr(child, "shard_by_style_", None)
        if shard_by_style is not None:  # it stores its weights in other shapes than a style knows
            style = shard_by_style(style, axis)
        own = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        if not own and name not in styles:
            continue
        for key, parameter in own.items():
            dim = style.shard_dims.get(key)
            if id(parameter) not in dtensors:
                dtensors[id(parameter)] = dim, _make_dtensor(parameter, dim, axis)
            if dtensors[id(parameter)][0] != dim:
                raise ConfigError(
                    f"tensor_parallel: '{name}.{key}' is tied to a parameter that is sharded "
                    "otherwise; give both modules styles that shard alike, as vocabulary and "
                    "column",
                    where=f"{name}.{key}",
                )
            setattr(child, key, dtensors[id(parameter)][1])
        replicated = [key for key in own if key not in style.shard_dims]
        if style.partial_grads and replicated:
            mark_partial_(child, replicated, axis)
        # One rank has the row of padding, and torch looks for it by its index among the local rows.
        if isinstance(child, nn.Embedding) and style.shard_dims:
            rows = child.num_embeddings // axis.count
            child.padding_idx = local_padding(child.padding_idx, rows, axis)
        shard_(child, tuple(own), style, axis)


def _make_dtensor(parameter: nn.Parameter, dim: int | None, axis: Axis) -> nn.Parameter:
    """Return a DTensor parameter with this rank's shard of a full parameter."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 (a second)

    if isinstance(parameter, DTensor):
        raise ConfigError(
            "tensor_parallel: parameters are sharded already; tensor_parallel() comes first in a "
            "plan"
        )
    assert axis.mesh is not None
    full = parameter.detach()
    # A copy: a view would keep the memory of the full parameter.
    local = full if dim is None else full.chunk(axis.count, dim)[axis.index].clone()
    dtensor = DTensor.from_local(
        local.contiguous(),
        axis.mesh,
        [Replicate() if dim is None else Shard(dim)],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


def _explain_mixed_tensors(forward: Forward) -> Forward:
    """Return a forward pass whose error names the module that reads a parameter of another one.

    A module's parameters are plain local tensors only while its own forward pass runs. All other
    modules see DTensors, which torch does not combine with plain tensors.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            name, line = _find_innermost(self, error)
            raise ConfigError(
                f"tensor_parallel: {name or 'the model itself'!r} computes with a parameter of "
                f"another module ({line}), of which each rank has a shard that only the module's "
                "own forward pass sees; call that module there (self.up(x) in place of "
                "linear(x, self.up.weight)), or let the parameter be one of its own",
                where=name,
            ) from error

    return call


def _find_innermost(module: nn.Module, error: BaseException) -> tuple[str, str]:
    """Return the innermost submodule whose code an error passed, and the line in it."""
    names = {id(part): name for name, part in module.named_modules()}
    found = ""
    line = "its forward pass"
    trace = error.__traceback__
    while trace is not None:
        # Frames go from the outermost call inwards, so that the last match is the innermost.
        frame = trace.tb_frame
        code = trace.tb_frame.f_code
        part = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # self
        # Wrappers of both have the module as first argument too; the user's line is wanted.
        is_library = "/trainkit/" in code.co_filename or "/torch/" in code.co_filename
        if id(part) in names and not is_library:
            found = names[id(part)]
            line = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return canonical_name(found), line


# ------------------------------------------------------------------------------- hooks of the model


def _make_token_slicer(axis: Axis) -> Callable[..., Any]:
    """Return a pre-hook that takes this rank's tokens of the per-token inputs of blocks.

    Ids and positions stay complete: the embedding scatters its output itself. Experts that are
    chosen by a hash of the ids get those of this rank's tokens as well.
    """

    def hook(module: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = {name: kwargs.get(name) for name in ("noise_key", "is_token", "choices")}
        experts = module.config.experts
        if experts is not None and experts.hash_layers and module.embeds:
            inputs["token_ids"] = args[0]
        own = {k: contiguous_shard(x, axis.share) for k, x in inputs.items() if x is not None}
        return args, kwargs | own

    return hook


def _make_output_hook(axis: Axis) -> Callable[..., Any]:
    """Return a hook by which a decoder returns full logits, or a `Hidden` that knows the axis.

    It also sums the counts of routers where each rank has routed its own tokens.
    """

    def hook(module: Decoder, _: Any, output: Any) -> Tensor | Hidden | RoutedOutput:
        if isinstance(output, RoutedOutput):
            # Routers counted this rank's tokens alone, or all tokens on every rank.
            has_parts = module.sequence_parts > 1
            sums = sum_forward(output.sums, axis) if has_parts else output.sums
            return RoutedOutput(complete(module, output.output), sums)
        return complete(module, output)

    def complete(module: Decoder, output: Tensor | Hidden) -> Tensor | Hidden:
        is_hidden = isinstance(output, Hidden)
        local_vocab_size = len(output.weight) if is_hidden else output.shape[-1]
        if local_vocab_size == module.config.outputs:  # the styles gather it, or leave it full
            return output
        if is_hidden:
            sizes = (local_vocab_size,) * axis.count
            vocabulary = VocabularyAxis(axis.name, axis.share, axis.group, axis.mesh, words=sizes)
            return output._replace(axis=vocabulary)
        return all_gather_replicated(output, axis, dim=-1)

    return hook
