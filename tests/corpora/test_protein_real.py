"""AlphaFold models and UniProt records end to end: what a corpus holds against what the raw files say, read by
splitting their lines."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest
from biotite.structure.info import one_letter_code

from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.corpora.proteins.alphabets import UNK
from stability.corpora.proteins.annotations import read_annotations
from stability.corpora.proteins.batch import batch_of
from stability.corpora.proteins.split import corpus_of
from tests.corpora.protein_files import members, shared
from tests.corpora.test_protein_split import chain

# made up but for where they lie: on all of the models' proteins, some over the ends of the fragments that the models
# cover
DOMAINS = {
    "P00520": (("Shared", 61, 121), ("Own", 127, 217), ("Long", 200, 493)),
    "Q15772": (("Shared", 390, 450), ("Shared", 1795, 2010), ("Long", 1, 3267)),
    "P04629": (("Shared", 500, 781), ("Long", 32, 796)),
    "A0A0B7P221": (("Shared", 5, 9), ("Long", 1, 28)),
}


def loop_of(text: str, category: str) -> list[dict[str, str]]:
    """The rows of an mmCIF loop without quoted values."""
    lines = text.splitlines()
    columns = [line.split()[0].split(".")[1] for line in lines if line.startswith(f"{category}.")]
    first = max(number for number, line in enumerate(lines) if line.startswith(f"{category}.")) + 1
    rows = []
    for line in lines[first:]:
        if line.startswith("#"):
            break
        rows.append(dict(zip(columns, line.split(), strict=True)))
    return rows


def raw_cif(text: str) -> list[tuple[str, str, int, float, tuple[float, ...]]]:
    """(accession, residue, number in UniProt's sequence, pLDDT of the model's own table, CA) of each residue."""
    confidence = {row["label_seq_id"]: float(row["metric_value"]) for row in loop_of(text, "_ma_qa_metric_local")}
    atoms = (row for row in loop_of(text, "_atom_site") if row["label_atom_id"] == "CA")
    found = []
    for row in atoms:
        place = tuple(float(row[f"Cartn_{axis}"]) for axis in "xyz")
        found.append(
            (
                row["pdbx_sifts_xref_db_acc"],
                row["label_comp_id"],
                int(row["pdbx_sifts_xref_db_num"]),
                confidence[row["label_seq_id"]],
                place,
            )
        )
    return found


def raw_pdb(text: str) -> list[tuple[str, str, int, float, tuple[float, ...]]]:
    [reference] = [line.split() for line in text.splitlines() if line.startswith("DBREF")]
    shift = int(reference[-2]) - int(reference[3])
    found = []
    for line in text.splitlines():
        if line.startswith("ATOM") and line[12:16].strip() == "CA":
            place = tuple(float(line[at : at + 8]) for at in (30, 38, 46))
            found.append((reference[6], line[17:20], int(line[22:26]) + shift, float(line[60:66]), place))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(corpus, the raw residues of each chain by its id)."""
    archive, folder = shared("alphafold_models.tar.gz"), tmp_path_factory.mktemp("models")
    lines = [
        "\t".join((name, "; ".join(f"{kind}:{first}-{last}" for kind, first, last in places)))
        for name, places in DOMAINS.items()
    ]
    (folder / "domains.tsv").write_text("\n".join(["accession\tdomains", *lines, "Q99999\tShared:1-9", ""]))
    settings = {"name": "protein", "path": str(archive), "annotations": str(folder / "domains.tsv"), "held_out": 0.2}
    corpus = prepare(part("data", settings), folder / "cache")
    files = {
        name: content.decode() for name, content in members(archive.name).items() if name.endswith((".cif", ".pdb"))
    }
    raw = {
        name.rpartition(".")[0] + "_A": (raw_cif if name.endswith(".cif") else raw_pdb)(text)
        for name, text in files.items()
    }
    return corpus, raw


def all_chains(corpus):
    return [each for side in ("train", "val") for each in corpus.chains(side)]


def test_every_model_is_read_and_an_unknown_accession_is_no_error(models):
    corpus, raw = models
    assert {each.id for each in all_chains(corpus)} == set(raw) and len(raw) == 5
    assert "kinds of annotation on 5 of the chains" in corpus.description and not corpus.skipped


def test_residues_confidence_and_places_in_uniprot_are_those_of_the_raw_files(models):
    corpus, raw = models
    for each in all_chains(corpus):
        accessions, names, numbers, plddt, places = zip(*raw[each.id], strict=True)
        assert {each.accession} == set(accessions)
        assert each.letters == "".join(one_letter_code(name) for name in names)
        assert each.numbers_N.tolist() == list(numbers)
        assert np.array_equal(each.plddt_N, np.array(plddt, dtype=np.float32))
        assert each.plddt_bins_N.tolist() == [min(int(value // 2), 49) for value in plddt]
        assert np.abs(each.coords_NAX[:, 1] - np.array(places)).max() < 5e-4 and each.mask_N.all()


def test_domains_lie_on_the_residues_that_their_numbers_in_uniprot_say(models):
    corpus, raw = models
    names = corpus.tables.domains
    for each in all_chains(corpus):
        for (accession, _, number, _, _), tokens in zip(raw[each.id], each.domains_NK, strict=True):
            expected = {
                kind if kind in names else names[UNK]
                for kind, first, last in DOMAINS[accession]
                if first <= number <= last
            }
            found = [names[token] for token in tokens if token >= 0]
            assert sorted(found) == sorted(expected)
    batch = batch_of([each.crop(3, 24) for each in all_chains(corpus)])
    for row, each in enumerate(all_chains(corpus)):
        expected = [sorted(token for token in tokens if token >= 0) for tokens in each.domains_NK[3:27].tolist()]
        shown = zip(batch.domains_BNK[row].tolist(), batch.domains_mask_BNK[row].tolist(), strict=True)
        assert [sorted(token for token, is_there in zip(*residue, strict=True) if is_there) for residue in shown][
            : len(expected)
        ] == expected


def entries(text: str) -> dict[str, str]:
    """The records of a flat file by their first accession."""
    found = [entry for entry in re.split(r"^//$", text, flags=re.MULTILINE) if entry.strip()]
    return {re.search(r"^AC   (\w+);", entry, re.MULTILINE)[1]: entry for entry in found}


def sequence_in(entry: str) -> str:
    return "".join(re.split(r"^SQ .*$", entry, flags=re.MULTILINE)[1].split())


@pytest.fixture(scope="module")
def records():
    """(corpus of the records' own sequences, the raw records)."""
    file = shared("swissprot_records.txt.gz")
    found = entries(gzip.decompress(file.read_bytes()).decode())
    chains = [chain(f"AF-{name}-F1", sequence_in(entry), accession=name) for name, entry in found.items()]
    return corpus_of(chains, (), read_annotations(file), "records", 0.05), found


def test_descriptions_and_orthologs_of_every_record_are_the_raw_ones(records):
    corpus, raw = records
    assert len(raw) == 24 == len(all_chains(corpus))
    for each in all_chains(corpus):
        entry = raw[each.accession]
        terms = re.findall(r"^DR   GO; (GO:\d+);", entry, re.MULTILINE)
        keywords = (
            re.sub(r"\s*\{.*?\}", "", "".join(line + " " for line in re.findall(r"^KW   (.*)$", entry, re.MULTILINE)))
            .strip()
            .rstrip(".")
        )
        expected = [*terms, *(word.strip() for word in keywords.split(";") if word.strip())]
        found = re.findall(
            r"^DR   (eggNOG|KO|OMA|OrthoDB|TreeFam|HOGENOM|HOVERGEN|GeneTree); ([^;]+);", entry, re.MULTILINE
        )
        groups = [f"{base}:{name}" for base, name in found]
        for tokens, words, names in (
            (each.descriptions, expected, corpus.tables.descriptions),
            (each.orthologs, groups, corpus.tables.orthologs),
        ):
            assert [names[token] for token in tokens] == [word if word in names else names[UNK] for word in words]
    side = {each.accession for each in corpus.chains("train")}
    assert sum(len(each.descriptions) for each in all_chains(corpus)) > 300 and len(side) >= 22


def test_domains_of_every_record_lie_where_the_raw_features_say(records):
    corpus, raw = records
    kinds, num = r"DOMAIN|REPEAT|ZN_FING|DNA_BIND|COILED|TRANSMEM", 0
    for each in all_chains(corpus):
        places = [
            (int(first), int(last))
            for first, last in re.findall(
                rf"^FT   (?:{kinds}) +<?(\d+)(?:\.\.| +)>?(\d+)", raw[each.accession], re.MULTILINE
            )
        ]
        inside = [any(first <= number <= last for first, last in places) for number in range(1, len(each) + 1)]
        assert ((each.domains_NK >= 0).any(axis=1).tolist() if each.domains_NK.size else [False] * len(each)) == inside
        num += len(places)
    assert num == 46


def test_the_named_domains_of_tissue_plasminogen_activator_are_those_of_its_record():
    """Copied by hand from the record's features."""
    assert read_annotations(shared("swissprot_records.txt.gz"))["P00750"].domains == (
        ("Fibronectin type-I", 39, 81), ("EGF-like", 82, 120), ("Kringle", 127, 208), ("Kringle", 215, 296), ("Peptidase S1", 311, 561),
    )  # fmt: skip


def test_the_records_are_of_other_proteins_than_the_models_and_that_is_said(tmp_path):
    settings = {
        "name": "protein",
        "path": str(shared("alphafold_models.tar.gz")),
        "annotations": str(shared("swissprot_records.txt.gz")),
    }
    with pytest.raises(
        ValueError,
        match=r"data.annotations: none of its \d+ accessions is that of a chain \(.*\); give these proteins', or leave it out",
    ):
        prepare(part("data", settings), tmp_path / "cache")
