"""The contract of every data source, as plain functions that raise AssertionError: the faults in `faults.py` prove that
each of them bites."""

from __future__ import annotations

import functools
import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stability.corpora.base import AbstractCorpus
from stability.data import AbstractDataSource

Source = type[AbstractDataSource]
POSITIONS = 16


@contextmanager
def without_network() -> Iterator[None]:
    """Refuse every connection but those within this machine's own files."""

    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"asks the network: {address}")

    with mock.patch.object(socket.socket, "connect", refuse), mock.patch.object(socket, "getaddrinfo", refuse):
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(batch: Any) -> list[Tensor]:
    given = batch if isinstance(batch, Tensor | tuple) else tuple(vars(batch).values())
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


@functools.lru_cache(maxsize=16)
def prepared(source: Source, config: Any) -> Any:
    """Return the corpus, prepared once for all checks but the one that prepares it anew."""
    return source.prepare(config)


def check_prepares_alike_without_network(source: Source, config: Any) -> None:
    with without_network():
        first, second = prepared(source, config), source.prepare(config)
        keys = source.cache_key(config), source.cache_key(config)
    assert first.fingerprint == second.fingerprint, "two preparations differ"
    assert keys[0] == keys[1], "the cache key changes by itself"
    assert isinstance(first, source.corpus) and first.kind == source.corpus.kind, "another corpus than it says"
    assert first.description and "\n" not in first.description


def check_sides_are_disjoint(source: Source, config: Any) -> None:
    """No document, record, image or chain is on both sides, and both have some."""
    corpus = prepared(source, config)
    train, held_out = (_items(corpus, split) for split in ("train", "val"))
    assert train and held_out, "a side is empty"
    assert not set(train) & set(held_out), "something is trained on and held out"


def _items(corpus: Any, split: str) -> list[bytes]:
    """Return what a side consists of, by its content."""
    if corpus.kind == "images":
        side = getattr(corpus, split)
        return [image.tobytes() for image in side.images_MHWC]
    if corpus.kind == "questions":
        return [row.tobytes() for row in getattr(corpus, split).tokens_MN]
    if corpus.kind == "sentences":
        numbers = getattr(corpus, split).rows_MS.flatten().astype(int).tolist()
        return [corpus.tokens[corpus.starts[each] : corpus.starts[each + 1]].tobytes() for each in numbers]
    if corpus.kind == "proteins":
        return [chain.letters.encode() for chain in corpus.chains(split)]
    tokens, borders = getattr(corpus, f"{split}_tokens"), getattr(corpus, f"{split}_borders")
    if borders is not None:
        pairs = zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
        return [tokens[start:stop].tobytes() for start, stop in pairs]
    return [document.encode() for document in corpus.decode(tokens).split("\0") if document]


def check_batches(source: Source, config: Any) -> None:
    """Batches are of the promised shape and kind, only the generator decides, windows are always the same, and parts
    make the whole."""
    corpus = prepared(source, config)
    json.dumps(corpus.format)
    corpus.require(POSITIONS)
    frequencies = corpus.log_frequencies()
    assert frequencies.dtype == torch.float64 and torch.isclose(frequencies.exp().sum(), torch.tensor(1.0).double())
    for split in ("train", "val"):
        batch = corpus.batch(split, 5, POSITIONS, generator())
        _check_kind(corpus, batch)
        again, other = (corpus.batch(split, 5, POSITIONS, generator(seed)) for seed in (0, 1))
        assert _equal(batch, again), "a batch depends on more than its generator"
        assert split == "val" or not _equal(batch, other), "every generator gives the same batch"
        assert _equal(*(corpus.windows(split, 3, POSITIONS) for _ in range(2))), "windows change"
        parts = [tensors(part) for part in batch.split(2)]
        if all(len(part) == len(parts[0]) for part in parts):
            whole = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
            assert all(map(torch.equal, whole, tensors(batch))), "the parts of a batch do not make it"


def _equal(first: Any, second: Any) -> bool:
    ours, theirs = tensors(first), tensors(second)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _check_kind(corpus: AbstractCorpus, batch: Any) -> None:
    if corpus.kind == "tokens":
        assert batch.shape == (5, POSITIONS) and batch.dtype == torch.int64, f"{batch.dtype} {tuple(batch.shape)}"
        assert batch.min() >= 0 and batch.max() < corpus.format, "a token outside of the vocabulary"
    elif corpus.kind == "images":
        sizes = tuple(corpus.format[key] for key in ("height", "width", "channels"))
        assert batch.images_BHWC.shape == (5, *sizes) and batch.images_BHWC.dtype == torch.uint8
        assert batch.labels_B.dtype == torch.int64 and batch.labels_B.min() >= 0
        assert batch.labels_B.max() < corpus.format["classes"], "a label that is no class"
    elif corpus.kind == "questions":
        assert batch.tokens_BN.shape == batch.answers_BN.shape == (5, POSITIONS)
        assert batch.tokens_BN.dtype == batch.answers_BN.dtype == torch.int64
        assert batch.tokens_BN.min() >= 0 and batch.answers_BN.min() == -1, "something is asked everywhere"
        assert max(batch.tokens_BN.max(), batch.answers_BN.max()) < corpus.format, "a token outside of the vocabulary"
        assert (batch.answers_BN >= 0).any(1).all(), "a sequence asks nothing"
    elif corpus.kind == "sentences":
        shape = (5, corpus.format["sentences"], POSITIONS)
        assert batch.tokens_BSN.shape == batch.mask_BSN.shape == shape and batch.tokens_BSN.dtype == torch.int64
        assert batch.mask_BSN.any(-1).all(), "an empty sentence"
        assert (batch.tokens_BSN[~batch.mask_BSN] == corpus.format["vocab_size"]).all(), "padding is another token"
        assert batch.tokens_BSN[batch.mask_BSN].max() < corpus.format["vocab_size"], "a token outside of the vocabulary"
        assert batch.scores_B.abs().max() <= 1 and (corpus.format["scored"] or (batch.scores_B == 1).all())
    else:
        assert corpus.kind == "proteins", f"no check for corpora of {corpus.kind}"
        assert len(batch.ids) == 5 and batch.residues_BN.shape[1] <= POSITIONS
        assert batch.sequence_BN.dtype == torch.int64 and batch.sequence_BN.max() < corpus.format["sequence"]
        assert batch.atoms14_BNAX.isfinite().all(), "a coordinate is not finite"


def check_survives_its_folder(source: Source, config: Any) -> None:
    corpus = prepared(source, config)
    with tempfile.TemporaryDirectory() as place:
        corpus.save(Path(place) / "corpus")
        loaded = source.corpus.load(Path(place) / "corpus")
        assert loaded.fingerprint == corpus.fingerprint and loaded.format == corpus.format
        for split in ("train", "val"):
            ours, theirs = (each.batch(split, 4, POSITIONS, generator()) for each in (corpus, loaded))
            assert _equal(ours, theirs), "a corpus that was saved gives other batches"


def check_setting_shows(source: Source, base: Any, changed: Any) -> None:
    """Another value gives another corpus, and another key in the cache; or is refused where there is nothing that it
    could read."""
    first = prepared(source, base).fingerprint
    try:
        second = prepared(source, changed).fingerprint
    except ValueError as error:
        assert 0 < len(str(error).splitlines()) <= 2, "a refusal is one or two lines"
        return
    assert first != second, "the setting changes nothing"
    assert source.cache_key(base) != source.cache_key(changed), "the cache would give the corpus of the other setting"
