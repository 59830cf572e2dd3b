"""Round a trained model's matrices to few bits, and measure its NLL and each layer's output.

For `stability.probe what=quantization`. Weights alone are rounded, to nearest, without calibration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from stability.build import build_objective
from stability.config.entries import ProbeSpec
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import Backbone
from stability.models.block import WithLoss
from stability.models.passes import computing_in
from stability.models.rounding import find_matrices, is_within_branch, round_matrix
from stability.objectives import Examples
from stability.probes.checkpoints import place_model
from stability.training.evaluate import Validation

Rows = list[dict[str, Any]]
BRANCHES = ("mixer", "ffn")


class Seen(NamedTuple):
    """A branch's inputs and output in the trained model.

    Attributes:
        module: the mixer or feed-forward network.
        args: its arguments.
        kwargs: its keyword arguments.
        output: its output (B, N, D).
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@torch.no_grad()
def measure_bits(
    spec: RunSpec, model: Backbone, corpus: AbstractCorpus, examples: Examples, probe: ProbeSpec
) -> Iterator[tuple[Rows, Rows]]:
    """Yield the rows for each number of bits and each group, for the model and for its layers.

    Columns as in `schema.PROBE_COLUMNS`, ``quantization`` from ``bits`` on and ``quantization_layers`` from ``layer``
    on. ``nll`` and ``quantized_nll`` are those of the run's own validation, in nats; ``difference`` is the second minus
    the first. ``error`` is ‖y − y₀‖ / ‖y₀‖ of a branch's output, given its inputs in the trained model. ``rms`` and
    ``kurtosis`` (3 for normal ones) are of the trained weights of its linear maps.

    Args:
        spec: the run's.
        model: the trained model; its weights are the same afterwards.
        corpus: the run's prepared data.
        examples: held-out examples for the layers.
        probe: bits, groups and device.
    """
    device = place_model(model, spec, probe.device)
    validation = Validation(spec, corpus, build_objective(spec, corpus.format), device)
    with computing_in(spec.precision, device):
        branches = record_branches(model, examples.to(device))
    matrices = find_matrices(model)
    known = {"sequences": validation.num_sequences, "nll": validation.measure(model)["val_nll"]}
    of_branches = sum(each.numel() for name, each in model.named_parameters() if is_within_branch(name))
    known |= {"share": sum(each.weight.numel() for each in matrices.values()) / of_branches}
    moments = {
        place: _moments([each for each in seen.module.modules() if each in matrices.values()])
        for place, seen in branches.items()
    }
    for bits in probe.bits:
        for group in probe.groups:
            with _rounded(matrices, bits, group or None):
                nll = validation.measure(model)["val_nll"]
                with computing_in(spec.precision, device):
                    errors = {place: _measure_error(seen) for place, seen in branches.items()}
            where = {"bits": bits, "group": group}
            of_model = {**where, **known, "quantized_nll": nll, "difference": nll - known["nll"]}
            of_layers = [
                {"layer": layer, "branch": branch, **where, "error": errors[layer, branch], **moments[layer, branch]}
                for layer, branch in branches
                if moments[layer, branch]
            ]
            yield [of_model], of_layers


def record_branches(model: Backbone, examples: Examples) -> dict[tuple[int, str], Seen]:
    """Return the inputs and output of each block's mixer and feed-forward network by block and branch.

    The first evaluation, if a block is passed or a branch evaluated several times.
    """
    seen: dict[tuple[int, str], Seen] = {}
    handles = []
    for layer, block in enumerate(model.blocks):
        for branch in BRANCHES:

            def keep(module: nn.Module, args: Any, kwargs: Any, output: Any, place: Any = (layer, branch)) -> None:
                seen.setdefault(place, Seen(module, args, kwargs, _output_of(output)))

            handles.append(block.get_submodule(branch).register_forward_hook(keep, with_kwargs=True))
    try:
        examples.logits(model)
    finally:
        for handle in handles:
            handle.remove()
    return dict(sorted(seen.items(), key=lambda item: (item[0][0], BRANCHES.index(item[0][1]))))


@contextmanager
def _rounded(matrices: dict[str, nn.Linear], bits: int, group: int | None) -> Iterator[None]:
    """Replace the matrices' weights by rounded ones while open."""
    kept = {name: each.weight.detach().clone() for name, each in matrices.items()}
    try:
        for each in matrices.values():
            each.weight.copy_(round_matrix(each.weight, bits, group).restore())
        yield
    finally:
        for name, each in matrices.items():
            each.weight.copy_(kept[name])


def _measure_error(seen: Seen) -> float:
    """Return ‖y − y₀‖ / ‖y₀‖; 0 of an output that is and stays 0."""
    difference = _output_of(seen.module(*seen.args, **seen.kwargs)) - seen.output
    return float(difference.norm()) / max(float(seen.output.norm()), torch.finfo(torch.float32).tiny)


def _output_of(output: Any) -> Tensor:
    return (output.output if isinstance(output, WithLoss) else output).detach().float()


def _moments(maps: Collection[nn.Module]) -> dict[str, float]:
    """Return RMS and kurtosis of all weights of a branch's linear maps; {} without any."""
    if not maps:
        return {}
    weights = torch.cat([cast(Tensor, each.weight).flatten() for each in maps]).double()
    square = weights.square().mean()
    return {"rms": float(square.sqrt()), "kurtosis": float(weights.pow(4).mean() / square.square())}
