"""Score sampled proteins' letters by a Hugging Face protein language model.

Masked (ESM-2) or causal (ProtGPT2, ProGen2). Structure tokens are not scored: no such model reads ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import resolve_device
from stability.config.generation import GenerationSpec
from stability.config.run import RunSpec
from stability.corpora.proteins.alphabets import LETTERS
from stability.models.passes import generator_for
from stability.objectives import mask_rates, random_mask
from stability.probes.generation.protein_source import ProteinSample
from stability.probes.generation.samples import Sample
from stability.probes.generation.text_oracle import Oracle, load_causal, sha256_of_weights
from stability.probes.pretrained.loading import is_masked, load_masked_model, load_tokenizer

SEED = 0  # for the masks, as in validation
ENDS = 2  # positions of the tokens around a protein
POSITIONS = 1024  # default context length


@dataclass(frozen=True, eq=False)
class MaskedLetters:
    """A masked protein language model as an oracle: the masked NLL of a sample's letters.

    A sample is masked ``oracle_draws`` times by the schedule of the run's sequence track. Each draw gives the mean
    cross entropy over the masked letters, over the oracle's whole vocabulary, given all other letters. The sample's NLL
    is the mean over draws, in nats per residue: the unit of the validation NLL's sequence part. Samples longer than the
    oracle's context are split into pieces, scored separately. Letters unknown to the oracle are shown as unknown and
    not scored. Rates and masks depend only on the sample's number, its length and the number of draws.
    """

    name: str
    sha256: str
    model: nn.Module
    tokenizer: Any
    positions: int  # residues at a time
    schedule: Any
    draws: int
    batch: int
    device: torch.device

    def scores(self, samples: Sequence[ProteinSample]) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample."""
        for index, sample in enumerate(samples):
            yield row_of(self._nll(index, sample.text or ""), len(sample.text or ""))

    def _nll(self, index: int, text: str) -> float:
        if not text:
            return math.nan
        tokens_N = torch.tensor([self.tokenizer.convert_tokens_to_ids(letter) for letter in text])
        generator = generator_for(SEED, "letters", index)
        masked_DN = random_mask(mask_rates(self.schedule, self.draws, generator), len(text), generator)
        scored_DN = masked_DN & (tokens_N != self.tokenizer.unk_token_id)
        pieces = zip(*(part.split(self.positions, -1) for part in (tokens_N, masked_DN, scored_DN)), strict=True)
        nats_D = torch.stack([self._nats(*piece) for piece in pieces]).sum(0)
        counted_D = scored_DN.sum(1)
        return float((nats_D / counted_D)[counted_D > 0].mean())

    @torch.no_grad()
    def _nats(self, tokens_N: Tensor, masked_DN: Tensor, scored_DN: Tensor) -> Tensor:
        """Return a piece's nats for each draw of masks, (D,), float64."""
        inputs_DN = torch.where(masked_DN, self.tokenizer.mask_token_id, tokens_N)
        first, last = (torch.full((len(inputs_DN), 1), token) for token in _ends(self.tokenizer))
        found = []
        for rows, scored in zip(
            torch.cat([first, inputs_DN, last], 1).split(self.batch), scored_DN.split(self.batch), strict=True
        ):
            given = rows.to(self.device)
            logits = self.model(input_ids=given, attention_mask=torch.ones_like(given)).logits[:, 1:-1].float().cpu()
            nats = nn.functional.cross_entropy(logits.mT, tokens_N.expand(len(rows), -1), reduction="none").double()
            found.append(torch.where(scored, nats, 0.0).sum(1))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class CausalLetters:
    """A causal protein language model as an oracle: NLL in nats per residue.

    The nats of all tokens after the first, divided by their number of letters.
    """

    name: str
    sha256: str
    oracle: Oracle
    batch: int

    def scores(self, samples: Sequence[ProteinSample]) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample."""
        letters = [Sample([], sample.text) for sample in samples]
        for some in self.oracle.score(letters, self.batch):
            for score in some:
                yield row_of(score.nats / score.num_bytes if score.num_bytes else math.nan, score.num_bytes)


def row_of(nll: float, num: int) -> dict[str, Any]:
    """Return a sample's row of the score table: ``num`` scored letters, no structure."""
    return {
        "nll": nll,
        "nll_per_byte": math.nan,
        "num_tokens": num,
        "num_bytes": 0,
        "nll_sequence": nll,
        "nll_structure": math.nan,
    }


def load_letters_oracle(run: RunSpec, spec: GenerationSpec, name: str, device: str) -> MaskedLetters | CausalLetters:
    """Load the oracle ``hf:…`` for letters.

    Args:
        run: the run's spec.
        spec: the generation settings.
        name: the model's name or folder.
        device: "auto", or a torch device.

    Raises:
        ValueError: no such model, without amino acids in its vocabulary, or samples without letters; two lines.
    """
    settings: Any = run.objective.settings
    if "sequence" not in settings.sources:
        raise ValueError(
            f"oracle=hf:{name} reads letters, and these samples are structure tokens alone;\ngive oracle=ckpt:FOLDER, "
            f"a run with objective={run.objective.name}"
        )
    where = str(resolve_device(device))
    if not is_masked(name):
        oracle = load_causal(name, where)
        return CausalLetters(f"{oracle.name} (letters)", oracle.sha256, oracle, spec.batch)
    shown, sha256, model, tokenizer = _load_masked(name, where)
    longest = getattr(model.config, "max_position_embeddings", None) or POSITIONS
    return MaskedLetters(
        shown,
        sha256,
        model,
        tokenizer,
        max(longest - ENDS, 1),
        settings.sequence_mask_rate,
        spec.own.oracle_draws,
        spec.batch,
        torch.device(where),
    )


def forget() -> None:
    """Free the cached oracle's memory."""
    _load_masked.cache_clear()


@lru_cache(maxsize=1)
def _load_masked(name: str, device: str) -> tuple[str, str, Any, Any]:
    """Return a masked model's display name, its weights' sha256, the model and its tokenizer."""
    try:
        model = load_masked_model(name)
    except ValueError as error:
        raise ValueError(f"oracle: {error}") from None
    tokenizer = load_tokenizer(name, LETTERS)
    num_known = 0
    if tokenizer is not None:
        tokens = [tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
        num_known = sum(token not in (None, tokenizer.unk_token_id) for token in tokens)
    if tokenizer is None or tokenizer.mask_token_id is None or num_known < len(LETTERS) // 2:
        raise ValueError(
            f"oracle=hf:{name}: its tokenizer has no token of its own for each amino acid, and a mask\ngive a protein "
            "language model, e.g. hf:facebook/esm2_t33_650M_UR50D"
        )
    shown = f"hf:{name.rstrip('/').rpartition('/')[2]} (letters)"
    return shown, sha256_of_weights(model.state_dict()), model.to(device), tokenizer


def _ends(tokenizer: Any) -> tuple[int, int]:
    """Return the tokens before and after a protein."""
    first = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    last = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return first, last
