"""Second-order rules of products: (ab)″ = a″b + 2a′b′ + ab″.

Matrix products are accumulated in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import (
    Component,
    Jet,
    NoRule,
    add,
    jet,
    map_components,
    multiply,
    parts,
    register_aten_rule,
    register_rule,
    replace_value,
    value_of,
)

Bilinear = Callable[[Tensor, Tensor], Tensor]


def bilinear(product: Bilinear, a: Any, b: Any, accumulate: Callable[..., Tensor] | None = None) -> Tensor:
    """Return product(a, b) of two jets, linear in each.

    Args:
        product: a bilinear function of two tensors.
        a: a jet or a constant.
        b: a jet or a constant.
        accumulate: (out, x, y, factor) adding factor·product(x, y) to out in place; default: compute and add.
    """
    (a0, a1, a2), (b0, b1, b2) = parts(a), parts(b)
    accumulate = accumulate or (lambda out, x, y, factor: out.add_(product(x, y), alpha=factor))
    first = _sum(product, accumulate, [(a1, b0, 1), (a0, b1, 1)])
    second = _sum(product, accumulate, [(a2, b0, 1), (a0, b2, 1), (a1, b1, 2)])
    return jet(product(a0, b0), first, second)


def _sum(product: Bilinear, accumulate: Callable[..., Tensor], terms: list[tuple[Any, Any, int]]) -> Component:
    total: Component = None
    for x, y, factor in terms:
        if x is None or y is None:
            continue
        if total is not None:
            accumulate(total, x, y, factor)
        else:
            total = product(x, y) if factor == 1 else product(x, y).mul_(factor)
    return total


@register_aten_rule("mul")
def _mul(func, args, kwargs):
    (a, a1, a2), (b, b1, b2) = parts(args[0]), parts(args[1])
    value = func(a, b)
    if args[0] is args[1]:
        return jet(value, _sum_of(value, (a, a1, 2)), _sum_of(value, (a, a2, 2), (a1, a1, 2)))
    return jet(value, _sum_of(value, (a1, b, 1), (b1, a, 1)), _sum_of(value, (a2, b, 1), (b2, a, 1), (a1, b1, 2)))


@register_rule(Tensor.mul, torch.mul)
def _mul_call(a, b, **kwargs):
    return NotImplemented if kwargs else _mul(torch.mul, (a, b), {})


def _sum_of(like: Tensor, *terms: tuple[Any, Any, int]) -> Component:
    """Return Σ factor·x·y without terms of None, in one buffer shaped like ``like``."""
    total: Component = None
    for x, y, factor in terms:
        if x is None or y is None:
            continue
        if total is not None:
            total = total.addcmul_(x, y, value=factor) if isinstance(y, Tensor) else total.add_(x, alpha=factor * y)
            continue
        product: Tensor = x * y if factor == 1 else (x * y).mul_(factor)
        whole = product.shape == like.shape and product.dtype == like.dtype
        total = product if whole else product.to(like.dtype).expand_as(like).contiguous()
    return total


@register_aten_rule("div")
def _div(func, args, kwargs):
    """Return q = a/b with its derivatives."""
    (a, a1, a2), (b, b1, b2) = parts(args[0]), parts(args[1])
    q = func(a, b, **kwargs)
    if kwargs.get("rounding_mode"):
        return q
    if b1 is None and b2 is None:
        return jet(q, *(None if part is None else part / b for part in (a1, a2)))
    # q′ = (a′ − qb′)/b, q″ = (a″ − 2q′b′ − qb″)/b
    first = _divide(add(a1, multiply(b1, q, -1)), b)
    return jet(q, first, _divide(add(add(a2, multiply(b2, q, -1)), multiply(first, b1, -2)), b))


def _divide(numerator: Component, b: Tensor) -> Component:
    return None if numerator is None else numerator / b


@register_aten_rule("mm", "bmm", "mv", "dot")
def _mm(func, args, kwargs):
    return matmul(args[0], args[1])


@register_aten_rule("addmm", "baddbmm", "addmv")
def _addmm(func, args, kwargs):
    bias, a, b = args
    product = matmul(a, b)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


@register_aten_rule("addcmul")
def _addcmul(func, args, kwargs):
    return args[0] + args[1] * args[2] * kwargs.get("value", 1)


@register_aten_rule("addcdiv")
def _addcdiv(func, args, kwargs):
    return args[0] + args[1] / args[2] * kwargs.get("value", 1)


@register_aten_rule("lerp")
def _lerp(func, args, kwargs):
    start, end, weight = args
    return start + (end - start) * weight


@register_aten_rule("convolution")
def _convolution(func, args, kwargs):
    x, weight, bias, *rest = args
    y = bilinear(lambda a, b: func(a, b, None, *rest), x, weight)
    return y if bias is None else y + bias.reshape(1, -1, *[1] * (y.ndim - 2))


@register_aten_rule("linalg_solve_triangular", "triangular_solve")
def _solve_triangular(func, args, kwargs):
    """Return X = A⁻¹B: X′ = A⁻¹(B′ − A′X), X″ = A⁻¹(B″ − 2A′X′ − A″X)."""
    (a, a1, a2), (b, b1, b2) = parts(args[0]), parts(args[1])
    if not kwargs.get("left", True):
        upper = not kwargs["upper"]
        solved = torch.linalg.solve_triangular(
            args[0].mT, args[1].mT, upper=upper, unitriangular=kwargs.get("unitriangular", False)
        )
        return replace_value(func(*map(value_of, args), **kwargs), solved.mT)
    x = func(a, b, **kwargs)
    # Only the triangle used by the solver counts, without a unit diagonal.
    a1, a2 = (None if part is None else _triangle(part, **kwargs) for part in (a1, a2))
    first = _call_solver(func, a, add(b1, _multiply_matrix(a1, x, -1)), kwargs)
    second = add(add(b2, _multiply_matrix(a2, x, -1)), None if first is None else _multiply_matrix(a1, first, -2))
    return jet(x, first, _call_solver(func, a, second, kwargs))


@register_aten_rule("linalg_inv_ex")
def _inverse(func, args, kwargs):
    """Return X = A⁻¹: X′ = −XA′X, X″ = −X(A″X + 2A′X′)."""
    _, a1, a2 = parts(args[0])
    x, info = func(args[0].value)
    return _solution(x, x, a1, a2, None, None), info


@register_aten_rule("_linalg_solve_ex")
def _solve(func, args, kwargs):
    """Return X = A⁻¹B: X′ = A⁻¹(B′ − A′X), X″ = A⁻¹(B″ − A″X − 2A′X′)."""
    (a, a1, a2), (b, b1, b2) = parts(args[0]), parts(args[1])
    result = func(a, b, **kwargs)
    if kwargs.get("left") is False or b.ndim != a.ndim:
        raise NoRule("taylor has no rule for linalg.solve with vectors or from the right")
    return _solution(result[0], torch.linalg.inv(a), a1, a2, b1, b2), *result[1:]


def _solution(x: Tensor, inverse: Tensor, a1: Component, a2: Component, b1: Component, b2: Component) -> Tensor:
    first = add(b1, _multiply_matrix(a1, x, -1))
    first = None if first is None else inverse @ first
    second = add(add(b2, _multiply_matrix(a2, x, -1)), None if first is None else _multiply_matrix(a1, first, -2))
    return jet(x, first, None if second is None else inverse @ second)


def _triangle(matrix: Tensor, *, upper: bool, unitriangular: bool = False, left: bool = True) -> Tensor:
    offset = int(unitriangular)
    return matrix.triu(offset) if upper else matrix.tril(-offset)


def _multiply_matrix(a: Component, b: Tensor, factor: float) -> Component:
    return None if a is None else (a @ b).mul_(factor)


def _call_solver(func, a: Tensor, b: Component, kwargs) -> Component:
    return None if b is None else func(a, b, **kwargs)


@register_rule(F.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y = xWᵀ + b with its derivatives.

    y′ = x′Wᵀ + xUᵀ + b′ and y″ = x″Wᵀ + 2x′Uᵀ with U = W′: five matrix products of the forward pass's size.

    Args:
        x: (…, I).
        weight: W, (O, I).
        bias: b, (O), or None.

    Returns:
        y, (…, O); NotImplemented for a vector x, or a W without two axes.
    """
    if weight.ndim != 2 or x.ndim < 2:
        return NotImplemented
    (w0, w1, w2), (c0, c1, c2) = parts(weight), parts(bias)
    x0, x1, x2 = parts(_reshape(x, (-1, x.shape[-1])))
    value = F.linear(x0, w0, c0)
    first = _affine(value, c1, [(x1, w0, 1), (x0, w1, 1)])
    second = _affine(value, c2, [(x2, w0, 1), (x0, w2, 1), (x1, w1, 2)])
    return _reshape(jet(value, first, second), (*x.shape[:-1], weight.shape[0]))


def _affine(like: Tensor, constant: Component, terms: list[tuple[Component, Component, int]]) -> Component:
    """Return constant + Σ factor·a·wᵀ, accumulated in one buffer."""
    total: Component = None
    for a, w, factor in terms:
        if a is None or w is None:
            continue
        if total is not None:
            total.addmm_(a, w.t(), alpha=factor)
        elif constant is not None:
            total = torch.addmm(constant, a, w.t(), alpha=factor)
        else:
            total = a @ w.t() if factor == 1 else (a @ w.t()).mul_(factor)
    return total if total is not None or constant is None else constant.expand_as(like)


@register_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with torch.matmul's broadcasting.

    Derivatives are accumulated in place if the shapes allow one matrix product, or one batch of products.
    """
    if a.ndim >= 2 and b.ndim == 2:
        flat = _reshape(a, (-1, a.shape[-1]))
        product = bilinear(torch.mm, flat, b, lambda out, x, y, factor: out.addmm_(x, y, alpha=factor))
        return _reshape(product, (*a.shape[:-1], b.shape[-1]))
    if a.ndim < 2 or b.ndim < 2:
        return bilinear(torch.matmul, a, b)
    # expanded once; torch.matmul would expand for each product
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (
        map_components(lambda part: part.expand(*batch, *part.shape[-2:]).reshape(-1, *part.shape[-2:]), x)
        for x in (a, b)
    )
    product = bilinear(torch.bmm, left, right, lambda out, x, y, factor: out.baddbmm_(x, y, alpha=factor))
    return _reshape(product, (*batch, a.shape[-2], b.shape[-1]))


@register_rule(Tensor.__rmatmul__)
def _rmatmul(b: Tensor, a: Tensor) -> Tensor:
    return matmul(a, b)


def _reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return map_components(lambda part: part.reshape(shape), x)


@register_rule(torch.einsum)
def _einsum(equation: str, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) != 2 or not any(isinstance(x, Jet) for x in operands):
        return NotImplemented
    return bilinear(lambda x, y: torch.einsum(equation, x, y), *operands)


@register_aten_rule("prod")
def _prod(func, args, kwargs):
    """Return Π x over an axis by running products, so zeros need no division."""
    x, dim = (args[0].reshape(-1), 0) if len(args) == 1 else (args[0], args[1])
    pieces = x.unbind(dim)
    total = pieces[0]
    for piece in pieces[1:]:
        total = total * piece
    total = total.unsqueeze(dim) if len(args) > 2 and args[2] else total
    return replace_value(func(*map(value_of, args), **kwargs), total)


@register_aten_rule("cumprod")
def _cumprod(func, args, kwargs):
    pieces = args[0].unbind(args[1])
    running = [pieces[0]]
    for piece in pieces[1:]:
        running.append(running[-1] * piece)
    return torch.stack(running, args[1])
