"""Atoms as mmCIF text, for any structure viewer."""

from __future__ import annotations

import numpy as np

from stability.corpora.proteins.alphabets import ATOM14, BACKBONE, ONE_TO_THREE, decode

COLUMNS = (
    "group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id",
    "label_entity_id", "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy",
    "B_iso_or_equiv", "auth_seq_id", "auth_comp_id", "auth_asym_id", "auth_atom_id", "pdbx_PDB_model_num",
)  # fmt: skip
UNKNOWN = "UNK"  # mmCIF's name of an unknown residue; only its backbone is written


def atom_names(letter: str) -> tuple[str, ...]:
    """Return the heavy atoms of a residue in the order of atom14."""
    return ATOM14.get(letter, (*BACKBONE, "O"))


def mmcif(name: str, sequence: np.ndarray, atoms_NAX: np.ndarray) -> str:
    """Return one chain A as mmCIF text.

    Args:
        name: name of the data block.
        sequence: residue tokens (N,).
        atoms_NAX: (N, up to 14, 3) in Å. Omitted: atoms with NaN, and places unused by the kind of residue.
    """
    block = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name) or "chain"
    rows: list[str] = []
    for number, (letter, atoms_AX) in enumerate(zip(decode(sequence), atoms_NAX, strict=True), 1):
        kind = ONE_TO_THREE.get(letter, UNKNOWN)
        for atom, place_X in zip(atom_names(letter), atoms_AX, strict=False):
            if np.isfinite(place_X).all():
                place, element = " ".join(f"{value:.3f}" for value in place_X), "SE" if atom == "SE" else atom[0]
                rows.append(
                    f"ATOM {len(rows) + 1} {element} {atom} . {kind} A 1 {number} ? {place} 1.00 0.00 {number} "
                    f"{kind} A {atom} 1"
                )
    head = [f"data_{block}", "#", "_entry.id " + block, "#", "loop_", *(f"_atom_site.{column}" for column in COLUMNS)]
    return "\n".join([*head, *rows, "#", ""])
