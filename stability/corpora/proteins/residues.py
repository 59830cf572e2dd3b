"""Assign a file's residues to rows of their chain.

Residues without coordinates get rows in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stability.corpora.proteins.alphabets import ATOM14, NUM_ATOMS, PIECES, THREE_TO_ONE

AMBIGUOUS = {"ASX": "B", "GLX": "Z", "XLE": "J", "PYL": "O", "UNK": "X"}
RENAMED = {("MSE", "SE"): "SD"}
LONGEST_PEPTIDE_BOND = 2.0  # Å, between C and the next N
CA_STEP = 4.2  # Å: no two neighbouring CA are farther apart
LONGEST_GAP = 60  # residues; at a broken bond, numbers jumping by at least this begin another chain


class Reference(NamedTuple):
    """A UniProt accession, and the offset from a chain's residue numbers to the accession's."""

    accession: str
    offset: int


class LaidOutChain(NamedTuple):
    """A chain's residues assigned to N rows.

    Attributes:
        names: three-letter name of each row.
        numbers: int32, database number of each row.
        atoms: the chain's atoms (biotite ``AtomArray``).
        row_of_atom: row of each atom.
    """

    names: list[str]
    numbers: np.ndarray
    atoms: Any
    row_of_atom: np.ndarray


def lay_out(atoms: Any, sequence: list[str] | None, numbered: bool, reference: Reference | None) -> list[LaidOutChain]:
    """Return a chain's rows, or those of its pieces if it consists of several.

    With a fitting ``sequence``, its places are the rows. mmCIF numbers these. In a PDB file, residues are matched to
    SEQRES by their numbers up to one constant, else piece by piece at the earliest fit.

    Otherwise, numbers that jump over a broken peptide bond leave rows of unknown residues. At a broken bond another
    chain begins if numbers fall or jump by 60 or more, or if the distance is too long for the jump. Jumps over an
    intact bond and insertion codes leave no rows.

    Args:
        atoms: the chain's atoms (biotite ``AtomArray``).
        sequence: three-letter codes, or None.
        numbered: whether residue numbers are places in ``sequence``.
        reference: UniProt reference, or None.
    """
    starts, stops, names, numbers = _residues(atoms, numbered)
    bonded = _find_bonds(atoms, starts, stops)
    if not numbered:
        # a HETATM residue is in the chain only if bonded to a neighbour: free amino acids are ligands
        kept = ~atoms.hetero[starts] | bonded | np.append(bonded[1:], False)
        starts, stops, numbers = starts[kept], stops[kept], numbers[kept]
        names = [name for name, is_kept in zip(names, kept, strict=True) if is_kept]
        bonded = _find_bonds(atoms, starts, stops)
    if not len(starts):
        return []
    offset = reference.offset if reference else 0
    rows = numbers - 1 if numbered else _rows_in(sequence, names, numbers, bonded) if sequence else None
    if numbered and sequence is None:
        sequence = ["UNK"] * int(numbers.max())
    if rows is not None and sequence is not None and rows.min() >= 0 and rows.max() < len(sequence):
        database = np.arange(1, len(sequence) + 1) if numbered else _interpolate(rows, numbers, len(sequence))
        return [_assemble(atoms, starts, stops, names, rows, list(sequence), database + offset)]
    pieces = _pieces(_place(atoms, starts, stops, "CA"), numbers, bonded)
    return [
        _piece(atoms, starts[piece], stops[piece], names[piece], numbers[piece], bonded[piece], offset)
        for piece in pieces
    ]


def _residues(atoms: Any, numbered: bool) -> tuple[np.ndarray, np.ndarray, list[str], np.ndarray]:
    """Return (first atom, atom after the last, name, number) of each residue.

    Of alternate residues at one place, only the first is used.
    """
    from biotite.structure import get_residue_starts

    bounds = get_residue_starts(atoms, add_exclusive_stop=True)
    starts, stops = bounds[:-1], bounds[1:]
    keys = list(
        zip(
            atoms.res_id[starts].tolist(),
            ("" if numbered else code for code in atoms.ins_code[starts].tolist()),
            strict=True,
        )
    )
    # mmCIF: residues outside the polymer have no number
    first = [number >= 1 if numbered else True for number, _ in keys]
    first = [is_first and (at == 0 or keys[at] != keys[at - 1]) for at, is_first in enumerate(first)]
    chosen = np.flatnonzero(first)
    return (
        starts[chosen],
        stops[chosen],
        atoms.res_name[starts[chosen]].tolist(),
        atoms.res_id[starts[chosen]].astype(np.int64),
    )


def _place(atoms: Any, starts: np.ndarray, stops: np.ndarray, name: str) -> np.ndarray:
    """Return one atom's coordinates (num, 3) in each residue, NaN if missing."""
    place = np.full((len(starts), 3), np.nan)
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        found = np.flatnonzero(atoms.atom_name[start:stop] == name)
        if len(found):
            place[row] = atoms.coord[start + found[0]]
    return place


def _find_bonds(atoms: Any, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return whether each residue has a peptide bond to the previous one.

    A missing atom counts as no bond, but does not split a chain with consecutive numbers.
    """
    carbon, nitrogen = _place(atoms, starts, stops, "C"), _place(atoms, starts, stops, "N")
    bonded = np.zeros(len(starts), dtype=bool)
    bonded[1:] = np.linalg.norm(nitrogen[1:] - carbon[:-1], axis=1) < LONGEST_PEPTIDE_BOND
    return bonded


def _rows_in(sequence: list[str], names: list[str], numbers: np.ndarray, bonded: np.ndarray) -> np.ndarray | None:
    """Return each residue's place in SEQRES, or None without a match.

    Places must be in the residues' order.
    """
    places: dict[int, None] = {}
    for at, name in enumerate(sequence):
        if name == names[0]:
            places[int(numbers[0]) - at] = None
    for shift in places:
        rows = numbers - shift
        inside = rows[-1] < len(sequence) and (np.diff(rows) > 0).all()
        if inside and all(sequence[row] == name for row, name in zip(rows.tolist(), names, strict=True)):
            return rows
    return _earliest(sequence, names, bonded)


def _earliest(sequence: list[str], names: list[str], bonded: np.ndarray) -> np.ndarray | None:
    """Place bonded pieces in order at their earliest fit in ``sequence``; None if one fits nowhere."""
    rows, cursor = [], 0
    bounds = [0, *(np.flatnonzero(~bonded[1:]) + 1).tolist(), len(names)]
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        piece = names[start:stop]
        found = next(
            (at for at in range(cursor, len(sequence) - len(piece) + 1) if sequence[at : at + len(piece)] == piece),
            None,
        )
        if found is None:
            return None
        rows += range(found, found + len(piece))
        cursor = found + len(piece)
    return np.array(rows, dtype=np.int64)


def _interpolate(rows: np.ndarray, numbers: np.ndarray, num: int) -> np.ndarray:
    """Return all rows' numbers.

    Rows between two residues continue from the earlier one; rows before the first lead up to its number.
    """
    before = np.clip(np.searchsorted(rows, np.arange(num), side="right") - 1, 0, None)
    return numbers[before] + np.arange(num) - rows[before]


def _pieces(ca_NX: np.ndarray, numbers: np.ndarray, bonded: np.ndarray) -> list[slice]:
    jumps = np.diff(numbers)
    reach = np.linalg.norm(np.diff(ca_NX, axis=0), axis=1) > CA_STEP * np.maximum(jumps, 1)
    cut = ~bonded[1:] & ((jumps < 0) | (jumps >= LONGEST_GAP) | reach)
    bounds = [0, *(np.flatnonzero(cut) + 1).tolist(), len(numbers)]
    return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _piece(
    atoms: Any,
    starts: np.ndarray,
    stops: np.ndarray,
    names: list[str],
    numbers: np.ndarray,
    bonded: np.ndarray,
    offset: int,
) -> LaidOutChain:
    """Lay out residues by their numbers, with unknown residues for missing numbers."""
    gaps = np.where(bonded[1:], 0, np.maximum(np.diff(numbers) - 1, 0))
    rows = np.concatenate([[0], np.cumsum(gaps + 1)])
    sequence = ["UNK"] * (int(rows[-1]) + 1)
    return _assemble(atoms, starts, stops, names, rows, sequence, _interpolate(rows, numbers, len(sequence)) + offset)


def _assemble(
    atoms: Any,
    starts: np.ndarray,
    stops: np.ndarray,
    names: list[str],
    rows: np.ndarray,
    sequence: list[str],
    numbers: np.ndarray,
) -> LaidOutChain:
    """Return the residues with their names at ``rows``, and their atoms."""
    for row, name in zip(rows.tolist(), names, strict=True):
        sequence[row] = name
    lengths = stops - starts
    chosen = np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
    return LaidOutChain(sequence, numbers.astype(np.int32), atoms[chosen], np.repeat(rows, lengths))


def sequence_of(names: list[str]) -> str:
    """Return one letter a residue.

    A modified residue has its parent's letter by the chemical component dictionary, or X.
    """
    table = {name: THREE_TO_ONE.get(name) or AMBIGUOUS.get(name) or _parent(name) for name in set(names)}
    return "".join(table[name] for name in names)


def _parent(name: str) -> str:
    from biotite.structure.info import one_letter_code

    letter = one_letter_code(name)
    return letter if letter and len(letter) == 1 else "X"


def atoms14(residues: LaidOutChain, sequence: np.ndarray) -> np.ndarray:
    """Return the heavy atoms' coordinates (N, 14, 3), float32 in Å, NaN if missing.

    A residue without an order in `ATOM14` has N, CA, C, O and CB.
    """
    atoms_NAX = np.full((len(residues.names), NUM_ATOMS, 3), np.nan, dtype=np.float32)
    orders = {token: ATOM14.get(PIECES[token], (*ATOM14["A"],)) for token in set(sequence.tolist())}
    slots = {token: {atom: slot for slot, atom in enumerate(order)} for token, order in orders.items()}
    atoms, rows = residues.atoms, residues.row_of_atom
    tokens = sequence[rows].tolist()
    places = [
        slots[token].get(RENAMED.get((residue, atom)) or atom, -1)
        for token, residue, atom in zip(tokens, atoms.res_name.tolist(), atoms.atom_name.tolist(), strict=True)
    ]
    slot_P = np.array(places)
    atoms_NAX[rows[slot_P >= 0], slot_P[slot_P >= 0]] = atoms.coord[slot_P >= 0]
    return atoms_NAX
