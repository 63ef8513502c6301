"""docs/first_run.ipynb shows what its cells print; .ci/run executes it, and an error ends that."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "first_run.ipynb"
SCRIPT = ROOT / "docs" / "execute_notebook.py"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def printed(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def test_it_was_executed_from_top_to_bottom_and_no_cell_failed():
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    kinds = [output["output_type"] for cell in CODE for output in cell["outputs"]]
    assert {*kinds} == {"stream", "display_data"}
    assert NOTEBOOK.stat().st_size < 100_000


def test_it_shows_a_resume_bit_for_bit_and_a_model_that_is_right_and_wrong():
    text = "".join(map(printed, CODE))
    assert text.count("equal, bit for bit: True") == text.count("optimizer state equal: True") == 1
    assert "equal in all 16 steps" in text
    assert "a sum:  all agree" in text
    assert "a mean of means:  they differ" in text
    assert not re.search(r"/(tmp|home|work)/", text), "a folder of this machine"


def test_its_links_lead_to_pages():
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) == 3
    assert all((NOTEBOOK.parent / link).is_file() for link in links)


def test_a_cell_that_fails_is_found(tmp_path):
    cell = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": []}
    page = {"cells": [cell | {"source": "assert 1 + 1 == 3"}], "metadata": {}}
    file = tmp_path / "wrong.ipynb"
    file.write_text(json.dumps(page | {"nbformat": 4, "nbformat_minor": 5}))
    command = [sys.executable, SCRIPT, file]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "assert 1 + 1 == 3" in ended.stderr


def test_ci_executes_it():
    assert re.search(
        r"^part notebook python docs/execute_notebook\.py$",
        (ROOT / ".ci" / "run").read_text(),
        re.MULTILINE,
    )
