"""Generate tokens, text or DNA: sample, store, and score whole texts by an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import build_objective
from stability.config.generation import GenerationSpec
from stability.config.parts import num_context_of
from stability.config.run import RunSpec
from stability.corpora.tokens.corpus import Corpus
from stability.models.passes import generator_for
from stability.probes.generation import samples as stored_samples
from stability.probes.generation import text_oracle as oracles
from stability.probes.generation.kinds import Kind
from stability.probes.generation.samplers import Draws, reverse_diffusion, sample_left_to_right, unmask
from stability.probes.generation.samples import Sample
from stability.probes.generation.text_oracle import Oracle
from stability.registry import Registry
from stability.runs.directory import RunDirectory
from stability.runs.schema import GENERATION_COLUMNS


class Source:
    """A model, ready for sampling; sample i has its own random numbers, from (seed, i)."""

    def __init__(
        self, run: RunSpec, model: nn.Module, corpus: Corpus, spec: GenerationSpec, sampler: str, device: torch.device
    ):
        self.run, self.model, self.corpus, self.spec, self.sampler, self.device = (
            run,
            model,
            corpus,
            spec,
            sampler,
            device,
        )
        self.objective: Any = build_objective(run, corpus.vocab_size)

    def draw(self, indices: Sequence[int]) -> Generator[None, None, list[Sample]]:
        tokens_BN = self.start(indices)
        yield from self.steps(tokens_BN)
        return [stored_samples.decode_sample(self.corpus, row) for row in tokens_BN.tolist()]

    def start(self, indices: Sequence[int]) -> Tensor:
        """Draw sequences of noise (B, N): masks, or any tokens for a uniform graph.

        For ar: a random token of the training text, then zeros.
        """
        self.draws = Draws([generator_for(self.spec.seed, "generate", index) for index in indices], self.device)
        self.context = self._context(indices)
        shape = (len(indices), self.run.model.positions)
        if self.objective.mask_id is not None:
            return torch.full(shape, self.objective.mask_id, device=self.device)
        if self.sampler != "ar":
            return (self.draws.uniforms(shape[1]) * self.corpus.vocab_size).long()
        tokens_BN = torch.zeros(shape, dtype=torch.int64, device=self.device)
        places = (self.draws.uniforms() * len(self.corpus.train_tokens)).long().cpu().numpy()
        tokens_BN[:, 0] = torch.as_tensor(self.corpus.train_tokens[places].astype("int64"), device=self.device)
        return tokens_BN

    def _context(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the cross mechanism's context: the start of held-out window i for sample i.

        Windows are reused cyclically if too few.
        """
        num_context = Registry("objectives").load(self.run.objective.name).num_context(self.run.objective.settings)
        if not num_context:
            return {}
        windows = self.corpus.windows("val", self.spec.num, num_context)
        return {"context_BJ": windows[[index % len(windows) for index in indices]].to(self.device)}

    def steps(self, tokens_BN: Tensor) -> Iterator[None]:
        """Turn the noise into a sample, in place."""
        read: Any = partial(self.model, **self.context)
        temperature = self.spec.temperature
        if self.sampler == "ar":
            return sample_left_to_right(self._next(read), tokens_BN, self.draws, temperature=temperature)
        if self.sampler == "top_prob" or self.sampler == "random":
            clean = partial(self.objective.clean_probs, read)
            return unmask(
                clean, tokens_BN, self.objective.mask_id, self.draws, order=self.sampler, temperature=temperature
            )
        graph = "uniform" if self.objective.mask_id is None else "absorbing"
        scheme, steps = (
            ("euler" if self.sampler == "euler" else "analytic"),
            self.spec.steps or self.run.model.positions,
        )
        noise = self.objective.noise
        return reverse_diffusion(
            self._scores(read), noise, graph, tokens_BN, self.draws, scheme=scheme, steps=steps, temperature=temperature
        )

    def _next(self, read: Any) -> Callable[[Tensor], Tensor]:
        def next_probs(tokens_BN: Tensor) -> Tensor:
            with torch.no_grad():
                return read(tokens_BN)[:, -1].double().softmax(-1)

        return next_probs

    def _scores(self, read: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def scores(tokens_BN: Tensor, sigma: Tensor) -> Tensor:
            sigma_B = sigma.float().expand(len(tokens_BN))
            return self.objective.log_score(read, tokens_BN, sigma_B).double().exp()

        return scores


class TokenKind(Kind):
    """Tokens as a kind of samples."""

    columns: Sequence[str] = GENERATION_COLUMNS

    def check(self, run: RunSpec, spec: GenerationSpec) -> None:
        """Perform no check beyond the common ones."""

    def collect_sample_settings(self, spec: GenerationSpec) -> dict[str, Any]:
        return {}

    def collect_score_settings(self, spec: GenerationSpec) -> dict[str, Any]:
        return {}

    def num_steps(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> int:
        per_batch = {"ar": run.model.positions - 1}.get(sampler, run.model.positions)
        stepped = Registry("objectives").load(run.objective.name).stepped
        per_batch = (spec.steps or run.model.positions) + 1 if sampler in stepped else per_batch
        return math.ceil(spec.num / spec.batch) * (per_batch + (spec.oracle is not None))

    def equal_samples(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> str:
        """Return a description of identical samples, or "" if chance or context differ.

        Args:
            run: the run's spec.
            spec: the generation settings.
            sampler: the resolved sampler.
        """
        # otherwise: all masks at first, always the surest position and its likeliest token
        chance = spec.temperature > 0 or sampler != "top_prob"
        return (
            ""
            if spec.num == 1 or chance or num_context_of(run.objective)
            else f"all {spec.num} samples of a checkpoint"
        )

    def source(
        self,
        directory: RunDirectory,
        run: RunSpec,
        model: nn.Module,
        corpus: Corpus,
        spec: GenerationSpec,
        sampler: str,
        device: torch.device,
    ) -> Source:
        return Source(run, model, corpus, spec, sampler, device)

    def write(
        self,
        directory: RunDirectory,
        phase: str,
        samples: Sequence[Sample],
        made_by: dict[str, Any],
        *,
        run: RunSpec,
        corpus: Corpus,
        device: torch.device,
    ) -> Iterable[None]:
        """Write a phase's samples, as FASTA for nucleotides; yield nothing.

        Args:
            directory: the run.
            phase: the checkpoint's phase.
            samples: the samples.
            made_by: the settings behind them.
            run: without effect.
            corpus: the run's prepared data.
            device: without effect.
        """
        stored_samples.write(directory, phase, samples, made_by, fasta=stored_samples.is_nucleotides(corpus))
        return ()

    def read(self, directory: RunDirectory, phase: str, corpus: Corpus) -> list[Sample]:
        return stored_samples.read(directory, phase, corpus)

    def oracle(self, run: RunSpec, spec: GenerationSpec, corpus: Corpus, device: str) -> Oracle:
        assert spec.oracle is not None
        return oracles.load_oracle(spec.oracle, corpus, device)

    def forget_oracle(self) -> None:
        oracles.forget()

    def scores(
        self, oracle: Oracle, samples: Sequence[Sample], corpus: Corpus, spec: GenerationSpec
    ) -> Iterator[list[dict[str, Any]]]:
        # unknown tokens have no byte count
        has_bytes = corpus.vocabulary is None or corpus.vocabulary.unknown is None
        for scores in oracle.score(samples, spec.batch):
            yield [score_row(score.nats, score.num_tokens, score.num_bytes if has_bytes else 0) for score in scores]


def score_row(nats: float, num_tokens: int, num_bytes: int) -> dict[str, Any]:
    """Return a sample's score-table row, with NLL per token and per byte.

    Args:
        nats: over all scored tokens.
        num_tokens: scored tokens.
        num_bytes: their bytes; 0 if unknown, with NaN nats per byte.
    """
    nll = nats / num_tokens if num_tokens else math.nan
    return {
        "nll": nll,
        "nll_per_byte": nats / num_bytes if num_bytes else math.nan,
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
    }


EXPORT = TokenKind
