"""DNA: what a record is, what is held out, where windows lie, both strands, the synthetic genome, and what bad files
are told."""

import gzip
import hashlib
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.corpora.tokens import fasta as _fasta
from stability.corpora.tokens import synthetic_genome as synthetic
from stability.corpora.tokens.augmentation import CODES, VOCABULARY, ReverseComplement, encode, reverse_complement
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.fasta import records
from stability.corpora.tokens.records import split_records
from stability.data.dna import Dna, DnaConfig

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "dna"
BASES = {
    "R": "AG",
    "Y": "CT",
    "S": "CG",
    "W": "AT",
    "K": "GT",
    "M": "AC",
    "B": "CGT",
    "D": "AGT",
    "H": "ACT",
    "V": "ACG",
    "N": "ACGT",
}


def letters(num, seed=0, alphabet="ACGT"):
    return "".join(random.Random(seed).choices(alphabet, k=num))


def fasta(sequences, width=60):
    return "".join(
        f">record_{name} of a test\n" + "".join(f"{text[at : at + width]}\n" for at in range(0, len(text), width))
        for name, text in enumerate(sequences)
    )


def write(tmp_path, content, name="a.fa"):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return tmp_path / name


def of(sequences, hold_out="auto", either_strand=False):
    return split_records(
        ((str(index), encode(text.encode())) for index, text in enumerate(sequences)),
        "made up",
        hold_out,
        either_strand,
    )


def refusal(path):
    with pytest.raises(ValueError) as caught:
        prepare(part("data", {"name": "dna", "path": str(path)}), path.parent / "cache")
    assert str(caught.value).count("\n") <= 1
    assert not (path.parent / "cache").exists()
    return str(caught.value)


def test_every_code_is_a_token_in_either_case():
    assert sorted(CODES) == sorted("ACGTURYSWKMBDHVN-")
    assert list(encode(CODES.encode())) == list(encode(CODES.lower().encode())) == list(range(17))
    assert encode(b".") == encode(b"-") and VOCABULARY.decode(encode(b"acgtun-")) == "ACGTUN-"
    assert all(
        token == 255 for token in encode(bytes(set(range(256)) - set(CODES.encode() + CODES.lower().encode() + b".")))
    )


def test_complements_are_those_of_the_bases_that_a_code_stands_for():
    pairs = dict(zip("ACGT", "TGCA", strict=True))
    for code, bases in BASES.items():
        complement = VOCABULARY.decode([VOCABULARY.complement[CODES.index(code)]])
        assert "".join(sorted(pairs[base] for base in bases)) == BASES[complement]
    assert VOCABULARY.decode(reverse_complement(encode(b"AACGTN-U"))) == "A-NACGTT"


@pytest.mark.parametrize("step", [1, 7, 61, 100, 10**6])
@pytest.mark.parametrize("ends", ["\n", "\r\n", " \n\n"])
def test_records_equal_a_slow_reader_whatever_the_pieces(tmp_path, monkeypatch, step, ends):
    monkeypatch.setattr(_fasta, "BYTES_PER_READ", step)
    sequences = [letters(200, 1, "ACGTNacgtn"), letters(60, 2), letters(61, 3), "A"]
    content = fasta(sequences).replace("\n", ends)
    assert [(name, VOCABULARY.decode(tokens)) for name, tokens in records(write(tmp_path, content))] == [
        (f"record_{index}", text.upper()) for index, text in enumerate(sequences)
    ]


def test_packing_and_place_leave_the_fingerprint_alone(tmp_path):
    content = fasta([letters(4000, seed) for seed in range(3)]).encode()
    packed = {
        "a.fa": content,
        "b.FASTA.gz": gzip.compress(content),
        "c.fna.zst": pyarrow.compress(content, codec="zstd", asbytes=True),
    }
    found = [Dna.prepare(DnaConfig(path=str(write(tmp_path, data, name)))) for name, data in packed.items()]
    assert len({corpus.fingerprint for corpus in found}) == 1
    # a folder: the repetitions count once
    assert Dna.prepare(DnaConfig(path=str(tmp_path))).fingerprint == found[0].fingerprint


def test_a_record_and_its_other_strand_count_once():
    sequences = [letters(500, seed) for seed in range(4)]
    other = VOCABULARY.decode(reverse_complement(encode(sequences[2].encode())))
    corpus = of([*sequences, other])
    assert corpus.fingerprint == of(sequences).fingerprint and "1 exact repetitions left out" in corpus.description
    assert of(sequences[::-1]).fingerprint == corpus.fingerprint


def test_a_region_is_the_middle_of_every_record():
    sequences = [letters(1000, 0), letters(250, 1)]
    corpus = of(sequences)
    stretches = {corpus.decode(piece) for piece in np.split(corpus.train_tokens, corpus.train_borders[1:-1])}
    assert stretches == {sequences[0][:495], sequences[0][505:], sequences[1][:123], sequences[1][126:]}
    assert {corpus.decode(piece) for piece in np.split(corpus.val_tokens, corpus.val_borders[1:-1])} == {
        sequences[0][495:505],
        sequences[1][123:126],
    }
    assert "held out the middle of every record, 1.04%" in corpus.description


def test_whole_records_are_held_out_up_to_one_percent_and_no_long_one():
    sequences = [letters(100 + seed, seed) for seed in range(300)] + [letters(20_000, 999)]
    corpus = of(sequences)
    total = sum(map(len, sequences))
    held_out = np.diff(corpus.val_borders)
    assert held_out.sum() >= total / 100 > held_out[:-1].sum() and held_out.max() < 20_000
    by_sum = sorted(
        sequences,
        key=lambda text: hashlib.sha256(min(encode(text.encode()), reverse_complement(encode(text.encode())))).digest(),
    )
    expected = [text for text in by_sum if len(text) < 20_000][: corpus.num_val_documents]
    assert corpus.decode(corpus.val_tokens) == "".join(expected)
    assert corpus.num_train_documents + corpus.num_val_documents == 301
    assert f"held out {len(expected)} whole records" in corpus.description


@pytest.mark.parametrize("num", [2, 3, 5])
def test_equal_records_leave_something_to_train_on(num):
    corpus = of([letters(100, seed) for seed in range(num)], "records")
    assert (corpus.num_train_documents, corpus.num_val_documents) == (num - 1, 1)


def test_one_record_cannot_be_held_out_whole():
    with pytest.raises(
        ValueError,
        match=r"made up holds 1 records, too few or too short to hold out 1 %; give more, or data\.hold_out=region",
    ):
        of([letters(1000)], "records")


def windows_of(corpus, positions, num=600):
    drawn = torch.cat(
        [
            corpus.batch("train", num, positions, torch.Generator().manual_seed(0)),
            corpus.windows("train", num, positions),
        ]
    )
    return {corpus.decode(row) for row in drawn}


def test_no_window_crosses_a_border_and_all_starts_are_equally_likely():
    tokens = np.arange(30, dtype=np.uint16)
    borders = np.array([0, 3, 10, 14, 30])
    corpus = Corpus.of(
        tokens,
        tokens,
        vocab_size=30,
        description="d",
        num_train_documents=4,
        num_val_documents=4,
        borders=(borders, np.array([0, 30])),
    )
    allowed = [start for start in range(27) if not any(start < border < start + 4 for border in borders)]
    starts = corpus.batch("train", 40_000, 4, torch.Generator().manual_seed(0))[:, 0]
    counts = torch.bincount(starts, minlength=30)
    assert counts.nonzero()[:, 0].tolist() == allowed == [3, 4, 5, 6, 10, *range(14, 27)]
    expected = 40_000 / len(allowed)
    assert (counts[allowed] - expected).abs().max() < 5 * expected**0.5
    assert corpus.windows("train", 99, 4)[:, 0].tolist() == [3, 10, 14, 18, 22, 26]
    assert corpus.windows("train", 2, 4)[:, 0].tolist() == [3, 26]
    assert corpus.describe(4) == "d; stretches shorter than 4 left out: 1, 5 % of it" and corpus.describe(3) == "d"


def test_too_long_windows_are_refused_with_the_longest_that_fits():
    corpus = of([letters(1000, 0), letters(900, 1)])
    corpus.require(9)
    corpus.require(7, 2)
    with pytest.raises(
        ValueError,
        match=r"model\.positions=8 needs at least 20 \(two windows of 10 with objective\.context\)\.\n.*model\.positions=7 or less",
    ):
        corpus.require(8, 2)
    with pytest.raises(
        ValueError,
        match=r"the held-out 1 % has 19 tokens in stretches of at most 10; model\.positions=10 .*\n.*model\.positions=9 or less",
    ):
        corpus.require(10)


@pytest.mark.parametrize("sizes", [(1000, 300, 300, 300), (1000,), (1000, 1000), (900, 100)])
def test_the_number_that_is_advised_is_the_most_that_is_accepted(sizes):
    corpus = of([letters(size, seed) for seed, size in enumerate(sizes)], "region")
    with pytest.raises(ValueError) as caught:
        corpus.require(64, 1)
    most = int(re.search(r"model\.positions=(\d+) or less", str(caught.value))[1])
    corpus.require(most, 1)
    with pytest.raises(ValueError):
        corpus.require(most + 1, 1)


def test_whole_records_are_advised_where_their_middle_was_held_out_and_there_are_several():
    several, one = of([letters(1000, seed) for seed in range(5)], "region"), of([letters(1000)], "region")
    assert Dna.remedy(DnaConfig(hold_out="region"), several) == ", or data.hold_out=records"
    assert (
        Dna.remedy(DnaConfig(), one)
        == Dna.remedy(DnaConfig(), of([letters(1000, seed) for seed in range(5)], "records"))
        == ""
    )
    with pytest.raises(
        ValueError, match=r"Give more or longer documents, or data\.hold_out=records, or model\.positions=10 or less"
    ):
        several.require(64, 0, Dna.remedy(DnaConfig(), several))


@pytest.mark.parametrize("either_strand", [False, True])
def test_what_is_held_out_is_on_neither_strand_of_the_training_windows(either_strand):
    genome = letters(20_000)
    corpus = of([genome], either_strand=either_strand)
    held_out = corpus.decode(corpus.val_tokens)
    pieces = {held_out[at : at + 16] for at in range(len(held_out) - 15)}
    pieces |= {VOCABULARY.decode(reverse_complement(encode(piece.encode()))) for piece in pieces}
    assert not any(window[at : at + 16] in pieces for window in windows_of(corpus, 64) for at in range(49))


def test_half_of_the_training_windows_are_of_the_other_strand_if_asked():
    genome = letters(5000)
    other = VOCABULARY.decode(reverse_complement(encode(genome.encode())))
    plain, both = of([genome]), of([genome], either_strand=True)
    assert all(window in genome for window in windows_of(plain, 32))
    drawn = [both.decode(row) for row in both.batch("train", 1000, 32, torch.Generator().manual_seed(1))]
    turned = sum(window not in genome for window in drawn)
    assert all(window in genome or window in other for window in drawn) and abs(turned - 500) < 5 * 250**0.5
    assert all(both.decode(row) in genome for row in both.batch("val", 100, 32, torch.Generator().manual_seed(1)))
    assert (
        both.fingerprint != plain.fingerprint
        and "both strands" in both.description
        and "strands" not in plain.description
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    corpus = of([letters(1000, seed) for seed in range(3)], either_strand=True)
    corpus.save(tmp_path / "corpus")
    loaded = Corpus.load(tmp_path / "corpus")
    assert loaded.vocabulary == corpus.vocabulary and isinstance(loaded.augmentation, ReverseComplement)
    assert np.array_equal(loaded.train_borders, corpus.train_borders) and np.array_equal(
        loaded.val_borders, corpus.val_borders
    )
    draw = [each.batch("train", 8, 20, torch.Generator().manual_seed(0)) for each in (corpus, loaded)]
    assert torch.equal(*draw)
    file = tmp_path / "corpus" / "val_borders.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"val_borders\.npy is missing or damaged"):
        Corpus.load(tmp_path / "corpus")


def test_each_setting_makes_another_corpus(tmp_path):
    path = str(write(tmp_path, fasta([letters(2000, seed) for seed in range(5)])))
    variants = [{}, {"hold_out": "records"}, {"reverse_complement": True}]
    assert len({Dna.prepare(DnaConfig(path=path, **settings)).fingerprint for settings in variants}) == 3
    assert (
        len({Dna.cache_key(DnaConfig(path=path, **settings)) for settings in [*variants, {"hold_out": "region"}]}) == 4
    )


def as_rna(text):
    return text.replace("T", "U")


def other_strand(text):
    return "".join(
        {"A": "U" if "U" in text else "T", "C": "G", "G": "C", "T": "A", "U": "A"}[letter] for letter in reversed(text)
    )


@pytest.mark.parametrize("hold_out", ["records", "region"])
def test_windows_of_rna_hold_no_letter_that_the_data_do_not(hold_out):
    records = [as_rna(letters(400, seed)) for seed in range(30)]
    corpus = of(records, hold_out, either_strand=True)
    both = "|".join([*records, *map(other_strand, records)])
    drawn = [corpus.decode(row) for row in corpus.batch("train", 400, 16, torch.Generator().manual_seed(0))]
    assert all(set(window) <= set("ACGU") and window in both for window in drawn)
    assert 100 < sum(window not in "|".join(records) for window in drawn) < 300


def test_each_record_keeps_its_own_alphabet_on_the_other_strand():
    """RNA whose beginning holds no U at all, a third kind with neither letter, which follows the others only where they
    agree, and DNA beside them."""
    rna, neither, dna = "AC" * 200 + "GU" * 200, "AACCGG" * 50, letters(400, 1)
    mixed, pure = (
        of([rna, neither, dna], "region", either_strand=True),
        of([rna, neither], "region", either_strand=True),
    )

    def drawn(corpus):
        return [corpus.decode(row) for row in corpus.batch("train", 2000, 24, torch.Generator().manual_seed(0))]

    sources = {"mixed": [rna, other_strand(rna), neither, other_strand(neither), dna, other_strand(dna)]}
    sources["pure"] = [rna, other_strand(rna), neither, as_rna(other_strand(neither))]
    assert all(any(window in source for source in sources["mixed"]) for window in drawn(mixed))
    assert all(any(window in source for source in sources["pure"]) for window in drawn(pure))
    assert all(any(window in source for window in drawn(mixed)) for source in sources["mixed"])


def test_rna_and_its_other_strand_count_once_and_so_does_a_transcript():
    dna = [letters(500, seed) for seed in range(4)]
    rna = [as_rna(text) for text in dna]
    assert of([*rna, other_strand(rna[2])]).fingerprint == of(rna).fingerprint != of(dna).fingerprint
    assert of([*dna, rna[1], other_strand(rna[3])]).fingerprint == of(dna).fingerprint


def test_what_is_known_of_rna_is_saved_and_dna_is_saved_as_ever(tmp_path):
    rna, dna = (
        of([letters(900, seed, alphabet) for seed in range(3)], either_strand=True) for alphabet in ("ACGU", "ACGT")
    )
    for name, corpus in (("rna", rna), ("dna", dna)):
        corpus.save(tmp_path / name)
        draw = [
            each.batch("train", 40, 20, torch.Generator().manual_seed(0))
            for each in (corpus, Corpus.load(tmp_path / name))
        ]
        assert torch.equal(*draw)
    assert (tmp_path / "rna" / "train_are_rna.npy").is_file() and not (tmp_path / "dna" / "train_are_rna.npy").exists()
    assert "train_are_rna" not in dna.sums and of([letters(900, 0, "ACGU")]).augmentation is None


@pytest.mark.parametrize(("alphabet", "begins"), [("ACGU", "d8a3f6dfb828"), ("ACGT", "91fb07683339")])
def test_augmented_corpora_keep_the_fingerprints_that_caches_and_run_ids_know_them_by(alphabet, begins):
    corpus = of([letters(900, seed, alphabet) for seed in range(3)], either_strand=True)
    assert corpus.fingerprint.startswith(begins)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "a.fa is empty (no record in it)"),
        ("\n \n", "a.fa is empty (no record in it)"),
        ("ACGT\n>a\nACGT\n", "a.fa, line 1 is 'ACGT…' before any header"),
        (">a\nACGT\n\nACXGT\n", "a.fa, record 'a', line 4, character 3 is 'X', which is no nucleotide"),
        (">a\nACGT\n>b x\nAC GT\n", "a.fa, record 'b', line 4, character 3 is ' ', which is no nucleotide"),
        (b">a\nAC\xe9GT\n", "a.fa, record 'a', line 2, character 3 is byte 0xe9, which is no nucleotide"),
        (b">\xe9a\nACGT\n", "a.fa, line 1: the header is not UTF-8 (0xe9)"),
        (">a\nAC*GT\n", "a.fa, record 'a', line 2, character 3 is '*'"),
        (">a\nACGT*\nACGT\n", "a.fa, record 'a', line 2, character 5 is '*'"),
        (";c\n>a\nACGT\n;c\nAC!\n", "a.fa, record 'a', line 5, character 3 is '!'"),
    ],
)
def test_bad_files_are_named_with_the_place_and_nothing_is_written(tmp_path, content, complaint):
    message = refusal(write(tmp_path, content))
    assert complaint in message and str(tmp_path) in message


@pytest.mark.parametrize(("name", "kind"), [("a.fa.gz", "gzip"), ("a.fa.zst", "zstd")])
def test_broken_packing_is_refused(tmp_path, name, kind):
    content = fasta([letters(5000, seed) for seed in range(3)]).encode()
    packed = gzip.compress(content) if kind == "gzip" else pyarrow.compress(content, codec="zstd", asbytes=True)
    for broken in (packed[:-20], packed[: len(packed) // 2], b"nothing of the kind"):
        assert f"{name} is cut short or no {kind} file" in refusal(write(tmp_path, broken, name))


def test_where_a_file_was_cut_is_told_by_line_and_record(tmp_path):
    packer = zlib.compressobj(wbits=31)
    content = packer.compress(
        fasta([letters(600, seed) for seed in range(9)], 60).encode()[: 20 + 610 + 20 + 61]
    ) + packer.flush(zlib.Z_FULL_FLUSH)
    message = refusal(write(tmp_path, content, "a.fa.gz"))
    assert "is cut short or no gzip file" in message and message.endswith(
        "; 13 whole lines were read, the last in record 'record_1'); fetch or pack it again"
    )


def test_windows_marks_and_other_endings_of_names_are_read(tmp_path):
    plain = list(records(write(tmp_path, fasta([letters(90)]))))
    for name in ("a.fas", "b.ffn", "c.FAS.gz"):
        content = b"\xef\xbb\xbf" + fasta([letters(90)]).encode()
        write(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name)
        assert Dna.cache_key(DnaConfig(path=str(tmp_path / name))) and list(records(tmp_path / name)) == plain


@pytest.mark.parametrize("step", [1, 10**6])
@pytest.mark.parametrize(
    "content",
    [
        ">a\nAC\nGT\n>empty\n>b\nAA\n>last\n",
        ">a\nAC\nGT\n>empty\n\n\n>b\nAA",
        "; of a database\n>a\n; a comment\nAC\n;\nGT\n>b\n;\nAA\n>empty\n; x\n",
        ">a\nAC\nGT*\n>b\nAA\n*\n\n>empty\n",
        ">a\nAC\nGT**\n>b\nAA*\n\x1a",
        ">a\r\nAC\r\nGT*\r\n>b\r\nAA\r\n\x1a",
    ],
)
def test_empty_records_comments_and_the_marks_of_an_end_are_skipped(tmp_path, monkeypatch, content, step):
    monkeypatch.setattr(_fasta, "BYTES_PER_READ", step)
    found = {name: VOCABULARY.decode(tokens) for name, tokens in records(write(tmp_path, content))}
    assert {name: text for name, text in found.items() if text} == {"a": "ACGT", "b": "AA"}
    assert set(found) - {"a", "b"} <= {"empty", "last"}


def test_empty_records_are_counted_in_the_description(tmp_path):
    sequences = [letters(90, seed) for seed in range(3)]
    with_empty = fasta(sequences) + ">x\n>y\n\n"
    corpus = Dna.prepare(DnaConfig(path=str(write(tmp_path, with_empty))))
    assert corpus.fingerprint == of(sequences).fingerprint
    assert "DNA of a.fa: 3 records, 2 empty left out, 270 nucleotides" in corpus.description


@pytest.mark.parametrize("hold_out", ["auto", "records", "region"])
def test_records_that_are_all_empty_are_no_data(tmp_path, hold_out):
    with pytest.raises(ValueError, match=r"DNA of a\.fa holds no sequence: 2 empty records; give others"):
        Dna.prepare(DnaConfig(path=str(write(tmp_path, ">a\n\n>b\n")), hold_out=hold_out))


def test_line_ends_of_old_macintoshes_are_named(tmp_path):
    assert "a.fa, line 1: its lines end in a carriage return alone" in refusal(
        write(tmp_path, fasta([letters(90)]).replace("\n", "\r"))
    )


def test_text_is_not_taken_for_fasta(tmp_path):
    assert "ends in none of .fa, .fa.gz" in refusal(write(tmp_path, "x", "a.txt"))


@pytest.fixture(scope="module")
def genome():
    return dict(synthetic.chromosomes())


def test_the_synthetic_genome_is_the_same_everywhere(genome):
    assert [len(text) for text in genome.values()] == [500_000] * 4
    assert (
        hashlib.sha256(b"".join(genome.values())).hexdigest()
        == "04c55f3440f682a4caf18d9ff65a499c314182dd2442023c0c022491d45efa01"
    )


def test_draws_are_splitmix64():
    state, expected = 0, []
    for _ in range(3):  # the reference implementation, in Python's integers
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append(z ^ (z >> 31))
    assert expected[0] == 0xE220A8397B1DCDAF  # its published first value for seed 0
    assert synthetic.Draws(0).draw_below(10**6, 3).tolist() == [value % 10**6 for value in expected]


def test_synthetic_gc_drifts_and_elements_repeat(genome):
    text = genome["synthetic_1"]
    windows = [text[at : at + 20_000] for at in (0, 90_000, 190_000, 290_000)]
    gc = [sum(window.count(base) for base in (b"G", b"C")) / len(window) for window in windows]
    assert min(gc[1], gc[3]) > max(gc[0], gc[2]) + 0.1
    pieces = [text[at : at + 24] for at in range(len(text) - 24)]
    assert len(pieces) - len(set(pieces)) > 1000  # a random genome of this length repeats none


def test_synthetic_genes_are_open_frames_with_a_code(genome):
    weights = synthetic.codon_weights(500)
    by_acid = {
        acid: sum(weight for weight, other in zip(weights, synthetic.CODE, strict=True) if other == acid)
        for acid in synthetic.PER_MILLE
    }
    assert all(abs(by_acid[acid] - 1000 * share) < 10 for acid, share in synthetic.PER_MILLE.items())
    assert [weights[synthetic.CODONS.index(stop)] for stop in (b"TAA", b"TAG", b"TGA")] == [0, 0, 0]
    text = genome["synthetic_2"].decode()
    longest = [
        max(
            map(
                len,
                "".join(
                    "*" if text[at : at + 3] in ("TAA", "TAG", "TGA") else "." for at in range(frame, 499_998, 3)
                ).split("*"),
            )
        )
        for frame in range(3)
    ]
    assert min(longest) > 250  # codons; a random sequence of this length and composition has none above 200


def test_dna_without_a_file_says_so_and_follows_its_code():
    corpus = Dna.prepare(DnaConfig())
    assert corpus.description.startswith("synthetic genome (no data.path given; codon structure, repeats, GC drift")
    assert corpus.vocab_size == 17 and len(corpus.val_tokens) == 20_000 and 1.3 < corpus.unigram_nats < 1.39
    assert Dna.cache_key(DnaConfig()) == Dna.cache_key(DnaConfig())
    corpus.require(1024)


@pytest.mark.parametrize(
    ("name", "described", "nats"),
    [
        (
            "ecoli_K12_W3110.fa.gz",
            "1 record, 4,646,332 nucleotides, GC 0.508; held out the middle of every record, 1.00%",
            1.3857,
        ),
        (
            "phages_microviruses100.fa.gz",
            "97 records, 3 exact repetitions left out, 568,617 nucleotides, GC 0.438; held out 1 whole record, 1.03%",
            1.3554,
        ),
        ("phages_cook63.fa.gz", "63 records, 2,718,502 nucleotides, GC 0.449; held out 1 whole record, 2.95%", 1.4092),
    ],
)
def test_real_genomes_are_read_whole(name, described, nats):
    if not (SHARED / name).is_file():
        pytest.skip(f"{SHARED / name} is not on this machine")
    corpus = Dna.prepare(DnaConfig(path=str(SHARED / name)))
    assert corpus.description == f"DNA of {name}: {described}"
    assert corpus.unigram_nats == pytest.approx(nats, abs=1e-4)
