"""The scripts of .ci explain themselves, and run nothing that was not asked for."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / ".ci"


def call(script, *arguments):
    """Return a script's exit code and output; whatever it started ends with it."""
    process = subprocess.Popen(
        [SCRIPTS / script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        pytest.fail(f"{script} {' '.join(arguments)} still runs after 20 s: {output[-300:]}")
    return process.returncode, output


@pytest.mark.parametrize("script", ["run", "accelerator", "browser", "compat", "elastic", "slurm"])
def test_help_explains_and_does_nothing_else(script):
    code, output = call(script, "--help")
    assert code == 0
    assert re.search(rf"^(usage: \.ci/)?{script}\b", output)
    assert "== " not in output, "a part has begun"


def test_an_argument_that_is_unknown_is_refused():
    code, output = call("run", "--fast")
    assert (code, output.splitlines()[-1]) == (64, ".ci/run: takes no arguments, got: --fast")
