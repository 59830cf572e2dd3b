"""Optimal superposition of point sets (Kabsch 1976), batched and weighted; a chain's frames, and random rotations."""

from __future__ import annotations

import torch
from torch import Tensor


def kabsch_rotation(x_BMX: Tensor, y_BMX: Tensor, weight_BM: Tensor) -> Tensor:
    """Return the rotations R (B, 3, 3) of the best weighted superposition.

    They minimise Σ_m w_m ‖R x_m − y_m‖² for centred points. R is proper (det +1), float64, without gradient. If the
    optimum is not unique (points on a line), it is one of the optima.

    Args:
        x_BMX: points to rotate, centred.
        y_BMX: target points, centred.
        weight_BM: weights w.
    """
    with torch.no_grad():
        weighted_BMX = weight_BM.double()[..., None] * y_BMX.double()
        moments_BXX = weighted_BMX.transpose(-1, -2) @ x_BMX.double()
        finite_B = moments_BXX.isfinite().all(-1).all(-1)  # LAPACK raises on others; their error is NaN anyway
        # From the SVD of Σ w y xᵀ. A better-fitting reflection is avoided by flipping the smallest singular direction.
        u_BXX, _, vt_BXX = torch.linalg.svd(torch.where(finite_B[:, None, None], moments_BXX, 0.0))
        sign_B = torch.linalg.det(u_BXX @ vt_BXX).sign()
        turn_BX = torch.ones_like(u_BXX[..., 0])
        turn_BX[..., 2] = sign_B
        return u_BXX * turn_BX[..., None, :] @ vt_BXX


def centre(x_BMX: Tensor, weight_BM: Tensor) -> Tensor:
    """Return points minus their weighted mean; points of weight 0 become 0."""
    x_BMX = torch.where((weight_BM > 0)[..., None], x_BMX, 0.0)
    total_B = weight_BM.sum(-1).clamp_min(torch.finfo(x_BMX.dtype).tiny)
    mean_BX = (weight_BM[..., None] * x_BMX).sum(-2) / total_B[..., None]
    return torch.where((weight_BM > 0)[..., None], x_BMX - mean_BX[..., None, :], 0.0)


def aligned_squared_error(x_BMX: Tensor, y_BMX: Tensor, mask_BM: Tensor) -> Tensor:
    """Return the mean squared error (B,) after optimal superposition.

    It is the least mean of ‖x − R y − t‖² over rotations R and shifts t, over valid points, in the unit of x squared; 0
    if no point is valid.

    Differentiable in x: R is fixed at its optimum. If that is unique, the gradient is exact, since the minimised error
    does not change with R to first order (envelope theorem). The singular value decomposition is never differentiated:
    its gradient has poles at equal singular values. Second derivatives would need it, and are wrong here.

    Args:
        x_BMX: points, differentiable.
        y_BMX: target points.
        mask_BM: True if the point is valid.
    """
    weight_BM = mask_BM.to(x_BMX.dtype)
    x_BMX, y_BMX = centre(x_BMX, weight_BM), centre(y_BMX, weight_BM)
    rotation_BXX = kabsch_rotation(y_BMX, x_BMX.detach(), weight_BM).to(x_BMX.dtype)
    error_BM = (x_BMX - y_BMX @ rotation_BXX.transpose(-1, -2)).square().sum(-1)
    return (weight_BM * error_BM).sum(-1) / weight_BM.sum(-1).clamp_min(1.0)


def superpose(x_BMX: Tensor, y_BMX: Tensor, mask_BM: Tensor) -> Tensor:
    """Return x moved onto y as a rigid body, in the dtype of x.

    Args:
        x_BMX: points; all of them move.
        y_BMX: target points.
        mask_BM: True for the points to fit.
    """
    weight_BM = mask_BM.double()
    wide_BMX, goal_BMX = x_BMX.double(), y_BMX.double()
    rotation_BXX = kabsch_rotation(centre(wide_BMX, weight_BM), centre(goal_BMX, weight_BM), weight_BM)
    from_BX, to_BX = (_mean(points, weight_BM) for points in (wide_BMX, goal_BMX))
    moved_BMX = (wide_BMX - from_BX[:, None]) @ rotation_BXX.transpose(-1, -2) + to_BX[:, None]
    return moved_BMX.to(x_BMX.dtype)


def _mean(x_BMX: Tensor, weight_BM: Tensor) -> Tensor:
    x_BMX = torch.where((weight_BM > 0)[..., None], x_BMX, 0.0)
    return (weight_BM[..., None] * x_BMX).sum(-2) / weight_BM.sum(-1, keepdim=True).clamp_min(1e-12)


def in_frame(coords_BNAX: Tensor, mask_BN: Tensor, frame: str) -> Tensor:
    """Return centred coordinates (B, N, A, 3) in a frame; invalid residues hold 0.

    The centre is the mean of the valid residues' atoms. float64 inside, float32 out.

    ``principal`` axes are the eigenvectors of the atoms' second moments, largest first. The first two point to the
    chain's later half (positive covariance of projection and residue index). The third makes them right-handed, so that
    a chain and its mirror image stay different. A rotated and translated chain then has the same coordinates up to
    rounding, unless two moments coincide or a covariance vanishes.

    Args:
        coords_BNAX: atoms (B, N, A, 3) in Å.
        mask_BN: True if the residue is valid.
        frame: ``raw`` (orientation as given) or ``principal``.
    """
    flat_BMX, weight_BM = (
        coords_BNAX.double().flatten(1, 2),
        mask_BN.double().repeat_interleave(coords_BNAX.shape[2], 1),
    )
    flat_BMX = centre(flat_BMX, weight_BM)
    if frame == "principal":
        flat_BMX = flat_BMX @ _principal_axes(flat_BMX, weight_BM)
    return flat_BMX.unflatten(1, coords_BNAX.shape[1:3]).float()


def _principal_axes(x_BMX: Tensor, weight_BM: Tensor) -> Tensor:
    """Return the principal axes (B, 3, 3), one per column, det +1."""
    _, vectors_BXX = torch.linalg.eigh(x_BMX.transpose(-1, -2) @ x_BMX)
    first_BX2 = vectors_BXX[..., [2, 1]]
    index_BM = centre(
        torch.arange(x_BMX.shape[1], dtype=x_BMX.dtype, device=x_BMX.device).expand_as(weight_BM)[..., None], weight_BM
    )[..., 0]
    towards_B2 = torch.einsum("bm,bmx,bxk->bk", index_BM, x_BMX, first_BX2)
    first_BX2 = first_BX2 * torch.where(towards_B2 < 0, -1.0, 1.0)[:, None].to(x_BMX.dtype)
    third_BX = torch.linalg.cross(first_BX2[..., 0], first_BX2[..., 1])
    return torch.cat([first_BX2, third_BX[..., None]], -1)


def random_rotations(num: int, generator: torch.Generator) -> Tensor:
    """Draw uniform random rotations (num, 3, 3), float64, from normalised Gaussian quaternions."""
    w, x, y, z = torch.nn.functional.normalize(
        torch.randn(num, 4, dtype=torch.float64, generator=generator), dim=-1
    ).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def rotate(coords_BNAX: Tensor, rotation_BXX: Tensor) -> Tensor:
    """Return every chain rotated about the origin by its own rotation."""
    return torch.einsum("bxy,bnay->bnax", rotation_BXX.to(coords_BNAX.dtype), coords_BNAX)
