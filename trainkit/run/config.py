"""Read one frozen attrs record from a TOML file and a command line, with errors that help.

Flags override the file, the file overrides the defaults. Only recipes need this module: functions
of the library take values. tyro parses the command line; cattrs checks the types of a file.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import math
import os
import random
import re
import reprlib
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import attrs

from trainkit.buckets.urls import find_url
from trainkit.files import read_limited
from trainkit.health import Policy
from trainkit.run.sinks.named import LoggingOptions
from trainkit.run.timeouts import Timeouts
from trainkit.schedules import Interval, check_interval, parse_interval
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
from trainkit.weights.checkpoint.retention import CheckpointOptions

if TYPE_CHECKING:
    from trainkit.weights.checkpoint.facts import ResumeRules

__all__ = [
    "LinearOptions",
    "OptimizerOptions",
    "RowOptions",
    "RunConfig",
    "config_to_dict",
    "fraction",
    "interval",
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
_short = reprlib.Repr()  # bounds depth and length
_short.maxstring = _short.maxother = 100
_MAX_BYTES = 1 << 16  # of a configuration file
_MAX_DOTS = 1000  # in one line of it
_MAX_PROBLEMS = 20  # in one message; finding the nearest name for each takes a millisecond

OnResume = Literal["refuse", "ask", "allow", "ignore"]
"""What to do where a run is resumed with another value of a field: refuse; refuse unless
--allow-change names it; allow, since it does not change any result; or ignore the field, which is
not stored with the run, since it only concerns this start of it."""


# ------------------------------------------------------------------------------------ records


def option(
    default: Any, validator: Validator | None = None, *, on_resume: OnResume = "refuse"
) -> Any:
    """Return a field of a configuration; the docstring below it is its help.

    A field may be a record itself, with an instance of it as `default`: its fields are then flags
    and keys like all others, under a heading of their own in the help. Those without an
    `on_resume` have that of the record.

    Args:
        default: The default value.
        validator: A rule: `positive`, `one_of(...)`, or any other validator of attrs.
        on_resume: Whether a run may be resumed with another value; see `make_resume_rules`.

    Examples:
        >>> @attrs.frozen(kw_only=True)
        ... class Config(RunConfig):
        ...     rows: int = option(8, positive)
        ...     recompute: str = option("none", one_of("none", "full"), on_resume="allow")
        >>> make_resume_rules(Config()).allow[-1]
        'config.recompute'
    """
    return attrs.field(default=default, validator=validator, metadata={"on_resume": on_resume})


def interval(default: int | str, *, on_resume: OnResume = "refuse") -> Any:
    """Return a field of a configuration that is an `Interval`; 0 is never.

    Its flag takes a number of steps, or a text such as 30min, 100M-tokens or 2epochs.

    Args:
        default: The default, a number of steps or such a text.
        on_resume: Whether a run may be resumed with another value; see `make_resume_rules`.

    Examples:
        >>> @attrs.frozen(kw_only=True)
        ... class Config(RunConfig):
        ...     eval_every: Interval = interval(100, on_resume="allow")
        >>> Config(eval_every="30min").eval_every
        30min
    """
    return attrs.field(
        default=parse_interval(default),
        converter=parse_interval,
        validator=check_interval(never=True),
        metadata={"on_resume": on_resume},
    )


def _make_options_check(options: OptimizerOptions) -> Callable[..., object]:
    from trainkit.optim.table import check_options  # noqa: PLC0415 -- it needs torch

    return functools.partial(
        check_options,
        optimizer=options.optimizer,
        lr=options.lr,
        weight_decay=options.weight_decay,
        options=options.options,
        groups=options.groups,
        mean=options.mean,
        offload=options.offload_optimizer,
    )


def _check_optimizer(options: OptimizerOptions, _: object, __: object) -> None:
    """Raise if no optimizer can be made of the options; without any, torch is not loaded."""
    fields = attrs.fields(OptimizerOptions)
    names = {"optimizer", "optimizer_options", "optimizer_groups", "mean"}
    if any(getattr(options, x.name) != x.default for x in fields if x.name in names):
        _make_options_check(options)()
        if any(text.startswith("moments=") for text in options.optimizer_options):
            raise ConfigError("optimizer_options: the dtype of moments is a flag, --moments")


def _check_storage(config: RunConfig, _: object, precision: Precision) -> None:
    """Raise if the optimizer cannot store parameters and moments in this precision."""
    options: OptimizerOptions | None = getattr(config, "optim", None)
    if options and (precision.storage, precision.moments) != ("fp32", "fp32"):
        _make_options_check(options)(precision=precision)


_not_negative = attrs.validators.optional(non_negative)


def _check_recompute(_: object, __: object, mode: str) -> None:
    """Raise if there is no such mode; torch is loaded only for a mode with parts."""
    if mode not in ("none", "selective", "full"):
        from trainkit.parallel.recompute import read_mode  # noqa: PLC0415 -- it needs torch

        read_mode(mode)


@attrs.frozen(kw_only=True)
class OptimizerOptions:
    """How the optimizer steps."""

    lr: float = option(3e-3, positive, on_resume="ask")
    """The peak learning rate."""

    warmup: int = option(30, non_negative, on_resume="ask")
    """Steps in which the learning rate rises."""

    schedule_steps: int = option(1000, positive, on_resume="ask")
    """The length of the learning rate's schedule; past it the last rate holds."""

    weight_decay: float = option(0.1, non_negative, on_resume="ask")
    """Decay of matrices; vectors have none."""

    optimizer: str = option("adamw", _check_optimizer, on_resume="ask")
    """adamw, lion, momentum, muon, schedule-free, signsgd; see the page "Choose an optimizer"."""

    optimizer_options: tuple[str, ...] = option((), on_resume="ask")
    """Its further options, NAME=VALUE each: betas=(0.9,0.99), cautious=True."""

    optimizer_groups: tuple[str, ...] = option((), on_resume="ask")
    """Options of other parameters, after a pattern of names: 'head.* lr_scale=0.5'."""

    mean: float | None = option(None, on_resume="ask")
    """Average the weights with this decay per step (0.999), and evaluate the average."""

    offload_optimizer: bool = option(default=False, on_resume="allow")
    """Keep the optimizer's state in host memory, and bring it over parameter by parameter."""

    max_norm: float = option(1.0, positive, on_resume="ask")
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


@attrs.frozen(kw_only=True)
class LinearOptions:
    """The arithmetic of linear layers, if it differs from that of the model."""

    linears: Literal[
        "plain",
        "float8_tensorwise",
        "float8_rowwise",
        "float8_rowwise_with_gw_hp",
        "qat_int4",
        "qat_int8_int4",
        "qat_fp8",
        "qat_nvfp4",
    ] = option("plain", on_resume="ask")
    """float8: how they multiply; qat: what forward rounds to, for a model to be quantised later."""

    linear_modules: str | None = option(None, on_resume="ask")
    """Which, a pattern of names; by default all that can, but head and experts."""


@attrs.frozen(kw_only=True)
class RowOptions(BatchShape):
    """How text becomes the rows of a step."""

    row_length: int = attrs.field(default=256, validator=positive)
    """Tokens in a row; documents are packed into rows, and longer ones are split or cut."""

    rows: int = attrs.field(default=8, validator=positive)
    """Rows in a step, over all ranks."""

    microbatch: int = option(4, positive, on_resume="allow")
    """Rows that go through the model at once, on each rank."""

    multiple_of: int = attrs.field(default=8, validator=positive)
    """What a piece's length in its row is rounded up to, in all layouts; a ring of N needs 2 N."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """The flags that every training recipe has; a recipe's own record inherits from it."""

    out: Path = option(Path("runs/run"), on_resume="ignore")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""

    steps: int = option(1000, non_negative, on_resume="ignore")
    """Stop after this step. Nothing else depends on it: see schedule-steps."""

    seed: int = option(0, non_negative)
    """Seed of initial values, the order of the data and dropout."""

    config: Path | None = option(None, on_resume="ignore")
    """A TOML file with values for these flags, keys as in config.toml; flags override it."""

    resume: str = option("auto", on_resume="ignore")
    """auto: from the newest checkpoint that verifies, if there is one; never; or a checkpoint."""

    allow_change: tuple[str, ...] = option((), on_resume="ignore")
    """Names of flags that this run may be continued with another value of: lr, warmup,
    schedule-steps, weight-decay, max-norm."""

    recompute: str = option("none", _check_recompute, on_resume="allow")
    """none, selective, full, names to store, or a fraction: 0.4; see the page "Less memory"."""

    compiled: bool = option(default=False, on_resume="allow")
    """Compile the blocks with torch.compile."""

    attention: tuple[Kernel, ...] = option((), on_resume="allow")
    """Attention kernels in order of preference, of which the first that fits is used; by default
    varlen where it fits, otherwise sdpa. See the page "Choose an attention kernel"."""

    offload_activations: int | None = option(None, _not_negative, on_resume="allow")
    """Bytes of activations that stay on the device; what is beyond waits in host memory."""

    checkpoints: CheckpointOptions = option(CheckpointOptions(), on_resume="ignore")
    logging: LoggingOptions = option(LoggingOptions(), on_resume="ignore")
    timeouts: Timeouts = option(Timeouts(), on_resume="ignore")
    policy: Policy = option(Policy(), on_resume="ignore")
    precision: Precision = option(Precision(), _check_storage, on_resume="ask")
    numerics: Numerics = option(Numerics(), on_resume="ask")
    layout: Layout = option(Layout(), on_resume="allow")


# ------------------------------------------------------------------------------------ fields


@attrs.frozen
class _Field:
    """A field of a configuration, or of a record in it."""

    path: tuple[str, ...]
    attribute: attrs.Attribute[Any]
    type: Any
    on_resume: OnResume

    def get_record(self, config: Any) -> Any:
        """Return the record of a configuration that has the field."""
        return functools.reduce(getattr, self.path[:-1], config)

    def get_value(self, config: Any) -> Any:
        """Return the field's value in a configuration."""
        return getattr(self.get_record(config), self.path[-1])


def _is_record(type_: Any) -> bool:
    """Return whether a field's type has fields that are flags; an interval is one value."""
    return attrs.has(type_) and type_ is not Interval


@functools.cache
def _list_fields(config_type: type[Any]) -> Mapping[str, _Field]:
    """Return all fields by name, including those of records inside."""
    fields: dict[str, _Field] = {}
    types = get_type_hints(config_type)
    for a in attrs.fields(config_type):
        if not a.init:
            continue
        on_resume = a.metadata.get("on_resume", "refuse")
        if _is_record(types[a.name]):
            new = {
                name: attrs.evolve(
                    inner,
                    path=(a.name, *inner.path),
                    on_resume=inner.attribute.metadata.get("on_resume", on_resume),
                )
                for name, inner in _list_fields(types[a.name]).items()
            }
        else:
            new = {a.name: _Field((a.name,), a, types[a.name], on_resume)}
        # Flags have no prefix of their record, so a name may be there only once.
        assert not new.keys() & fields.keys(), f"{config_type.__name__} has {a.name} twice"
        fields |= new
    return fields


def make_resume_rules(config: Any, *, allow: Sequence[str] = ()) -> ResumeRules:
    """Return the rules for fields that have another value when a run is resumed; see `option`.

    Args:
        config: The configuration.
        allow: Other facts that may change: "files" of `make_data_facts`, for example, whose
            content the "fingerprint" identifies.

    Examples:
        >>> make_resume_rules(RunConfig(allow_change=("compute",))).granted
        ('compute',)
    """
    from trainkit.weights.checkpoint.facts import ResumeRules  # noqa: PLC0415 -- it needs torch

    names = {rule: list[str]() for rule in get_args(OnResume)}
    for name, field in _list_fields(type(config)).items():
        names[field.on_resume].append(name)
    # With "config.", since a fact "tokenizer", a hash, differs from the field, which is a path.
    fields = [f"config.{name}" for name in (*names["ignore"], *names["allow"])]
    return ResumeRules(
        allow=(*fields, *allow), ask=tuple(names["ask"]), granted=config.allow_change
    )


# ------------------------------------------------------------------------------------ reading


def load_config(config_type: type[T], argv: Sequence[str] | None = None) -> T:
    """Return the configuration of the defaults, a TOML file and the command line, in this order.

    Flags have dashes (`--save-every 10`), keys of a file underscores; both forms work in both
    places. A file is read when the record has a field `config` and `--config FILE.toml` is given.
    `--help` shows every field with the docstring below it, and exits with 0.

    Args:
        config_type: An `attrs.frozen` class of plain values: str, int, float, bool, Path, None,
            Literal, and tuples of these.
        argv: The command line without the program; by default the process's own.

    Raises:
        ConfigError: A key or flag is unknown (the message has the nearest), a value has the wrong
            type or breaks its field's rule, or the optimizer cannot store the precision. All
            problems of a file are reported at once.

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
    file = _find_config_flag(config_type, argv)
    default = _read_file(config_type, file, tyro.MISSING) if file else tyro.MISSING_NONPROP
    errors = io.StringIO()
    # Validators run below instead, so that all problems are found, not only the first.
    with (
        attrs.validators.disabled(),
        contextlib.redirect_stderr(errors),
        _restore_random_state(),  # tyro's cache draws from it
    ):
        try:
            config = tyro.cli(
                config_type,
                args=argv,
                default=default,
                config=(tyro.conf.OmitArgPrefixes,),  # --lr, not --optim.lr
                registry=_make_registry(),
            )
        except SystemExit as end:
            if not end.code:
                raise
            raise ConfigError(
                _read_tyro_error(errors.getvalue()), where="command line", hint="see --help"
            ) from None
    _raise_all(_find_broken_rules(config), "command line")
    attrs.validate(config)  # rules that compare records
    return config


@contextlib.contextmanager
def _restore_random_state() -> Iterator[None]:
    """Restore the state of Python's own generator at the end, which is the caller's."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def read_config(config_type: type[T], path: str | Path) -> T:
    """Return the configuration of a TOML file, on top of the defaults.

    Raises:
        ConfigError: The file is missing, is not TOML, lacks a field without default, or has an
            unknown key, a value of the wrong type, or one that breaks its field's rule.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "config.toml")
        ...     _ = path.write_text("steps = 7")
        ...     read_config(RunConfig, path) == RunConfig(steps=7)
        True
    """
    config = _read_file(config_type, path, attrs.NOTHING)
    missing = [
        f"{name} is missing"
        for name, x in _list_fields(config_type).items()
        if x.get_value(config) is attrs.NOTHING
    ]
    _raise_all(missing, str(path))
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as values for JSON.

    Without the field `config`, since the values of that file are among the others.

    Examples:
        >>> config_to_dict(RunConfig(seed=7))["out"], config_to_dict(RunConfig(seed=7))["seed"]
        ('runs/run', 7)
    """
    fields = _list_fields(type(config)).items()
    return {name: _to_plain(x.get_value(config)) for name, x in fields if name != "config"}


def make_config_facts(config: Any) -> dict[str, Any]:
    """Return a configuration as facts to save with the checkpoints of a run.

    Fields that only concern this start of the run (its directory, when it stops, its timeouts) are
    not among them: see `option`.

    Returns:
        {"config.NAME": value}.

    Examples:
        >>> make_config_facts(RunConfig(seed=7))["config.seed"]
        7
    """
    names = [name for name, x in _list_fields(type(config)).items() if x.on_resume != "ignore"]
    values = config_to_dict(config)
    return {f"config.{name}": values[name] for name in names}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_plain(item) for item in value]
    if isinstance(value, Interval):
        return value.value if value.unit == "steps" else str(value)
    # A flag makes a path of s3://bucket/run, which has one slash less.
    return (find_url(value) or str(value)) if isinstance(value, Path) else value


# ------------------------------------------------------------------------------------ checking


def _format_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _suggest_name(name: str, names: Iterable[str]) -> str:
    # Compared without dashes, which would make all flags similar: --lora is not like --lr.
    dashes = name[: len(name) - len(name.lstrip("-"))]
    bare_names = [x.lstrip("-") for x in names]
    near = difflib.get_close_matches(name[:100].lstrip("-"), bare_names, n=1, cutoff=0.7)
    return f" (did you mean {dashes}{near[0]}?)" if near else ""


def check_argv(argv: Sequence[str]) -> None:
    """Raise ConfigError if Python could not decode a word of the command line.

    No file of a run could contain it.

    Raises:
        ConfigError: A word is not text in the locale.

    Examples:
        >>> check_argv(["--out", "runs/é"])
    """
    for word in argv:
        if not word.isascii() and any("\ud800" <= x <= "\udfff" for x in word):
            raise ConfigError(
                f"{os.fsencode(word)!r} is no text in this locale ({sys.getfilesystemencoding()})",
                where="command line",
                hint="set LC_ALL=C.UTF-8, or PYTHONUTF8=1, and name files in UTF-8",
            )


def _check_flags(config_type: type[Any], argv: Sequence[str]) -> None:
    fields = _list_fields(config_type)
    flags = ["--help", *map(_format_flag, fields)]
    # tyro gives every switch a --no- form.
    negated = (_format_flag(f"no_{name}") for name, x in fields.items() if x.type is bool)
    expected = {*flags, *negated}
    problems = []
    for word in argv:
        flag = _format_flag(word[2:].partition("=")[0]) if word.startswith("--") else ""
        if flag and flag not in expected:
            suggestion = _list_parts(flag, fields) or _suggest_name(flag, flags)
            problems.append(f"unknown flag {flag[:100]}{suggestion}")
    paths = {_format_flag(name) for name, x in fields.items() if "Path" in str(x.type)}
    flag = ""
    for word in argv:
        flag, _, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        if flag in paths and not value and (not word or "=" in word):
            problems.append(f"{flag} is empty; the folder that you are in is called .")
    _raise_all(problems, "command line")


def _make_registry() -> Any:
    """Return the rules of tyro for types of our own: an interval is one word."""
    from tyro import constructors  # noqa: PLC0415 -- an extra

    registry = constructors.ConstructorRegistry()

    def read(words: list[str]) -> Interval:
        return parse_interval(words[0])

    @registry.primitive_rule
    def _(
        info: constructors.PrimitiveTypeInfo,
    ) -> constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type is not Interval:
            return None
        return constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="N|30min|100M-tokens|2epochs",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, Interval),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _list_parts(flag: str, fields: Mapping[str, _Field]) -> str:
    """List the flags of a record and their choices, if `flag` is the name of a record."""
    parts = []
    for name, field in fields.items():
        if flag in map(_format_flag, field.path[:-1]):
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            parts.append(f"{_format_flag(name)} {'|'.join(map(str, choices))}".strip())
    return f" (it has parts: {', '.join(parts)})" if parts else ""


def _find_config_flag(config_type: type[Any], argv: Sequence[str]) -> str | None:
    """Return the file of the last --config; tyro also takes the last of every flag."""
    file = None
    for word, following in zip_longest(argv, argv[1:]):
        name, equals, value = word.partition("=")
        if name == "--config":
            file = value if equals else following
    # tyro reads the word None as no value.
    return file if file != "None" and "config" in _list_fields(config_type) else None


def _read_tyro_error(message: str) -> str:
    """Return the first paragraph below the title of tyro's error box as one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", message).strip()
    # tyro raises nothing to read: it prints a box with rulers between paragraphs, and exits.
    lines = [line.strip("│| ") for line in text.splitlines()[1:]]
    is_ruler = [bool(line) and not line.strip("─-╰╯+") for line in lines]
    groups = groupby(zip(lines, is_ruler, strict=True), key=lambda pair: pair[1])
    paragraphs = [" ".join(line for line, _ in group) for ruler, group in groups if not ruler]
    return paragraphs[0] if paragraphs else text


def _read_file(config_type: type[T], path: str | Path, absent: Any) -> T:
    """Return the record of a file, with `absent` for missing fields, or raise all problems."""
    try:
        table = _parse_toml(read_limited(Path(path), max_bytes=_MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}", where=str(path)) from error
    types = {name: x.type for name, x in _list_fields(config_type).items() if name != "config"}
    values, problems = _convert_values(table, types)
    hints = get_type_hints(config_type)
    arguments: dict[str, Any] = {}
    with attrs.validators.disabled():
        for a in attrs.fields(config_type):
            if a.init and _is_record(hints[a.name]):  # a record inside, whose fields are flags too
                names = values.keys() & _list_fields(hints[a.name])
                # What the file leaves out keeps the default of the record.
                inner = {name: values[name] for name in names}
                arguments[a.name] = attrs.evolve(a.default, **inner)
            elif a.init and a.name in values:
                arguments[a.name] = values[a.name]
            elif a.init and a.default is attrs.NOTHING:
                arguments[a.name] = absent
        config = config_type(**arguments)
    problems += _find_broken_rules(config, set(values))
    _raise_all([f"{path}: {problem}" for problem in problems[:1]] + problems[1:], str(path))
    return config


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        # The parser needs time and memory that grow with the square of a dotted key's parts.
        if max((line.count(".") for line in text.splitlines()), default=0) < _MAX_DOTS:
            return tomllib.loads(text)
    except RecursionError:
        pass
    raise ValueError("nested too deep for a configuration")


def _convert_values(
    table: dict[str, Any], types: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a table by field name, and the problems with the others."""
    convert = _make_converter()
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in types:
            suggestion = _suggest_name(name, types) if len(problems) < _MAX_PROBLEMS else ""
            problems.append(f"unknown key {key[:100]}{suggestion}")
        elif name in values:
            problems.append(f"{name} appears twice, with dashes and with underscores")
        else:
            try:
                is_fraction = name == "recompute" and isinstance(value, float)  # 0.4, not "0.4"
                values[name] = convert(str(value) if is_fraction else value, types[name])
            except ConfigError as error:
                problems.append(f"{name}: {error}")
            except Exception:  # noqa: BLE001 -- cattrs raises groups and bare Exceptions
                wanted = types[name]
                is_class = isinstance(wanted, type) and get_origin(wanted) is None
                # Without the modules: tuple[Path, ...], not tuple[pathlib.Path, ...].
                shown = re.sub(r"\b[a-z_.]+\.", "", wanted.__name__ if is_class else str(wanted))
                problems.append(f"{name} must be {shown}, got {_short.repr(value)}")
    return values, problems


def _make_converter() -> Callable[[Any, Any], Any]:
    """Return `convert(value, type)`: that of cattrs, without its conversions between types."""
    with needs_extra("recipes"):
        import cattrs  # noqa: PLC0415 -- an extra
    converter = cattrs.Converter()

    def scalar(*accepted: type[Any]) -> Callable[[Any, Any], Any]:
        def structure(value: Any, wanted: Any) -> Any:
            # Not isinstance, for which True is an int; cattrs itself would convert "7" to 7.
            if type(value) not in accepted or (wanted is Path and not value):
                raise TypeError(f"not {wanted}")
            return wanted(value)

        return structure

    for wanted, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
        converter.register_structure_hook(wanted, scalar(*accepted))
    converter.register_structure_hook(Path, scalar(str))

    converter.register_structure_hook(Interval, lambda value, _: parse_interval(value))

    def convert(value: Any, wanted: Any) -> Any:
        if get_origin(wanted) is tuple and not isinstance(value, list):
            raise TypeError("not a list")  # cattrs would read a string as a list of characters
        # TOML has no null, so config.toml has this word.
        if value == "None" and type(None) in getattr(wanted, "__args__", ()):
            return None
        return converter.structure(value, wanted)

    return convert


def _find_broken_rules(config: Any, names: Container[str] | None = None) -> list[str]:
    """Return all values that break a field's rule; attrs itself would stop at the first.

    No field may be NaN, which passes most comparisons, or an integer beyond int64.
    """
    problems: list[str] = []
    for name, field in _list_fields(type(config)).items():
        value = field.get_value(config)
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
                field.attribute.validator(field.get_record(config), field.attribute, value)
            except (ValueError, TypeError) as error:
                text = str(error)
                problems.append(text if name in text else f"{name}: {text}")
    return problems


def _raise_all(problems: Sequence[str], where: str) -> None:
    if problems:
        shown = list(problems[:_MAX_PROBLEMS])
        if len(problems) > _MAX_PROBLEMS:
            shown.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        raise ConfigError("; ".join(shown), where=where)
