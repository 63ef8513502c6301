"""From a TOML file and a command line to one frozen attrs record, or to an error that helps.

Flags override the file, the file overrides the defaults. Only recipes use this room: functions of
the library take values. The command line is tyro's, the types of a file are checked by cattrs.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import math
import os
import re
import reprlib
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import attrs

from trainkit.files import read_limited
from trainkit.health import Policy
from trainkit.run.limits import Timeouts
from trainkit.types import (
    BatchShape,
    ConfigError,
    Kernel,
    Layout,
    Numerics,
    Precision,
    Validator,
    fraction,
    needs_extra,
    non_negative,
    one_of,
    positive,
)
from trainkit.weights.checkpoint.retention import Keeping

if TYPE_CHECKING:
    from trainkit.weights.checkpoint.facts import ResumeRules

__all__ = [
    "LinearOptions",
    "OptimizerOptions",
    "RowOptions",
    "RunConfig",
    "config_to_dict",
    "fraction",
    "load_config",
    "make_config_facts",
    "make_resume_rules",
    "non_negative",
    "one_of",
    "option",
    "positive",
    "read_config",
]

T = TypeVar("T")

_INT64 = 1 << 63
_short = reprlib.Repr()  # which bounds depth and length
_short.maxstring = _short.maxother = 100
_MOST_BYTES = 1 << 16  # of a configuration file
_MOST_DOTS = 1000  # of a line of it
_MOST_PROBLEMS = 20  # that are told, each with the nearest name: a search takes a millisecond

OnResume = Literal["refused", "asked", "free", "no fact"]
"""Whether a run may be continued with another value of a field: no; if --allow-change names it;
yes, as it changes nothing that is computed; or it is not even kept with the run, since it only says
how this start of it is meant."""


# ------------------------------------------------------------------------------------ records


def option(
    default: Any, validator: Validator | None = None, *, change: OnResume = "refused"
) -> Any:
    """Return a field of a configuration; the docstring below it is its help.

    A field may be a record itself, with `default` an instance of it: its fields are then flags and
    keys like all others, under a heading of their own in the help, and have its `change` where they
    have none.

    Args:
        default: The value where nobody gives one.
        validator: What it must be: `positive`, `one_of(...)`, or any other of attrs.
        change: Whether a run may be continued with another value; see `make_resume_rules`.

    Examples:
        >>> @attrs.frozen(kw_only=True)
        ... class Config(RunConfig):
        ...     rows: int = option(8, positive)
        ...     recompute: str = option("none", one_of("none", "full"), change="free")
        >>> make_resume_rules(Config()).free[-1]
        'config.recompute'
    """
    return attrs.field(default=default, validator=validator, metadata={"change": change})


def _known_optimizer(options: OptimizerOptions, _: object, __: object) -> None:
    """Refuse what no optimizer can be made of; torch is loaded only where there is something."""
    fields = attrs.fields(OptimizerOptions)
    named = {"optimizer", "optimizer_options", "optimizer_groups", "mean"}
    if any(getattr(options, x.name) != x.default for x in fields if x.name in named):
        from trainkit.optim.table import check_options  # noqa: PLC0415 -- it needs torch

        check_options(**_optimizer_arguments(options))
        if any(text.startswith("moments=") for text in options.optimizer_options):
            raise ConfigError("optimizer_options: moments are told by --moments")


def _kept_by_optimizer(config: RunConfig, _: object, precision: Precision) -> None:
    """Refuse an optimizer that cannot keep what the precision says, which is another record's."""
    options: OptimizerOptions | None = getattr(config, "optim", None)
    if options and (precision.storage, precision.moments) != ("fp32", "fp32"):
        from trainkit.optim.table import check_options  # noqa: PLC0415 -- it needs torch

        check_options(**_optimizer_arguments(options), precision=precision)


_not_negative = attrs.validators.optional(non_negative)


def _known_recompute(_: object, __: object, mode: str) -> None:
    """Refuse a mode that there is not; torch is loaded only for one with parts."""
    if mode not in ("none", "selective", "full"):
        from trainkit.parallel.recompute import read_mode  # noqa: PLC0415 -- it needs torch

        read_mode(mode)


@attrs.frozen(kw_only=True)
class OptimizerOptions:
    """How the optimizer steps."""

    lr: float = option(3e-3, positive, change="asked")
    """The peak learning rate."""

    warmup: int = option(30, non_negative, change="asked")
    """Steps in which the learning rate rises."""

    schedule_steps: int = option(1000, positive, change="asked")
    """The length of the learning rate's schedule; past it the last rate holds."""

    weight_decay: float = option(0.1, non_negative, change="asked")
    """Decay of matrices; vectors have none."""

    optimizer: str = option("adamw", _known_optimizer, change="asked")
    """adamw, lion, momentum, muon, schedule-free, signsgd; docs/howto/choose-an-optimizer.md."""

    optimizer_options: tuple[str, ...] = option((), change="asked")
    """What it is told, NAME=VALUE each: betas=(0.9,0.99), cautious=True."""

    optimizer_groups: tuple[str, ...] = option((), change="asked")
    """What other parameters get, each a regular expression of names: 'head.* lr_scale=0.5'."""

    mean: float | None = option(None, change="asked")
    """Keep a mean of the weights, of which this much stays in a step (0.999), and evaluate it."""

    offload_optimizer: bool = option(default=False, change="free")
    """Keep the optimizer's state in host memory, and bring it over parameter by parameter."""

    max_norm: float = option(1.0, positive, change="asked")
    """Gradients above this norm are scaled down to it."""

    @property
    def options(self) -> dict[str, Any]:
        """The values of `optimizer_options` by name, for `optim.make_optimizer`."""
        from trainkit.optim import parse_options  # noqa: PLC0415 -- it needs torch

        return parse_options(self.optimizer_options, optimizer=self.optimizer)

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """The values of `optimizer_groups` by pattern, for `optim.make_optimizer`."""
        from trainkit.optim import parse_groups  # noqa: PLC0415 -- it needs torch

        return parse_groups(self.optimizer_groups, optimizer=self.optimizer)


def _optimizer_arguments(options: OptimizerOptions) -> dict[str, Any]:
    return {
        "optimizer": options.optimizer,
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "options": options.options,
        "groups": options.groups,
        "mean": options.mean,
        "offload": options.offload_optimizer,
    }


@attrs.frozen(kw_only=True)
class LinearOptions:
    """What linear layers compute in, where they compute otherwise than the rest."""

    linears: Literal[
        "plain",
        "float8_tensorwise",
        "float8_rowwise",
        "float8_rowwise_with_gw_hp",
        "qat_int4",
        "qat_int8_int4",
        "qat_fp8",
        "qat_nvfp4",
    ] = option("plain", change="asked")
    """float8: how they multiply; qat: what forward rounds to, for a model to be quantised later."""

    linear_modules: str | None = option(None, change="asked")
    """Which, a regular expression of names; by default all that can, but head and experts."""


@attrs.frozen(kw_only=True)
class RowOptions(BatchShape):
    """How text becomes the rows of a step."""

    row_length: int = attrs.field(default=256, validator=positive)
    """Tokens in a row; documents are packed into rows, and longer ones are split or cut."""

    rows: int = attrs.field(default=8, validator=positive)
    """Rows in a step, over all ranks."""

    microbatch: int = option(4, positive, change="free")
    """Rows that go through the model at once, on each rank."""

    multiple_of: int = attrs.field(default=8, validator=positive)
    """What a piece's length in its row is rounded up to, in all layouts; a ring of N needs 2 N."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """The flags that every training recipe has; a recipe's own record inherits from it."""

    out: Path = option(Path("runs/run"), change="no fact")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""

    steps: int = option(1000, non_negative, change="no fact")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""

    seed: int = option(0, non_negative)
    """What initial values, the order of the data and dropout follow from."""

    config: Path | None = option(None, change="no fact")
    """A TOML file with values for these flags, keys as in config.toml; flags override it."""

    resume: str = option("auto", change="no fact")
    """auto: from the newest checkpoint that verifies, if there is one; never; or a checkpoint."""

    allow_change: tuple[str, ...] = option((), change="no fact")
    """Names of flags that this run may be continued with another value of: lr, warmup,
    schedule-steps, weight-decay, max-norm."""

    recompute: str = option("none", _known_recompute, change="free")
    """none, selective, full, what is kept, or how much: 0.4; docs/howto/less-memory.md."""

    compiled: bool = option(default=False, change="free")
    """Compile the blocks with torch.compile."""

    attention: tuple[Kernel, ...] = option((), change="free")
    """The kernel of attention, the first of these that fits: varlen, flash, efficient, cudnn, flex,
    sdpa, math; by default varlen where it fits, and else sdpa."""

    offload_activations: int | None = option(None, _not_negative, change="free")
    """Bytes of activations that stay on the device; what is beyond waits in host memory."""

    keeping: Keeping = option(Keeping(), change="no fact")
    limits: Timeouts = option(Timeouts(), change="no fact")
    policy: Policy = option(Policy(), change="no fact")
    precision: Precision = option(Precision(), _kept_by_optimizer, change="asked")
    numerics: Numerics = option(Numerics(), change="asked")
    layout: Layout = option(Layout(), change="free")


# ------------------------------------------------------------------------------------ fields


@attrs.frozen
class _Field:
    """A field of a configuration, or of a record in it."""

    path: tuple[str, ...]
    attribute: attrs.Attribute[Any]
    type: Any
    change: OnResume
    owner: Any = None  # the default of the record that it is in

    @property
    def default(self) -> Any:
        """The value where nobody gives one; `attrs.NOTHING` for a field that must be given."""
        name = self.attribute.name
        return self.attribute.default if self.owner is None else getattr(self.owner, name)

    def holder(self, config: Any) -> Any:
        """Return the record of a configuration that the field is in."""
        return functools.reduce(getattr, self.path[:-1], config)

    def value(self, config: Any) -> Any:
        """Return the field's value in a configuration."""
        return getattr(self.holder(config), self.path[-1])


@functools.cache
def _fields(config_type: type[Any]) -> Mapping[str, _Field]:
    """Return all fields by name, those of the records inside among them."""
    found: dict[str, _Field] = {}
    types = get_type_hints(config_type)
    for a in attrs.fields(config_type):
        change = a.metadata.get("change", "refused")
        own = {a.name: _Field((a.name,), a, types[a.name], change)} if a.init else {}
        if own and attrs.has(types[a.name]):
            inside = _fields(types[a.name]).values()
            own = {x.attribute.name: _inside(a, x, change) for x in inside}
        assert not own.keys() & found.keys(), f"{config_type.__name__} has {a.name} twice"
        found |= own
    return found


def _inside(record: attrs.Attribute[Any], field: _Field, change: OnResume) -> _Field:
    own = field.attribute.metadata.get("change", change)
    path = (record.name, *field.path)
    return attrs.evolve(field, path=path, change=own, owner=record.default)


def _record(config_type: type[T], values: Mapping[str, Any], absent: Any) -> T:
    """Return a configuration of values by name; `absent` stands for what has none and needs one."""
    types, made = get_type_hints(config_type), dict[str, Any]()
    for a in attrs.fields(config_type):
        if a.init and attrs.has(types[a.name]):
            inside = {name: x for name, x in values.items() if name in _fields(types[a.name])}
            made[a.name] = attrs.evolve(a.default, **inside)
        elif a.init and a.name in values:
            made[a.name] = values[a.name]
        elif a.init and a.default is attrs.NOTHING:
            made[a.name] = absent
    return config_type(**made)


def make_resume_rules(config: Any, *, free: Sequence[str] = ()) -> ResumeRules:
    """Return which fields a run may be continued with other values of; see `option`.

    Args:
        config: The configuration.
        free: Other facts that may change: "files" of `make_data_facts`, say, which only name what
            the "fingerprint" stands for.

    Examples:
        >>> make_resume_rules(RunConfig(allow_change=("compute",))).allow
        ('compute',)
    """
    from trainkit.weights.checkpoint.facts import ResumeRules  # noqa: PLC0415 -- it needs torch

    named = {kind: list[str]() for kind in get_args(OnResume)}
    for name, field in _fields(type(config)).items():
        named[field.change].append(name)
    # By the whole name: a fact "tokenizer", a hash, is another than the field, which is a path.
    free = (*(f"config.{name}" for name in (*named["no fact"], *named["free"])), *free)
    return ResumeRules(free, tuple(named["asked"]), config.allow_change)


# ------------------------------------------------------------------------------------ reading


def load_config(
    config_type: type[T], argv: Sequence[str] | None = None, *, description: str | None = None
) -> T:
    """Return the configuration that defaults, a TOML file and the command line give, in this order.

    Flags have dashes (`--save-every 10`), keys of a file underscores; either is understood in
    both. A file is read when the record has a field `config` and `--config FILE.toml` is given.
    `--help` explains every field by the docstring below it, and exits with 0.

    Args:
        config_type: An `attrs.frozen` class of plain values: str, int, float, bool, Path, None,
            Literal, and tuples of these.
        argv: The command line without the program; by default the process's own.
        description: What stands above the flags in the help; by default the class's docstring.

    Raises:
        ConfigError: A key or flag is unknown (the nearest is named), a value has the wrong type or
            breaks its field's rule, or the optimizer cannot keep what the precision says. All
            problems of a file are told at once.

    Examples:
        >>> load_config(RunConfig, ["--steps", "20", "--out", "runs/try"]).steps
        20
        >>> load_config(RunConfig, ["--stpes", "20"])
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: unknown flag --stpes (did you mean --steps?)
    """
    with needs_extra("recipes"):
        import tyro  # noqa: PLC0415 -- an extra
    argv = list(sys.argv[1:] if argv is None else argv)
    check_argv(argv)
    _check_flags(config_type, argv)
    file = _config_flag(config_type, argv)
    default = _from_file(config_type, file, tyro.MISSING) if file else tyro.MISSING_NONPROP
    errors = io.StringIO()
    with attrs.validators.disabled(), contextlib.redirect_stderr(errors):  # see _rule_problems
        try:
            config = tyro.cli(
                config_type,
                args=argv,
                default=default,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
        except SystemExit as end:
            if not end.code:
                raise
            reason = _reason(errors.getvalue())
            raise ConfigError(reason, where="command line", hint="see --help") from None
    _raise_all(_rule_problems(config), "command line")
    attrs.validate(config)  # rules that compare records
    return config


def read_config(config_type: type[T], path: str | Path) -> T:
    """Return the configuration that a TOML file gives, on top of the defaults.

    Raises:
        ConfigError: The file is missing, is not TOML, lacks a field without default, or holds an
            unknown key, a value of the wrong type, or one that breaks its field's rule.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "config.toml")
        ...     _ = path.write_text("steps = 7")
        ...     read_config(RunConfig, path) == RunConfig(steps=7)
        True
    """
    config = _from_file(config_type, path, attrs.NOTHING)
    fields = _fields(config_type).items()
    missing = [f"{name} is missing" for name, x in fields if x.value(config) is attrs.NOTHING]
    _raise_all(missing, str(path))
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as values that JSON holds.

    The field `config` is left out: the values of the file that it names are all here.

    Examples:
        >>> config_to_dict(RunConfig(seed=7))["out"], config_to_dict(RunConfig(seed=7))["seed"]
        ('runs/run', 7)
    """
    fields = _fields(type(config)).items()
    return {name: _plain(x.value(config)) for name, x in fields if name != "config"}


def make_config_facts(config: Any) -> dict[str, Any]:
    """Return a configuration as facts to save with the checkpoints of a run.

    What only says where files are, how this start of the run began, when it stops and how it is
    watched is no fact of the run: see `option`.

    Returns:
        {"config.NAME": value}.

    Examples:
        >>> make_config_facts(RunConfig(seed=7))["config.seed"]
        7
    """
    kept = [name for name, x in _fields(type(config)).items() if x.change != "no fact"]
    values = config_to_dict(config)
    return {f"config.{name}": values[name] for name in kept}


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# ------------------------------------------------------------------------------------ checking


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, names: Iterable[str]) -> str:
    # Without the dashes of flags, which are alike in all: --lora is nowhere near --lr.
    dashes = name[: len(name) - len(name.lstrip("-"))]
    bare = [known.lstrip("-") for known in names]
    near = difflib.get_close_matches(name[:100].lstrip("-"), bare, n=1, cutoff=0.7)
    return f" (did you mean {dashes}{near[0]}?)" if near else ""


def check_argv(argv: Sequence[str]) -> None:
    """Refuse words that Python could not decode: no file of a run could name them.

    Raises:
        ConfigError: There is one.

    Examples:
        >>> check_argv(["--out", "runs/é"])
    """
    for word in argv:
        if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(
                f"{os.fsencode(word)!r} is no text in this locale ({sys.getfilesystemencoding()})",
                where="command line",
                hint="set LC_ALL=C.UTF-8, or PYTHONUTF8=1, and name files in UTF-8",
            )


def _check_flags(config_type: type[Any], argv: Sequence[str]) -> None:
    fields = _fields(config_type)
    flags = ["--help", *map(_flag, fields)]
    known = {*flags, *(_flag(f"no_{name}") for name, x in fields.items() if x.type is bool)}
    given = (_flag(word[2:].partition("=")[0]) for word in argv if word.startswith("--"))
    problems = [
        f"unknown flag {f[:100]}{_flags_inside(f, fields) or _nearest(f, flags)}"
        for f in given
        if f not in known
    ]
    paths = {_flag(name) for name, x in fields.items() if "Path" in str(x.type)}
    flag, empty = "", list[str]()
    for word in argv:
        flag, _, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        empty += [flag] * (flag in paths and not value and (not word or "=" in word))
    problems += [f"{flag} is empty; the folder that you are in is called ." for flag in empty]
    _raise_all(problems, "command line")


def _flags_inside(flag: str, fields: Mapping[str, _Field]) -> str:
    """Return the flags that set a record where its own name was given, with their choices."""
    inside = {name: x for name, x in fields.items() if flag in map(_flag, x.path[:-1])}
    choices = {
        name: get_args(x.type) if get_origin(x.type) is Literal else ()
        for name, x in inside.items()
    }
    told = [f"{_flag(name)} {'|'.join(map(str, own))}".strip() for name, own in choices.items()]
    return f" (it has parts: {', '.join(told)})" if told else ""


def _config_flag(config_type: type[Any], argv: Sequence[str]) -> str | None:
    """Return the file of the last --config, as tyro takes the last of every flag."""
    file = None
    for word, following in zip_longest(argv, argv[1:]):
        name, equals, value = word.partition("=")
        if name == "--config":
            file = value if equals else following
    return file if file != "None" and "config" in _fields(config_type) else None


def _reason(message: str) -> str:
    """Return the first paragraph below the title of tyro's error box as one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", message).strip()
    lines = [line.strip("│| ") for line in text.splitlines()[1:]]
    is_ruler = [bool(line) and not line.strip("─-╰╯+") for line in lines]
    kinds = groupby(zip(lines, is_ruler, strict=True), key=lambda pair: pair[1])
    paragraphs = [" ".join(line for line, _ in group) for ruler, group in kinds if not ruler]
    return paragraphs[0] if paragraphs else text


def _from_file(config_type: type[T], path: str | Path, absent: Any) -> T:
    """Return the record of a file, with `absent` for what it lacks, or raise all that is wrong."""
    try:
        table = _toml_table(read_limited(Path(path), most=_MOST_BYTES).decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}", where=str(path)) from error
    types = {name: x.type for name, x in _fields(config_type).items() if name != "config"}
    values, problems = _typed_values(table, types)
    with attrs.validators.disabled():
        config = _record(config_type, values, absent)
    problems += _rule_problems(config, set(values))
    _raise_all([f"{path}: {problem}" for problem in problems[:1]] + problems[1:], str(path))
    return config


def _toml_table(text: str) -> dict[str, Any]:
    """Parse a file; the parser takes the square of a dotted key's parts in time and memory."""
    try:
        if max((line.count(".") for line in text.splitlines()), default=0) < _MOST_DOTS:
            return tomllib.loads(text)
    except RecursionError:
        pass
    raise ValueError("nested too deep for a configuration")


def _typed_values(table: dict[str, Any], types: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a table by field name, and what is wrong with the others."""
    convert = _converter()
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in types:
            near = _nearest(name, types) if len(problems) < _MOST_PROBLEMS else ""
            problems.append(f"unknown key {key[:100]}{near}")
        elif name in values:
            problems.append(f"{name} stands there twice, with dashes and with underscores")
        else:
            try:
                is_fraction = name == "recompute" and isinstance(value, float)  # 0.4, not "0.4"
                values[name] = convert(str(value) if is_fraction else value, types[name])
            except Exception:  # noqa: BLE001 -- cattrs raises groups and bare Exceptions
                shown = _short.repr(value)
                problems.append(f"{name} must be {_readable(types[name])}, got {shown}")
    return values, problems


def _readable(wanted: Any) -> str:
    is_class = isinstance(wanted, type) and get_origin(wanted) is None
    return re.sub(r"\b[a-z_.]+\.", "", wanted.__name__ if is_class else str(wanted))


def _converter() -> Callable[[Any, Any], Any]:
    """Return `convert(value, type)`: cattrs, strict, since a file's types are its author's word."""
    with needs_extra("recipes"):
        import cattrs  # noqa: PLC0415 -- an extra
    converter = cattrs.Converter()

    def scalar(*accepted: type[Any]) -> Callable[[Any, Any], Any]:
        def structure(value: Any, wanted: Any) -> Any:
            if type(value) not in accepted or (wanted is Path and not value):
                raise TypeError(f"not {wanted}")
            return wanted(value)

        return structure

    for wanted, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(wanted, scalar(*accepted))
    converter.register_structure_hook(Path, scalar(str))

    def convert(value: Any, wanted: Any) -> Any:
        if get_origin(wanted) is tuple and not isinstance(value, list):
            raise TypeError("not a list")  # cattrs would take a string for a list of letters
        if value == "None" and type(None) in getattr(wanted, "__args__", ()):
            return None
        return converter.structure(value, wanted)

    return convert


def _rule_problems(config: Any, names: Container[str] | None = None) -> list[str]:
    """Return what breaks a field's rule: all of it, where attrs itself would stop at the first.

    NaN, which passes through comparisons unseen, and integers beyond int64 are refused for every
    field.
    """
    problems: list[str] = []
    for name, field in _fields(type(config)).items():
        value = field.value(config)
        if names is not None and name not in names:
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, float) and math.isnan(part) for part in parts):
            problems.append(f"{name} must be a number, got {value!r}")
        elif any(isinstance(part, Path) and "\0" in str(part) for part in parts):
            problems.append(f"{name} must have no null byte, got {str(value)!r}")
        elif any(isinstance(part, int) and not -_INT64 <= part < _INT64 for part in parts):
            problems.append(f"{name} must be below 2^63, got {value!r}")
        elif field.attribute.validator is not None:
            try:
                field.attribute.validator(field.holder(config), field.attribute, value)
            except (ValueError, TypeError) as error:
                text = str(error)
                problems.append(text if name in text else f"{name}: {text}")
    return problems


def _raise_all(problems: Sequence[str], where: str) -> None:
    told, more = problems[:_MOST_PROBLEMS], len(problems) - _MOST_PROBLEMS
    if told:
        rest = [f"and {more} more"] if more > 0 else []
        raise ConfigError("; ".join([*told, *rest]), where=where)
