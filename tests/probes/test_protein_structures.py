"""The mmCIF files of sampled proteins, read by biotite, against what the tokenizer's decoders give."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from stability.corpora.proteins.alphabets import ONE_TO_THREE, encode
from stability.corpora.proteins.split import corpus_of
from stability.generate import main
from stability.probes.generation import samples as stored_samples
from stability.runs.directory import read_json
from stability.structure.mmcif import atom_names
from stability.structure.tokenizer import load_tokenizer
from tests.probes.proteins import ProteinLab, known_chain, sample
from tests.structure.small import spec
from tests.structure.small import train as train_tokenizer

# Å, as files have it: a coordinate is rounded by half of it or less
LAST_DECIMAL = 1e-3


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    pytest.importorskip("biotite", reason="biotite, of the extra protein, is not installed")
    return ProteinLab(tmp_path_factory.mktemp("proteins"))


def rows(directory):
    return [json.loads(line) for line in (directory.path / "samples" / "terminal.jsonl").read_text().splitlines()]


def structures(directory):
    """By biotite, which has a parser of its own: three-letter name, atom names and coordinates of each residue of each
    sample."""
    from biotite.structure.io import pdbx

    found = []
    for index in range(len(rows(directory))):
        atoms = pdbx.get_structure(
            pdbx.CIFFile.read(directory.path / "samples" / "terminal" / f"sample_{index}.cif"), model=1
        )
        ids = sorted(set(atoms.res_id.tolist()))
        found.append(
            [
                (
                    atoms.res_name[atoms.res_id == at][0],
                    atoms.atom_name[atoms.res_id == at].tolist(),
                    atoms.coord[atoms.res_id == at],
                )
                for at in ids
            ]
        )
    return found


def by_stage_2(lab, identity, row):
    letters = torch.from_numpy(encode(row["text"]).astype(np.int64))[None]
    return load_tokenizer(lab.pool, identity).decode_atoms(torch.tensor([row["structure"]]), letters)[0].numpy()


def what_is_said(directory):
    return read_json(stored_samples.meta_file(directory, "terminal"))["beside"]["terminal"]


def test_structures_are_the_second_stage_s_atoms_of_the_sampled_letters(lab):
    directory = lab.train(lab.spec())
    sample(lab, directory, num=3)
    for row, residues in zip(rows(directory), structures(directory), strict=True):
        assert [name for name, _, _ in residues] == [ONE_TO_THREE.get(letter, "UNK") for letter in row["text"]]
        for letter, (_, names, places), atoms in zip(row["text"], residues, by_stage_2(lab, lab.two, row), strict=True):
            assert names == list(atom_names(letter))
            np.testing.assert_allclose(places, atoms[: len(names)], rtol=0, atol=LAST_DECIMAL)
    assert (
        what_is_said(directory)
        == "mmCIF, all heavy atoms by the tokenizer's stage 2 (unchecked: the chains that it learned from are gone)"
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [("one", "the tokenizer has no stage 2"), ("folds", "stage 2 reads letters, and the model predicts none")],
)
def test_without_a_second_stage_or_letters_structures_are_the_backbone_and_that_is_said(lab, kind, said, capsys):
    directory = lab.train(lab.spec(tokenizer=lab.one) if kind == "one" else lab.spec(sources=("structure",)))
    assert main([f"ckpt={directory.path}", "num=2", "device=cpu"]) == 0
    assert f"{directory.path / 'samples' / 'terminal'}: mmCIF, the backbone alone ({said})" in capsys.readouterr().out
    tokenizer = load_tokenizer(lab.pool, lab.one if kind == "one" else lab.two)
    for row, residues in zip(rows(directory), structures(directory), strict=True):
        expected = tokenizer.decode(torch.tensor([row["structure"]]))[0].numpy()
        assert [name for name, _, _ in residues] == [
            ONE_TO_THREE.get(letter, "UNK") for letter in row["text"] or "X" * len(expected)
        ]
        assert all(names == ["N", "CA", "C"] for _, names, _ in residues)
        np.testing.assert_allclose(np.stack([places for _, _, places in residues]), expected, rtol=0, atol=LAST_DECIMAL)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (4, "mmCIF, 4 of 14 atom places of a residue by the tokenizer's stage 2 (the chains that it"),
        (14, "mmCIF, all heavy"),
    ],
)
def test_atoms_that_the_tokenizer_s_own_chains_never_had_are_not_written(lab, kept, said):
    """Stage 2 gives fourteen places whatever it learned; here the chains end at O, or do not."""
    whole = [known_chain(seed) for seed in range(6)]
    cut = [
        replace(each, atoms14_NAX=np.where(np.arange(14)[:, None] < kept, each.atoms14_NAX, np.nan).astype(np.float32))
        for each in whole
    ]
    corpus = corpus_of(cut, (), None, "cut", 0.3)
    corpus.save(lab.cache / corpus.fingerprint)
    identity = train_tokenizer(
        lab.pool, spec(steps=2, atom_steps=2, warmup_steps=0, data_fingerprint=corpus.fingerprint)
    ).run_id
    directory = lab.train(lab.spec(tokenizer=identity))
    sample(lab, directory, num=2)
    for row, residues in zip(rows(directory), structures(directory), strict=True):
        for letter, (_, names, places), atoms in zip(
            row["text"], residues, by_stage_2(lab, identity, row), strict=True
        ):
            assert names == list(atom_names(letter)[:kept])
            np.testing.assert_allclose(places, atoms[: len(names)], rtol=0, atol=LAST_DECIMAL)
    assert what_is_said(directory).startswith(said)
