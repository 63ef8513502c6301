"""Capture activations and their gradients by module, and join them across a layout.

    with capture(stages, "layers.*.mlp") as captured:
        forward_backward(batch.microbatches, denominator=tokens)
    write_capture(captured, folder, batch.microbatches)      # on every rank
    found = join_captured(folder)                            # in any process, later

Two runs of different layouts give the same joined tensors, so that the first module whose output
differs can be found: see the page "My loss differs from one rank".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from trainkit.files import atomic_write, convert_disk_errors
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.name_patterns import match_names
from trainkit.parallel.parameters import name_modules
from trainkit.parallel.recompute import is_trial
from trainkit.parallel.stage_ranks import as_stages, get_stage_places
from trainkit.run.activations import Rows, find_rows, find_tensors
from trainkit.run.layers import gather_names
from trainkit.types import SOLO, Axis, DataError, Share, Stages

_FORMAT = "trainkit-capture-1"
_INDEX = "token_index"
# A module's output or its gradient: "layers.0.mlp/grad.hidden/call_1".
_KIND = re.compile(r"/(output|grad)((?:\.[^/]*)?(?:/call_\d+)?)$")


@attrs.frozen(eq=False)
class Capture:
    """What `capture` has copied so far on this rank.

    Attributes:
        tensors: The copies on the host, by "MODULE/output/microbatch_0" or "MODULE/grad/...", in
            the order in which they were computed.
        stages: The index in the pipeline of the stage of each module.
        calls: How often each stage was called, by its index.
        sharded: The modules whose output has a shard of the features on each rank of `tp`.
        world: This rank among all of them.
        tp: This rank in tensor parallelism.
    """

    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    stages: dict[str, int] = attrs.field(factory=dict)
    calls: dict[int, int] = attrs.field(factory=dict)
    sharded: set[str] = attrs.field(factory=set)
    world: Share = SOLO.share
    tp: Share = SOLO.share


@attrs.frozen(eq=False)
class Joined:
    """The captured tensors of all ranks.

    Attributes:
        tokens: The index in the global step of each token, int64 `[T]`, ascending. Padding is left
            out.
        joined: The tensors with one row for each token, `[T, ...]`, by "MODULE/output" or
            "MODULE/grad": outputs in the order of the forward pass, then gradients in the order of
            the backward pass.
        apart: The tensors that cannot be joined, as they are on each rank, by the same names and
            then by (rank, microbatch).
        why: Why each of those cannot be joined.
    """

    tokens: Tensor
    joined: dict[str, Tensor]
    apart: dict[str, dict[tuple[int, int], Tensor]]
    why: dict[str, str]


# ----------------------------------------------------------------------------------------- capture


def match_modules(
    stages_or_model: Stages | nn.Module, pattern: str, *, axis: Axis = SOLO
) -> list[str]:
    """Return the names of the modules that a pattern matches, on all ranks.

    Args:
        stages_or_model: This rank's stages, or any module.
        pattern: A pattern of names in the whole model; see `parallel.name_patterns`.
        axis: For a plain module, all ranks. A `Stages` has its own.

    Raises:
        ConfigError: It matches no module of any rank; the message has the names.

    Effects:
        Communicates on the axis of all ranks.

    Examples:
        >>> match_modules(nn.Sequential(nn.Linear(1, 1), nn.Tanh()), "*")
        ['0', '1']
    """
    stages = as_stages(stages_or_model, "capture")
    world = stages.world if isinstance(stages_or_model, Stages) else axis
    names = [name for stage in stages for name in name_modules(stage)]
    return match_names(pattern, gather_names(names, world), function="capture", kind="module")


@contextmanager
def capture(
    stages_or_model: Stages | nn.Module,
    pattern: str,
    *,
    gradients: bool = True,
    axis: Axis = SOLO,
) -> Iterator[Capture]:
    """Copy the outputs of modules, and their gradients, in the training passes of a block.

    A training pass is a call of a stage with gradients enabled; its n-th call is microbatch n. So
    evaluation and generation are not captured, and neither is recomputation, which runs outside of
    such a call. Gradients are those of what is differentiated: the sum of losses over its
    denominator, in fp16 times the loss scale. Compiled modules run eagerly in the block, as hooks
    inside compiled code are not called, so their rounding may differ from that of other steps.

    Copies stay in the host's memory until the caller releases them: capture one step.

    Args:
        stages_or_model: This rank's stages, or any module.
        pattern: A pattern of the modules' names in the whole model, such as "layers.*.mlp". The
            model itself has no name.
        gradients: Whether to copy gradients too.
        axis: For a plain module, all ranks. A `Stages` has its own.

    Raises:
        ConfigError: The pattern matches no module of any rank; the message has the names.

    Effects:
        Registers hooks on the modules for the length of the block; communicates on the axis of all
        ranks once; each copy waits for the device.

    Examples:
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh())
        >>> _ = model[0].weight.data.fill_(2.0)
        >>> with capture(model, "0") as captured:
        ...     model(torch.zeros(1, 1)).sum().backward()
        >>> captured.tensors
        {'0/output/microbatch_0': tensor([[0.]]), '0/grad/microbatch_0': tensor([[1.]])}
    """
    stages = as_stages(stages_or_model, "capture")
    world = stages.world if isinstance(stages_or_model, Stages) else axis
    names = set(match_modules(stages_or_model, pattern, axis=axis))
    captured = Capture(world=world.share, tp=stages.tp.share)
    with ExitStack() as stack:
        if any(map(_is_compiled, stages)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for place, stage in zip(get_stage_places(stages, stages.pp), stages, strict=True):
            pass_ = _Pass(captured, place.index)
            stack.callback(stage.register_forward_pre_hook(pass_.start).remove)
            for name, module in name_modules(stage).items():
                if name not in names:
                    continue
                captured.stages[name] = place.index
                if _has_shard_of_features(module):
                    captured.sharded.add(name)
                hook = partial(pass_.copy_output, name, gradients=gradients)
                stack.callback(module.register_forward_hook(hook).remove)
            stack.callback(stage.register_forward_hook(pass_.end).remove)
        yield captured


def _is_compiled(stage: nn.Module) -> bool:
    # `module.compile()` sets the attribute, and `torch.compile(module)` wraps the module.
    return any(
        vars(module).get("_compiled_call_impl") is not None or name.endswith("_orig_mod")
        for name, module in stage.named_modules()
    )


def _has_shard_of_features(module: nn.Module) -> bool:
    """Return whether tensor parallelism leaves a shard of the output's features on each rank."""
    style = getattr(getattr(module, "sharding", None), "style", None)
    return style is not None and bool(style.shard_dims) and style.on_output is None


@attrs.define(eq=False)
class _Pass:
    """The training passes of one stage: copies what its modules return in each of them."""

    captured: Capture
    stage: int
    microbatch: int | None = None  # None outside of a training pass
    seen: dict[str, int] = attrs.field(factory=dict)  # calls of each module in this pass

    def start(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.microbatch = self.captured.calls.get(self.stage, 0)
            self.captured.calls[self.stage] = self.microbatch + 1
            self.seen.clear()

    def end(self, *_: object) -> None:
        self.microbatch = None

    def copy_output(self, name: str, *call: Any, gradients: bool) -> None:
        # A trial of `recompute` computes a block once more, and its results are not used.
        if self.microbatch is None or is_trial():
            return
        *_, output = call
        number = self.seen.get(name, 0)
        self.seen[name] = number + 1
        suffix = f"/call_{number}" if number else ""
        end = f"{suffix}/microbatch_{self.microbatch}"
        for path, x in find_tensors(output).items():
            self.captured.tensors[f"{name}/output{path}{end}"] = _copy(x)
            if gradients and x.requires_grad:
                x.register_hook(partial(self.copy_gradient, f"{name}/grad{path}{end}"))

    def copy_gradient(self, key: str, gradient: Tensor) -> None:
        # A schedule that splits the backward pass comes here twice, with the same gradient.
        if key not in self.captured.tensors:
            self.captured.tensors[key] = _copy(gradient)


def _copy(x: Tensor) -> Tensor:
    # A copy on a CPU too, since the model may write into its tensors later.
    return get_local(x.detach()).to("cpu", copy=True).contiguous()


# ------------------------------------------------------------------------------------------- write


def write_capture(
    captured: Capture,
    folder: str | Path,
    microbatches: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write what this rank has captured to a safetensors file, and return its path.

    Args:
        captured: From `capture`, after its block.
        folder: Where to write, created if it does not exist; equal on all ranks.
        microbatches: This rank's microbatches, as they were passed to `forward_backward`. Without
            them, or if the model was called more or less often, tensors cannot be joined.

    Raises:
        DiskError: The file cannot be written.

    Effects:
        Writes `rank_00000.safetensors`: a tensor for each entry of `captured.tensors`, and for each
        microbatch its "token_index", which is -1 for padding.

    Examples:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Tanh())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with capture(model, "0") as captured:
        ...         _ = model(torch.zeros(1, 2))
        ...     write_capture(captured, folder, [{"token_index": torch.tensor([[0, 1]])}]).name
        'rank_00000.safetensors'
    """
    tensors = dict(captured.tensors)
    counts = {*captured.calls.values()}
    problem = None
    if not microbatches or any("token_index" not in batch for batch in microbatches):
        problem = "the microbatches were not given, or have no token_index"
    elif counts and counts != {len(microbatches)}:
        problem = f"the model was called {max(counts)} times for {len(microbatches)} microbatches"
    else:
        for i, batch in enumerate(microbatches):
            tensors[f"{_INDEX}/microbatch_{i}"] = _get_token_index(batch)
    facts = {
        "rank": captured.world.index,
        "world": captured.world.count,
        "tp": [captured.tp.index, captured.tp.count],
        "problem": problem,
        "sharded": sorted(captured.sharded),
        # A safetensors file has an order of its own.
        "order": [[key, captured.stages[_split_key(key)[0]]] for key in captured.tensors],
    }
    path = Path(folder) / f"rank_{captured.world.index:05d}.safetensors"
    with convert_disk_errors(path, by="write_capture"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, by="write_capture") as file:
            file.write(save(tensors, {"format": _FORMAT, "facts": json.dumps(facts)}))
    return path


def _get_token_index(batch: Mapping[str, Any]) -> Tensor:
    """Return the index in the global step of each token `[B, S]`, -1 for padding."""
    index = batch["token_index"].detach().cpu()
    # Padding is other tokens in another layout, where rows may be padded to other multiples.
    is_padding = batch["document_ids"].cpu() < 0 if "document_ids" in batch else index < 0
    return torch.where(is_padding, -1, index).contiguous()


def _split_key(key: str) -> tuple[str, str, int]:
    """Return the module of a tensor, its name without the microbatch, and the microbatch."""
    name, _, microbatch = key.rpartition("/microbatch_")
    return _KIND.sub("", name), name, int(microbatch)


# -------------------------------------------------------------------------------------------- join


class _File(NamedTuple):
    """What one rank has written."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


@attrs.frozen(eq=False)
class _Merged:
    """A tensor with one row for each token, or why there is none."""

    rows: Tensor | None = None
    is_copied: bool = False  # several ranks hold it equally
    why: str = ""


def join_captured(folder: str | Path) -> Joined:
    """Join the files of all ranks: one row for each token, the same in every layout.

    Rows of data, ring and Ulysses ranks, of tensor-parallel ranks that hold slices of the sequence,
    of microbatches and of stages are put in the order of the tokens in the global step. Rows that
    tensor-parallel ranks hold equally are taken once; the gradients of such an output may be
    partial on each of them, and are then summed.

    What has no row for each token cannot be joined, such as the tokens of one expert, sums over
    tokens, or outputs that are a shard of the features on each tensor-parallel rank (inside of an
    attention or MLP). It stays apart, by rank, with the reason.

    Args:
        folder: The folder that `write_capture` has written to on every rank.

    Raises:
        DataError: There is no file, that of a rank is missing, or one is damaged.

    Examples:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Tanh())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with capture(model, "0") as captured:
        ...         _ = model(torch.zeros(1, 2))
        ...     batch = {"token_index": torch.tensor([[5, 4]])}
        ...     _ = write_capture(captured, folder, [batch])
        ...     found = join_captured(folder)
        >>> found.tokens, found.joined
        (tensor([4, 5]), {'0/output': tensor([0., 0.])})
    """
    files = _read_files(Path(folder))
    indices = [x for file in files for key, x in file.tensors.items() if key.startswith(_INDEX)]
    tokens = torch.cat([x.flatten() for x in indices] or [torch.empty(0, dtype=torch.int64)])
    tokens = tokens[tokens >= 0].unique()
    found = Joined(tokens, {}, {}, {})
    problem = next((file.facts["problem"] for file in files if file.facts["problem"]), None)
    sharded = {module for file in files for module in file.facts["sharded"]}
    copied: set[str] = set()  # outputs that several ranks hold equally
    for name, parts in _group_parts(files).items():
        merged = _Merged(why=problem or "each rank has a shard of the features")
        if problem is None and _KIND.sub("", name) not in sharded:
            is_partial = _KIND.sub(r"/output\2", name) in copied
            merged = _merge_rows(_find_all_rows(files, parts), tokens, is_partial=is_partial)
        if merged.rows is None:
            found.apart[name], found.why[name] = parts, merged.why
            continue
        found.joined[name] = merged.rows
        if merged.is_copied:
            copied.add(name)
    return found


def _read_files(folder: Path) -> list[_File]:
    paths = sorted(folder.glob("rank_*.safetensors"))
    if not paths:
        raise DataError(f"join_captured: there is no rank_*.safetensors in {folder}", where=folder)
    files: list[_File] = []
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise DataError(f"join_captured: {path} is damaged: {error}", where=path) from error
        if metadata.get("format") != _FORMAT:
            raise DataError(
                f"join_captured: {path} is no file of write_capture",
                where=path,
                got=metadata.get("format"),
                want=_FORMAT,
            )
        files.append(_File(json.loads(metadata["facts"]), tensors))
    ranks = [file.facts["rank"] for file in files]
    worlds = {file.facts["world"] for file in files}
    if worlds != {len(ranks)} or ranks != [*range(len(ranks))]:
        raise DataError(
            f"join_captured: {folder} has files of the ranks {ranks}, but they are of "
            f"{' and of '.join(map(str, sorted(worlds)))} ranks; copy the files of all of them, "
            "and delete those of other runs",
            where=folder,
            got=ranks,
            want=max(worlds),
        )
    return files


def _group_parts(files: Iterable[_File]) -> dict[str, dict[tuple[int, int], Tensor]]:
    """Return {name: {(rank, microbatch): tensor}}: outputs as computed, then gradients."""
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    places: dict[str, tuple[bool, int, int]] = {}
    for file in files:
        for position, (key, stage) in enumerate(file.facts["order"]):
            _, name, microbatch = _split_key(key)
            parts.setdefault(name, {})[file.facts["rank"], microbatch] = file.tensors[key]
            kind = _KIND.search(name)
            is_gradient = kind is not None and kind[1] == "grad"
            # The backward pass begins at the last stage.
            place = is_gradient, -stage if is_gradient else stage, position
            places[name] = min(places.get(name, place), place)
    return {name: parts[name] for name in sorted(parts, key=lambda name: places[name])}


def _find_all_rows(
    files: Sequence[_File], parts: Mapping[tuple[int, int], Tensor]
) -> list[Rows] | None:
    """Return the rows of each part; None if one of them has no row for each token."""
    found: list[Rows] = []
    for (rank, microbatch), x in parts.items():
        tp = Share(*files[rank].facts["tp"])
        rows = find_rows(x, files[rank].tensors[f"{_INDEX}/microbatch_{microbatch}"], tp)
        if rows is None:
            return None
        is_token = rows.index >= 0
        found.append(Rows(rows.index[is_token], rows.rows[is_token]))
    return found


def _merge_rows(parts: Sequence[Rows] | None, tokens: Tensor, *, is_partial: bool) -> _Merged:
    """Return one row for each token; `is_partial` allows those of several ranks to be summed."""
    if parts is None:
        return _Merged(why="it has no row for each token")
    if len({(part.rows.dtype, part.rows.shape[1:]) for part in parts}) > 1:
        return _Merged(why="its rows have other shapes on other ranks")
    index, order = torch.cat([part.index for part in parts]).sort(stable=True)
    rows = torch.cat([part.rows for part in parts])[order]
    unique, groups, counts = index.unique_consecutive(return_inverse=True, return_counts=True)
    if not torch.equal(unique, tokens):
        return _Merged(why=f"it has rows for {len(unique)} of {len(tokens)} tokens")
    first = rows[counts.cumsum(0) - counts]
    copies = first[groups]
    is_equal = (rows == copies) | (rows.isnan() & copies.isnan())
    if bool(is_equal.all()):
        return _Merged(first, is_copied=len(first) < len(rows))
    if is_partial:
        return _Merged(torch.zeros_like(first).index_add_(0, groups, rows))
    return _Merged(why="ranks have different rows of a token, as of a shard of the features")
