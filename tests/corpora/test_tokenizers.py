"""Tokenizers: GPT-2's encoding against another library's, what `keep` leaves of it, and what missing or wrong rank
files are told."""

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.corpora.tokens import gpt2 as _gpt2
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.gpt2 import Gpt2Tokenizer, read_ranks
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.vocabulary import Vocabulary
from stability.data.text import Text, TextConfig

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "ab")]
TEXTS = [f"abc ab {letter} <|endoftext|> é\n" * (index + 1) for index, letter in enumerate("stuvwxyz")]


def symbols():
    """The characters that GPT-2's files write the 256 bytes as, in rank order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in kept] + [chr(256 + index) for index in range(256 - len(kept))]


@pytest.fixture
def ranks(tmp_path):
    """A small encoding in GPT-2's format: 256 bytes, three merges, end-of-text."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    numbers = {token: index for index, token in enumerate([*symbols(), *map("".join, MERGES), "<|endoftext|>"])}
    (folder / "vocab.bpe").write_text(
        "#version: 0.2\n" + "".join(f"{first} {second}\n" for first, second in MERGES), encoding="utf-8"
    )
    (folder / "encoder.json").write_text(json.dumps(numbers))
    return folder


@pytest.fixture
def source(tmp_path, ranks):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return {"path": str(tmp_path / "a.jsonl"), "tokenizer": "gpt2", "ranks": str(ranks)}


def test_merges_come_in_rank_order(ranks):
    tokenizer = Gpt2Tokenizer(str(ranks))
    assert tokenizer.encode("abc ab").tolist() == [257, 258]
    assert len(tokenizer.vocabulary.pieces) == 260 and tokenizer.vocabulary.separator == 259
    assert tokenizer.vocabulary.pieces[256:] == (b"ab", b"abc", b" ab", b"<|endoftext|>")


def test_every_text_survives_the_round_trip(ranks):
    tokenizer = Gpt2Tokenizer(str(ranks))
    text = "naïve – 日本 🐍\r\n <|endoftext|> abc\0"
    assert tokenizer.vocabulary.decode(tokenizer.encode(text)) == text
    assert 259 not in tokenizer.encode("<|endoftext|>")  # in a text it is text


def renumbered(ranks, first, last=()):
    """The same encoding as the library tokenizers writes it, its special tokens first."""
    names = [*first, *symbols(), *map("".join, MERGES), *last]
    (ranks / "encoder.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    return ranks


@pytest.mark.parametrize(
    ("first", "last", "separator"),
    [
        (["<|endoftext|>"], [], 0),
        (["<s>", "<pad>", "</s>"], [], 2),
        (["[PAD]", "[UNK]"], ["</s>"], 261),
        (["<s>", "</s>"], ["<|endoftext|>"], 261),
        (["<unk>"], [], 260),
        ([], [], 259),
    ],
)
def test_special_tokens_may_come_before_the_bytes(ranks, first, last, separator):
    text = "naïve abc <s> <|endoftext|> ab\n"
    plain = Gpt2Tokenizer(str(ranks)).encode(text)
    tokenizer = Gpt2Tokenizer(str(renumbered(ranks, first, last)))
    assert tokenizer.encode(text).tolist() == (plain + len(first)).tolist()
    assert tokenizer.vocabulary.decode(tokenizer.encode(text)) == text
    added = 0 if {"<|endoftext|>", "</s>"} & {*first, *last} else 1
    assert len(tokenizer.vocabulary.pieces) == len(first) + 259 + len(last) + added
    assert tokenizer.vocabulary.separator == separator and separator not in tokenizer.encode(text)


def test_an_own_encoding_of_another_library_gives_its_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator(TEXTS * 5, vocab_size=290, special_tokens=["<s>", "<pad>", "</s>"])
    theirs.save_model(str(tmp_path))
    (tmp_path / "vocab.json").rename(tmp_path / "encoder.json")
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    text = "abc ab s stuv é"
    assert Gpt2Tokenizer(str(tmp_path)).encode(text).tolist() == theirs.encode(text).ids


def test_long_documents_of_one_character_are_encoded(ranks):
    assert len(Gpt2Tokenizer(str(ranks)).encode("x" * 300_000)) == 300_000


def test_documents_stand_apart_by_end_of_text(source):
    corpus = Text.prepare(TextConfig(**source))
    assert corpus.vocab_size == 260 and corpus.train_tokens.dtype == np.uint16
    assert set(corpus.decode(corpus.train_tokens).split("é\n<|endoftext|>")) - {""}
    ends = np.flatnonzero(corpus.train_tokens == 259)
    found = [corpus.decode(piece[piece != 259]) for piece in np.split(corpus.train_tokens, ends)]
    assert set(found) | {corpus.decode(corpus.val_tokens)} == set(TEXTS)
    assert corpus.description.endswith(f"; BPE of {source['ranks']}, 260 tokens")


def test_keep_keeps_the_commonest_of_the_training_side_and_end_of_text(source):
    whole, corpus = Text.prepare(TextConfig(**source)), Text.prepare(TextConfig(**source, keep=6))
    counts = Counter(token for token in whole.train_tokens.tolist() if token != 259)
    commonest = sorted(counts, key=lambda token: (-counts[token], token))[:5]
    kept = sorted([*commonest, 259])
    slow = [kept.index(token) if token in kept else 6 for token in whole.train_tokens.tolist()]
    assert corpus.vocab_size == 7 and corpus.train_tokens.tolist() == slow
    assert corpus.decode([0, 6]) == whole.decode([kept[0]]) + "\ufffd"
    inside = [token for token in slow if token != kept.index(259)]
    assert f"6 commonest kept, unknown {inside.count(6) / len(inside):.2%} of training and" in corpus.description


def test_each_setting_makes_another_corpus(source, ranks):
    variants = [{}, {"keep": 6}, {"keep": 7}]
    assert len({Text.prepare(TextConfig(**source, **settings)).fingerprint for settings in variants}) == 3
    assert len({Text.cache_key(TextConfig(**source, **settings)) for settings in variants}) == 3
    assert Text.prepare(TextConfig(path=source["path"])).fingerprint != Text.prepare(TextConfig(**source)).fingerprint
    before = Text.cache_key(TextConfig(**source))
    (ranks / "vocab.bpe").write_text((ranks / "vocab.bpe").read_text(encoding="utf-8") + "a a\n", encoding="utf-8")
    assert Text.cache_key(TextConfig(**source)) != before


def test_a_size_that_leaves_nothing_out_is_refused(source):
    with pytest.raises(
        ValueError, match=r"data\.keep=260: the tokenizer has 260 tokens; give fewer, or data\.keep=null"
    ):
        Text.prepare(TextConfig(**source, keep=260))


def test_the_vocabulary_is_kept_with_the_corpus(source, tmp_path):
    corpus = prepare(part("data", {"name": "text", **source, "keep": 6}), tmp_path / "cache")
    loaded = Corpus.load(tmp_path / "cache" / corpus.fingerprint)
    assert (
        loaded.vocabulary == corpus.vocabulary
        and loaded.vocabulary.name == "gpt2"
        and loaded.vocabulary.separator is not None
    )
    assert loaded.decode(loaded.val_tokens) == Text.prepare(TextConfig(**source, keep=6)).decode(loaded.val_tokens)
    with pytest.raises(ValueError, match="token 7 stands for no text; the vocabulary 'gpt2' has 7"):
        loaded.decode([7])


def test_a_damaged_vocabulary_is_refused_by_name(source, tmp_path):
    corpus = prepare(part("data", {"name": "text", **source}), tmp_path / "cache")
    file = tmp_path / "cache" / corpus.fingerprint / "vocabulary.json"
    file.write_text(file.read_text().replace("abc", "abd"))
    with pytest.raises(ValueError, match=r"vocabulary\.json is missing or damaged \(it was altered\)"):
        Corpus.load(file.parent)


def test_bytes_are_decoded_without_a_vocabulary_and_other_unknown_tokens_are_not():
    corpus = split_documents(["one", "two"], "made up")
    assert corpus.vocabulary is None and {corpus.decode(corpus.train_tokens), corpus.decode(corpus.val_tokens)} == {
        "one",
        "two",
    }
    numbers = np.arange(5, dtype=np.uint16)
    unknown = Corpus.of(
        numbers, numbers, vocab_size=5, description="numbers", num_train_documents=1, num_val_documents=1
    )
    with pytest.raises(ValueError, match="what its 5 tokens stand for was not kept; read: numbers"):
        unknown.decode([1])


def test_any_bytes_survive_json():
    vocabulary = Vocabulary(
        "any", tuple(bytes([first, 255 - first]) for first in range(256)), separator=3, complement=(1, 0)
    )
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        (
            "vocab.bpe",
            lambda text: text.replace("ab c", "ab c d"),
            "vocab.bpe, line 3 is no merge of two tokens: 'ab c d'",
        ),
        ("vocab.bpe", lambda text: text.replace("ab c", "ab 日"), "vocab.bpe, line 3 is no merge of two tokens"),
        (
            "vocab.bpe",
            lambda text: text.replace("ab c\n", ""),
            "numbers 'abc', which vocab.bpe beside it does not make",
        ),
        ("encoder.json", lambda text: text.replace("<|endoftext|>", "the end"), "numbers 'the end', which vocab.bpe"),
        ("encoder.json", lambda text: text.replace("259", "260"), "does not number the 259 tokens of vocab.bpe beside"),
        (
            "encoder.json",
            lambda text: text.replace("258", "true"),
            "does not number the 259 tokens of vocab.bpe beside",
        ),
        ("encoder.json", lambda text: text[:-9], "encoder.json is no JSON"),
        ("encoder.json", lambda _: "[]", "does not number the 259 tokens of vocab.bpe beside it"),
        (
            "encoder.json",
            lambda text: text.replace("256", "999"),
            "does not number the 259 tokens of vocab.bpe beside it",
        ),
    ],
)
def test_wrong_rank_files_are_named(ranks, file, change, complaint):
    (ranks / file).write_text(change((ranks / file).read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_ranks(ranks)
    assert complaint in str(caught.value) and str(ranks) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_rank_files_is_told_what_belongs_there(tmp_path, source):
    (tmp_path / "ranks" / "encoder.json").unlink()
    for act in (Text.prepare, Text.cache_key):
        with pytest.raises(ValueError, match=r"data\.ranks=.*ranks: no encoder\.json in it; give the folder"):
            act(TextConfig(**source))


def test_neither_files_nor_network_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_gpt2, "HOME", "http://127.0.0.1:9/")  # nothing answers there
    started = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"missing in tiktoken's cache .* and not to be had from the network"
    ) as caught:
        Gpt2Tokenizer(None)
    assert str(caught.value).count("\n") == 1 and "data.ranks=FOLDER" in str(caught.value)
    assert time.monotonic() - started < 60


def test_settings_of_the_other_tokenizer_are_refused(tmp_path):
    for settings in ({"keep": 5}, {"ranks": "x"}):
        with pytest.raises(ValueError, match=r"belongs to data\.tokenizer=gpt2 \(data\.tokenizer=bytes given\)"):
            part("data", {"name": "text", "path": "x", **settings})


@pytest.fixture(scope="module")
def gpt2():
    if not (SHARED / "tokenizer" / "vocab.bpe").is_file():
        pytest.skip(f"{SHARED / 'tokenizer'} is not on this machine")
    return Gpt2Tokenizer(str(SHARED / "tokenizer"))


def test_gpt2_equals_the_implementation_of_transformers(gpt2):
    transformers = pytest.importorskip("transformers")
    folder = SHARED / "tokenizer"
    other = transformers.GPT2Tokenizer(vocab=str(folder / "encoder.json"), merges=str(folder / "vocab.bpe"))
    text = "It's 1,234 naïve\n\n\n  tests – 日本 🐍\r\n\tdon't   stop" + (
        Path(__file__).read_text(encoding="utf-8").replace("<|endoftext|>", "")
    )
    assert gpt2.encode(text).tolist() == other(text)["input_ids"]


def test_gpt2_has_its_known_tokens(gpt2):
    assert gpt2.encode("Hello world").tolist() == [15496, 995] and gpt2.vocabulary.separator == 50256
    assert gpt2.label == "GPT-2 BPE, 50,257 tokens"


def test_tiktokens_own_cache_is_used_without_a_network(gpt2, tmp_path, monkeypatch):
    import hashlib

    from tiktoken import registry

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(registry, "ENCODINGS", {})
    for name in _gpt2.FILES:
        (tmp_path / hashlib.sha1((_gpt2.HOME + name).encode()).hexdigest()).write_bytes(
            (SHARED / "tokenizer" / name).read_bytes()
        )
    monkeypatch.setattr(_gpt2.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked the network"))
    assert Gpt2Tokenizer(None).vocabulary == gpt2.vocabulary


def test_a_damaged_cache_without_a_network_names_the_remedy(tmp_path, monkeypatch):
    import hashlib

    def refuse(*_, **__):
        raise OSError("no network here")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_gpt2.urllib.request, "urlopen", refuse)
    for name in _gpt2.FILES:
        (tmp_path / hashlib.sha1((_gpt2.HOME + name).encode()).hexdigest()).write_bytes(b"cut sho")
    with pytest.raises(
        RuntimeError,
        match=r"damaged in tiktoken's cache .* and not to be had from the network \(no network here\)\.\n.*data\.ranks=FOLDER",
    ):
        Gpt2Tokenizer(None)


def test_openwebtext_with_gpt2_and_4096_kept(gpt2):
    path = SHARED / "text" / "openwebtext_1k.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    corpus = Text.prepare(TextConfig(path=str(path), tokenizer="gpt2", ranks=str(SHARED / "tokenizer"), keep=4096))
    assert corpus.vocab_size == 4097 and (len(corpus.train_tokens), len(corpus.val_tokens)) == (1_039_150, 16_847)
    assert corpus.unigram_nats == pytest.approx(5.5327, abs=1e-4)
