"""Small structure files for tests: ideal backbones written by hand as PDB and mmCIF, and where the shared ones lie."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from stability.corpora.proteins.alphabets import ONE_TO_THREE
from stability.corpora.proteins.synthetic import backbone

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "protein"
ATOMS = ("N", "CA", "C", "O", "CB")


def shared(name: str) -> Path:
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not in shared/data/protein")
    return SHARED / name


def members(name: str, suffix: str = "") -> dict[str, bytes]:
    with tarfile.open(shared(name)) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.name.endswith(suffix)}


def helix(num: int, angles=(-57.0, -47.0)) -> np.ndarray:
    """(num, 5, 3) N, CA, C, O, CB in Å."""
    return backbone([(float(angles[0]), float(angles[1]))] * num)


def atom_line(
    serial,
    atom,
    residue,
    chain,
    number,
    place,
    code=" ",
    alternate=" ",
    occupancy=1.0,
    bfactor=20.0,
    record="ATOM",
    element=None,
) -> str:
    name = atom if len(atom) == 4 else f" {atom:<3}"
    x, y, z = place
    return (
        f"{record:<6}{serial:>5} {name}{alternate}{residue:>3} {chain}{number:>4}{code}   {x:8.3f}{y:8.3f}{z:8.3f}"
        f"{occupancy:6.2f}{bfactor:6.2f}          {element or atom[0]:>2}"
    )


def residue_lines(letters, coords_NAX, chain="A", numbers=None, codes=None, **more) -> list[str]:
    numbers = numbers or range(1, len(letters) + 1)
    lines = []
    for row, (letter, number) in enumerate(zip(letters, numbers, strict=True)):
        name = ONE_TO_THREE.get(letter, letter) if isinstance(letter, str) else letter
        for atom, place in zip(ATOMS, coords_NAX[row], strict=True):
            if atom == "CB" and name == "GLY":
                continue
            lines.append(
                atom_line(len(lines) + 1, atom, name, chain, number, place, code=codes[row] if codes else " ", **more)
            )
    return lines


def pdb(*lines: str) -> bytes:
    return "\n".join([*lines, "END", ""]).encode()


def seqres(letters: str, chain="A") -> list[str]:
    names = [ONE_TO_THREE[letter] for letter in letters]
    rows = [names[start : start + 13] for start in range(0, len(names), 13)]
    return [f"SEQRES {row:>3} {chain} {len(names):>4}  {' '.join(part)}" for row, part in enumerate(rows, start=1)]


def cif(letters: str, coords_NAX, present=None, end="#\n") -> bytes:
    """One chain "B" (label "A") of one entity; residues outside of ``present`` have no coordinates. A ligand of the
    same chain stands at its end."""
    present = range(len(letters)) if present is None else present
    columns = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
        "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y"
    )
    columns += " Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num"
    rows = []
    for row in present:
        for atom, (x, y, z) in zip(ATOMS[:4], coords_NAX[row], strict=False):
            name = ONE_TO_THREE[letters[row]]
            rows.append(
                f"ATOM {len(rows) + 1} {atom[0]} {atom} . {name} A 1 {row + 1} ? {x:.3f} {y:.3f} {z:.3f} 1.0 50.0 "
                f"{row + 101} B 1"
            )
    rows.append(f"HETATM {len(rows) + 1} O O . HOH C 2 . ? 1.0 1.0 1.0 1.0 50.0 900 B 1")
    sequence = [f"1 {number} {ONE_TO_THREE[letter]} n" for number, letter in enumerate(letters, start=1)]
    parts = [
        "data_test",
        "#",
        "loop_",
        *(f"_entity_poly_seq.{name}" for name in ("entity_id", "num", "mon_id", "hetero")),
        *sequence,
        "#",
        "loop_",
    ]
    parts += ["_struct_ref.id", "_struct_ref.db_name", "_struct_ref.pdbx_db_accession", "1 UNP P12345", "#", "loop_"]
    parts += [f"_struct_ref_seq.{name}" for name in ("ref_id", "pdbx_strand_id", "seq_align_beg", "db_align_beg")] + [
        "1 B 1 201",
        "#",
        "loop_",
    ]
    return "\n".join([*parts, *(f"_atom_site.{name}" for name in columns.split()), *rows, end]).encode()
