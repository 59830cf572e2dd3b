"""Products, eigenvalues, trace and diagonal beside those of curvlinops and hessian-eigenthings (the extra `peers`)."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.curvature import eigenvalues, gauss_newton_product, hessian_diagonal, hutchinson_trace
from tests.curvature.nets import flatten, random_direction, tiny, token_loss
from tests.within import assert_within, relative_error, rounding_floor

# Both sides sum the same products in another order, a few tens of roundings over the net's layers.
TOLERANCE = 100 * torch.finfo(torch.float64).eps
SAMPLES = 20


class Peer(NamedTuple):
    """The Hessian and the Gauss–Newton matrix times a flat vector, by another library."""

    hessian: object
    gauss_newton: object


def curvlinops(model, loss_fn, inputs, targets):
    library = pytest.importorskip("curvlinops", reason="curvlinops is not installed; pip install '.[peers]'")
    given = (model, loss_fn, list(model.parameters()), [(inputs, targets)])
    options = {"check_deterministic": False, "num_data": len(targets), "batch_size_fn": torch.numel}
    hessian, gauss_newton = (
        kind(*given, **options) for kind in (library.HessianLinearOperator, library.GGNLinearOperator)
    )
    return Peer(lambda v: hessian @ v, lambda v: gauss_newton @ v)


def eigenthings(model, loss_fn, inputs, targets):
    library = pytest.importorskip(
        "hessian_eigenthings", reason="hessian-eigenthings is not installed; pip install '.[peers]'"
    )
    data = [(inputs, targets)]
    hessian = library.HessianOperator(model, data, library.supervised_loss(loss_fn))
    gauss_newton = library.GGNOperator(
        model, data, library.supervised_forward, library.supervised_loss_of_output(loss_fn)
    )
    return Peer(hessian.matvec, gauss_newton.matvec)


def logits_of(net, norm):
    """The net with other norms and logits by token, beside its parameters and data."""
    net, _, tokens = net
    if norm == "rmsnorm":
        for name in ("norm1", "norm2", "norm3"):
            setattr(net, name, nn.RMSNorm(4).double())
    return nn.Sequential(net, nn.Flatten(0, 1)), tokens


# curvlinops' Hessian is wrong through LayerNorm (facts 8)
@pytest.fixture(params=[(curvlinops, "rmsnorm"), (eigenthings, "rmsnorm"), (eigenthings, "layernorm")])
def case(request):
    """(model, params, loss, tokens, peer)."""
    library, norm = request.param
    model, tokens = logits_of(tiny(width=4), norm)
    params = dict(model[0].named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        peer = library(model, nn.CrossEntropyLoss(), tokens[:, :-1], tokens[:, 1:].flatten())
        yield model, params, token_loss(model[0], tokens), tokens, peer


def dense(product, size):
    return torch.stack([product(unit) for unit in torch.eye(size, dtype=torch.float64)], dim=1).detach()


def off(found, truth):
    floor = rounding_floor(TOLERANCE, torch.float64, truth)
    return relative_error(found, truth, floor)


def probes(size, seed=0):
    """The Rademacher vectors that a seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 2, (size,), generator=generator) * 2 - 1).double() for _ in range(SAMPLES)]


def test_eigenvalues_are_those_of_the_peers_dense_hessian(case):
    _, params, loss, _, peer = case
    matrix = dense(peer.hessian, flatten(params).numel())
    assert_within(off(matrix, matrix.T), TOLERANCE)
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    order = {"largest": values.flip(0), "smallest": values, "magnitude": values[values.abs().argsort(descending=True)]}
    for which, truth in order.items():
        found = eigenvalues(loss, params, 3, which=which, tolerance=1e-8, iterations=100)
        assert_within(
            off(torch.tensor([each.value for each in found], dtype=torch.float64), truth[:3]), TOLERANCE, which
        )


def test_a_gauss_newton_product_is_the_peers(case):
    model, params, _, tokens, peer = case
    u = random_direction(params)

    def outputs(at):
        return torch.func.functional_call(model[0], at, (tokens[:, :-1],)).flatten(0, 1)

    found = gauss_newton_product(
        outputs, lambda logits: nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()), params, u
    )
    assert_within(off(flatten(found), peer.gauss_newton(flatten(u))), TOLERANCE)


def test_trace_and_diagonal_are_those_of_the_peers_products_with_the_same_vectors(case):
    _, params, loss, _, peer = case
    drawn = probes(flatten(params).numel())
    products = torch.stack([z * peer.hessian(z) for z in drawn]).detach()
    trace = hutchinson_trace(loss, params, products=SAMPLES)
    diagonal = hessian_diagonal(loss, params, samples=SAMPLES)
    forms = products.sum(1)
    spread = rounding_floor(TOLERANCE, torch.float64, products)
    assert_within(relative_error(torch.tensor(trace.value, dtype=torch.float64), forms.mean(), spread), TOLERANCE)
    assert_within(
        relative_error(torch.tensor(trace.standard_error, dtype=torch.float64), forms.std() / SAMPLES**0.5, spread),
        TOLERANCE,
    )
    assert_within(off(flatten(diagonal.value), products.mean(0)), TOLERANCE)
    # a variance is a difference of squares: its rounding grows with the square of the terms
    errors = products.std(0) / SAMPLES**0.5
    assert_within(
        relative_error(flatten(diagonal.standard_error) ** 2, errors**2, float(products.square().mean(0).norm())),
        TOLERANCE,
    )
