"""Prepared corpora on disk, by fingerprint, and an index from what was read to the corpus it gave.

``cache_dir/<fingerprint>/`` holds a corpus; ``cache_dir/index/<key>`` names the fingerprint that a source's key led to.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from stability.config.parts import Part
from stability.corpora.base import AbstractCorpus
from stability.corpora.io import disk
from stability.corpora.tokens.corpus import Corpus
from stability.registry import Registry
from stability.runs.directory import write_atomically
from stability.runs.leftovers import remove_abandoned


def prepare(part: Part, cache_dir: Path) -> Any:
    """Return the corpus of a data source, tokenised only where ``cache_dir`` does not have it yet; memory-mapped from
    there.

    Any number of processes may do so at once. Errors: ``ValueError`` for data that cannot be read (nothing is written
    then) and for a cache that was damaged; ``RuntimeError`` where the cache cannot be written.
    """
    source = Registry("data").load(part.name)
    key = source.cache_key(part.settings)
    entry = None if key is None else cache_dir / "index" / _entry_name(part.name, source.corpus.version, key)
    if entry is not None and (fingerprint := _indexed(entry, cache_dir)):
        return load(cache_dir, fingerprint)
    try:
        # unnamed files lie on the cache's disk, and no folder is made for data that may be bad
        scratch = next(folder for folder in (cache_dir, *cache_dir.absolute().parents) if folder.is_dir())
        corpus = source.prepare(part.settings, scratch=scratch)
    except OSError as error:  # what the user gave is refused with a ValueError; this is our own disk
        raise RuntimeError(f"cannot prepare data beside {cache_dir}: {error.strerror or error}") from error
    if source.cache_key(part.settings) != key:
        raise ValueError(
            f"data: what data={part.name} reads changed while it was read; run again when nothing writes there"
        )
    try:
        corpus.save(cache_dir / corpus.fingerprint)
        if entry is not None:
            remove_abandoned(entry.parent)
            write_atomically(entry, f"{corpus.fingerprint}\n".encode("ascii"))
    except OSError as error:
        raise RuntimeError(f"cannot keep the prepared data under {cache_dir}: {error}") from error
    return load(cache_dir, corpus.fingerprint)


def prepare_for_plan(part: Part, cache_dir: Path) -> tuple[Any, bool]:
    """Return what a dry run works on: (corpus, whether it is the data itself). Data that would have to be downloaded
    stays where it is; random tokens of the same vocabulary stand for it unless ``cache_dir`` has it. Errors: as
    `prepare`."""
    source = Registry("data").load(part.name)
    stand_in = source.stand_in(part.settings)
    if stand_in is None:
        return prepare(part, cache_dir), True
    entry = _entry_name(part.name, source.corpus.version, source.cache_key(part.settings))
    fingerprint = _indexed(cache_dir / "index" / entry, cache_dir)
    return (stand_in, False) if fingerprint is None else (load(cache_dir, fingerprint), True)


def load(cache_dir: Path, fingerprint: str) -> Any:
    """Return a corpus that `prepare` left under ``cache_dir``, of the kind (`AbstractCorpus.kind`) that its folder
    says.

    Errors: ``ValueError`` where there is none, or not an intact one.
    """
    folder = cache_dir / fingerprint
    if not folder.is_dir():
        raise ValueError(
            f"no prepared data with the fingerprint {fingerprint} under {cache_dir}; a sweep on the same data makes it"
        )
    corpus = _class_of(disk.verified_meta(folder).get("kind", Corpus.kind), folder).load(folder)
    if corpus.fingerprint != fingerprint:
        raise ValueError(
            f"prepared data: {folder} holds another corpus ({corpus.fingerprint}).\nDelete {folder} and run again."
        )
    return corpus


def _class_of(kind: str, folder: Path) -> type[AbstractCorpus]:
    """Return the class of a kind of corpus: the one that a data source prepares. Errors: ``ValueError`` where none
    does."""
    if kind == Corpus.kind:
        return Corpus
    sources = (Registry("data").load(name) for name in Registry("data").names())
    found = next((source.corpus for source in sources if source.corpus.kind == kind), None)
    if found is None:
        raise ValueError(
            f"prepared data: {folder} holds {kind}, which no data source here prepares; name the plugin that does: "
            "plugins=[…]"
        )
    return found


def _entry_name(name: str, version: int, key: str) -> str:
    return hashlib.sha256(f"{name}\n{version}\n{key}".encode()).hexdigest()


def _indexed(entry: Path, cache_dir: Path) -> str | None:
    """Return the fingerprint behind an index entry; None where the corpus has to be prepared (again)."""
    try:
        fingerprint = entry.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return fingerprint if re.fullmatch(r"[0-9a-f]{64}", fingerprint) and (cache_dir / fingerprint).is_dir() else None
