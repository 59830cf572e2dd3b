"""Signals of one training step: the rows of ``gradients.jsonl``, ``activations.jsonl`` and ``edge.jsonl``.

The first are norms per block of parameters. The last are the curvature of the step's own batch at the parameters before
it. Activations, attention, logits and Adam's second moment come from one forward pass without gradients, on a quarter
of the step's first microbatch. Its random draws are seeded by the step, so that nothing of the run changes. Padding,
invisible pairs and positions of weight 0 are in no number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from stability.config.run import RunSpec
from stability.models.backbone import Backbone, block_of
from stability.models.block import Block
from stability.objectives import Examples

DEAD, SATURATED = 1e-3, 1e-2  # derivatives below them: of a smooth activation, of a sigmoid
TINY = 10.0  # in ε: a root of the second moment below it hardly scales its entry's step
MODEL_BLOCK = "model"  # block of the row of the whole model
SHARE_OF_SEQUENCES = 0.25  # of a microbatch's sequences: all of them would cost a step
# optimizers whose ``exp_avg_sq`` is a mean of g², divided by 1 − β₂ᵗ
MOMENTS = ("adamw", "radam", "cautious_adamw", "lamb", "stable_adamw")
# a mixer's map whose output goes through a sigmoid, by the mixer's file; mamba's Δ = softplus(x) decays a state of
# A = −1 by e^(−Δ) = σ(−x)
GATES = {"gla": "forget", "fox": "forget", "hgrn2": "forget", "gated_softmax": "gate", "mamba": "dt_proj"}


class BlockStatistics:
    """Norms of gradient and step per block of parameters (`block_of`).

    Args:
        model: its parameters form the blocks.
        norms: joint norms of groups of tensors (`Devices.norms`).

    Attributes:
        indices: indices of each block's parameters, by block.
    """

    def __init__(self, model: nn.Module, norms: Callable[[Sequence[Tensor], Sequence[Sequence[int]]], Tensor]):
        self._norms = norms
        self.indices: dict[str, list[int]] = {}
        for index, (name, _) in enumerate(model.named_parameters()):
            self.indices.setdefault(block_of(name), []).append(index)

    def norms(self, tensors: list[Tensor]) -> dict[str, float]:
        """Return the Euclidean norm of each block.

        Args:
            tensors: one per parameter, in the model's order.
        """
        return self._join(tensors, self.indices)

    def norms_of_parts(self, parts: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
        """Return the joint Euclidean norm of each block's tensors, given by block."""
        ends = itertools.accumulate(map(len, parts.values()), initial=0)
        groups = {block: range(start, start + len(parts[block])) for block, start in zip(parts, ends, strict=False)}
        return self._join([part for own in parts.values() for part in own], groups)

    def _join(self, tensors: Sequence[Tensor], groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        return dict(zip(groups, self._norms(tensors, list(groups.values())).tolist(), strict=True))

    def gradient(self, parameters: list[nn.Parameter]) -> dict[str, float]:
        """Return the norms of the current gradients, before clipping.

        A missing gradient counts as 0.
        """
        return self.norms(
            [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        )

    def rows(
        self, step: int, gradient: dict[str, float], weights: dict[str, float], steps: dict[str, float]
    ) -> list[dict[str, Any]]:
        """Return one log row per block; None for a non-finite number or a quotient by 0.

        ``grad_norm`` is the norm before clipping, ``grad_share`` its share of the whole gradient's squared norm (sum
        1), ``update_ratio`` the norm of the step over that of the parameters.

        Args:
            step: number of the step.
            gradient: `norms` of the gradient.
            weights: `norms` of the parameters before the step.
            steps: `norms` of the step.
        """
        total = math.fsum(norm**2 for norm in gradient.values())
        return [
            {
                "step": step,
                "block": block,
                "grad_norm": finite_or_none(norm),
                "grad_share": finite_or_none(_quotient(norm**2, total)),
                "update_ratio": finite_or_none(_quotient(steps[block], weights[block])),
            }
            for block, norm in gradient.items()
        ]


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    return value if math.isfinite(value) else None


class Activated(NamedTuple):
    """An activation and its inputs at the valid positions, (P, H)."""

    activation: Callable[[Tensor], Tensor]
    inputs_PH: Tensor


Found = dict[str, dict[str, float]]  # statistics by block and name


class ActivationStatistics:
    """Statistics per layer, per step and per block of parameters.

    Layers evaluated more than once (`model.loops`, some residual schemes) count with their last evaluation.

    Args:
        spec: the run.
        model: its uncompiled model, since hooks are not for compiled calls.
        blocks: norms per block of parameters.
    """

    def __init__(self, spec: RunSpec, model: Backbone, blocks: BlockStatistics):
        self._model, self._blocks = model, blocks
        self._chunk = getattr(spec.objective.settings, "loss_chunk", None)
        self._has_moments, self._clip_limit = spec.optimizer.name in MOMENTS, spec.clip_limit

    @torch.no_grad()
    def measure(self, examples: Examples) -> Found:
        """Run the model on sequences, in its present mode; return the statistics of layers and logits."""
        from stability.probes.layers.attention import attention_statistics  # few runs log their activations

        values: dict[str, dict[str, Tensor]] = {f"blocks.{index}": {} for index in range(len(self._model.blocks))}
        activated: dict[str, Activated] = {}
        outputs: dict[str, Tensor] = {}

        def read(hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
            outputs.update(self._describe_logits(hidden_BND, weight_VD, bias_V, examples))
            return hidden_BND

        with ExitStack() as watched:
            for (name, row), block in zip(values.items(), self._model.blocks, strict=True):
                for handle in _watch(cast(Block, block), row, partial(activated.__setitem__, name)):
                    watched.callback(handle.remove)
            attention = attention_statistics(self._model, lambda: examples.logits(self._model, readout=read))
        for name, share in _dead_shares(activated).items():
            values[name]["dead_share"] = share
        found = {
            block: {name: value.item() for name, value in row.items()}
            for block, row in {**values, MODEL_BLOCK: outputs}.items()
        }
        for name, layer in attention.items():
            row = found[".".join(name.split(".")[:2])]
            row["attention_logit_max"] = max(row.get("attention_logit_max", -math.inf), layer.logit_max)
            row["attention_entropy_min"] = min(row.get("attention_entropy_min", math.inf), layer.lowest_head_entropy)
        return found

    def _describe_logits(
        self, hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, examples: Examples
    ) -> dict[str, Tensor]:
        """Return root mean square and largest of the counted positions' logits, and their mean log Z if it has one."""
        hidden_RD = hidden_BND.flatten(0, 1)[examples.counted()[1]]
        squares, largest, log_z = [], [], []
        for hidden_CD in hidden_RD.split(self._chunk or max(len(hidden_RD), 1)):
            logits_CV = self._model.cap(F.linear(hidden_CD, weight_VD, bias_V).float())
            squares.append(logits_CV.square().mean(-1))
            largest.append(logits_CV.amax(-1))
            log_z.append(logits_CV.logsumexp(-1))
        found = {"logit_rms": torch.cat(squares).mean().sqrt()}
        if len(hidden_RD):
            found["logit_max"] = torch.cat(largest).amax()
        # neither the scores of a noised sequence nor several vocabularies side by side have one Z
        has_one_z = examples.sigma_B is None and examples.targets_BN.ndim == 2
        return found | ({"log_z": torch.cat(log_z).mean()} if has_one_z else {})

    @torch.no_grad()
    def describe_moments(self, optimizer: Optimizer, local: Callable[[Sequence[Tensor]], list[Tensor]]) -> Found:
        """Return ``rms_t`` and ``tiny_share`` of each block of parameters; {} for an optimizer not of `MOMENTS`.

        ``rms_t`` is √mean(g²/max(v̂, ε²)) (Wortsman et al. 2023, arXiv:2304.13013), with g as the optimizer received it
        and v̂ after the step. ``tiny_share`` is the share of entries with √v̂ < 10·ε.

        Args:
            optimizer: the optimizer, after its step.
            local: returns this process's parts of tensors.
        """
        if not self._has_moments:
            return {}
        settings = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        parameters = list(self._model.parameters())
        # tensors of one correction and ε as one vector: most are short, and there are dozens
        alike: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
        for block, indices in self._blocks.indices.items():
            for parameter in (parameters[index] for index in indices):
                state = optimizer.state.get(parameter, {})
                if parameter.grad is not None and "exp_avg_sq" in state:
                    beta2, epsilon, steps = _settings_of(settings[parameter], state)
                    alike.setdefault((1 - beta2**steps, epsilon), []).append((block, parameter))
        ratios: dict[str, list[Tensor]] = {}
        tiny: dict[str, list[Tensor]] = {}
        numbers: dict[str, int] = {}
        for (correction, epsilon), named in alike.items():
            own = [parameter for _, parameter in named]
            gradients = local([_gradient_of(parameter) for parameter in own])
            gradient = _join(gradients)
            root = _join(local([optimizer.state[parameter]["exp_avg_sq"] for parameter in own]))
            root.div_(correction).sqrt_()
            below = (root < TINY * epsilon).to(root.dtype)
            gradient.div_(root.clamp_min_(epsilon))
            # consecutive tensors of a block
            sizes: dict[str, int] = {}
            for (block, parameter), part in zip(named, gradients, strict=True):
                sizes[block] = sizes.get(block, 0) + part.numel()
                numbers[block] = numbers.get(block, 0) + parameter.numel()
            lengths = list(sizes.values())
            for block, ratio, small in zip(sizes, gradient.split(lengths), below.split(lengths), strict=True):
                ratios.setdefault(block, []).append(ratio)
                tiny.setdefault(block, []).append(small)
        norms, counts = self._blocks.norms_of_parts(ratios), self._blocks.norms_of_parts(tiny)
        return {
            block: {"rms_t": norms[block] / math.sqrt(number), "tiny_share": counts[block] ** 2 / number}
            for block, number in numbers.items()
        }

    def rows(self, step: int, grad_norm: float, found: Found) -> list[dict[str, Any]]:
        """Return the log's rows, one per block with statistics; None for a number that is not finite.

        ``clipped_share`` is the share of the gradient's norm that clipping removed, 0 for a step without clipping.

        Args:
            step: number of the step.
            grad_norm: norm of the gradient before clipping.
            found: results of `measure` and `describe_moments`.
        """
        is_clipped = grad_norm > self._clip_limit
        found[MODEL_BLOCK]["clipped_share"] = 1.0 - self._clip_limit / grad_norm if is_clipped else 0.0 * grad_norm
        return [
            {"step": step, "block": block} | {name: finite_or_none(value) for name, value in row.items()}
            for block, row in found.items()
            if row
        ]


def _settings_of(group: dict[str, Any], state: dict[str, Any]) -> tuple[float, float, float]:
    """Return β₂, ε and the number of steps: named as in torch's optimizers, or as in this project's."""
    if "betas" in group:
        return group["betas"][1], group["eps"], float(state["step"])
    return group["beta2"], group["epsilon"], group["step"]


def _join(tensors: list[Tensor]) -> Tensor:
    """Return the tensors as one new vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _watch(block: Block, row: dict[str, Tensor], keep: Callable[[Activated], None]) -> Iterator[Any]:
    """Register the hooks that fill a layer's row; yield their handles."""
    masks: list[Tensor | None] = [None]

    def enter(module: nn.Module, args: Any) -> None:
        masks[0] = args[1]
        row["stream_rms"] = _root_mean_square(args[0], args[1])

    def watch_output(module: nn.Module, name: str, describe: Callable[[Tensor, Tensor | None], Tensor]) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            row[name] = describe(getattr(output, "output", output), masks[0])

        return module.register_forward_hook(record)

    yield block.register_forward_pre_hook(enter)
    yield watch_output(block.mixer, "mixer_rms", _root_mean_square)
    yield watch_output(block.ffn, "ffn_rms", _root_mean_square)
    ffn: Any = block.ffn
    if getattr(ffn, "activated", None) is not None:

        def record_activated(module: nn.Module, args: Any, output: Tensor) -> None:
            keep(Activated(ffn.activation, _pick_valid(output, masks[0])))

        yield ffn.get_submodule(ffn.activated).register_forward_hook(record_activated)
    if hasattr(ffn, "describe_routing"):

        def record_routing(module: nn.Module, args: Any, r_BNE: Tensor) -> None:
            row.update(ffn.describe_routing(_pick_valid(r_BNE, masks[0])))

        yield ffn.router.register_forward_hook(record_routing)
    gate = GATES.get(type(block.mixer).__module__.rsplit(".", 1)[-1])
    if gate is not None:
        yield watch_output(block.mixer.get_submodule(gate), "saturated_share", _saturated_share)


def _pick_valid(x: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the valid positions (P, …) of a tensor (B, N, …), in float32."""
    return (x.flatten(0, 1) if mask_BN is None else x[mask_BN]).float()


def _root_mean_square(x: Tensor, mask_BN: Tensor | None) -> Tensor:
    return (x.float() if mask_BN is None else _pick_valid(x, mask_BN)).square().mean().sqrt()


def _saturated_share(x_BNG: Tensor, mask_BN: Tensor | None) -> Tensor:
    gates_PG = _pick_valid(x_BNG, mask_BN).sigmoid()
    return (gates_PG * (1 - gates_PG) < SATURATED).float().mean()


def _dead_shares(activated: Mapping[str, Activated]) -> dict[str, Tensor]:
    """Return each layer's share of units dead at every valid position.

    Dead: a derivative below `DEAD` in magnitude; exactly 0 for an activation that is flat below 0 (relu, its square).
    """
    # the largest inputs alone clear nearly every unit, for a tenth of the time; those of all layers in one derivative
    alike: dict[Callable[[Tensor], Tensor], list[str]] = {}
    for name, (activation, _) in activated.items():
        alike.setdefault(activation, []).append(name)
    found = {}
    for activation, names in alike.items():
        inputs = [activated[name].inputs_PH for name in names]
        flat = _are_flat(activation, torch.cat([x_PH.amax(0) for x_PH in inputs]))
        for name, x_PH, suspects_H in zip(names, inputs, flat.split([x_PH.shape[1] for x_PH in inputs]), strict=True):
            if suspects_H.any():
                dead = _are_flat(activation, x_PH[:, suspects_H]).all(0).sum()
            else:
                dead = x_PH.new_zeros(())
            found[name] = dead / len(suspects_H)
    return found


def _are_flat(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return _derivative(activation, x).abs() <= _largest_dead_slope(activation)


@cache
def _largest_dead_slope(activation: Callable[[Tensor], Tensor]) -> float:
    probe = torch.tensor(-1.0)
    return 0.0 if float(activation(probe)) == float(_derivative(activation, probe)) == 0 else DEAD


def _derivative(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(activation(leaf).sum(), leaf)[0]


PRODUCTS = 5  # with the Hessian, at most, for the largest eigenvalue
GROWTH = 0.03  # of the eigenvalue: a product that raises it by less is the last
TOLERANCE = 0.05  # of the eigenvalue: its error is smaller, about the residual's square over the spectral gap


class Edge:
    """α_max along the step, and Adam's preconditioned sharpness over its threshold.

    The sharpness is the largest Ritz value of the Krylov space of the last measurement's eigenvector, after at most
    `PRODUCTS` products: a power iteration that keeps all its vectors.

    Attributes:
        start: last eigenvector (n,) in the preconditioned coordinates; part of a checkpoint.
    """

    start: Tensor | None = None

    def measure(
        self,
        loss: Callable[..., Any],
        before: Mapping[str, Tensor],
        batches: Sequence[Any],
        optimizer: Optimizer,
        after: Mapping[str, Tensor],
        lr: float,
    ) -> dict[str, float | None]:
        """Return the columns of a step that was taken; None for a number that is not finite.

        Args:
            loss: ``loss(params, batch)`` → (sum, count).
            before: θ before the step, by name.
            batches: the step's microbatches.
            optimizer: the optimizer after the step; P holds the step's own gradient, as in the step.
            after: the optimizer's own tensors, by name.
            lr: α of the step.
        """
        # few runs log their curvature
        from stability.curvature.adam import scale_by_adam
        from stability.curvature.alpha_max import exact_difference, has_paper_state
        from stability.curvature.held import HeldHessian
        from stability.curvature.lanczos import flatten
        from stability.curvature.spectrum import compute_largest

        hessian = HeldHessian(loss, before, batches)
        direction = {
            name: exact_difference(after[name].detach(), start).div_(lr).to(start.dtype)
            for name, start in before.items()
        }
        along = hessian.along(direction)
        row = {"slope": along.slope, "curvature": along.curvature, "alpha_max": along.alpha_max, "alpha": lr}
        if has_paper_state(optimizer):
            scale, threshold = scale_by_adam(optimizer, after, lr)
            start = None if self.start is None else self.start.to(flatten(before))
            found = compute_largest(hessian.operator(scale), hessian.params, TOLERANCE, PRODUCTS, 0, start, GROWTH)
            vector = flatten(found.vector)
            self.start = vector if bool(vector.isfinite().all()) else self.start
            row |= {"adam_sharpness": found.value, "adam_residual": found.residual, "adam_threshold": threshold}
            row |= {"adam_ratio": found.value / threshold, "products": found.products}
        return {name: finite_or_none(value) for name, value in row.items()}
