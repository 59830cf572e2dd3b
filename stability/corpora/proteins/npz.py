"""Chains in ``.npz`` files: prepared shards, and plain collections of backbones or CA traces.

numpy alone reads them. Every layout concatenates its chains: with one row a residue, chain i is
``array[offsets[i]:offsets[i + 1]]``.

- *A shard* (``format`` is `FORMAT`): ``ids``, ``groups``, ``accessions`` (text, one a chain), ``offsets`` (int64),
  ``sequence`` (uint8 tokens of `alphabets.PIECES`), ``atoms14`` (float32, n × 14 × 3 Å, NaN if missing), ``ss`` (uint8,
  number in `SS_CLASSES`, 255 unknown), ``sasa`` (float32 Å²), ``plddt`` (float32), both NaN if unknown, ``numbers``
  (int32). ``skipped_names`` and ``skipped_reasons`` list skipped files.
- *Backbones*: ``ids``, ``offsets``, ``seq`` (uint8, ASCII), ``coords`` (float32, n × 5 × 3: N, CA, C, O, CB),
  optionally ``sasa``, ``resnum``. Secondary structure is derived; ``ss3`` is not used.
- *Traces*: the same with ``ca`` (n × 3) for ``coords``. An optional ``ss8`` (uint8, ASCII, - unknown) is the secondary
  structure.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stability.corpora.io.files import make_truncation_error, refuse_larger_than_memory
from stability.corpora.proteins import dssp
from stability.corpora.proteins.alphabets import NO_SS, NUM_ATOMS, SS_CLASSES, VOCAB_SIZE, encode, encode_ss
from stability.corpora.proteins.chain import ProteinChain
from stability.corpora.proteins.parsing import LARGEST_FLAT, PROLINE, group_of
from stability.runs.leftovers import name_temporary

FORMAT = "stability protein shard 1"
_PER_RESIDUE = {
    "sequence": "sequence",
    "atoms14": "atoms14_NAX",
    "ss": "ss_N",
    "sasa": "sasa_N",
    "plddt": "plddt_N",
    "numbers": "numbers_N",
}
_TEXTS = {"ids": "id", "groups": "group", "accessions": "accession"}
# accepted dtype kinds of each array: i, u integers, f floating point
_KINDS: dict[str, str] = dict.fromkeys(("offsets", "seq", "ss8", "sequence", "ss", "resnum", "numbers"), "iu")
_KINDS |= dict.fromkeys(("coords", "ca", "atoms14", "sasa", "plddt"), "fiu")


def write_shard(file: Path, chains: Sequence[ProteinChain], skipped: Iterable[tuple[str, str]]) -> None:
    """Write a shard atomically: a temporary neighbour is synced and renamed.

    Args:
        file: the shard's path.
        chains: its chains.
        skipped: (file or chain, reason) of unusable ones.

    Raises:
        OSError: from the disk.
    """
    arrays: dict[str, Any] = {
        name: np.array([getattr(chain, attribute) for chain in chains], dtype=str) for name, attribute in _TEXTS.items()
    }
    arrays["offsets"] = np.cumsum([0, *map(len, chains)], dtype=np.int64)
    empty = {
        "sequence": np.empty(0, np.uint8),
        "atoms14": np.empty((0, NUM_ATOMS, 3), np.float32),
        "ss": np.empty(0, np.uint8),
    }
    for name, attribute in _PER_RESIDUE.items():
        start = empty.get(name, np.empty(0, np.int32 if name == "numbers" else np.float32))
        arrays[name] = np.concatenate([start, *(getattr(chain, attribute).astype(start.dtype) for chain in chains)])
    names, reasons = zip(*skipped, strict=True) if (skipped := list(skipped)) else ((), ())
    arrays |= {
        "format": np.array(FORMAT),
        "skipped_names": np.array(names, dtype=str),
        "skipped_reasons": np.array(reasons, dtype=str),
    }
    partial = name_temporary(file)
    with open(partial, "wb") as stream:
        np.savez_compressed(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def read_npz(file: Path, min_residues: int = 0) -> tuple[list[ProteinChain], list[tuple[str, str]]]:
    """Return (chains, (file or chain, reason) of skipped ones) from any layout.

    A chain is skipped if it has impossible coordinates, or fewer than ``min_residues`` residues with coordinates.

    Raises:
        ValueError: the file is invalid; the message names the file and the fault.
    """
    refuse_larger_than_memory(file)
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    # TypeError: a single array, as written by np.save; MemoryError: a huge size in the header
    except (OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise make_truncation_error(file, error) from None
    missing = {"ids", "offsets"} - set(arrays)
    if missing or not ({"coords", "seq"} <= set(arrays) or {"ca", "seq"} <= set(arrays) or "format" in arrays):
        raise ValueError(
            f"data.path: {file} holds {', '.join(arrays) or 'nothing'}; proteins need ids, offsets, seq and coords "
            "or ca, or a prepared shard"
        )
    _check_kinds(file, arrays)
    _check_offsets(file, arrays)
    if "format" not in arrays:
        found, skipped = list(_plain(file, arrays)), []
    else:
        _check_shard(file, arrays)
        found = list(_shard_chains(arrays))
        skipped = list(zip(arrays["skipped_names"].tolist(), arrays["skipped_reasons"].tolist(), strict=True))
    judged = [(chain, _fault(chain, min_residues)) for chain in found]
    return [chain for chain, fault in judged if not fault], [
        *skipped,
        *((chain.id, fault) for chain, fault in judged if fault),
    ]


def _check_kinds(file: Path, arrays: dict[str, np.ndarray]) -> None:
    for name in ("ids", *_KINDS):
        kinds = _KINDS.get(name, "USiu")
        if name in arrays and (arrays[name].ndim == 0 or arrays[name].dtype.kind not in kinds):
            what = {"U": "text", "i": "whole numbers", "f": "numbers"}[kinds[0]]
            raise ValueError(
                f"data.path: {file}: {name} holds {arrays[name].ndim}-D {arrays[name].dtype}; {what}, a row each, "
                "are read"
            )


def _check_shard(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Check a prepared shard.

    Raises:
        ValueError: the shard has another format, lacks an array, or has numbers out of range.
    """
    if str(arrays["format"]) != FORMAT:
        raise ValueError(f"data.path: {file} is a '{arrays['format']}'; this program reads '{FORMAT}'")
    missing = [name for name in (*_TEXTS, *_PER_RESIDUE, "skipped_names", "skipped_reasons") if name not in arrays]
    if missing:
        raise ValueError(
            f"data.path: {file} is a prepared shard without {', '.join(missing)}; write it with all of its arrays"
        )
    if arrays["atoms14"].shape[1:] != (NUM_ATOMS, 3):
        raise ValueError(
            f"data.path: {file}: atoms14 of a prepared shard is n × {NUM_ATOMS} × 3, not "
            f"{' × '.join(map(str, arrays['atoms14'].shape))}"
        )
    if (arrays["sequence"] >= VOCAB_SIZE).any() or not np.isin(arrays["ss"], (*range(len(SS_CLASSES)), NO_SS)).all():
        raise ValueError(
            f"data.path: {file}: sequence of a prepared shard holds 0 to {VOCAB_SIZE - 1}, ss 0 to "
            f"{len(SS_CLASSES) - 1} or {NO_SS}"
        )


def _fault(chain: ProteinChain, min_residues: int) -> str:
    """Say why a chain cannot be used; "" if it can."""
    there_NA = ~np.isnan(chain.atoms14_NAX).any(axis=-1)
    observed, atoms = int(there_NA.any(axis=-1).sum()), chain.atoms14_NAX[there_NA]
    if observed < min_residues:
        return f"{observed} residues with coordinates, fewer than data.min_residues={min_residues}"
    if not np.isfinite(atoms).all():
        return "coordinates that are no numbers"
    if len(atoms) > 1 and np.ptp(atoms, axis=0).max() < LARGEST_FLAT:
        return f"all coordinates are equal ({', '.join(f'{value:g}' for value in atoms[0])})"
    return ""


def _check_offsets(file: Path, arrays: dict[str, np.ndarray]) -> None:
    offsets, num = arrays["offsets"], len(arrays["ids"])
    per_residue = [name for name in (*_PER_RESIDUE, "seq", "coords", "ca", "ss8", "resnum") if name in arrays]
    lengths = {name: len(arrays[name]) for name in per_residue}
    fits = offsets.ndim == 1 and len(offsets) == num + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
    if not fits or any(length != offsets[-1] for length in lengths.values()):
        raise ValueError(f"data.path: {file}: its offsets do not cut {lengths} rows into {num} chains")


def _shard_chains(arrays: dict[str, np.ndarray]) -> Iterator[ProteinChain]:
    for number, (start, stop) in enumerate(zip(arrays["offsets"][:-1], arrays["offsets"][1:], strict=True)):
        values: dict[str, Any] = {attribute: arrays[name][start:stop] for name, attribute in _PER_RESIDUE.items()}
        values |= {attribute: str(arrays[name][number]) for name, attribute in _TEXTS.items()}
        yield ProteinChain(**{**values, "sequence": values["sequence"].astype(np.int64)})


def _plain(file: Path, arrays: dict[str, np.ndarray]) -> Iterator[ProteinChain]:
    """Yield the chains of backbones or CA traces; missing quantities are unknown."""
    shape = arrays["coords"].shape[1:] if "coords" in arrays else arrays["ca"].shape[1:]
    if shape not in ((5, 3), (3,)):
        raise ValueError(
            f"data.path: {file}: coords are n × 5 × 3 (N, CA, C, O, CB) or ca n × 3, not "
            f"{' × '.join(map(str, shape))} a residue"
        )
    for number, (start, stop) in enumerate(
        zip(arrays["offsets"][:-1].tolist(), arrays["offsets"][1:].tolist(), strict=True)
    ):
        sequence = encode(arrays["seq"][start:stop].astype(np.uint8).tobytes().decode("latin-1")).astype(np.int64)
        atoms_NAX = np.full((stop - start, NUM_ATOMS, 3), np.nan, dtype=np.float32)
        if "coords" in arrays:
            atoms_NAX[:, :5] = arrays["coords"][start:stop]
        else:
            atoms_NAX[:, 1] = arrays["ca"][start:stop]
        unknown = np.full(stop - start, np.nan, dtype=np.float32)
        name = str(arrays["ids"][number])
        yield ProteinChain(
            id=name,
            group=group_of(name, ""),
            sequence=sequence,
            atoms14_NAX=atoms_NAX,
            ss_N=_ss(arrays, start, stop, atoms_NAX, sequence),
            sasa_N=arrays["sasa"][start:stop].astype(np.float32) if "sasa" in arrays else unknown,
            plddt_N=unknown,
            numbers_N=(arrays["resnum"][start:stop] if "resnum" in arrays else np.arange(1, stop - start + 1)).astype(
                np.int32
            ),
        )


def _ss(
    arrays: dict[str, np.ndarray], start: int, stop: int, atoms_NAX: np.ndarray, sequence: np.ndarray
) -> np.ndarray:
    if "ss8" in arrays:
        return encode_ss(arrays["ss8"][start:stop].astype(np.uint8).tobytes().decode("latin-1"))
    return (
        dssp.assign(atoms_NAX, sequence == PROLINE)
        if "coords" in arrays
        else np.full(stop - start, NO_SS, dtype=np.uint8)
    )
