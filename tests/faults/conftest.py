"""What all fault tests of a process stand on, and the runs that nobody disturbed."""

import random

import harness
import pytest
import trials


@pytest.fixture(scope="session")
def ground(tmp_path_factory):
    return harness.write_text(tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="session")
def wanted(ground, tmp_path_factory):
    return harness.undisturbed(ground, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def arena(ground, wanted, request, tmp_path):
    """Return where a trial takes place; the seed of what it chooses is shown when it fails."""
    seed = harness.fault_seed()
    print(f"TRAINKIT_FAULT_SEED={seed}")
    chance = random.Random(f"{seed} {request.node.name}")
    return trials.Arena(ground, wanted, chance, tmp_path / "run")
