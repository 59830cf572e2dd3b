"""Parse a PDB or mmCIF file to protein chains with their tracks, by biotite.

Used from a file: the first model, amino acids only (no water, ligands, nucleic acids), and in each residue the
alternate location with the highest occupancy. A modified residue counts as its parent: selenomethionine as methionine,
with selenium as the sulphur.
"""

from __future__ import annotations

import io
import re
import warnings
from typing import Any, NamedTuple

import numpy as np

from stability.corpora.proteins import dssp
from stability.corpora.proteins.alphabets import LETTERS, SPECIALS, encode
from stability.corpora.proteins.chain import ProteinChain
from stability.corpora.proteins.residues import LaidOutChain, Reference, atoms14, lay_out, sequence_of
from stability.printable import line_of

SUFFIXES = tuple(kind + packed for kind in (".pdb", ".ent", ".cif", ".mmcif") for packed in ("", ".gz"))
LARGEST_FLAT = 1e-3  # Å; a chain with a smaller extent has no usable coordinates
ALPHAFOLD = re.compile(r"^AF-([A-Z0-9]+)(?:-\d+)?-F\d+", re.IGNORECASE)
PDB_CODE = re.compile(r"^(?:pdb)?([0-9][a-z0-9]{3})(?![a-z0-9])", re.IGNORECASE)
PREDICTED = re.compile(r"ALPHAFOLD|ESMFOLD|ROSETTAFOLD|COLABFOLD|PREDICTION FOR")
PROLINE = len(SPECIALS) + LETTERS.index("P")


class Entry(NamedTuple):
    """One file's content.

    Attributes:
        atoms: all chains' atoms, a biotite ``AtomArray`` with ``b_factor``.
        sequences: three-letter codes by chain name.
        references: UniProt references by chain name.
        is_model: whether the file names itself a predicted model.
    """

    atoms: Any
    sequences: dict[str, list[str]]
    references: dict[str, Reference]
    is_model: bool
    numbered: bool  # residue numbers are places in ``sequences``


def parse(name: str, content: bytes, plddt: str, min_residues: int) -> tuple[list[ProteinChain], list[str]]:
    """Return (chains, reasons for skipped ones).

    Args:
        name: the file's name, with suffix.
        content: its unpacked bytes.
        plddt: "auto": the B-factor is pLDDT if the file names itself a model; "always"; "never".
        min_residues: fewest residues with coordinates in a chain.

    Raises:
        ValueError: nothing in the file can be used; the message gives the reason in a few words.
        ImportError: biotite is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about guessed elements and ignored boxes, both unused here
        entry = _read_cif(content) if re.search(r"\.(mm)?cif$", name, re.IGNORECASE) else _read_pdb(content)
        stem = re.sub(r"\.(pdb|ent|cif|mmcif)$", "", name, flags=re.IGNORECASE)
        return _chains(stem, entry, entry.is_model if plddt == "auto" else plddt == "always", min_residues)


def group_of(stem: str, accession: str) -> str:
    """Return the group shared by one protein's entries.

    This is a PDB code in lower case, a UniProt accession, or else the entry's name.
    """
    if found := ALPHAFOLD.match(stem):
        return found[1].upper()
    if found := PDB_CODE.match(stem):
        return found[1].lower()
    return accession or stem


def _read_cif(content: bytes) -> Entry:
    """Read an mmCIF file's first model with its sequences and references.

    Raises:
        ValueError: the file is cut short or invalid.
    """
    from biotite import DeserializationError, InvalidFileError
    from biotite.structure.io import pdbx

    text = content.decode("utf-8", "replace")
    if "\n#" in text and not text.rstrip().endswith("#"):
        raise ValueError("cut short: the last category is not closed by '#'")
    try:
        file = pdbx.CIFFile.read(io.StringIO(text))
        fields = ["b_factor", "auth_asym_id", "auth_seq_id", "label_entity_id"]
        block = file.block
        altloc = "occupancy" if "occupancy" in block.get("atom_site", {}) else "first"
        atoms = pdbx.get_structure(file, model=1, altloc=altloc, use_author_fields=False, extra_fields=fields)
        sequences, references = _cif_sequences(block, atoms), _cif_references(block)
    except (InvalidFileError, DeserializationError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"cut short or no mmCIF file ({_short(error)})") from None
    return Entry(atoms, sequences, references, "ma_model_list" in block or "ma_qa_metric" in block, True)


def _cif_sequences(block: Any, atoms: Any) -> dict[str, list[str]]:
    """Return each chain's three-letter codes by ``label_asym_id``.

    Residues without coordinates are included.
    """
    if "entity_poly_seq" not in block:
        return {}
    table = block["entity_poly_seq"]
    entities: dict[str, dict[int, str]] = {}
    for entity, number, residue in zip(
        table["entity_id"].as_array(str), table["num"].as_array(int), table["mon_id"].as_array(str), strict=True
    ):
        entities.setdefault(entity, {}).setdefault(int(number), residue)  # the first residue at a place
    chains = dict(zip(atoms.chain_id.tolist(), atoms.label_entity_id.tolist(), strict=True))
    complete = {
        entity: [places[at] for at in sorted(places)]
        for entity, places in entities.items()
        if sorted(places) == list(range(1, len(places) + 1))
    }
    return {chain: complete[entity] for chain, entity in chains.items() if entity in complete}


def _cif_references(block: Any) -> dict[str, Reference]:
    """Return each chain's reference by the author's chain name.

    The offset maps the chain's residue numbers to the accession's sequence.
    """
    if "struct_ref" not in block or "struct_ref_seq" not in block:
        return {}
    rows, accessions = block["struct_ref_seq"], block["struct_ref"]
    if not {"ref_id", "pdbx_strand_id", "seq_align_beg", "db_align_beg"} <= set(rows) or not {
        "id",
        "db_name",
        "pdbx_db_accession",
    } <= set(accessions):
        return {}
    columns = (accessions[name].as_array(str) for name in ("id", "db_name", "pdbx_db_accession"))
    uniprot = {ref: accession for ref, name, accession in zip(*columns, strict=True) if name == "UNP"}
    found: dict[str, Reference] = {}
    columns = (rows[name].as_array(str) for name in ("ref_id", "pdbx_strand_id", "seq_align_beg", "db_align_beg"))
    for ref, chain, begin, database in zip(*columns, strict=True):
        if ref in uniprot and begin.lstrip("-").isdigit() and database.lstrip("-").isdigit():
            found.setdefault(chain, Reference(uniprot[ref], int(database) - int(begin)))
    return found


def _read_pdb(content: bytes) -> Entry:
    """Read a PDB file's first model with its sequences and references.

    Raises:
        ValueError: the file is cut short or invalid.
    """
    from biotite import InvalidFileError
    from biotite.structure.io import pdb

    text = content.decode("latin-1")
    lines = text.splitlines()
    if not any(map(_is_atom, lines)):
        raise ValueError("no atom in it")
    lines = _fill_columns(lines)
    try:
        atoms = pdb.PDBFile.read(io.StringIO("\n".join(lines))).get_structure(
            model=1, altloc="occupancy", extra_fields=["b_factor"]
        )
    except (InvalidFileError, ValueError, IndexError) as error:
        raise ValueError(f"cut short or no PDB file ({_short(error)})") from None
    sequences: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("SEQRES"):
            sequences.setdefault(line[11:12].strip(), []).extend(line[19:70].split())
    heading = " ".join(line[10:] for line in lines if line.startswith(("TITLE", "REMARK", "EXPDTA")))
    return Entry(atoms, sequences, _pdb_references(lines), bool(PREDICTED.search(heading.upper())), False)


def _fill_columns(lines: list[str]) -> list[str]:
    """Return a PDB file's lines with a missing column filled in.

    Atoms get full occupancy or an unknown B-factor.

    Raises:
        ValueError: only some atoms have the column.
    """
    for what, start, fill in (("occupancy", 54, "  1.00"), ("B-factor", 60, "   nan")):
        has = [not _is_atom(line) or bool(line[start : start + 6].strip()) for line in lines]
        if all(has):
            continue
        if any(is_there for line, is_there in zip(lines, has, strict=True) if _is_atom(line)):
            place = f"line {has.index(False) + 1} has no {what}, which other atoms have"
            raise ValueError(f"cut short or no PDB file ({place})")
        lines = [
            line if is_there else f"{line:<{start}}"[:start] + fill + line[start + 6 :]
            for line, is_there in zip(lines, has, strict=True)
        ]
    return lines


def _is_atom(line: str) -> bool:
    return line.startswith(("ATOM  ", "HETATM"))


def _pdb_references(lines: list[str]) -> dict[str, Reference]:
    """Return the references by chain.

    Ten-letter accessions are in DBREF1 and DBREF2. AlphaFold's models write them into DBREF, shifting the following
    columns.
    """
    found: dict[str, Reference] = {}
    begins: dict[str, int] = {}
    for line in lines:
        chain, begin, words = line[12:13].strip(), line[14:18].strip(), line[33:].split()
        if line.startswith("DBREF2") and chain in begins and line[45:55].strip().isdigit():
            found.setdefault(chain, Reference(line[18:40].strip(), int(line[45:55]) - begins[chain]))
        elif not line.startswith("DBREF") or line[26:32].strip() != "UNP" or not begin.lstrip("-").isdigit():
            continue
        elif line.startswith("DBREF1"):
            begins.setdefault(chain, int(begin))
        elif len(words) > 3 and (place := words[2] if len(words[0]) > 8 else line[55:60].strip()).isdigit():
            found.setdefault(chain, Reference(words[0], int(place) - int(begin)))
    return found


def _chains(stem: str, entry: Entry, is_model: bool, min_residues: int) -> tuple[list[ProteinChain], list[str]]:
    """Return an entry's usable chains, and reasons for the others.

    Raises:
        ValueError: no chain is usable.
    """
    from biotite.structure import filter_amino_acids

    chains, reasons = [], []
    acids = entry.atoms[filter_amino_acids(entry.atoms)]
    names = list(dict.fromkeys(acids.chain_id.tolist()))
    for name in names:
        atoms = acids[acids.chain_id == name]
        author = str(atoms.auth_asym_id[0]) if entry.numbered else name
        pieces = lay_out(atoms, entry.sequences.get(name), entry.numbered, entry.references.get(author))
        for number, residues in enumerate(pieces, start=1):
            label = f"{stem}_{author or 'A'}" + (f".{number}" if len(pieces) > 1 else "")
            try:
                chains.append(_chain(label, stem, residues, entry.references.get(author), is_model, min_residues))
            except ValueError as error:
                reasons.append(f"chain {label.removeprefix(stem + '_')}: {error}")
    if not chains:
        kinds = ", ".join(sorted(set(entry.atoms.res_name.tolist()))[:5])
        raise ValueError("; ".join(reasons) if reasons else f"no chain of amino acids (it holds {kinds})")
    return chains, reasons


def _chain(
    label: str, stem: str, residues: LaidOutChain, reference: Reference | None, is_model: bool, min_residues: int
) -> ProteinChain:
    """Build one chain.

    Raises:
        ValueError: the chain is too short or its coordinates are invalid.
    """
    observed = len(np.unique(residues.row_of_atom))
    if observed < min_residues:
        raise ValueError(f"{observed} residues with coordinates, fewer than data.min_residues={min_residues}")
    coordinates = residues.atoms.coord
    if not np.isfinite(coordinates).all():
        raise ValueError("coordinates that are no numbers")
    if np.ptp(coordinates, axis=0).max() < LARGEST_FLAT:
        raise ValueError(f"all coordinates are equal ({', '.join(f'{value:g}' for value in coordinates[0])})")
    sequence = encode(sequence_of(residues.names)).astype(np.int64)
    atoms_NAX = atoms14(residues, sequence)
    found = ALPHAFOLD.match(stem)
    accession = found[1].upper() if found else reference.accession if reference else ""
    return ProteinChain(
        id=label,
        group=group_of(stem, accession),
        sequence=sequence,
        atoms14_NAX=atoms_NAX,
        ss_N=dssp.assign(atoms_NAX, sequence == PROLINE),
        sasa_N=areas(residues),
        plddt_N=_plddt(residues, is_model),
        numbers_N=residues.numbers,
        accession=accession,
    )


def areas(residues: LaidOutChain) -> np.ndarray:
    """Return each residue's solvent-accessible area in Å², float32, NaN without coordinates.

    From biotite (Shrake–Rupley, 1,000 points, probe 1.4 Å, ProtOr radii), on this chain alone.
    """
    from biotite import structure

    # compiled, so invisible to a type checker; hydrogens have no own area
    area_P = np.nan_to_num(structure.sasa(residues.atoms))  # pyright: ignore[reportAttributeAccessIssue]
    num = len(residues.names)
    seen_N = np.bincount(residues.row_of_atom, minlength=num) > 0
    return np.where(seen_N, np.bincount(residues.row_of_atom, weights=area_P, minlength=num), np.nan).astype(np.float32)


def _plddt(residues: LaidOutChain, is_model: bool) -> np.ndarray:
    plddt_N = np.full(len(residues.names), np.nan, dtype=np.float32)
    if is_model:
        values = residues.atoms.b_factor
        if values.min() < 0 or values.max() > 100:
            raise ValueError(
                f"B-factors of {values.min():g} to {values.max():g} are no pLDDT (0 to 100); data.plddt=never leaves "
                "them out"
            )
        plddt_N[residues.row_of_atom] = values
    return plddt_N


def _short(error: Exception) -> str:
    text = line_of(error)
    return text[:100]
