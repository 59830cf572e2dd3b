"""Score samples by a causal Hugging Face LM, Evo 2 or an autoregressive checkpoint.

The Hugging Face LM scores decoded text, Evo 2 nucleotides, and our own checkpoint the tokens themselves. The first
token of a sample is given and not scored, as in transformers' loss and in our autoregressive training: no token for
"beginning", possibly unknown to the oracle, is needed. Samples longer than the oracle's context are scored in stretches
with one shared token, so every token except the first is scored once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import resolve_device
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.vocabulary import BYTES, ByteTokenizer, Vocabulary
from stability.probes.checkpoints import corpus_of
from stability.probes.generation import evo2_oracle
from stability.probes.generation.samples import Sample, has_text, is_nucleotides
from stability.probes.pretrained.loading import load_model, load_tokenizer
from stability.runs.directory import RunDirectory
from stability.runs.phases import resolve_run_folder
from stability.training import checkpoint

POSITIONS = 1024  # default context length in tokens


@dataclass(frozen=True)
class Score:
    """One sample's score: nats, number of scored tokens, and their UTF-8 bytes.

    0 tokens: nothing to score. 0 bytes: unknown. An unknown token counts as the bytes of U+FFFD, not of its original
    text.
    """

    nats: float
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Oracle:
    """A language model for scoring samples.

    ``name`` is its display name, ``sha256`` is of its weights, ``logits`` maps tokens (B, N) to (B, N, V), and
    ``positions`` is the largest number of tokens at a time.
    """

    name: str
    sha256: str
    model: nn.Module
    positions: int
    device: torch.device
    encode: Callable[[Sample], list[int]]
    num_bytes: Callable[[list[int]], int]
    logits: Callable[[nn.Module, Tensor], Tensor]

    def score(self, samples: Sequence[Sample], batch: int) -> Iterator[list[Score]]:
        """Yield the samples' scores in order, at most ``batch`` samples at a time."""
        for some in _parts(samples, batch):
            tokens = [self.encode(sample) for sample in some]
            nats = self._nats(tokens, batch)
            yield [
                Score(total, max(len(row) - 1, 0), self.num_bytes(row[1:]))
                for total, row in zip(nats, tokens, strict=True)
            ]

    def _nats(self, tokens: list[list[int]], batch: int) -> list[float]:
        totals, width = [0.0] * len(tokens), self.positions
        stretches = [
            (index, row[start : start + width])
            for index, row in enumerate(tokens)
            for start in range(0, len(row) - 1, width - 1)
        ]
        for some in _parts(stretches, batch):
            for (index, _), nats in zip(some, self._stretch_nats([stretch for _, stretch in some]), strict=True):
                totals[index] += nats
        return totals

    @torch.no_grad()
    def _stretch_nats(self, stretches: list[list[int]]) -> list[float]:
        """Return each stretch's nats after its first token."""
        # padding on the right is invisible to a causal model's earlier outputs
        tokens_BN = torch.zeros(len(stretches), max(map(len, stretches)), dtype=torch.int64)
        for row, stretch in enumerate(stretches):
            tokens_BN[row, : len(stretch)] = torch.tensor(stretch)
        tokens_BN = tokens_BN.to(self.device)
        logits_BNV = self.logits(self.model, tokens_BN)[:, :-1]
        logits_BNV = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
        nats_BN = nn.functional.cross_entropy(logits_BNV.mT, tokens_BN[:, 1:], reduction="none").double()
        lengths_B = torch.tensor([len(stretch) - 1 for stretch in stretches], device=self.device)
        counted_BN = torch.arange(nats_BN.shape[1], device=self.device) < lengths_B[:, None]
        return torch.where(counted_BN, nats_BN, 0.0).sum(1).tolist()


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def load_oracle(given: str, corpus: Corpus, device: str = "auto") -> Oracle:
    """Load the oracle ``hf:…``, ``ckpt:…`` or ``evo2:…`` for samples in a corpus's vocabulary.

    The latest one stays in memory for a study's next run.

    Args:
        given: kind and place of the oracle.
        corpus: the run's prepared data.
        device: "auto", or a torch device.

    Raises:
        ValueError: no such oracle, not a causal language model, or another vocabulary; two lines.
        RuntimeError: its package is missing; one line.
    """
    kind, _, place = given.partition(":")
    where = str(resolve_device(device))
    if kind == "ckpt":
        return _load_checkpoint(str(oracle_checkpoint(place)), vocabulary_of(corpus), corpus.vocab_size, where)
    if not has_text(corpus):
        raise ValueError(
            f"oracle={given}: it reads text, and the texts of this run's {corpus.vocab_size:,} tokens were not stored;"
            "\ngive oracle=ckpt:FOLDER"
        )
    if kind == "evo2":
        if not is_nucleotides(corpus):
            raise ValueError(
                f"oracle={given} reads nucleotides, and these samples are none;\ngive oracle=hf:NAME_OR_FOLDER or "
                "oracle=ckpt:FOLDER"
            )
        return _load_evo2(place)
    return load_causal(place, where)


def forget() -> None:
    """Free the cached oracle's memory."""
    _load_checkpoint.cache_clear()
    load_causal.cache_clear()
    _load_evo2.cache_clear()


def key_of(given: str) -> str:
    """Return an oracle's identity without loading it.

    The hash of a checkpoint's weights, or of the sizes and times of a folder's files, else the name.
    """
    kind, _, place = given.partition(":")
    if kind == "ckpt":
        return f"ckpt:{weights_sha256(oracle_checkpoint(place))}"
    folder = Path(place).expanduser()
    if kind == "evo2" or not folder.is_dir():
        return given
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file()
    )
    return f"hf:{hashlib.sha256(json.dumps(files).encode()).hexdigest()}"


def weights_sha256(folder: Path) -> str:
    """Return the sha256 of a checkpoint's model from its manifest; ``ValueError`` without one."""
    manifest = checkpoint.manifest_of(folder)
    if checkpoint.MODEL not in manifest["sha256"]:
        checkpoint.verify_manifest(folder)  # raises with the cause
    return manifest["sha256"][checkpoint.MODEL]


def oracle_checkpoint(place: str) -> Path:
    """Return the folder of ``ckpt:…``: itself, or the last checkpoint of a run.

    A study is accepted if it has only one run.
    """
    folder = resolve_run_folder(place, f"oracle=ckpt:{place}", "an oracle is one run")
    if not (folder / "spec.json").exists():
        return folder
    found = RunDirectory.at(folder).checkpoints()
    if not found:
        raise ValueError(f"oracle=ckpt:{place}: this run has no checkpoint;\ngive one that has trained")
    return found[-1]


def vocabulary_of(corpus: Corpus) -> Vocabulary | None:
    """Return the tokens' vocabulary, or None if unknown."""
    return corpus.vocabulary or (BYTES if corpus.vocab_size == len(BYTES.pieces) else None)


@lru_cache(maxsize=1)
def _load_checkpoint(place: str, vocabulary: Vocabulary | None, vocab_size: int, device: str) -> Oracle:
    """Load an oracle from a run's checkpoint.

    ``ValueError`` if not autoregressive, or with another vocabulary.
    """
    folder = Path(place)
    try:
        spec, model = checkpoint.load(folder)
    except ValueError as error:
        raise ValueError(f"oracle: {error}") from None
    name = f"ckpt:{folder.parent.parent.name}/{folder.name}"
    if spec.objective.name != "ar":
        raise ValueError(
            f"oracle={name} was trained with objective={spec.objective.name}, which gives no NLL of a whole "
            "text;\ngive a run with objective=ar"
        )
    own = corpus_of(spec, folder.parent.parent.parent / "cache")
    assert isinstance(own, Corpus), "objective=ar reads tokens"
    if own.vocab_size != vocab_size or vocabulary_of(own) != vocabulary:
        raise ValueError(
            f"oracle={name} reads another vocabulary ({_describe_vocabulary(own.vocab_size, vocabulary_of(own))}) than "
            f"these samples are of ({_describe_vocabulary(vocab_size, vocabulary)});\ntrain one on the same data, or "
            "with the same tokenizer"
        )

    def num_bytes(tokens: list[int]) -> int:
        return 0 if vocabulary is None else sum(len(vocabulary.pieces[token]) for token in tokens)

    return Oracle(
        name,
        weights_sha256(folder),
        model.to(device),
        spec.model.positions,
        torch.device(device),
        encode=lambda sample: sample.tokens,
        num_bytes=num_bytes,
        logits=lambda model, tokens_BN: model(tokens_BN),
    )


def _describe_vocabulary(vocab_size: int, vocabulary: Vocabulary | None) -> str:
    return f"{vocab_size:,} tokens{'' if vocabulary is None else f', {vocabulary.name}'}"


@lru_cache(maxsize=1)
def load_causal(name: str, device: str) -> Oracle:
    """Load a causal Hugging Face model as an oracle; without a tokenizer, on bytes.

    The latest one stays in memory. ``ValueError`` of two lines if unavailable.
    """
    try:
        model = load_model(name)
    except ValueError as error:
        raise ValueError(f"oracle: {error}") from None
    tokenizer, vocab_size = load_tokenizer(name), model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if tokenizer is None and vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(
            f"oracle=hf:{name}: no tokenizer beside it, and its vocabulary of {vocab_size} is too small for "
            "bytes\nsave the tokenizer beside the model"
        )
    # without a tokenizer: UTF-8 bytes, right only for a model trained on bytes
    encode, num_bytes = (
        (lambda sample: list((sample.text or "").encode()), len)
        if tokenizer is None
        else _make_encoder(tokenizer, name, vocab_size)
    )
    shown = (
        f"hf:{Path(name).expanduser().name if Path(name).expanduser().is_dir() else name}"
        f"{' (on bytes)' if tokenizer is None else ''}"
    )
    return Oracle(
        shown,
        sha256_of_weights(model.state_dict()),
        model.to(device),
        getattr(model.config, "max_position_embeddings", None) or POSITIONS,  # type: ignore[union-attr]
        torch.device(device),
        encode=encode,
        num_bytes=num_bytes,
        logits=lambda model, tokens_BN: model(input_ids=tokens_BN, use_cache=False).logits,
    )


def _make_encoder(
    tokenizer: Any, name: str, vocab_size: int
) -> tuple[Callable[[Sample], list[int]], Callable[[list[int]], int]]:
    """Return a tokenizer's encoder for samples, and its byte counter for tokens."""

    def encode(sample: Sample) -> list[int]:
        tokens = tokenizer(sample.text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(
                f"oracle=hf:{name}: its tokenizer gives token {max(tokens)}, the model knows {vocab_size}\nthe two "
                "do not belong together"
            )
        return tokens

    def num_bytes(tokens: list[int]) -> int:
        return len(tokenizer.decode(tokens, clean_up_tokenization_spaces=False).encode())

    return encode, num_bytes


@lru_cache(maxsize=1)
def _load_evo2(name: str) -> Oracle:
    """Load an Evo 2 checkpoint on the device chosen by its package."""
    evo = evo2_oracle.load_evo2(name)
    return Oracle(
        f"evo2:{name}",
        sha256_of_weights(evo2_oracle.weights(evo)),
        evo.model,
        evo2_oracle.context_of(evo),
        evo2_oracle.device_of(evo),
        encode=lambda sample: evo2_oracle.encode(evo, sample.text or ""),
        num_bytes=len,
        logits=lambda _, tokens_BN: evo2_oracle.logits(evo, tokens_BN),
    )


def sha256_of_weights(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names and values of all weights, in sorted order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
