"""Measure a Hugging Face causal LM's α_max on the user's own text, before fine-tuning, and summarise it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.build import resolve_device
from stability.config.curvature import CurvatureSpec
from stability.config.entries import HessianSpec
from stability.curvature import NOT_DEFINED
from stability.models.passes import generator_for
from stability.objectives import Examples
from stability.probes.curvature.descent import Descent
from stability.probes.pretrained.loading import load_model, tokenise
from stability.registry import Registry

BATCH, POSITIONS, CLIP_NORM = 8, 128, 1.0  # defaults; 1.0 as in the paper and the Trainer
COLUMNS = ("state", "step", "lr", "slope", "curvature", "alpha_max", "method", "rel_error", "loss_before", "loss_after")


class HuggingFaceProbe:
    """A model in float32 and eval mode (no dropout), its text and measured rows.

    The model's folder is only read. AdamW with torch's defaults (β 0.9 and 0.999, weight decay 1e-2) runs the
    protocol's steps at a constant rate.

    Raises:
        ValueError: the model is unavailable, or the text is unsuitable.
        RuntimeError: transformers is not installed.
    """

    def __init__(self, spec: HessianSpec):
        assert spec.hf is not None and spec.data is not None
        self.curvature: CurvatureSpec = spec.curvature
        self.device = resolve_device(spec.device)
        corpus = Registry("data").load(spec.data.name).prepare(spec.data.settings)
        self.model = load_model(spec.hf).to(self.device)
        vocabulary = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self.positions = _positions(self.model, spec.positions)
        batches = self.curvature.warmup_batches + self.curvature.warmup_steps + self.curvature.recorded_steps
        self.batch = self.curvature.batch or BATCH
        wanted = batches * self.batch * (self.positions + 1)
        self.tokens, how = tokenise(corpus, spec.data, spec.hf, vocabulary, wanted)
        if len(self.tokens) <= self.positions:
            raise ValueError(
                f"data: {len(self.tokens):,} tokens of text are fewer than one window of positions={self.positions} "
                "and its target"
            )
        self.objective = Registry("objectives").load("ar")(Registry("objectives").load("ar").Config(), vocabulary)
        self.params: dict[str, Tensor] = dict(self.model.named_parameters())
        self.start = {name: param.detach().clone() for name, param in self.params.items()}
        self.rows: list[dict[str, Any]] = []
        count = sum(param.numel() for param in self.params.values())
        sizes = f"{count:,} parameters, float32, {self.batch} sequences of {self.positions} tokens a step"
        self.description = (
            f"{spec.hf}: {type(self.model).__name__}, {sizes}\n{corpus.description}; {len(self.tokens):,} tokens {how}"
        )

    def measure(self, lr: float) -> Iterator[None]:
        """Measure one rate from both warm-ups; yield after every step.

        States: "paper" (the means of 5.2.1) and "plain" (AdamW's own averages and bias correction over the same warm-up
        batches). An entry "checkpoint" in the spec means plain: there is no other state.
        """
        for state in dict.fromkeys("plain" if name == "checkpoint" else name for name in self.curvature.state):
            with torch.no_grad():
                for name, param in self.params.items():
                    param.copy_(self.start[name])
            adamw = Registry("optimizers").load("adamw")
            optimizer = adamw.build(adamw.Config(), self.params.values(), lr)
            descent = Descent(
                self.params, optimizer, self._loss_sum, self._examples, self.curvature, lr=lr, clip_norm=CLIP_NORM
            )
            for row in descent.rows(state):
                if row is not None:
                    self.rows.append({"state": state, **row})
                yield

    def table(self) -> pd.DataFrame:
        """Return a row per recorded step: `COLUMNS`, losses in nats; NaN after a divergence."""
        found = pd.DataFrame(self.rows)
        return found.reindex(columns=list(dict.fromkeys([*COLUMNS, *found.columns])))

    def _examples(self, index: int) -> Examples:
        """Return batch ``index``: random windows of tokenised text, inputs and next tokens (B, N)."""
        generator = generator_for(self.curvature.seed, "curvature", index)
        starts = torch.randint(len(self.tokens) - self.positions, (self.batch,), generator=generator)
        windows = self.tokens[starts[:, None].numpy() + np.arange(self.positions + 1)]
        return self.objective.examples(torch.from_numpy(windows.astype(np.int64)), generator).to(self.device)

    def _loss_sum(self, params: Mapping[str, Tensor], examples: Examples) -> tuple[Tensor, Tensor]:
        logits = functional_call(
            self.model, dict(params), (), {"input_ids": examples.inputs_BN, "use_cache": False}
        ).logits
        return self.objective.loss_sum(logits, examples)


def _positions(model: nn.Module, asked: int | None) -> int:
    most = getattr(model.config, "max_position_embeddings", None) or asked or POSITIONS
    if asked is not None and asked > most:
        raise ValueError(f"positions={asked}: the model has {most} positions; give at most positions={most}")
    return asked or min(POSITIONS, most)


def answer(rows: pd.DataFrame) -> str:
    """Return a table with a line per rate and state, and its verdicts.

    Verdicts: whether nine steps in ten stay below α_max at each requested rate, any divergence, and the ratio between
    the two states.
    """
    undefined: Any = rows[rows["method"] == NOT_DEFINED]
    defined: Any = rows[rows["method"] != NOT_DEFINED]
    lines = [
        f"{'lr':>9}  {'state':6} {'median α_max':>12} {'10 % quantile':>14} {'stable':>7} {'loss fell':>10}  method, "
        "against differences"
    ]
    states, verdicts = list(dict.fromkeys(defined["state"])), []
    for lr in sorted(set(defined["lr"])):
        for state in states:
            part: Any = defined[(defined["lr"] == lr) & (defined["state"] == state)]
            lines.append(_line(part, lr, state))
            if state == "plain" or "plain" not in states:
                verdicts.append(_verdict(part, lr))
            elif part["alpha_max"].isna().any():
                verdicts.append(_divergence(part, f"lr={lr:g}, state {state}"))
    verdicts += (
        [f"{len(undefined)} steps have no α_max and are left out: {undefined['note'].iloc[0]}"]
        if len(undefined)
        else []
    )
    return "\n".join([*lines, "", *verdicts, *_ratios(defined)])


def _line(part: Any, lr: float, state: str) -> str:
    median, low = quantile(part["alpha_max"], 0.5), quantile(part["alpha_max"], 0.1)
    stable, fell = 100 * (part["alpha_max"] > lr).mean(), 100 * (part["loss_after"] < part["loss_before"]).mean()
    error = part["rel_error"].dropna()
    check = f"{error.iloc[0]:.1e}" if len(error) else "--"
    return (
        f"{lr:9.3g}  {state:6} {median:12.3g} {low:14.3g} {stable:6.0f}% {fell:9.0f}%  "
        f"{', '.join(dict.fromkeys(part['method']))}, {check}"
    )


def _ratios(rows: pd.DataFrame) -> list[str]:
    """Return a sentence per rate: median α_max in state paper over state plain.

    Medians are over finite positive values; no sentence if a state has none.
    """
    known: Any = rows[np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    sentences = []
    for lr in sorted(set(rows["lr"])):
        paper, plain = (
            known["alpha_max"][(known["lr"] == lr) & (known["state"] == state)] for state in ("paper", "plain")
        )
        if len(paper) and len(plain):
            ratio = f"{paper.median() / plain.median():.2g} times that of state plain"
            sentences.append(
                f"lr={lr:g}: state paper (the consensus paper's warm-up) has a median α_max {ratio} (finite positive "
                f"steps, n={len(paper)} and {len(plain)})"
            )
    return sentences


def _divergence(part: Any, where: str) -> str:
    lost = int(part["alpha_max"].isna().sum())
    origin = part["note"].dropna().iloc[:1].tolist() if "note" in part else []
    return (
        f"{where}: it diverged. {lost} of {len(part)} recorded steps were lost to a loss or a gradient that is not "
        "finite" + "".join(f": {o}" for o in origin)
    )


def _verdict(part: Any, lr: float) -> str:
    """Describe one rate: nine in ten steps, half, or fewer stay below α_max, or divergence."""
    if part["alpha_max"].isna().any():
        return _divergence(part, f"lr={lr:g}")
    median, low = quantile(part["alpha_max"], 0.5), quantile(part["alpha_max"], 0.1)
    word = (
        "its curvature allows it"
        if low > lr
        else "at the edge: more than one step in ten is beyond"
        if median > lr
        else "too high"
    )
    if math.isinf(low):
        return f"lr={lr:g}: {word}. Along nine steps in ten the curvature is not positive and limits no rate"
    half = "any rate" if math.isinf(median) else f"{median:.3g}"
    return (
        f"lr={lr:g}: {word}. Half of the steps allow {half}, nine in ten {low:.3g} ({low / lr:.2g} times the "
        "rate asked about)"
    )


def quantile(values: Any, share: float) -> float:
    """Return the column's value at or just below the quantile; ∞ sorts last.

    A step lost to a non-finite loss counts as 0.
    """
    ordered = np.sort(values.fillna(0.0).to_numpy(dtype=float))
    return float(ordered[math.floor(share * (len(ordered) - 1))])
