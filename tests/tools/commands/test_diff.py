"""`python -m trainkit diff`: the first step, and the first parameter, of two runs that differ."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import trainkit as tk
from trainkit.__main__ import main
from trainkit.run.compare_runs import compare_saved_steps, compare_steps
from trainkit.tools.commands.diff import format_verdict

SOFTWARE = {"python": "3.11.7", "torch": "2.13.0", "trainkit source": "39b3fe10c791f85b"}


def line(step, **fields):
    """Return a line of metrics.jsonl with every field that is compared."""
    hexes = {"batch_hash": f"{step:016x}", "loss_hex": (8 / step).hex()}
    return {"step": step, **hexes, "grad_norm_hex": "0x1p+0", "lr_hex": "0x1p-3"} | fields


def write_run(folder, lines, *, config="lr = 0.1\n", software=SOFTWARE, tokens=100):
    folder.mkdir()
    packing = {"event": "packing", "step": 0, "time": 1.0, "corpus": "books", "tokens": tokens}
    events = [{"event": "resume", "step": 0, "software": software}, packing]
    for name, records in {"metrics.jsonl": lines, "events.jsonl": events}.items():
        (folder / name).write_text("".join(f"{json.dumps(x)}\n" for x in records))
    (folder / "config.toml").write_text(f'out = "{folder}"\n{config}')
    return folder


def save(run_dir, steps, *, wrong=None, tokens=10):
    """Save a small model at some steps; one of its parameters is another in `wrong`, if given."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in steps:
        if step == wrong:
            with torch.no_grad():
                model[10].bias[1] += 1e-3
                model[9].weight[0, 0] += 1e-3
        tk.save_checkpoint(
            run_dir,
            tk.TrainState(step=step, tokens=tokens * step),
            [model],
            optimizer,
            tk.solo_parallel(),
            facts={"rows": "feecd9b8", "config.lr": 0.1},
        )


def compare(a, b, capsys, *flags):
    """Return the exit code and the report of the command."""
    code = main(["diff", str(a), str(b), *flags])
    return code, json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"batch_hash": "0", "loss_hex": "0"}, "equal until step 4; then the batch differs"),
        (
            {"loss_hex": "0x1p+0", "lr_hex": "0"},
            "equal until step 4; then the loss differs, by 6.0e-01 of its value",
        ),
        (
            {"grad_norm_hex": "0x1.0000000000001p+0"},
            "equal until step 4; then the gradient norm differs, by 2.2e-16 of its value",
        ),
        (
            {"lr_hex": "nan"},
            "equal until step 4; then the learning rate differs, by inf of its value",
        ),
        ({"seconds": 9.0, "note": "other"}, "equal in all 9 steps"),
    ],
)
def test_the_first_field_of_the_first_step_that_differs_is_the_verdict(fields, verdict):
    one = [line(step) for step in range(1, 10)]
    other = [line(step) | (fields if step == 5 else {}) for step in range(1, 10)]
    steps = compare_steps(one, other)
    nothing = {"checkpoints": {"differs": None}}
    assert format_verdict({"steps": steps, **nothing}) == verdict
    if steps["differs"]:
        assert steps["differs"]["step"] == 5
        assert (steps["unequal"], steps["common"]) == (1, 9)


def test_the_largest_difference_of_all_steps_is_measured():
    wrong = {2: 4 + 1e-6, 3: 8 / 3 - 1e-2, 4: 2 + 1e-6}
    one = [line(step, loss_hex=wrong.get(step, 8 / step).hex()) for step in range(1, 6)]
    found = compare_steps(one, [line(step) for step in range(1, 6)])
    assert found["differs"]["relative"] == {"loss_hex": pytest.approx(2.5e-7)}
    assert found["largest"] == {"loss_hex": [3, pytest.approx(3.75e-3)]}
    found = compare_steps([line(1, lr_hex="0x0p+0"), line(2)], [line(1, lr_hex="0"), line(2)])
    assert found["largest"] == {"lr_hex": [1, float("inf")]}  # of a rate of 0


def test_steps_that_were_rolled_back_do_not_count():
    discarded = [line(step, loss_hex="0x1p+9") for step in (3, 4, 5)]
    again = [line(step) for step in (3, 4)]
    one = [line(1), line(2), *discarded, *again]
    found = compare_steps(one, [line(step) for step in range(1, 6)])
    assert found["differs"] is None
    assert (found["a"], found["b"], found["common"]) == ([1, 4, 4], [1, 5, 5], 4)


def test_lines_without_a_loss_prove_nothing():
    blank = [{"step": step, "batch_hash": "0"} for step in (1, 2)]
    assert compare_steps(blank, blank)["common"] == 0
    found = compare_steps([line(1), {"step": "2"}, {"step": True}], [line(1), {}])
    assert (found["common"], found["differs"]) == (1, None)


def test_a_field_that_only_one_has_is_no_difference_and_nan_is_equal_to_nan():
    one = [line(1, loss_hex="nan"), line(2)]
    other = [line(1, loss_hex="nan"), {name: x for name, x in line(2).items() if name != "lr_hex"}]
    assert compare_steps(one, other)["differs"] is None


# ------------------------------------------------------------------------------------ runs


def test_equal_runs_exit_with_0_whatever_their_directories(tmp_path, capsys):
    lines = [line(step) for step in range(1, 4)]
    a, b = (write_run(tmp_path / name, lines) for name in "ab")
    code, report = compare(a, b, capsys)
    assert (code, report["verdict"]) == (0, "equal in all 3 steps")
    assert (report["config"], report["data"], report["code"]) == ({}, {}, {})


def test_a_run_that_goes_on_is_equal_as_far_as_both_go(tmp_path, capsys):
    a = write_run(tmp_path / "a", [line(step) for step in range(1, 4)])
    b = write_run(tmp_path / "b", [line(step) for step in range(1, 9)])
    code, report = compare(a, b, capsys)
    assert (code, report["equal"]) == (0, True)
    assert report["verdict"] == (
        f"equal in all 3 steps that both have: {a} has steps 1 to 3, {b} has steps 1 to 8"
    )


def test_runs_without_a_common_step_are_not_equal(tmp_path, capsys):
    a = write_run(tmp_path / "a", [line(1)])
    b = write_run(tmp_path / "b", [])
    code, report = compare(a, b, capsys)
    assert code == 1
    assert report["verdict"] == f"no step to compare: {a} has steps 1 to 1, {b} has no steps"


def test_configuration_data_code_and_versions_are_listed(tmp_path, capsys, monkeypatch):
    a = write_run(tmp_path / "a", [line(1)])
    b = write_run(
        tmp_path / "b",
        [line(1, loss_hex="0x1p+9")],
        config='lr = 0.2\nnew = ["\x1b[31m"]\n'.replace("\x1b", "\\u001b"),
        software=SOFTWARE | {"torch": "2.14.0"},
        tokens=101,
    )
    code, report = compare(a, b, capsys)
    assert code == 1
    assert report["config"] == {"lr": [0.1, 0.2], "new": [None, ["\x1b[31m"]]}
    assert report["data"] == {"packing of books.tokens": [100, 101]}
    assert report["code"] == {"torch": ["2.13.0", "2.14.0"]}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diff", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(
        "the loss differs from the first step on, step 1, by 9.8e-01 of its value\nstep 1:\n"
        "  loss_hex  "
    )
    assert "  lr   0.1  0.2\n" in text
    assert "\x1b" not in text
    assert (
        "1 of the 1 steps that both have differ\n"
        "the loss differs most in step 1, by 9.8e-01 of its value\n"
    ) in text


def test_what_only_one_run_has_on_record_is_no_difference(tmp_path, capsys):
    a = write_run(tmp_path / "a", [line(1)])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_bytes((a / "metrics.jsonl").read_bytes())
    code, report = compare(a, tmp_path / "b", capsys)
    assert code == 0
    assert [report[name] for name in ("config", "data", "code")] == [{}, {}, {}]


def test_a_long_table_is_cut_on_a_terminal_alone(tmp_path, capsys, monkeypatch):
    a = write_run(tmp_path / "a", [line(1)])
    many = "".join(f'name{n} = "{"x" * 99}"\n' for n in range(99))
    b = write_run(tmp_path / "b", [line(1)], config=many)
    assert len(compare(a, b, capsys)[1]["config"]) == 100
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diff", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "  and 70 more, which --json lists" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (None, "is no run directory, it does not exist"),
        ("manifest.json", "is a checkpoint"),
        ("notes.txt", "is no run directory"),
        ("config.toml", "cannot be read"),
    ],
)
def test_what_is_no_run_is_refused(write, message, tmp_path, capsys):
    a = write_run(tmp_path / "a", [line(1)])
    if write:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / write).write_text("[")
    code, report = compare(a, tmp_path / "b", capsys)
    assert code == 64
    assert message in report["error"]


# ------------------------------------------------------------------------------------ checkpoints


def test_the_first_parameter_that_differs_is_named(tmp_path, capsys, monkeypatch):
    a, b = (write_run(tmp_path / name, [line(1)]) for name in "ab")
    save(a, (1, 2, 3))
    save(b, (1, 2, 3, 4), wrong=2)
    code, report = compare(a, b, capsys)
    assert code == 1
    assert report["verdict"] == (
        "equal losses in all 1 steps that both have, but in the checkpoint of step 2 "
        "model/9.weight differs"
    )
    saved = report["checkpoints"]
    assert (saved["common"], saved["equal_until"]) == ([1, 2, 3], 1)
    assert (saved["differs"]["step"], saved["differs"]["tensors"]) == (2, 2)
    assert 0 < saved["differs"]["relative"] < 1e-2
    assert saved["differs"]["counters"] == {}
    torch.manual_seed(0)  # as `save` makes the model, one of whose biases gets 1e-3 more
    bias = [nn.Linear(2, 2).bias for _ in range(11)][10].detach()
    bias[1] += 1e-3
    name, relative = saved["differs"]["largest"]
    assert (name, relative) == (
        "model/10.bias",
        pytest.approx(1e-3 / float(bias.abs().max()), 1e-3),
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diff", str(a), str(b)]) == 1
    text = f"of the parameters {name} differs most, max|a - b| / max|b| {relative:.1e}"
    assert text in capsys.readouterr().out.splitlines()


def test_counters_alone_may_differ(tmp_path):
    for name, tokens in {"a": 10, "b": 11}.items():
        save(tmp_path / name, (1,), tokens=tokens)
    found = compare_saved_steps(tmp_path / "a/checkpoints", tmp_path / "b/checkpoints")
    assert found["differs"]["first"] is None
    assert found["differs"]["counters"] == {"tokens": [10, 11]}
    steps = compare_steps([line(1)], [line(1)])
    assert format_verdict({"steps": steps, "checkpoints": found}).endswith(
        "in the checkpoint of step 1 the counter tokens differs"
    )


def test_facts_are_compared_and_a_damaged_checkpoint_is_left_out(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, [line(1)]) for name in "ab")
    save(a, (1, 2))
    shutil.copytree(a / "checkpoints", b / "checkpoints")
    state = b / "checkpoints/step_00000002/state.json"
    state.write_text(state.read_text().replace("feecd9b8", "00000000"))
    code, report = compare(a, b, capsys)
    assert (code, report["data"]) == (0, {"rows": ["feecd9b8", "00000000"]})
    (b / "checkpoints/step_00000001/index.json").unlink()
    state.write_text("{")
    code, report = compare(a, b, capsys)
    assert (code, report["data"], report["checkpoints"]["equal_until"]) == (0, {}, None)
    assert [x[:7] for x in report["checkpoints"]["problems"]] == ["step 1:", "step 2:"]


def test_torch_is_loaded_only_where_parameters_differ(tmp_path):
    a, b = (write_run(tmp_path / name, [line(1)]) for name in "ab")
    save(a, (1, 2))
    save(b, (1, 2), wrong=2)
    code = """
import sys
from trainkit.__main__ import main
print(main(["diff", *sys.argv[1:]]), "torch" in sys.modules, file=sys.stderr)
"""
    shutil.copytree(a, tmp_path / "c")
    for other, found in {"c": "0 False\n", "b": "1 True\n"}.items():
        command = [sys.executable, "-c", code, str(a), str(tmp_path / other)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == found
