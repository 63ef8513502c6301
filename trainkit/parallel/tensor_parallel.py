"""Tensor parallelism: the matrices of each layer cut over `ps.tp`, by name patterns.

Collectives are our own and explicit, on plain tensors; parameters are DTensors, so that FSDP2, the
gradient norm, checkpoints and the optimizer know which part of the whole a rank holds.
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
from trainkit.parallel.parameters import canonical_name, name_matches
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
        "layers.*.attention_norm": "partial",
        "layers.*.attention": "gather",
        "layers.*.attention.w[qkv]": "column_inside",
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
        "head": "column_inside",
    }
)
"""The plan of `models.Decoder`: hidden states are `[B, S / tp, D]` between blocks, so that norms,
dropout and the residual stream are shared too. Logits leave the model whole, `[B, S, V]`; a
`Hidden` leaves it with this rank's rows of the weight, `[V / tp, D]`, and the axis. Learned
positions and norms over all heads, where a decoder has them, have styles of their own.
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
"""The same of a decoder with `Latents`: each rank makes those of its own tokens, and the narrow
latents are gathered in place of what attention is given.
"""

_HF_STYLES = {
    "colwise": "column",
    "colwise_rep": "column_gathered",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial",
}


def tensor_parallel(styles: Mapping[str, str | ParallelStyle] | None = None) -> Transform:
    """Return the transform that cuts matrices over `ps.tp`; the first of a plan.

    The module may be on the meta device, in `build_stages`, or hold its weights, the same on every
    rank, of which each then keeps its part. All parameters become DTensors; those without a style
    stay whole, and their gradients are taken for whole. So give "partial" to a module without
    matrices that sees a part of the features, between a column and a row: an activation with a
    weight, a norm of heads. A `Decoder` returns whole logits, or a `Hidden` that knows the axis, by
    any styles; the last matrix of another model needs "column_gathered", for losses that want whole
    logits, or losses with `axis=ps.tp`.

    Args:
        styles: From patterns of module names, in which `*` stands for one part, to the names of
            `STYLES` or to a `ParallelStyle`: {"layers.*.mlp.up": "column", "layers.*.mlp.down":
                "row"}.
            The pattern "" is the module itself, for parameters that it holds directly.
            None takes the plan of `models.Decoder`; `read_hf_styles(model)` that of a Hugging Face
            model.

    Returns:
        A transform for `build_stages`. At `ps.tp` of size 1 it changes nothing.

    Raises:
        ConfigError: When applied: a style is unknown or does not fit its module, styles would sum a
            gradient twice or not at all, as far as that can be seen, a pattern matches nothing
            (without pipeline stages), two patterns match one module, or a number of heads or a
            dimension does not divide by tp; an embedding has a `max_norm`; a style cuts a parameter
            that its module computes (`weight_norm`). Nothing has been sent then. In its forward
            pass: a module reads a parameter of another one, as the parts of it cannot be.

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
            return module
        named = _styles_of(module, styles, whole=ps.pp.count == 1)
        cut = {name: style for name, (_, style) in named.items()}
        problem = sums_problem(module, cut)
        if problem is not None:
            raise ConfigError(f"tensor: {problem}", where="tp")
        if ps.tp.count == 1:
            return module
        check_whole_documents(module, "tensor")
        refuse_max_norm(module, by="tensor")
        parents = dict(module.named_modules())
        for name, (pattern, style) in named.items():
            _check_module(name, parents, pattern, style, ps.tp)
        _shard_(module, cut, ps.tp)
        if isinstance(module.forward, MethodType):  # a user may have set a plain function
            wrap_forward_(module, _explain_mixed_tensors)
        if any(style.sequence for style in cut.values()) and hasattr(module, "sequence_parts"):
            module.sequence_parts = ps.tp.count  # pyrefly: ignore[bad-argument-type]
            module.register_forward_pre_hook(_slice_by_token(ps.tp), with_kwargs=True)
        if isinstance(module, Decoder) and module.norm is not None:  # the last stage
            module.register_forward_hook(_whole_vocabulary(ps.tp))
        return module

    return Transform(apply, kind="tensor", axes=("tp",))


def read_hf_styles(model: Any) -> dict[str, str]:
    """Return the styles that a Hugging Face model brings, for `tensor_parallel`.

    Logits are gathered, as all losses on logits need them; {**read_hf_styles(model), "lm_head":
    "column"} leaves them cut, for `losses.cross_entropy(logits, labels, axis=ps.tp)`.

    Args:
        model: A `transformers` model with a tensor-parallel plan, whole.

    Returns:
        Styles by name pattern; patterns that match nothing in this model are left out.

    Raises:
        ConfigError: The model has no plan, or one with a style that there is none for here, or a
            norm of queries or keys that is neither in the plan nor of single heads.

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
    names = [name for name, _ in model.named_modules()]
    held = [name for name, _ in model.named_parameters()]
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        if not any(name_matches(name, pattern) for name in (*names, *held)):
            continue
        if style not in _HF_STYLES:
            raise ConfigError(
                f"read_hf_styles: the plan of {type(model).__name__} has {style!r} at {pattern!r}, "
                f"which tensor() has no style for (it knows {', '.join(_HF_STYLES)})",
                where=pattern,
                got=style,
                want=list(_HF_STYLES),
            )
        found[pattern] = _HF_STYLES[style]
    return found | _norms_of_heads(model, found)


def _norms_of_heads(model: nn.Module, found: Mapping[str, str]) -> dict[str, str]:
    """Return styles for norms of queries and keys that a plan does not name, as older ones do not.

    Left whole, they would silently get the gradient of one rank's heads.
    """
    modules = dict(model.named_modules())
    more: dict[str, str] = {}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if last not in ("q_norm", "k_norm") or any(name_matches(name, p) for p in found):
            continue
        sizes = {p.shape[-1] for p in module.parameters()}
        if sizes - {_head_size(modules[parent])}:
            raise ConfigError(
                f"read_hf_styles: {name!r} is no norm of single heads, and the plan of "
                f"{type(model).__name__} does not say how it is cut; write a plan for this model",
                where=name,
            )
        more[name] = "partial"
    return more


# ------------------------------------------------------------------------------------------ checks


def _styles_of(
    module: nn.Module, styles: Mapping[str, str | ParallelStyle] | None, *, whole: bool
) -> dict[str, tuple[str, ParallelStyle]]:
    """Return (pattern, style) by module name; `whole` says that the module is no pipeline stage."""
    if styles is None and isinstance(module, Decoder):
        ready = dict(DECODER_STYLES if module.config.latents is None else LATENT_STYLES)
        ready |= {"positions": "partial_sliced"}
        if module.config.qk_norm == "wide":
            ready["layers.*.attention.[qk]_norm"] = "wide_norm"
    elif styles is None:
        raise ConfigError(
            f"tensor: there is no ready plan for a {type(module).__name__}; pass one, as "
            'tensor_parallel({"layers.*.up": "column", "layers.*.down": "row"}) or '
            "tensor_parallel(read_hf_styles(model))",
            where="tp",
        )
    else:
        ready = styles
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, tuple[str, ParallelStyle]] = {}
    own = _inside_experts(module)
    for pattern, named in ready.items():
        matching = [name for name in names if name_matches(name, pattern) and name not in own]
        matching = matching if pattern else [""]
        if not matching and whole and styles is not None:
            raise ConfigError(
                f"tensor: no submodule's name matches {pattern!r}; take the pattern out, or "
                f"correct it (names are such as {', '.join(names[:3])})",
                where=pattern,
            )
        for name in matching:
            if name in found:
                raise ConfigError(
                    f"tensor: {name!r} is matched by two patterns, {found[name][0]!r} and "
                    f"{pattern!r}; leave one",
                    where=name,
                )
            found[name] = pattern, _style(pattern, named)
    for name, part in module.named_modules():  # an adapter is cut as its matrix is
        derive_style = getattr(part, "derive_style", None)
        owner = name.rsplit(".", 2)[0]
        if callable(derive_style) and owner in found:
            found[name] = found[owner][0], derive_style(found[owner][1])
    apart = any(style.sequence for _, style in found.values())  # each rank has its own tokens
    style = STYLES["partial" if apart else "replicated"]
    return found | dict.fromkeys(sorted(own), ("experts", style))


def _inside_experts(module: nn.Module) -> set[str]:
    """Return the modules of expert layers, which are whole on each rank, for its own tokens."""
    named = dict(module.named_modules())
    layers = [name for name, layer in named.items() if isinstance(layer, ExpertMlp)]
    return {own for own in named for name in layers if f"{own}.".startswith(f"{name}.")}


def _style(pattern: str, style: str | ParallelStyle) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ConfigError(
            f"tensor: there is no style {style!r}, as given for {pattern!r}; there are "
            f"{', '.join(STYLES)}",
            where=pattern,
            got=style,
            want=list(STYLES),
        )
    return STYLES[style]


def _check_module(
    name: str, modules: Mapping[str, nn.Module], pattern: str, style: ParallelStyle, axis: Axis
) -> None:
    """Refuse a module that a style does not fit, or whose parameters do not divide."""
    module = modules[name]
    problem = style_problem(module, style)
    if problem is not None:
        raise ConfigError(
            f"tensor: the style of the pattern {pattern!r} does not fit {name!r}: {problem}",
            where=name,
        )
    for own in style.cuts:
        _check_is_parameter(module, own, name, style_of=pattern)
    size = _head_size(module) or _head_size(modules.get(name.rpartition(".")[0]))
    for own, parameter in module.named_parameters(recurse=False):
        dim = style.cuts.get(own)
        if dim is None:
            continue
        count = parameter.shape[dim]
        text = f"dimension {dim} of '{name}.{own}' is {count}, which does"
        if size and dim == 0 and count % size == 0:
            count = count // size
            text = f"{name!r} has {count} heads, which do"
        if count % axis.count:
            raise ConfigError(
                f"tensor: {text} not divide into {axis.count} equal parts for tp = {axis.count}; "
                f"choose tp among the divisors of {count}",
                where=f"{name}.{own}",
                got=count,
                want=f"a multiple of {axis.count}",
            )


def _check_is_parameter(module: nn.Module, own: str, name: str, *, style_of: str) -> None:
    """Refuse to cut what a module computes from other parameters, as `weight_norm` has it."""
    held = dict(module.named_parameters(recurse=False))
    if own in held or hasattr(module, "cut_") or getattr(module, own, None) is None:
        return
    starts = (f"{own}_", f"parametrizations.{own}.")
    made_of = ", ".join(x for x, _ in module.named_parameters() if x.startswith(starts))
    raise ConfigError(
        f"tensor: '{name}.{own}' is no parameter, but computed in each forward pass"
        f"{f' from {made_of}' if made_of else ''}, which the style of the pattern {style_of!r} "
        "cannot cut; take that off before (torch.nn.utils.parametrize.remove_parametrizations, or "
        "torch.nn.utils.remove_weight_norm), or leave the module without a style",
        where=f"{name}.{own}",
        got=made_of,
        want="a parameter",
    )


def _head_size(parent: nn.Module | None) -> int | None:
    """Return the size of a head in an attention module, ours or Hugging Face's, or in a matrix."""
    for name in ("head_size", "head_dim"):
        size = getattr(parent, name, None)
        if isinstance(size, int) and size > 0:
            return size
    return None


# ------------------------------------------------------------------------------------------- shard


def _shard_(module: nn.Module, styles: Mapping[str, ParallelStyle], axis: Axis) -> None:
    """Make every parameter a DTensor, and every module with parameters or a style a styled one."""
    placed: dict[int, tuple[int | None, nn.Parameter]] = {}
    for name, child in module.named_modules():
        style = styles.get(name, STYLES["replicated"])
        cut: Any = getattr(child, "cut_", None)
        if cut is not None:  # it holds its weights in other shapes than the style knows
            style = cut(style, axis)
        own = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        if not own and name not in styles:
            continue
        for key, parameter in own.items():
            dim = style.cuts.get(key)
            if id(parameter) not in placed:
                placed[id(parameter)] = dim, _placed(parameter, dim, axis)
            if placed[id(parameter)][0] != dim:
                raise ConfigError(
                    f"tensor: '{name}.{key}' is tied to a parameter that is cut otherwise; give "
                    "both modules styles that cut alike, as vocabulary and column",
                    where=f"{name}.{key}",
                )
            setattr(child, key, placed[id(parameter)][1])
        whole = [key for key in own if key not in style.cuts]
        if style.partial and whole:
            mark_partial_(child, whole, axis)
        if isinstance(child, nn.Embedding) and style.cuts:
            rows = child.num_embeddings // axis.count
            child.padding_idx = local_padding(child.padding_idx, rows, axis)
        shard_(child, tuple(own), style, axis)


def _explain_mixed_tensors(forward: Forward) -> Forward:
    """Return a forward pass whose error names a module that reads parameters of another one.

    A module's parameters are this rank's plain tensors while its own forward pass runs. To all
    other modules they are sharded tensors, which torch does not multiply with plain ones.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            name, line = _innermost(self, error)
            raise ConfigError(
                f"tensor: {name or 'the model itself'!r} computes with a parameter of another "
                f"module ({line}), of which each rank has a part that only the module's own "
                "forward pass sees; call that module there (self.up(x) in place of "
                "linear(x, self.up.weight)), or let the parameter be one of its own",
                where=name,
            ) from error

    return call


def _innermost(module: nn.Module, error: BaseException) -> tuple[str, str]:
    """Return the name of the innermost part of a module that an error passed, and the line."""
    names = {id(part): name for name, part in module.named_modules()}
    found, line, trace = "", "its forward pass", error.__traceback__
    while trace is not None:
        frame, code = trace.tb_frame, trace.tb_frame.f_code
        part = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        ours = "/trainkit/" in code.co_filename or "/torch/" in code.co_filename
        if id(part) in names and not ours:
            found, line = names[id(part)], f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return canonical_name(found), line


def _placed(parameter: nn.Parameter, dim: int | None, axis: Axis) -> nn.Parameter:
    """Return this rank's part of a whole parameter as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 (a second)

    if isinstance(parameter, DTensor):
        raise ConfigError("tensor: parameters are sharded already; tensor() comes first in a plan")
    assert axis.mesh is not None
    whole = parameter.detach()
    local = whole if dim is None else whole.chunk(axis.count, dim)[axis.index].clone()
    placement = Replicate() if dim is None else Shard(dim)
    made = DTensor.from_local(
        local.contiguous(),
        axis.mesh,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def _slice_by_token(axis: Axis) -> Callable[..., Any]:
    """Return a hook for the root of a model: what blocks need of this rank's part of the tokens."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {name: kwargs.get(name) for name in ("noise_key", "is_token", "choices")}
        own = {k: contiguous_shard(x, axis.share) for k, x in given.items() if x is not None}
        return args, kwargs | own

    return hook


def _whole_vocabulary(axis: Axis) -> Callable[..., Any]:
    """Return a hook for the root of a decoder: no half of a vocabulary leaves it unannounced.

    What routers counted are sums over the tokens of each rank, which have been apart so far.
    """

    def hook(module: Decoder, _: Any, output: Any) -> Tensor | Hidden | RoutedOutput:
        if isinstance(output, RoutedOutput):
            apart = module.sequence_parts > 1
            sums = sum_forward(output.sums, axis) if apart else output.sums
            return RoutedOutput(whole(module, output.output), sums)
        return whole(module, output)

    def whole(module: Decoder, output: Tensor | Hidden) -> Tensor | Hidden:
        words = len(output.weight) if isinstance(output, Hidden) else output.shape[-1]
        if words == module.config.vocab_size:  # whole already, by the styles of the plan
            return output
        if isinstance(output, Hidden):
            parts = (len(output.weight),) * axis.count
            known = VocabularyAxis(axis.name, axis.share, axis.group, axis.mesh, words=parts)
            return output._replace(axis=known)
        return all_gather_replicated(output, axis, dim=-1)

    return hook
