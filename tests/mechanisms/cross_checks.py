"""The contract of every cross mechanism: that of a self mechanism with a context held beside it (`WithContext`), and
the checks of this file."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.models.block import Context, CrossBranch
from stability.residuals import build as build_residual
from tests.mechanisms.checks import BATCH, WIDTH, inputs, padding

NUM_CONTEXT = 7  # not the source's number of positions


def context(dtype: torch.dtype = torch.float64, num_context: int = NUM_CONTEXT) -> Tensor:
    return torch.randn(BATCH, num_context, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(4))


def context_padding() -> Tensor:
    """A context padded on the left and in the middle, one padded on the right, and a whole one."""
    mask_BJ = torch.ones(BATCH, NUM_CONTEXT, dtype=torch.bool)
    mask_BJ[0, :2] = mask_BJ[0, 4] = False
    mask_BJ[1, 3:] = False
    return mask_BJ


class WithContext(nn.Module):
    """A cross mechanism as a self mechanism: the same padded contexts in turn at every call."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        row_B = torch.arange(len(x_BND)) % BATCH
        return self.module(
            x_BND, context(x_BND.dtype)[row_B], mask_BN=mask_BN, context_mask_BJ=context_padding()[row_B]
        )


def check_contexts_of_any_length(module: nn.Module) -> None:
    for num_positions, num_context in ((1, 1), (1, 5), (9, 1), (9, 9), (9, 20)):
        x_BND = inputs(num_positions=num_positions)
        y_BND = module.double()(x_BND, context(num_context=num_context))
        assert y_BND.shape == x_BND.shape, f"{tuple(x_BND.shape)} in, {tuple(y_BND.shape)} out"
        assert y_BND.isfinite().all()


def check_context_padding_is_unread(module: nn.Module) -> None:
    """Exactly the same outputs whatever the context's padding holds, NaN too, and no gradient to it; and a context cut
    down to what is valid gives them."""
    x_BND, c_BJD, mask_BJ = inputs(), context().requires_grad_(), context_padding()
    y_BND = module.double()(x_BND, c_BJD, context_mask_BJ=mask_BJ)
    (gradient_BJD,) = torch.autograd.grad(y_BND.square().sum(), c_BJD)
    assert not gradient_BJD[~mask_BJ].count_nonzero(), "outputs have a gradient to the context's padding"
    for content in (0.0, -1e3, float("nan")):
        other_BND = module(x_BND, c_BJD.detach().masked_fill(~mask_BJ[..., None], content), context_mask_BJ=mask_BJ)
        assert torch.equal(other_BND, y_BND), f"context padding that holds {content} changes outputs"
    cut_1ND = module(x_BND[1:2], c_BJD.detach()[1:2, :3])
    assert torch.allclose(cut_1ND, y_BND[1:2], rtol=0, atol=1e-10), "a padded context is not the same as a shorter one"


def check_no_context_adds_nothing(module: nn.Module) -> None:
    """In its branch of a block: a row whose context is wholly padded keeps its state exactly, and every derivative
    stays finite."""
    mask_BN, mask_BJ = padding(), context_padding()
    mask_BJ[1] = False
    x_BND, c_BJD = inputs().requires_grad_(), context().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        branch = CrossBranch(module.double(), nn.Identity(), build_residual("identity", width=WIDTH))
        y_BND = branch(x_BND, Context(c_BJD, mask_BJ), mask_BN)
        assert torch.equal(y_BND[1], x_BND[1]), "a row without a context gets something"
        assert not torch.equal(y_BND[0], x_BND[0]), "a row with a context gets nothing"
        leaves = (x_BND, c_BJD, *module.parameters())
        gradients = torch.autograd.grad(y_BND.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)
    assert all(tensor.isfinite().all() for tensor in (*gradients, *second)), (
        "a wholly padded context makes a derivative non-finite"
    )


def check_context_is_read(module: nn.Module) -> None:
    """Every source position depends on the context, and every context position is read."""
    found_NJ = _sensitivity(module, to_context=True)
    assert found_NJ.sum(1).all(), "an output does not depend on the context"
    assert found_NJ.sum(0).all(), "a context position is read by no output"


def check_sources_do_not_meet(module: nn.Module) -> None:
    found_NN = _sensitivity(module, to_context=False)
    assert not (found_NN - torch.diag(found_NN.diagonal())).count_nonzero(), "a source position reads another one"


def _sensitivity(module: nn.Module, *, to_context: bool) -> Tensor:
    """‖∂y_i/∂c_j‖₁, (N, J), or ‖∂y_i/∂x_j‖₁, (N, N)."""
    x_BND, c_BJD = inputs().requires_grad_(), context().requires_grad_()
    y_BND = module.double()(x_BND, c_BJD)
    weight_BND = torch.randn(y_BND.shape, dtype=y_BND.dtype, generator=torch.Generator().manual_seed(2))
    of = c_BJD if to_context else x_BND
    outputs = [(weight_BND * y_BND)[:, i].sum() for i in range(y_BND.shape[1])]
    rows = [torch.autograd.grad(output, of, retain_graph=True, materialize_grads=True)[0] for output in outputs]
    return torch.stack([row.abs().sum((0, 2)) for row in rows])
