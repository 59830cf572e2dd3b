"""The part of the mechanisms' contract that says what a position may see, as plain functions that raise
AssertionError: at each of `LENGTHS`, with padding anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, NUM_POSITIONS, WIDTH, HEADS = 3, 9, 16, 2
LENGTHS = (1, NUM_POSITIONS, 17, 40)  # one alone, and beyond the windows, blocks and chunks of `small.SMALL`


def inputs(dtype: torch.dtype = torch.float64, num_positions: int = NUM_POSITIONS) -> Tensor:
    return torch.randn(BATCH, num_positions, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def padding(num_positions: int = NUM_POSITIONS) -> Tensor:
    """Valid positions of a sequence padded on the right, one padded on the left and in the middle, and a whole one."""
    mask_BN = torch.ones(BATCH, num_positions, dtype=torch.bool)
    mask_BN[0, 5 * num_positions // 9 :] = False
    mask_BN[1, : 2 * num_positions // 9] = False
    mask_BN[1, 4 * num_positions // 9 : -(-5 * num_positions // 9)] = False
    return mask_BN


def scattered_padding(num_positions: int) -> Tensor:
    """Two of three positions valid, another two in each sequence."""
    position_N = torch.arange(num_positions)
    return (position_N + torch.arange(BATCH)[:, None]) % 3 > 0


def sensitivity(module: nn.Module, num_positions: int = NUM_POSITIONS) -> Tensor:
    """‖∂y_i/∂x_j‖₁ for each pair of positions, (N, N): sequence i of N copies has position i's gradient."""
    x_MND = inputs(num_positions=num_positions).repeat(num_positions, 1, 1).requires_grad_()
    y_NBND = module.double()(x_MND).unflatten(0, (num_positions, BATCH))
    weight_BND = torch.randn(y_NBND.shape[1:], dtype=y_NBND.dtype, generator=torch.Generator().manual_seed(2))
    own_DBN = (weight_BND * y_NBND).diagonal(dim1=0, dim2=2)
    (gradient_MND,) = torch.autograd.grad(own_DBN.sum(), x_MND)
    return gradient_MND.unflatten(0, (num_positions, BATCH)).abs().sum((1, 3))


def check_future_is_unseen(module: nn.Module, lengths: Sequence[int] = LENGTHS) -> None:
    """No output has a gradient to a later position, and none changes where all later positions do: what is selected by
    comparing has no gradient."""
    for num_positions in lengths:
        ahead = sensitivity(module, num_positions).triu(1)
        assert not ahead.count_nonzero(), (
            f"N = {num_positions}: outputs depend on later positions: {ahead.nonzero().tolist()[:3]}"
        )
        x_BND = inputs(num_positions=num_positions)
        later_BND = 3 * x_BND.flip(0, 2)
        # all positions at once, and unchanged beside changed ones in batches of one shape: those of others round otherwise
        others = [torch.cat([x_BND[:, : i + 1], later_BND[:, i + 1 :].flip(1)], 1) for i in range(num_positions)]
        with torch.no_grad():
            same_MND, other_MND = (module.double()(torch.cat(batch)) for batch in ([x_BND] * num_positions, others))
        for i, (same_BND, other_BND) in enumerate(zip(same_MND.split(BATCH), other_MND.split(BATCH), strict=True)):
            assert torch.equal(other_BND[:, : i + 1], same_BND[:, : i + 1]), (
                f"N = {num_positions}: what comes after position {i} changes outputs up to it"
            )


def check_past_is_seen(module: nn.Module, lengths: Sequence[int] = LENGTHS) -> None:
    for num_positions in lengths:
        seen = sensitivity(module, num_positions)
        assert (seen.diagonal(-1) > 0).all(), (
            f"N = {num_positions}: an output does not depend on the position before it"
        )


def check_both_sides_are_seen(module: nn.Module, lengths: Sequence[int] = LENGTHS) -> None:
    for num_positions in lengths:
        seen = sensitivity(module, num_positions)
        for side, name in ((-1, "before"), (1, "after")):
            assert (seen.diagonal(side) > 0).all(), (
                f"N = {num_positions}: an output does not depend on the position {name} it"
            )


def check_padding_is_unread(module: nn.Module, lengths: Sequence[int] = LENGTHS) -> None:
    """Exactly the same valid outputs whatever the padding holds, NaN too, and no gradient to it."""
    for num_positions in lengths:
        mask_BN = torch.cat([padding(num_positions), scattered_padding(num_positions)])
        x_BND = inputs(num_positions=num_positions).repeat(2, 1, 1).requires_grad_()
        y_BND = module.double()(x_BND, mask_BN=mask_BN)
        (gradient_BND,) = torch.autograd.grad(y_BND[mask_BN].square().sum(), x_BND)
        assert not gradient_BND[~mask_BN].count_nonzero(), (
            f"N = {num_positions}: valid outputs have a gradient to padding"
        )
        for content in (0.0, -1e3, float("nan")):
            other_BND = module(x_BND.detach().masked_fill(~mask_BN[..., None], content), mask_BN=mask_BN)
            assert torch.equal(other_BND[mask_BN], y_BND[mask_BN]), (
                f"N = {num_positions}: padding that holds {content} changes valid outputs"
            )


def check_wholly_padded_is_finite(module: nn.Module, lengths: Sequence[int] = LENGTHS) -> None:
    """Value, gradient and second derivative, also where whole sequences are padding."""
    for num_positions in lengths:
        mask_BN = padding(num_positions)
        mask_BN[2] = False
        x_BND = inputs(num_positions=num_positions).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            y_BND = module.double()(x_BND, mask_BN=mask_BN)
            assert y_BND.isfinite().all(), f"N = {num_positions}: a padded position's output is not finite"
            leaves = (x_BND, *module.parameters())
            gradients = torch.autograd.grad(
                y_BND.square().sum(), leaves, create_graph=True, allow_unused=True, materialize_grads=True
            )
            second = torch.autograd.grad(
                sum(gradient.square().sum() for gradient in gradients),
                leaves,
                allow_unused=True,
                materialize_grads=True,
            )
        assert all(tensor.isfinite().all() for tensor in (*gradients, *second)), (
            f"N = {num_positions}: padding makes a derivative non-finite"
        )
