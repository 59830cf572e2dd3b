"""Terms of a study's tables, captions and board, from its objective and data source; the name of a run's end.

A sweep writes them into ``study.json``. This module imports nothing, so that pure readers of files can use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXPLODED, LEARNED_NOTHING = "exploded", "learned nothing"


def is_exploded(nll: float, untrained_nll: float) -> bool:
    """Return whether a finite NLL lies above that of the untrained model.

    Args:
        nll: final NLL, in nats.
        untrained_nll: NLL at initialisation; NaN if not recorded.
    """
    return math.isfinite(nll) and nll > untrained_nll


def shown_state(state: str, nll: float | None, untrained_nll: float | None) -> str:
    """Return a run's state for readers: a plateaued one learned nothing, or exploded above its untrained model.

    Args:
        state: recorded state.
        nll: final NLL, in nats; None if not recorded.
        untrained_nll: NLL at initialisation; None if not recorded.
    """
    if state != "plateaued":
        return state
    if nll is None or untrained_nll is None:
        return LEARNED_NOTHING
    return EXPLODED if is_exploded(nll, untrained_nll) else LEARNED_NOTHING


def shown_status(status: Mapping[str, Any]) -> str:
    """Return the state of a run's ``status.json`` for readers (`shown_state`)."""
    result = status.get("result", {})
    return shown_state(status["state"], result.get("val_nll"), result.get("init_nll"))


@dataclass(frozen=True)
class ShareWords:
    """The terms of a share that an objective validates beside its loss.

    A share is in 0 … 1, higher is better, and one of ``score_names``. Tables, a figure, claims and the board show it.

    Attributes:
        column: column of ``metrics.jsonl``, begins with ``val_``.
        name: its name.
        of: its whole, as the continuation of "Share" or "Per cent" in a caption.
    """

    column: str
    name: str
    of: str


@dataclass(frozen=True)
class Words:
    """The terms of an objective; the defaults are a language model's.

    The last three depend on settings; a sweep fills them (`AbstractObjective.summary`, `AbstractDataSource.tokens_of`).

    Attributes:
        position: name of one position of the model, and the plural.
        counted: unit of a run's ``num_tokens``.
        example: name of a row of a batch.
        nll: name of the validated loss, as an axis label.
        unit: its unit.
        generative_unit: unit of an oracle's score of samples.
        score: the same in a caption; ``{draws}``: number of measurements of each sample.
        of_oracle: the same for an oracle ``{oracle}`` by name.
        of_sample: the same beside one sample.
        is_text: whether samples are text and so have bytes.
        held_out: name of the data in "on held-out …".
        share: validated share, None if there is none.
        parts: units of the loss's components, if it is a sum.
        scored_parts: the same of an oracle.
        baseline: the model of the targets' frequencies.
        baseline_nll: its NLL.
        baseline_source: source of these frequencies.
        summary: the objective with the settings that a table's reader needs; "": its name suffices.
        tokens: name of the data's tokens, or "".
        direction: "causal" or "bidirectional"; "": unknown.
    """

    position: tuple[str, str] = ("token", "tokens")
    counted: str = "tokens"
    example: str = "sequence"
    nll: str = "validation NLL"
    unit: str = "nats per predicted token"
    generative_unit: str = "nats per token of the oracle"
    score: str = "Nats per token of the oracle, the first token of a sample given"
    of_oracle: str = "nats per token of {oracle}"
    of_sample: str = "nats per token of the oracle {oracle}"
    is_text: bool = True
    held_out: str = "text"
    share: ShareWords | None = None
    parts: str = "nats of each part"
    scored_parts: str = "Its NLL of the terminal checkpoints' samples: each part averaged over samples"
    baseline: str = "token frequencies"
    baseline_nll: str = "token-frequency NLL"
    baseline_source: str = "training tokens' frequencies"
    summary: str = field(default="", kw_only=True)
    tokens: str = field(default="", kw_only=True)
    direction: str = field(default="", kw_only=True)

    @property
    def in_nats(self) -> bool:
        """Whether the validated loss is a negative log likelihood; else its values depend on the loss's own unit."""
        return "nats" in self.unit
