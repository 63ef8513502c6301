"""`python -m trainkit certify`: what it prints, what it refuses, and its exit code."""

import argparse
import sys

import pytest
import torch

from trainkit.tools.commands import certify
from trainkit.tools.testing.builtin import cases_of_model, models_of_tier
from trainkit.tools.testing.cases import make_default_cases
from trainkit.tools.testing.certificate import TIERS, Certificate, CertificateRow
from trainkit.types import ConfigError


def options_of(*argv):
    parser = argparse.ArgumentParser()
    certify.add(parser)
    return parser.parse_args(argv)


def certificate(**changes):
    row = CertificateRow("dp2", 2, 0.0, 0.0, 0.0, 0.0, worst="w", batches=True)
    return Certificate("m", TIERS["fp64"], 3, (row, CertificateRow("tp2", 2, **changes)))


def test_a_layout_of_the_exact_tier_is_certified(capsys):
    report, code = certify.run(options_of("--tier", "exact", "--layouts", "dp2"))
    assert code == 0
    assert "exact: 1 of 1 layouts give the numbers of one process, bit for bit" in report
    assert capsys.readouterr().err.startswith("ok exact model: dp2 (1 of 1")


# Those of fp64 are in tests/distributed/test_certificate.py.
@pytest.mark.parametrize("tier", ["fp32", "bf16"])
def test_every_model_of_a_tier_is_certified(tier):
    report, code = certify.run(options_of("--tier", tier, "--layouts", "dp2", "--quiet"))
    assert code == 0, report
    for name in models_of_tier(tier):
        if any(case.name == "dp2" for case in cases_of_model(name)):
            assert f"{name}, {tier}: 1 of 1 layouts give the numbers of one process" in report


def test_what_rounding_to_bf16_leaves_nothing_of_is_not_in_that_tier():
    names = " ".join(models_of_tier("bf16", optimizers=True))
    assert "experts" not in names  # rounding turns a router's choices
    assert "losses of" not in names  # they subtract log-probabilities
    assert "with experts" in " ".join(models_of_tier("fp32"))


def test_too_few_gpus_are_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"certify: device='cuda' needs a GPU .* finds 0 on this"):
        certify.run(options_of("--device", "cuda", "--quiet"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"for each of 4 ranks, .* finds 2 .* device='cpu'"):
        certify.run(options_of("--device", "cuda", "--quiet", "--world", "4"))
    with pytest.raises(ConfigError, match="for each of 8 ranks"):
        certify.run(options_of("--device", "cuda", "--quiet", "--layouts", "dp8"))


def test_on_gpus_the_layouts_are_those_that_they_reach(monkeypatch):
    taken = {}

    def found(_, chosen, device, **__):
        taken.update(chosen=chosen, device=device)
        return [certificate()]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("trainkit.tools.testing.builtin.certify_builtin", found)
    certify.run(options_of("--device", "cuda"))
    assert taken["device"] == "cuda"
    worlds = {case.world for case in make_default_cases() if taken["chosen"](case)}
    assert worlds == {1, 2}


def test_a_red_row_gives_exit_code_67(monkeypatch):
    found = [certificate(error="it hung")]
    monkeypatch.setattr("trainkit.tools.testing.builtin.certify_builtin", lambda *_, **__: found)
    text, code = certify.run(options_of())
    assert code == 67
    assert "RED: tp2: it hung" in text
    rows, code = certify.run(options_of("--json"))
    assert (code, rows[0]["ok"], rows[0]["rows"][1]["error"]) == (67, False, "it hung")
    page, _ = certify.run(options_of("--markdown"))
    assert page.startswith("# The certificate")
    assert "| layout | ranks |" in page


def test_layouts_are_chosen_by_name_and_number_of_ranks(monkeypatch):
    taken = {}
    monkeypatch.setattr(
        "trainkit.tools.testing.builtin.certify_builtin",
        lambda _, chosen, **__: taken.update(chosen=chosen) or [certificate()],
    )
    certify.run(options_of("--layouts", "dp2*", "*zero*", "--world", "2"))
    names = {case.name for case in make_default_cases() if taken["chosen"](case)}
    assert {"dp2", "dp2, reduce each", "pp2, zero_bubble_v"} <= names
    assert not {"tp2", "dp2 x tp2", "replica2"} & names


def test_without_names_those_that_this_torch_cannot_run_are_left_out(monkeypatch):

    taken = {}
    monkeypatch.setattr(
        "trainkit.tools.testing.builtin.certify_builtin",
        lambda _, chosen, **__: taken.update(chosen=chosen) or [certificate()],
    )
    certify.run(options_of())
    for can in (True, False):
        monkeypatch.setattr(
            sys.modules["trainkit.parallel.check_layout"], "passes_to_itself", lambda can=can: can
        )
        left_out = {x.layout.schedule for x in make_default_cases() if not taken["chosen"](x)}
        assert left_out == (set() if can else {"zero_bubble_v", "dual_pipe_v"})


def test_a_name_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="called 'dp7'") as caught:
        certify.run(options_of("--layouts", "dp7"))
    assert "dp2 x ring2 x tp2" in caught.value.hint
    with pytest.raises(ValueError, match="none of the"):
        certify.run(options_of("--world", "7", "--quiet"))
