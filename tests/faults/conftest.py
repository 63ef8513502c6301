"""One fork server for all fault tests of a process, and the runs that nobody disturbed."""

import random

import harness
import pytest
import trials


@pytest.fixture(scope="session")
def server():
    with harness.fork_server() as running:
        yield running


@pytest.fixture(scope="session")
def wanted(server, tmp_path_factory):
    return harness.undisturbed(server, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def arena(server, wanted, request, tmp_path):
    """Return where a trial takes place; the seed of what it chooses is shown when it fails."""
    seed = harness.fault_seed()
    print(f"TRAINKIT_FAULT_SEED={seed}")
    chance = random.Random(f"{seed} {request.node.name}")
    return trials.Arena(server, wanted, chance, tmp_path / "run")
