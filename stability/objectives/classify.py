"""Image classification."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.config.identity import Since
from stability.models.backbone import Pool
from stability.models.embedding import first_position, mean_over_positions
from stability.models.images import POSITION_STD, ImageFormat, PatchEmbedding
from stability.objectives import (
    AbstractObjective,
    Examples,
    ObjectiveSettings,
    refuse_unread,
    weighted_cross_entropy,
)
from stability.objectives._examples import ZLoss
from stability.objectives._rand_augment import HIGHEST, rand_augment
from stability.runs.words import ShareWords, Words

MAGNITUDE = 14.0  # that of github.com/kentaroy47/vision-transformers-cifar10


class Classification(AbstractObjective):
    """Mean cross entropy of an image's class, and the accuracy.

    The image is cut into ``model.positions`` square patches (`PatchEmbedding`). The head reads the mean of all
    positions after the final norm, or a class token. The class token is at one end of the sequence: a mechanism limited
    to neighbours (sc, sw) connects it to two patches. Pixels are normalised by the training images' mean and standard
    deviation per channel. In training only, each image is padded by ``crop`` black pixels, cropped to its size at
    random, and mirrored with probability one half; ``rand_augment=N`` first applies N operations of RandAugment.
    """

    class Config(ObjectiveSettings):
        crop: int = Field(
            default=4,
            ge=0,
            description=(
                "black pixels around each training image, of which a window of its size is cut at random; 0: none"
            ),
        )
        flip: bool = Field(
            default=True, description="whether training images are mirrored left to right with probability one half"
        )
        pool: Annotated[Literal["mean", "cls"], Since("mean")] = Field(
            default="mean", description="what the head reads: the mean of all positions, or a class token before them"
        )
        patches: Annotated[Literal["plain", "shifted"], Since("plain")] = Field(
            default="plain",
            description="what a patch is embedded from: its pixels, or also those of four copies moved by one, normed",
        )
        position_std: Annotated[float, Since(POSITION_STD)] = Field(
            default=POSITION_STD,
            gt=0,
            description="standard deviation that the positions' vectors, and a class token's, start with",
        )
        rand_augment: Annotated[int, Since(0)] = Field(
            default=0, ge=0, le=16, description="operations of RandAugment on each training image; 0: none"
        )
        magnitude: Annotated[float, Since(MAGNITUDE)] = Field(
            default=MAGNITUDE, ge=0, le=HIGHEST, description="how much each of them does, of 30 (rand_augment above 0)"
        )

        z_loss: ZLoss = 0.0

        @model_validator(mode="after")
        def _magnitude_is_read(self) -> Classification.Config:
            refuse_unread(
                self,
                ("magnitude",),
                self.rand_augment > 0,
                "objective.rand_augment above 0 (objective.rand_augment=0 given)",
            )
            return self

    corpus_kind = "images"
    words = Words(
        position=("patch", "patches"),
        counted="patches",
        example="image",
        nll="cross entropy",
        unit="cross entropy, nats per image",
        held_out="images",
        share=ShareWords("val_accuracy", "accuracy", "of the held-out images whose class is told right"),
        baseline="class frequencies",
        baseline_nll="class-frequency NLL",
        baseline_source="training images' class frequencies",
    )
    score_names = ("val_accuracy",)
    direction = "bidirectional"
    without_mirror = "its positions are patches of an image, not of a text"
    embeds_positions = True
    embeds_tokens = False

    def __init__(self, config: Config, image: Any):
        self.config, self.image = config, ImageFormat.of(image)
        self.num_outputs = self.image.classes

    @classmethod
    def any_format(cls, positions: int) -> dict[str, Any]:
        """Return the format of one-row images, one pixel per patch."""
        return ImageFormat(1, positions, 1, 2, (0.0,), (1.0,))._asdict()

    def embedding(self, width: int, positions: int) -> nn.Module:
        return PatchEmbedding(
            self.image,
            width,
            positions,
            shifted=self.config.patches == "shifted",
            class_token=self.config.pool == "cls",
            std=self.config.position_std,
        )

    def require(self) -> None:
        """Raise a one-line ``ValueError`` if images of this format cannot be augmented so."""
        side = min(self.image.height, self.image.width)
        if self.config.crop >= side:
            size = f"{self.image.height}×{self.image.width} pixels"
            raise ValueError(
                f"objective.crop={self.config.crop} must be below {side}, the shorter side of images of {size}, or "
                "nothing of some is left; 0: none"
            )
        if self.config.rand_augment and self.image.channels != 3:
            raise ValueError(
                f"objective.rand_augment={self.config.rand_augment} works on colours, and these images have "
                f"{self.image.channels} channel{'s' if self.image.channels > 1 else ''}; 0: none"
            )

    @property
    def pool(self) -> Pool:
        return first_position if self.config.pool == "cls" else mean_over_positions

    def augmented(self, batch: Any, generator: torch.Generator) -> Any:
        """Return the batch with its images augmented, cropped and mirrored.

        Order of the draws: RandAugment's operations, then rows and columns of the windows, then the mirrored images.
        """
        images_BHWC = batch.images_BHWC
        if self.config.rand_augment:
            images_BHWC = rand_augment(images_BHWC, self.config.rand_augment, self.config.magnitude, generator)
        if self.config.crop:
            images_BHWC = crop(images_BHWC, self.config.crop, generator)
        if self.config.flip:
            turned_B = torch.rand(len(images_BHWC), generator=generator) < 0.5
            images_BHWC = torch.where(turned_B[:, None, None, None], images_BHWC.flip(2), images_BHWC)
        return replace(batch, images_BHWC=images_BHWC)

    def examples(self, batch: Any, generator: torch.Generator) -> Examples:
        """Return the normalised images (B, H, W, C), float32; targets, weights (B, 1)."""
        mean_C, std_C = torch.tensor(self.image.mean), torch.tensor(self.image.std)
        targets_B1 = batch.labels_B[:, None]
        return Examples((batch.images_BHWC.float() - mean_C) / std_C, targets_B1, torch.ones(targets_B1.shape))

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logits_B1V = examples.logits(model)
        return *self.loss_sum(logits_B1V, examples), {
            "val_accuracy": (logits_B1V.argmax(-1) == examples.targets_BN).sum()
        }


def crop(images_BHWC: Tensor, border: int, generator: torch.Generator) -> Tensor:
    """Cut a random window of its own size from each padded image.

    All (2·border + 1)² windows are equally likely.

    Args:
        images_BHWC: the images.
        border: black pixels on every side.
        generator: source of randomness.
    """
    batch, height, width, _ = images_BHWC.shape
    padded = nn.functional.pad(images_BHWC, (0, 0, border, border, border, border))
    top_B, left_B = torch.randint(2 * border + 1, (2, batch), generator=generator)
    row_BH = top_B[:, None] + torch.arange(height)
    column_BW = left_B[:, None] + torch.arange(width)
    return padded[torch.arange(batch)[:, None, None], row_BH[:, :, None], column_BW[:, None, :]]


EXPORT = Classification
