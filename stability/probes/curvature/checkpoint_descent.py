"""Apply the protocol of 5.2.1 to a checkpoint: its model, optimizer and data.

With dropout (`model.dropout`), u is the real training step, from a gradient with dropout. The loss along u has no
dropout, as in validation. Auxiliary losses of model parts (`stability.models.block`) are included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stability.build import build_model, build_objective, build_optimizer
from stability.config.curvature import CurvatureSpec
from stability.config.run import RunSpec
from stability.config.settled import use_reference
from stability.config.training import Precision
from stability.curvature import GradientWithGraph, RecordedLoss
from stability.curvature.alpha_max import has_paper_state
from stability.curvature.recorded import Recordings
from stability.models.backbone import Backbone
from stability.models.passes import computing_in, dropping, drops
from stability.objectives import Examples, training_examples
from stability.optimizers import lr_factor
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.descent import Descent, LossSum, Step
from stability.training.checkpoint import MOVING
from stability.training.machine import prepare_torch

OF_ONE_RUN = {"seed": 0, "lr_peak": 1.0}  # the loss's operations depend on neither, so a kind of run has these values


class Probe:
    """A copy of a checkpoint, and its `Descent`; ``observe`` as in `Descent`."""

    def __init__(
        self,
        loaded: Loaded,
        curvature: CurvatureSpec,
        device: torch.device,
        observe: Callable[[Step], dict[str, Any]] | None = None,
    ):
        self.spec, self.corpus, self.curvature, self.device = loaded.spec, loaded.corpus, curvature, device
        spec, self._trainer = loaded.spec, loaded.trainer
        self._precision: Precision = spec.precision if curvature.precision == "run" else "float32"
        prepare_torch(spec.threads, device, self._precision)
        self.model: Backbone = copy.deepcopy(loaded.model)
        if MOVING in self._trainer:  # step from the trained weights, not from their average
            self.model.load_state_dict(self._trainer[MOVING])
        self.model.to(device)
        self.objective = build_objective(spec, loaded.corpus.format)
        self.optimizer = build_optimizer(spec, self.model)
        params: dict[str, Tensor] = dict(self.model.named_parameters())
        lr = spec.lr_peak * lr_factor(spec.schedule, self._trainer["step"], spec.steps)
        options: dict[str, Any] = {"observe": observe, "loss_in_double": self._loss_in_double}
        if drops(self.model):
            options["stepped_by"] = self._gradient_of_training
        self.descent = Descent(
            params,
            self.optimizer,
            RecordedLoss(self._loss_sum, _recordings_of(_kind_of(spec), self._precision)),
            self._batch,
            curvature,
            lr=lr,
            clip_norm=spec.clip_limit,
            **options,
        )

    def defines(self, state: str) -> bool:
        """Return whether a descent can start from an optimizer state.

        The paper's warm-up sets Adam's m and v; other optimizers have only the run's own state.
        """
        return state != "paper" or has_paper_state(self.optimizer)

    def rows(self, state: str) -> Iterator[dict[str, Any] | None]:
        """Yield `Descent.rows` from the paper's optimizer state or the checkpoint's own."""
        return self.descent.rows(state, self._trainer["optimizer"])

    def _batch(self, index: int) -> Examples:
        size = self.curvature.batch or self.spec.batch
        return training_examples(
            self.spec, self.corpus, self.objective, "curvature", index, seed=self.curvature.seed, batch=size
        ).to(self.device)

    def _gradient_of_training(self, index: int) -> dict[str, Tensor]:
        """Return the mean loss's gradient on batch ``index`` with training's dropout.

        Random draws depend on the protocol's seed, the index, and each microbatch's first row.
        """
        examples = self._batch(index)
        rows = self.curvature.microbatch or len(examples.targets_BN)
        parts = [(rows * number, part) for number, part in enumerate(examples.split(rows))]

        def compute_dropped(params: Mapping[str, Tensor], part: tuple[int, Examples]) -> tuple[Tensor, Tensor]:
            first_row, microbatch = part
            with dropping(self.model, self.device, self.curvature.seed, "curvature", index, first_row):
                return self._loss_sum(params, microbatch)

        return GradientWithGraph(compute_dropped, self.descent.params, parts, method="taylor").gradient()

    def _loss_sum(self, params: Mapping[str, Tensor], examples: Examples) -> tuple[Tensor, Tensor]:
        with computing_in(self._precision, self.device):
            return self.objective.training_loss(self.model, examples, params)[:2]

    def _loss_in_double(self) -> LossSum:
        """Return the loss on a float64 copy of the model and its buffers."""
        # kernels are replaced by torch operations
        spec = self.spec.model_copy(update=use_reference(self.spec))
        objective, model = build_objective(spec, self.corpus.format), copy.deepcopy(self.model)
        if spec != self.spec:
            model = build_model(spec, self.corpus.format).to(self.device)
            model.load_state_dict(self.model.state_dict())
            model.eval()
        model = model.double()
        return lambda params, examples: objective.training_loss(model, examples, params)[:2]


def _kind_of(spec: RunSpec) -> str:
    """Return a run's settings as text, but for `OF_ONE_RUN`."""
    return spec.model_copy(update=OF_ONE_RUN).model_dump_json()


@lru_cache(maxsize=1)  # a worker measures one kind of run after the other
def _recordings_of(kind: str, precision: Precision) -> Recordings:
    """Return the recorded losses of one kind of run (`_kind_of`), which its states, checkpoints and seeds share."""
    return {}
