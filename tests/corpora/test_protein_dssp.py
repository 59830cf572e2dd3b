"""Secondary structure against DSSP 4's own output, pydssp and closed forms."""

from functools import cache

import numpy as np
import pydssp
import pytest

from stability.corpora.proteins import dssp
from stability.corpora.proteins.alphabets import NO_SS, SS_CLASSES, encode_ss
from stability.corpora.proteins.parsing import PROLINE, parse
from tests.corpora.protein_files import helix, members

MODELS = ("P04629.pdb", "test_af.pdb", "P00520-F1-model_v3.cif", "Q15772-F3-model_v4.cif", "Q15772-F11-model_v4.cif")
FILES = [("bm5_pdb40.tar.gz", index) for index in (0, 8, 16, 24, 32)] + [
    ("alphafold_models.tar.gz", name) for name in MODELS
]


@cache
def chain_of(name, which):
    files = members(name, which if isinstance(which, str) else ".pdb")
    file = sorted(files)[which if isinstance(which, int) else 0]
    return parse(file, files[file], "auto", 10)[0][0]


def test_nine_classes_are_those_of_dssp_4_on_every_residue_of_a_kinase():
    lines = members("alphafold_models.tar.gz", ".dssp").popitem()[1].decode().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  #  RESIDUE"))
    expected = encode_ss("".join(line[16] for line in lines[first + 1 :]))
    chain = chain_of("alphafold_models.tar.gz", "P00520-F1-model_v3.cif")
    assert len(expected) == 1123 and {SS_CLASSES[number] for number in expected} == set("CEBTSHGP")
    assert np.array_equal(chain.ss_N, expected)


@pytest.mark.parametrize(("name", "which"), FILES)
def test_bond_energies_are_those_of_pydssp_for_the_same_hydrogens(name, which):
    chain = chain_of(name, which)
    atoms = chain.atoms14_NAX[chain.mask_N & chain.atoms14_mask_NA[:, 3], :4].astype(np.float64)
    piece = np.zeros(len(atoms), dtype=int)
    hydrogens = dssp._hydrogens(atoms, piece)
    theirs = pydssp.pydssp_numpy.get_hbond_map(
        np.concatenate([atoms, np.nan_to_num(hydrogens)[:, None]], axis=1), return_e=True
    )[0]
    donor, acceptor = np.nonzero(np.linalg.norm(atoms[:, None, 1] - atoms[None, :, 1], axis=-1) < dssp.CA_WITHIN)
    far = (np.abs(donor - acceptor) > 1) & (donor > 0) & (acceptor < len(atoms) - 1)
    donor, acceptor = donor[far], acceptor[far]
    ours = dssp.bond_energies(atoms[donor, 0], hydrogens[donor], atoms[acceptor, 2], atoms[acceptor, 3])
    assert np.abs(ours - np.maximum(theirs[donor, acceptor], dssp.LOWEST_ENERGY)).max() < 6e-4


def test_three_classes_agree_with_pydssp_on_95_percent_of_residues():
    """pydssp joins no bulges, places hydrogens in its own way and lets a donor have any number of bonds: not every
    residue can agree."""
    same = num = 0
    for name, which in FILES:
        chain = chain_of(name, which)
        there = chain.ss_mask_N
        theirs = pydssp.assign(
            chain.atoms14_NAX[there, :4], donor_mask=(chain.sequence[there] != PROLINE), out_type="c3"
        )
        ours = np.array(
            [
                "H" if SS_CLASSES[number] in "HGI" else "E" if SS_CLASSES[number] in "EB" else "-"
                for number in chain.ss_N[there]
            ]
        )
        same, num = same + (ours == theirs).sum(), num + len(ours)
    assert num > 2000 and same / num >= 0.95


@pytest.mark.parametrize(
    ("angles", "letter"), [((-57, -47), "H"), ((-49, -26), "G"), ((-57, -70), "I"), ((-75, 145), "P")]
)
def test_ideal_angles_give_their_class_in_the_middle_of_a_chain(angles, letter):
    atoms = helix(24, angles)[:, :4]
    classes = "".join(SS_CLASSES[number] for number in dssp.assign(atoms, np.zeros(24, dtype=bool)))
    assert set(classes[4:-6]) == {letter}


def test_torsions_give_back_the_angles_that_a_chain_was_built_with():
    atoms = helix(12, (-100.0, 20.0))
    phi, psi = dssp.torsions(*(atoms[:, at] for at in range(3)), np.zeros(12, dtype=int))
    assert np.allclose(phi[1:], -100) and np.allclose(psi[:-1], 20) and np.isnan(phi[0]) and np.isnan(psi[-1])


def test_a_residue_without_oxygen_has_no_class_and_breaks_the_chain():
    atoms = helix(24)[:, :4].copy()
    atoms[12, 3] = np.nan
    classes = dssp.assign(atoms, np.zeros(24, dtype=bool))
    assert (classes == NO_SS).tolist() == [at == 12 for at in range(24)]


def test_a_rotated_chain_has_the_same_classes():
    chain = chain_of("bm5_pdb40.tar.gz", 3)
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    rotation *= np.sign(np.linalg.det(rotation))
    moved = chain.atoms14_NAX.astype(np.float64) @ rotation.T + 10
    assert np.array_equal(dssp.assign(moved, chain.sequence == PROLINE), chain.ss_N)
