"""Image inputs: one patch per position, and one vector of all positions for the head.

The sizes are those of the model's corpus.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

POSITION_STD = 0.02  # Dosovitskiy et al. 2021
# Pixels added (0, an image's mean colour) or cut (below 0): left, right, top, bottom.
SHIFTS = ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))


class ImageFormat(NamedTuple):
    """Sizes and colour statistics shared by all images of a corpus.

    Stored as plain JSON (`_asdict`) beside a checkpoint.

    Attributes:
        height: in pixels.
        width: in pixels.
        channels: number of channels.
        classes: number of classes.
        mean: mean of each channel over the training images (pixels from 0 to 255).
        std: standard deviation of each channel, likewise.
    """

    height: int
    width: int
    channels: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, values: Any) -> ImageFormat:
        """Return the format from the result of `_asdict`, also after a JSON round trip."""
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})

    def patch_side(self, positions: int) -> int:
        """Return the side in pixels of square patches, ``positions`` of which cover the image.

        Raises:
            ValueError: no such patch; one line lists the possible numbers of positions.
        """
        sides = {
            self.height * self.width // side**2: side
            for side in range(1, math.gcd(self.height, self.width) + 1)
            if self.height % side == 0 and self.width % side == 0
        }
        if positions not in sides:
            choices = ", ".join(
                f"{number} ({side}×{side} pixels)" for number, side in sorted(sides.items()) if number > 1
            )
            raise ValueError(
                f"model.positions={positions}: a position is a square patch, and images of "
                f"{self.height}×{self.width} have as many as {choices}"
            )
        return sides[positions]


class PatchEmbedding(nn.Module):
    """Images (B, H, W, C) → (B, N, D): square patches through one linear layer.

    Each of the N patches gets a learned vector of its position (Dosovitskiy et al. 2021, Eq. 1), drawn from N(0, std²).
    Patches are in row order, and so are a patch's pixels, with the channels innermost. The mixers' own RoPE counts
    positions along this one line; only the learned vectors encode above and below.

    Args:
        image: sizes of the images.
        width: D.
        positions: N.
        shifted: add four copies of the image as channels, moved by one pixel to the right, left, down and up, and norm
            each patch before the layer. This is the shifted patch tokenisation of Lee et al. 2021, arXiv:2112.13492,
            3.1, with the shift of github.com/aanna0701/SPT_LSA_ViT and its copies: one pixel, not half a patch.
        class_token: put a learned vector, drawn like the positions, before the patches: (B, N + 1, D).
        std: standard deviation of the learned vectors.
    """

    own_roles: ClassVar = {"positions_ND": "position", "norm": "norm"}

    def __init__(
        self,
        image: ImageFormat,
        width: int,
        positions: int,
        *,
        shifted: bool = False,
        class_token: bool = False,
        std: float = POSITION_STD,
    ):
        super().__init__()
        self.side, self.shifted = image.patch_side(positions), shifted
        numbers = self.side**2 * image.channels * (1 + len(SHIFTS) if shifted else 1)
        self.norm = nn.LayerNorm(numbers) if shifted else nn.Identity()
        self.patches = nn.Linear(numbers, width)
        self.positions_ND = nn.Parameter(std * torch.randn(positions + class_token, width))
        self.class_D = nn.Parameter(std * torch.randn(width)) if class_token else None

    def forward(self, images_BHWC: Tensor) -> Tensor:
        images_BHWC = images_BHWC.to(self.patches.weight.dtype)
        if self.shifted:
            moved = [nn.functional.pad(images_BHWC, (0, 0, *shift)) for shift in SHIFTS]
            images_BHWC = torch.cat([images_BHWC, *moved], -1)
        # B, rows, side, columns, side, C
        rows = images_BHWC.unflatten(1, (-1, self.side)).unflatten(3, (-1, self.side))
        x_BND = self.patches(self.norm(rows.transpose(2, 3).flatten(3).flatten(1, 2)))
        if self.class_D is not None:
            x_BND = torch.cat([self.class_D.expand(len(x_BND), 1, -1), x_BND], 1)
        return x_BND + self.positions_ND
