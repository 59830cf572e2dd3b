"""What data=mqar and data=copy ask, answered by readers of the sequences that share no code with what draws them; what is
refused, in which words."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from stability.config.parts import validate_settings
from stability.registry import Registry

SPLITS = ("train", "val")


def prepared(name, **settings):
    return (
        Registry("data").load(name).prepare(validate_settings("data", name, {"num": 400, "held_out": 100, **settings}))
    )


def rows(corpus, split):
    """Return every sequence of a side with its answers, as lists."""
    side = getattr(corpus, split)
    count = len(side.tokens_MN)
    batch = corpus.windows(split, count, corpus.length)
    assert len(batch) == count
    return list(zip(batch.tokens_BN.tolist(), batch.answers_BN.tolist(), strict=True))


def recalled(tokens, pairs, asked):
    """Read the pairs into a dictionary, then answer every position that is asked by looking its token up."""
    reader = iter(tokens)
    known = {key: next(reader) for key, _ in zip(reader, range(pairs), strict=False)}
    assert len(known) == pairs, "a key stands in two pairs"
    return {place: known[tokens[place]] for place in asked}


MQAR = [{}, {"queries": 24}, {"filler": "blank"}, {"pairs": 15, "queries": 3}, {"vocab_size": 18, "power": 1.0}]


@pytest.mark.parametrize("settings", MQAR)
def test_a_dictionary_answers_every_query(settings):
    corpus = prepared("mqar", **settings)
    pairs, queries = settings.get("pairs", 8), settings.get("queries", 8)
    for split in SPLITS:
        for tokens, answers in rows(corpus, split):
            asked = [place for place, answer in enumerate(answers) if answer >= 0]
            assert len(asked) == queries and min(asked) >= 2 * pairs
            assert recalled(tokens, pairs, asked) == {place: answers[place] for place in asked}
            # every key as often as any other, or once more
            counts = collections.Counter(tokens[place] for place in asked)
            assert max(counts.values()) - (min(counts.values()) if len(counts) == pairs else 0) <= 1


@pytest.mark.parametrize("queries", [None, 20])
def test_training_sequences_may_have_fewer_pairs_and_held_out_ones_have_all(queries):
    corpus = prepared("mqar", fewest_pairs=3, queries=queries, num=600, filler="blank")
    found = {split: collections.Counter() for split in SPLITS}
    for split in SPLITS:
        for tokens, answers in rows(corpus, split):
            pairs = tokens.index(0) // 2 if 0 in tokens[:16:2] else 8
            while tokens[2 * pairs - 1] < 32:  # behind the pairs stands a key, and no value after it
                pairs -= 1
            asked = [place for place, answer in enumerate(answers) if answer >= 0]
            assert len(asked) == (queries or pairs)
            assert recalled(tokens, pairs, asked) == {place: answers[place] for place in asked}
            found[split][pairs] += 1
    assert found["val"] == {8: 100} and found["train"] == dict.fromkeys(range(3, 9), 100)


def test_keys_and_values_are_of_their_halves_without_repetition():
    for tokens, _ in rows(prepared("mqar", vocab_size=20), "train"):
        keys, values = tokens[:16:2], tokens[1:16:2]
        assert len(set(keys)) == len(set(values)) == 8
        assert set(keys) <= set(range(1, 10)) and set(values) <= set(range(10, 20))


def test_all_keys_and_values_are_alike():
    tokens = prepared("mqar", vocab_size=20, num=9000).train.tokens_MN
    for own, first, num in ((tokens[:, :16:2], 1, 9), (tokens[:, 1:16:2], 10, 10)):
        for column in own.T:  # in whichever pair
            counts = np.bincount(column, minlength=20)[first : first + num]
            expected = 9000 / num
            assert abs(counts - expected).max() < 5 * expected**0.5
    # which value a key has is not known by the key
    together = np.zeros((20, 20))
    np.add.at(together, (tokens[:, :16:2].ravel(), tokens[:, 1:16:2].ravel()), 1)
    expected = 9000 * 8 / 90
    assert abs(together[1:10, 10:] - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_are_those_of_numpys_own_choice_by_a_power_law(power):
    """Against `numpy.random.Generator.choice`, place by place within 4.5 standard deviations of both counts."""
    num, places, queries = 4000, 24, 8
    corpus = prepared("mqar", power=power, num=num)
    asked = (corpus.train.answers_MN < corpus.vocab_size)[:, 16::2].sum(0)
    weights = np.array([j ** (power - 1) for j in range(1, places + 1)])
    rng = np.random.default_rng(0)
    drawn = [rng.choice(places, queries, replace=False, p=weights / weights.sum()) for _ in range(num)]
    expected = np.bincount(np.concatenate(drawn), minlength=places)
    assert not (corpus.train.answers_MN < corpus.vocab_size)[:, 17::2].any()
    assert (abs(asked - expected) < 4.5 * np.sqrt(2 * expected + 1)).all()


def said(tokens, vocab_size):
    """Return what is neither blank nor mark before the marks, and how many marks there are."""
    marks = tokens.count(vocab_size - 1)
    assert tokens[-marks:] == [vocab_size - 1] * marks
    return [token for token in tokens if token not in (0, vocab_size - 1)], marks


@pytest.mark.parametrize("settings", [{}, {"selective": False}, {"vocab_size": 4, "copied": 16, "length": 32}])
def test_a_reader_says_what_is_copied(settings):
    corpus = prepared("copy", **settings)
    length, copied = settings.get("length", 64), settings.get("copied", 8)
    for split in SPLITS:
        for tokens, answers in rows(corpus, split):
            found, marks = said(tokens, corpus.vocab_size)
            assert marks == len(found) == copied and len(tokens) == length
            assert answers == [-1] * (length - copied) + found
            assert settings.get("selective", True) or tokens[:copied] == found


def test_selective_places_are_all_alike_and_tokens_too():
    corpus = prepared("copy", num=5000)
    taken = (corpus.train.tokens_MN[:, :56] > 0).sum(0)
    expected = 5000 * 8 / 56
    assert abs(taken - expected).max() < 5 * expected**0.5
    counts = np.bincount(corpus.train.answers_MN[:, 56:].ravel())[1:]
    assert len(counts) == 14 and abs(counts - 40000 / 14).max() < 5 * (40000 / 14) ** 0.5


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mqar", {"vocab_size": 4, "length": 4, "pairs": 1, "filler": "blank", "num": 2000, "held_out": 1}),
        ("copy", {"vocab_size": 4, "length": 4, "copied": 2, "num": 5000, "held_out": 9}),
    ],
)
def test_nothing_held_out_is_trained_on_where_there_are_few_sequences(name, settings):
    corpus = prepared(name, **settings)
    train, val = ({row.tobytes() for row in getattr(corpus, split).tokens_MN} for split in SPLITS)
    assert not train & val and len(val) == len(corpus.val.tokens_MN)
    assert len(corpus.train.tokens_MN) == settings["num"]


def test_another_seed_draws_other_sequences_and_a_seed_the_same():
    one, again, other = (prepared("mqar", seed=seed) for seed in (0, 0, 1))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert not np.array_equal(one.val.tokens_MN, other.val.tokens_MN)


def test_frequencies_are_those_of_the_answers():
    corpus = prepared("mqar", vocab_size=18)
    asked = [answer for _, answers in rows(corpus, "train") for answer in answers if answer >= 0]
    counts = np.bincount(asked, minlength=18) + 1
    assert np.allclose(corpus.log_frequencies().numpy(), np.log(counts / counts.sum()))
    assert counts[:9].max() == 1, "no key is an answer"


REFUSED = [
    ("mqar", {"pairs": 32}, "data.pairs=32: a vocabulary of 64 has 31 keys, .* give data.vocab_size=66 or more"),
    ("mqar", {"queries": 25}, "data.length=64: 8 pairs and 25 queries need 66 tokens, two each"),
    ("mqar", {"pairs": 17}, "data.length=64: 17 pairs and 17 queries need 68 tokens, two each"),
    ("mqar", {"fewest_pairs": 9}, "data.fewest_pairs=9 must be at most data.pairs=8"),
    ("mqar", {"power": 0.0}, "data.power=0.0: .*greater than 0"),
    ("copy", {"copied": 33}, "data.length=64: 33 tokens and their copies need 66 positions"),
    ("copy", {"vocab_size": 3}, "data.vocab_size=3: .*greater than or equal to 4"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_what_cannot_fit_is_refused_in_a_line(name, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_settings("data", name, settings)
    assert len(str(caught.value).splitlines()) == 1


def test_too_few_sequences_and_another_length_are_refused_in_a_line():
    with pytest.raises(ValueError, match="data.held_out=100: copying, drawn .* are so few") as caught:
        prepared("copy", vocab_size=4, length=4, copied=2, selective=False)
    assert len(str(caught.value).splitlines()) == 1
    corpus = prepared("mqar")
    corpus.require(64)
    message = r"model\.positions=32: every sequence has 64 tokens; give model\.positions=64 or data\.length=32"
    with pytest.raises(ValueError, match=message):
        corpus.require(32)


def test_an_altered_file_is_refused(tmp_path):
    corpus = prepared("mqar")
    corpus.save(tmp_path / "kept")
    file = tmp_path / "kept" / "val_answers.npy"
    altered = np.load(file)
    altered[altered < 64] = 40
    np.save(file, altered)
    with pytest.raises(ValueError, match="val_answers.npy is missing or damaged"):
        type(corpus).load(tmp_path / "kept")


def test_a_batch_is_rows_of_its_side():
    corpus = prepared("mqar")
    batch = corpus.batch("val", 50, 64, torch.Generator().manual_seed(2))
    known = {tuple(tokens): answers for tokens, answers in rows(corpus, "val")}
    for tokens, answers in zip(batch.tokens_BN.tolist(), batch.answers_BN.tolist(), strict=True):
        assert known[tuple(tokens)] == answers
