"""Every registered residual scheme keeps the contract, alone and in whole models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from stability.build import build_model, build_objective
from stability.curvature import directional
from stability.objectives import AbstractObjective
from stability.registry import Registry
from stability.residuals import build
from stability.residuals._streams import AbstractSinkhornStreams, AbstractStreams, Coefficients, sinkhorn
from stability.residuals.hc import HyperConnections
from stability.residuals.mhc import ManifoldHyperConnections
from tests.residuals.oracles import scaled, updated
from tests.within import assert_within

NAMES = Registry("residuals").names()
WIDTH = 8


def shake(module: nn.Module, size: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return module


class Whole(nn.Module):
    """Two connections around fixed branches, between ``enter`` and ``leave``."""

    def __init__(self, name: str):
        super().__init__()
        self.first, self.second = (build(name, width=WIDTH, layer=layer) for layer in (0, 1))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x_BND):
        state = self.first(self.first.enter(x_BND), lambda u_BND: u_BND.sin())
        return self.first.leave(self.second(state, lambda u_BND: u_BND * u_BND.roll(1, -1)), self.norm)


def inputs(dtype=torch.float64):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_shape_and_dtype_stay(name, dtype):
    module = shake(Whole(name))
    y_BND = module.to(dtype)(inputs(dtype))
    assert y_BND.shape == (2, 5, WIDTH)
    assert y_BND.dtype == dtype
    exact_BND = module.double()(inputs())
    limit = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 0.0}[dtype]
    assert_within((y_BND.double() - exact_BND).norm(), limit * exact_BND.norm())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_settings_build_the_same_connection_and_draw_nothing(name):
    before = torch.random.get_rng_state()
    one, two = Whole(name), Whole(name)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one(inputs(torch.float32)), two(inputs(torch.float32)))


@pytest.mark.parametrize("name", NAMES)
def test_saved_parameters_are_all_there_is(name):
    one, two = shake(Whole(name)).double(), Whole(name).double()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(inputs()), two(inputs()))


@pytest.mark.parametrize("name", NAMES)
def test_no_token_reads_another(name):
    x_BND = inputs().requires_grad_()
    y_BND = shake(Whole(name)).double()(x_BND)
    for position in range(5):
        (gradient_BND,) = torch.autograd.grad(y_BND[:, position].sin().sum(), x_BND, retain_graph=True)
        assert gradient_BND[:, position].abs().min() > 0
        assert gradient_BND.count_nonzero() == 2 * WIDTH


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_zeros_has_finite_second_derivatives(name):
    module = shake(Whole(name)).double()
    x_BND = torch.zeros(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    (gradient_BND,) = torch.autograd.grad(module(x_BND).square().sum(), x_BND, create_graph=True)
    (curvature_BND,) = torch.autograd.grad(gradient_BND.square().sum(), x_BND)
    assert gradient_BND.isfinite().all()
    assert curvature_BND.isfinite().all()


def state_of(module: AbstractStreams) -> torch.Tensor:
    shape = (2, 3, module.config.streams, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def check_coefficients_reproduce_forward(module: AbstractStreams) -> None:
    """The exposed pre, mix and post give the next state, mixᵀX + post ⊗ F(Σ pre X), token by token in plain floats."""
    state = state_of(module)
    with torch.no_grad():
        found = module.double()(state, lambda u_BND: u_BND.sin()).flatten(0, 1)
        tokens = zip(*(part.flatten(0, 1).tolist() for part in module.coefficients(state)), strict=True)
    for streams, (pre, mix, post), given in zip(state.flatten(0, 1).tolist(), tokens, found, strict=True):
        expected = updated(streams, (pre, mix, post), lambda u: [math.sin(value) for value in u])
        expected_SD = torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(given, expected_SD, rtol=1e-10, atol=1e-12), "another state"


def check_logits_reproduce_the_mix(module: AbstractSinkhornStreams) -> None:
    """The exposed mixing logits give the exposed mix by the settings' iterations of Sinkhorn and Knopp, in plain
    floats; and so does the class's own `mixing`."""
    module, state = module.double(), state_of(module)
    with torch.no_grad():
        mix_BNST, logits_BNST = module.coefficients(state).mix_BNST, module.mixing_logits(state)
        assert torch.allclose(module.mixing(logits_BNST), mix_BNST, rtol=1e-10, atol=1e-14), "another mix"
    for logits, given_ST in zip(logits_BNST.flatten(0, 1).tolist(), mix_BNST.flatten(0, 1), strict=True):
        expected_ST = torch.tensor(scaled(logits, module.config.iterations), dtype=torch.float64)
        assert torch.allclose(given_ST, expected_ST, rtol=1e-10, atol=1e-14), "another mix"


STREAMS = [name for name in NAMES if issubclass(Registry("residuals").load(name), AbstractStreams)]
SINKHORN = [name for name in NAMES if issubclass(Registry("residuals").load(name), AbstractSinkhornStreams)]


@pytest.mark.parametrize("name", STREAMS)
def test_exposed_coefficients_reproduce_forward(name):
    check_coefficients_reproduce_forward(shake(build(name, width=WIDTH, layer=1)))


@pytest.mark.parametrize("settings", [{}, {"iterations": 2}, {"streams": 3}])
def test_exposed_mixing_logits_reproduce_the_mix(settings):
    assert SINKHORN == ["mhc"], "another scheme with iterations is not tested"
    check_logits_reproduce_the_mix(shake(build("mhc", width=WIDTH, layer=1, **settings)))


def test_the_schemes_that_probes_observe_are_these():
    """Without the class a scheme is not observed, and nothing here would fail."""
    assert STREAMS == ["hc", "mhc", "mhc_lite"]


class ExposesTheTranspose(HyperConnections):
    """A planted fault: the state goes by mixᵀ, what is exposed is mix the other way round."""

    def forward(self, state, branch):
        pre_BNS, mix_BNST, post_BNS = super().coefficients(state)
        y_BND = branch(torch.einsum("bns,bnsd->bnd", pre_BNS, state))
        return torch.einsum("bnst,bnsd->bntd", mix_BNST, state) + post_BNS[..., None] * y_BND[..., None, :]

    def coefficients(self, x_BNSD):
        pre_BNS, mix_BNST, post_BNS = super().coefficients(x_BNSD)
        return Coefficients(pre_BNS, mix_BNST.mT, post_BNS)


def test_the_check_of_exposed_coefficients_catches_a_planted_fault():
    fault = shake(ExposesTheTranspose(ExposesTheTranspose.Config(), width=WIDTH, layer=1))
    with pytest.raises(AssertionError, match="another state"):
        check_coefficients_reproduce_forward(fault)


class ExposesLouderLogits(ManifoldHyperConnections):
    """A planted fault: logits seven times as large as those that the mix is made of."""

    def mixing_logits(self, x_BNSD):
        return 7 * super().mixing_logits(x_BNSD)


class SaysFewerIterations(ManifoldHyperConnections):
    """A planted fault: a mix of 20 iterations, and settings of 2."""

    def mixing(self, logits):
        return sinkhorn(logits, 20)


@pytest.mark.parametrize(("fault", "settings"), [(ExposesLouderLogits, {}), (SaysFewerIterations, {"iterations": 2})])
def test_the_check_of_exposed_logits_catches_planted_faults(fault, settings):
    module = shake(fault(fault.Config(**settings), width=WIDTH, layer=1))
    check_coefficients_reproduce_forward(module)
    with pytest.raises(AssertionError, match="another mix"):
        check_logits_reproduce_the_mix(module)


def whole_model(lab, name, **changes):
    spec = lab.spec(residual={"name": name}, **changes)
    return spec, shake(build_model(spec, 40), 0.1).double()


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_model_has_no_gradient_to_later_tokens(lab, name):
    _, model = whole_model(lab, name, objective={"name": "ar"})
    embedded_BND = model.embedding(torch.arange(16)[None]).detach().requires_grad_()
    model.embedding.forward = lambda tokens_BN: embedded_BND  # the embedding of the one sequence there is
    logits_BNV = model(torch.arange(16)[None])
    for position in (0, 7, 14):
        (gradient_BND,) = torch.autograd.grad(logits_BNV[:, position].square().sum(), embedded_BND, retain_graph=True)
        assert gradient_BND[:, : position + 1].abs().sum(-1).min() > 0
        assert not gradient_BND[:, position + 1 :].count_nonzero()


OBJECTIVES = {
    "causal": {"objective": {"name": "ar"}},
    "consensus": {"objective": {"name": "mlm"}, "mechanism": {"name": "sc"}},
    "cross": {"objective": {"name": "mlm", "context": 6}, "cross": {"name": "ca"}},
    "conditioned": {"objective": {"name": "score_entropy"}},
}


def batch_of(spec, objective: AbstractObjective):
    tokens = torch.randint(
        40, (3, objective.tokens_needed(spec.model.positions)), generator=torch.Generator().manual_seed(2)
    )
    return objective.examples(tokens, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("name", NAMES)
def test_curvature_of_a_whole_model_is_that_of_differences(lab, name, kind):
    """Taylor and double backward against central differences of the gradient, in float64; microbatches against the
    whole."""
    spec, model = whole_model(lab, name, **OBJECTIVES[kind])
    objective = build_objective(spec, 40)
    examples = batch_of(spec, objective)
    params = {key: parameter.detach() for key, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    direction = {
        key: torch.randn(value.shape, generator=generator, dtype=torch.float64) / 30 for key, value in params.items()
    }

    def loss(p):
        total, count = objective.loss(model, examples, p)
        return total / count

    step = 1e-4

    def slope(t):
        moved = {key: (value + t * direction[key]).requires_grad_() for key, value in params.items()}
        gradient = torch.autograd.grad(loss(moved), list(moved.values()), allow_unused=True)
        return sum((g * d).sum().item() for g, d in zip(gradient, direction.values(), strict=True) if g is not None)

    expected = (slope(step) - slope(-step)) / (2 * step)
    scale = max(abs(expected), 1e-3)
    for method in ("taylor", "double_backward"):
        found = directional(loss, params, direction, method)
        assert found.curvature == pytest.approx(expected, abs=1e-5 * scale), method
        assert found.slope == pytest.approx(slope(0.0), rel=1e-9)
    parts = directional(
        lambda p, part: objective.loss(model, part, p), params, direction, "taylor", batches=list(examples.split(2))
    )
    assert parts.curvature == pytest.approx(found.curvature, rel=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_over_a_gradient_equals_double_backward(name):
    module = shake(Whole(name)).double()
    params = {key: parameter.detach() for key, parameter in module.named_parameters()} | {"x": inputs()}
    tangent = {
        key: torch.randn(value.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        for key, value in params.items()
    }

    def loss(p):
        return functional_call(module, {key: value for key, value in p.items() if key != "x"}, (p["x"],)).pow(3).sum()

    _, product = torch.func.jvp(torch.func.grad(loss), (params,), (tangent,))
    curvature = sum((product[key] * tangent[key]).sum().item() for key in params)
    assert curvature == pytest.approx(directional(loss, params, tangent, "double_backward").curvature, rel=1e-10)


def start(lab, name, layers=2, embedding=1.0):
    model = {"name": "x", "layers": layers, "width": 16, "heads": 2, "positions": 16}
    net = build_model(lab.spec(residual={"name": name}, objective={"name": "ar"}, model=model), 40).double()
    with torch.no_grad():
        net.embedding.weight.mul_(embedding)
    return net


@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_starts_from_the_same_weights(lab, name):
    plain, other = start(lab, "identity").state_dict(), start(lab, name).state_dict()
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_an_untrained_model_of_hc_says_n_times_what_the_plain_one_says(lab):
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    plain, hyper = start(lab, "identity")(tokens), start(lab, "hc")(tokens)
    torch.testing.assert_close(hyper, 4 * plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "embedding", "expected"),
    [("mhc", 1, 0.0417), ("mhc_lite", 1, 0.0417), ("mhc", 0.02, 0.173), ("mhc_lite", 0.02, 0.1704)],
)
def test_an_untrained_model_of_mhc_says_nearly_that(lab, name, embedding, expected):
    """Its gates are σ(±1), not 0 and 1. With this project's embedding of N(0, 1) it deviates by 4 %, the branches of a
    block being small beside it; with one as small as nanoGPT's by 17 %."""
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    plain, other = start(lab, "identity", 8, embedding)(tokens), start(lab, name, 8, embedding)(tokens)
    assert deviation(other, plain) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("name", "expected"), [("hc", 0.0), ("mhc", 0.246), ("mhc_lite", 0.246)])
def test_eight_layers_as_large_as_their_stream_deviate_by_a_quarter(name, expected):
    """tanh of random linear maps of unit gain around their LayerNorm."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(32, 32, generator=generator).double() / 32**0.5 for _ in range(8)]
    x_BND = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).double()
    plain, other = (through(scheme, maps, x_BND) for scheme in ("identity", name))
    assert deviation(other, plain) == pytest.approx(expected, abs=1e-3)


def through(name, maps, x_BND):
    norm = nn.LayerNorm(32, elementwise_affine=False)
    layers = [build(name, width=32, layer=layer).double() for layer in range(len(maps))]
    state = layers[0].enter(x_BND)
    for layer, matrix in zip(layers, maps, strict=True):
        state = layer(state, lambda u_BND, matrix=matrix: (norm(u_BND) @ matrix).tanh())
    return layers[0].leave(state, norm)


def deviation(other, plain):
    """Relative distance after the best rescaling."""
    rescaled = other * (other * plain).sum() / other.square().sum()
    return ((rescaled - plain).norm() / plain.norm()).item()
