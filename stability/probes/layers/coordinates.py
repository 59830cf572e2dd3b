"""Train a few steps on one batch and measure how much each activation, gradient and parameter changes.

The coordinate check of Yang et al. 2022 (arXiv:2203.03466), Appendix D.1: compared over widths or depths, the numbers
show whether a parametrization is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer, shapes
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import Backbone
from stability.models.block import CrossBranch, split_loss
from stability.models.init import without_memory
from stability.models.passes import in_mode
from stability.models.scaling import find_sizes
from stability.objectives import Examples, training_examples
from stability.probes.layers.attention import attention_logits
from stability.training.machine import prepare_torch

BATCH_SEED = 0  # every model trains on the same batch
PARTS = ("mixer_norm", "mixer", "ffn_norm", "ffn")
Rows = list[dict[str, Any]]


@dataclass
class Coordinates:
    """The measured numbers of one run: `steps` fills ``rows``.

    A row has the step, the quantity, the measure and its value. Measures: "size", mean |x| of an activation; "change",
    mean |x − x₀|; "gradient", RMS over the tensors of a class; "update", RMS of θ − θ₀, likewise.
    """

    run: RunSpec
    corpus: AbstractCorpus
    device: torch.device
    rows: Rows = field(default_factory=list)

    def steps(self) -> Iterator[None]:
        """Train without clipping, warm-up and dropout, on one batch; yield after each step."""
        run, objective = self.run, build_objective(self.run, self.corpus.format)
        prepare_torch(run.threads, self.device, run.precision)
        model = build_model(run, self.corpus.format).to(self.device)
        optimizer = build_optimizer(run, model)
        drawn = training_examples(run, self.corpus, objective, "train", 1, seed=BATCH_SEED, batch=run.batch)
        examples, classes = drawn.to(self.device), tensor_classes(run, self.corpus.format)
        begun = [parameter.detach().clone() for parameter in model.parameters()]
        start: dict[str, Tensor] = {}
        count = objective.count(examples, torch.float32)
        with in_mode(model, training=False):
            for step in range(run.steps + 1):
                seen = activations(model, examples)
                start = start or seen
                optimizer.zero_grad(set_to_none=True)
                (objective.training_loss(model, examples).total / count).backward()
                self._add(step, "size", {name: x.abs().mean() for name, x in seen.items()})
                self._add(step, "change", {name: (x - start[name]).abs().mean() for name, x in seen.items()})
                gradients = [parameter.grad for parameter in model.parameters()]
                self._add(step, "gradient", _by_class(classes, gradients))
                moved = [now.detach() - old for now, old in zip(model.parameters(), begun, strict=True)]
                self._add(step, "update", _by_class(classes, moved))
                yield
                if step < run.steps:
                    optimizer.step()

    def _add(self, step: int, measure: str, values: dict[str, Tensor]) -> None:
        self.rows += [
            {"step": step, "quantity": name, "measure": measure, "value": float(value)}
            for name, value in values.items()
        ]


def tensor_classes(run: RunSpec, data_format: Any) -> list[str]:
    """Return the class of each parameter, in the model's order.

    "matrix", "output" (the head, and maps to a fixed axis), "embedding" (other tables), "bias" (of linear maps),
    "vector" (all else with one axis that grows with the width), "finite" (none grows). A comparison with the model of
    twice the width tells.
    """
    twice = {"width": 2 * run.model.width, "heads": 2 * run.model.heads}
    with without_memory():
        wider = build_model(run.model_copy(update={"model": run.model.model_copy(update=twice)}), data_format)
    found = []
    for name, size in find_sizes(wider, shapes(run, data_format)).items():
        is_table = size.kind == "vector" and name.startswith("embedding.") and len(size.shape) > 1
        is_bias = size.kind == "vector" and size.module == "linear" and len(size.shape) == 1
        found.append("embedding" if is_table else "bias" if is_bias else size.kind)
    return found


def _by_class(classes: list[str], tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the mean over each class's tensors of their root mean square."""
    found: dict[str, list[Tensor]] = {}
    for kind, tensor in zip(classes, tensors, strict=True):
        if tensor is not None:
            found.setdefault(kind, []).append(tensor.detach().square().mean().sqrt())
    return {kind: torch.stack(values).mean() for kind, values in found.items()}


@torch.no_grad()
def activations(model: Backbone, examples: Examples) -> dict[str, Tensor]:
    """Return the outputs of a forward pass by name.

    Names: "embedding", "blocks.0.mixer" (and cross, ffn and the norms), "blocks.0.mixer logits" (softmax attention's,
    of visible pairs), "final stream" before the last norm, "final_norm", "logits". Of modules evaluated several times,
    the last evaluation counts.
    """
    modules = {"embedding": model.embedding, "final_norm": model.final_norm}
    for number, block in enumerate(model.blocks):
        modules |= {f"blocks.{number}.{part}": block.get_submodule(part) for part in PARTS}
        crosses = [each for each in block.children() if isinstance(each, CrossBranch)]
        modules |= {f"blocks.{number}.cross": each.mechanism for each in crosses}
    seen: dict[str, Tensor] = {}

    def forward() -> None:
        seen["logits"] = examples.logits(model)

    with _outputs(modules, seen):
        found = attention_logits(model, forward)
    return seen | {f"{name} logits": logits for name, logits in found.items()}


@contextmanager
def _outputs(modules: dict[str, nn.Module], seen: dict[str, Tensor]) -> Iterator[None]:
    """Record the modules' outputs, and the last norm's input, in ``seen`` while open."""

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[name] = split_loss(output, [])
            if name == "final_norm":
                seen["final stream"] = args[0]

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
