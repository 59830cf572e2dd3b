"""The coverage table: every part of ours and every Hugging Face model has the method it is said to have."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.coverage import HUGGING_FACE, Case, hugging_face, parts, verdict
from tests.within import assert_within

POINT = {"x": torch.linspace(0.5, 1.5, 4, dtype=torch.float64)}
WITHOUT_A_RULE = ("bloom", "falcon", "mixtral", "qwen3_moe")
PARTS = [case for case in parts() if case.params]


@pytest.mark.parametrize("case", PARTS, ids=[f"{case.family}-{case.name}" for case in PARTS])
def test_taylor_covers_a_part_and_agrees_with_double_backward(case):
    found = verdict(case)
    assert (found.method, found.missing) == ("taylor", None)
    assert found.off is not None
    assert_within(found.off, 1e-12)


@pytest.mark.parametrize("name", HUGGING_FACE)  # built by its test alone: all of them take seconds
def test_taylor_covers_a_model_of_hugging_face_or_names_the_missing_rule(name):
    pytest.importorskip("transformers")
    found = [verdict(case) for case in hugging_face([name])]
    assert found
    for each in found:
        if name in WITHOUT_A_RULE:
            assert (each.method, each.off) == ("double_backward", None)
            assert "taylor" in each.missing
        else:
            assert (each.method, each.missing) == ("taylor", None)
            assert each.off is not None
            assert_within(each.off, 1e-6)


def test_a_missing_rule_is_named_with_the_method_that_stands_in():
    found = verdict(Case("test", "lgamma", lambda p: torch.lgamma(p["x"]).sum(), POINT))
    assert (found.method, found.off) == ("double_backward", None)
    assert "lgamma" in found.missing


def test_a_loss_whose_second_order_vanishes_is_off_by_nothing():
    assert verdict(Case("test", "linear", lambda p: p["x"].sum(), POINT)).off == 0


def test_a_loss_without_a_second_derivative_is_no_comparison():
    found = verdict(Case("test", "ctc", lambda p: ctc(p["x"]), POINT))
    assert (found.method, found.off) == ("finite_difference", None)
    assert "ctc" in found.missing


def ctc(x):
    log_probs = (x[:, None, None] * torch.arange(1.0, 4.0, dtype=x.dtype)).log_softmax(-1)
    return F.ctc_loss(log_probs, torch.tensor([[1, 2]]), (4,), (2,))
