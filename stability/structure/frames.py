"""Coordinate frames of a chain (raw or principal axes), and random rotations."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.structure.kabsch import centre


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
