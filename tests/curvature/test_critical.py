"""The critical learning rate along u against closed forms, and its relation to α_max."""

import math

import pytest
import torch

from stability.curvature.critical import critical_lr, loss_along
from tests.curvature.nets import HalfSlope, random_direction, tiny, token_loss


def along(polynomial, dtype=torch.float64):
    """(loss, params, direction) whose loss at θ + αu is ``polynomial(α)``."""
    return (lambda at: polynomial(at["x"][0])), {"x": torch.zeros(1, dtype=dtype)}, {"x": torch.ones(1, dtype=dtype)}


@pytest.mark.parametrize("start", [None, 1e-4, 0.7, 40.0])
def test_on_a_quadratic_it_is_alpha_max(start):
    """L = 3 − 2α + 5α²/2 rises above L(0) at α_max = −2·(−2)/5 = 0.8."""
    loss, params, u = along(lambda a: 3 - 2 * a + 2.5 * a * a)
    found = critical_lr(loss, params, u, start=start, resolution=1e-4)
    assert found.value == pytest.approx(0.8, rel=1e-7)
    assert found.low <= 0.8 <= found.high
    assert found.high - found.low <= 1e-4 * found.high, "the bracket is halved until it is"
    assert found.loss == 3
    if start is None:
        assert found.alpha_max == pytest.approx(0.8)
        assert found.over_alpha_max == pytest.approx(1, rel=1e-7)


def test_on_a_cubic_it_is_the_root_and_not_alpha_max():
    """−2α + 2α² + α³/2 = 0 at α = −2 + √8 = 0.828; α_max knows the first two terms only: 1."""
    loss, params, u = along(lambda a: -2 * a + 2 * a**2 + 0.5 * a**3)
    found = critical_lr(loss, params, u, resolution=1e-5)
    assert found.value == pytest.approx(math.sqrt(8) - 2, rel=1e-8)
    assert found.alpha_max == pytest.approx(1)
    assert found.over_alpha_max == pytest.approx(math.sqrt(8) - 2, rel=1e-8)


def test_with_three_crossings_the_first_is_found():
    """−α(1 − α)(2 − α)(20 − α): below L(0) up to 1, above up to 2, below again up to 20."""
    loss, params, u = along(lambda a: -a * (1 - a) * (2 - a) * (20 - a))
    assert critical_lr(loss, params, u, start=0.1, resolution=1e-5).value == pytest.approx(1, rel=1e-6)


def test_a_loss_that_falls_for_ever_has_none():
    loss, params, u = along(lambda a: -a)
    found = critical_lr(loss, params, u, limit=100.0)
    assert (found.value, found.low, found.high) == (math.inf, 100, math.inf)


@pytest.mark.parametrize(
    ("limit", "value"), [(0.5, math.inf), (0.7, math.inf), (0.9, 0.8), (50.0, 0.8), (math.inf, 0.8)]
)
@pytest.mark.parametrize("start", [0.3, 0.7, 40.0])
def test_no_rate_above_the_limit_is_tried(start, limit, value):
    """L = 3 − 2α + 5α²/2 is L(0) again at 0.8, which a smaller limit hides."""
    tried = []

    def polynomial(alpha):
        tried.append(float(alpha))
        return 3 - 2 * alpha + 2.5 * alpha * alpha

    loss, params, u = along(polynomial)
    found = critical_lr(loss, params, u, start=start, limit=limit, resolution=1e-4)
    assert max(tried) <= limit
    assert found.value == pytest.approx(value, rel=1e-7)
    assert (found.low, found.high) == (limit, math.inf) if value == math.inf else found.low <= 0.8 <= found.high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_direction_of_ascent_has_zero(dtype):
    loss, params, u = along(lambda a: 1 + a + a * a, dtype)
    found = critical_lr(loss, params, u)
    assert found.value == found.low == 0
    assert found.alpha_max == 0
    assert math.isnan(found.over_alpha_max)


def test_a_loss_that_stops_being_finite_counts_as_above():
    loss, params, u = along(lambda a: torch.where(a < 3, -a, torch.full_like(a, float("inf"))))
    found = critical_lr(loss, params, u, start=1.0, resolution=1e-3)
    assert found.low < 3 <= found.high
    assert found.value == found.low


def test_a_loss_of_nan_at_the_start_gives_nan():
    loss, params, u = along(lambda a: a * float("nan"))
    assert math.isnan(critical_lr(loss, params, u, start=1.0).value)


def test_microbatches_and_the_profile_agree_with_the_plain_loss():
    net, params, tokens = tiny()
    gradient = dict(
        zip(params, torch.autograd.grad(token_loss(net, tokens)(params), tuple(params.values())), strict=True)
    )
    u = {name: -part for name, part in gradient.items()}

    def by_rows(at, row):
        return token_loss(net, tokens[row : row + 1], reduction="sum")(at), tokens.shape[1] - 1

    whole, parts = (
        critical_lr(token_loss(net, tokens), params, u),
        critical_lr(by_rows, params, u, batches=iter(range(3))),
    )
    assert parts.value == pytest.approx(whole.value, rel=1e-9)
    assert whole.evaluations < 25
    losses = loss_along(token_loss(net, tokens), params, u, [0.0, whole.low, whole.high])
    assert losses[1] <= losses[0] < losses[2]
    for alpha, loss in zip([0.0, whole.low], losses, strict=False):
        moved = {name: param.detach() + alpha * u[name] for name, param in params.items()}
        assert float(token_loss(net, tokens)(moved)) == pytest.approx(loss, rel=1e-12)


def test_dropout_repeats_and_the_parameters_stay():
    net, params, tokens = tiny(dropout=0.5)
    u, before = random_direction(params), {name: param.detach().clone() for name, param in params.items()}
    first, second = loss_along(token_loss(net, tokens), params, u, [0.0, 0.0 + 1e-300])
    assert first == second
    assert all(torch.equal(before[name], param) for name, param in params.items())


@pytest.mark.filterwarnings("error")
def test_it_rests_on_losses_and_warns_of_an_alpha_max_through_a_wrong_gradient():
    """L = (1 − α)² − 3α: it rises above 1 at 5, where half of x²'s gradient predicts α_max = 2·(1 + 3) = 8."""
    loss, params, u = along(lambda a: HalfSlope.apply(1 - a) - 3 * a)
    assert critical_lr(loss, params, u, start=0.3, resolution=1e-5).value == pytest.approx(5, rel=1e-8)
    with pytest.warns(RuntimeWarning, match="alpha_max is in doubt: the slope of loss_fn is -5 by .*, -4 by"):
        found = critical_lr(loss, params, u, resolution=1e-5)
    assert found.value == pytest.approx(5, rel=1e-8)
    assert found.alpha_max == pytest.approx(8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resolution": 0.0}, "resolution is 0.0"),
        ({"start": -1.0}, "start is -1.0"),
        ({"limit": 0.0}, "limit is 0.0"),
        ({"limit": math.nan}, "limit is nan"),
    ],
)
def test_impossible_settings_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        critical_lr(*along(lambda a: -a), **options)
