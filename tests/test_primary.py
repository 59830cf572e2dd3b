"""Tests of the names of a sweep's primary claim, which a sweep's rules and its report share."""

import pytest

from stability.primary import NamedSeries, find_named, rank_mechanism

PARTS = ("sc", "identity", "layernorm", "adamw")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("sc", ["sc"]),
        ("sc width=256", ["sc width=256"]),
        ("width=256 sc", ["sc width=256"]),
        ("sc layernorm", ["sc", "sc width=256"]),
        ("width=256", ["sc width=256"]),
        ("sc qk_norm=rmsnorm", ["sc qk_norm=rmsnorm"]),
        ("qk_norm=rmsnorm", ["sc qk_norm=rmsnorm"]),
        ("sa", []),
        ("sc width=64", []),
    ],
)
def test_words_name_what_they_spell_or_all_that_has_them_and_a_variant_by_its_label_alone(words, names):
    series = [
        NamedSeries("sc", PARTS),
        NamedSeries("sc width=256", PARTS),
        NamedSeries("sc qk_norm=rmsnorm", PARTS, "qk_norm=rmsnorm"),
    ]
    assert find_named(series, words.split()) == names


def test_the_papers_mechanisms_come_first_in_its_order_and_others_by_name():
    assert sorted(["retnet", "sw", "gla", "sa", "mix", "sc"], key=rank_mechanism) == [
        "sa", "sc", "mix", "sw", "gla", "retnet",
    ]  # fmt: skip
