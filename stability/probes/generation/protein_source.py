"""Prepare a protein model for sampling: all tracks masked, with a held-out protein's length."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from stability.build import build_objective
from stability.config.generation import GenerationSpec
from stability.config.parts import contexts_of
from stability.config.run import RunSpec
from stability.corpora.proteins.alphabets import decode
from stability.corpora.proteins.batch import ProteinBatch, batch_of
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.models import MASK
from stability.models.passes import generator_for
from stability.objectives.multitrack import FIRST, with_contexts
from stability.probes.generation.samplers import Draws, unmask_tracks


class ProteinSample(NamedTuple):
    """A sampled protein: letters and structure tokens (0 … codes − 1).

    A track is None if the model does not predict it. ``protein`` is the held-out protein with the same length (and
    contexts, if given).
    """

    text: str | None
    structure: list[int] | None
    protein: str

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all tracks."""
        return len(self.text or ()) + len(self.structure or ())


def read_held_out(run: RunSpec, spec: GenerationSpec, corpus: ProteinCorpus, indices: Sequence[int]) -> ProteinBatch:
    """Return held-out protein i for sample i: its first N − 2 residues and the given contexts.

    Proteins are reused cyclically if too few.

    Args:
        run: the run's spec.
        spec: the generation settings.
        corpus: the prepared proteins.
        indices: numbers of the samples.
    """
    chains, length = corpus.chains("val"), run.model.positions - 2
    batch = batch_of([chains.part(index % len(chains), 0, length) for index in indices])
    return with_contexts(batch, contexts_of(run.objective) if spec.own.contexts == "given" else ())


class ProteinSource:
    """A source of protein samples (`stability.probes.generation.kinds.Source`)."""

    def __init__(
        self,
        run: RunSpec,
        model: nn.Module,
        corpus: ProteinCorpus,
        spec: GenerationSpec,
        sampler: Any,
        device: torch.device,
    ):
        self.model, self.sampler, self.temperature, self.seed, self.device = (
            model,
            sampler,
            spec.temperature,
            spec.seed,
            device,
        )
        self.objective: Any = build_objective(run, corpus.format)
        self._held_out = partial(read_held_out, run, spec, corpus)

    def draw(self, indices: Sequence[int]) -> Generator[None, None, list[ProteinSample]]:
        """Unmask one batch of proteins with random numbers per sample; yield after every step."""
        batch = self._held_out(indices)
        inputs, mask_BN = tree_map(lambda tensor: tensor.to(self.device), self.objective.mask_all(batch))
        draws = Draws([generator_for(self.seed, "generate", index) for index in indices], self.device)
        yield from unmask_tracks(
            lambda tracks: self.objective.track_probs(self.model, inputs._replace(sources=tuple(tracks)), mask_BN),
            inputs.sources,
            draws,
            mask_id=MASK,
            first_id=FIRST,
            order=self.sampler,
            temperature=self.temperature,
        )
        return self._samples(batch, [tokens_BN.cpu().numpy() for tokens_BN in inputs.sources])

    def _samples(self, batch: ProteinBatch, tracks: list[np.ndarray]) -> list[ProteinSample]:
        tokens = dict(zip(self.objective.config.sources, tracks, strict=True))
        found = []
        for row, (name, num) in enumerate(zip(batch.ids, batch.residues_BN.sum(1).tolist(), strict=True)):
            own = {track: tokens_BN[row, 1 : num + 1] for track, tokens_BN in tokens.items()}
            letters = decode(own["sequence"]) if "sequence" in own else None
            structure = (own["structure"] - FIRST).tolist() if "structure" in own else None
            found.append(ProteinSample(letters, structure, name))
        return found
