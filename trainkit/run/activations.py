"""The outputs of modules in the training passes of a step: their tensors, rows and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn

from trainkit.batch.shards import contiguous_shard
from trainkit.parallel.grad_reduction import get_local
from trainkit.parallel.name_patterns import name_matches
from trainkit.parallel.parameters import name_modules
from trainkit.run.element_sums import merge_sums, sum_elements
from trainkit.types import SOLO, Hidden, Share, Stages


class Rows(NamedTuple):
    """Rows, and the token of each."""

    index: Tensor
    rows: Tensor


def find_tensors(output: Any, path: str = "") -> dict[str, Tensor]:
    """Return the tensors of a module's output, each with its path: "" if it is the output.

    Examples:
        >>> [*find_tensors((torch.ones(1), {"more": torch.ones(1)}))]
        ['.0', '.1.more']
    """
    if isinstance(output, Tensor):
        return {path: output}
    if isinstance(output, Hidden):  # its weight is a parameter
        return {f"{path}.hidden": output.hidden}
    if isinstance(output, Mapping):
        fields = [*output.items()]
    elif isinstance(output, (tuple, list)):
        fields = [*zip(getattr(output, "_fields", range(len(output))), output, strict=True)]
    else:
        return {}
    found: dict[str, Tensor] = {}
    for name, value in fields:
        found |= find_tensors(value, f"{path}.{name}")
    return found


def find_rows(x: Tensor, index: Tensor, tp: Share) -> Rows | None:
    """Return the rows of an output by its shape, where `index` `[B, S]` are a microbatch's tokens.

    It is `[B, S, ...]` or `[B * S, ...]`, where S may be divided by tp (sequence-parallel norms).

    Examples:
        >>> find_rows(torch.ones(1, 2, 3), torch.tensor([[4, 5, 6, 7]]), Share(1, 2)).index
        tensor([6, 7])
    """
    has_slices = index.shape[1] % tp.count == 0
    for part in (index, contiguous_shard(index, tp) if has_slices else index):
        if x.shape[:2] == part.shape:
            return Rows(part.flatten(), x.flatten(0, 1))
        if x.ndim and len(x) == part.numel():
            return Rows(part.flatten(), x)
    return None


@attrs.define(eq=False)
class Activations:
    """The sums of what blocks have returned, by token. Made by `watch_activations`.

    Attributes:
        names: The names of this rank's blocks in the whole model.
    """

    is_due: Callable[[], bool]
    tp: Share = SOLO.share
    names: list[str] = attrs.field(factory=list)
    # Of each stage, its passes in order: the sums of a block for each token. By token, as which
    # tokens are padding stands in the batch, and a module does not see the batch.
    _passes: dict[int, list[dict[str, Tensor]]] = attrs.field(factory=dict)
    _open: dict[str, Tensor] | None = None  # of the pass that is under way

    def clear(self) -> None:
        """Forget all passes."""
        self._passes.clear()

    def tabulate(self, microbatches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the sums of each block over this rank's tokens, fp64 `[5]`, without padding.

        Args:
            microbatches: This rank's microbatches of the step. Padding is where "document_ids",
                or else "token_index", is below 0; without either all tokens count. If a stage was
                called more often, as by a step that is taken again, the last calls count.
        """
        found: dict[str, list[Tensor]] = {}
        for passes in self._passes.values():
            last = passes[max(0, len(passes) - len(microbatches)) :]
            for sums_by_name, batch in zip(last, microbatches, strict=False):
                for name, sums in sums_by_name.items():
                    found.setdefault(name, []).append(self._sum_tokens(sums, batch))
        return {name: merge_sums(torch.stack(parts)) for name, parts in found.items()}

    def _sum_tokens(self, sums: Tensor, batch: Mapping[str, Any]) -> Tensor:
        index = batch.get("document_ids", batch.get("token_index"))
        if index is None:
            return merge_sums(sums.reshape(-1, 5))
        found = find_rows(sums, index.to(sums.device), self.tp)
        if found is None:
            return sums.new_zeros(5)
        # Where ranks of tp hold equal rows, every token counts equally often.
        return merge_sums(found.rows[found.index >= 0].reshape(-1, 5))

    def start(self, stage: int, *_: object) -> None:
        """Begin a pass of a stage, if it is a training pass that is due."""
        self._open = None
        if torch.is_grad_enabled() and self.is_due():
            self._open = {}
            self._passes.setdefault(stage, []).append(self._open)

    def end(self, *_: object) -> None:
        """End the pass that is under way."""
        self._open = None

    def add(self, name: str, output: Any) -> None:
        """Add the sums of what a block has returned to the pass that is under way."""
        if self._open is None:
            return
        for x in find_tensors(output).values():
            local = get_local(x.detach())
            if local.ndim > 1 and local.numel():
                # Over those of a trial of `recompute`, which computes a block before it counts.
                self._open[name] = sum_elements(local)
            return  # the first is the hidden state


@contextmanager
def watch_activations(
    stages: Stages, blocks: str, *, is_due: Callable[[], bool]
) -> Iterator[Activations]:
    """Sum what blocks return in the training passes of a `with` block that are due.

    A training pass is a call of a stage with gradients enabled, so neither evaluation nor
    recomputation counts. Compiled blocks stay compiled; blocks inside a model that is compiled as
    a whole are not seen, and have no name in the result.

    Args:
        stages: This rank's stages.
        blocks: The name pattern of the blocks, as that of `fsdp`.
        is_due: Called before each pass.

    Effects:
        Hooks the blocks and their stages for the length of the `with` block; no host sync.
    """
    found = Activations(is_due, stages.tp.share)
    with ExitStack() as stack:
        for number, stage in enumerate(stages):
            named = _find_blocks(stage, blocks)
            if not named:  # a hook could make a stage that is compiled as a whole compile anew
                continue
            found.names += named
            stack.callback(stage.register_forward_pre_hook(partial(found.start, number)).remove)
            for name, block in named.items():
                _call_after(block, partial(found.add, name), stack)
            stack.callback(stage.register_forward_hook(found.end).remove)
        yield found


def _find_blocks(stage: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the blocks of a stage whose hooks are called, by their names in the whole model."""
    if vars(stage).get("_compiled_call_impl") is not None:
        return {}
    # What `torch.compile(module)` has wrapped calls no hook.
    compiled = {part for path, part in stage.named_modules() if "_orig_mod" in path}
    return {
        name: module
        for name, module in name_modules(stage).items()
        if module not in compiled and name_matches(name, pattern)
    }


def _call_after(module: nn.Module, function: Callable[[Any], None], stack: ExitStack) -> None:
    """Call a function with what a module returns, until the stack is closed."""
    compiled = vars(module).get("_compiled_call_impl")
    if compiled is None:
        hook = module.register_forward_hook(lambda *call: function(call[-1]))
        stack.callback(hook.remove)
        return

    # Outside of what `module.compile()` has compiled: a hook may make it compile anew.
    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        function(output)
        return output

    vars(module)["_compiled_call_impl"] = call
    stack.callback(vars(module).update, _compiled_call_impl=compiled)
