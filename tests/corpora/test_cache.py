"""`prepare` and `load`: what is kept, what is read again, and what happens when two processes meet."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stability.config.parts import part
from stability.corpora.cache import load, prepare
from stability.corpora.tokens.corpus import Corpus
from stability.data import stdlib, text

ROOT = Path(__file__).resolve().parents[2]
CONTENT = "".join(f"line {index} of a text\n" for index in range(2000))


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "some.txt"
    file.write_text(CONTENT)
    return part("data", {"name": "text", "path": str(file)})


def forbid_reading(monkeypatch):
    def refuse(*_):
        raise AssertionError("the file was tokenised again")

    monkeypatch.setattr(text, "documents", refuse)


def test_second_prepare_reads_the_cache(source, tmp_path, monkeypatch):
    first = prepare(source, tmp_path / "cache")
    forbid_reading(monkeypatch)
    second = prepare(source, tmp_path / "cache")
    assert second.fingerprint == first.fingerprint and isinstance(second.train_tokens, np.memmap)
    assert load(tmp_path / "cache", first.fingerprint).description == first.description


def test_the_same_content_elsewhere_is_not_tokenised_again(source, tmp_path, monkeypatch):
    first = prepare(source, tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other name.TXT").write_text(CONTENT)
    forbid_reading(monkeypatch)
    assert (
        prepare(part("data", {"name": "text", "path": str(tmp_path / "elsewhere")}), tmp_path / "cache").fingerprint
        == first.fingerprint
    )


def test_changed_content_is_tokenised_again(source, tmp_path):
    first = prepare(source, tmp_path / "cache")
    Path(source.settings.path).write_text(CONTENT.replace("line 7 ", "line 8 "))
    assert prepare(source, tmp_path / "cache").fingerprint != first.fingerprint


def test_content_that_changes_while_it_is_read_is_refused(source, tmp_path, monkeypatch):
    def read_and_change(file, field):
        yield from (CONTENT, "another document")
        Path(file).write_text("changed")

    monkeypatch.setattr(text, "documents", read_and_change)
    with pytest.raises(ValueError, match="data=text reads changed while it was read"):
        prepare(source, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_truncated_cache_is_refused(source, tmp_path):
    corpus = prepare(source, tmp_path / "cache")
    file = tmp_path / "cache" / corpus.fingerprint / "train.npy"
    content = file.read_bytes()
    del corpus
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"train\.npy is missing or damaged"):
        prepare(source, tmp_path / "cache")


@pytest.mark.parametrize("entry", ["", "not a fingerprint", "0" * 64, "\xff"])
def test_a_useless_index_entry_costs_only_time(source, tmp_path, entry):
    corpus = prepare(source, tmp_path / "cache")
    [index] = (tmp_path / "cache" / "index").iterdir()
    index.write_text(entry, encoding="latin-1")
    assert prepare(source, tmp_path / "cache").fingerprint == corpus.fingerprint
    assert index.read_text().strip() == corpus.fingerprint


def test_load_says_what_is_missing_or_misplaced(source, tmp_path):
    with pytest.raises(ValueError, match="no prepared data with the fingerprint abc under"):
        load(tmp_path / "cache", "abc")
    corpus = prepare(source, tmp_path / "cache")
    (tmp_path / "cache" / corpus.fingerprint).rename(tmp_path / "cache" / ("0" * 64))
    with pytest.raises(ValueError, match="holds another corpus"):
        load(tmp_path / "cache", "0" * 64)


def test_unreadable_data_write_nothing(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare(part("data", {"name": "text", "path": str(tmp_path / "bad.txt")}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_is_the_machines_fault(source, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(RuntimeError, match=r"cannot keep the prepared data under .*cache: .*(exists|Not a directory)"):
        prepare(source, tmp_path / "cache")


RACER = """
import sys, time
from pathlib import Path
from stability.config.parts import part
from stability.corpora.cache import prepare

folder, me = Path(sys.argv[1]), sys.argv[2]
sources = [part("data", {"name": "text", "path": str(file)}) for file in sorted(folder.glob("*.txt"))]
sources.append(part("data", {"name": "dna", "path": str(folder / "genome.fa"), "reverse_complement": True}))
(folder / f"ready-{me}").touch()
while not (folder / "go").exists():
    time.sleep(0.0001)
print(*(prepare(source, folder / "cache").fingerprint for source in sources))
"""


@pytest.mark.slow  # two processes that import torch; the next test has the loser of such a race
def test_two_processes_prepare_at_once(tmp_path):
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text(CONTENT + str(index))
    (tmp_path / "genome.fa").write_text(">one\n" + "ACGT" * 20_000 + "\n")
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, str(me)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for me in (0, 1)
    ]
    while not all((tmp_path / f"ready-{me}").exists() or racer.poll() is not None for me, racer in enumerate(racers)):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    answers = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    fingerprints = answers[0][0].split()
    assert len(set(fingerprints)) == 21
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == sorted([*fingerprints, "index"])
    assert len(list((tmp_path / "cache" / "index").iterdir())) == 21


def test_the_loser_of_a_race_discards_its_copy(source, tmp_path, monkeypatch):
    write = Corpus._write

    def write_late(self, folder):
        write(self, folder)
        monkeypatch.setattr(Corpus, "_write", write)
        self.save(tmp_path / "cache" / self.fingerprint)  # another process comes first

    monkeypatch.setattr(Corpus, "_write", write_late)
    corpus = prepare(source, tmp_path / "cache")
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == sorted([corpus.fingerprint, "index"])


@pytest.fixture(scope="module")
def stdlib_cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("stdlib")
    return cache, prepare(part("data", "stdlib"), cache)


def test_stdlib_is_english_text_of_a_million_characters_or_more(stdlib_cache):
    _, corpus = stdlib_cache
    assert len(corpus.train_tokens) > 1e6 and corpus.description.startswith("standard library docstrings of CPython 3.")
    assert corpus.num_val_documents == -(-(corpus.num_train_documents + corpus.num_val_documents) // 100)
    assert 2.8 < corpus.unigram_nats < 3.6
    corpus.require(1024)
    documents = set(bytes(corpus.train_tokens.astype(np.uint8)).split(b"\0")) | set(
        bytes(corpus.val_tokens.astype(np.uint8)).split(b"\0")
    )
    assert len(documents) == corpus.num_train_documents + corpus.num_val_documents
    assert (Path.__doc__ or "").split("\n")[0].encode() in b"\n".join(documents)


def test_stdlib_is_parsed_once(stdlib_cache, monkeypatch):
    cache, corpus = stdlib_cache
    monkeypatch.setattr(stdlib, "documents", lambda file: pytest.fail("parsed again"))
    assert prepare(part("data", "stdlib"), cache).fingerprint == corpus.fingerprint
