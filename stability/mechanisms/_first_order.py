"""Flows of consensus's edges for a pass with first derivatives only, bit for bit those of `EdgeWeights.flow`.

Λ, (H, T, R·K, B·P), is the one large tensor of a layer on a CPU. Autograd writes each of its products into new memory.
These functions write them into one tensor a head, which stays in the cache, and leave small operations to all heads at
once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Rows(torch.autograd.Function):
    """Λ with its rows' squared norms and their products with the edges' disagreement.

    The gradient by Λ must come from `Combination` alone, since it is overwritten.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_HTXM: Tensor, weight_HYX: Tensor, bias_HY: Tensor, difference_HKM: Tensor, rank: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Λ, (H, T, R, K, M), ‖Λ_r‖² and Λ_r·difference, (H, T, R, M) each.

        Args:
            ctx: autograd's context.
            hidden_HTXM: activations of the first layer.
            weight_HYX: second layer, Y = R·K.
            bias_HY: its bias.
            difference_HKM: disagreement, one for both directions.
            rank: R.
        """
        heads, directions, _, num = hidden_HTXM.shape
        lambda_HTYM = hidden_HTXM.new_empty(heads, directions, weight_HYX.shape[1], num)
        squares_HTRM, along_HTRM = hidden_HTXM.new_empty(2, heads, directions, rank, num)
        for head in range(heads):
            rows_TYM = lambda_HTYM[head]
            torch.bmm(weight_HYX[head].expand(directions, -1, -1), hidden_HTXM[head], out=rows_TYM)
            rows_TRKM = rows_TYM.add_(bias_HY[head][:, None]).unflatten(1, (rank, -1))
            product = rows_TRKM * rows_TRKM
            torch.sum(product, 2, out=squares_HTRM[head])
            torch.sum(torch.mul(rows_TRKM, difference_HKM[head], out=product), 2, out=along_HTRM[head])
        ctx.save_for_backward(hidden_HTXM, weight_HYX, lambda_HTYM, difference_HKM)
        return lambda_HTYM.unflatten(2, (rank, -1)), squares_HTRM, along_HTRM

    @staticmethod
    def backward(ctx: Any, to_lambda: Tensor, to_squares: Tensor, to_along: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden_HTXM, weight_HYX, lambda_HTYM, difference_HKM = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden_HTXM), torch.empty_like(weight_HYX)
        to_bias, to_difference = weight_HYX.new_empty(weight_HYX.shape[:2]), torch.empty_like(difference_HKM)
        for head, rows_TYM in enumerate(lambda_HTYM):
            rows_TRKM = rows_TYM.unflatten(1, (to_squares.shape[2], -1))
            along_TR1M, squares_TR1M, sum_TRKM = (
                to_along[head][:, :, None],
                to_squares[head][:, :, None],
                to_lambda[head],
            )
            product = along_TR1M * rows_TRKM
            torch.sum(product, (0, 1), out=to_difference[head])
            sum_TRKM += torch.mul(along_TR1M, difference_HKM[head], out=product)
            torch.mul(squares_TR1M, rows_TRKM, out=product)
            sum_TRKM += product  # twice, as autograd adds the two factors of Λ·Λ
            sum_TRKM += product
            sum_TYM = sum_TRKM.flatten(1, 2)
            torch.sum(sum_TYM, (0, 2), out=to_bias[head])
            torch.sum(torch.bmm(sum_TYM, hidden_HTXM[head].mT), 0, out=to_weight[head])
            torch.bmm(weight_HYX[head].mT.expand(len(sum_TYM), -1, -1), sum_TYM, out=to_hidden[head])
        return to_hidden, to_weight, to_bias, to_difference, None


class Combination(torch.autograd.Function):
    """Σ_r factor_r Λ_r per edge, summed over both directions."""

    @staticmethod
    def forward(ctx: Any, factor_HTRM: Tensor, lambda_HTRKM: Tensor) -> Tensor:
        """Return the sum, (H, K, M)."""
        ctx.save_for_backward(factor_HTRM, lambda_HTRKM)
        heads, *_, head_width, num = lambda_HTRKM.shape
        sum_HKM, product = factor_HTRM.new_empty(heads, head_width, num), torch.empty_like(lambda_HTRKM[0])
        for head, rows_TRKM in enumerate(lambda_HTRKM):
            torch.sum(torch.mul(factor_HTRM[head][:, :, None], rows_TRKM, out=product), (0, 1), out=sum_HKM[head])
        return sum_HKM

    @staticmethod
    def backward(ctx: Any, to_sum: Tensor) -> tuple[Tensor, Tensor]:
        _refuse_second_order()
        factor_HTRM, lambda_HTRKM = ctx.saved_tensors
        to_factor, to_lambda = torch.empty_like(factor_HTRM), torch.empty_like(lambda_HTRKM)
        product = torch.empty_like(lambda_HTRKM[0])
        for head, rows_TRKM in enumerate(lambda_HTRKM):
            torch.sum(torch.mul(to_sum[head], rows_TRKM, out=product), 2, out=to_factor[head])
            torch.mul(to_sum[head], factor_HTRM[head][:, :, None], out=to_lambda[head])
        return to_factor, to_lambda


def _refuse_second_order() -> None:
    # `once_differentiable` would not: a second derivative by autograd.grad would leave these functions out.
    if torch.is_grad_enabled():
        raise RuntimeError("a pass within differentiated_once() has no second derivative")
