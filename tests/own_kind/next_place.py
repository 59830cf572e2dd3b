"""Where a walk goes next: an objective that reads walks, generates walks, and says itself what all that is called."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.models.passes import generator_for
from stability.objectives import AbstractObjective, Examples, ObjectiveSettings, weighted_cross_entropy
from stability.probes.generation import samples as stored
from stability.probes.generation.text_oracle import oracle_checkpoint, weights_sha256
from stability.runs.directory import read_json
from stability.runs.schema import GENERATION_COLUMNS
from stability.runs.words import ShareWords, Words
from stability.training import checkpoint


class WalkSource:
    """Walks from ``start`` on, each step drawn from the model's probabilities. ``sampler``: "wander" draws a place a
    step, "leap" as many at once, from where it stands, as make ``steps`` of the whole."""

    def __init__(self, model: nn.Module, positions: int, spec: Any, sampler: str):
        self.model, self.positions, self.spec = model, positions, spec
        steps = (spec.steps or positions) if sampler == "leap" else positions
        self.at_once = -(-positions // steps)

    @torch.no_grad()
    def draw(self, indices: Sequence[int]) -> Generator[None, None, list[list[int]]]:
        generators = [generator_for(self.spec.seed, "generate", index) for index in indices]
        walks_BN = torch.full((len(indices), 1), self.spec.own.start)
        while (left := self.positions - walks_BN.shape[1]) > 0:
            probs_BV, num = self.model(walks_BN)[:, -1].softmax(-1), min(left, self.at_once)
            drawn = [row.multinomial(num, True, generator=g) for row, g in zip(probs_BV, generators, strict=True)]
            walks_BN = torch.cat([walks_BN, torch.stack(drawn)], 1)
            yield
        return walks_BN.tolist()


class WalkOracle:
    def __init__(self, place: str):
        folder = oracle_checkpoint(place.removeprefix("ckpt:"))
        self.model = checkpoint.load(folder)[1]
        self.name, self.sha256 = f"walker {folder.name}", weights_sha256(folder)

    @torch.no_grad()
    def nats(self, walk: list[int]) -> float:
        walk_1N = torch.tensor([walk])
        return float(nn.functional.cross_entropy(self.model(walk_1N[:, :-1])[0], walk_1N[0, 1:]))


class WalkKind:
    """As `stability.probes.generation.kinds.Kind` has it."""

    columns: Sequence[str] = GENERATION_COLUMNS

    def check(self, run: Any, spec: Any) -> None: ...

    def collect_sample_settings(self, spec: Any) -> dict[str, Any]:
        return {"start": spec.own.start}

    def collect_score_settings(self, spec: Any) -> dict[str, Any]:
        return {}

    def num_steps(self, run: Any, spec: Any, sampler: str) -> int:
        return -(-spec.num // spec.batch) * run.model.positions + spec.num

    def equal_samples(self, run: Any, spec: Any, sampler: str) -> str:
        return ""

    def source(
        self, directory: Any, run: Any, model: nn.Module, corpus: Any, spec: Any, sampler: str, device: torch.device
    ) -> WalkSource:
        return WalkSource(model, run.model.positions, spec, sampler)

    def write(
        self, directory: Any, phase: str, samples: Sequence[list[int]], made_by: dict[str, Any], **_: Any
    ) -> Iterable[None]:
        rows = ({"text": " → ".join(map(str, walk)), "walk": walk} for walk in samples)
        stored.vouch(directory, phase, ".jsonl", stored.jsonl(rows), made_by)
        return ()

    def read(self, directory: Any, phase: str, corpus: Any) -> list[list[int]]:
        path: Path = stored.meta_file(directory, phase)
        lines = path.with_name(read_json(path)["file"]).read_text().splitlines()
        return [json.loads(line)["walk"] for line in lines]

    def oracle(self, run: Any, spec: Any, corpus: Any, device: str) -> WalkOracle:
        return WalkOracle(spec.oracle)

    def forget_oracle(self) -> None: ...

    def scores(
        self, oracle: WalkOracle, samples: Sequence[list[int]], corpus: Any, spec: Any
    ) -> Iterator[list[dict[str, Any]]]:
        for walk in samples:
            yield [{"nll": oracle.nats(walk), "num_tokens": len(walk) - 1}]


class NextPlace(AbstractObjective):
    class Config(ObjectiveSettings):
        """Nothing of its own."""

    class Sampling(Settings):
        start: int = Field(default=0, ge=0, description="place where a walk begins")

    corpus_kind = "walks"
    direction = "causal"
    components = ("even", "odd")
    score_names = ("val_nll_even", "val_nll_odd", "val_hits", "val_accuracy")
    samples = WalkKind
    samplers = ("wander", "leap")
    stepped = ("leap",)
    words = Words(
        position=("move", "moves"),
        counted="moves",
        example="walk",
        nll="surprise at the next move",
        unit="nats per move",
        generative_unit="nats per move of the walker",
        score="Nats per move as the walker sees them",
        of_oracle="nats per move of {oracle}",
        of_sample="nats per move of the oracle {oracle}",
        is_text=False,
        held_out="walks",
        share=ShareWords("val_accuracy", "foresight", "of the held-out moves that are foreseen"),
        parts="nats of moves to even and to odd places",
        baseline="place frequencies",
        baseline_nll="place-frequency NLL",
        baseline_source="training walks' place frequencies",
    )

    def __init__(self, config: Any, vocab_size: Any):
        self.config = config
        self.num_inputs = self.num_outputs = vocab_size

    @classmethod
    def summary(cls, config: Any) -> str:
        return "next_place, a step at a time"

    def tokens_needed(self, positions: int) -> int:
        return positions + 1

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        return Examples(tokens_BN[:, :-1], tokens_BN[:, 1:], torch.ones(tokens_BN[:, 1:].shape))

    def component_sums(self, logits_BNV: Tensor, examples: Examples) -> Tensor:
        nll_BN = nn.functional.cross_entropy(logits_BNV.mT, examples.targets_BN, reduction="none")
        return torch.stack([nll_BN[examples.targets_BN % 2 == parity].sum() for parity in (0, 1)])

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logits_BNV = examples.logits(model)
        hits = (logits_BNV.argmax(-1) == examples.targets_BN).sum()
        scores = [*self.component_sums(logits_BNV, examples), hits, hits]
        return *self.loss_sum(logits_BNV, examples), dict(zip(self.score_names, scores, strict=True))

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)


EXPORT = NextPlace
