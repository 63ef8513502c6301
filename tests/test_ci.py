"""The scripts of .ci explain themselves, and run nothing that was not asked for."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / ".ci"


def call(script, *arguments, env=None):
    """Return a script's exit code and output; whatever it started ends with it."""
    process = subprocess.Popen(
        [SCRIPTS / script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=env,
    )
    try:
        output, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        pytest.fail(f"{script} {' '.join(arguments)} still runs after 20 s: {output[-300:]}")
    return process.returncode, output


@pytest.mark.parametrize("script", ["run", "accelerator", "browser", "compat"])
def test_help_explains_and_does_nothing_else(script):
    code, output = call(script, "--help")
    assert code == 0
    assert re.search(rf"^(usage: \.ci/)?{script}\b", output)
    assert "== " not in output, "a part has begun"


def test_an_argument_that_is_unknown_is_refused():
    code, output = call("run", "--fast")
    assert (code, output.splitlines()[-1]) == (64, ".ci/run: takes no arguments, got: --fast")


@pytest.mark.parametrize("named", ["", "/does/not/exist/chrome"])
def test_without_a_browser_the_tests_of_the_page_say_what_to_install(tmp_path, named):
    for tool in ("bash", "dirname", "mktemp", "env"):  # a machine with these and no browser
        (tmp_path / tool).symlink_to(shutil.which(tool))
    env = {"PATH": str(tmp_path), "PYTHON": "/does/not/exist/python", "CHROMIUM": named}
    code, output = call("browser", env=env)
    assert code == 69
    [line] = output.splitlines()  # no folder was made, and nothing was installed
    assert line.startswith(
        f".ci/browser: no Chromium{f' at {named}' if named else ''}: install one"
    )
    assert "apt-get install chromium" in line
    assert "CHROMIUM=PATH" in line
