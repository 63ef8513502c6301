"""Patterns of names: each sign, whole names only, and messages for what matches nothing."""

import pytest

from trainkit.parallel.name_patterns import join_names, match_names, name_matches
from trainkit.types import ConfigError

NAMES = [
    "bias",
    "embedding.weight",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wo.weight",
    "layers.1.mlp.experts.up",
    "layers.1.mlp.up.bias",
    "layers.10.mlp_norm.weight",
]


@pytest.mark.parametrize(
    ("pattern", "indices"),
    [
        ("**", range(7)),
        ("*", [0]),
        ("*.weight", [1]),
        ("**.weight", [1, 2, 3, 6]),
        ("**.bias", [0, 5]),  # ** stands for no part as well
        ("**bias", [0, 5]),
        ("layers.1.**", [4, 5]),  # and not those of layer 10
        ("layers.1*.**", [4, 5, 6]),
        ("layers.?.mlp.*.*", [4, 5]),
        ("layers.*.attention.w[qk].weight", [2]),
        ("layers.*.attention.w[!qk].weight", [3]),
        ("layers.*.attention.w[a-o].weight", [3]),
        ("{embedding,layers.*.{mlp_norm,attention.w[qo]}}.weight", [1, 2, 3, 6]),
        ("layers.*.mlp.{,experts.}up", [4]),
        ("layers.*.mlp.**{up,down}", [4]),
    ],
)
def test_a_pattern_matches_whole_names_part_by_part(pattern, indices):
    assert [x for x in NAMES if name_matches(x, pattern)] == [NAMES[i] for i in indices]


def test_signs_of_regular_expressions_are_letters():
    assert name_matches("a+b.(c)", "a+b.(c)")
    assert not name_matches("aab", "a+b")
    assert not name_matches("layersx0", "layers.0")
    assert [x for x in "ab^!&" if name_matches(x, "[^a&]")] == ["a", "^", "&"]
    assert [x for x in "a!" if name_matches(x, "[!]")] == ["!"]


def test_no_letter_of_a_bracket_is_the_dot_between_parts():
    assert name_matches("a-b", "a[!x]b")
    assert not name_matches("a.b", "a[!x]b")


def test_joined_names_match_themselves_and_nothing_else():
    names = ["head", "layers.0.mlp.up", "odd[*]{,}?"]
    pattern = join_names(names)
    assert [x for x in [*names, "hea", "layers.0.mlp", "odd"] if name_matches(x, pattern)] == names


@pytest.mark.parametrize("pattern", ["{up", "up}", "{a,{b}", "w[qk", "}{"])
def test_a_bracket_without_its_other_half_is_refused(pattern):
    with pytest.raises(ConfigError, match="without its other half"):
        name_matches("up", pattern)


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(ConfigError, match=r"'w\[z-a\]' has a bad character range z-a"):
        name_matches("wb", "w[z-a]")


def test_a_pattern_that_matches_nothing_lists_the_names_of_one_block():
    names = [f"layers.{i}.mlp.up" for i in range(3)] + ["head"]
    message = r"lora: 'hed' matches the name of no matrix; those there are: layers.0.mlp.up; head$"
    with pytest.raises(ConfigError, match=message):
        match_names("hed", names, function="lora", kind="matrix")


def test_a_regular_expression_is_answered_with_the_signs_of_patterns():
    with pytest.raises(ConfigError) as caught:
        match_names(r"layers\.\d+\.mlp\.up", ["layers.0.mlp.up"], function="lora", kind="matrix")
    assert "no regular expression" in caught.value.hint
