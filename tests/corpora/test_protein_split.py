"""Which chains count as one protein, what is held out, and annotations."""

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest
from biotite.sequence import ProteinSequence as align_sequence
from biotite.sequence import align

from stability.corpora.proteins import split as clustering
from stability.corpora.proteins.alphabets import NO_SS, SPECIALS, UNK, decode, encode
from stability.corpora.proteins.annotations import Annotation, read_annotations
from stability.corpora.proteins.chain import ProteinChain
from stability.corpora.proteins.split import corpus_of
from tests.corpora.protein_files import shared

ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def letters(num, seed):
    return "".join(random.Random(seed).choices(ACIDS, k=num))


def chain(name, text, group=None, accession="", first=1):
    nothing = np.full(len(text), np.nan, dtype=np.float32)
    atoms = np.full((len(text), 14, 3), np.nan, dtype=np.float32)
    atoms[:, :5] = np.arange(len(text) * 15).reshape(-1, 5, 3)
    numbers = np.arange(first, first + len(text), dtype=np.int32)
    ss = np.full(len(text), NO_SS, dtype=np.uint8)
    return ProteinChain(
        name, group or name, encode(text).astype(np.int64), atoms, ss, nothing, nothing, numbers, accession
    )


def changed(text, share, seed):
    """``share`` of the residues, spread evenly, become others."""
    draw, result = random.Random(seed), list(text)
    for at in range(0, len(text), round(1 / share)):
        result[at] = draw.choice([acid for acid in ACIDS if acid != result[at]])
    return "".join(result)


def longest_common(first, other):
    table = np.zeros((len(first) + 1, len(other) + 1), dtype=int)
    for (i, a), (j, b) in itertools.product(enumerate(first, 1), enumerate(other, 1)):
        table[i, j] = table[i - 1, j - 1] + 1 if a == b and a != "X" else max(table[i - 1, j], table[i, j - 1])
    return table[-1, -1]


@pytest.mark.parametrize("seed", range(12))
def test_identity_is_the_longest_common_subsequence_over_the_shorter_chain(seed):
    draw = random.Random(seed)
    first, other = (
        ("ACDE" if seed % 2 else ACIDS + "X")
        and "".join(draw.choices("ACDEX" if seed % 2 else ACIDS, k=draw.randint(1, 90)))
        for _ in range(2)
    )
    shorter = min(len(first) - first.count("X"), len(other) - other.count("X"))
    expected = longest_common(first, other) / shorter if shorter else 0
    assert clustering.identity(encode(first).tobytes(), encode(other).tobytes()) == pytest.approx(expected)


def numbered(texts, groups=None):
    groups = groups or [str(number) for number in range(len(texts))]
    return clustering.clusters([encode(text) for text in texts], groups).tolist()


def test_ten_percent_of_changes_make_one_protein_and_twenty_do_not():
    text = letters(200, 0)
    assert numbered([text, changed(text, 0.1, 1), changed(text, 0.2, 2), letters(200, 3)]) == [0, 0, 1, 2]


def test_a_missing_loop_a_fragment_and_unknown_residues_count_as_the_protein():
    text = letters(200, 0)
    assert (
        numbered(
            [
                text,
                text[:80] + text[120:],
                text[50:150],
                text[:90] + "X" * 20 + text[110:],
                letters(150, 4) + text + letters(30, 5),
            ]
        )
        == [0] * 5
    )


def test_a_short_chain_is_not_lost_in_a_long_one():
    """Its letters stand in any long chain in order, but not close together."""
    assert numbered([letters(30, 1), letters(3000, 2)]) == [0, 1]


def test_clusters_are_closed_over_groups_and_sequences():
    text, other = letters(100, 0), letters(100, 1)
    assert numbered([text, other, changed(text, 0.1, 2), letters(100, 3)], ["1abc", "2xyz", "2xyz", "3zzz"]) == [
        0,
        0,
        0,
        1,
    ]


def test_the_prefilter_loses_no_pair_of_ninety_percent():
    """Chains changed in every tenth residue leave the fewest 5-mers; unrelated ones share none."""
    texts = [letters(num, seed) for seed, num in enumerate((20, 30, 60, 150, 400))]
    texts += [changed(text, 0.1, seed) for seed, text in enumerate(texts)]
    sequences = [encode(text).tobytes() for text in texts]
    pairs = set(clustering._candidates(sequences))
    assert all(clustering.identity(sequences[i], sequences[i + 5]) >= 0.9 - 1e-9 for i in range(5))
    assert pairs == {(i, i + 5) for i in range(5)}


def alignment_identity(first, other):
    """Identical residues of biotite's optimal alignment (BLOSUM62, end gaps free) over the shorter chain."""
    sequences = [align_sequence(text) for text in (first, other)]
    matrix = align.SubstitutionMatrix.std_protein_matrix()
    (best, *_) = align.align_optimal(*sequences, matrix, gap_penalty=(-10, -1), terminal_penalty=False, max_number=1)
    return align.get_sequence_identity(best, mode="shortest")


def test_no_protein_of_the_shared_backbones_is_on_both_sides():
    """Against an alignment by biotite of each held-out chain with the three training chains that share the most 4-mers
    with it."""
    with np.load(shared("bm5_backbone.npz")) as archive:
        texts = [
            archive["seq"][start:stop].tobytes().decode()
            for start, stop in zip(archive["offsets"][:-1], archive["offsets"][1:], strict=True)
        ]
        ids = archive["ids"].tolist()
    corpus = corpus_of(
        [chain(name, text, name[:4].lower()) for name, text in zip(ids, texts, strict=True)], (), None, "backbones", 0.1
    )
    train, val = list(corpus.chains("train")), list(corpus.chains("val"))
    assert len(train) + len(val) + int("exact" in corpus.description) >= 850 and len(val) == 86
    assert len({each.group for each in val}) > 10
    assert not {each.group for each in train} & {each.group for each in val}
    known = [each.letters for each in train]
    words = [{text[at : at + 4] for at in range(len(text) - 3)} for text in known]
    for text in [each.letters for each in val[::4]]:
        shared_words = [-len({text[at : at + 4] for at in range(len(text) - 3)} & others) for others in words]
        for near in np.argsort(shared_words, kind="stable")[:3]:
            assert alignment_identity(text, known[near]) < 0.9


def test_the_split_is_a_function_of_the_set_of_chains():
    chains = [chain(f"c{number}", letters(40, number)) for number in range(60)]
    one, two = corpus_of(chains, (), None, "a", 0.1), corpus_of([*reversed(chains), chains[3]], (), None, "b", 0.1)
    assert one.fingerprint == two.fingerprint and len(one.chains("val")) == 6
    assert "1 exact repetitions left out" in two.description
    assert corpus_of(chains[1:], (), None, "a", 0.1).fingerprint != one.fingerprint


def test_a_protein_larger_than_the_held_out_share_is_never_held_out():
    for seed in range(20):
        many = [chain(f"m{number}", letters(20, 1000 * seed + number), "1abc") for number in range(50)]
        single = [chain(f"s{number}", letters(20, 1000 * seed + 100 + number)) for number in range(50)]
        corpus = corpus_of([*many, *single], (), None, "x", 0.1)
        assert len(corpus.chains("val")) == 10 and {each.group for each in corpus.chains("val")}.isdisjoint({"1abc"})


def in_groups(sizes, seed):
    """Chains of unrelated sequences, so many in each group."""
    draw = random.Random(seed)
    return [
        chain(f"c{group}_{number}", letters(20, draw.random()), f"g{group}")
        for group, size in enumerate(sizes)
        for number in range(size)
    ]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_what_is_held_out_are_several_proteins_that_come_near_to_the_share(share):
    for seed in range(6):
        sizes = [60, 40, 30, *random.Random(seed).choices((1, 1, 2, 3, 5, 8), k=60)]
        corpus = corpus_of(in_groups(sizes, seed), (), None, "x", share)
        wanted = np.ceil(share * sum(sizes))
        held = Counter(each.group for each in corpus.chains("val"))
        assert abs(held.total() - wanted) <= 1 and len(held) >= 4
        assert max(held.values()) <= max(wanted / 4, np.median(sizes))


def test_where_every_protein_is_larger_than_the_share_a_smallest_is_held_out():
    corpus = corpus_of(in_groups([30, 25, 25, 25], 0), (), None, "x", 0.1)
    assert Counter(each.group for each in corpus.chains("val")).total() == 25
    asked = "(data.held_out asks for 11 chains, and every protein has more; the smallest is held out)"
    assert f"held out 25 chains of 1 proteins, 23.81% {asked}" in corpus.description
    assert "asks for" not in corpus_of(in_groups([30, 25, 25, 10], 0), (), None, "x", 0.2).description
    assert len(corpus_of(in_groups([1, 1], 0), (), None, "x", 0.5).chains("train")) == 1


def test_one_protein_cannot_be_split():
    text = letters(100, 0)
    with pytest.raises(
        ValueError,
        match=r"2 chains of 1 protein; at least 2 proteins are needed, one to hold out; 1 left out, the first: a.pdb: no atom",
    ):
        corpus_of([chain("a", text), chain("b", text[2:])], [("a.pdb", "no atom in it")], None, "two files", 0.1)


def test_the_swissprot_records_give_their_domains_terms_and_groups():
    found = read_annotations(shared("swissprot_records.txt.gz"))
    hla = found["P04439"]
    assert found["B1PKZ3"] == hla and ("Ig-like C1-type", 209, 295) in hla.domains
    assert "GO:0042612" in hla.descriptions and any(not term.startswith("GO:") for term in hla.descriptions)
    assert any(group.startswith("eggNOG:") for group in hla.orthologs)
    assert found["F2CXE6"].descriptions == ("GO:0016021", "GO:0005215", "Membrane", "Transmembrane", "Transport")


def test_a_feature_of_the_old_style_is_read_as_one_of_the_new(tmp_path):
    (tmp_path / "a.txt").write_text(
        'AC   P1; P2;\nFT   DOMAIN       61    121       SH3. {ECO:0000255}.\nFT   DOMAIN          130..200\nFT                   /note="SH2 2"\n'
        "FT   CHAIN         1    300       Kinase.\nFT   ZN_FING      <1     ?9\nKW   Kinase.\nDR   eggNOG; COG0515; -.\n//\n"
    )
    expected = Annotation((("SH3", 61, 121), ("SH2", 130, 200)), ("Kinase",), ("eggNOG:COG0515",))
    assert read_annotations(tmp_path / "a.txt") == {"P1": expected, "P2": expected}


def annotated(first=1):
    table = {"P1": Annotation((("SH3", 3, 6), ("Kinase", 5, 40)), ("GO:1", "Membrane"), ("eggNOG:A",))}
    chains = [
        chain(f"c{number}", letters(40, number), accession="P1" if number == 7 else "", first=first)
        for number in range(60)
    ]
    corpus = corpus_of(chains, (), table, "x", 0.02)
    found = [each for side in ("train", "val") for each in corpus.chains(side) if each.id == "c7"]
    return corpus, found[0]


def test_annotations_stand_at_their_residues_and_chains():
    corpus, found = annotated()
    names = corpus.tables.domains
    assert names == (*SPECIALS, "Kinase", "SH3")
    assert [[names[token] for token in row if token >= 0] for row in found.domains_NK[:7]] == [
        [], [], ["SH3"], ["SH3"], ["Kinase", "SH3"], ["Kinase", "SH3"], ["Kinase"],
    ]  # fmt: skip
    assert [corpus.tables.descriptions[token] for token in found.descriptions] == ["GO:1", "Membrane"]
    assert [corpus.tables.orthologs[token] for token in found.orthologs] == ["eggNOG:A"]
    assert np.array_equal(found.crop(4, 3).domains_NK, found.domains_NK[4:7]) and np.array_equal(
        found.crop(4, 3).descriptions, found.descriptions
    )
    _, moved = annotated(first=39)
    assert (moved.domains_NK >= 0).sum() == 2


def test_names_that_only_the_held_out_side_has_are_unknown():
    table = {f"P{number}": Annotation((), (f"word{number}",), ()) for number in range(60)}
    corpus = corpus_of(
        [chain(f"c{number}", letters(40, number), accession=f"P{number}") for number in range(60)], (), table, "x", 0.05
    )
    assert len(corpus.tables.descriptions) == len(SPECIALS) + 57
    assert [each.descriptions.tolist() for each in corpus.chains("val")] == [[UNK]] * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.tsv",
            "accession\tdomain\nP1\tSH3:1-2\n",
            r"line 1 has the columns accession, domain; accession and any of domains, descriptions, orthologs",
        ),
        ("a.tsv", "accession\tdomains\nP1\tSH3:9-2\n", r"line 2: 'SH3:9-2' is no domain; write NAME:FIRST-LAST"),
        ("a.tsv", "accession\tdomains\nP1\n", r"line 2 has 1 columns, line 1 has 2"),
        ("a.tsv", "accession\tdomains\n", r"no entry in it"),
        ("a.txt", "AC   P1;\nKW   Kinase.\n", r"cut short: its last entry has no closing '//'"),
        ("a.csv", "", r"the name ends in none of .txt, .dat, .tsv"),
    ],
)
def test_annotations_that_cannot_be_read_are_told_where(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_annotations(tmp_path / name)


def test_every_letter_has_a_token_and_others_are_unknown():
    assert decode(encode("ACDEFGHIKLMNPQRSTVWYBUZOJ")) == "ACDEFGHIKLMNPQRSTVWYBUZOJ"
    assert encode("X*-1").tolist() == [UNK] * 4 and np.array_equal(encode("acd"), encode("ACD"))
    assert re.fullmatch("[A-Z]+", "".join(SPECIALS))
