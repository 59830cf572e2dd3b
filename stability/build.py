"""RunSpec → model, objective, optimizer: the only caller of the registries below the command line."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from stability.config import RunSpec
from stability.mechanisms._base import MixerShape
from stability.models.backbone import Backbone, num_parameters
from stability.models.block import Block, CrossBranch
from stability.models.condition import Modulation
from stability.models.ffn import FeedForward
from stability.models.init import initialise
from stability.models.norm import build_norm
from stability.objectives._base import AbstractObjective
from stability.optimizers._groups import parameter_groups
from stability.registry import Registry


def build_objective(spec: RunSpec, data_format: Any) -> AbstractObjective:
    """``data_format``: the corpus's `format`, for tokens the vocabulary's size."""
    return Registry("objectives").load(spec.objective.name)(spec.objective.settings, data_format)


def build_model(spec: RunSpec, data_format: Any) -> Backbone:
    """The model at its initialisation, on the CPU, in float32. The same spec gives the same weights; the global random state is left alone."""
    objective = build_objective(spec, data_format)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        blocks = [_block(spec, objective, layer) for layer in range(spec.model.layers)]
        final_norm = build_norm(spec.norm, spec.model.width)
        context_norm = None if spec.cross is None else build_norm(spec.norm, spec.model.width)
        embedding = objective.embedding(spec.model.width, spec.model.positions)
        model = Backbone(embedding, objective.num_outputs, spec.model.width, blocks, final_norm, context_norm, objective.condition, objective.pool)
        initialise(model, spec.model.layers * _branches(spec), spec.model.qk_bias)
    return model


def count_parameters(spec: RunSpec, data_format: Any) -> int:
    """Of the model as it would be built; on torch's meta device, so that nothing is allocated whatever its size."""
    with torch.device("meta"):
        return num_parameters(build_model(spec, data_format))


def _branches(spec: RunSpec) -> int:
    """Of a block, each with a residual connection."""
    return 2 if spec.cross is None else 3


def _block(spec: RunSpec, objective: AbstractObjective, layer: int) -> Block:
    size = spec.model
    shape = MixerShape(size.width, size.heads, objective.direction, layer, size.layers)
    mixer = Registry("mechanisms").load(spec.mechanism.name).build(spec.mechanism.settings, shape)
    residual, num = Registry("residuals").load(spec.residual.name), _branches(spec)
    return Block(
        mixer,
        FeedForward(size.width, size.ffn_multiple),
        norms=(build_norm(spec.norm, size.width), build_norm(spec.norm, size.width)),
        residuals=tuple(residual(spec.residual.settings, width=size.width, layer=number) for number in (num * layer, num * layer + num - 1)),
        cross=_cross(spec, shape),
        modulation=None if objective.condition is None else Modulation(objective.condition.width, size.width),
    )


def _cross(spec: RunSpec, shape: MixerShape) -> CrossBranch | None:
    if spec.cross is None:
        return None
    residual = Registry("residuals").load(spec.residual.name)
    return CrossBranch(
        Registry("mechanisms").load(spec.cross.name).build(spec.cross.settings, shape),
        build_norm(spec.norm, shape.width),
        residual(spec.residual.settings, width=shape.width, layer=_branches(spec) * shape.layer + 1),
    )


def build_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    """One parameter group; two where weight decay does not reach every parameter (`stability.optimizers._groups`)."""
    optimizer, settings = Registry("optimizers").load(spec.optimizer.name), spec.optimizer.settings
    return optimizer.build(settings, parameter_groups(model, partial(optimizer.decays, settings)), spec.lr_peak)


def resolve_device(name: str) -> torch.device:
    """``auto``: cuda where there is one. ``RuntimeError`` where cuda was asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device=cuda, but torch sees no CUDA device; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
