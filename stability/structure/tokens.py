"""Structure tokens of a corpus of proteins: computed once by a trained tokenizer, kept beside the prepared chains."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from stability.corpora.cache import load
from stability.corpora.io.progress import bar, step
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.runs.directory import write_atomically
from stability.structure.crops import padded
from stability.structure.tokenizer import PADDING, StructureTokenizer, load_tokenizer

# Raised when the same tokenizer would give the same chains other tokens.
VERSION = 1


def tokenised(corpus: ProteinCorpus, identity: str, pool: Path) -> ProteinCorpus:
    """Return the corpus with the structure tokens of a tokenizer of the pool, read from the pool's cache where this
    tokenizer has cut these chains before, else computed and kept there.

    Errors: ``ValueError`` of one line where there is no such tokenizer (`load_tokenizer`).
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
    if not (cache_dir / corpus.fingerprint).is_dir():  # a plan's stand-in, which is not kept
        return made
    made.save(cache_dir / made.fingerprint)
    entry.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(entry, f"{made.fingerprint}\n".encode("ascii"))
    return load(cache_dir, made.fingerprint)


def structure_tokens(corpus: ProteinCorpus, tokenizer: StructureTokenizer) -> np.ndarray:
    """Return a token for each residue of all chains, training side first, int64; −1 where N, CA or C is missing.

    Each chain is tokenised whole and by itself, whatever length the tokenizer was trained on and whatever part of the
    chain is read later: a token says where its residue stands in its chain.
    """
    found = []
    with bar("structure tokens", num_items=len(corpus.tables.ids)):
        for chain in (chain for split in ("train", "val") for chain in corpus.chains(split)):
            found.append(_of_chain(chain, tokenizer))
            step()
    return np.concatenate(found)


def _of_chain(chain: Any, tokenizer: StructureTokenizer) -> np.ndarray:
    if not chain.mask_N.any():
        return np.full(len(chain), PADDING, dtype=np.int64)
    residues = padded([chain])
    return tokenizer.encode(residues.coords_BNAX, residues.mask_BN)[0].numpy()
