"""hc, mhc and mhc_lite against slow loops, their start, and what their mixing matrices are."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated

import pytest
import torch
from pydantic import TypeAdapter

from stability.config.parts import Part, some_parts, validate_settings
from stability.models.passes import computing_in
from stability.residuals import build
from stability.residuals._streams import sinkhorn
from stability.residuals.mhc_lite import permutation_matrices, permutations
from tests.residuals import oracles
from tests.within import assert_within

NAMES = ("hc", "mhc", "mhc_lite")
WIDTH, STREAMS = 5, 4


def shaken(name, **settings):
    """A connection in float64 with every parameter moved, the dynamic parts as large as the static ones."""
    module = build(name, width=WIDTH, layer=2, **settings).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def some_streams(streams=STREAMS):
    return torch.randn(2, 3, streams, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def named(module):
    """A module's parameters by the formulas' names."""
    names = {"static_read": "S_a", "static_post": "S_b", "scale": "a", "bias_pre": "b_pre", "bias_post": "b_post"}
    found = {names.get(name, name): parameter.detach().tolist() for name, parameter in module.named_parameters()}
    return found | ({"b_mix": module.bias_mix.detach().flatten().tolist()} if hasattr(module, "bias_mix") else {})


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_and_update_equal_a_loop_over_tokens(name):
    module, x_BNSD = shaken(name), some_streams()
    found = module.coefficients(x_BNSD)
    after_BNSD = module(x_BNSD, lambda u_BND: u_BND.sin())
    for b, n in ((0, 0), (0, 2), (1, 1)):
        streams = x_BNSD[b, n].tolist()
        expected = getattr(oracles, name)(streams, named(module))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[b, n], torch.tensor(theirs, dtype=torch.float64), rtol=0, atol=1e-12)
        moved = oracles.updated(streams, expected, lambda u: [math.sin(value) for value in u])
        torch.testing.assert_close(after_BNSD[b, n], torch.tensor(moved, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", [0, 3, 6])
def test_connections_start_from_the_stream_of_their_number(name, layer):
    pre_BNS, mix_BNST, post_BNS = build(name, width=WIDTH, layer=layer).double().coefficients(some_streams())
    first = torch.nn.functional.one_hot(torch.tensor(layer % STREAMS), STREAMS).double()
    gates = torch.sigmoid(2 * first - 1)
    torch.testing.assert_close(pre_BNS[1, 2], first if name == "hc" else gates, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        post_BNS[1, 2], torch.ones(4).double() if name == "hc" else 2 * gates, rtol=0, atol=1e-12
    )
    # the weight of an entry off the diagonal (mhc), of each of 23 permutations (mhc_lite; 18 of them move a given
    # stream)
    away = math.exp(-8)
    diagonal = {"hc": 1.0, "mhc": 1 / (1 + 3 * away), "mhc_lite": 1 - 18 * away / (1 + 23 * away)}[name]
    expected = torch.full((4, 4), (1 - diagonal) / 3, dtype=torch.float64).fill_diagonal_(diagonal)
    torch.testing.assert_close(mix_BNST[1, 2], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_of_a_token_do_not_depend_on_its_scale_or_on_other_tokens(name):
    module, x_BNSD = shaken(name), some_streams()
    found, scaled = module.coefficients(x_BNSD), module.coefficients(1e3 * x_BNSD)
    alone = module.coefficients(x_BNSD[:1, 1:2])
    for whole, larger, single in zip(found, scaled, alone, strict=True):
        torch.testing.assert_close(larger, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(single[0, 0], whole[0, 1], rtol=1e-12, atol=1e-12)


def logits(std, num=1000, seed=0):
    return std * torch.randn(num, STREAMS, STREAMS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def column_error(matrices):
    return (matrices.sum(-2) - 1).abs().max().item()


def test_twenty_iterations_leave_rows_exact_and_columns_off_the_more_the_larger_the_logits():
    found = {std: sinkhorn(logits(std, 50_000), 20) for std in (1, 4, 8, 16)}
    for matrices in found.values():
        assert_within((matrices.sum(-1) - 1).abs().max(), 1e-14)
    errors = {std: (matrices.sum(-2) - 1).abs().amax(-1) for std, matrices in found.items()}
    assert errors[1].max() < 1e-3
    # among five samples of 10,000: by up to 0.0007, 0.003, 0.05
    for std, expected, sampling in ((4, 0.044, 0.001), (8, 0.082, 0.002), (16, 0.37, 0.02)):
        assert errors[std].quantile(0.99) == pytest.approx(expected, abs=sampling), std
    assert errors[16].max() > 0.99
    assert column_error(sinkhorn(logits(4), 400)) < errors[4].max() / 10


@pytest.mark.parametrize("std", [0.1, 4, 16, 300])
def test_mhc_lite_is_doubly_stochastic_whatever_its_logits(std):
    module = build("mhc_lite", width=WIDTH).double()
    matrices = module.mixing(
        std * torch.randn(5000, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    )
    assert_within((matrices.sum(-1) - 1).abs().max(), 1e-12)
    assert_within((matrices.sum(-2) - 1).abs().max(), 1e-12)
    assert (matrices >= 0).all()
    depth = matrices[:48].unbind()
    product = torch.linalg.multi_dot(depth)
    assert_within((product.sum(-2) - 1).abs().max(), 1e-12)


def test_the_papers_own_example_is_far_from_doubly_stochastic_after_twenty_iterations():
    """mHC-lite, Section 1, after Linial et al.: the formula is lost there, the numbers are of [[1,d,d],[1,d,d],[d,1,1]]
    with d = 1e-13. By plain division in exact fractions, and by the logarithms that mhc uses."""
    d = Fraction(1, 10**13)
    matrix = [[Fraction(1), d, d], [Fraction(1), d, d], [d, Fraction(1), Fraction(1)]]
    logits = torch.tensor([[float(value) for value in row] for row in matrix], dtype=torch.float64).log()
    for _ in range(20):
        columns = [sum(row[t] for row in matrix) for t in range(3)]
        matrix = [[value / columns[t] for t, value in enumerate(row)] for row in matrix]
        matrix = [[(value / sum(row)).limit_denominator(10**40) for value in row] for row in matrix]
    sums = [float(sum(row[t] for row in matrix)) for t in range(3)]
    assert sums == pytest.approx([1.820, 0.590, 0.590], abs=5e-4)
    assert sinkhorn(logits, 20).sum(0).tolist() == pytest.approx(sums, rel=1e-12)
    assert float(logits.max() - logits.min()) == pytest.approx(29.93, abs=5e-3), (
        "just below what the authors count as an outlier"
    )


def test_in_bfloat16_the_first_mixing_matrix_of_mhc_lite_is_not_doubly_stochastic():
    """What "exact" is worth in the precision of the paper's own training: 0.18 % of a constant signal is lost at every
    connection."""
    mix_BNST = build("mhc_lite", width=WIDTH).coefficients(some_streams().float()).mix_BNST
    for sums in (mix_BNST.bfloat16().double().sum(-2), mix_BNST.bfloat16().double().sum(-1)):
        torch.testing.assert_close(sums, torch.full_like(sums, 0.99818), rtol=0, atol=1e-5)
    assert_within((mix_BNST.double().sum(-2) - 1).abs().max(), 1e-6)


def after_48(precision, dtype=torch.float32):
    """A constant signal in all streams, before and after 48 shaken connections of mhc_lite whose branches give 0."""
    draws = torch.Generator().manual_seed(5)
    state = torch.randn(2, 3, 1, WIDTH, generator=draws).expand(-1, -1, 4, -1).contiguous().to(dtype)
    begun = state
    with torch.no_grad(), computing_in(precision, "cpu"):
        for layer in range(48):
            module = build("mhc_lite", width=WIDTH, layer=layer)
            for value in module.parameters():
                value.add_(torch.randn(value.shape, generator=draws))
            state = module(state, torch.zeros_like)
    return begun, state


def test_where_products_are_rounded_mhc_lite_keeps_a_constant_signal_exactly():
    assert torch.equal(*after_48("bf16"))
    begun, plain = after_48("float32")
    assert not torch.equal(begun, plain), "float32 takes the plain form, which is off by its rounding"
    torch.testing.assert_close(plain, begun, rtol=1e-5, atol=1e-6)


def test_mixing_by_differences_is_the_plain_mixing_of_other_streams():
    """Of streams that differ, in float64, where both forms can be told apart from their rounding."""
    module, state = build("mhc_lite", width=WIDTH).double(), some_streams()
    with torch.no_grad():
        for value in module.parameters():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(6), dtype=value.dtype))
        plain = module(state, torch.sin)
        with computing_in("bf16", "cpu"):
            found = module(state, torch.sin)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, plain), "both took the same form"


def test_mhc_lite_learns_any_doubly_stochastic_matrix():
    """Birkhoff and von Neumann: limits of Sinkhorn's, reached by descent on the logits alone."""
    module = build("mhc_lite", width=WIDTH).double()
    for target in sinkhorn(logits(1, 3, seed=7), 2000):
        weights = torch.zeros(24, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [weights], max_iter=500, tolerance_grad=1e-14, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def loss(weights=weights, optimizer=optimizer, target=target):
            optimizer.zero_grad()
            value = (module.mixing(weights) - target).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        torch.testing.assert_close(module.mixing(weights), target, rtol=0, atol=1e-6)


def test_weights_on_permutations_are_their_mean():
    module = build("mhc_lite", width=WIDTH).double()
    weights = torch.full((24,), -80.0, dtype=torch.float64)
    for order, weight in (((1, 0, 2, 3), 0.5), ((3, 2, 1, 0), 0.3), ((1, 2, 3, 0), 0.2)):
        weights[permutations(4, None, 0).index(order)] = math.log(weight)
    expected = [[0, 0.7, 0, 0.3], [0.5, 0, 0.5, 0], [0, 0.3, 0.5, 0.2], [0.5, 0, 0, 0.5]]
    torch.testing.assert_close(module.mixing(weights), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_sinkhorn_in_logarithms_bears_logits_of_a_thousand():
    huge = 1e3 * torch.randn(200, STREAMS, STREAMS, generator=torch.Generator().manual_seed(9))
    huge[0] = torch.tensor([[1000.0, -1000, -1000, -1000]] * 4)  # every column but one underflows to zero in float32
    huge.requires_grad_()
    matrices = sinkhorn(huge, 20)
    (gradient,) = torch.autograd.grad(matrices.square().sum(), huge)
    assert matrices.isfinite().all()
    assert gradient.isfinite().all()
    assert_within((matrices.sum(-1) - 1).abs().max(), 1e-5)
    torch.testing.assert_close(matrices[0], torch.full((4, 4), 0.25), rtol=0, atol=1e-4)


def test_sinkhorn_equals_division_by_sums():
    for matrix, ours in zip(logits(2, 3).tolist(), sinkhorn(logits(2, 3), 7), strict=True):
        torch.testing.assert_close(
            ours, torch.tensor(oracles.scaled(matrix, 7), dtype=torch.float64), rtol=0, atol=1e-13
        )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_differences(name):
    module = shaken(name)
    parameters = dict(module.named_parameters())
    x_BNSD = some_streams()[:1, :2].requires_grad_()

    def update(x_BNSD, *values):
        named_values = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(module, named_values, (x_BNSD, lambda u_BND: u_BND.sin()))

    assert torch.autograd.gradcheck(
        update, (x_BNSD, *(value.detach().requires_grad_() for value in parameters.values())), atol=1e-7
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1.5, r"permutations=1.5: give all, or how many as a whole number"),
        (True, r"permutations=True: give all, or how many as a whole number"),
        ("some", r"permutations='some': give all, or how many as a whole number"),
        (99, r"permutations=99: 4 streams have 24 of them; give 1 to 24, or all"),
    ],
)
def test_a_number_of_permutations_that_is_none_is_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_settings("residuals", "mhc_lite", {"permutations": given})
    assert str(caught.value).startswith("residual.mhc_lite.permutations=") and "\n" not in str(caught.value)


def test_a_part_of_the_permutations_holds_the_identity_and_is_drawn_by_its_seed():
    for seed in (0, 1):
        chosen = permutations(8, 20, seed)
        assert chosen[0] == tuple(range(8))
        assert len(set(chosen)) == 20
        assert all(sorted(order) == list(range(8)) for order in chosen)
        assert permutations(8, 20, seed) == chosen
    assert permutations(8, 20, 0) != permutations(8, 20, 1)
    assert permutations(3, 6, 0)[0] == (0, 1, 2)
    assert sorted(permutations(3, 6, 0)) == permutations(3, None, 0)
    matrices = permutation_matrices(8, 20, 0).unflatten(-1, (8, 8))
    assert torch.equal(matrices[0], torch.eye(8))
    assert (matrices.sum(-1) == 1).all() and (matrices.sum(-2) == 1).all()


def test_eight_streams_of_sixteen_permutations_stay_doubly_stochastic():
    module = shaken("mhc_lite", streams=8, permutations=16)
    _, mix_BNST, _ = module.coefficients(some_streams(8))
    assert_within((mix_BNST.sum(-1) - 1).abs().max(), 1e-12)
    assert_within((mix_BNST.sum(-2) - 1).abs().max(), 1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"streams": 6},
            "permutations=all: 6 streams have 720 of them; say how many, e.g. residual.mhc_lite.permutations=64",
        ),
        (
            {"permutation_seed": 3},
            "residual.mhc_lite.permutation_seed=3 changes nothing here: it draws a part of the permutations, e.g. "
            "residual.mhc_lite.permutations=16 (residual.mhc_lite.permutations=all given)",
        ),
        ({"permutations": 25}, "permutations=25: 4 streams have 24 of them; give 1 to 24, or all"),
        ({"streams": 0}, "residual.mhc_lite.streams=0: input should be greater than or equal to 1"),
    ],
)
def test_permutations_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError) as caught:
        validate_settings("residuals", "mhc_lite", settings)
    assert str(caught.value).endswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_a_sweep_decays_the_static_coefficients_of_all_its_schemes_or_of_none():
    axis = TypeAdapter(Annotated[tuple[Part, ...], some_parts("residuals")])
    decayed = {name: {"decay_static": True} for name in NAMES}
    assert len(axis.validate_python({"identity": {}, **decayed})) == 4
    told = (
        "residual.hc.decay_static=true and residual.mhc_lite.decay_static=false: in one sweep they must be the "
        "same; set both, or sweep them apart"
    )
    with pytest.raises(ValueError, match=told):
        axis.validate_python({**decayed, "mhc_lite": {}})
