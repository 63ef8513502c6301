"""The records and function types that every other file shares.

Records are immutable (`attrs.frozen`) and hold values, never behaviour beyond reading themselves.
Function types are protocols: any function of that signature plugs in, no base class, no
registration. This file imports no torch at run time, so that packing and planning tools start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

IGNORED_LABEL = -100
"""The label of a position that is not trained on (the value `torch.nn.functional.cross_entropy`
ignores).
"""

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
"""A one-dimensional int64 numpy array on the host."""


# ------------------------------------------------------------------------------------------ errors


class TrainkitError(ValueError):
    """Bad input, with what a user needs to mend it; `code` is the exit code of a recipe it ends.

    A plain `ValueError` means a bad argument (exit code 64). The subclasses name what else can be
    at fault. `where` is a path, field or parameter; `got` and `want` say what was found and what
    was asked; `hint` says what to do.
    """

    code = 64

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        want: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.got, self.want, self.hint = what, where, got, want, hint


class ConfigError(TrainkitError):
    """The configuration or the environment is wrong (exit code 64)."""


class DataError(TrainkitError):
    """A corpus, or a file of one, is missing, damaged or not what it says it is (exit code 65)."""

    code = 65


class CheckpointError(TrainkitError):
    """A checkpoint is missing, damaged, or does not fit the run (exit code 66)."""

    code = 66


class NumericsError(TrainkitError):
    """Numbers are not finite, or have left what training may do (exit code 67)."""

    code = 67


class PeerError(TrainkitError):
    """Another rank has failed, has gone, or is stuck (exit code 68)."""

    code = 68


class PreemptedError(TrainkitError):
    """The run was told to stop and could not be saved (exit code 76)."""

    code = 76


class DiskError(TrainkitError):
    """A file could not be written (exit code 74)."""

    code = 74


# ------------------------------------------------------------------------------------- parallelism


@attrs.frozen
class Share:
    """Which part of how many: part `index` of `count` equal parts."""

    index: int
    count: int


@attrs.frozen
class Place:
    """Which part of a global batch a rank holds: by default all of it.

    `rows` says which of the ranks that read different rows this is, `ring` which part of each
    document it holds, `ulysses` which slice of that. `ps.place` is the place of a rank.
    """

    rows: Share = Share(0, 1)
    ring: Share = Share(0, 1)
    ulysses: Share = Share(0, 1)


@attrs.frozen(eq=False)
class Axis:
    """A share plus the right to talk: one named dimension of the layout, seen from one rank.

    `group` and `mesh` are None when `count` is 1, and then every collective on the axis is the
    identity.
    """

    name: str
    share: Share
    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    @property
    def index(self) -> int:
        """This rank's position on the axis."""
        return self.share.index

    @property
    def count(self) -> int:
        """The number of ranks on the axis."""
        return self.share.count


SOLO = Axis("solo", Share(0, 1))
"""An axis of size 1, for a loop that has no such axis."""


@attrs.frozen(eq=False)
class ParallelState:
    """All axes of a layout, seen from one rank.

    world = pp x dp_replicate x dp_shard x ring x ulysses x tp, outermost first. Derived axes: `dp`
    = dp_replicate x dp_shard (ranks that read different rows), `sp` = ring x ulysses, `loss` = dp x
    sp (ranks that hold distinct tokens), `fsdp` = what parameters are sharded over (dp_shard, and
    the part of sp that `fold_sp` names), `sp_unfolded` = the rest of sp, `fsdp` = ep x expert_fsdp.
    An axis that is not used has size 1, never None.
    """

    world: Axis
    pp: Axis
    dp: Axis
    dp_replicate: Axis
    dp_shard: Axis
    sp: Axis
    ring: Axis
    ulysses: Axis
    tp: Axis
    ep: Axis
    fsdp: Axis
    expert_fsdp: Axis
    loss: Axis
    sp_unfolded: Axis
    mesh: DeviceMesh | None
    device: torch.device

    @property
    def place(self) -> Place:
        """Which part of a global batch this rank holds."""
        return Place(self.dp.share, self.ring.share, self.ulysses.share)


class Hidden(NamedTuple):
    """What stands for logits that are never made: a decoder with `head="hidden"` returns it.

    `hidden` is `[B, S, D]`; `weight` are the rows of the output weight `[V / N, D]` that this rank
    of `axis` has, in rank order. `hidden @ weight.T` are the logits of their words. (A tuple, so
    that FSDP finds the tensors in it.)
    """

    hidden: Tensor
    weight: Tensor
    axis: Axis = SOLO


# -------------------------------------------------------------------------------------------- data


@attrs.frozen(eq=False)
class Bins:
    """Which pieces of which documents fill which row, as a CSR table of int64 arrays.

    Row `b` holds the pieces `offsets[b]:offsets[b + 1]`. A piece is `lengths[p]` tokens of document
    `documents[p]` from token `starts[p]` on, before alignment: in the row it takes the next
    multiple of `multiple_of`. There are no empty pieces, and no row takes more than `capacity`
    tokens.
    """

    offsets: IntArray
    documents: IntArray
    starts: IntArray
    lengths: IntArray
    capacity: int
    multiple_of: int = 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[tuple[int, int, int]]:
        """Return the pieces of row `index` as (document, start, length)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        part = slice(self.offsets[index], self.offsets[index + 1])
        columns = self.documents[part], self.starts[part], self.lengths[part]
        return list(zip(*(column.tolist() for column in columns), strict=True))


@attrs.frozen(eq=False)
class Sample:
    """One document with a choice: which of its tokens are trained on.

    `tokens` is int64 `[N]`, `trained` bool `[N]`. A token that is trained is one that the model
    learns to predict from those before it.
    """

    tokens: IntArray
    trained: np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class Spans:
    """The documents of a batch over its flattened rows; the padding of a row is short spans too.

    `cu_seqlens` (int32 `[N+1]`, on the batch's device) and `lengths` (int64 numpy, on the host) say
    the same. Both are made at collation, so that no kernel needs a host sync to know a length.
    """

    cu_seqlens: Tensor
    lengths: IntArray
    max_length: int


BATCH_TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")
"""The tensors that every `Batch` has, in its order."""


@attrs.frozen(eq=False)
class Batch(Mapping[str, Any]):
    """One microbatch. Functions read `batch["labels"]`, so a plain dict serves as well.

    All tensors are int64 `[B, S]`. `labels` are already shifted; the ignored label is -100.
    `position_ids` restart in every piece. `document_ids` count the pieces of a row; -1 is row
    padding, and alignment padding belongs to its piece. `token_index` is the index of the token in
    the global step. `extra` holds further tensors whose first two dimensions are the same: weights,
    advantages, noise keys; as a mapping, a batch shows them beside its own fields.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor
    token_index: Tensor
    spans: Spans
    extra: Mapping[str, Tensor] = attrs.field(factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name in BATCH_TENSORS or name == "spans":
            return getattr(self, name)
        return self.extra[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*BATCH_TENSORS, "spans", *self.extra))

    def __len__(self) -> int:
        return len(BATCH_TENSORS) + 1 + len(self.extra)

    # A Mapping compares by items, which is ambiguous for tensors: batches compare by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@attrs.frozen
class Cursor:
    """Where the next step begins in the data: equal on all ranks, independent of the layout.

    `batch` is the next global batch; `stream` holds the integers that an online source needs to go
    on.
    """

    batch: int = 0
    stream: tuple[int, ...] = ()


@attrs.frozen(eq=False)
class StepBatch:
    """The input of one step on this rank, and where the next step begins.

    Every rank has the same number of microbatches, at least one: rows that do not divide are filled
    with blank ones.
    """

    microbatches: Sequence[Batch]
    cursor: Cursor


@attrs.frozen(eq=False)
class TrainState:
    """The counters of a run; moves by `attrs.evolve`.

    `tokens` counts the trained tokens and may stay an int64 scalar on the device until someone
    prints it. `health` holds the numbers that a health policy remembers between steps, plain floats
    and lists of them.
    """

    step: int = 0
    tokens: int | Tensor = 0
    cursor: Cursor = Cursor()
    health: Mapping[str, float | Sequence[float]] = attrs.field(factory=dict)


# ---------------------------------------------------------------------------------- function types


class Corpus(Protocol):
    """Documents of tokens; document i is `tokens[offsets[i]:offsets[i + 1]]`.

    Two attributes are optional. `trained`, as long as `tokens`, is 0 for tokens that no label shall
    ask for. `parts` are corpora whose documents follow one another; a corpus that has them may do
    without flat `tokens`.
    """

    @property
    def lengths(self) -> IntArray: ...
    @property
    def tokens(self) -> np.ndarray[Any, Any]: ...
    @property
    def offsets(self) -> IntArray: ...
    def read(self, document: int, start: int, length: int) -> np.ndarray[Any, Any]: ...


class Tokenizer(Protocol):
    """Anything that turns text into token ids and back."""

    def encode(self, text: str) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


RowsAt = Callable[[int], IntArray]
"""`RowsAt(batch) -> rows`: the rows that make up a global batch, as a function of its number.

The number is `Cursor.batch`, which no roll-back takes back, not the step of the run.
"""


class Fit(Protocol):
    """Which bin each document goes to: int64 `[N]`, bins numbered from 0 without gaps."""

    def __call__(
        self, lengths: IntArray, capacity: int, *, max_documents: int | None
    ) -> IntArray: ...


class Split(Protocol):
    """The part of a tensor that a share holds, along `dim`; per document with `cu_seqlens`."""

    def __call__(
        self, x: Tensor, share: Share, *, dim: int = 1, cu_seqlens: Any = None
    ) -> Tensor: ...


class Attend(Protocol):
    """Causal attention inside each span; k and v are `[B,S,K,D]`, where K divides H."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, scale: float | None = None
    ) -> Tensor: ...


Loss = Callable[[Any, Mapping[str, Any]], "tuple[Tensor, dict[str, Tensor]]"]
"""`Loss(output, batch) -> (sum, {name: sum})`; its attribute `terms` is the tuple of the names it
reports.
"""

Call = Callable[["nn.Module", Mapping[str, Any]], Any]
"""`Call(model, batch) -> output`: how a batch enters a model."""

ModelTransform = Callable[["nn.Module", ParallelState], "nn.Module"]
"""`ModelTransform(module, ps) -> module`: one entry of a plan; may change the module in place."""

Weights = Callable[[str, Sequence[int], Sequence[int]], "Tensor"]
"""`Weights(name, shape, offset) -> Tensor`: the box of a parameter that begins at `offset` and has
`shape`.
"""

Schedule = Callable[[int], float]
"""`Schedule(step) -> float`: a pure function of the step."""

Sink = Callable[[int, Mapping[str, Any]], None]
"""`Sink(step, values) -> None`: where metrics go."""


class ForwardBackward(Protocol):
    """One step's forward and backward: adds to `.grad`, returns undivided sums."""

    def __call__(
        self, microbatches: Sequence[Mapping[str, Any]], *, denominator: Tensor
    ) -> dict[str, Tensor]: ...
