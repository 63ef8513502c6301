"""The records and function types that every other file shares.

Records are immutable (`attrs.frozen`) and hold values, never behaviour beyond reading themselves.
Function types are protocols: any function of that signature plugs in, no base class, no
registration. This file imports no torch at run time, so that packing and planning tools start fast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, overload

import attrs
import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

IGNORED_LABEL = -100
"""The label of tokens outside the loss, which `torch.nn.functional.cross_entropy` ignores."""

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
"""A one-dimensional int64 numpy array on the host."""


# ------------------------------------------------------------------------------------------ errors


class TrainkitError(ValueError):
    """Bad input, described so that a user can fix it; `code` is the exit code of a recipe.

    A plain `ValueError` means a bad argument (exit code 64). Subclasses name other causes.

    Args:
        what: The sentence that people read. A hint that it does not contain is appended to it.
        where: A path, field or parameter.
        got: The value that was found.
        want: The value that was expected.
        hint: What to do about it.
        step: The step that is at fault, where it is not the last one with metrics.

    Examples:
        >>> error = ConfigError("pp must be above 0, got 0", hint="leave --pp away")
        >>> str(error)
        'pp must be above 0, got 0: leave --pp away'
        >>> error.what, error.hint
        ('pp must be above 0, got 0', 'leave --pp away')
    """

    # Codes start at 64 as in sysexits.h, whose EX_USAGE is 64, EX_DATAERR 65 and EX_IOERR 74.
    code = 64

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        want: object = None,
        hint: str | None = None,
        step: int | None = None,
    ) -> None:
        # A traceback of Python shows only this text, so it has the hint as well.
        super().__init__(what if hint is None or hint in what else f"{what}: {hint}")
        self.what = what
        self.where = where
        self.got = got
        self.want = want
        self.hint = hint
        self.step = step


def format_error(error: BaseException, *, most: int = 8000, hint: bool = True) -> str:
    """Return the message of an error, truncated to `most` characters; never raises.

    Args:
        error: Any exception.
        most: The number of characters to keep.
        hint: Off, the hint of a TrainkitError is left out, for callers that show it separately.

    Examples:
        >>> format_error(ValueError("lr must be positive"))
        'lr must be positive'
        >>> format_error(ValueError("x" * 10**6), most=3)
        'xxx ... (1000000 characters)'
    """
    try:
        # str() of a foreign exception may itself raise.
        text = str(error) if hint or not isinstance(error, TrainkitError) else str(error.what)
    except Exception as again:  # noqa: BLE001 (a class of a user)
        return f"(its text cannot be shown: __str__ raised {type(again).__name__})"
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


class ConfigError(TrainkitError):
    """The configuration or the environment is wrong (exit code 64)."""


class DataError(TrainkitError):
    """A corpus, or a file of one, is missing, damaged or inconsistent (exit code 65)."""

    code = 65


class CheckpointError(TrainkitError):
    """A checkpoint is missing, damaged, or does not fit the run (exit code 66)."""

    code = 66


class NumericsError(TrainkitError):
    """Numbers are not finite, or training has diverged (exit code 67)."""

    code = 67


class PeerError(TrainkitError):
    """Another rank has failed, has exited, or hangs (exit code 68)."""

    code = 68


class PreemptedError(TrainkitError):
    """A stop was requested, and the run could not be saved (exit code 76)."""

    code = 76


class DiskError(TrainkitError):
    """A file could not be written (exit code 74)."""

    code = 74


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Replace the ImportError of an optional library by an error with the command to install it.

    Raises:
        ConfigError: In place of the ImportError.

    Examples:
        >>> with needs_extra("recipes"):
        ...     import no_such_library
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: no_such_library is missing: pip install "trainkit-lm[recipes]"
    """
    try:
        yield
    except ImportError as error:
        # `name` is the module that is missing, which may be one that the library itself imports.
        raise ConfigError(
            f"{error.name} is missing",
            where=error.name,
            hint=f'pip install "trainkit-lm[{extra}]"',
        ) from error


def check_range(
    function: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    **arguments: float | None,
) -> None:
    """Raise ValueError unless all arguments are finite numbers within a range.

    Args:
        function: The function, for the message.
        at_least: The inclusive lower bound.
        above: The exclusive lower bound.
        at_most: The inclusive upper bound.
        below: The exclusive upper bound.
        arguments: The values by name; None, an argument that was not given, is always valid.

    Raises:
        ValueError: A value is NaN, infinite or out of range; the message names all arguments.

    Examples:
        >>> check_range("make_padding_batch", at_least=1, rows=0, length=4)
        Traceback (most recent call last):
        ...
        ValueError: make_padding_batch: rows and length must be at least 1, got 0 and 4
        >>> check_range("dpo", at_least=0, below=0.5, label_smoothing=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: dpo: label_smoothing must be finite, at least 0 and below 0.5, got nan
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    values = [value for value in arguments.values() if value is not None]
    # Infinity would pass a bound on one side, and the text of the error should say so.
    is_finite = all(map(math.isfinite, values))
    if is_finite and all(
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
        for value in values
    ):
        return
    conditions = [] if is_finite else ["finite"]
    conditions += [f"{name} {bound}" for name, bound in bounds.items() if bound is not None]
    # There is at least one: "finite", or a bound that a value breaks.
    *first, last = conditions
    raise ValueError(
        f"{function}: {' and '.join(arguments)} must be "
        f"{', '.join(first)}{' and ' if first else ''}{last}, got "
        f"{' and '.join(map(str, arguments.values()))}"
    )


def check_choice(choices: Sequence[str], by: str, **arguments: str) -> None:
    """Raise ValueError unless all arguments of the function `by` are among `choices`.

    Raises:
        ValueError: An argument is not; the message names it.

    Examples:
        >>> check_choice(["error", "drop"], "pack_pairs", overlong="split")
        Traceback (most recent call last):
        ...
        ValueError: pack_pairs: overlong must be "error" or "drop", got 'split'
    """
    for name, value in arguments.items():
        if value not in choices:
            options = " or ".join(f'"{choice}"' for choice in choices)
            raise ValueError(f"{by}: {name} must be {options}, got {value!r}")


# -------------------------------------------------------------------------------- attrs validators

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]
"""The type of an attrs validator."""


def satisfies(holds: Callable[[Any], bool], want: str) -> Validator:
    """Return an attrs validator of a condition, which `want` describes after "must be".

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     size: int = attrs.field(
        ...         default=2, validator=satisfies(lambda x: x % 2 == 0, "even")
        ...     )
        >>> Config(3)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: size must be even, got 3
    """

    def validate(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise ConfigError(
                f"{attribute.name} must be {want}, got {value!r}",
                where=attribute.name,
                got=value,
                want=want,
            )

    return validate


def one_of(*choices: Any) -> Validator:
    """Return an attrs validator: the value is one of `choices`.

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     kernel: str = attrs.field(default="sdpa", validator=one_of("sdpa", "varlen"))
        >>> Config("sdp")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: kernel must be one of 'sdpa', 'varlen', got 'sdp'
    """
    return satisfies(lambda value: value in choices, f"one of {', '.join(map(repr, choices))}")


# NaN fails all three, as every comparison with it is false.
positive = satisfies(lambda value: value > 0, "above 0")
"""An attrs validator: the value is above 0."""
non_negative = satisfies(lambda value: 0 <= value < math.inf, "at least 0 and finite")
"""An attrs validator: the value is at least 0 and finite."""
fraction = satisfies(lambda value: 0 <= value <= 1, "between 0 and 1")
"""An attrs validator: the value is between 0 and 1."""


# ------------------------------------------------------------------------------------- parallelism

Kernel = Literal["varlen", "flash", "efficient", "cudnn", "flex", "sdpa", "math"]
"""Attention kernels by name, for `attention.choose_kernel`: `varlen`, torch's flash kernel with all
documents in one call; `flash`, `efficient` and `cudnn`, that kernel of torch's
`scaled_dot_product_attention`, with a call for each document; `flex`, FlexAttention; `sdpa`, any
kernel of torch's; `math`, products and a softmax, on any device."""

FoldSP = Literal["all", "ring", "ulysses", "none"]
"""The axes of ring and ulysses over which parameters are sharded too."""


def _degree(default: int = 1) -> Any:
    # Only dp_shard can be -1, as one degree at most can follow from the others.
    above = satisfies(lambda value: value > 0 or value == -1, "above 0, or -1 for the rest")
    validator = above if default == -1 else positive
    return attrs.field(default=default, validator=validator, metadata={"degree": True})


# The only declaration of the degrees; other code iterates over `degrees` and `axes`, and names one
# where it means that one alone.
@attrs.frozen(kw_only=True)
class Layout:
    """The parallel layout of a run, which never changes the result.

    The degrees stand first, outermost first: world = pp x dp_replicate x dp_shard x ring x ulysses
    x tp. ep is a factor of the ranks that parameters are sharded over.

    Examples:
        >>> Layout(tp=2).degrees
        {'pp': 1, 'dp_replicate': 1, 'dp_shard': -1, 'ring': 1, 'ulysses': 1, 'tp': 2, 'ep': 1}
        >>> layout = Layout(dp_shard=2, ring=4, fold_sp="none")
        >>> print(layout, layout.world, layout.count("fsdp"))
        dp_shard 2 x ring 4, fold none 8 2
        >>> Layout(pp=0)
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: pp must be above 0, got 0
    """

    pp: int = _degree()
    """Pipeline stages."""

    dp_replicate: int = _degree()
    """Replicas of the parameters, each with different rows."""

    dp_shard: int = _degree(-1)
    """Ranks that split parameters and rows between them; -1 takes the rest of the world."""

    ring: int = _degree()
    """Ranks that split a row's tokens and pass keys and values around."""

    ulysses: int = _degree()
    """Ranks that split a row's tokens and exchange them for heads."""

    tp: int = _degree()
    """Ranks that split each matrix (tensor parallelism)."""

    ep: int = _degree()
    """Ranks that split the experts; they are among those that shard parameters."""

    ep_adjacent: bool = True
    """Place the ranks of ep next to each other: the all-to-all of tokens is fastest inside a node.
    If False, those of expert_fsdp: for experts that are larger than the tokens sent to them."""

    fold_sp: FoldSP = attrs.field(default="all", validator=one_of("all", "ring", "ulysses", "none"))
    """The axes of ring and ulysses that shard parameters too; others all-reduce gradients."""

    schedule: str = "1f1b"
    """The order of a pipeline's work: gpipe, 1f1b, interleaved_1f1b, looped_bfs, and others."""

    reduce: Literal["last", "each"] = attrs.field(default="last", validator=one_of("last", "each"))
    """After which microbatch gradients are reduced; each needs less memory, and sends more."""

    reshard_after_forward: bool = True
    """Gather a block's parameters again for backward; zero-bubble schedules need it off."""

    reshard_over: int = attrs.field(default=0, validator=non_negative)
    """After forward, keep a block's parameters sharded over this many neighboring ranks, such as
    those of a node, so that backward gathers inside the node; 0 for all ranks that shard it."""

    prefetch: int = attrs.field(default=0, validator=non_negative)
    """Blocks to gather ahead of the one that computes, in forward and in backward; 0 leaves it to
    FSDP: the next one, in backward."""

    separate_ends: bool = False
    """Gather the embedding, and the last norm with the head, only while they are needed, not
    through the whole step; tied ones stay together."""

    cpu_offload: bool = False
    """Keep sharded parameters and the optimizer's state in host memory, and step there."""

    def __str__(self) -> str:
        big = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1]
        # A fold says something only if an axis that it leaves out has ranks.
        fold = f", fold {self.fold_sp}" if self.count("sp_unfolded") > 1 else ""
        strided = "" if self.ep_adjacent else ", ep strided"
        return (" x ".join(big) or "solo") + fold + strided

    @property
    def degrees(self) -> dict[str, int]:
        """All degrees by name, outermost first; ep last, which is no factor of the world."""
        # The metadata of `_degree` marks them, so that a new degree is one new field.
        names = [field.name for field in attrs.fields(Layout) if "degree" in field.metadata]
        return {name: getattr(self, name) for name in names}

    @property
    def axes(self) -> Mapping[str, tuple[str, ...]]:
        """The degrees whose product each axis is, outermost first; see `ParallelState`."""
        return _make_axes(self.fold_sp)

    def count(self, axis: str) -> int:
        """Return the number of ranks on an axis, where a dp_shard of -1 counts 1; see `over`."""
        return math.prod(max(1, getattr(self, name)) for name in self.axes[axis])

    @property
    def expert_axes(self) -> dict[str, int]:
        """The axes that experts make of fsdp, and their ranks: neighbours are on the last one."""
        # The last axis varies fastest over ranks.
        sizes = {"expert_fsdp": max(1, self.count("fsdp") // self.ep), "ep": self.ep}
        return sizes if self.ep_adjacent else dict(reversed(sizes.items()))

    @property
    def world(self) -> int:
        """The number of ranks, where a dp_shard of -1 counts 1."""
        return self.count("world")

    @property
    def wrapped(self) -> int:
        """Number of ranks in FSDP's mesh, replicas included; 1 means that nothing is wrapped."""
        return self.count("dp_replicate") * self.count("fsdp")

    def over(self, world: int) -> Layout:
        """Return the layout for a world size, with dp_shard = -1 filled in.

        Raises:
            ConfigError: The degrees do not multiply to the world, or `ep` does not divide the ranks
                that parameters are sharded over.

        Examples:
            >>> Layout(dp_replicate=2).over(8).dp_shard
            4
        """
        # self.world counts a dp_shard of -1 as 1, so that the quotient is what is left for it.
        remaining = max(world // self.world, 1) if self.dp_shard == -1 else self.dp_shard
        filled = attrs.evolve(self, dp_shard=remaining)
        if filled.world != world:
            degrees = ((name, getattr(filled, name)) for name in self.axes["world"])
            text = " x ".join(f"{name} {degree}" for name, degree in degrees)
            raise ConfigError(
                f"the degrees multiply to {filled.world} ({text}), but there are {world} "
                f"processes; start {filled.world} of them, or change a degree",
                where="degrees",
                got=filled.world,
                want=world,
            )
        fsdp = filled.count("fsdp")
        # Checked here, as a dp_shard of -1 has its value only now.
        if fsdp % self.ep:
            raise ConfigError(
                f"ep {self.ep} does not divide the {fsdp} ranks that parameters are sharded over "
                f"(dp_shard, with fold_sp={self.fold_sp!r})",
                where="ep",
                got=self.ep,
                want=f"a divisor of {fsdp}",
            )
        return filled


@attrs.frozen(kw_only=True)
class Precision:
    """The dtypes of parameters, computation, reductions and optimizer moments.

    Examples:
        >>> print(Precision(), "-", Precision(compute="bf16", moments="8bit"))
        fp32 - bf16 (parameters fp32, sums fp32, moments 8bit)
        >>> Precision(compute="fp16", storage="bf16")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: compute must be auto, fp32 or bf16 where storage is bf16, ...
    """

    storage: Literal["fp32", "bf16"] = attrs.field(
        # `run.config` reads the metadata: a checkpoint has the parameters in one dtype.
        default="fp32",
        validator=one_of("fp32", "bf16"),
        metadata={"on_resume": "refuse"},
    )
    """The dtype of parameters; in bf16 the optimizer rounds them stochastically, or with
    --optimizer-options rounding=kahan by Kahan summation."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = attrs.field(default="auto")
    """The dtype of computation; auto is bf16 on a GPU and fp32 on a CPU; fp16 scales the loss."""

    reduction: Literal["fp32", "bf16"] = attrs.field(
        default="fp32", validator=one_of("fp32", "bf16")
    )
    """The dtype of FSDP's gradient reduction; other reductions are in fp32."""

    moments: Literal["fp32", "bf16", "8bit"] = attrs.field(
        default="fp32", validator=one_of("fp32", "bf16", "8bit")
    )
    """The dtype of the optimizer's moments."""

    @compute.validator
    def _check_compute(self, _: object, value: str) -> None:
        choices = ["auto", "fp32", "bf16", *(["fp16"] if self.storage == "fp32" else [])]
        if value not in choices:
            where = "" if self.storage == "fp32" else f" where storage is {self.storage}"
            raise ConfigError(
                f"compute must be {', '.join(choices[:-1])} or {choices[-1]}{where}, got {value!r}",
                where="compute",
                got=value,
                want=choices,
            )

    def __str__(self) -> str:
        # fp32 throughout needs no details.
        others = self.storage, self.reduction, self.moments
        if {self.compute, *others} <= {"auto", "fp32"}:
            return "fp32"
        return "{} (parameters {}, sums {}, moments {})".format(self.compute, *others)


@attrs.frozen(kw_only=True)
class Numerics:
    """The exactness and determinism of a process's arithmetic.

    Examples:
        >>> print(Numerics(matmul="high"))
        products of fp32 high, algorithms any
    """

    matmul: Literal["highest", "high", "medium"] = attrs.field(
        default="highest", validator=one_of("highest", "high", "medium")
    )
    """The precision of fp32 matrix products: highest is fp32, high TF32, medium bf16."""

    deterministic: bool = False
    """Take only algorithms that give the same bits each time, which all do on a CPU."""

    def __str__(self) -> str:
        kind = "deterministic" if self.deterministic else "any"
        return f"products of fp32 {self.matmul}, algorithms {kind}"


# There are four values of `fold_sp`, and every count of an axis asks for one.
@cache
def _make_axes(fold_sp: FoldSP) -> Mapping[str, tuple[str, ...]]:
    # All degrees but ep, which is a factor of fsdp and not of the world.
    world = tuple(Layout().degrees)[:-1]
    dp = ("dp_replicate", "dp_shard")
    sp = ("ring", "ulysses")
    folded = tuple(name for name in sp if fold_sp in (name, "all"))
    return {
        "world": world,
        "dp": dp,
        "sp": sp,
        "loss": (*dp, *sp),
        "fsdp": ("dp_shard", *folded),
        "sp_unfolded": tuple(name for name in sp if name not in folded),
        **{name: (name,) for name in world},
    }


@attrs.frozen(kw_only=True)
class BatchShape:
    """The shape of a step's batch: the number and length of rows; see `pack_bins`."""

    row_length: int
    """Tokens in a row."""

    rows: int
    """Rows in a step, over all ranks."""

    microbatch: int = 1
    """Rows in a microbatch on a rank."""

    multiple_of: int = 1
    """The lengths of pieces in a row are rounded up to a multiple of this."""


@attrs.frozen
class Share:
    """Part `index` of `count` equal parts."""

    index: int
    count: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"Share: there is no part {self.index} of {self.count}")


@attrs.frozen
class DataShard:
    """The shard of a global batch on a rank; by default everything.

    `rows` is the share of the rows, `ring` the share of each document, `ulysses` the slice of that.
    `ps.data_shard` is the shard of a rank.
    """

    rows: Share = Share(0, 1)
    ring: Share = Share(0, 1)
    ulysses: Share = Share(0, 1)


def _set_fields(record: object, **fields: Any) -> None:
    """Set fields of a frozen record in its own `__init__`, which torch.compile can trace."""
    for name, value in fields.items():
        # A frozen class's own __setattr__ raises.
        object.__setattr__(record, name, value)


# Records with tensors, arrays or groups compare by identity: `==` of two arrays is no bool.
@attrs.frozen(eq=False)
class Axis:
    """A mesh axis seen from one rank: its name, index, size and process group.

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


@attrs.frozen(eq=False, init=False)
class VocabularyAxis(Axis):
    """An axis over which a vocabulary is sharded, with the number of words of each rank.

    Every loss takes one in place of a plain axis, whose ranks have to exchange the sizes first.
    Shards may differ in size, and may be empty.
    """

    words: tuple[int, ...] = attrs.field(kw_only=True)

    def __init__(
        self,
        name: str,
        share: Share,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        *,
        words: tuple[int, ...],
    ) -> None:
        _set_fields(self, name=name, share=share, group=group, mesh=mesh, words=words)

    @property
    def first(self) -> int:
        """The index of this rank's first word."""
        return sum(self.words[: self.index])

    @property
    def total(self) -> int:
        """The size of the vocabulary."""
        return sum(self.words)

    @property
    def largest(self) -> int:
        """The size of the largest shard, at least 1."""
        return max(1, *self.words)


SOLO = Axis("solo", Share(0, 1))
"""An axis of size 1, for a loop that has no such axis."""


@attrs.frozen(eq=False)
class ParallelState:
    """All axes of a layout, seen from one rank.

    world = pp x dp_replicate x dp_shard x ring x ulysses x tp, outermost first. Derived axes: `dp`
    = dp_replicate x dp_shard (ranks that read different rows), `sp` = ring x ulysses, `loss` = dp x
    sp (ranks that hold distinct tokens), `fsdp` = what parameters are sharded over (dp_shard, and
    the part of sp that `fold_sp` names), `sp_unfolded` = the rest of sp. For experts, the ranks of
    `fsdp` are divided once more: fsdp = expert_fsdp x ep, each ep rank holds other experts, and
    `expert_fsdp` is what these are sharded over. An axis that is not used has size 1, never None.
    Parameters are on slices of `mesh`, those of experts sharded over ep on slices of `expert_mesh`.
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
    expert_mesh: DeviceMesh | None
    device: torch.device

    @property
    def data_shard(self) -> DataShard:
        """The shard of a global batch on this rank."""
        return DataShard(self.dp.share, self.ring.share, self.ulysses.share)

    @property
    def degrees(self) -> dict[str, Any]:
        """The sizes of the axes that a `Layout` gives, by name."""
        return {name: getattr(self, name).count for name in Layout().degrees}


@attrs.frozen(eq=False)
class Stages(Sequence["nn.Module"]):
    """This rank's part of a model, and the axes it is sharded over: the result of `build_stages`.

    A sequence of modules, one for each pipeline stage of this rank. Functions that take a `Stages`
    read the axes that they communicate over from it; all of them take a plain module as well.
    """

    modules: tuple[nn.Module, ...]
    """The stages of this rank, first ones first; one module without pipeline parallelism."""

    call: Call
    """How a batch enters a stage. A stage after the first finds the hidden state that it received
    in place of "input_ids"."""

    pp: Axis = SOLO
    """The pipeline: its ranks hold different parameters."""

    dp: Axis = SOLO
    """The ranks that read different rows."""

    ring: Axis = SOLO
    """The ranks of ring attention."""

    ulysses: Axis = SOLO
    """The ranks of Ulysses attention."""

    tp: Axis = SOLO
    """Tensor parallelism."""

    loss: Axis = SOLO
    """The ranks that hold distinct tokens: dp x ring x ulysses."""

    world: Axis = SOLO
    """All ranks."""

    layout: Layout = Layout()
    """The degrees and the pipeline schedule."""

    @property
    def data_shard(self) -> DataShard:
        """The shard of a global batch on this rank."""
        return DataShard(self.dp.share, self.ring.share, self.ulysses.share)

    def __len__(self) -> int:
        return len(self.modules)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[nn.Module, ...]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | tuple[nn.Module, ...]:
        return self.modules[index]


class Hidden(NamedTuple):
    """The factors of logits, the output of a decoder with `head="hidden"`.

    `hidden` is `[B, S, D]`; `weight` is this rank's shard of the output weight `[V / N, D]`, in
    rank order over `axis`. Logits are `hidden @ weight.T`, or with a `softcap` c, c * tanh of these
    divided by c. (It is a tuple, so that FSDP finds the tensors in it.)
    """

    hidden: Tensor
    weight: Tensor
    axis: Axis = SOLO
    softcap: float | None = None


class RoutedOutput(NamedTuple):
    """The output of a decoder with experts, with the sums of its routers on this rank.

    `sums` `[L, 3 + E]`, fp32 (fp64 in an fp64 model), hold for each expert layer of the model the
    sum of `balance` over tokens, that of squared log-sum-exps of a router's logits (both have
    gradients), how many choices were dropped, and how often each expert was chosen; zeros for
    layers of later pipeline stages. Padding is in none of them.
    """

    output: Any
    sums: Tensor


def drop_routing(output: Any) -> Any:
    """Return the output of a decoder without the sums of its routers.

    Examples:
        >>> drop_routing(RoutedOutput(1, 2)), drop_routing(3)
        (1, 3)
    """
    return output.output if isinstance(output, RoutedOutput) else output


def apply_softcap(x: Tensor, softcap: float | None) -> Tensor:
    """Return c * tanh(x / c) for a soft cap c, or x without one.

    Examples:
        >>> import torch
        >>> apply_softcap(torch.tensor([0.0, 1e9]), 30.0)
        tensor([ 0., 30.])
    """
    # Nearly x where |x| is far below the cap, and never beyond it.
    return x if softcap is None else softcap * (x / softcap).tanh()


# -------------------------------------------------------------------------------------------- data


@attrs.frozen(eq=False)
class Bins:
    """The pieces of documents in each row, as a CSR table of int64 arrays.

    Row `b` has the pieces `offsets[b]:offsets[b + 1]`. A piece is `lengths[p]` tokens of document
    `documents[p]` from token `starts[p]` on; in the row it is padded to a multiple of
    `multiple_of`. There are no empty pieces, and no row exceeds `capacity` tokens.
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
            # An IndexError, because it ends a `for` loop over the rows.
            raise IndexError(f"row {index} of {len(self)}")
        # As in a list, -1 is the last row.
        index %= len(self)
        part = slice(self.offsets[index], self.offsets[index + 1])
        columns = self.documents[part], self.starts[part], self.lengths[part]
        # Python integers, not numpy's, which print as np.int64(3).
        return list(zip(*(column.tolist() for column in columns), strict=True))


# Not uint64: a batch has large integers as int64.
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


@attrs.frozen
class Column:
    """A further value of each token of a corpus, or `inner` values.

    Columns belong to labels or to tokens. A column of labels (weights, advantages,
    log-probabilities) describes token t as a target: in a batch its value is where token t is the
    label, and 0 where the piece has no next token. A column of tokens is where the token is the
    input, such as the choices of a router, which models take as int64. Padding is 0.

    In a `Batch` a column is in `extra`, `[B, S]` or `[B, S, k]`, in its dtype, or int32 for uint16
    and int64 for uint32, for which torch has few functions.

    Examples:
        >>> Column("int64", (2,), of="token")
        Column(dtype='int64', inner=(2,), of='token')
        >>> Column("float64")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: dtype must be one of 'float16', ..., got 'float64'
    """

    dtype: str = attrs.field(default="float32", validator=one_of("float16", "float32", *_INTEGERS))
    """The name of a numpy dtype; floats must be finite."""

    inner: tuple[int, ...] = attrs.field(
        default=(),
        converter=tuple,
        validator=satisfies(
            # Not isinstance, for which True is an int.
            lambda sizes: len(sizes) < 2 and all(type(k) is int and k > 0 for k in sizes),
            "() or (k,) with k above 0",
        ),
    )
    """The shape of a token's value: () for a number, (k,) for k of them."""

    of: Literal["label", "token"] = attrs.field(default="label", validator=one_of("label", "token"))
    """Whether it belongs to labels or to tokens."""

    @property
    def width(self) -> int:
        """The number of values per token."""
        return math.prod(self.inner)


@attrs.frozen(eq=False)
class Sample:
    """A document with a loss mask.

    `tokens` is int64 `[N]`, `loss_mask` bool `[N]`: the loss of token t as a target counts if
    `loss_mask[t]`. `columns` are the values of the corpus' columns for the document, by name, `[N]`
    or `[N, k]`.
    """

    tokens: IntArray
    loss_mask: np.ndarray[Any, Any]
    columns: Mapping[str, ArrayLike] | None = None


@attrs.frozen(eq=False, init=False)
class Spans:
    """The documents of a batch over its flattened rows; row padding is split into short spans.

    `cu_seqlens` (int32 `[N+1]`, on the batch's device) and `lengths` (int64 numpy, on the host) are
    equivalent. Both are made at collation, so that no kernel needs a host sync to read a length.
    """

    cu_seqlens: Tensor
    lengths: IntArray
    max_length: int

    def __init__(self, cu_seqlens: Tensor, lengths: IntArray, max_length: int) -> None:
        _set_fields(self, cu_seqlens=cu_seqlens, lengths=lengths, max_length=max_length)


BATCH_TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "token_index")
"""The tensors that every `Batch` has, in its order."""

EXTRA_TENSORS = ("source", "noise_key")
"""Names that `make_microbatches` and `add_noise_keys` set in `Batch.extra`; no column has them."""


@attrs.frozen(eq=False, init=False)
class Batch(Mapping[str, Any]):
    """One microbatch. Functions read `batch["labels"]`, so a plain dict serves as well.

    All tensors are int64 `[B, S]`. `labels` are already shifted; the ignored label is -100.
    `position_ids` restart in every piece. `document_ids` count the pieces of a row; ids below 0 are
    padding: -1 is row padding, -2 - n alignment padding of piece n, in its span. `token_index` is
    the index of the token in the global step. `extra` has further tensors with the same first two
    dimensions, such as columns of a corpus or noise keys; as a mapping, a batch includes them.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor
    token_index: Tensor
    spans: Spans
    extra: Mapping[str, Tensor] = attrs.field(factory=dict)

    def __init__(  # noqa: PLR0917 (its fields, as attrs would have it)
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        token_index: Tensor,
        spans: Spans,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        _set_fields(self, input_ids=input_ids, labels=labels, position_ids=position_ids)
        _set_fields(self, document_ids=document_ids, token_index=token_index, spans=spans)
        _set_fields(self, extra={} if extra is None else extra)
        # Here and not where a batch is sharded: the error then names the code that made the
        # batch.
        self._check_extra()

    def _check_extra(self) -> None:
        rows = tuple(self.input_ids.shape[:2])
        for name, column in self.extra.items():
            shape = getattr(column, "shape", None)
            if shape is None or tuple(shape[:2]) != rows:
                got = type(column).__name__ if shape is None else f"a tensor of shape {list(shape)}"
                raise ConfigError(
                    f"Batch: extra[{name!r}] is {got}, and is split and sharded with the tokens, "
                    f"so its first two dimensions must be {list(rows)}; repeat values of a row "
                    f"over its tokens (x[:, None].expand(-1, {rows[-1]})), and pass values that do "
                    "not belong to tokens in `call`",
                    where=name,
                    got=got,
                    want=list(rows),
                )

    def __getitem__(self, name: str) -> Any:
        # Not getattr for any name: methods and properties are no entries.
        if name in BATCH_TENSORS or name == "spans":
            return getattr(self, name)
        return self.extra[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*BATCH_TENSORS, "spans", *self.extra))

    def __len__(self) -> int:
        # One more for the spans.
        return len(BATCH_TENSORS) + 1 + len(self.extra)

    # A Mapping compares by items, which is ambiguous for tensors: batches compare by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@attrs.frozen
class Cursor:
    """The position of the next step in the data, equal on all ranks and in all layouts.

    `batch` is the number of the next global batch; `stream` are the integers that an online source
    needs to resume.
    """

    batch: int = 0
    stream: tuple[int, ...] = ()


@attrs.frozen(eq=False)
class StepBatch:
    """The input of one step on this rank, and the cursor of the next step.

    Every rank has the same number of microbatches, at least one; padding rows fill up the last.
    """

    microbatches: Sequence[Batch]
    cursor: Cursor

    counts: Mapping[str, int] = attrs.field(factory=dict)
    """Metrics of the global batch that its rows determine, equal on all ranks: "rows/CORPUS" and
    "tokens/CORPUS"."""


class DelayedMetrics(dict[str, Any]):
    """Metrics of a step that are written together with those of later steps.

    Sinks that show only the newest step skip them.
    """


@attrs.frozen(eq=False)
class Update:
    """The result of an optimizer step, equal on all ranks; see `clip_and_step`.

    Attributes:
        norm: The norm of the whole model's gradient before clipping, 0-d.
        applied: Whether the step was applied, a 0-d bool tensor.
        loss_scale: The loss scale of the gradients, if any.
        overflowed: Whether the norm was not finite on any rank, 0-d.
    """

    norm: Tensor
    applied: Tensor
    loss_scale: Tensor | float | None = attrs.field(default=None, repr=False)
    overflowed: Tensor | None = attrs.field(default=None, repr=False)

    @property
    def metrics(self) -> dict[str, Tensor | float]:
        """The metrics of the update; the last two only with a loss scale."""
        # Tensors stay on the device, where `~` needs no host sync.
        metrics: dict[str, Tensor | float] = {"grad_norm": self.norm, "skipped": ~self.applied}
        if self.loss_scale is not None and self.overflowed is not None:
            metrics["loss_scale"] = self.loss_scale
            metrics["overflowed"] = self.overflowed
        return metrics


@attrs.frozen(eq=False)
class TrainState:
    """The counters of a run; moves by `attrs.evolve`.

    `tokens` counts the tokens in the loss, and may stay an int64 scalar on the device until it is
    printed. `health` is the state of the health policy between steps, plain floats and lists of
    them, and the loss scale, which may be on the device too.
    """

    step: int = 0
    tokens: int | Tensor = 0
    cursor: Cursor = Cursor()
    health: Mapping[str, float | Sequence[float] | Tensor] = attrs.field(factory=dict)


# ---------------------------------------------------------------------------------- function types


class Corpus(Protocol):
    """Documents of tokens; document i is `tokens[offsets[i]:offsets[i + 1]]`.

    Some attributes are optional. `loss_mask`, as long as `tokens`, is 0 for tokens
    that are no target. `columns` are further columns by name, each a `Column`, with their `values`,
    `[T]` or `[T, k]`. `parts` are corpora that are concatenated; a corpus with parts needs no flat
    `tokens` and `values`.
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
"""`RowsAt(batch) -> rows`: the rows of a global batch as a function of its number.

The number is `Cursor.batch`, which no roll-back decreases, not the step of the run.
"""


class Fit(Protocol):
    """A bin-packing algorithm: the bin of each document, int64 `[N]`, from 0 without gaps."""

    def __call__(
        self, lengths: IntArray, capacity: int, *, max_documents: int | None
    ) -> IntArray: ...


class Split(Protocol):
    """A sharding of a tensor along `dim`, per document with `cu_seqlens`."""

    def __call__(
        self, x: Tensor, share: Share, *, dim: int = 1, cu_seqlens: Any = None
    ) -> Tensor: ...


class Attend(Protocol):
    """Attention inside each span, `[B,S,H,E]`, where a query sees no key after itself.

    q is `[B,S,H,D]`, k `[B,S,K,D]` and v `[B,S,K,E]`, where K divides H. With a `window` a query
    sees only keys that are fewer tokens before it than that, itself among them; with a `softcap` c
    a score s becomes c * tanh(s / c). `sinks` `[H]` are one more logit for each head, whose value
    is zero. With `causal=False` a query sees its whole document. A causal model without sinks does
    not pass these two.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        spans: Spans,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor: ...


class GatedDelta(Protocol):
    """The gated delta rule inside each span, `[B,S,H,E]`.

    q and k are `[B,S,K,D]` and v is `[B,S,H,E]`, where K divides H; `log_decay` and `beta` are
    `[B,S,H]`. The result depends on `chunk` only by its rounding.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        log_decay: Tensor,
        beta: Tensor,
        spans: Spans,
        scale: float | None = None,
        chunk: int | None = None,
    ) -> Tensor: ...


class CausalConv(Protocol):
    """The causal convolution of each channel of x `[B,S,C]` with weight `[C,W]`, inside spans."""

    def __call__(
        self, x: Tensor, weight: Tensor, *, spans: Spans, bias: Tensor | None = None
    ) -> Tensor: ...


Convolutions: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
"""The kernels of a delta layer's convolutions of queries, keys and values: `[K,D,W]`, `[K,D,W]` and
`[H,E,W]`.
"""


class AttendDelta(Protocol):
    """What a delta layer computes from its projections, inside each span: `[B,S,H,E]`.

    q and k are `[B,S,K,D]` and v is `[B,S,H,E]`, before their convolutions; `log_decay` and `beta`
    are `[B,S,H]`.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        convolutions: Convolutions,
        log_decay: Tensor,
        beta: Tensor,
        spans: Spans,
    ) -> Tensor: ...


Denominator: TypeAlias = "Tensor | Mapping[str, Tensor]"
"""The denominator of a step's sums: one 0-d tensor, or one for each term of the loss."""

Loss = Callable[[Any, Mapping[str, Any]], "tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]"]
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

# `...`, since a Callable cannot name its keywords.
OpenSink = Callable[..., AbstractContextManager[Sink]]
"""`open_sink(step=step)`: a context manager that yields a sink for the steps after `step`."""

Log = Callable[[str], object]
"""`Log(message)`: where messages for people go, such as `print` or the `log` of a run."""


def log_info(message: str) -> None:
    """Log a message at level INFO of the logger "trainkit": what happened as planned.

    It is the default of `log=` where the caller need not read the messages: Python's `logging`
    drops them unless it is configured (`logging.basicConfig(level="INFO")`).

    Effects:
        Calls the handlers of the logger.

    Examples:
        >>> log_info("packed 3 rows")
    """
    # As an argument: a message may contain percent signs.
    logging.getLogger("trainkit").info("%s", message)


def log_warning(message: str) -> None:
    """Log a message at level WARNING of the logger "trainkit": somebody should read it.

    It is the default of `log=` where a message may change what the caller does next. Python's
    `logging` prints it on stderr unless it is configured otherwise.

    Effects:
        Calls the handlers of the logger.

    Examples:
        >>> log_warning("passed over step_00000012: it is damaged")
    """
    logging.getLogger("trainkit").warning("%s", message)


class ForwardBackward(Protocol):
    """One step's forward and backward: adds to `.grad`, returns undivided sums."""

    def __call__(
        self, microbatches: Sequence[Mapping[str, Any]], *, denominator: Denominator
    ) -> dict[str, Tensor]: ...
