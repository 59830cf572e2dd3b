"""The coverage table: every part of ours and every Hugging Face model has the method it is said to have."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.coverage import Case, cases, verdict

POINT = {"x": torch.linspace(0.5, 1.5, 4, dtype=torch.float64)}
WITHOUT_A_RULE = ("bloom", "falcon", "mixtral", "qwen3_moe")
ALL = [case for case in cases() if case.params]
CASES = [case for case in ALL if not case.name.startswith(WITHOUT_A_RULE)]
REST = [case for case in ALL if case.name.startswith(WITHOUT_A_RULE)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.family}-{case.name}" for case in CASES])
def test_taylor_covers_it_and_agrees_with_double_backward(case):
    found = verdict(case)
    assert (found.method, found.missing) == ("taylor", None)
    assert found.off is not None
    assert found.off < (1e-6 if case.family == "Hugging Face" else 1e-12)


@pytest.mark.parametrize("case", REST, ids=[case.name for case in REST])
def test_where_taylor_has_no_rule_it_is_named_and_double_backward_stands_in(case):
    found = verdict(case)
    assert (found.method, found.off) == ("double_backward", None)
    assert "taylor" in found.missing


def test_a_missing_rule_is_named_with_the_method_that_stands_in():
    found = verdict(Case("test", "lgamma", lambda p: torch.lgamma(p["x"]).sum(), POINT))
    assert (found.method, found.off) == ("double_backward", None)
    assert "lgamma" in found.missing


def test_a_loss_without_a_second_derivative_is_no_comparison():
    found = verdict(Case("test", "ctc", lambda p: ctc(p["x"]), POINT))
    assert (found.method, found.off) == ("finite_difference", None)
    assert "ctc" in found.missing


def ctc(x):
    log_probs = (x[:, None, None] * torch.arange(1.0, 4.0, dtype=x.dtype)).log_softmax(-1)
    return F.ctc_loss(log_probs, torch.tensor([[1, 2]]), (4,), (2,))
