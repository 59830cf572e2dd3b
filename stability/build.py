"""RunSpec → model, objective, optimizer: the only caller of the registries below the command line."""

from __future__ import annotations

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
from stability.registry import Registry


def build_objective(spec: RunSpec, vocab_size: int) -> AbstractObjective:
    return Registry("objectives").load(spec.objective.name)(spec.objective.settings, vocab_size)


def build_model(spec: RunSpec, vocab_size: int) -> Backbone:
    """The model at its initialisation, on the CPU, in float32. The same spec gives the same weights; the global random state is left alone."""
    objective = build_objective(spec, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        blocks = [_block(spec, objective, layer) for layer in range(spec.model.layers)]
        final_norm = build_norm(spec.norm, spec.model.width)
        context_norm = None if spec.cross is None else build_norm(spec.norm, spec.model.width)
        model = Backbone(objective.num_inputs, objective.num_outputs, spec.model.width, blocks, final_norm, context_norm, objective.condition)
        initialise(model, spec.model.layers * (2 if spec.cross is None else 3), spec.model.qk_bias)
    return model


def count_parameters(spec: RunSpec, vocab_size: int) -> int:
    """Of the model as it would be built; on torch's meta device, so that nothing is allocated whatever its size."""
    with torch.device("meta"):
        return num_parameters(build_model(spec, vocab_size))


def _block(spec: RunSpec, objective: AbstractObjective, layer: int) -> Block:
    size = spec.model
    shape = MixerShape(size.width, size.heads, objective.direction, layer, size.layers)
    mixer = Registry("mechanisms").load(spec.mechanism.name).build(spec.mechanism.settings, shape)
    residual = Registry("residuals").load(spec.residual.name)
    return Block(
        mixer,
        FeedForward(size.width, size.ffn_multiple),
        norms=(build_norm(spec.norm, size.width), build_norm(spec.norm, size.width)),
        residuals=tuple(residual(spec.residual.settings, width=size.width, layer=layer) for _ in range(2)),
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
        residual(spec.residual.settings, width=shape.width, layer=shape.layer),
    )


def build_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    return Registry("optimizers").load(spec.optimizer.name).build(spec.optimizer.settings, model.parameters(), spec.lr_peak)


def resolve_device(name: str) -> torch.device:
    """``auto``: cuda where there is one. ``RuntimeError`` where cuda was asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device=cuda, but torch sees no CUDA device; use device=cpu or device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
