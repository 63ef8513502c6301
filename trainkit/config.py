"""From a TOML file and a command line to one frozen attrs record, or to an error that helps.

Flags override the file, the file overrides the defaults. Only recipes use this room: functions of
the library take values. The command line is tyro's, the types of a file are checked by cattrs.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import math
import os
import re
import reprlib
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import timedelta
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import attrs

from trainkit.checkpoint.retention import Retention
from trainkit.files import read_bounded
from trainkit.health import Policy
from trainkit.runtime.errors import needs_extra
from trainkit.types import ConfigError

T = TypeVar("T")

_INT64 = 1 << 63
_short = reprlib.Repr()  # which bounds depth and length
_short.maxstring = _short.maxother = 100
_MOST_BYTES = 1 << 16  # of a configuration file
_MOST_DOTS = 1000  # of a line of it
_MOST_PROBLEMS = 20  # that are told, each with the nearest name: a search takes a millisecond

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]
"""The type of an attrs validator."""


# ------------------------------------------------------------------------------------ rules


def _rule(holds: Callable[[Any], bool], want: str) -> Validator:
    def validate(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            raise ConfigError(
                f"{attribute.name} must be {want}, got {value!r}",
                where=attribute.name,
                got=value,
                want=want,
            )

    return validate


positive = _rule(lambda value: value > 0, "above 0")
non_negative = _rule(lambda value: value >= 0, "at least 0")
_waited = _rule(lambda value: 0 < value <= 30 * 86400, "above 0 and at most 30 days in seconds")
fraction = _rule(lambda value: 0 <= value <= 1, "between 0 and 1")
_positive_or_rest = _rule(lambda value: value > 0 or value == -1, "above 0, or -1 for the rest")
_all_or_two = _rule(
    lambda value: value == 0 or value >= 2,
    "0 for all, or at least 2, as the newest may turn out damaged",
)


def one_of(*choices: Any) -> Validator:
    """Return an attrs validator: the value is one of `choices`.

    `positive`, `non_negative` and `fraction` are such validators too; `attrs.validators.optional`
    makes them let None pass.

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     kernel: str = attrs.field(default="sdpa", validator=one_of("sdpa", "varlen"))
        >>> Config("sdp")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: kernel must be one of 'sdpa', 'varlen', got 'sdp'
    """
    return _rule(lambda value: value in choices, f"one of {', '.join(map(repr, choices))}")


@attrs.frozen(kw_only=True)
class RunConfig:
    """The flags that every training recipe has; a recipe's own record inherits from it."""

    out: Path = Path("runs/run")
    """The run directory: configuration, metrics, checkpoints and pictures. It is made."""

    steps: int = attrs.field(default=1000, validator=non_negative)
    """Stop after this step. Nothing else depends on it: see schedule-steps."""

    schedule_steps: int = attrs.field(default=1000, validator=positive)
    """The length of the learning rate's schedule; past it the last rate holds."""

    seed: int = attrs.field(default=0, validator=non_negative)
    """What initial values, the order of the data and dropout follow from."""

    config: Path | None = None
    """A TOML file with values for these flags, keys as in config.toml; flags override it."""

    resume: str = "auto"
    """auto: from the newest checkpoint that verifies, if there is one; never; or a checkpoint."""

    save_every: int = attrs.field(default=200, validator=positive)
    """Save a checkpoint every so many steps, and at the end."""

    keep: int = attrs.field(default=0, validator=_all_or_two)
    """How many of the newest checkpoints stay, at least 2; 0 for all."""

    keep_every: int = attrs.field(default=0, validator=non_negative)
    """With --keep: the checkpoints of every so many steps stay for good too; 0 for none."""

    background_saves: bool = True
    """Copy the state to host memory and write it while training goes on."""

    allow_change: tuple[str, ...] = ()
    """Names of flags that this run may be continued with another value of: lr, schedule-steps."""

    max_skips: int = attrs.field(default=3, validator=positive)
    """So many steps in a row with bad numbers are a roll-back; those before are skipped."""

    max_rollbacks: int = attrs.field(default=3, validator=non_negative)
    """How often a run may go back to an earlier checkpoint because of bad numbers."""

    on_spike: Literal["apply", "skip"] = "apply"
    """Whether a step far above those before it, in loss or norm, is taken and told, or skipped."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl: tensorboard, wandb."""

    step_timeout: float = attrs.field(default=600.0, validator=_waited)
    """Seconds that a step may take before the run ends and the rank that is stuck is named."""

    start_timeout: float = attrs.field(default=1800.0, validator=_waited)
    """Seconds that everything before the first step's end may take."""

    grace: float | None = attrs.field(default=None, validator=attrs.validators.optional(_waited))
    """Seconds from a signal to stop until the launcher kills, less a few; by default 25, or what
    two steps and a save have taken."""

    pp: int = attrs.field(default=1, validator=positive)
    """Pipeline stages."""

    dp_replicate: int = attrs.field(default=1, validator=positive)
    """Copies of the parameters, each trained on rows of its own."""

    dp_shard: int = attrs.field(default=-1, validator=_positive_or_rest)
    """Ranks that split parameters and rows between them; -1 takes the rest of the world."""

    ring: int = attrs.field(default=1, validator=positive)
    """Ranks that split a row's tokens and pass keys and values around."""

    ulysses: int = attrs.field(default=1, validator=positive)
    """Ranks that split a row's tokens and exchange them for heads."""

    tp: int = attrs.field(default=1, validator=positive)
    """Ranks that split each matrix (tensor parallelism)."""

    ep: int = attrs.field(default=1, validator=positive)
    """Ranks that split the experts; they are among those that shard parameters."""

    fold_sp: Literal["all", "ring", "ulysses", "none"] = "all"
    """Which of ring and ulysses also split parameters; gradients are summed over the rest."""

    schedule: str = "1f1b"
    """The order of a pipeline's work: gpipe, 1f1b, interleaved_1f1b, looped_bfs, and others."""

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """What is computed in, on fp32 parameters; auto is bf16 on a GPU and fp32 on a CPU."""

    deterministic: bool = False
    """Take only algorithms that give the same bits each time, which all do on a CPU."""

    reduce: Literal["last", "each"] = "last"
    """After which microbatch gradients are reduced; each needs less memory, and sends more."""

    reshard_after_forward: bool = True
    """Gather a block's parameters again for backward; zero-bubble schedules need it off."""

    cpu_offload: bool = False
    """Keep sharded parameters and the optimizer's state in host memory, and step there."""

    multiple_of: int = attrs.field(default=8, validator=positive)
    """What a piece's length in its row is rounded up to, in all layouts; a ring of N needs 2 N."""

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of the layout by name, for `parallel_session`."""
        return {name: getattr(self, name) for name in DEGREES}

    @property
    def policy(self) -> Policy:
        """What is done about bad numbers."""
        names = ("max_skips", "max_rollbacks", "on_spike")
        return Policy(**{name: getattr(self, name) for name in names})

    @property
    def safety(self) -> dict[str, Any]:
        """What `checkpoint.guarded_saves` takes of a configuration."""
        retention = Retention(last=self.keep, every=self.keep_every) if self.keep else None
        how = {"policy": self.policy, "retention": retention, "background": self.background_saves}
        return {**how, "grace": self.grace or 25.0, "config": plain_values(self)}

    @property
    def session(self) -> dict[str, Any]:
        """What `runtime.open_run` takes, and with it `parallel_session`.

        Collectives may wait long: it is `runtime.watch` that ends a step after the step-timeout,
        and knows who is stuck.
        """
        start = timedelta(seconds=self.start_timeout)
        longest = max(start, timedelta(seconds=10 * self.step_timeout))
        waits = {"start_timeout": start, "timeout": longest, "grace": self.grace}
        return {**self.degrees, "fold_sp": self.fold_sp, **waits}

    @property
    def layout(self) -> dict[str, Any]:
        """What `parallel.check_layout` asks beside the model and the rows."""
        others = ("fold_sp", "schedule", "reshard_after_forward", "multiple_of")
        return {"degrees": self.degrees, **{name: getattr(self, name) for name in others}}


DEGREES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "ep")
LAYOUT_FIELDS = (*DEGREES, "fold_sp", "schedule", "reduce")
LAYOUT_FIELDS += ("reshard_after_forward", "cpu_offload", "deterministic")
"""The fields of `RunConfig` that say where the work of a step happens, never what is computed."""
SAFETY_FIELDS = ("keep", "keep_every", "background_saves", "step_timeout", "start_timeout")
SAFETY_FIELDS += ("grace", "max_skips", "max_rollbacks", "on_spike", "sinks")
"""The fields of `RunConfig` that say how a run is watched and kept, not what it is."""
PLACE_FIELDS = ("out", "steps", "config", "resume", "save_every", "allow_change")
PLACE_FIELDS += (*SAFETY_FIELDS, *LAYOUT_FIELDS)
"""The fields of `RunConfig` that say where a run happens and when it stops, not what it is."""


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
            breaks its field's rule. All problems of a file are told at once.

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
    _refuse_undecoded(argv)
    _check_flags(config_type, argv)
    file = _config_flag(config_type, argv)
    default = _from_file(config_type, file, tyro.MISSING) if file else tyro.MISSING_NONPROP
    errors = io.StringIO()
    with attrs.validators.disabled(), contextlib.redirect_stderr(errors):  # see _rule_problems
        try:
            config = tyro.cli(config_type, args=argv, default=default, description=description)
        except SystemExit as end:
            if not end.code:
                raise
            reason = _reason(errors.getvalue())
            raise ConfigError(reason, where="command line", hint="see --help") from None
    _raise_all(_rule_problems(config), "command line")
    return config


def read_config(config_type: type[T], path: str | Path) -> T:
    """Return the configuration that a TOML file gives, on top of the defaults.

    Raises:
        ConfigError: The file is missing, is not TOML, lacks a field without default, or holds an
            unknown key, a value of the wrong type, or one that breaks its field's rule.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_config(f"{folder}/config.toml", RunConfig(steps=7))
        ...     read_config(RunConfig, f"{folder}/config.toml") == RunConfig(steps=7)
        True
    """
    config = _from_file(config_type, path, attrs.NOTHING)
    fields = _fields(config_type)
    missing = [f"{a.name} is missing" for a in fields if getattr(config, a.name) is attrs.NOTHING]
    _raise_all(missing, str(path))
    return config


def write_config(path: str | Path, config: Any) -> None:
    """Write a configuration as TOML that `read_config` reads back equal.

    The field `config` is left out: the values of the file that it names are all here.

    Effects:
        Writes `path`, by a rename, so that it is whole at any time.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text("".join(_toml_lines(config)), encoding="utf-8")
    new.replace(path)


def plain_values(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as values that JSON holds.

    Examples:
        >>> plain_values(RunConfig(seed=7))["out"], plain_values(RunConfig(seed=7))["seed"]
        ('runs/run', 7)
    """
    return {a.name: _plain(getattr(config, a.name)) for a in _fields(type(config))}


def config_facts(config: Any) -> dict[str, Any]:
    """Return a configuration as facts to save with the checkpoints of a run.

    What only says where files are, how this start of the run began, when it stops and how it is
    watched is no fact of the run.

    Returns:
        {"config.NAME": value}.

    Examples:
        >>> config_facts(RunConfig(seed=7))["config.seed"]
        7
    """
    no_facts = ("out", "steps", "config", "resume", "save_every", "allow_change", *SAFETY_FIELDS)
    return {f"config.{name}": x for name, x in plain_values(config).items() if name not in no_facts}


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _toml_lines(config: Any) -> Iterable[str]:
    for attribute in _fields(type(config)):
        value = getattr(config, attribute.name)
        is_default = value is None and attribute.default is None
        if not is_default and attribute.name != "config":
            yield f"{attribute.name} = {_toml(value)}\n"


def _toml(value: Any) -> str:
    if value is None:
        return '"None"'  # TOML has no null; an optional field reads this as one, like its flag
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    raise ConfigError(f"write_config: {value!r} is no str, number, bool, Path, None or tuple")


# ------------------------------------------------------------------------------------ checking


def _fields(config_type: type[Any]) -> tuple[attrs.Attribute[Any], ...]:
    return tuple(a for a in attrs.fields(config_type) if a.init)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, names: Iterable[str]) -> str:
    # Without the dashes of flags, which are alike in all: --lora is nowhere near --lr.
    dashes = name[: len(name) - len(name.lstrip("-"))]
    bare = [known.lstrip("-") for known in names]
    near = difflib.get_close_matches(name[:100].lstrip("-"), bare, n=1, cutoff=0.7)
    return f" (did you mean {dashes}{near[0]}?)" if near else ""


def _refuse_undecoded(argv: Sequence[str]) -> None:
    """Refuse words that Python could not decode: no file of a run could name them."""
    for word in argv:
        if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(
                f"{os.fsencode(word)!r} is no text in this locale ({sys.getfilesystemencoding()})",
                where="command line",
                hint="set LC_ALL=C.UTF-8, or PYTHONUTF8=1, and name files in UTF-8",
            )


def _check_flags(config_type: type[Any], argv: Sequence[str]) -> None:
    flags = ["--help", *(_flag(a.name) for a in _fields(config_type))]
    types = get_type_hints(config_type)
    known = {
        *flags,
        *("--no-" + f[2:] for f in flags if types.get(f[2:].replace("-", "_")) is bool),
    }
    given = (_flag(word[2:].partition("=")[0]) for word in argv if word.startswith("--"))
    unknown = [f"unknown flag {f[:100]}{_nearest(f, flags)}" for f in given if f not in known]
    _raise_all(unknown, "command line")


def _config_flag(config_type: type[Any], argv: Sequence[str]) -> str | None:
    """Return the file of the last --config, as tyro takes the last of every flag."""
    file = None
    for word, following in zip_longest(argv, argv[1:]):
        name, equals, value = word.partition("=")
        if name == "--config":
            file = value if equals else following
    return file if file != "None" and "config" in attrs.fields_dict(config_type) else None


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
        table = _toml_table(read_bounded(Path(path), most=_MOST_BYTES).decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {reason}", where=str(path)) from error
    fields = {a.name: a for a in _fields(config_type) if a.name != "config"}
    values, problems = _typed_values(table, {n: get_type_hints(config_type)[n] for n in fields})
    required = {name: absent for name, a in fields.items() if a.default is attrs.NOTHING}
    with attrs.validators.disabled():
        config = config_type(**(required | values))
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
                values[name] = convert(value, types[name])
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
            if type(value) not in accepted:
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
    for attribute in attrs.fields(type(config)):
        value = getattr(config, attribute.name)
        if names is not None and attribute.name not in names:
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, float) and math.isnan(part) for part in parts):
            problems.append(f"{attribute.name} must be a number, got {value!r}")
        elif any(isinstance(part, Path) and "\0" in str(part) for part in parts):
            problems.append(f"{attribute.name} must have no null byte, got {str(value)!r}")
        elif any(isinstance(part, int) and not -_INT64 <= part < _INT64 for part in parts):
            problems.append(f"{attribute.name} must be below 2^63, got {value!r}")
        elif attribute.validator is not None:
            try:
                attribute.validator(config, attribute, value)
            except (ValueError, TypeError) as error:
                text = str(error)
                problems.append(text if attribute.name in text else f"{attribute.name}: {text}")
    return problems


def _raise_all(problems: Sequence[str], where: str) -> None:
    told, more = problems[:_MOST_PROBLEMS], len(problems) - _MOST_PROBLEMS
    if told:
        rest = [f"and {more} more"] if more > 0 else []
        raise ConfigError("; ".join([*told, *rest]), where=where)
