"""Retention: which checkpoints are deleted, and which never."""

import random
import shutil
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.schedules import is_due
from trainkit.types import CheckpointError, ConfigError
from trainkit.weights.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    manifest,
    read_facts,
    retention,
    verify_checkpoint,
)
from trainkit.weights.checkpoint.manifest import make_manifest
from trainkit.weights.checkpoint.retention import (
    Listed,
    Retention,
    apply_retention,
    plan_retention,
    remove_checkpoint,
)
from trainkit.weights.checkpoint.save import open_saver, save_checkpoint

SOLO = tk.solo_parallel()


def small_run():
    model = nn.Linear(3, 2)
    return [model], torch.optim.SGD(model.parameters()), SOLO


def checkpoints(run_dir, steps, scores=()):
    scores = [*scores, *[None] * len(steps)]
    for step, score in zip(steps, scores, strict=False):
        save_checkpoint(run_dir, tk.TrainState(step=step), *small_run(), score=score)
    return run_dir / "checkpoints"


def damage(path):
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def names(home):
    return [path.name for path in list_checkpoints(home)]


# ------------------------------------------------------------------------------------ the plan


def history(chance):
    """Return a listing, a policy, and the pinned names."""
    steps = sorted(chance.sample(range(1, 200), chance.randrange(1, 30)), reverse=True)
    listing = [
        Listed(
            f"step_{step:08d}",
            step,
            chance.choice([True, True, True, False, None]),
            chance.choice([None, chance.random()]),
        )
        for step in steps
    ]
    policy = Retention(
        last=chance.randrange(2, 5),
        every=chance.choice([0, 7, 10]),
        best=chance.randrange(3),
        powers_of_two=chance.random() < 0.3,
        milestones=chance.sample(range(200), 3),
    )
    some = {entry.name for entry in listing if chance.random() < 0.1}
    return listing, policy, some | {listing[0].name}


def broken_promises(listing, policy, pinned, plan):
    """Return which promises a plan breaks."""
    retained = [entry for entry in listing if entry.name not in plan]
    good = [entry for entry in listing if entry.verified]
    broken = []
    if not {entry.name for entry in good[: max(2, policy.last)]}.isdisjoint(plan):
        broken.append("one of the newest that verify")
    if not pinned.isdisjoint(plan):
        broken.append("pinned")
    best = sorted((e for e in good if e.score is not None), key=lambda e: e.score)[: policy.best]
    if not {entry.name for entry in best}.isdisjoint(plan):
        broken.append("one of the best")
    wanted = {1, 2, 4, 8, 16, 32, 64, 128} if policy.powers_of_two else set()
    wanted |= set(policy.milestones)
    wanted |= set(range(0, 200, policy.every)) if policy.every else set()
    if any(entry.step in wanted and entry.name in plan for entry in good):
        broken.append("a step to keep")
    if any(entry.verified is None and entry.name in plan for entry in listing):
        broken.append("one of a later format")
    if plan and not any(entry.verified for entry in retained):
        broken.append("all that verify")
    return broken


@pytest.mark.case("K11")
def test_no_plan_deletes_what_must_stay():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    deleted = 0
    for _ in range(1000):
        listing, policy, pinned = history(chance)
        plan = plan_retention(listing, policy, pinned=pinned)
        assert broken_promises(listing, policy, pinned, plan) == []
        deleted += len(plan)
    assert deleted > 1000


@pytest.mark.case("K11")
@pytest.mark.parametrize("taken_away", ["torn ones count", "pins are not seen", "one is enough"])
def test_control_without_a_rule_the_property_fails(taken_away):
    chance, broken = random.Random(0), []
    for _ in range(300):
        listing, policy, pinned = history(chance)
        seen, pins = listing, pinned
        if taken_away == "torn ones count":
            seen = [Listed(entry.name, entry.step, True, entry.score) for entry in listing]
        elif taken_away == "pins are not seen":
            pins = ()
        else:
            with attrs.validators.disabled():
                policy = Retention(last=1)
        plan = plan_retention(seen, policy, pinned=pins)
        broken += broken_promises(listing, policy, pinned, plan)
    assert broken


@pytest.mark.case("G8")
def test_fewer_than_two_are_refused():
    with pytest.raises(ConfigError, match=r"last must be at least 2, .*, got 1"):
        Retention(last=1)


def test_what_powers_of_two_keep_is_what_is_due():
    steps = range(70, 0, -1)
    retained = set(steps) - {
        int(name[5:])
        for name in plan_retention(
            [Listed(f"step_{step:08d}", step) for step in steps],
            Retention(last=2, powers_of_two=True),
        )
    }
    assert retained == {70, 69} | {s for s in steps if is_due(s, 0, powers_of_two=True)}
    assert retained == {70, 69, 1, 2, 4, 8, 16, 32, 64}


# --------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", ".metadata"])
def test_a_folder_of_weights_is_no_checkpoint_and_says_what_to_do(file, tmp_path):
    (tmp_path / file).touch()
    (tmp_path / "manifest.json").write_text('{"format": "trainkit-weights"}')
    with pytest.raises(CheckpointError, match="holds weights alone") as error:
        find_checkpoint(tmp_path)
    assert "open_weights" in error.value.hint


def test_facts_that_a_reader_needs_are_named_where_they_are_not(tmp_path):
    checkpoints(tmp_path, [1])
    with pytest.raises(CheckpointError, match=r"does not say its model, config\.tokenizer: the"):
        read_facts(find_checkpoint(tmp_path), needs=("model", "config.tokenizer"))


def test_the_best_is_found_and_a_damaged_one_passed_over(tmp_path):
    home, messages = checkpoints(tmp_path, [1, 2, 3, 4], [3.0, 1.0, 2.0]), []
    assert find_checkpoint(tmp_path).name == "step_00000004"
    assert find_checkpoint(tmp_path, best=True).name == "step_00000002"
    damage(home / "step_00000002")
    assert find_checkpoint(tmp_path, best=True, log=messages.append).name == "step_00000003"
    assert "skipped" in messages[0]
    assert find_checkpoint(home / "step_00000001", best=True).name == "step_00000001"
    for step in (1, 3):
        shutil.rmtree(home / f"step_0000000{step}")
    with pytest.raises(CheckpointError, match="none has a score and verifies"):
        find_checkpoint(tmp_path, best=True, log=messages.append)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        find_checkpoint(tmp_path / "nowhere", best=True)


@pytest.mark.case("K11")
def test_torn_ones_do_not_count_as_kept_and_go_once_a_newer_one_is_good(tmp_path):
    home = checkpoints(tmp_path, [1, 2, 3, 4])
    damage(home / "step_00000003")
    damage(home / "step_00000004")
    messages = []
    report = apply_retention(home, Retention(last=2), log=messages.append)
    assert "step_00000004 is damaged" in messages[0]
    assert report["deleted"] == []
    assert report["verified"] == ["step_00000002", "step_00000001"]
    checkpoints(tmp_path, [5])
    report = apply_retention(home, Retention(last=2), log=messages.append)
    assert report["deleted"] == ["step_00000004", "step_00000003", "step_00000001"]
    assert names(home) == report["kept"] == ["step_00000005", "step_00000002"]


NOT_OURS = {
    "empty": lambda path: path.mkdir(),
    "of somebody else": lambda path: (path.mkdir(), (path / "notes.txt").write_text("mine")),
    "with a manifest of another": lambda path: (
        path.mkdir(),
        (path / "manifest.json").write_text("{}"),
    ),
}


@pytest.mark.case("K11")
@pytest.mark.parametrize(
    "name", ["step_00000099", "step_00000001", "step_" + "\u0660" * 6 + "\u0669" * 2]
)
@pytest.mark.parametrize("make", NOT_OURS.values(), ids=NOT_OURS)
def test_what_trainkit_has_not_made_is_left_alone(make, name, tmp_path):
    home = checkpoints(tmp_path, [2, 3, 4])
    make(home / name)
    report = apply_retention(home, Retention(last=2), log=lambda _: None)
    assert report["deleted"] == ["step_00000002"]
    assert (home / name).is_dir()


@pytest.mark.case("K11")
def test_control_without_reading_them_a_damaged_one_counts(tmp_path, monkeypatch):
    home = checkpoints(tmp_path, [1, 2, 3])
    damage(home / "step_00000003")
    monkeypatch.setattr(retention, "verify_checkpoint", lambda _: [])
    apply_retention(home, Retention(last=2))
    assert sum(not verify_checkpoint(path) for path in list_checkpoints(home)) == 1


@pytest.mark.case("K11")
def test_when_nothing_verifies_nothing_goes(tmp_path):
    home = checkpoints(tmp_path, [1, 2, 3])
    for path in list_checkpoints(home):
        damage(path)
    assert apply_retention(home, Retention(last=2), log=lambda _: None)["deleted"] == []


@pytest.mark.case("K11")
def test_pinned_best_and_later_formats_stay(tmp_path):
    home = checkpoints(tmp_path, [1, 2, 3, 4, 5, 6, 7], [9.0, 0.5, 8.0, 7.0])
    (home / "step_00000001.pin").touch()
    later = make_manifest(3, {}).replace(b'"version": 2', b'"version": 9')
    shutil.rmtree(home / "step_00000003")
    (home / "step_00000003").mkdir()
    (home / "step_00000003/manifest.json").write_bytes(_sealed_again(later))
    would = apply_retention(home, Retention(last=2, best=1), dry_run=True)
    assert len(names(home)) == 7
    assert apply_retention(home, Retention(last=2, best=1)) == would
    assert [int(name[-1]) for name in names(home)] == [7, 6, 3, 2, 1]


def _sealed_again(data):
    import orjson

    body = {key: value for key, value in orjson.loads(data).items() if key != "sha256"}
    return manifest.dump_json(manifest.seal(body))


@pytest.mark.case("K11")
def test_a_deletion_that_is_cut_short_leaves_no_half_a_checkpoint(tmp_path, monkeypatch):
    home = checkpoints(tmp_path, [1, 2, 3])
    rmtree = shutil.rmtree

    def killed(path, **options):
        if not options:
            raise KeyboardInterrupt
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(home / "step_00000001")
    assert names(home) == ["step_00000003", "step_00000002"]
    assert not (home / ".deleting-step_00000001/manifest.json").exists()
    monkeypatch.undo()
    tk.resume(tmp_path, tk.TrainState(), *small_run(), log=lambda _: None)
    assert not list(home.glob(".deleting*"))


@pytest.mark.case("K11")
def test_saves_prune_as_they_go_and_read_each_only_once(tmp_path, monkeypatch):
    read = []
    real = retention.verify_checkpoint
    monkeypatch.setattr(
        retention, "verify_checkpoint", lambda path: (read.append(path.name), real(path))[1]
    )
    home = checkpoints(tmp_path, [1, 2])
    with open_saver(tmp_path, *small_run(), retention=Retention(last=3, every=4)) as (save, _):
        for step in range(3, 11):
            save(tk.TrainState(step=step))
    assert [int(name[5:]) for name in names(home)] == [10, 9, 8, 4]
    assert sorted(read) == ["step_00000001", "step_00000002"]


def test_a_deletion_that_fails_is_told_and_the_save_stands(tmp_path, monkeypatch):
    def refused(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(retention, "remove_checkpoint", refused)
    messages = []
    with open_saver(
        tmp_path, *small_run(), retention=Retention(last=2), log=messages.append, background=False
    ) as (save, saved):
        for step in (1, 2, 3):
            save(tk.TrainState(step=step))
        assert [outcome.error for outcome in saved()] == [None] * 3
    assert "could not be deleted" in messages[0]


@pytest.mark.case("F9")
def test_ten_thousand_old_checkpoints_are_listed_by_their_names_alone(tmp_path, asked_of_the_disk):
    home = checkpoints(tmp_path, [20_000])
    for step in range(10_000):
        (home / f"step_{step:08d}").mkdir()
    asked_of_the_disk.clear()
    assert len(list_checkpoints(home)) == 10_001
    assert manifest.choose_checkpoint_name(home, 5) == "step_00000005-1"
    listed = asked_of_the_disk.pop("listdir", 0) + asked_of_the_disk.pop("scandir", 0)
    assert (listed, dict(asked_of_the_disk)) == (2, {"stat": 2})  # is it there; what is in it
    find_checkpoint(tmp_path)  # that a file is opened is seen
    assert asked_of_the_disk["open"]


@pytest.mark.case("K17")
def test_a_link_is_left_alone_and_what_it_leads_to_too(tmp_path, monkeypatch):
    """Somebody has moved an old checkpoint to another disk and left a link."""
    home, archive = checkpoints(tmp_path, [1, 2, 3, 4]), tmp_path / "archive"
    link = home / "step_00000001"
    link.rename(archive)
    link.symlink_to(archive)
    apply_retention(home, Retention(last=2))
    assert link.is_symlink()
    assert names(home) == ["step_00000004", "step_00000003", "step_00000001"]
    with pytest.raises(OSError, match="left alone"):
        remove_checkpoint(link)
    assert (archive / "manifest.json").exists()
    with monkeypatch.context() as patch, suppress(OSError):  # the negative control
        patch.setattr(Path, "is_symlink", lambda _: False)
        remove_checkpoint(link)
    assert not (archive / "manifest.json").exists()


@pytest.mark.case("K9")
def test_a_pointer_that_cannot_be_written_does_not_keep_old_checkpoints(tmp_path):
    (tmp_path / "checkpoints/latest").mkdir(parents=True)
    messages = []
    with open_saver(tmp_path, *small_run(), retention=Retention(last=2), log=messages.append) as (
        save,
        _,
    ):
        for step in range(4):
            save(tk.TrainState(step=step))
    assert names(tmp_path / "checkpoints") == ["step_00000003", "step_00000002"]
    assert "latest" in messages[0]
