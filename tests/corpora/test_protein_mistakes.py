"""What the sweep's command line does with protein files that are not what they should be: refused in a line or two, or
skipped and counted."""

from __future__ import annotations

import gzip
import io
import tarfile

import numpy as np
import pytest

from stability import sweep
from stability.build import described
from stability.corpora.proteins.npz import FORMAT, read_npz, write_shard
from stability.corpora.proteins.split import corpus_of
from tests.corpora.protein_files import atom_line, cif, helix, pdb, residue_lines
from tests.corpora.test_protein_corpus import write_structures
from tests.corpora.test_protein_split import chain, letters
from tests.objectives.test_multitrack import run_spec

TINY = """
    objective=multitrack data=protein objective.sources=[sequence] objective.contexts=[ss,domains] cross=auto mechanism=sa lr=1e-3 seeds=1 steps=2 batch=4
    evaluation.every_steps=2 evaluation.sequences=4 model.layers=1 model.width=16 model.heads=2 hessian=false report=false launcher=serial device=cpu name=x
"""


def run(tmp_path, path, *words):
    return sweep.main([*TINY.split(), f"data.path={path}", f"runs_dir={tmp_path / 'runs'}", *words])


def refused(tmp_path, path, *words) -> str:
    with pytest.raises(ValueError) as caught:
        run(tmp_path, path, *words)
    assert len(str(caught.value).splitlines()) <= 2
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob(".proteins-*"))
    return str(caught.value)


def tar_of(file, **contents):
    with tarfile.open(file, "w:gz") as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name.replace("__", "."))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file


def test_a_folder_of_good_and_bad_files_trains_on_the_good_and_counts_the_bad(tmp_path, capsys):
    folder = write_structures(tmp_path / "models", num=8)
    (folder / "empty.pdb").write_bytes(b"")
    (folder / "dna.pdb").write_bytes(pdb(*(atom_line(at, "P", "DA", "D", at, (at, 1, 1)) for at in range(1, 20))))
    (folder / "zero.pdb").write_bytes(pdb(*residue_lines(letters(20, 1), np.zeros((20, 5, 3)))))
    (folder / "cut.cif").write_bytes(cif(letters(20, 1), helix(20))[:-70])
    assert run(tmp_path, folder, "model.positions=20", "dry_run=true") == 0
    printed = capsys.readouterr()
    assert (
        "8 chains of 8 proteins" in printed.out
        and "4 files or chains could not be used and were skipped" in printed.out
    )
    assert "8 longer than 18 residues, cropped" in printed.out, (
        "two of 20 positions are taken by BOS and EOS, and chains have 24"
    )
    reasons = {
        "empty.pdb: no atom in it",
        "dna.pdb: no chain of amino acids (it holds DA)",
        "zero.pdb: chain A: all coordinates are equal (0, 0, 0)",
        "cut.cif: cut short: the last category is not closed by '#'",
    }
    assert {line.removeprefix("skipped ") for line in printed.err.splitlines() if line.startswith("skipped")} == reasons
    assert run(tmp_path, folder) == 0
    assert "trains 1" in capsys.readouterr().out


def test_only_bad_files_are_refused_with_the_first_reason(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "empty.pdb").write_bytes(b"")
    message = refused(tmp_path, tmp_path / "models")
    assert (
        "holds 0 chains of 0 protein; at least 2 proteins are needed" in message
        and "1 left out, the first: empty.pdb: no atom in it" in message
    )


def test_what_holds_no_structure_file_is_told_which_are(tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "the folder holds no structure file; accepted are .pdb" in refused(tmp_path, tmp_path / "nothing")
    tar_of(tmp_path / "texts.tar.gz", a__txt=b"text", b__md=b"more")
    assert "texts.tar.gz holds no structure file; accepted are .pdb, .pdb.gz" in refused(
        tmp_path, tmp_path / "texts.tar.gz"
    )
    (tmp_path / "no.tar.gz").write_bytes(gzip.compress(b"no tar" * 999))
    assert "no.tar.gz is cut short or no tar archive" in refused(tmp_path, tmp_path / "no.tar.gz")


def plain(folder, **changes):
    """A collection of four backbones, with other arrays in some places."""
    num, length = 4, 20
    arrays = {
        "ids": np.array([f"c{number}" for number in range(num)]),
        "offsets": np.arange(num + 1) * length,
        "seq": np.frombuffer("".join(letters(length, number) for number in range(num)).encode(), np.uint8),
        "coords": np.tile(helix(length), (num, 1, 1)).astype(np.float32),
    }
    np.savez(
        folder / "chains.npz", **{name: value for name, value in {**arrays, **changes}.items() if value is not None}
    )
    return folder / "chains.npz"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"coords": None},
            "holds ids, offsets, seq; proteins need ids, offsets, seq and coords or ca, or a prepared shard",
        ),
        ({"ids": np.array("c0")}, "ids holds 0-D <U2; text, a row each, are read"),
        ({"offsets": np.arange(5) * 20.0}, "offsets holds 1-D float64; whole numbers, a row each, are read"),
        ({"seq": np.array(["A"] * 80)}, "seq holds 1-D <U1; whole numbers"),
        ({"offsets": np.arange(4) * 20}, "its offsets do not cut"),
        ({"coords": np.zeros((80, 4, 3), np.float32)}, "coords are n × 5 × 3"),
        (
            {"format": np.array("stability protein shard 9")},
            "is a 'stability protein shard 9'; this program reads 'stability protein shard 1'",
        ),
        (
            {"format": np.array(FORMAT)},
            "is a prepared shard without groups, accessions, sequence, atoms14, ss, sasa, plddt, numbers, "
            "skipped_names",
        ),
        ({"ids": np.array([object()] * 4)}, "is cut short or no .npz file"),
    ],
)
def test_arrays_of_another_kind_are_told_what_they_are(tmp_path, changes, message):
    assert message in refused(tmp_path, plain(tmp_path, **changes))


def test_a_shard_with_tokens_that_do_not_exist_is_refused(tmp_path):
    write_shard(tmp_path / "a.npz", [chain("a", letters(20, 0)), chain("b", letters(20, 1))], ())
    with np.load(tmp_path / "a.npz") as archive:
        arrays = {**archive}
    np.savez(tmp_path / "b.npz", **{**arrays, "sequence": arrays["sequence"] + 20})
    assert "sequence of a prepared shard holds 0 to 29, ss 0 to 8 or 255" in refused(tmp_path, tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{**arrays, "atoms14": arrays["atoms14"][:, :5]})
    assert "atoms14 of a prepared shard is n × 14 × 3, not 40 × 5 × 3" in refused(tmp_path, tmp_path / "c.npz")


def test_chains_of_an_npz_that_cannot_be_used_are_left_out_and_named(tmp_path):
    coords = np.tile(helix(20), (4, 1, 1)).astype(np.float32)
    coords[5:20] = np.nan
    coords[20:40] = 0.0
    coords[45, 1, 2] = np.inf
    found, skipped = read_npz(plain(tmp_path, coords=coords), 10)
    assert [each.id for each in found] == ["c3"]
    assert skipped == [
        ("c0", "5 residues with coordinates, fewer than data.min_residues=10"),
        ("c1", "all coordinates are equal (0, 0, 0)"),
        ("c2", "coordinates that are no numbers"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.tsv",
            "name\tdomain\nP1\tSH3:1-2\n",
            "line 1 has the columns name, domain; accession and any of domains, descriptions, orthologs are read",
        ),
        ("a.tsv", "", "line 1 has the columns none; accession and any of"),
        (
            "a.tsv",
            "accession\tdomains\nP1\tSH3:1-2\nP2\t\nP1\tSH2:3-4\n",
            "line 4 has P1 again, as line 2; put all of it into one line, parted by ;",
        ),
        ("a.tsv", "accession\tdomains\n\tSH3:1-2\n", "line 2 has no accession"),
        (
            "a.tsv",
            "accession\tdomains\nP1\tSH3:1-2\n",
            "none of its 1 accessions is that of a chain (model_0, model_1, model_2, …); give these proteins'",
        ),
        (
            "a.txt",
            "Dear reader,\nthis is no record.\n",
            "no entry in it; a UniProt flat file has lines 'AC   …', a table one line for each accession",
        ),
        ("a.txt", "ID   X\nAC   P1;\nDE   Cut", "is cut short: its last entry has no closing '//'"),
        ("a.txt.gz", b"\x1f\x8b no gzip", "data.annotations: "),
        ("a.pdf", "", "a.pdf: the name ends in none of .txt, .dat, .tsv"),
        (None, "", "nothing.tsv: no such file"),
    ],
)
def test_annotations_that_cannot_be_used_are_told_as_annotations(tmp_path, name, content, message):
    folder, file = write_structures(tmp_path / "models"), tmp_path / (name or "nothing.tsv")
    if name is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    told = refused(tmp_path, folder, f"data.annotations={file}")
    assert told.startswith("data.annotations") and message in told


def test_an_entry_is_annotated_by_its_four_letter_code_in_either_case():
    from stability.corpora.proteins.annotations import Annotation

    table = {
        "1ABC": Annotation(descriptions=("Kinase",)),
        "2xyz": Annotation(descriptions=("Kinase",)),
        "P1": Annotation(),
    }
    chains = [
        chain("1abc_A", letters(30, 0), "1abc"),
        chain("2xyz_A", letters(30, 1), "2xyz"),
        *(chain(f"c{seed}", letters(30, seed)) for seed in range(2, 9)),
    ]
    corpus = corpus_of(chains, (), table, "x", 0.1)
    assert {each.id for side in ("train", "val") for each in corpus.chains(side) if len(each.descriptions)} == {
        "1abc_A",
        "2xyz_A",
    }
    assert "1 kinds of annotation on 2 of the chains" in corpus.description


def test_what_a_model_crops_is_counted_by_the_residues_that_it_reads():
    long = [chain(f"long{num}", letters(num, num)) for num in (2046, 2047, 2048, 3000)]
    corpus = corpus_of([*long, *(chain(f"c{seed}", letters(30, seed)) for seed in range(9))], (), None, "x", 0.1)
    spec = run_spec(sources=["sequence"], tokenizer=None)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"positions": 2048})})
    assert described(spec, corpus).endswith("; 3 longer than 2,046 residues, cropped")
