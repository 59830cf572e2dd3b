"""Masked modelling of proteins: predict sequence and structure tokens, given annotations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from stability.config import Settings
from stability.models import BOS, EOS, MASK, PAD, SPECIALS, UNK
from stability.models.passes import at_least_float32
from stability.models.tracks import SummedEmbedding, Track, TrackEmbedding, TrackInputs, frame_tokens
from stability.objectives import AbstractObjective, Examples, ObjectiveSettings, refuse_unread
from stability.objectives._examples import DrawnSchedule, draw_mask, mask_rates, sum_by_chunks
from stability.runs.words import Words

SOURCES = ("sequence", "structure")
ALIGNED = ("ss", "sasa", "plddt", "domains")  # one entry per residue; the others are sequences of their own
CONTEXTS = (*ALIGNED, "descriptions", "orthologs")
FIRST = len(SPECIALS)  # the first content token of a source track
# placeholder id of a tokenizer in a dry run (a real hash equals it with probability 2⁻⁴⁸), and its number of codes:
# the default of stability.train_tokenizer
UNTRAINED, CODES = "0" * 12, 7 * 5 * 5 * 5 * 5


class MultitrackMaskedModel(AbstractObjective):
    """The sum of the source tracks' NLLs.

    A track's NLL is the cross entropy averaged over a protein's masked positions, then over proteins (consensus paper,
    5.1 and E.1). The paper names the components of its Table 4 but not their combination into a total. Here it is their
    sum: the nats of one residue's hidden letter and hidden structure token.

    A protein is framed by BOS and EOS, so N positions hold N − 2 residues; a longer chain is cropped. Source tracks are
    embedded and summed. Each track is masked by its own schedule, with one rate per protein and at least one position.
    Only content is masked and predicted: no special token, no residue of unknown letter or coordinates (UNK). A protein
    without content in a track does not count in the track's mean (of a batch; in validation of 64 proteins at a time).
    Structure tokens are those of the whole chain.

    Contexts enter once before the blocks. Their entries (a residue's value, all domains of a residue, a word) are
    hidden at a rate drawn per protein; a hidden entry equals an unknown one. Missing annotations are no error: such a
    context adds nothing.
    """

    class Config(ObjectiveSettings):
        sources: tuple[Literal["sequence", "structure"], ...] = Field(
            default=SOURCES,
            min_length=1,
            description="tracks that are predicted, their embeddings summed; structure needs a tokenizer",
        )
        contexts: tuple[Literal["ss", "sasa", "plddt", "domains", "descriptions", "orthologs"], ...] = Field(
            default=CONTEXTS,
            description=(
                "what is given: secondary structure, exposed area, confidence, domains, descriptions, orthologous "
                "groups (cross=auto)"
            ),
        )
        tokenizer: str | None = Field(
            default=None,
            pattern=r"^[0-9a-f]{12}$",
            description="id of the structure tokenizer (stability.train_tokenizer) in the same runs_dir",
        )
        sequence_mask_rate: DrawnSchedule = Field(
            default="betalinear30", description="schedule of the rate at which residues are masked"
        )
        structure_mask_rate: DrawnSchedule = Field(
            default="cosine", description="schedule of the rate at which structure tokens are masked"
        )
        context_mask_rate: DrawnSchedule = Field(
            default="sqrt", description="schedule of the rate at which a context's entries are hidden"
        )

        @field_validator("sources", "contexts")
        @classmethod
        def _sort_tracks(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
            """Sort tracks: their order does not change the run."""
            if len(set(value)) < len(value):
                raise ValueError(f"objective.{info.field_name}=[{','.join(value)}] names a track twice")
            return tuple(name for name in (*SOURCES, *CONTEXTS) if name in value)

        @model_validator(mode="after")
        def _is_read(self) -> MultitrackMaskedModel.Config:
            """Refuse settings of a track outside the sources, and structure without a tokenizer."""
            given = f"objective.sources (objective.sources=[{','.join(self.sources)}] given)"
            refuse_unread(self, ("sequence_mask_rate",), "sequence" in self.sources, f"sequence among {given}")
            refuse_unread(
                self, ("structure_mask_rate", "tokenizer"), "structure" in self.sources, f"structure among {given}"
            )
            refuse_unread(
                self, ("context_mask_rate",), bool(self.contexts), "objective.contexts, of which there are none"
            )
            if "structure" in self.sources and self.tokenizer is None:
                trained = "objective.tokenizer=ID of one that python -m stability.train_tokenizer trained"
                raise ValueError(
                    f"structure among objective.sources needs {trained}; without one: objective.sources=[sequence]"
                )
            return self

    class Sampling(Settings):
        contexts: Literal["empty", "given"] = Field(
            default="empty",
            description=(
                "objective.contexts of the proteins to sample: empty: none is known; given: those of held-out protein "
                "i for sample i"
            ),
        )
        oracle_draws: int = Field(
            default=8,
            ge=1,
            description="drawn masks under which a protein's oracle measures each sample; its score is their mean",
        )

    corpus_kind = "proteins"
    words = Words(
        position=("residue", "residues"),
        unit="nats per masked position, its parts added up",
        generative_unit="nats per residue by the oracle's masked NLL",
        score=(
            "Its masked NLL in nats per residue, a sample's tracks added up, each averaged over {draws} draws of masks"
        ),
        of_oracle="nats per residue by the masked NLL of {oracle}",
        is_text=False,
        held_out="proteins",
        parts=(
            "nats per masked residue (sequence) and per masked structure token (structure), each averaged within a "
            "protein, then over proteins"
        ),
        scored_parts=(
            "Its masked NLL of the terminal checkpoints' samples, by its own mask schedules and in the units of the "
            "validation NLL: each part averaged over drawn masks, then over samples"
        ),
    )
    direction = "bidirectional"
    without_mirror = None
    embeds_tokens = False
    samples = "proteins"
    samplers = ("top_prob", "random")

    def __init__(self, config: Config, sizes: Any):
        self.config, self._sizes = config, dict(sizes)
        self.components = config.sources
        self.score_names = tuple(f"val_nll_{name}" for name in config.sources)
        self._vocabularies = [self._sizes[name] - FIRST for name in config.sources]
        self.num_outputs = sum(self._vocabularies)

    @classmethod
    def any_format(cls, positions: int) -> dict[str, int]:
        """Return vocabularies of a few tokens each."""
        return dict.fromkeys((*SOURCES, *CONTEXTS), FIRST + 4)

    @classmethod
    def summary(cls, config: Config) -> str:
        given = f"given {', '.join(config.contexts)}" if config.contexts else "nothing given"
        by = f" (tokenizer {config.tokenizer})" if config.tokenizer else ""
        return f"multitrack, {' and '.join(config.sources)}{by} masked, {given}"

    @classmethod
    def contexts_of(cls, config: Config) -> tuple[str, ...]:
        return config.contexts

    @classmethod
    def reads(cls, config: Config, corpus: Any, pool: Path) -> Any:
        """Return the chains, with structure tokens if a tokenizer is named.

        Args:
            config: the settings.
            corpus: the chains.
            pool: folder of the runs and tokenizers.
        """
        if config.tokenizer is None:
            return corpus
        from stability.structure.tokens import tokenise  # a higher layer: it loads a trained model

        return tokenise(corpus, config.tokenizer, pool)

    @classmethod
    def for_plan(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with `UNTRAINED` as a missing tokenizer."""
        named = values.get("tokenizer") is not None or "structure" not in (values.get("sources") or ())
        return values if named else values | {"tokenizer": UNTRAINED}

    @classmethod
    def reads_for_plan(cls, config: Config, corpus: Any, pool: Path) -> Any:
        """Return the chains, with random structure tokens for an `UNTRAINED` tokenizer.

        Args:
            config: the settings.
            corpus: the chains.
            pool: folder of the runs and tokenizers.
        """
        if config.tokenizer != UNTRAINED:
            return cls.reads(config, corpus, pool)
        draws = np.random.default_rng(0)
        return corpus.with_structure(
            "a tokenizer to be trained", CODES, draws.integers(CODES, size=corpus.num_residues)
        )

    def embedding(self, width: int, positions: int) -> nn.Module:
        return SummedEmbedding([self._sizes[name] for name in self.config.sources], width)

    def context_embeddings(self, width: int) -> list[tuple[nn.Module, bool]]:
        return [(TrackEmbedding(self._sizes[name], width), name in ALIGNED) for name in self.config.contexts]

    def tokens_needed(self, positions: int) -> int:
        if positions < 3:
            raise ValueError(
                f"model.positions={positions}: BOS and EOS take two of a protein's positions; give at least 3, "
                "better hundreds"
            )
        return positions - 2

    def examples(self, batch: Any, generator: torch.Generator) -> Examples:
        """Mask a `ProteinBatch` of N − 2 residues; targets and weights are (B, N, tracks).

        Sources are masked first, in the order of the config, then contexts.
        """
        num_B = batch.residues_BN.sum(1)
        sources, targets, weights = [], [], []
        for name in self.config.sources:
            tokens_BN = frame_tokens(_source(name, batch), num_B, BOS, EOS)
            schedule = self.config.sequence_mask_rate if name == "sequence" else self.config.structure_mask_rate
            masked_BN = draw_mask(tokens_BN >= FIRST, mask_rates(schedule, len(tokens_BN), generator), generator)
            sources.append(tokens_BN.masked_fill(masked_BN, MASK))
            targets.append((tokens_BN - FIRST).clamp_min(0))
            weights.append(_shares(masked_BN))
        contexts = tuple(self._context(name, batch, generator) for name in self.config.contexts)
        mask_BN = sources[0] != PAD
        return Examples(
            TrackInputs(tuple(sources), contexts), torch.stack(targets, -1), torch.stack(weights, -1), mask_BN=mask_BN
        )

    def mirrored(self, examples: Examples) -> Examples:
        """Return the proteins read backwards.

        Reversed: the residues in source tracks, aligned contexts, targets and weights. Unchanged: BOS, EOS, padding,
        and contexts with sequences of their own. So a mixer without any sense of order still distinguishes BOS from EOS
        at a protein's ends.
        """
        assert examples.mask_BN is not None
        order_BN = _backwards(examples.mask_BN)

        def reverse(values: Tensor) -> Tensor:
            return values[torch.arange(len(values), device=values.device)[:, None], order_BN]

        inputs = examples.inputs_BN
        contexts = tuple(
            Track(*map(reverse, track)) if name in ALIGNED else track
            for name, track in zip(self.config.contexts, inputs.contexts, strict=True)
        )
        return examples._replace(
            inputs_BN=TrackInputs(tuple(map(reverse, inputs.sources)), contexts),
            targets_BN=reverse(examples.targets_BN),
            weights_BN=reverse(examples.weights_BN),
        )

    def mask_all(self, batch: Any) -> tuple[TrackInputs, Tensor]:
        """Return the initial inputs of sampling, and (B, N), False at padding.

        Every source track has a mask per residue between BOS and EOS, for proteins of the lengths in a `ProteinBatch`;
        contexts have nothing hidden.
        """
        tokens_BN = frame_tokens(torch.where(batch.residues_BN, MASK, PAD), batch.residues_BN.sum(1), BOS, EOS)
        contexts = tuple(Track(*_read_context(name, batch)) for name in self.config.contexts)
        return TrackInputs(tuple(tokens_BN.clone() for _ in self.config.sources), contexts), tokens_BN != PAD

    @torch.no_grad()
    def track_probs(self, model: nn.Module, inputs: TrackInputs, mask_BN: Tensor) -> list[Tensor]:
        """Return each source track's probabilities of the content, (B, N, V).

        V counts the tokens from `FIRST` on. float32 or wider, rows sum to 1, without gradients. Only masked positions
        are trained.

        Args:
            model: the model.
            inputs: partly masked tracks.
            mask_BN: False at padding.
        """
        return [
            logits.softmax(-1)
            for logits in at_least_float32(model(inputs, mask_BN=mask_BN)).split(self._vocabularies, -1)
        ]

    def _context(self, name: str, batch: Any, generator: torch.Generator) -> Track:
        tokens, mask = _read_context(name, batch)
        rates_B = mask_rates(self.config.context_mask_rate, len(tokens), generator)
        shown_BJ = torch.rand(tokens.shape[:2], generator=generator) >= rates_B[:, None]
        return Track(tokens, mask & (shown_BJ if mask.ndim == 2 else shown_BJ[..., None]))

    def component_sums(self, logits_BNV: Tensor, examples: Examples) -> Tensor:
        """Return the nats of each source track, summed with the examples' weights."""
        sums = []
        for track, logits in enumerate(logits_BNV.split(self._vocabularies, -1)):
            nll = nn.functional.cross_entropy(
                at_least_float32(logits).flatten(0, 1), examples.targets_BN[..., track].flatten(), reduction="none"
            )
            sums.append((nll * examples.weights_BN[..., track].flatten().to(nll.dtype)).sum())
        return torch.stack(sums)

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        sums = self.component_sums(logits_BNV, examples)
        return sums.sum(), self.count(examples, sums.dtype)

    def count(self, examples: Examples, dtype: torch.dtype) -> Tensor:
        """Return the number of proteins."""
        return torch.tensor(len(examples.targets_BN), dtype=dtype, device=examples.targets_BN.device)

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.config.loss_chunk is None:
            sums = self.component_sums(examples.logits(model), examples)
        else:
            read = partial(
                sum_by_chunks,
                lambda logits, part: (self.component_sums(logits, part),),
                examples,
                self.config.loss_chunk,
            )
            sums = examples.logits(model, readout=read)
        return sums.sum(), self.count(examples, sums.dtype), dict(zip(self.score_names, sums, strict=True))

    def unigram_logits(self, log_frequencies_V: Tensor, examples: Examples) -> Tensor:
        """Return the logits of each track's frequencies.

        Args:
            log_frequencies_V: of the residues' whole vocabulary, then of the structure tokens if any; only content is
                predicted.
            examples: the batch.
        """
        residues, structure = log_frequencies_V.split(
            [self._sizes["sequence"], len(log_frequencies_V) - self._sizes["sequence"]]
        )
        of_track = {"sequence": residues[FIRST:], "structure": structure}
        return torch.cat([of_track[name] for name in self.config.sources]).expand(*examples.targets_BN.shape[:2], -1)


def _source(name: str, batch: Any) -> Tensor:
    """Return a source track's tokens (B, N): UNK for unknown content, PAD after the last residue."""
    if name == "sequence":
        return batch.sequence_BN
    known_BN = torch.where(batch.structure_mask_BN, batch.structure_BN + FIRST, UNK)
    return torch.where(batch.residues_BN, known_BN, PAD)


def with_contexts(batch: Any, names: Sequence[str]) -> Any:
    """Return a `ProteinBatch` with all contexts outside ``names`` unknown."""
    hidden = [field for name in CONTEXTS if name not in names for field in _fields(name)]
    return type(batch)(**batch._asdict() | {field: torch.zeros_like(getattr(batch, field)) for field in hidden})


def _fields(name: str) -> tuple[str, str]:
    """Return the names of a context's tokens and mask in a `ProteinBatch`."""
    axes = {"domains": "BNK", "descriptions": "BJ", "orthologs": "BJ"}.get(name, "BN")
    return f"{name}_{axes}", f"{name}_mask_{axes}"


def _read_context(name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return a context's tokens and mask, (B, J) or (B, J, K); aligned ones are padded for BOS and EOS."""
    tokens, mask = (getattr(batch, field) for field in _fields(name))
    if name not in ALIGNED:
        return tokens, mask
    frame = (1, 1) if mask.ndim == 2 else (0, 0, 1, 1)
    return nn.functional.pad(tokens, frame), nn.functional.pad(mask, frame)


def _backwards(mask_BN: Tensor) -> Tensor:
    """Return each position's source, (B, N): residues reversed, frame unchanged."""
    place_BN = torch.arange(mask_BN.shape[1], device=mask_BN.device).expand(mask_BN.shape)
    last_B1 = mask_BN.sum(1, keepdim=True) - 1  # EOS
    is_residue_BN = (place_BN > 0) & (place_BN < last_B1)
    return torch.where(is_residue_BN, last_B1 - place_BN, place_BN)


def _shares(masked_BN: Tensor) -> Tensor:
    """Return weights of a mean over each row's masked positions, then over rows.

    Only rows with masked positions count. The weights are multiplied by the number of rows, the divisor of the loss.
    """
    num_B = masked_BN.sum(1)
    num_rows = (num_B > 0).sum().clamp_min(1)
    return masked_BN / num_B.clamp_min(1)[:, None] * (len(num_B) / num_rows)


EXPORT = MultitrackMaskedModel
