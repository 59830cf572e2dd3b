"""Connections of several streams in plain torch, from the formulas alone, and what they are drawn from in tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.streams import join, read_gated, read_hyper
from tests.kernels.guards import guarded, guards
from tests.within import assert_within, relative_error, rounding_floor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def permutation_matrices(streams: int, count: int | None = None) -> Tensor:
    """Return the permutation matrices of that many streams, or the first ``count`` of them, (R, S·T)."""
    orders = list(itertools.islice(itertools.permutations(range(streams)), count))
    return torch.stack([torch.eye(streams)[list(order)].flatten() for order in orders])


def divided(logits: Tensor, iterations: int) -> Tensor:
    """Return exp(logits) (…, S, T), its columns and then its rows divided by their sums, in logarithms."""
    matrix = logits
    for _ in range(iterations):
        matrix = matrix - torch.logsumexp(matrix, -2, keepdim=True)
        matrix = matrix - torch.logsumexp(matrix, -1, keepdim=True)
    return matrix.exp()


@dataclass(frozen=True)
class Case:
    """One connection: its scheme, sizes and dtype. ``count``: of permutations, None for all."""

    scheme: str
    streams: int
    width: int
    tokens: int
    dtype: torch.dtype = torch.float32
    iterations: int = 3
    count: int | None = None
    spread: float = 1.0

    @property
    def p(self) -> Tensor | None:
        return permutation_matrices(self.streams, self.count) if self.scheme == "mhc_lite" else None

    @property
    def settings(self) -> dict[str, int]:
        return {} if self.scheme == "hc" else {"iterations": self.iterations}

    def drawn(self, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return what the connection reads (X, weights …) and the gradients of what it gives, each in its dtype."""
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        n, c = self.streams, self.width
        if self.scheme == "hc":
            given = [draw(self.tokens, n, c), draw(c, n + 2) / c**0.5, draw(n, n + 2), draw(n + 2)]
        else:
            options = n * n if self.p is None else len(self.p)
            weight = self.spread * draw(n * c, 2 * n + options) / (n * c) ** 0.5
            given = [draw(self.tokens, n, c), weight, draw(2 * n + options)]
        gradients = [draw(self.tokens, c), draw(self.tokens, n, n + 2), draw(self.tokens, n, c)]
        wide = torch.promote_types(self.dtype, torch.float32)
        given = [given[0].to(self.dtype), *(each.to(wide) for each in given[1:])]
        return given, [gradients[0].to(self.dtype), gradients[1].to(wide), gradients[2].to(self.dtype)]

    def kernels(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, the coefficients and X by the operation."""
        return read_hyper(*given) if self.scheme == "hc" else read_gated(*given, self.p, **self.settings)

    def plain(self, x: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same from the formulas."""
        epsilon = torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
        normed = lambda x: x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()  # noqa: E731
        n = self.streams
        if self.scheme == "hc":
            static, amplitude = rest
            coefficients = static + amplitude * torch.tanh(normed(x) @ weight)
        else:
            pre, post, mix = (normed(x.flatten(1)) @ weight + rest[0]).split([n, n, weight.shape[1] - 2 * n], -1)
            if self.p is None:
                mix = divided(mix.unflatten(-1, (n, n)), self.iterations)
            else:
                mix = torch.einsum("pr,rst->pst", mix.softmax(-1), self.matrices(x.dtype))
            coefficients = torch.cat([pre.sigmoid()[..., None], mix, 2 * post.sigmoid()[..., None]], -1)
        return torch.einsum("ps,psc->pc", coefficients[..., 0], x), coefficients, x

    def matrices(self, dtype: torch.dtype) -> Tensor:
        assert self.p is not None
        return self.p.to(dtype).unflatten(-1, (self.streams, self.streams))


def plain_join(x: Tensor, coefficients: Tensor, added: Tensor, *, by_differences: bool) -> Tensor:
    """Return X' from the formulas, for each of two forms."""
    mix, post = coefficients[..., 1:-1], coefficients[..., -1]
    mixed = torch.einsum("pst,psc->ptc", mix, x)
    if by_differences:
        mixed = x + mixed - mix.sum(-2)[..., None] * x
    return mixed + post[..., None] * added[:, None]


def assert_each_close(found: Sequence[Tensor], truth: Sequence[Tensor], tolerance: float, dtype: torch.dtype) -> None:
    """Hold each tensor to its truth by relative root mean square, sums that cancel by the rounding of the largest."""
    floor = rounding_floor(tolerance, dtype, *truth)
    for index, (one, other) in enumerate(zip(found, truth, strict=True)):
        assert_within(relative_error(one, other, floor), tolerance, index)


def assert_reading_equals_the_formulas(case: Case, seed: int = 0) -> None:
    """Compare results and all gradients with those in float64, every buffer guarded."""
    given, gradients = case.drawn(seed)
    leaves = [guarded(each).requires_grad_() for each in given]
    with guards():
        out = case.kernels(*leaves)
        found = torch.autograd.grad(out, leaves, [guarded(each) for each in gradients])
    exact = [each.double().requires_grad_() for each in given]
    truth = case.plain(*exact)
    expected = torch.autograd.grad(truth, exact, [each.double() for each in gradients])
    assert_each_close((*out, *found), (*truth, *expected), TOLERANCE[case.dtype], case.dtype)


def assert_joining_equals_the_formulas(case: Case, seed: int = 0, *, by_differences: bool = True) -> None:
    """Compare X' and all gradients with those in float64, every buffer guarded."""
    given, (added, coefficients, gradient) = case.drawn(seed)
    inputs = [given[0], coefficients, added]
    leaves = [guarded(each).requires_grad_() for each in inputs]
    with guards():
        out = join(*leaves, by_differences=by_differences)
        found = torch.autograd.grad(out, leaves, guarded(gradient))
    exact = [each.double().requires_grad_() for each in inputs]
    truth = plain_join(*exact, by_differences=by_differences)
    expected = torch.autograd.grad(truth, exact, gradient.double())
    assert_each_close((out, *found), (truth, *expected), TOLERANCE[case.dtype], case.dtype)
