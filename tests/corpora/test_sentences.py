"""Rows of sentences: their split by connected components, their files, and what their batches hold."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from scipy.stats import spearmanr

from stability.corpora.sentences.split import Row, pair_files, read_rows, split_rows
from stability.corpora.tokens.vocabulary import ByteTokenizer
from stability.data.pairs import Pairs, PairsConfig
from stability.data.stdlib_pairs import StdlibPairs, StdlibPairsConfig
from stability.data.synthetic_pairs import FILLERS, MEANINGS, SyntheticPairs, SyntheticPairsConfig


def split(rows, hold_out=0.3, scored=False):
    return split_rows(rows, "rows", tokenizer=ByteTokenizer(), scored=scored, hold_out=hold_out)


def texts(corpus, side):
    numbers = getattr(corpus, side).rows_MS.astype(int)
    return [
        [bytes(corpus.tokens[corpus.starts[n] : corpus.starts[n + 1]].tolist()).decode() for n in row]
        for row in numbers
    ]


def reached(rows, first):
    """Rows connected with the first one by shared sentences, by a slow search."""
    known, before = {first}, set()
    while known != before:
        before = set(known)
        words = {sentence for number in known for sentence in rows[number].sentences}
        known |= {number for number, row in enumerate(rows) if words & set(row.sentences)}
    return known


def test_connected_rows_are_on_one_side_and_no_row_is_lost():
    draws = np.random.default_rng(0)
    rows = [Row((f"s{draws.integers(60)}", f"s{draws.integers(60)}")) for _ in range(40)]
    corpus = split(rows)
    sides = [{tuple(row) for row in texts(corpus, side)} for side in ("train", "val")]
    assert sides[0] | sides[1] == {row.sentences for row in rows} and not sides[0] & sides[1]
    for number in range(len(rows)):
        own = {rows[other].sentences for other in reached(rows, number)}
        assert own <= sides[0] or own <= sides[1]


def test_rows_of_one_group_are_on_one_side():
    rows = [Row((f"a{number}", f"b{number}"), groups=(f"g{number % 5}",)) for number in range(50)]
    corpus = split(rows)
    held = {int(first.removeprefix("a")) % 5 for first, _ in texts(corpus, "val")}
    trained = {int(first.removeprefix("a")) % 5 for first, _ in texts(corpus, "train")}
    assert held and trained and not held & trained


def test_equal_rows_count_once_and_the_order_of_rows_does_not_matter():
    rows = [Row((f"a{number}", f"b{number}")) for number in range(30)]
    assert split(rows).fingerprint == split([*rows[::-1], *rows[:7]]).fingerprint


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(("a", "b")), Row(("a", "b"))], "different rows: 1; at least 2"),
        ([Row(("a", f"b{number}")) for number in range(9)], "all 9 rows are connected by shared sentences"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        split(rows)


def test_a_batch_is_cut_padded_and_without_repetition():
    corpus = split([Row((f"{number}", "x" * number), score=number / 50 - 0.5) for number in range(1, 31)], scored=True)
    num = len(corpus.train.scores_M)
    batch = corpus.batch("train", num, 6, torch.Generator().manual_seed(0))
    assert batch.tokens_BSN.shape == (num, 2, 6) and sorted(batch.scores_B.tolist()) == sorted(corpus.train.scores_M)
    for tokens, mask, score in zip(batch.tokens_BSN[:, 1], batch.mask_BSN[:, 1], batch.scores_B, strict=True):
        length = min(round((float(score) + 0.5) * 50), 6)
        assert tokens.tolist() == [ord("x")] * length + [256] * (6 - length) and mask.sum() == length


def meanings(sentence):
    """Meanings of a sentence, each named by its first word."""
    return {words[0] for word in sentence.split() for words in MEANINGS if word in words}


def test_the_score_of_synthetic_pairs_is_the_share_of_equal_meanings_and_they_share_no_word():
    corpus = SyntheticPairs.prepare(SyntheticPairsConfig(num=300))
    for (first, second), score in zip(texts(corpus, "train"), corpus.train.scores_M, strict=True):
        assert len(meanings(first)) == len(meanings(second)) == 4
        assert score == len(meanings(first) & meanings(second)) / 4
        assert set(first.split()) & set(second.split()) <= set(FILLERS)
    assert set(corpus.train.scores_M.tolist()) == {0, 0.25, 0.5, 0.75, 1}


def test_letters_of_synthetic_pairs_say_nothing_of_their_score():
    assert all(not set(first) & set(second) for first, second in MEANINGS)
    corpus = SyntheticPairs.prepare(SyntheticPairsConfig(num=3000))
    counts = [
        [np.bincount(np.frombuffer(side.encode(), np.uint8), minlength=256) for side in row]
        for row in texts(corpus, "train")
    ]
    cosines = [first @ second / np.sqrt((first @ first) * (second @ second)) for first, second in counts]
    assert spearmanr(cosines, corpus.train.scores_M).statistic < 0.1


def test_both_sides_of_synthetic_pairs_have_all_words_and_no_common_sentence():
    corpus = SyntheticPairs.prepare(SyntheticPairsConfig())
    sides = [{text for row in texts(corpus, side) for text in row} for side in ("train", "val")]
    words = {word for pair in MEANINGS for word in pair} | set(FILLERS)
    assert not sides[0] & sides[1]
    assert all({word for text in side for word in text.split()} == words for side in sides)
    orders = {tuple(meanings(word) == {"big"} for word in text.split()) for text in sides[0] if "big" in text.split()}
    assert len(orders) == 5, "words have fixed places"


def test_a_triplet_of_synthetic_pairs_has_a_near_and_a_far_sentence():
    corpus = SyntheticPairs.prepare(SyntheticPairsConfig(num=100, form="triplets"))
    for anchor, near, far in texts(corpus, "train"):
        assert meanings(anchor) == meanings(near) and not meanings(anchor) & meanings(far)


def test_modules_of_the_standard_library_are_held_out_whole():
    corpus = StdlibPairs.prepare(StdlibPairsConfig())
    modules = [{first.partition(".")[0] for first, _ in texts(corpus, side)} for side in ("train", "val")]
    assert modules[0] and len(modules[1]) > 3 and not modules[0] & modules[1]
    share = len(corpus.val.scores_M) / (len(corpus.train.scores_M) + len(corpus.val.scores_M))
    assert 0.05 < share < 0.2 and len(corpus.train.scores_M) > 1000
    assert len({second for side in ("train", "val") for _, second in texts(corpus, side)}) == len(
        texts(corpus, "train") + texts(corpus, "val")
    )


ROWS = [{"a": "one, two", "b": "three\nfour", "score": 2.5}, {"a": "five", "b": 'a "quoted" word', "score": 5}]


def write(folder, suffix, rows):
    file = folder / f"pairs{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist([{**row, "score": float(row["score"])} for row in rows]), file)
    else:
        mark = "\t" if suffix == ".tsv" else ","
        quoted = [['"' + str(value).replace('"', '""') + '"' for value in row.values()] for row in rows]
        file.write_text("".join(mark.join(row) + "\n" for row in [list(rows[0]), *quoted]))
    return file


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    file = write(tmp_path, suffix, ROWS)
    found, scored = read_rows(pair_files(str(file)), (0.0, 5.0))
    assert scored and found == [Row(("one, two", "three four"), 0.5), Row(("five", 'a "quoted" word'), 1.0)]


def test_columns_decide_between_scores_pairs_and_triplets(tmp_path):
    for columns, expected in ((("anchor", "positive"), 2), (("anchor", "positive", "negative"), 3)):
        file = tmp_path / f"{expected}.jsonl"
        file.write_text("".join(json.dumps({name: f"{name} {row}" for name in columns}) + "\n" for row in range(20)))
        corpus = Pairs.prepare(PairsConfig(path=str(file)))
        assert corpus.format == {"vocab_size": 256, "sentences": expected, "scored": False}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "first,second\na,b\n", "line 2: columns first, second; rename them: a, b, score"),
        ("x.csv", "a,b,score\none,two,7\n", r"line 2: score '7' is no number between -1 and 1; .* data.range=\[0,5\]"),
        ("x.csv", "a,b,score\none,two,nan\n", "line 2: score 'nan' is no number"),
        ("x.tsv", "anchor\tpositive\none\n", "line 2: positive is missing"),
        ("x.csv", "anchor,positive\none, \n", "line 2: positive is empty"),
        ("x.csv", "anchor,positive\nI ate, then slept,b\n", "line 2: 3 fields below 2 columns; put a text that holds"),
        ("x.tsv", "a\tb\tscore\none\ttwo\t1\t\t\n", "line 2: 5 fields below 3 columns"),
        ("x.csv", "anchor,positive,positive\na,b,c\n", "line 2: two columns of the header have the same name"),
        ("x.jsonl", "[" * 100_000 + "\n", "line 1: no JSON"),
        (
            "x.jsonl",
            '{"anchor": "a", "positive": "b"}\n{"anchor": "c", "positive": "d", "negative": "e"}\n',
            "line 2: negative is missing in the first row",
        ),
        ("x.jsonl", '{"anchor": "a", "positive": 3}\n', "line 1: positive is no text"),
        ("x.jsonl", "[1]\n", "line 1: no object"),
        ("x.jsonl", "{\n", "line 1: no JSON"),
        ("x.csv", "a,b,score\n", "holds no row"),
        ("x.parquet", "PAR", "is no parquet file"),
        ("x.txt", "a", r"data=text reads x.txt"),
    ],
)
def test_an_invalid_file_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as refused:
        Pairs.prepare(PairsConfig(path=str(tmp_path / name)))
    assert len(str(refused.value).splitlines()) <= 2


def test_bytes_that_are_no_utf8_are_refused(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"anchor,positive\n\xff,b\n")
    with pytest.raises(ValueError, match="save it as UTF-8 csv"):
        Pairs.prepare(PairsConfig(path=str(tmp_path / "x.csv")))


def test_a_range_of_scores_belongs_to_scores(tmp_path):
    (tmp_path / "x.csv").write_text("anchor,positive\na,b\nc,d\n")
    with pytest.raises(ValueError, match="have no score; leave it out"):
        Pairs.prepare(PairsConfig(path=str(tmp_path / "x.csv"), range=(0, 5)))
    with pytest.raises(ValueError, match="must be below the second"):
        PairsConfig(path="x", range=(5, 0))
