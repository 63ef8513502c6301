"""`python -m trainkit recipes` and `recipe`: a list, copies that run, and nothing overwritten."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit import files
from trainkit.__main__ import main

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))


def test_every_recipe_is_listed_with_a_sentence_of_its_docstring(capsys):
    assert main(["recipes"]) == 0
    found = {recipe["recipe"]: recipe["does"] for recipe in json.loads(capsys.readouterr().out)}
    assert sorted(found) == NAMES
    for name, sentence in found.items():
        docstring = ast.get_docstring(ast.parse((RECIPES / f"{name}.py").read_text()))
        assert docstring.startswith(sentence)
        assert len(sentence) > 20


def test_the_list_is_read_on_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].strip()] == [*NAMES, "python"]
    assert max(map(len, lines)) <= 80


def test_a_copy_is_the_recipe_below_a_line_with_the_version(capsys):
    assert main(["recipe", "pretrain"]) == 0
    first, text = capsys.readouterr().out.split("\n", 1)
    assert first == f"# The recipe pretrain of trainkit-lm {files.read_version()}"
    assert text == (RECIPES / "pretrain.py").read_text()
    assert ast.get_docstring(ast.parse(f"{first}\n{text}"))


def test_a_copy_goes_into_a_folder_and_overwrites_nothing(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert main(["recipe", "finetune.py", "--to", str(folder)]) == 0
    copy = folder / "finetune.py"
    assert json.loads(capsys.readouterr().out) == {"recipe": "finetune", "copied_to": str(copy)}
    assert copy.read_text().endswith((RECIPES / "finetune.py").read_text())
    copy.write_text("mine")
    assert main(["recipe", "finetune", "--to", str(folder)]) == 64
    report = json.loads(capsys.readouterr().out)
    assert report["error"] == f"recipe: {copy} exists, and is not overwritten"
    assert "recipe finetune > FILE" in report["hint"]
    assert copy.read_text() == "mine"
    assert list(folder.iterdir()) == [copy]


def test_what_is_no_folder_is_a_failure_of_the_disk_and_no_bug(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    assert main(["recipe", "moe", "--to", str(file)]) == 74
    assert str(file) in json.loads(capsys.readouterr().out)["error"]
    assert file.read_text() == "mine"


def test_an_unknown_name_names_those_there_are(capsys):
    assert main(["recipe", "../pretrain"]) == 64
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == f"recipe: there is no recipe ../pretrain; there are {', '.join(NAMES)}"


def test_the_commands_load_no_torch():
    program = (
        "import sys, trainkit.__main__ as t; t.main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    for words in (["recipes"], ["recipe", "moe"]):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", ["pretrain", "evaluate"])  # one with a run, one without
def test_a_copy_in_another_folder_explains_itself(name, tmp_path):
    assert main(["recipe", name, "--to", str(tmp_path)]) == 0
    command = [sys.executable, f"{name}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--" in done.stdout


def test_a_packed_recipe_goes_before_one_beside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "trainkit"
    (package / "recipes").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    monkeypatch.setattr(files, "__file__", str(package / "files.py"))
    assert files.find_recipes() == package / "recipes"
    shutil.rmtree(package / "recipes")
    assert files.find_recipes() == tmp_path / "recipes"
