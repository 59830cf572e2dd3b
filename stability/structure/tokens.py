"""Structure tokens of a protein corpus, computed once and cached beside its chains."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from stability.corpora.cache import load
from stability.corpora.io import bar, step
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.runs.directory import write_atomically
from stability.structure.crops import pad_chains
from stability.structure.tokenizer import PADDING, StructureTokenizer, load_tokenizer

# Increment if the same tokenizer would give the same chains other tokens.
VERSION = 1


def tokenise(corpus: ProteinCorpus, identity: str, pool: Path) -> ProteinCorpus:
    """Return the corpus with a tokenizer's structure tokens, cached in the pool.

    Args:
        corpus: the proteins.
        identity: id of the tokenizer.
        pool: pool of the tokenizer and the cache.

    Raises:
        ValueError: no such tokenizer is usable (`load_tokenizer`); one line.
    """
    tokenizer, cache_dir = load_tokenizer(pool, identity), pool / "cache"
    entry = (
        cache_dir
        / "index"
        / hashlib.sha256(f"structure tokens\n{VERSION}\n{corpus.fingerprint}\n{identity}".encode()).hexdigest()
    )
    known = entry.read_text(encoding="ascii").strip() if entry.exists() else None
    if known and (cache_dir / known).is_dir() and (cache_dir / corpus.fingerprint).is_dir():
        return load(cache_dir, known)
    made = corpus.with_structure(identity, tokenizer.num_tokens, structure_tokens(corpus, tokenizer))
    if not (cache_dir / corpus.fingerprint).is_dir():  # a dry run's stand-in is not cached
        return made
    made.save(cache_dir / made.fingerprint)
    entry.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(entry, f"{made.fingerprint}\n".encode("ascii"))
    return load(cache_dir, made.fingerprint)


def structure_tokens(corpus: ProteinCorpus, tokenizer: StructureTokenizer) -> np.ndarray:
    """Return one token per residue of all chains, training side first, int64.

    −1 if N, CA or C is missing. Each chain is tokenised whole and alone, regardless of the tokenizer's training length
    and of later crops: a token depends on the position of its residue in the chain.
    """
    found = []
    with bar("structure tokens", num_items=len(corpus.tables.ids)):
        for chain in (chain for split in ("train", "val") for chain in corpus.chains(split)):
            found.append(_encode_chain(chain, tokenizer))
            step()
    return np.concatenate(found)


def _encode_chain(chain: Any, tokenizer: StructureTokenizer) -> np.ndarray:
    if not chain.mask_N.any():
        return np.full(len(chain), PADDING, dtype=np.int64)
    residues = pad_chains([chain])
    return tokenizer.encode(residues.coords_BNAX, residues.mask_BN)[0].numpy()
