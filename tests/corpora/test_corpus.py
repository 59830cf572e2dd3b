"""`Corpus`: split, fingerprint, windows, token frequencies, and its copy on disk."""

import hashlib
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from stability.corpora.io import disk as _arrays
from stability.corpora.io.disk import token_dtype
from stability.corpora.tokens import split as _split
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.vocabulary import ByteTokenizer


def texts(num=250, seed=0):
    rng = random.Random(seed)
    return [f"document {index}: " + "".join(rng.choices("abcdefgh é\n", k=rng.randint(5, 90))) for index in range(num)]


def as_documents(tokens):
    return ByteTokenizer().decode(tokens).split("\0")


def of(train, val, vocab_size):
    """A corpus of given tokens; what it says about documents does not matter."""
    train, val = np.asarray(train, dtype=np.uint16), np.asarray(val, dtype=np.uint16)
    return Corpus.of(train, val, vocab_size=vocab_size, description="", num_train_documents=1, num_val_documents=1)


@pytest.fixture(scope="module")
def corpus():
    return split_documents(texts(), "made up")


def test_bytes_survive_the_round_trip():
    tokenizer = ByteTokenizer()
    text = "naïve – 日本 🐍\r\n"
    assert tokenizer.encode(text).dtype == np.uint16 and int(tokenizer.encode(text).max()) < tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"


def test_split_holds_out_one_percent_rounded_up_and_shares_no_document(corpus):
    train, val = as_documents(corpus.train_tokens), as_documents(corpus.val_tokens)
    assert (len(train), len(val)) == (corpus.num_train_documents, corpus.num_val_documents) == (247, 3)
    assert sorted(train + val) == sorted(texts())


def test_held_out_documents_are_the_first_by_sha256(corpus):
    by_sum = sorted(texts(), key=lambda text: hashlib.sha256(text.encode()).digest())
    assert as_documents(corpus.val_tokens) == by_sum[:3]
    assert as_documents(corpus.train_tokens) == by_sum[3:]


@pytest.mark.parametrize(("num", "num_held_out"), [(2, 1), (100, 1), (101, 2), (200, 2)])
def test_at_least_one_document_is_held_out(num, num_held_out):
    assert split_documents(texts(num), "made up").num_val_documents == num_held_out


@pytest.mark.parametrize("asked", [5, 64, 256])
def test_the_documents_that_a_short_validation_asks_for_are_the_fewest_that_suffice(asked):
    # 80 documents of 24 bytes (and a separator) on windows of 8: one held-out document is 3 windows
    of_one_length = [f"{number:024d}" for number in range(10_000)]
    few = split_documents(of_one_length[:80], "made up")
    num = len(few.windows("val", asked, 8))
    advice = few.advise_more(num, asked, 8)
    assert advice.startswith("1 % of the documents is held out: about ") and advice.endswith("(80 now)")
    wanted = int(advice.split(" about ")[1].split()[0].replace(",", ""))
    assert len(split_documents(of_one_length[:wanted], "").windows("val", asked, 8)) == asked
    assert len(split_documents(of_one_length[: wanted - 1], "").windows("val", asked, 8)) < asked


def test_repetitions_and_order_change_nothing(corpus):
    shuffled = texts() + texts()[:40]
    random.Random(1).shuffle(shuffled)
    other = split_documents(shuffled, "made up")
    assert other.fingerprint == corpus.fingerprint
    assert "40 exact repetitions left out" in other.description
    assert not set(as_documents(other.val_tokens)) & set(as_documents(other.train_tokens))


def test_one_changed_letter_changes_the_fingerprint(corpus):
    changed = texts()
    changed[7] = changed[7].replace("document", "Document")
    assert split_documents(changed, "made up").fingerprint != corpus.fingerprint


def test_fingerprint_knows_sides_and_vocabulary():
    variants = [
        of([1, 2, 3], [3, 2], 256),
        of([3, 2], [1, 2, 3], 256),
        of([1, 2, 3], [3, 2], 257),
        of([1, 2, 3, 3], [2], 256),
    ]
    assert len({corpus.fingerprint for corpus in variants}) == 4 and all(
        len(corpus.fingerprint) == 64 for corpus in variants
    )


def test_description_counts_documents_and_characters(corpus):
    assert corpus.description == f"made up: 250 documents, {sum(map(len, texts())):,} characters"


def test_unigram_nats_equal_a_slow_loop(corpus):
    counts = dict.fromkeys(range(256), 1)
    for token in corpus.train_tokens.tolist():
        counts[token] += 1
    total = sum(counts.values())
    slow = sum(-math.log(counts[token] / total) for token in corpus.val_tokens.tolist()) / len(corpus.val_tokens)
    assert corpus.unigram_nats == pytest.approx(slow, rel=1e-12)


def test_unigram_nats_of_a_token_that_training_never_saw_are_finite():
    corpus = of([1] * 8, [9] * 2, 10)
    assert corpus.unigram_nats == pytest.approx(math.log(18))


def test_one_distinct_document_cannot_be_split():
    with pytest.raises(
        ValueError,
        match=r"made up holds 1 distinct document; at least 2 are needed, so that one can be held out: add some",
    ):
        split_documents(["the same"] * 5, "made up", ": add some")


def test_large_vocabularies_take_four_bytes_a_token(tmp_path):
    train, val = np.array([70_000, 1, 65_536] * 9, dtype=np.uint32), np.array([65_535, 70_000], dtype=np.uint32)
    corpus = Corpus.of(train, val, vocab_size=70_001, description="", num_train_documents=1, num_val_documents=1)
    corpus.save(tmp_path / "corpus")
    loaded = Corpus.load(tmp_path / "corpus")
    assert (
        loaded.fingerprint == corpus.fingerprint
        and loaded.train_tokens.dtype == np.uint32
        and isinstance(loaded.train_tokens, np.memmap)
    )
    assert loaded.windows("train", 1, 27).tolist() == [train.tolist()]
    assert (token_dtype(65_536), token_dtype(65_537)) == (np.uint16, np.uint32)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_pieces_of_any_size_give_the_same_corpus(corpus, monkeypatch, tmp_path, size):
    for module in (_arrays, _split):
        monkeypatch.setattr(module, "TOKENS_PER_CHUNK", size)
    other = split_documents(texts(), "made up", scratch=tmp_path)
    assert other.fingerprint == corpus.fingerprint and other.unigram_nats == corpus.unigram_nats
    assert isinstance(other.train_tokens, np.memmap) and np.array_equal(other.train_tokens, corpus.train_tokens)
    other.save(tmp_path / "corpus")
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus"]  # the tokens lay in files without a name
    assert np.array_equal(Corpus.load(tmp_path / "corpus").train_tokens, corpus.train_tokens)


def test_fingerprints_of_bytes_are_those_of_the_first_version():
    corpus = split_documents(["one document", "another document", "a third"], "made up")
    sums = [
        hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()
        for tokens in (corpus.train_tokens, corpus.val_tokens)
    ]
    assert corpus.fingerprint == hashlib.sha256(json.dumps(["stability corpus", 1, 256, *sums]).encode()).hexdigest()


def test_tokens_past_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="token 9 on the held-out side; the vocabulary has 5"):
        of([0] * 4, [9] * 2, 5)


def test_require_names_side_tokens_and_positions(corpus):
    corpus.require(len(corpus.val_tokens) // 2)
    num = len(corpus.val_tokens)
    with pytest.raises(
        ValueError, match=rf"the held-out 1 % has {num} tokens; model.positions={num} needs at least {2 * num:,}"
    ) as caught:
        corpus.require(num)
    assert f"model.positions={num // 2} or less" in str(caught.value) and str(caught.value).count("\n") == 1
    short = of([0] * 40, [0] * 900, 5)
    with pytest.raises(ValueError, match=r"the training side has 40 tokens; model\.positions=64 needs at least 128"):
        short.require(64)


def test_batch_is_a_function_of_its_generator(corpus):
    def draw(seed):
        return corpus.batch("train", 5, 16, torch.Generator().manual_seed(seed))

    torch.manual_seed(0)
    first = draw(3)
    torch.manual_seed(99)
    np.random.seed(99)
    assert first.shape == (5, 16) and first.dtype == torch.int64
    assert torch.equal(first, draw(3)) and not torch.equal(first, draw(4))


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_window_lies_in_its_own_split(corpus, split):
    tokens = corpus.train_tokens if split == "train" else corpus.val_tokens
    own = {tokens[start : start + 24].tobytes() for start in range(len(tokens) - 23)}
    drawn = torch.cat([corpus.batch(split, 300, 24, torch.Generator().manual_seed(0)), corpus.windows(split, 50, 24)])
    assert all(row.astype(np.uint16).tobytes() in own for row in drawn.numpy())


def test_batch_reaches_every_start_equally_often():
    corpus = of(range(10), range(10), 10)
    starts = corpus.batch("train", 40_000, 4, torch.Generator().manual_seed(0))[:, 0]
    counts = torch.bincount(starts, minlength=7)
    assert len(counts) == 7  # starts 0…6, the last window ends with the last token
    assert (counts - 40_000 / 7).abs().max() < 5 * (40_000 / 7) ** 0.5


@pytest.mark.parametrize("num", [1, 2, 3, 7, 1000])
def test_windows_are_fixed_even_and_apart(num):
    corpus = of(range(103), range(103), 103)
    starts = corpus.windows("val", num, 10)[:, 0]
    assert torch.equal(corpus.windows("val", num, 10), starts[:, None] + torch.arange(10))
    assert len(starts) == min(num, 10) and starts[0] == 0
    gaps = starts.diff()
    assert (gaps >= 10).all() and (len(gaps) == 0 or gaps.max() - gaps.min() <= 1)
    assert num == 1 or starts[-1] == 93


def test_split_names_and_lengths_are_checked(corpus):
    with pytest.raises(ValueError, match="no split 'test'; choices: train, val"):
        corpus.windows("test", 1, 4)
    with pytest.raises(ValueError, match="one window of 100000 does not fit"):
        corpus.batch("val", 1, 100_000, torch.Generator())


def test_what_is_saved_is_what_is_loaded(corpus, tmp_path):
    corpus.save(tmp_path / "deep" / "corpus")
    loaded = Corpus.load(tmp_path / "deep" / "corpus")
    assert isinstance(loaded.train_tokens, np.memmap) and not loaded.train_tokens.flags.writeable
    assert np.array_equal(loaded.train_tokens, corpus.train_tokens) and np.array_equal(
        loaded.val_tokens, corpus.val_tokens
    )
    plain = ("vocab_size", "fingerprint", "description", "num_train_documents", "num_val_documents", "unigram_nats")
    assert all(getattr(loaded, name) == getattr(corpus, name) for name in plain)
    assert torch.equal(loaded.windows("val", 4, 16), corpus.windows("val", 4, 16))
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["corpus"]


def test_saving_twice_keeps_the_first_and_another_corpus_is_refused(corpus, tmp_path):
    corpus.save(tmp_path / "corpus")
    inode = (tmp_path / "corpus").stat().st_ino
    corpus.save(tmp_path / "corpus")
    assert (tmp_path / "corpus").stat().st_ino == inode
    with pytest.raises(ValueError, match="holds another corpus"):
        split_documents(texts(20), "other").save(tmp_path / "corpus")
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def flip_last_bit(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip_last_bit, empty, Path.unlink])
@pytest.mark.parametrize("name", ["train.npy", "val.npy", "corpus.json"])
def test_a_damaged_file_is_refused_by_name(corpus, tmp_path, name, damage):
    corpus.save(tmp_path / "corpus")
    damage(tmp_path / "corpus" / name)
    with pytest.raises(ValueError) as caught:
        Corpus.load(tmp_path / "corpus")
    assert str(tmp_path / "corpus" / name) in str(caught.value) and "damaged" in str(caught.value)
    assert str(caught.value).count("\n") == 1 and f"Delete {tmp_path / 'corpus'}" in str(caught.value)


@pytest.mark.parametrize("change", [{"unigram_nats": 1.0}, {"vocab_size": 300}, {"fingerprint": "0" * 64}])
def test_changed_metadata_are_refused(corpus, tmp_path, change):
    corpus.save(tmp_path / "corpus")
    file = tmp_path / "corpus" / "corpus.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=r"corpus\.json is missing or damaged \(it was altered\)"):
        Corpus.load(tmp_path / "corpus")
