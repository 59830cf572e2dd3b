"""Prepared proteins: shards and resuming, the folder and its checks, batches and crops, synthetic chains, and what bad
paths are told."""

import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.corpora.proteins import shards as sharding
from stability.corpora.proteins import synthetic
from stability.corpora.proteins.alphabets import (
    NO_SS,
    NUM_SASA_BINS,
    PAD,
    SASA_EDGES,
    SS_CLASSES,
    plddt_bins,
    sasa_bins,
)
from stability.corpora.proteins.batch import batch_of
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.corpora.proteins.npz import read_npz, write_shard
from stability.corpora.proteins.parsing import parse
from stability.corpora.proteins.split import corpus_of
from stability.data import protein
from tests.corpora.protein_files import cif, helix, pdb, residue_lines, shared
from tests.corpora.test_protein_split import chain, letters


def write_structures(folder, num=6, length=24):
    folder.mkdir(exist_ok=True)
    for number in range(num):
        (folder / f"model_{number}.pdb").write_bytes(pdb(*residue_lines(letters(length, number), helix(length))))
    return folder


def prepared(path, cache, **settings):
    return prepare(part("data", {"name": "protein", "path": str(path), **settings}), cache)


def refusal(path, cache, **settings):
    with pytest.raises(ValueError) as caught:
        prepared(path, cache, **settings)
    assert str(caught.value).count("\n") <= 1 and not cache.exists()
    return str(caught.value)


def test_bad_files_are_listed_with_their_reasons_and_the_rest_is_read(tmp_path, capsys):
    folder = write_structures(tmp_path / "models")
    (folder / "empty.pdb").write_bytes(b"")
    (folder / "cut.cif").write_bytes(cif(letters(20, 1), helix(20))[:-70])
    (folder / "cut.pdb.gz").write_bytes(gzip.compress(b"ATOM" * 99)[:-9])
    (folder / "zero.pdb").write_bytes(pdb(*residue_lines(letters(20, 1), np.zeros((20, 5, 3)))))
    corpus = prepared(folder, tmp_path / "cache")
    assert len(corpus.chains("train")) == 5 and len(corpus.chains("val")) == 1
    assert dict(corpus.skipped) == {
        "cut.cif": "cut short: the last category is not closed by '#'",
        "cut.pdb.gz": "cut short or no gzip file",
        "empty.pdb": "no atom in it",
        "zero.pdb": "chain A: all coordinates are equal (0, 0, 0)",
    }
    assert corpus.description.endswith("; 4 files or chains could not be used and were skipped")
    assert "skipped empty.pdb: no atom in it" in capsys.readouterr().err
    assert "empty.pdb\tno atom in it\n" in (tmp_path / "cache" / corpus.fingerprint / "skipped.tsv").read_text()


def test_a_folder_its_packed_files_and_a_tar_of_them_are_the_same_proteins(tmp_path):
    folder = write_structures(tmp_path / "plain")
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        for file in sorted(folder.iterdir(), reverse=True):
            (tmp_path / "packed" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
            archive.add(file, f"deep/{file.name}")
    prints = {prepared(tmp_path / name, tmp_path / "cache").fingerprint for name in ("plain", "packed", "all.tar.gz")}
    assert len(prints) == 1


def test_worker_processes_make_the_shards_that_one_process_makes(tmp_path, monkeypatch):
    folder = write_structures(tmp_path / "models", num=9)
    monkeypatch.setattr(sharding, "FILES_PER_SHARD", 2)
    files = sorted(folder.iterdir())
    alone = [read_npz(file)[0] for file in sharding.shards(files, tmp_path / "one", "auto", 10)]
    monkeypatch.setattr(sharding, "FEWEST_FILES", 1)
    monkeypatch.setattr(sharding.os, "sched_getaffinity", lambda _: {0, 1})
    together = [read_npz(file)[0] for file in sharding.shards(files, tmp_path / "two", "auto", 10)]
    assert [len(shard) for shard in together] == [2, 2, 2, 2, 1]
    for first, other in zip(sum(alone, []), sum(together, []), strict=True):
        assert first.id == other.id and np.array_equal(first.atoms14_NAX, other.atoms14_NAX, equal_nan=True)


def test_an_interrupted_preparation_goes_on_after_its_finished_shards(tmp_path, monkeypatch):
    folder = write_structures(tmp_path / "models", num=8)
    monkeypatch.setattr(sharding, "FILES_PER_SHARD", 2)
    parsed = []

    def interrupted(name, *rest):
        parsed.append(name)
        if len(parsed) == 5:
            raise KeyboardInterrupt
        return parse(name, *rest)

    monkeypatch.setattr(sharding, "parse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, tmp_path / "cache")
    corpus = prepared(folder, tmp_path / "cache")
    assert parsed == [f"model_{number}.pdb" for number in (0, 1, 2, 3, 4, 4, 5, 6, 7)]
    assert len(corpus.chains("train")) + len(corpus.chains("val")) == 8
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".proteins")]


def test_while_another_process_prepares_the_same_files_each_works_for_itself(tmp_path, monkeypatch):
    folder = write_structures(tmp_path / "models", num=4)
    workplaces = []
    monkeypatch.setattr(
        protein, "shards", lambda files, place, *rest: workplaces.append(place) or sharding.shards(files, place, *rest)
    )
    with protein._workplace(tmp_path, protein_key(folder)) as taken:
        corpus = prepared(folder, tmp_path / "cache")
        assert taken.is_dir() and workplaces[0] != taken and not workplaces[0].exists()
    assert len(corpus.chains("train")) == 3 and not taken.exists()


def protein_key(folder):
    settings = part("data", {"name": "protein", "path": str(folder)}).settings
    return hashlib.sha256(protein.Protein.cache_key(settings).encode()).hexdigest()[:16]


def test_a_shard_gives_back_its_chains_and_what_was_skipped(tmp_path):
    chains, _ = parse("1abc.pdb", pdb(*residue_lines(letters(24, 0), helix(24))), "always", 10)
    write_shard(tmp_path / "a.npz", chains, [("b.pdb", "no atom in it")])
    (found,), skipped = read_npz(tmp_path / "a.npz")
    assert skipped == [("b.pdb", "no atom in it")] and (found.id, found.group, found.letters) == (
        chains[0].id,
        "1abc",
        letters(24, 0),
    )
    for name in ("atoms14_NAX", "ss_N", "sasa_N", "plddt_N", "numbers_N", "mask_N"):
        assert np.array_equal(
            getattr(found, name), getattr(chains[0], name), equal_nan=name[:2] not in ("ss", "nu", "ma")
        )
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert archive["atoms14"].shape == (24, 14, 3) and archive["offsets"].tolist() == [0, 24]
    assert prepare_twice(tmp_path) == 1


def prepare_twice(tmp_path):
    """The number of different corpora that structures and the shard made of them give."""
    folder = write_structures(tmp_path / "models")
    (shard,) = sharding.shards(sorted(folder.iterdir()), tmp_path / "shards", "auto", 10)
    return len({prepared(path, tmp_path / "cache").fingerprint for path in (folder, shard)})


def first_chains(name, num, folder):
    """The arrays of the first chains of a shared collection, also written to a file of their own."""
    with np.load(shared(name)) as archive:
        stop = archive["offsets"][num]
        arrays = {key: array[:stop] for key, array in archive.items() if len(array) == archive["offsets"][-1]}
        arrays |= {"ids": archive["ids"][:num], "offsets": archive["offsets"][: num + 1]}
    np.savez(folder / name, **arrays)
    return arrays, read_npz(folder / name)[0]


def test_backbones_of_an_npz_are_chains_without_side_chains(tmp_path):
    arrays, chains = first_chains("bm5_backbone.npz", 60, tmp_path)
    assert np.array_equal(np.concatenate([each.coords_NAX for each in chains]), arrays["coords"][:, :3])
    assert "".join(each.letters for each in chains) == arrays["seq"].tobytes().decode()
    assert np.array_equal(np.concatenate([each.sasa_N for each in chains]), arrays["sasa"])
    assert not any(each.atoms14_mask_NA[:, 5:].any() for each in chains)
    classes = np.concatenate([each.ss_N for each in chains])
    three = np.select([np.isin(classes, (5, 6, 7)), np.isin(classes, (1, 2))], [ord("H"), ord("E")], ord("C"))
    assert (three == arrays["ss3"]).mean() > 0.95


def test_traces_of_an_npz_are_chains_without_a_backbone(tmp_path):
    arrays, chains = first_chains("pdb_ca_mmtf.npz", 60, tmp_path)
    assert not any(each.mask_N.any() for each in chains)
    assert np.array_equal(
        np.concatenate([each.atoms14_mask_NA[:, 1] for each in chains]), np.isfinite(arrays["ca"]).all(axis=1)
    )
    letters_of = arrays["ss8"].tobytes().decode()
    classes = np.concatenate([each.ss_N for each in chains]).tolist()
    assert "".join("-" if number == NO_SS else SS_CLASSES[number] for number in classes) == letters_of


def test_a_kept_corpus_is_what_was_prepared_and_an_altered_one_is_refused(tmp_path):
    corpus = corpus_of(
        [chain(f"c{number}", letters(30 + number, number)) for number in range(20)], [("x", "y")], None, "made up", 0.1
    )
    corpus.save(tmp_path / "kept")
    loaded = ProteinCorpus.load(tmp_path / "kept")
    assert (loaded.fingerprint, loaded.description, loaded.tables) == (
        corpus.fingerprint,
        corpus.description,
        corpus.tables,
    )
    for one, two in zip(corpus.chains("train"), loaded.chains("train"), strict=True):
        assert (
            one.id == two.id
            and np.array_equal(one.atoms14_NAX, two.atoms14_NAX, equal_nan=True)
            and np.array_equal(one.sequence, two.sequence)
        )
    with open(tmp_path / "kept" / "atoms14.npy", "r+b") as stream:
        stream.seek(500)
        stream.write(b"\1\2\3")
    with pytest.raises(ValueError, match=r"atoms14.npy is missing or damaged \(it was altered\)"):
        ProteinCorpus.load(tmp_path / "kept")


def test_a_chain_of_3000_residues_is_cropped_to_2048_at_random_and_from_its_start(tmp_path):
    long = letters(3000, 1)
    corpus = corpus_of(
        [chain("long", long), *(chain(f"c{number}", letters(30, number)) for number in range(2, 9))], (), None, "x", 0.1
    )
    side = next(side for side in ("train", "val") if any(len(each) == 3000 for each in corpus.chains(side)))
    assert corpus.describe(2048).endswith("; 1 longer than 2,048 residues, cropped")
    starts = set()
    for seed in range(6):
        batch = corpus.batch(side, 32, 2048, torch.Generator().manual_seed(seed))
        for row in range(len(batch)):
            if batch.ids[row] == "long":
                atoms = batch.atoms14_BNAX[row]
                start = int(atoms[0, 0, 0]) // 15
                starts.add(start)
                assert batch.residues_BN[row].sum() == 2048 and atoms[-1, 0, 0] == (start + 2047) * 15
    assert len(starts) > 3 and min(starts) >= 0 and max(starts) <= 3000 - 2048
    windows = corpus.windows(side, 99, 2048)
    assert windows.atoms14_BNAX[windows.ids.index("long"), 0, 0, 0] == 0 and windows.sequence_BN.shape[1] == 2048


def test_a_batch_is_a_function_of_its_generator_and_pads_with_nothing():
    corpus = corpus_of(
        [chain(f"c{number}", letters(20 + 5 * number, number)) for number in range(12)], (), None, "x", 0.1
    )
    one, two = (corpus.batch("train", 5, 40, torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.ids == two.ids and all(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))
    assert (one.sequence_BN[~one.residues_BN] == PAD).all() and not one.atoms_mask_BNA[~one.residues_BN].any()
    assert torch.isfinite(one.atoms14_BNAX).all() and (one.atoms14_BNAX[~one.atoms_mask_BNA] == 0).all()
    parts = one.split(2)
    assert [len(part) for part in parts] == [2, 2, 1] and torch.equal(
        torch.cat([part.sequence_BN for part in parts]), one.sequence_BN
    )


def test_windows_are_evenly_spaced_and_the_same_at_every_call():
    corpus = corpus_of([chain(f"c{number}", letters(30, number)) for number in range(40)], (), None, "x", 0.1)
    ids = [each.id for each in corpus.chains("train")]
    assert (
        corpus.windows("train", 3, 64).ids
        == corpus.windows("train", 3, 64).ids
        == (ids[0], ids[(len(ids) - 1) // 2], ids[-1])
    )
    assert corpus.windows("val", 99, 64).ids == tuple(each.id for each in corpus.chains("val"))


def test_bins_follow_their_edges():
    areas = np.array([0.0, 0.14, 0.15, 137.27, 137.28, 400, np.nan])
    assert sasa_bins(areas).tolist() == [0, 0, 1, 14, 15, 15, -1]
    assert sasa_bins(np.array(SASA_EDGES)).tolist() == list(range(NUM_SASA_BINS - 1))
    assert plddt_bins(np.array([0, 1.99, 2, 99.9, 100, np.nan])).tolist() == [0, 0, 1, 49, 49, -1]


def test_synthetic_chains_are_named_ideal_and_apart(monkeypatch):
    monkeypatch.setattr(synthetic, "NUM_CHAINS", 12)
    chains = list(synthetic.chains())
    corpus = corpus_of(chains, (), None, synthetic.DESCRIPTION, 0.01)
    assert corpus.description.startswith("synthetic chains (no data.path given") and len(corpus.chains("val")) == 1
    for each in chains:
        n, ca, c = (each.coords_NAX[:, at].astype(float) for at in range(3))
        for first, other, length in ((n, ca, 1.458), (ca, c, 1.525), (c[:-1], n[1:], 1.329)):
            assert np.abs(np.linalg.norm(other - first, axis=1) - length).max() < 3e-3
        near = np.linalg.norm(ca[:, None] - ca[None], axis=-1)[np.triu_indices(len(ca), 3)]
        assert near.min() >= 3.79 and np.isfinite(each.sasa_N).all()
    assert np.array_equal(chains[0].atoms14_NAX, next(iter(synthetic.chains())).atoms14_NAX, equal_nan=True)


def test_paths_that_cannot_be_read_are_told_what_would_be_right(tmp_path):
    cache = tmp_path / "cache"
    assert "no such file or folder" in refusal(tmp_path / "nothing", cache)
    (tmp_path / "a.txt").write_text("text")
    assert "the name ends in none of .pdb" in refusal(tmp_path / "a.txt", cache)
    (tmp_path / "a.npz").write_bytes(b"PK no")
    assert "is cut short or no .npz file" in refusal(tmp_path / "a.npz", cache)
    np.savez(tmp_path / "b.npz", x=np.zeros(3))
    assert "b.npz holds x; proteins need ids, offsets, seq and coords or ca" in refusal(tmp_path / "b.npz", cache)
    np.savez(
        tmp_path / "c.npz",
        ids=np.array(["a"]),
        offsets=np.array([0, 5]),
        seq=np.zeros(4, np.uint8),
        ca=np.zeros((4, 3), np.float32),
    )
    assert "its offsets do not cut" in refusal(tmp_path / "c.npz", cache)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in write_structures(tmp_path / "models").iterdir():
            archive.add(file, file.name)
    (tmp_path / "d.tar.gz").write_bytes(buffer.getvalue()[:-400])
    assert "d.tar.gz is cut short or no tar archive" in refusal(tmp_path / "d.tar.gz", cache)
    (tmp_path / "e.pdb").write_bytes(b"END\n")
    assert (
        "0 chains of 0 protein; at least 2 proteins are needed, one to hold out; 1 left out, the first: e.pdb: no atom"
        in refusal(tmp_path / "e.pdb", cache)
    )


def test_without_biotite_structures_are_refused_with_the_remedy(tmp_path, monkeypatch):
    found = sharding.importlib.util.find_spec
    monkeypatch.setattr(
        sharding.importlib.util, "find_spec", lambda name: None if name.startswith("biotite") else found(name)
    )
    with pytest.raises(RuntimeError, match=r"biotite, which is not installed; pip install 'stability-lab\[protein\]'"):
        prepared(write_structures(tmp_path / "models"), tmp_path / "cache")


def test_the_domains_of_a_batch_are_padded_to_its_widest_residue():
    each = chain("a", letters(20, 0))
    wide = batch_of([each, chain("b", letters(12, 1))], 32)
    assert (
        wide.domains_BNK.shape == (2, 32, 1)
        and not wide.domains_mask_BNK.any()
        and wide.descriptions_BJ.shape == (2, 1)
    )
