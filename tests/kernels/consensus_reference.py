"""Consensus as dense sums in plain torch: every pair of positions, every edge's matrix R, nothing shared with the
mechanisms or their kernels; and the comparison of the kernels with it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.consensus import cross_consensus, self_consensus
from tests.kernels.guards import guarded, guards
from tests.within import assert_within, relative_error, rounding_floor

NAMES = ("u", "v", "source", "target", "scalar_weight", "scalar_bias", "lambda_weight", "lambda_bias")


@dataclass(frozen=True)
class Case:
    """Sizes and settings of one comparison; ``context``: None for self-consensus; ``window``: None for every pair;
    ``turned``: whether disagreements are turned back by their targets' rotations."""

    positions: int
    window: int | None
    rank: int
    context: int | None = None
    heads: int = 1
    batch: int = 1
    width: int = 4
    hidden: int = 5
    masked: bool = False
    dtype: torch.dtype = torch.float32
    precision: str = "ieee"
    turned: bool = False

    def drawn(self, seed: int = 0) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Return the tensors by name, and the masks, followed by the rotation if disagreements are turned."""
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        other = self.positions if self.context is None else self.context
        scalars = 2 if self.rank else 1
        given = {
            "u": draw(self.heads, self.width, self.batch, self.positions),
            "v": draw(self.heads, self.width, self.batch, other),
            "source": draw(self.heads, self.hidden, self.batch, self.positions),
            "target": draw(self.heads, self.hidden, self.batch, other),
            "scalar_weight": draw(self.heads, scalars, self.hidden),
            "scalar_bias": draw(self.heads, scalars),
            "lambda_weight": draw(self.heads, self.rank * self.width, self.hidden),
            "lambda_bias": draw(self.heads, self.rank * self.width),
        }
        if self.context is None:
            del given["v"]
        if not self.rank:
            del given["lambda_weight"], given["lambda_bias"]
        given = {name: each.to(self.dtype) for name, each in given.items()}
        sides = [self.positions] if self.context is None else [self.positions, other]
        masks = [torch.rand((self.batch, side), generator=generator) > 0.25 for side in sides]
        constants: list[Tensor | None] = [*masks] if self.masked else [None] * len(sides)
        if self.turned:
            angle = self.angles(other)
            cos, sin = angle.cos(), angle.sin()
            constants.append(torch.stack([torch.cat([cos, cos]), torch.cat([-sin, sin])]))
        return given, constants

    def angles(self, positions: int) -> Tensor:
        """Return any angles that differ from pair to pair and from position to position, (K/2, J)."""
        return torch.arange(positions).double() * torch.logspace(0, -1, self.width // 2).double()[:, None] + 0.3

    def kernels(self, given: dict[str, Tensor], masks: list[Tensor | None]) -> Tensor:
        tensors = [given.get(name) for name in NAMES if name != "v" or self.context is not None]
        operation = self_consensus if self.context is None else cross_consensus
        return operation(*tensors, *masks, window=self.window, precision=self.precision)

    def dense(self, given: dict[str, Tensor], masks: list[Tensor | None]) -> Tensor:
        """Return g from R of every pair, (H, B, N, J, K, K)."""
        u, v = given["u"].permute(0, 2, 3, 1), given.get("v", given["u"]).permute(0, 2, 3, 1)
        first, second = given["source"].permute(0, 2, 3, 1), given["target"].permute(0, 2, 3, 1)
        distance = torch.arange(u.shape[2])[:, None] - torch.arange(v.shape[2])
        seen = torch.ones_like(distance, dtype=torch.bool) if self.window is None else distance.abs() <= self.window
        if self.context is None:
            seen = seen & (distance != 0)
        if masks[0] is not None:
            seen = seen & masks[0][:, :, None] & masks[0 if self.context is None else 1][:, None]
        r = self._matrices(first[:, :, :, None] + second[:, :, None], given) * seen[..., None, None]
        back = torch.eye(self.width, dtype=u.dtype).expand(v.shape[2], -1, -1)
        if self.turned:
            cos, sin = (torch.diag_embed(part(self.angles(v.shape[2])).t()) for part in (torch.cos, torch.sin))
            back = torch.cat([torch.cat([cos, sin], 2), torch.cat([-sin, cos], 2)], 1).to(u.dtype)  # ρ(j)ᵀ
        drawn = torch.einsum("hbnjkl,jlm,hbnjm->hbnk", r, back, u[:, :, :, None] - v[:, :, None])
        if self.context is None:
            drawn = drawn + torch.einsum("hbjnkl,nlm,hbnjm->hbnk", r, back, u[:, :, :, None] - u[:, :, None])
        return drawn.permute(0, 3, 1, 2)

    def _matrices(self, z: Tensor, given: dict[str, Tensor]) -> Tensor:
        hidden = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
        scalars = torch.einsum("hbnjx,hsx->shbnj", hidden, given["scalar_weight"])
        alpha, *beta = torch.log1p(torch.exp(scalars + given["scalar_bias"].t()[:, :, None, None, None]))
        r = alpha[..., None, None] * torch.eye(self.width, dtype=z.dtype)
        if not self.rank:
            return r
        of_lambda = torch.einsum("hbnjx,hyx->hbnjy", hidden, given["lambda_weight"])
        of_lambda = (of_lambda + given["lambda_bias"][:, None, None, None]).unflatten(-1, (self.rank, self.width))
        norm = of_lambda.norm(dim=-1, keepdim=True)
        rows = of_lambda / torch.where(norm > 0, norm, 1)
        return r + (beta[0] / self.rank)[..., None, None] * rows.mT @ rows


def random_case(seed: int) -> Case:
    """Draw sizes: windows beyond the sequence and the context, tiles that the sequence does not fill, ranks and features that no block
    fills, contexts of other lengths."""
    draw = random.Random(seed)
    positions = draw.choice([1, 2, draw.randint(3, 12), draw.randint(15, 24)])
    context = draw.choice([None, None, positions, draw.randint(0, 5)])
    window = draw.choice([draw.randint(1, 6), None]) if context is not None else draw.randint(1, 6)
    sizes = {
        "rank": draw.choice([0, 1, 2, 3, 5]),
        "width": draw.choice([2, 4, 7, 18]),
        "hidden": draw.choice([1, 5, 17, 40]),
    }
    return Case(
        positions, window, context=context, heads=draw.randint(1, 2), batch=draw.randint(1, 2), masked=draw.random() < 0.5,
        dtype=draw.choice([torch.float32, torch.float32, torch.float64]), **sizes,
        turned=sizes["width"] % 2 == 0 and draw.random() < 0.5,
    )  # fmt: skip


def assert_equals_dense(case: Case, bound: float, seed: int = 0) -> None:
    """Hold g and the gradients by every tensor to the dense sums in float64; every buffer lies between guards."""
    given, masks = case.drawn(seed)
    exact = {name: each.double().requires_grad_() for name, each in given.items()}
    truth = case.dense(exact, masks)
    upstream = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    upstream = upstream.to(case.dtype)
    expected = torch.autograd.grad(truth, list(exact.values()), upstream.double())
    leaves = {name: guarded(each).requires_grad_() for name, each in given.items()}
    with guards():
        found = case.kernels(leaves, masks)
        gradients = torch.autograd.grad(found, list(leaves.values()), guarded(upstream))
    assert found.dtype == case.dtype
    errors = {"g": relative_error(found, truth, rounding_floor(bound, case.dtype, *given.values()))}
    norms = {name: float(each.norm()) for name, each in zip(leaves, expected, strict=True)}
    scale = max(norms.values()) or 1.0
    for (name, leaf), gradient, exact_one in zip(leaves.items(), gradients, expected, strict=True):
        assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
        # A gradient that is a sum of what cancels keeps the rounding of its summands. Those of a bias are those of its
        # weight without the factors, which are X hidden features of size 1 or so.
        room = max(norms[name], 1e-2 * scale)
        if name.endswith("_bias"):
            room = max(room, norms[name.replace("bias", "weight")] / case.hidden**0.5)
        errors[name] = float((gradient.double() - exact_one).norm()) / room
    assert_within(max(errors.values()), bound, (case, errors))


__all__ = ["NAMES", "Case", "assert_equals_dense", "random_case", "replace"]
