"""What the checks of objectives look at: an objective with a batch of its kind of data and a tiny model built for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks._examples import drawn
from stability.build import build_model
from stability.config.parse import parse_run
from stability.config.parts import validate_settings
from stability.corpora.images.corpus import ImageBatch
from stability.corpora.proteins.batch import batch_of
from stability.corpora.questions.corpus import UNASKED, QuestionBatch
from stability.models.images import ImageFormat
from stability.objectives import AbstractObjective
from stability.registry import Registry
from tests.conftest import TINY
from tests.objectives.test_multitrack import SIZES, some_proteins

ROWS = 6
VOCABULARY = 8
IMAGE = ImageFormat(8, 8, 3, 5, (100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
# what an objective cannot do without
REQUIRED: dict[str, dict[str, Any]] = {"multitrack": {"tokenizer": "0" * 12}}
SENTENCES = {"vocab_size": VOCABULARY, "sentences": 2, "scored": False}
FORMATS: dict[str, Any] = {
    "tokens": VOCABULARY,
    "images": IMAGE._asdict(),
    "proteins": SIZES,
    "questions": VOCABULARY,
    "sentences": SENTENCES,
}
SOURCES = {
    "tokens": "stdlib",
    "images": "images",
    "proteins": "protein",
    "questions": "mqar",
    "sentences": "synthetic_pairs",
}


class Subject(NamedTuple):
    objective: Any
    batch: Any
    model: nn.Module


def subject(name: str, **settings: Any) -> Subject:
    """Return an objective of the registry with these settings."""
    made = Registry("objectives").load(name)
    given = REQUIRED.get(name, {}) | settings
    return subject_of(made(validate_settings("objectives", name, given), FORMATS[made.corpus_kind]), name, given)


def subject_of(objective: Any, name: str, settings: dict[str, Any] | None = None) -> Subject:
    """Return an objective with a model that was built for the one called ``name``, in float64, whose weights are all
    moved from where they start: some start at zero."""
    needs_cross = bool(objective.contexts_of(objective.config) or objective.num_context(objective.config))
    spec = parse_run(
        {
            **TINY,
            "objective": {"name": name, **(settings or {})},
            "data": {"name": SOURCES[objective.corpus_kind]},
            "cross": "auto" if needs_cross else None,
            "data_fingerprint": "made up",
        }
    )
    model = build_model(spec, FORMATS[objective.corpus_kind]).double()
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=draws, dtype=value.dtype))
    return Subject(objective, batch(objective), model)


def batch(objective: AbstractObjective) -> Any:
    draws = torch.Generator().manual_seed(3)
    if objective.corpus_kind == "tokens":
        shape = (ROWS, objective.tokens_needed(TINY["model"]["positions"]))
        return torch.randint(VOCABULARY, shape, generator=draws)
    if objective.corpus_kind == "images":
        pixels = torch.randint(256, (ROWS, IMAGE.height, IMAGE.width, IMAGE.channels), generator=draws)
        return ImageBatch(pixels.to(torch.uint8), torch.randint(IMAGE.classes, (ROWS,), generator=draws))
    if objective.corpus_kind == "questions":
        tokens_BN, answers_BN = torch.randint(VOCABULARY, (2, ROWS, TINY["model"]["positions"]), generator=draws)
        asked_BN = torch.rand(answers_BN.shape, generator=draws) < 0.4
        return QuestionBatch(tokens_BN, torch.where(asked_BN, answers_BN, UNASKED))
    if objective.corpus_kind == "sentences":
        return drawn("sentence_pairs", SENTENCES, TINY["model"]["positions"], ROWS, draws)
    return batch_of([*some_proteins(), *some_proteins()])
