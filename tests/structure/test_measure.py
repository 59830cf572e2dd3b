from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.transform import Rotation

from stability.corpora.proteins.alphabets import decode
from stability.structure import measure as measuring
from stability.structure.crops import first_parts, pad_chains
from stability.structure.measure import is_measured, mean_backbone, measure_tokenizer, same_tokens
from stability.structure.mmcif import atom_names, mmcif
from stability.structure.tokenizer import load_tokenizer
from tests.structure.small import chain, chains, spec, train
from tests.within import assert_within


@pytest.fixture(scope="module", params=["principal", "raw"])
def measured(request, tmp_path_factory):
    pool = tmp_path_factory.mktemp("pool")
    directory = train(pool, spec(frame=request.param))
    tokenizer = load_tokenizer(pool, directory.run_id)
    for _ in measure_tokenizer(tokenizer, directory, chains(), chains(4, 50), rotations=3, structures=1):
        pass
    return tokenizer, directory, chains(4, 50)


def test_rmsd_of_every_chain_is_scipys(measured):
    tokenizer, directory, held_out = measured
    table = pd.read_parquet(directory.path / "results" / "chains.parquet").set_index("chain")
    for part in first_parts(held_out, 16):
        residues = pad_chains([part])
        made = (
            tokenizer.decode(tokenizer.encode(residues.coords_BNAX, residues.mask_BN))[0]
            .numpy()[part.mask_N]
            .reshape(-1, 3)
        )
        goal = part.coords_NAX[part.mask_N].reshape(-1, 3)
        _, rssd = Rotation.align_vectors(goal - goal.mean(0), made - made.mean(0))
        assert table.rmsd[part.id] == pytest.approx(rssd / np.sqrt(len(goal)), rel=1e-5)
        radius = np.sqrt(((goal - goal.mean(0)) ** 2).sum(1).mean())
        assert table.point_rmsd[part.id] == pytest.approx(radius, rel=1e-5)
        assert table.num_residues[part.id] == part.mask_N.sum()


def test_use_of_the_codebook_is_counted_over_valid_residues(measured):
    tokenizer, directory, held_out = measured
    residues = pad_chains(first_parts(held_out, 16))
    tokens = tokenizer.encode(residues.coords_BNAX, residues.mask_BN)[residues.mask_BN]
    codes = pd.read_parquet(directory.path / "results" / "codes.parquet")
    assert codes.num.tolist() == torch.bincount(tokens, minlength=175).tolist()
    summary = json.loads((directory.path / "results" / "summary.json").read_text())
    share = np.array([share for share in codes.num / codes.num.sum() if share])
    assert summary["perplexity"] == pytest.approx(float(np.prod(share**-share)))
    table = pd.read_parquet(directory.path / "results" / "chains.parquet")
    assert summary["rmsd"] == pytest.approx(np.mean(table.rmsd))
    assert summary["same_tokens"] == pytest.approx(np.average(table.same_tokens, weights=table.num_residues))
    assert (summary["used_codes"], summary["num_codes"]) == (len(share), 175)


def test_in_the_principal_frame_tokens_do_not_turn_with_the_chain_and_a_moved_chain_is_really_moved(measured):
    tokenizer, directory, held_out = measured
    table = pd.read_parquet(directory.path / "results" / "chains.parquet")
    if tokenizer.spec.frame == "principal":
        assert table.same_tokens.min() >= 0.95
    else:
        assert table.same_tokens.mean() < 0.95


def test_the_share_of_same_tokens_is_a_function_of_the_chain_alone(measured):
    tokenizer, directory, held_out = measured
    table = pd.read_parquet(directory.path / "results" / "chains.parquet").set_index("chain")
    part = first_parts(held_out, 16)[2]
    residues = pad_chains([part])
    tokens = tokenizer.encode(residues.coords_BNAX, residues.mask_BN)
    assert same_tokens(tokenizer, [part], residues, tokens, 3)[0] == pytest.approx(table.same_tokens[part.id], abs=0.05)


def test_what_is_measured_is_known_by_its_settings(measured):
    _, directory, _ = measured
    assert is_measured(directory, 3, 1)
    assert not is_measured(directory, 4, 1)


def test_the_mean_chain_is_the_mean_place_along_principal_axes():
    one = chain(0, 12)
    mean = mean_backbone([one], 16)
    goal = one.coords_NAX[one.mask_N].reshape(-1, 3)
    found = mean[:12][one.mask_N].reshape(-1, 3).numpy()
    _, rssd = Rotation.align_vectors(goal - goal.mean(0), found - found.mean(0))
    assert_within(rssd, 1e-3)
    assert mean[12:].abs().max() == 0


def test_structures_are_replaced_together_or_stay(measured, monkeypatch):
    tokenizer, directory, held_out = measured
    before = {path.name: path.read_bytes() for path in (directory.path / "structures").iterdir()}

    def written():
        return {path.name: path.read_bytes() for path in (directory.path / "structures").iterdir()}

    def measure(structures):
        for _ in measure_tokenizer(tokenizer, directory, chains(), held_out, rotations=3, structures=structures):
            pass

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        made = iter(["data_x", "data_y", "data_z"])
        patch.setattr(measuring, "mmcif", lambda *_: next(made, None) or os_error())
        measure(2)
    assert len(before) == 2 and written() == before
    measure(2)
    assert len(written()) == 4
    measure(1)
    assert written() == before, "structures of an earlier measurement do not stay beside those of this one"


def os_error():
    raise OSError(28, "the disk is full")


def test_structures_are_read_back_by_biotite_with_the_same_atoms_and_places(measured):
    """biotite has a parser of its own."""
    pdbx = pytest.importorskip("biotite.structure.io.pdbx", reason="biotite, of the extra protein, is not installed")
    tokenizer, directory, held_out = measured
    part = first_parts(held_out, 16)[0]
    original, made = (
        pdbx.get_structure(pdbx.CIFFile.read(directory.path / "structures" / f"{part.id}_{kind}.cif"), model=1)
        for kind in ("original", "reconstructed")
    )
    names = [
        (number, name)
        for number, letter in enumerate(decode(part.sequence), 1)
        if part.mask_N[number - 1]
        for name in atom_names(letter)
    ]
    assert list(zip(original.res_id.tolist(), original.atom_name.tolist(), strict=True)) == names
    assert list(zip(made.res_id.tolist(), made.atom_name.tolist(), strict=True)) == names
    np.testing.assert_allclose(original.coord, part.atoms14_NAX[part.atoms14_mask_NA], atol=1e-3)
    residues = pad_chains([part])
    atoms = tokenizer.decode_atoms(tokenizer.encode(residues.coords_BNAX, residues.mask_BN), residues.sequence_BN)[
        0
    ].numpy()[part.atoms14_mask_NA]
    _, before = Rotation.align_vectors(original.coord - original.coord.mean(0), atoms - atoms.mean(0))
    lying = np.sqrt(((original.coord - made.coord) ** 2).sum())
    assert lying == pytest.approx(before, rel=1e-3)


def test_an_unknown_residue_and_a_missing_atom_are_written_as_such():
    part = chain(0, 4)
    sequence = part.sequence.copy()
    sequence[0] = 2
    part.atoms14_NAX[1, 1] = np.nan
    text = mmcif("a b", sequence, part.atoms14_NAX)
    assert text.startswith("data_a_b\n")
    rows = [line.split() for line in io.StringIO(text) if line.startswith("ATOM")]
    assert {row[5] for row in rows if row[8] == "1"} == {"UNK"}
    assert "CA" not in {row[3] for row in rows if row[8] == "2"}
    assert not [row for row in rows if row[8] == "3"]
    assert [row[1] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
