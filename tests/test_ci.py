"""The scripts of .ci explain themselves, and run nothing that was not asked for."""

import os
import re
import shutil
import signal
import subprocess
from datetime import UTC, datetime
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


@pytest.mark.parametrize(
    "script",
    [
        path.name
        for path in sorted(SCRIPTS.iterdir())
        if path.read_text().startswith("#!/usr/bin/env bash")
    ],
)
def test_help_explains_and_does_nothing_else(script):
    code, output = call(script, "--help")
    assert code == 0
    assert re.search(rf"^(usage: \.ci/)?{script}\b", output)
    assert "== " not in output, "a part has begun"


ARGUMENTS = {"bucket": "s3 or azurite"}


@pytest.mark.parametrize("script", ["run", "bucket", "elastic", "ray", "slurm", "trackers"])
def test_an_argument_that_is_unknown_is_refused(script):
    code, output = call(script, "--fast")
    assert (code, output.splitlines()[-1]) == (
        64,
        f".ci/{script}: takes {ARGUMENTS.get(script, 'no arguments')}, got: --fast",
    )


@pytest.mark.parametrize("script", ["package", "release"])
def test_an_argument_that_is_missing_is_asked_for(script):
    code, output = call(script)
    assert code == 64
    assert "got: nothing" in output.splitlines()[-1]


CHANGES = "# Changes\n\n## Unreleased\n\n- a thing\n\n## 0.1.0 (2026-01-01)\n\n- another\n"
CITATION = "title: x\nversion: 0.1.0\ndate-released: 2026-01-01\n"
PACKAGE = """\
#!/usr/bin/env bash
set -e
mkdir "$1"
cd "$(dirname "$0")/.."
version=$(git describe --tags)
touch "$1/trainkit_lm-${version#v}-py3-none-any.whl" "$1/trainkit_lm-${version#v}.tar.gz"
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a repository with the script of releases; what packs it is replaced."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "repository"
    (root / ".ci").mkdir(parents=True)
    for name in ("release", "usage"):
        shutil.copy(SCRIPTS / name, root / ".ci")
    files = {".ci/package": PACKAGE, "CHANGELOG.md": CHANGES, "CITATION.cff": CITATION}
    for name, text in (files | {".gitignore": "/dist/\n"}).items():
        (root / name).write_text(text)
    (root / ".ci/package").chmod(0o755)
    git(root, "init", "--quiet")
    git(root, "config", "user.name", "someone")
    git(root, "config", "user.email", "someone@localhost")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def git(root, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_release_is_a_section_a_tag_and_two_files(repository):
    code, output = call(repository / ".ci/release", "0.2.0")
    assert code == 0, output
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    changes = (repository / "CHANGELOG.md").read_text()
    assert f"## Unreleased\n\n## 0.2.0 ({today})\n\n- a thing\n\n## 0.1.0" in changes
    citation = (repository / "CITATION.cff").read_text()
    assert citation == f"title: x\nversion: 0.2.0\ndate-released: {today}\n"
    assert git(repository, "describe", "--tags") == "v0.2.0"
    assert git(repository, "log", "-1", "--format=%s %an") == "Release 0.2.0 someone"
    assert git(repository, "status", "--porcelain") == ""
    assert sorted(path.name for path in (repository / "dist/0.2.0").iterdir()) == [
        "trainkit_lm-0.2.0-py3-none-any.whl",
        "trainkit_lm-0.2.0.tar.gz",
    ]


def test_a_release_that_fails_leaves_nothing(repository):
    (repository / ".ci/package").write_text("#!/usr/bin/env bash\nexit 1\n")
    git(repository, "commit", "--all", "--message", "broken")
    commit = git(repository, "rev-parse", "HEAD")
    assert call(repository / ".ci/release", "0.2.0")[0] == 1
    assert git(repository, "rev-parse", "HEAD") == commit
    assert git(repository, "tag") == git(repository, "status", "--porcelain") == ""
    assert not (repository / "dist").exists()


def test_a_release_is_refused_before_anything_is_done(repository):
    def refused(version="0.2.0"):
        code, output = call(repository / ".ci/release", version)
        assert code == 64
        return output

    assert "is no version" in refused("2")
    (repository / "new").touch()
    assert "not committed" in refused()
    (repository / "new").unlink()
    git(repository, "tag", "v0.2.0")
    assert "there is a tag v0.2.0" in refused()
    (repository / "CHANGELOG.md").write_text(CHANGES.replace("- a thing\n\n", ""))
    git(repository, "commit", "--all", "--message", "nothing to say")
    assert "says nothing under" in refused("0.3.0")


def test_a_package_goes_into_a_new_folder(tmp_path):
    (tmp_path / "old").touch()
    code, output = call("package", str(tmp_path))
    assert code == 64
    assert "is not empty" in output


def test_the_wheel_is_tried_without_the_checkout():
    text = (SCRIPTS / "run").read_text()
    parts = ['.ci/package "$work/dist"', "--without-pip", '"/dist/*.whl)[recipes]', "from_wheel\n}"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


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
