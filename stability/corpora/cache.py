"""Cache of prepared corpora on disk, with an index by source.

``cache_dir/<fingerprint>/`` contains a corpus. ``cache_dir/index/<key>`` contains the fingerprint for a source's key.
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
    """Return a data source's corpus, memory-mapped from the cache.

    The data are prepared first if ``cache_dir`` lacks them. Several processes may call this at once.

    Raises:
        ValueError: the data cannot be read (nothing is written then), or the cache is damaged.
        RuntimeError: the cache cannot be written.
    """
    source = Registry("data").load(part.name)
    key = source.cache_key(part.settings)
    entry = None if key is None else cache_dir / "index" / _entry_name(part.name, source.corpus.version, key)
    if entry is not None and (fingerprint := _read_index_entry(entry, cache_dir)):
        return load(cache_dir, fingerprint)
    try:
        # unnamed files must be on the cache's disk, but invalid data should not create the cache's folder
        scratch = next(folder for folder in (cache_dir, *cache_dir.absolute().parents) if folder.is_dir())
        corpus = source.prepare(part.settings, scratch=scratch)
    except OSError as error:  # errors in the user's files are ValueErrors; this one is from our own disk
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
    """Return (corpus, whether it is the real data) for a dry run.

    Data are not downloaded. Unless ``cache_dir`` has them, random tokens with the same vocabulary replace them. They
    also replace data that are slow to parse if the pool, the parent of ``cache_dir``, does not exist: it has no runs.

    Raises:
        ValueError: as `prepare`.
        RuntimeError: as `prepare`.
    """
    source = Registry("data").load(part.name)
    stand_in = source.stand_in(part.settings)
    if stand_in is None or (not source.downloads and cache_dir.parent.exists()):
        return prepare(part, cache_dir), True
    entry = _entry_name(part.name, source.corpus.version, source.cache_key(part.settings))
    fingerprint = _read_index_entry(cache_dir / "index" / entry, cache_dir)
    return (stand_in, False) if fingerprint is None else (load(cache_dir, fingerprint), True)


def load(cache_dir: Path, fingerprint: str) -> Any:
    """Return a prepared corpus from ``cache_dir``; its folder defines its kind.

    Raises:
        ValueError: there is no such corpus, or it is damaged.
    """
    folder = cache_dir / fingerprint
    if not folder.is_dir():
        raise ValueError(
            f"no prepared data with the fingerprint {fingerprint} under {cache_dir}; a sweep on the same data makes it"
        )
    corpus = _class_of(disk.read_verified_meta(folder).get("kind", Corpus.kind), folder).load(folder)
    if corpus.fingerprint != fingerprint:
        raise ValueError(
            f"prepared data: {folder} holds another corpus ({corpus.fingerprint}).\nDelete {folder} and run again."
        )
    return corpus


def _class_of(kind: str, folder: Path) -> type[AbstractCorpus]:
    """Return the class for a kind of corpus, from the data sources.

    Raises:
        ValueError: no data source prepares this kind.
    """
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


def _read_index_entry(entry: Path, cache_dir: Path) -> str | None:
    """Return an index entry's fingerprint, or None if its corpus is missing."""
    try:
        fingerprint = entry.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return fingerprint if re.fullmatch(r"[0-9a-f]{64}", fingerprint) and (cache_dir / fingerprint).is_dir() else None
