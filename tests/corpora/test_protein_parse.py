"""Structure files: what becomes a residue, what stays masked, tracks against the libraries' own, and what bad files are
told."""

import io
import re

import numpy as np
import pytest
from biotite import structure
from biotite.structure.io import pdb as biotite_pdb
from biotite.structure.io import pdbx

from stability.corpora.proteins.alphabets import ATOM14, NO_SS, SS_CLASSES
from stability.corpora.proteins.parsing import group_of, parse
from tests.corpora.protein_files import atom_line, cif, helix, members, pdb, residue_lines, seqres

# biotite's own, where a test reads raw files by it
pytestmark = pytest.mark.filterwarnings("ignore:.*elements were guessed")
LETTERS = "ACDEFGHIKLMNPQRSTVWYACDEFGHIKL"


def chains_of(content, name="x.pdb", plddt="auto", min_residues=10):
    return parse(name, content, plddt, min_residues)[0]


def the_chain(content, name="x.pdb", **more):
    (chain,) = chains_of(content, name, **more)
    return chain


def refusal(content, name="x.pdb", **more):
    with pytest.raises(ValueError) as caught:
        chains_of(content, name, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_becomes_its_residues_with_atoms_in_the_standard_order():
    coords = helix(30)
    chain = the_chain(pdb(*residue_lines(LETTERS, coords)), "1abc.pdb")
    assert (chain.id, chain.group, chain.letters, len(chain)) == ("1abc_A", "1abc", LETTERS, 30)
    assert np.abs(chain.atoms14_NAX[:, :4] - coords[:, :4]).max() < 6e-4
    assert np.array_equal(chain.mask_N, np.ones(30, bool))
    assert (
        np.array_equal(chain.atoms14_mask_NA[:, 4], [letter != "G" for letter in LETTERS])
        and not chain.atoms14_mask_NA[:, 5:].any()
    )
    assert np.isnan(chain.plddt_N).all() and (chain.plddt_bins_N == -1).all()


def test_side_chain_atoms_of_raw_files_stand_where_the_order_says():
    for name, content in sorted(members("bm5_pdb40.tar.gz").items())[:5]:
        array = biotite_pdb.PDBFile.read(io.StringIO(content.decode())).get_structure(model=1)
        chain = the_chain(content, name)
        names = [array.res_name[start] for start in structure.get_residue_starts(array)]
        assert chain.letters == "".join(structure.info.one_letter_code(name) for name in names)
        for row, start in enumerate(structure.get_residue_starts(array)):
            residue = array[structure.get_residue_masks(array, [start])[0]]
            for slot, atom in enumerate(ATOM14[chain.letters[row]]):
                found = residue.coord[residue.atom_name == atom]
                assert (
                    np.isnan(chain.atoms14_NAX[row, slot]).all()
                    if not len(found)
                    else np.array_equal(chain.atoms14_NAX[row, slot], found[0])
                )


def test_numbers_that_jump_over_a_broken_bond_leave_masked_residues():
    kept = [*range(10), *range(14, 30)]
    chain = the_chain(
        pdb(*residue_lines([LETTERS[at] for at in kept], helix(30)[kept], numbers=[at + 5 for at in kept]))
    )
    assert chain.letters == LETTERS[:10] + "XXXX" + LETTERS[14:]
    assert np.flatnonzero(~chain.mask_N).tolist() == [10, 11, 12, 13]
    assert (
        np.isnan(chain.sasa_N[10:14]).all()
        and (chain.ss_N[10:14] == NO_SS).all()
        and np.isfinite(np.delete(chain.sasa_N, range(10, 14))).all()
    )
    assert chain.numbers_N.tolist() == list(range(5, 35))


def test_numbers_that_jump_over_a_bond_leave_none():
    numbers = [*range(1, 16), *range(21, 36)]
    chain = the_chain(pdb(*residue_lines(LETTERS, helix(30), numbers=numbers)))
    assert chain.letters == LETTERS and chain.mask_N.all() and chain.numbers_N.tolist() == numbers


def test_seqres_names_the_missing_residues_and_their_places():
    kept = [*range(3, 10), *range(14, 28)]
    content = pdb(
        *seqres(LETTERS),
        *residue_lines([LETTERS[at] for at in kept], helix(30)[kept], numbers=[at + 41 for at in kept]),
    )
    chain = the_chain(content)
    assert chain.letters == LETTERS and np.flatnonzero(chain.mask_N).tolist() == kept
    assert chain.numbers_N.tolist() == list(range(41, 71))


def test_seqres_places_pieces_where_numbers_do_not_help():
    kept = [*range(3, 10), *range(14, 28)]
    numbers = [*range(100, 107), *range(300, 314)]
    chain = the_chain(
        pdb(*seqres(LETTERS), *residue_lines([LETTERS[at] for at in kept], helix(30)[kept], numbers=numbers))
    )
    assert chain.letters == LETTERS and np.flatnonzero(chain.mask_N).tolist() == kept


def test_insertion_codes_are_residues_of_their_own():
    numbers, codes = [*range(1, 16), 15, 15, *range(16, 29)], [" "] * 15 + ["A", "B"] + [" "] * 13
    chain = the_chain(pdb(*residue_lines(LETTERS, helix(30), numbers=numbers, codes=codes)))
    assert chain.letters == LETTERS and chain.mask_N.all() and chain.numbers_N.tolist() == numbers


def test_of_alternate_locations_the_fullest_counts():
    coords = helix(30)
    lines = residue_lines(LETTERS, coords)
    at = next(row for row, line in enumerate(lines) if " CA  ASP" in line)
    lines[at : at + 1] = [
        atom_line(900, "CA", "ASP", "A", 3, coords[2, 1] + 0.5, alternate="A", occupancy=0.3),
        atom_line(901, "CA", "ASP", "A", 3, coords[2, 1], alternate="B", occupancy=0.7),
    ]
    chain = the_chain(pdb(*lines))
    assert len(chain) == 30 and np.abs(chain.coords_NAX - coords[:, :3]).max() < 6e-4


def test_selenomethionine_is_methionine_and_its_selenium_the_sulphur():
    coords = helix(30)
    letters = ["MSE" if letter == "M" else "SEP" if letter == "S" else letter for letter in LETTERS]
    lines = residue_lines(letters, coords)
    lines.append(atom_line(900, "SE", "MSE", "A", 11, coords[10, 4] + 1, record="HETATM", element="SE"))
    lines.sort(key=lambda line: int(line[22:26]))
    lines = [line.replace("ATOM  ", "HETATM") if line[17:20] == "MSE" else line for line in lines]
    chain = the_chain(pdb(*lines))
    assert chain.letters == LETTERS and chain.mask_N.all()
    assert np.allclose(chain.atoms14_NAX[10, ATOM14["M"].index("SD")], coords[10, 4] + 1, atol=6e-4)


def test_only_the_first_model_counts():
    one, two = residue_lines(LETTERS, helix(30)), residue_lines(LETTERS, helix(30) + 9)
    chain = the_chain(pdb("MODEL        1", *one, "ENDMDL", "MODEL        2", *two, "ENDMDL"))
    assert np.abs(chain.coords_NAX - helix(30)[:, :3]).max() < 6e-4


def test_ligands_water_and_nucleic_acids_are_left_out():
    lines = residue_lines(LETTERS, helix(30))
    free = [line.replace("ATOM  ", "HETATM") for line in residue_lines("E", helix(1) + 50, numbers=[401])]
    others = [
        atom_line(950, "O", "HOH", "A", 500, (1, 1, 1), record="HETATM"),
        atom_line(951, "P", "DA", "D", 1, (60, 1, 1)),
        free[0],
    ]
    (chain,), reasons = parse("x.pdb", pdb(*lines, *others, *free[1:]), "auto", 10)
    assert (chain.id, chain.letters, reasons) == ("x_A", LETTERS, [])


def test_a_file_of_two_chains_in_one_is_cut_and_short_chains_are_named():
    second = residue_lines(LETTERS[:12], helix(12) + 40, numbers=list(range(1, 13)))
    short = residue_lines("ACDEF", helix(5) + 80, chain="C")
    found, reasons = parse("2xyz.pdb", pdb(*residue_lines(LETTERS, helix(30)), *second, *short), "auto", 10)
    assert [(chain.id, chain.group, len(chain)) for chain in found] == [
        ("2xyz_A.1", "2xyz", 30),
        ("2xyz_A.2", "2xyz", 12),
    ]
    assert reasons == ["chain C: 5 residues with coordinates, fewer than data.min_residues=10"]


def test_mmcif_places_residues_by_its_own_numbers_and_knows_the_accession():
    chain = the_chain(cif(LETTERS, helix(30), present=[*range(2, 9), *range(12, 29)]), "9zzz.cif")
    assert (chain.id, chain.group, chain.accession, chain.letters) == ("9zzz_B", "9zzz", "P12345", LETTERS)
    assert np.flatnonzero(~chain.mask_N).tolist() == [0, 1, 9, 10, 11, 29]
    assert chain.numbers_N.tolist() == list(range(201, 231))


def test_alphafold_models_carry_their_plddt_and_place_in_uniprot():
    for name, content in members("alphafold_models.tar.gz", ".cif").items():
        array = pdbx.get_structure(pdbx.CIFFile.read(io.StringIO(content.decode())), model=1, extra_fields=["b_factor"])
        chain = the_chain(content, name)
        ca = array[array.atom_name == "CA"]
        assert (
            np.array_equal(chain.plddt_N, ca.b_factor.astype(np.float32))
            and np.abs(chain.coords_NAX[:, 1] - ca.coord).max() == 0
        )
        assert chain.group == chain.accession == name.split("-")[1]
        bins = chain.plddt_bins_N
        assert ((chain.plddt_N >= 2 * bins) & (chain.plddt_N < 2 * bins + 2) | (bins == 49)).all()
        assert np.isnan(the_chain(content, name, plddt="never").plddt_N).all()
    assert (
        the_chain(
            members("alphafold_models.tar.gz", "F11-model_v4.cif").popitem()[1], "AF-Q15772-F11-model_v4.cif"
        ).numbers_N[0]
        == 2001
    )


def read_by_biotite(name, content):
    text = io.StringIO(content.decode())
    array = (
        pdbx.get_structure(pdbx.CIFFile.read(text), model=1)
        if name.endswith(".cif")
        else biotite_pdb.PDBFile.read(text).get_structure(model=1)
    )
    return array[structure.filter_amino_acids(array)]


def test_sasa_is_the_librarys_own_on_raw_files_and_models():
    models = {
        name: content for name, content in members("alphafold_models.tar.gz").items() if not name.endswith(".dssp")
    }
    for name, content in [*sorted(members("bm5_pdb40.tar.gz").items())[:5], *models.items()]:
        array = read_by_biotite(name, content)
        expected = structure.apply_residue_wise(array, structure.sasa(array), np.nansum)
        assert np.allclose(the_chain(content, name).sasa_N, expected, rtol=1e-5, atol=1e-3), name


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (b"", "a.pdb", "no atom in it"),
        (b"HEADER\nEND\n", "a.pdb", "no atom in it"),
        (
            pdb(*(atom_line(at, "P", "DA", "D", at, (at, 1, 1)) for at in range(1, 20))),
            "a.pdb",
            "no chain of amino acids (it holds DA)",
        ),
        (pdb(*residue_lines(LETTERS, np.zeros((30, 5, 3)))), "a.pdb", "chain A: all coordinates are equal (0, 0, 0)"),
        (pdb(*residue_lines(LETTERS, helix(30)))[:1234], "a.pdb", "cut short or no PDB file"),
        (
            pdb(*residue_lines(LETTERS, helix(30)))[:1245],
            "a.pdb",
            "cut short or no PDB file (line 16 has no B-factor, which",
        ),
        (cif(LETTERS, helix(30))[:-90], "a.cif", "cut short: the last category is not closed by '#'"),
        (cif(LETTERS, helix(30))[:-90].replace(b"#\n", b"\n"), "a.cif", "cut short or no mmCIF file"),
        (b"PK\x03\x04 no structure", "a.cif", "cut short or no mmCIF file"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_few_words(content, name, reason):
    assert refusal(content, name).startswith(reason)


def test_b_factors_that_are_no_plddt_are_refused_where_they_are_asked_for():
    content = pdb(*residue_lines(LETTERS, helix(30), bfactor=120.0))
    assert "120 to 120 are no pLDDT" in refusal(content, plddt="always")
    assert np.isnan(the_chain(content).plddt_N).all()


def test_an_entry_belongs_to_its_code_or_accession():
    assert [group_of(stem, "") for stem in ("1A2K_l_u", "pdb1a2k", "1a2k", "AF-P00520-F1-model_v3", "my_model", "12ab34")] == [
        "1a2k", "1a2k", "1a2k", "P00520", "my_model", "12ab34",
    ]  # fmt: skip
    assert group_of("model_3", "P12345") == "P12345"


def test_an_ideal_helix_is_one_and_its_ends_are_not():
    chain = the_chain(pdb(*residue_lines("A" * 20, helix(20))))
    assert re.fullmatch("C+H{14,18}[CTS]*", "".join(SS_CLASSES[number] for number in chain.ss_N))


@pytest.mark.parametrize(
    ("lines", "accession", "first"),
    [
        (["DBREF  1ABC A    1    30  UNP    P12345   NAME_HUMAN     201    230"], "P12345", 201),
        (["DBREF  XXXX A    1    30  UNP    A0A0B7P221 RDT1_YEAST     201    230"], "A0A0B7P221", 201),
        (
            [
                "DBREF1 1ABC A    1    30  UNP                  A0A0B7P221_YEAST",
                "DBREF2 1ABC A     A0A0B7P221                        201         230",
            ],
            "A0A0B7P221",
            201,
        ),
        (
            [
                "DBREF  1ABC A    1    30  PDB    1ABC     1ABC             1     30",
                "DBREF1",
                "DBREF2 1ABC A",
                "SEQRES",
            ],
            "",
            1,
        ),
    ],
)
def test_a_pdb_file_names_its_uniprot_sequence_in_either_record(lines, accession, first):
    chain = the_chain(pdb(*lines, *residue_lines(LETTERS, helix(30))))
    assert (chain.accession, chain.numbers_N[0]) == (accession, first)


def cut_columns(lines, start, stop=80):
    return [line[:start] + (" " * (stop - start) + line[stop:] if line[stop:].strip() else "") for line in lines]


@pytest.mark.parametrize(("start", "stop"), [(54, 80), (54, 66), (60, 80), (60, 66), (54, 60)])
def test_files_without_occupancy_or_b_factors_are_read_and_have_no_plddt(start, stop):
    lines = residue_lines(LETTERS, helix(30), bfactor=90.0)
    (whole,), _ = parse("a.pdb", pdb(*lines), "always", 10)
    (found,), reasons = parse("a.pdb", pdb(*cut_columns(lines, start, stop)), "always", 10)
    assert not reasons and found.id == whole.id
    assert np.array_equal(found.atoms14_NAX, whole.atoms14_NAX, equal_nan=True)
    assert np.array_equal(found.sequence, whole.sequence) and np.array_equal(found.ss_N, whole.ss_N)
    assert np.all(whole.plddt_N == 90.0) and np.all(np.isnan(found.plddt_N) == (stop > 60))


def without_columns(content, *names):
    """An mmCIF file without some columns of its atoms."""
    columns, rows = [], []
    for line in content.decode().splitlines():
        if line.startswith("_atom_site."):
            columns.append(line.removeprefix("_atom_site."))
            if columns[-1] in names:
                continue
        elif line.startswith(("ATOM", "HETATM")):
            words = zip(columns, line.split(), strict=True)
            line = " ".join(word for name, word in words if name not in names)
        rows.append(line)
    return "\n".join(rows).encode()


def test_mmcif_without_occupancy_or_b_factors_is_read():
    content = cif(LETTERS, helix(30)).replace(b" CA . ALA ", b" CA A ALA ")
    assert b" CA A ALA " in content, "an alternate location, of which occupancy would choose one"
    (whole,), _ = parse("a.cif", content, "always", 10)
    (found,), reasons = parse("a.cif", without_columns(content, "occupancy", "B_iso_or_equiv"), "always", 10)
    assert not reasons and np.array_equal(found.atoms14_NAX, whole.atoms14_NAX, equal_nan=True)
    assert np.all(whole.plddt_N == 50.0) and np.all(np.isnan(found.plddt_N))
