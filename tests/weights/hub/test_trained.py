"""A base run is found by its name, or trained now."""

import textwrap

import pytest

from trainkit import hub
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.hub import trained

RECIPE = """
    import pathlib, sys
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    out = pathlib.Path(flags["--out"])
    out.mkdir(parents=True)
    print("what it prints")
    (out / "began").write_text(flags["--steps"])
    (out / "final.json").write_text("{}")
"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """Return a folder that stands in for the recipes: they end at once, with code 0."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in ("pretrain", "finetune"):
        (folder / f"{name}.py").write_text(textwrap.dedent(RECIPE))
    monkeypatch.setattr(trained, "find_recipes", lambda: folder)
    return folder


def test_a_base_is_trained_once_and_a_pretrained_run_goes_before_it(recipes, tmp_path, capfd):
    runs = tmp_path / "runs"
    assert hub.ensure_base_run(runs=runs) == runs / "base"
    out, err = capfd.readouterr()
    assert (out, "what it prints" in err) == ("", True)  # what is printed is the recipe's alone
    (recipes / "pretrain.py").write_text("raise SystemExit(1)")
    assert hub.ensure_base_run(runs=runs) == runs / "base"
    (runs / "pretrain/checkpoints/step_00000007").mkdir(parents=True)
    assert hub.ensure_base_run(runs=runs) == runs / "pretrain"
    assert hub.ensure_base_run("finetune", runs=runs) == runs / "answers"
    (runs / "finetune/checkpoints/step_00000007").mkdir(parents=True)
    assert hub.ensure_base_run("finetune", runs=runs) == runs / "finetune"


def test_a_base_that_was_stopped_ends_the_recipe_with_its_exit_code(recipes, tmp_path):
    (recipes / "pretrain.py").write_text("raise SystemExit(75)")
    with pytest.raises(SystemExit) as end:
        hub.ensure_base_run(runs=tmp_path / "runs")
    assert end.value.code == 75


def test_one_of_several_processes_trains_no_base(tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="no run to start from") as error:
        hub.ensure_base_run(runs=tmp_path / "runs")
    assert "the recipe pretrain trains one" in error.value.hint
    assert not (tmp_path / "runs").exists()


def test_what_is_nothing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json.* and no checkpoints"):
        hub.open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for opened in (hub.open_model, hub.open_folder):
        with pytest.raises(CheckpointError, match=rf"{tmp_path} has no config\.json") as error:
            opened(tmp_path)
        assert "hf download NAME --local-dir DIR" in error.value.hint
        with pytest.raises(
            CheckpointError, match=r"no folder google/gemma-3-1b-it; .* hf download"
        ):
            opened("google/gemma-3-1b-it")
        with pytest.raises(CheckpointError, match="hf download NAME --local-dir DIR"):
            opened(tmp_path / "gemma")


def test_adapters_without_their_model_are_refused_with_what_helps(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has adapters without") as error:
        hub.open_model(tmp_path)
    assert "--merge" in error.value.hint
