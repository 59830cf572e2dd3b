"""The operators beside `directional`: checked like it where a custom Function is in the graph, several eigenpairs,
Gauss–Newton products, estimates with their errors, parameters of any structure."""

import math
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from stability import curvature
from stability.curvature import (
    NoSecondDerivative,
    block_shares,
    critical_lr,
    directional,
    eigenvalues,
    gauss_newton,
    gauss_newton_product,
    gradient_noise_scale,
    hessian_diagonal,
    hutchinson_diagonal,
    hutchinson_trace,
    hvp,
    loss_along,
    missing_rule,
    spectral_density,
    top_eigenvalue,
    trace,
)

from .nets import dense_hessian, flatten, random_direction, tiny, token_loss, unflatten
from .test_refusals import ConstantCube, GoodCube, HalfCube, OnceCube
from .test_spectrum import quadratic, symmetric

X = {"x": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
U = {"x": torch.tensor([-1.0, 0.5, -2.0], dtype=torch.float64)}
OPERATORS = {
    "hvp": lambda loss: hvp(loss, X, U),
    "top_eigenvalue": lambda loss: top_eigenvalue(loss, X),
    "eigenvalues": lambda loss: eigenvalues(loss, X, 2),
    "trace": lambda loss: trace(loss, X, products=3),
    "hutchinson_trace": lambda loss: hutchinson_trace(loss, X, products=2),
    "spectral_density": lambda loss: spectral_density(loss, X, probes=1, iterations=2),
    "block_shares": lambda loss: block_shares(loss, X, U),
    "hutchinson_diagonal": lambda loss: hutchinson_diagonal(loss, X, generator=torch.Generator().manual_seed(0)),
    "hessian_diagonal": lambda loss: hessian_diagonal(loss, X, samples=2),
    "gauss_newton_product": lambda loss: gauss_newton_product(lambda p: p["x"], lambda z: loss({"x": z}), X, U),
}


def cube(function):
    return lambda p: (function.apply(p["x"]) * p["x"]).sum()


@pytest.mark.parametrize("function", [ConstantCube, HalfCube])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_does_not_believe_a_functions_wrong_second_derivative(operator, function):
    with pytest.raises(NoSecondDerivative, match=f"{function.__name__} .* has a wrong second derivative"):
        operator(cube(function))


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_believes_a_right_one_and_names_what_has_none(operator):
    operator(cube(GoodCube))
    with pytest.raises(NoSecondDerivative, match="OnceCube"):
        operator(cube(OnceCube))


def test_only_the_first_product_of_an_operator_is_checked_and_a_product_not_if_told_so():
    calls = []

    def loss(p):
        calls.append(1)
        return cube(GoodCube)(p)

    counts = []
    for iterations in (1, 2, 3):
        calls.clear()
        top_eigenvalue(loss, X, iterations=iterations, tolerance=0.0)
        counts.append(len(calls))
    assert counts == [6, 7, 8]  # four gradients make the two differences, and one is that at the point itself
    calls.clear()
    hvp(loss, X, U, check=False)
    assert len(calls) == 1


def ctc(p):
    return F.ctc_loss(p["x"].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


def test_an_operation_of_torch_without_a_second_derivative_is_named_as_such():
    with pytest.raises(NoSecondDerivative, match="_ctc_loss_backward is not implemented"):
        hvp(ctc, {"x": torch.randn(5, 1, 4)}, {"x": torch.randn(5, 1, 4)})


@torch.library.custom_op("curvature_tests::cube", mutates_args=())
def cube_operation(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube_operation.register_fake
def _(x):
    return torch.empty_like(x)


cube_operation.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.mark.parametrize("call", [gauss_newton, gauss_newton_product])
def test_a_forward_mode_that_is_silently_zero_is_refused(call):
    with pytest.raises(NoSecondDerivative, match="wrong forward-mode derivative"):
        call(lambda p: cube_operation(p["x"]), lambda z: (z * z).sum(), X, U)


VALUES = [-9.0, -1.0, 0.5, 2.0, 4.0, 7.0]
ENDS = {"largest": [7, 4, 2], "smallest": [-9, -1, 0.5], "magnitude": [-9, 7, 4]}


@pytest.mark.parametrize(("which", "expected"), ENDS.items())
def test_the_eigenvalues_of_one_end_come_with_their_vectors(which, expected):
    matrix = symmetric(VALUES)
    found = eigenvalues(*quadratic(matrix), 3, which=which, tolerance=1e-9)
    assert [pair.value for pair in found] == pytest.approx(expected, rel=1e-9)
    for pair in found:
        vector = torch.cat([pair.vector["a"], pair.vector["b"]])
        torch.testing.assert_close(matrix @ vector, pair.value * vector, rtol=0, atol=1e-8)
        assert float(vector.norm()) == pytest.approx(1, rel=1e-9)
        assert pair.converged


def test_the_eigenvalues_of_a_transformer_are_the_dense_hessians_within_their_residuals():
    net, params, tokens = tiny(width=2)
    loss = token_loss(net, tokens)
    dense = torch.linalg.eigvalsh(dense_hessian(loss, params))
    for which, expected in (("largest", dense.flip(0)[:3]), ("smallest", dense[:3])):
        for pair, exact in zip(eigenvalues(loss, params, 3, which=which, tolerance=1e-4), expected, strict=True):
            assert pair.converged
            assert abs(pair.value - float(exact)) <= pair.residual * (1 + 1e-9)
    for pair in eigenvalues(loss, params, 3, tolerance=0.0, iterations=6):
        assert float((dense - pair.value).abs().min()) <= pair.residual * (1 + 1e-9)
        assert not pair.converged


def test_more_eigenvalues_than_there_are_give_those_there_are():
    loss, params = quadratic(symmetric([3.0, 2.0]))
    assert [pair.value for pair in eigenvalues(loss, params, 5, tolerance=0.0)] == pytest.approx([3, 2])
    with pytest.raises(ValueError, match="k=5, iterations is 4"):
        eigenvalues(loss, params, 5, iterations=4)
    with pytest.raises(ValueError, match="which is 'LM'; choose one of largest, smallest, magnitude"):
        eigenvalues(loss, params, which="LM")


def output_loss(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def test_a_gauss_newton_product_is_that_of_the_dense_matrix_and_of_its_microbatches():
    net, params, tokens = tiny(width=4)
    u = random_direction(params)

    def model(at, rows=tokens):
        return functional_call(net, at, (rows[:, :-1],))

    def loss(outputs, rows=tokens):
        return output_loss(outputs, rows)

    flat = flatten(params)
    jacobian = torch.autograd.functional.jacobian(lambda vector: model(unflatten(vector, params)).flatten(), flat)
    outputs = model(params).detach()
    bend = torch.autograd.functional.hessian(lambda z: loss(z.reshape(outputs.shape)), outputs.flatten())
    expected = jacobian.T @ (bend @ (jacobian @ flatten(u)))
    found = gauss_newton_product(model, loss, params, u)
    torch.testing.assert_close(flatten(found), expected, rtol=1e-9, atol=1e-10)
    part = gauss_newton(model, loss, params, u).part
    assert float(flatten(u) @ flatten(found)) == pytest.approx(part, rel=1e-10)
    count = tokens[:, 1:].numel()
    parts = gauss_newton_product(
        model,
        lambda z, rows: (output_loss(z, rows), rows[:, 1:].numel()),
        params,
        u,
        batches=iter([tokens[:1], tokens[1:]]),
    )
    torch.testing.assert_close(flatten(parts) * count, expected, rtol=1e-9, atol=1e-10)


def test_hutchinsons_estimates_lie_within_their_standard_errors_which_are_those_of_rademacher_probes():
    """Var(zᵀHz) = 2 Σ_{i≠j} H_ij², Var(z_i (Hz)_i) = Σ_{j≠i} H_ij²."""
    matrix = symmetric(VALUES)
    loss, params = quadratic(matrix)
    apart = (matrix - torch.diag(matrix.diagonal())).square()
    found = hutchinson_trace(loss, params, products=400)
    expected = math.sqrt(2 * float(apart.sum()) / 400)
    assert abs(found.value - sum(VALUES)) < 4 * expected
    assert found.standard_error == pytest.approx(expected, rel=0.15)
    diagonal = hessian_diagonal(loss, params, samples=400)
    value, error = (torch.cat([part["a"], part["b"]]) for part in (diagonal.value, diagonal.standard_error))
    exact = (apart.sum(1) / 400).sqrt()
    assert ((value - matrix.diagonal()).abs() < 4 * exact).all()
    assert error.tolist() == pytest.approx(exact.tolist(), rel=0.15)
    assert hessian_diagonal(loss, params, samples=1).standard_error["a"].isnan().all()


def test_everything_that_is_exported_exists_and_every_public_operator_is_exported():
    for name in curvature.__all__:
        assert getattr(curvature, name) is not None
    assert {*OPERATORS, "critical_lr", "gauss_newton", "gradient_noise_scale", "loss_along"} <= set(curvature.__all__)


Layer = namedtuple("Layer", "weight bias")
W, B = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
DATA = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TREES = {
    "list": ([W, B], lambda p: (p[0], p[1])),
    "tuple": ((W, B), lambda p: (p[0], p[1])),
    "nested": ({"layer": {"w": W}, "rest": [B]}, lambda p: (p["layer"]["w"], p["rest"][0])),
    "named tuple": (Layer(W, B), lambda p: (p.weight, p.bias)),
    "tensor": (torch.cat([W.flatten(), B]), lambda p: (p[:12].reshape(3, 4), p[12:])),
}


@pytest.mark.parametrize(("tree", "read"), TREES.values(), ids=TREES)
def test_parameters_of_any_structure_give_the_numbers_of_a_dict_and_results_in_their_structure(tree, read):
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    flat = {str(index): leaf for index, leaf in enumerate(leaves)}

    def loss(p, rows=DATA):
        weight, bias = read(p)
        return F.linear(rows, weight, bias).tanh().square().sum()

    def whole(at):
        return torch.utils._pytree.tree_unflatten(list(at.values()), spec)

    def named(at, *rest):
        return loss(whole(at), *rest)

    def same(a, b):
        left, right = (torch.cat([part.flatten() for part in torch.utils._pytree.tree_leaves(x)]) for x in (a, b))
        torch.testing.assert_close(left, right)
        assert torch.utils._pytree.tree_structure(a) == spec

    u = {name: leaf.cos() for name, leaf in flat.items()}
    for method in ("taylor", "double_backward", "finite_difference"):
        ours, theirs = directional(loss, tree, whole(u), method), directional(named, flat, u, method)
        assert (ours.loss, ours.slope, ours.curvature) == (theirs.loss, theirs.slope, theirs.curvature)
    same(hvp(loss, tree, whole(u)), hvp(named, flat, u))
    same(eigenvalues(loss, tree, 2)[1].vector, eigenvalues(named, flat, 2)[1].vector)
    same(hessian_diagonal(loss, tree, samples=2).value, hessian_diagonal(named, flat, samples=2).value)
    same(
        gauss_newton_product(lambda p: F.linear(DATA, *read(p)), lambda z: z.exp().sum(), tree, whole(u)),
        gauss_newton_product(lambda p: F.linear(DATA, *read(whole(p))), lambda z: z.exp().sum(), flat, u),
    )
    assert trace(loss, tree).value == trace(named, flat).value
    assert sum(block_shares(loss, tree, whole(u)).values()) == pytest.approx(directional(named, flat, u).curvature)
    assert critical_lr(loss, tree, whole(u), start=0.1) == critical_lr(named, flat, u, start=0.1)
    assert loss_along(loss, tree, whole(u), [0.5]) == loss_along(named, flat, u, [0.5])
    pieces = [DATA[:2], DATA[2:4]]
    ours, theirs = (
        gradient_noise_scale(lambda p, rows, f=f: (f(p, rows), 2), at, pieces)
        for f, at in ((loss, tree), (named, flat))
    )
    assert ours == theirs
    assert missing_rule(loss, tree) is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda loss: gauss_newton_product(loss, X, U),
            "gauss_newton_product: missing a required argument: 'direction'; its arguments are "
            "(model_fn, output_loss_fn, params, direction, *, batches=None)",
        ),
        (
            lambda loss: gradient_noise_scale(loss, X),
            "gradient_noise_scale: missing a required argument: 'batches'; its arguments are (loss_fn, params, batches)",
        ),
        (
            lambda loss: trace(loss, X, probes=3),
            "trace: got an unexpected keyword argument 'probes'; its arguments are "
            "(loss_fn, params, *, batches=None, products=30, seed=0)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named_with_their_function(call, said):
    with pytest.raises(TypeError) as refused:
        call(lambda p: p["x"].square().sum())
    assert str(refused.value) == said


def test_a_direction_of_another_structure_and_what_holds_no_tensors_are_refused():
    def loss(p):
        return sum(part.square().sum() for part in p)

    for other in ([W], (W, B), {"0": W, "1": B}, [B, [W]], None, iter([W, B])):
        with pytest.raises(ValueError, match="direction must have the structure of params"):
            hvp(loss, [W, B], other)
    with pytest.raises(ValueError, match=r"direction\['0'\] has shape \(3,\); params\['0'\] has \(3, 4\)"):
        hvp(loss, [W, B], [B, W])
    taken = r"; give a tensor or a dict, list or tuple of tensors, nested or not, such as dict\(model.named_parameters"
    for nothing in ([], {}, [[], {}], [iter([W])]):
        with pytest.raises(ValueError, match=f"params holds no tensor{taken}"):
            hvp(loss, nothing, nothing)
    for nothing in (nn.Linear(2, 2).parameters(), None, nn.Linear(2, 2), {W}):
        with pytest.raises(ValueError, match=f"params is of type {type(nothing).__name__}{taken}"):
            hvp(loss, nothing, nothing)
    with pytest.raises(ValueError, match="two tensors of one dotted path"):
        hvp(loss, {"a.b": W, "a": {"b": B}}, {"a.b": W, "a": {"b": B}})
