"""SOAP (Vyas et al. 2024) for matrices, AdamW for all else."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.optimizers._base import library_class
from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, MatrixSettings


class Soap(AbstractMatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv:2409.11321, Algorithm 3).

    From pytorch_optimizer. The basis is updated every few steps by one power iteration and QR. The first step computes
    the basis and moves no matrix, apart from weight decay.
    """

    lr_reference = 3e-3
    first_step_zero = True

    class Config(MatrixSettings):
        beta1: float = Field(default=0.95, ge=0, lt=1, description="decay of a matrix's mean gradient")
        beta2: float = Field(
            default=0.95,
            ge=0,
            lt=1,
            description="decay of a matrix's mean squared gradient in the eigenbasis, and of both its factors",
        )
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")
        every: int = Field(default=10, ge=1, description="steps between renewals of the eigenbasis")
        max_dimension: int = Field(default=10_000, ge=1, description="longest side that is turned to an eigenbasis")

    @classmethod
    def of_matrices(cls, config: Config, groups: Groups) -> torch.optim.Optimizer:
        return library_class("SOAP")(
            groups,
            betas=(config.beta1, config.beta2),
            weight_decay=0.0,
            precondition_frequency=config.every,
            max_precondition_dim=config.max_dimension,
            eps=config.epsilon,
        )


EXPORT = Soap
