"""Defaults, a file and flags make one record; what is wrong is named, all of it, before step 1."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.files import format_toml
from trainkit.run.config import (
    OptimizerOptions,
    RowOptions,
    RunConfig,
    config_to_dict,
    fraction,
    interval,
    load_config,
    make_config_facts,
    make_resume_rules,
    non_negative,
    one_of,
    positive,
    read_config,
)
from trainkit.schedules import Interval, parse_interval
from trainkit.types import ConfigError, Layout


@attrs.frozen(kw_only=True)
class Config(RunConfig):
    """Train a thing."""

    steps: int = 50
    """Stop after so many."""

    lr: float = attrs.field(default=1e-3, validator=positive)
    """The peak learning rate."""

    decay: float = attrs.field(default=0.1, validator=fraction)
    """How much of it decays."""

    max_norm: float | None = 1.0
    """Clip to this norm."""

    corpus: tuple[Path, ...] = ()
    """The text."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""

    name: str | None = None
    """What to call it."""

    kernel: Literal["sdpa", "varlen"] = "sdpa"
    """The attention."""

    kind: str = attrs.field(default="a", validator=one_of("a", "b"))
    """The kind."""

    compile: bool = False
    """Compile each block."""


@attrs.frozen(kw_only=True)
class WithRows(RunConfig):
    """Has the rows of a recipe."""

    batch: RowOptions = RowOptions()
    """How rows are made."""


@attrs.frozen(kw_only=True)
class Required:
    """Needs a run."""

    run: Path
    """The run."""

    config: Path | None = None
    """A file."""

    tokens: int = 5
    """How many."""


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    file = write(tmp_path, 'steps = 7\nlr = 1\nsave-every = 3\nbetas = [0.8, 0.9]\ncorpus = ["a"]')
    config = load_config(
        Config, ["--config", file, "--steps", "9", "--dp-replicate=2", "--compile"]
    )
    assert (config.steps, config.lr, config.seed) == (9, 1.0, 0)
    assert config.checkpoints.save_every == Interval(3)
    assert (config.betas, config.corpus, config.compile) == ((0.8, 0.9), (Path("a"),), True)
    assert config.layout == Layout(dp_replicate=2)
    assert config.config == Path(file)
    other = tmp_path / "other.toml"
    other.write_text("steps = 5")
    for words in (["--config", file, f"--config={other}"], [f"--config={file}", "--config", other]):
        last = load_config(Config, list(map(str, words)))
        assert (last.config, last.steps, last.lr) == (other, 5, Config().lr)
    assert type(config.lr) is float


def test_no_arguments_give_the_defaults():
    assert load_config(Config, []) == Config()


def test_a_required_field_may_come_from_either(tmp_path):
    file = write(tmp_path, "tokens = 6")
    assert load_config(Required, ["--run", "a"]) == Required(run=Path("a"))
    assert load_config(Required, [f"--config={file}", "--run", "a"]).tokens == 6
    both = write(tmp_path, 'run = "b"')
    assert load_config(Required, ["--config", both]).run == Path("b")
    assert read_config(Required, both) == Required(run=Path("b"))


@pytest.mark.case("G1", "G2", "G8")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stpes", "3"], "unknown flag --stpes (did you mean --steps?)"),
        (["--start-timeou=3"], "unknown flag --start-timeou (did you mean --start-timeout?)"),
        (["--seed", "9" * 26], "seed must be below 2^63, got 99999"),
        (["--seed", str(2**63)], f"seed must be below 2^63, got {2**63}"),
        (["--zzz", "--lrr", "1"], "unknown flag --zzz; unknown flag --lrr (did you mean --lr?)"),
        (["--steps", "3.7"], "--steps: invalid literal for int() with base 10: '3.7'"),
        (["--steps"], "Missing value for argument '--steps'"),
        (["--precision", "bfloat17"], "--compute auto|fp32|bf16|fp16, --reduction fp32|bf16"),
        (["--lr", "nan"], "lr must be a number, got nan"),
        (["--lr", "fast"], "--lr: could not convert string to float: 'fast'"),
        (
            ["--lr", "-1", "--decay", "2"],
            "lr must be above 0, got -1.0; decay must be between 0 and",
        ),
        (["--betas", "0.9", "nan"], "betas must be a number"),
        (["--kernel", "flash"], "invalid choice 'flash' for argument '--kernel'"),
        (["--kind", "c"], "kind must be one of 'a', 'b', got 'c'"),
        (["--compile", "perhaps"], "perhaps"),
        (["surprise"], "surprise"),
        (["--config", "missing.toml"], "missing.toml: No such file or directory"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what(argv, message, capsys):
    with pytest.raises(ConfigError) as caught:
        load_config(Config, argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "│" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_flag_that_is_near_none_is_not_taken_for_a_short_one():
    for flag in ("--lora", "--dp", "--" + "x" * 1_000_000):
        with pytest.raises(ConfigError) as caught:
            load_config(Config, [flag])
        assert str(caught.value) == f"unknown flag {flag[:100]}"


def many_keys(path):
    path.write_text("".join(f"some_key_{i:010d} = 1\n" for i in range(440_000)))


def deep(path):
    path.write_text(f"seed = {'[' * 30_000}{']' * 30_000}")


def deep_keys(path):
    path.write_text(f"seed{'.a' * 30_000} = 1")


def nested(path):
    path.write_text(f"seed{'.a' * 900} = 1")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(3 << 30)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is no regular file"),
        (sparse, "has 3221225472 bytes, where 65536 are the most"),
        (many_keys, "has 10560000 bytes, where"),
        (deep, "nested too deep for a configuration"),
        (deep_keys, "nested too deep for a configuration"),
        (nested, "seed must be int, got {'a': {'a': {'a'"),
    ],
)
def test_a_file_that_would_never_be_read_is_refused_at_once(tmp_path, make, message):
    make(tmp_path / "config.toml")
    begin = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        load_config(Config, ["--config", str(tmp_path / "config.toml")])
    assert str(caught.value).startswith(f"{tmp_path / 'config.toml'}: {message}")
    assert time.perf_counter() - begin < 2


def test_of_many_problems_the_first_are_told(tmp_path):
    file = write(tmp_path, "".join(f"some_key_{i} = 1\n" for i in range(3000)))
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=r"some_key_19; and 2980 more$"):
        read_config(Config, file)
    assert time.perf_counter() - begin < 2


@pytest.mark.case("G1", "G2", "G11")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "unknown key stpes (did you mean steps?)"),
        ('steps = "3"', "steps must be int, got '3'"),
        ("steps = 3.7", "steps must be int, got 3.7"),
        ("steps = true", "steps must be int, got True"),
        ("lr = true", "lr must be float, got True"),
        ("lr = nan", "lr must be a number, got nan"),
        ("lr = 0", "lr must be above 0, got 0.0"),
        ("compile = 1", "compile must be bool, got 1"),
        ('corpus = "abc"', "corpus must be tuple[Path, ...], got 'abc'"),
        ("corpus = [1]", "corpus must be tuple[Path, ...], got [1]"),
        ("betas = [0.9]", "betas must be tuple[float, float], got [0.9]"),
        ('max_norm = "1"', "max_norm must be float | None, got '1'"),
        ('kernel = "flash"', "kernel must be Literal['sdpa', 'varlen'], got 'flash'"),
        ("[lr]\na = 1", "lr must be float, got {'a': 1}"),
        ('config = "other.toml"', "unknown key config"),
        ("save-every = 1\nsave_every = 1", "save_every appears twice"),
        ("steps = ", "Invalid value"),
        ("steps = 1\nsteps = 2", "Cannot overwrite a value"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, message):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(Config, ["--config", file])
    assert message in str(caught.value)
    assert str(caught.value).startswith(file)
    with pytest.raises(ConfigError) as again:
        read_config(Config, file)
    assert str(again.value) == str(caught.value)


@pytest.mark.case("G2")
def test_all_problems_of_a_file_stand_in_one_message(tmp_path):
    file = write(tmp_path, 'stpes = 3\nlr = -1.0\nsteps = "x"\ndecay = nan\nkind = "c"\nseed = 4')
    with pytest.raises(ConfigError) as caught:
        load_config(Config, ["--config", file])
    assert str(caught.value).split("; ") == [
        f"{file}: unknown key stpes (did you mean steps?)",
        "steps must be int, got 'x'",
        "lr must be above 0, got -1.0",
        "decay must be a number, got nan",
        "kind must be one of 'a', 'b', got 'c'",
    ]


def test_a_file_that_is_no_text_or_lacks_a_field_is_refused(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(Config, ["--config", str(path)])
    with pytest.raises(ConfigError, match="run is missing"):
        read_config(Required, write(tmp_path, "tokens = 6"))
    with pytest.raises(ConfigError, match="--run"):
        load_config(Required, ["--tokens", "6"])


def test_help_explains_every_field_with_its_default_and_exits_0(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(Config, ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert caught.value.code == 0
    assert "Train a thing." in text
    for name in config_to_dict(Config()):
        assert f"--{name.replace('_', '-')}" in text
    assert "When a run saves, and which checkpoints it retains." in text
    assert "Stop after so many. (default: 50)" in text
    assert "The peak learning rate. (default: 0.001)" in text
    assert text.count("(default:") == len(["--config", *config_to_dict(Config())])


strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(allow_nan=False)
paths = strings.filter(lambda text: "\0" not in text).map(Path)
configs = st.builds(
    Config,
    out=paths,
    steps=st.integers(-(2**63), 2**63 - 1),
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(min_value=0, exclude_min=True),
    max_norm=st.none() | numbers,
    corpus=st.lists(paths, max_size=3).map(tuple),
    betas=st.tuples(numbers, numbers),
    name=st.none() | strings.filter(lambda text: text != "None"),
    layout=st.builds(Layout, tp=st.integers(1, 9), cpu_offload=st.booleans()),
    compile=st.booleans(),
    resume=strings,
)


@settings(max_examples=15)  # each reads twice, a tenth of a second
@given(config=configs)
def test_what_is_written_reads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(format_toml(config_to_dict(config)), encoding="utf-8")
    assert read_config(Config, path) == config
    again = load_config(Config, ["--config", str(path)])
    assert attrs.evolve(again, config=None) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


@pytest.mark.case("G2")
def test_rules_hold_where_a_record_is_made_by_hand():
    for name, make in {
        "lr": lambda: Config(lr=0.0),
        "decay": lambda: Config(decay=1.5),
        "kind": lambda: Config(kind="c"),
        "tp": lambda: Layout(tp=0),
        "dp_shard": lambda: Layout(dp_shard=-2),
    }.items():
        with pytest.raises(ConfigError, match=name):
            make()
    with pytest.raises(ConfigError, match="seed must be at least 0 and finite, got -1"):
        Config(seed=-1)
    assert callable(non_negative)
    assert math.isinf(Config(lr=math.inf).lr)


@pytest.mark.case("L13")
@pytest.mark.parametrize("missing", ["tyro", "cattrs"])
def test_a_missing_extra_says_what_to_install(monkeypatch, tmp_path, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r'pip install "trainkit-lm\[recipes\]"'):
        load_config(Config, ["--config", write(tmp_path, "steps = 1")])


def test_reading_a_configuration_loads_no_torch():
    code = "import sys, trainkit.run.config as c; c.load_config(c.RunConfig, []); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_config_facts_are_plain_and_leave_out_where_a_run_is_and_how_it_is_watched():
    found = make_config_facts(WithRows(out=Path("x"), seed=3))
    assert found["config.seed"] == 3
    assert found["config.multiple_of"] == 8
    assert found["config.microbatch"] == 4  # which is free to change
    assert found["config.matmul"] == "highest"  # which may when asked for
    for name in ("out", "steps", "resume", "keep", "step_timeout", "on_spike"):
        assert f"config.{name}" not in found


@pytest.mark.parametrize("value", ["inf", "1e300", "0", "-1", "1e-9"])
@pytest.mark.parametrize("flag", ["--step-timeout", "--start-timeout", "--grace"])
def test_a_time_that_nobody_waits_is_refused(flag, value):
    with pytest.raises(ConfigError, match=r"from 1 to 2592000 seconds .30 days., got"):
        load_config(RunConfig, [flag, value])


EMPTY = [["--out", ""], ["--out="], ["--seed", "1", "--config", ""], ["--data", "a", ""]]


@attrs.frozen(kw_only=True)
class Reads(RunConfig):
    """Read files."""

    data: tuple[Path, ...] = ()
    """Files."""


@pytest.mark.parametrize("words", EMPTY)
def test_a_path_that_is_empty_is_refused(words):  # "$OUT" where there is no such variable
    with pytest.raises(ConfigError, match="is empty; the folder that you are in is called"):
        load_config(Reads, words)
    assert load_config(Reads, ["--out", ".", "--data", "a", "--resume", ""]).out == Path()


@pytest.mark.parametrize("text", ['out = ""', 'data = ["a", ""]'])
def test_a_path_of_a_file_that_is_empty_is_refused(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"must be .*Path"):
        load_config(Reads, ["--config", str(tmp_path / "c.toml")])


def test_a_word_that_is_no_text_here_is_refused_with_the_cure():
    path = os.fsdecode("/runs/é".encode()).encode().decode("ascii", "surrogateescape")
    with pytest.raises(ConfigError, match="is no text in this locale") as error:
        load_config(RunConfig, ["--out", path])
    assert "LC_ALL=C.UTF-8" in error.value.hint
    assert load_config(RunConfig, ["--out", "/runs/é"]).out == Path("/runs/é")


def test_a_null_byte_is_told_with_the_field(tmp_path):
    (tmp_path / "c.toml").write_text('out = "a\\u0000b"')
    with pytest.raises(ConfigError, match="out must have no null byte"):
        load_config(RunConfig, ["--config", str(tmp_path / "c.toml")])


def test_a_run_goes_on_in_another_layout_and_never_with_other_rows():
    moved = Layout(
        **dict.fromkeys(Layout().degrees, 2),
        schedule="gpipe",
        fold_sp="none",
        reshard_after_forward=False,
        reshard_over=2,
        prefetch=2,
        separate_ends=True,
        cpu_offload=True,
        reduce="each",
        ep_adjacent=False,
    )
    before, after = WithRows(), WithRows(layout=moved, batch=RowOptions(microbatch=1))
    changed = {
        name for name, x in config_to_dict(before).items() if config_to_dict(after)[name] != x
    }
    assert changed == {field.name for field in attrs.fields(Layout)} | {"microbatch"}
    rules = make_resume_rules(WithRows(allow_change=("compute",)))
    assert {f"config.{name}" for name in changed} <= set(rules.allow)
    kept = ("compute", "reduction", "moments", "matmul", "deterministic")
    assert (rules.ask, rules.granted) == (kept, ("compute",))
    for name in ("multiple_of", "rows", "row_length", "seed"):
        assert name not in {x.removeprefix("config.") for x in (*rules.allow, *rules.ask)}


def test_a_field_of_a_record_inside_is_a_flag_and_a_key_like_any_other(tmp_path):
    file = write(tmp_path, "rows = 3\nmultiple-of = 16\nring = 4")
    config = load_config(WithRows, ["--config", file, "--rows", "5", "--on-spike", "skip"])
    assert (config.batch, config.layout) == (RowOptions(rows=5, multiple_of=16), Layout(ring=4))
    assert config.policy.on_spike == "skip"
    for argv, message in (
        (["--rows", "0"], "rows must be above 0, got 0"),
        (["--keep", "1"], "keep must be 0 for all, or at least 2"),
        (["--ring", "9" * 26], "ring must be below 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(WithRows, argv)


@attrs.frozen(kw_only=True)
class WithOptimizer(RunConfig):
    """Has an optimizer."""

    optim: OptimizerOptions = OptimizerOptions()


@pytest.mark.parametrize(
    "argv",
    [
        ["--optimizer", "muon", "--storage", "bf16"],
        ["--optimizer", "muon", "--moments", "8bit"],
        ["--optimizer-groups", "head.* optimizer=muon", "--moments", "bf16"],
    ],
)
def test_an_optimizer_that_cannot_keep_what_the_precision_says_is_refused(argv):
    with pytest.raises(ConfigError, match=r"^muon does not support (parameters|moments) in"):
        load_config(WithOptimizer, argv)
    load_config(WithOptimizer, ["--optimizer", "lion", "--storage", "bf16", "--moments", "8bit"])


@pytest.mark.parametrize("written", ["0.4", "4e-1", "'0.4'"])
def test_a_fraction_to_keep_is_a_number_in_a_file(tmp_path, written):
    file = write(tmp_path, f"recompute = {written}")
    assert load_config(RunConfig, ["--config", file]).recompute == "0.4"
    with pytest.raises(ConfigError, match=r"resume must be str, got 0\.4"):
        load_config(RunConfig, ["--config", write(tmp_path, "resume = 0.4")])
    file = write(tmp_path, "recompute = 1.5")
    with pytest.raises(ConfigError, match=r"recompute must be \"none\".*got '1.5'"):
        load_config(RunConfig, ["--config", file])


@attrs.frozen(kw_only=True)
class Twice(RunConfig):
    """Has rows of its own beside those of the record."""

    batch: RowOptions = RowOptions()
    rows: int = 3


def test_two_fields_of_one_name_are_a_mistake_of_the_recipe():
    with pytest.raises(AssertionError, match="Twice has rows twice"):
        config_to_dict(Twice())


# ------------------------------------------------------------------------------------ intervals


@attrs.frozen(kw_only=True)
class Evaluated(RunConfig):
    """A recipe that evaluates at an interval."""

    eval_every: Interval = interval(325, on_resume="allow")
    """Evaluate every so many steps; 0 for never."""


@pytest.mark.parametrize(
    ("flag", "plain"),
    [("7", 7), ("0", 0), *((x, x) for x in ("30min", "100M-tokens", "2epochs"))],
)
def test_an_interval_is_a_number_of_steps_or_a_text_in_flags_files_and_facts(flag, plain, tmp_path):
    found = load_config(Evaluated, ["--eval-every", flag])
    assert found.eval_every == parse_interval(flag)
    assert found == Evaluated(eval_every=flag)
    assert config_to_dict(found)["eval_every"] == plain
    assert make_config_facts(found)["config.eval_every"] == plain
    file = write(tmp_path, f"eval_every = {json.dumps(plain)}")
    assert read_config(Evaluated, file) == found
    assert load_config(Evaluated, ["--config", str(file)]).eval_every == found.eval_every


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-every", "30m"], "--eval-every: '30m' is no interval: 30min, or 30M-tokens for"),
        (["--save-every", "0"], "save_every must be above 0, got 0"),
        (["--save-every=0s"], "save_every must be above 0, got 0s"),
        (["--eval-every", "-3"], "eval_every must be at least 0, got -3"),
        (["--save-every", "1.5tokens"], "'1.5tokens' is no whole number of tokens"),
    ],
)
def test_a_flag_that_is_no_interval_is_refused_in_words(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(Evaluated, flags)


def test_a_file_with_several_wrong_intervals_names_each(tmp_path):
    file = write(tmp_path, 'save_every = "30m"\neval_every = 2.5')
    with pytest.raises(ConfigError) as caught:
        read_config(Evaluated, file)
    assert "save_every: '30m' is no interval: 30min, or" in str(caught.value)
    assert "eval_every: '2.5' is no interval: write 200, 30min, " in str(caught.value)


def test_help_shows_the_forms_of_an_interval(capsys):
    with pytest.raises(SystemExit):
        load_config(Evaluated, ["--help"])
    shown = capsys.readouterr().out
    assert "--eval-every N|30min|100M-tokens|2epochs" in shown
    assert "0 for never. (default: 325)" in " ".join(shown.replace("\u2502", " ").split())
