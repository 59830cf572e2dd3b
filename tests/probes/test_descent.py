"""The protocol's steps on a small regression in float64, against AdamW's formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from stability.config.curvature import CurvatureSpec
from stability.objectives import Examples
from stability.probes.curvature import descent as descents
from stability.probes.curvature.descent import Descent
from tests.within import assert_within

PROTOCOL = CurvatureSpec(warmup_batches=4, warmup_steps=0, recorded_steps=1)


def examples(index):
    generator = torch.Generator().manual_seed(index)
    return Examples(*(torch.randn(5, columns, generator=generator, dtype=torch.float64) for columns in (3, 1, 1)))


def loss(params, batch):
    return ((batch.inputs_BN @ params["w"] - batch.targets_BN) ** 2).sum(), torch.tensor(float(len(batch.inputs_BN)))


def gradient(w, index):
    x, y, *_ = examples(index)
    gradient = 2 * x.T @ (x @ w - y) / len(x)
    return gradient * min(1.0, 1.0 / (gradient.norm().item() + 1e-6))


def first_step(state, build=torch.optim.AdamW, protocol=PROTOCOL, **options):
    w = torch.nn.Parameter(torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64))
    start, seen = w.detach().clone(), []
    optimizer = build([w], lr=1e-2, **options)
    descent = Descent(
        {"w": w},
        optimizer,
        loss,
        examples,
        protocol,
        lr=1e-2,
        clip_norm=1.0,
        observe=lambda step: seen.append(step) or {"seen": 1},
    )
    (row,) = descent.rows(state)
    return start, seen[0], row


def adam(m, v, g, count, w, decay=0.01):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return -(m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8) - decay * w


def test_plain_is_adamws_own_averages_at_a_parameter_that_stands_still():
    w, step, _ = first_step("plain")
    m = v = torch.zeros_like(w)
    for index in range(4):
        m, v = 0.9 * m + 0.1 * gradient(w, index), 0.999 * v + 0.001 * gradient(w, index) ** 2
    assert torch.equal(step.params["w"].detach(), w)
    torch.testing.assert_close(step.direction["w"], adam(m, v, gradient(w, 4), 5, w), rtol=1e-9, atol=1e-9)


def test_paper_is_the_means_corrected_once_more():
    w, step, _ = first_step("paper")
    gradients = torch.stack([gradient(w, index) for index in range(4)])
    expected = adam(gradients.mean(0), (gradients**2).mean(0), gradient(w, 4), 5, w)
    torch.testing.assert_close(step.direction["w"], expected, rtol=1e-9, atol=1e-9)


def test_curvature_and_alpha_max_are_those_of_the_quadratic_and_what_is_observed_joins_the_row():
    w, step, row = first_step("plain")
    x, y, *_ = examples(4)
    u = step.direction["w"]
    slope, curvature = (2 * (x @ w - y).T @ (x @ u) / 5).item(), (2 * (x @ u).square().sum() / 5).item()
    assert row["slope"] == pytest.approx(slope)
    assert row["curvature"] == pytest.approx(curvature)
    assert row["alpha_max"] == pytest.approx(-2 * slope / curvature)
    assert row["loss_after"] == pytest.approx(row["loss_before"] + 1e-2 * slope + 1e-4 * curvature / 2)
    assert row["seen"] == 1


def test_microbatches_hold_every_row_once_in_order():
    parts = examples(0).split(2)
    assert [len(part.inputs_BN) for part in parts] == [2, 2, 1]
    for whole, pieces in zip(examples(0)[:3], list(zip(*parts, strict=True))[:3], strict=True):
        assert torch.equal(torch.cat(pieces), whole)


def test_the_papers_difference_joins_as_many_steps_as_asked_and_is_the_central_difference_written_out():
    protocol = PROTOCOL.model_copy(update={"recorded_steps": 3, "parity_steps": 2})
    w, seen = torch.nn.Parameter(torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64)), []
    descent = Descent(
        {"w": w},
        torch.optim.AdamW([w], lr=1e-2),
        quartic,
        examples,
        protocol,
        lr=1e-2,
        clip_norm=1.0,
        observe=lambda step: seen.append(step) or {},
    )
    rows = list(descent.rows("plain"))
    assert ["parity_curvature" in row for row in rows] == [True, True, False]
    x, y, *_ = examples(4)
    here, u = seen[0].params["w"].detach(), seen[0].direction["w"]

    def slope(at):
        return (4 * ((x @ at - y) ** 3 * (x @ u)).sum() / len(x)).item()

    difference = (slope(here + 1e-4 * u) - slope(here - 1e-4 * u)) / 2e-4
    assert rows[0]["parity_curvature"] == pytest.approx(difference, rel=1e-9)
    assert rows[0]["parity_alpha_max"] == pytest.approx(-2 * slope(here) / difference, rel=1e-9)


def quartic(params, batch):
    return ((batch.inputs_BN @ params["w"] - batch.targets_BN) ** 4).sum(), torch.tensor(float(len(batch.inputs_BN)))


@pytest.mark.parametrize("change", [{"parity_steps": 0}, {"method": "parity"}, {"method": "finite_difference"}])
def test_without_an_exact_curvature_or_the_wish_there_is_nothing_to_compare(change):
    _, _, row = first_step("plain", protocol=PROTOCOL.model_copy(update=change))
    assert "parity_curvature" not in row


def test_the_comparison_uses_the_rows_own_slope():
    _, step, row = first_step("plain", protocol=PROTOCOL.model_copy(update={"gradient": "clipped"}))
    assert row["parity_alpha_max"] == pytest.approx(-2 * row["slope"] / row["parity_curvature"])
    w, u = step.params["w"].detach(), step.direction["w"]
    assert row["slope"] == pytest.approx((gradient(w, 4) * u).sum().item())
    assert step.result.slope < row["slope"] < 0, "of the loss itself"
    assert step.result.alpha_max == pytest.approx(-2 * step.result.slope / row["curvature"])


def test_a_step_lost_to_a_nan_names_where_it_came_from_and_ends_the_descent():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()

    def loss(params, batch):  # the second recorded batch overflows behind the tanh
        hidden = torch.func.functional_call(net, dict(params), (batch.inputs_BN,))
        return (
            hidden * (math.inf if torch.equal(batch.inputs_BN, examples(5).inputs_BN) else 1.0)
        ).square().sum(), torch.tensor(5.0)

    params = dict(net.named_parameters())
    protocol = PROTOCOL.model_copy(update={"recorded_steps": 3})
    rows = list(
        Descent(
            params, torch.optim.AdamW(net.parameters(), lr=1e-2), loss, examples, protocol, lr=1e-2, clip_norm=1.0
        ).rows("plain")
    )
    assert [row["method"] for row in rows] == ["taylor", "none", "none"]
    assert rows[0]["note"] is None
    assert rows[1]["note"] == "every module's output is finite; the loss or a derivative of it is not"
    assert rows[2]["note"] == rows[1]["note"]
    with torch.no_grad():
        net[2].weight[0, 0] = math.nan
    rows = list(
        Descent(
            params, torch.optim.AdamW(net.parameters(), lr=1e-2), loss, examples, protocol, lr=1e-2, clip_norm=1.0
        ).rows("plain")
    )
    assert rows[0]["note"] == "params['2.weight'] is not finite"


class Quiet(torch.optim.SGD):
    """Makes no move in its first steps, as ADOPT and SOAP do in their very first."""

    def __init__(self, params, lr, steps):
        super().__init__(params, lr=lr)
        self.left = steps

    def step(self, closure=None):
        self.left -= 1
        if self.left < 0:
            super().step()


def test_a_step_that_is_zero_has_no_alpha_max_and_the_next_one_has():
    protocol = PROTOCOL.model_copy(update={"recorded_steps": 2, "warmup_batches": 1})
    w = torch.nn.Parameter(torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64))
    still, moving = Descent(
        {"w": w}, Quiet([w], lr=1e-2, steps=2), loss, examples, protocol, lr=1e-2, clip_norm=1.0
    ).rows("plain")
    assert (still["method"], still["note"]) == ("not defined", "the step is zero")
    assert "alpha_max" not in still and "slope" not in still
    assert (
        still["loss_before"]
        == still["loss_after"]
        == pytest.approx(loss({"w": torch.tensor([[0.5], [-1.0], [2.0]]).double()}, examples(1))[0].item() / 5)
    )
    assert moving["method"] == "taylor" and moving["alpha_max"] > 0 and moving["note"] is None


def test_a_step_along_which_the_loss_does_not_change_has_no_alpha_max():
    w = torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float64))
    flat = lambda params, batch: (0.0 * params["w"].sum() + batch.targets_BN.square().sum(), torch.tensor(5.0))  # noqa: E731
    (row,) = Descent({"w": w}, torch.optim.AdamW([w], lr=1e-2), flat, examples, PROTOCOL, lr=1e-2, clip_norm=1.0).rows(
        "plain"
    )
    assert (row["method"], row["note"]) == ("not defined", "the loss does not change along the step")
    assert "alpha_max" not in row, "u is the weight decay alone: neither stable nor unstable"


NARROW = {"w": torch.tensor([[0.5], [-1.0], [2.0]])}


def narrow_examples(index):
    return examples(index).map_tensors(torch.Tensor.float)


def in_float32(monkeypatch, doubtful, loss_in_double):
    monkeypatch.setattr(descents, "DOUBTFUL", doubtful)
    w, seen = torch.nn.Parameter(NARROW["w"].clone()), []
    options = {"observe": lambda step: seen.append(step) or {}, "loss_in_double": loss_in_double}
    (row,) = Descent(
        {"w": w}, torch.optim.AdamW([w], lr=1e-2), loss, narrow_examples, PROTOCOL, lr=1e-2, clip_norm=1.0, **options
    ).rows("plain")
    return row, seen[0]


def test_a_doubtful_curvature_is_computed_once_more_in_float64(monkeypatch):
    row, step = in_float32(monkeypatch, 0.0, lambda: loss)
    x, u = narrow_examples(4).inputs_BN.double(), step.direction["w"].double()
    closed = (2 * (x @ u).square().sum() / 5).item()
    assert row["float64_curvature"] == pytest.approx(closed, rel=1e-14)
    assert abs(row["curvature"] / closed - 1) > 0, "float32's own"
    assert_within(abs(row["curvature"] / closed - 1), 1e-5, "float32's own")
    assert row["rel_error"] == pytest.approx(
        abs(row["curvature"] - row["difference_curvature"]) / max(row["curvature"], row["difference_curvature"])
    )


def test_float64_is_left_out_where_nothing_is_doubtful_or_the_model_is_narrower(monkeypatch):
    def narrow(params, batch):
        return loss({"w": params["w"].float()}, batch.map_tensors(torch.Tensor.float))

    def refuses(params, batch):
        return loss(params, batch.map_tensors(torch.Tensor.float))  # torch: expected both to have the same dtype

    for doubtful, loss_in_double in ((1.0, lambda: loss), (0.0, None), (0.0, lambda: narrow), (0.0, lambda: refuses)):
        row, _ = in_float32(monkeypatch, doubtful, loss_in_double)
        assert "float64_curvature" not in row and row["difference_curvature"] > 0


@pytest.mark.parametrize("state", ["plain", "paper"])
def test_rms_u_is_the_root_mean_square_of_the_step_over_the_rate(state):
    _, step, row = first_step(state)
    u = step.direction["w"]
    assert row["rms_u"] == pytest.approx(math.sqrt(sum(float(entry) ** 2 for entry in u.flatten()) / 3))


def test_rms_u_is_over_all_entries_whatever_tensor_they_are_in():
    tensors = {"a": torch.full((3, 2), 2.0), "b": torch.tensor([6.0, 0.0])}
    assert descents.root_mean_square(tensors) == pytest.approx(math.sqrt((6 * 4 + 36) / 8))
    tiny = {"a": torch.full((4,), 1e-30)}
    assert descents.root_mean_square(tiny) == pytest.approx(1e-30), "its square is 0 in float32"
