"""Streaming through the library datasets, from a folder of files: no network is needed, and none is asked."""

import builtins
import json
import random

import numpy as np
import pytest

datasets = pytest.importorskip("datasets")

from stability.config.parts import part  # noqa: E402
from stability.corpora.cache import prepare  # noqa: E402
from stability.corpora.tokens.augmentation import encode  # noqa: E402
from stability.corpora.tokens.records import split_records  # noqa: E402
from stability.corpora.tokens.split import split_documents  # noqa: E402
from stability.data import hf  # noqa: E402
from stability.data.hf import HuggingFaceConfig, HuggingFaceDataset  # noqa: E402

TEXTS = [f"row {index} of a dataset, é" for index in range(50)]


@pytest.fixture(autouse=True)
def no_network(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def folder_of(tmp_path, texts, field="text"):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"id": index, field: text}) + "\n" for index, text in enumerate(texts))
    )
    return str(folder)


def refusal(kind, **settings):
    with pytest.raises(kind) as caught:
        HuggingFaceDataset.prepare(HuggingFaceConfig(**settings))
    assert str(caught.value).count("\n") <= 1
    return str(caught.value)


def test_rows_are_documents_up_to_the_number_asked_for(tmp_path):
    folder = folder_of(tmp_path, TEXTS, "body")
    corpus = HuggingFaceDataset.prepare(HuggingFaceConfig(dataset=folder, field="body"))
    assert corpus.fingerprint == split_documents(TEXTS, "").fingerprint
    assert corpus.description.startswith("text of set, train: 50 documents, ")
    few = HuggingFaceDataset.prepare(HuggingFaceConfig(dataset=folder, field="body", max_documents=7))
    assert few.fingerprint == split_documents(TEXTS[:7], "").fingerprint


def test_null_rows_are_skipped_and_counted(tmp_path):
    corpus = HuggingFaceDataset.prepare(HuggingFaceConfig(dataset=folder_of(tmp_path, [None, *TEXTS, "", None])))
    assert corpus.fingerprint == split_documents(TEXTS, "").fingerprint
    assert corpus.description.endswith(", 2 null texts left out")


def test_parquet_and_splits_of_its_own_are_read(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(folder / "train-00000.parquet"))
    datasets.Dataset.from_dict({"text": TEXTS[::2]}).to_parquet(str(folder / "test-00000.parquet"))
    for split, texts in (("train", TEXTS), ("test", TEXTS[::2])):
        assert (
            HuggingFaceDataset.prepare(HuggingFaceConfig(dataset=str(folder), split=split)).fingerprint
            == split_documents(texts, "").fingerprint
        )


def test_nucleotides_become_records(tmp_path):
    sequences = ["".join(random.Random(seed).choices("ACGTN", k=400)) for seed in range(25)]
    folder = folder_of(tmp_path, sequences)
    config = {"dataset": folder, "tokenizer": "nucleotides"}
    corpus = HuggingFaceDataset.prepare(HuggingFaceConfig(**config, reverse_complement=True))
    expected = split_records(
        ((str(index), encode(text.encode())) for index, text in enumerate(sequences)), "", "auto", True
    )
    assert corpus.fingerprint == expected.fingerprint and corpus.description.startswith(
        "DNA of set, train: 25 records, 10,000 nucleotides"
    )
    assert np.array_equal(corpus.train_borders, np.arange(25) * 400)
    assert HuggingFaceDataset.prepare(HuggingFaceConfig(**config)).fingerprint != corpus.fingerprint


def test_each_setting_changes_the_key(tmp_path):
    folder = folder_of(tmp_path, TEXTS)
    base = HuggingFaceDataset.cache_key(HuggingFaceConfig(dataset=folder))
    changes = [
        {"subset": "x"},
        {"revision": "x"},
        {"split": "x"},
        {"field": "x"},
        {"max_documents": 3},
        {"tokenizer": "nucleotides"},
        {"dataset": "x/y"},
    ]
    keys = [HuggingFaceDataset.cache_key(HuggingFaceConfig(**{"dataset": folder, **change})) for change in changes]
    assert len({base, *keys}) == len(changes) + 1
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "x"}\n')
    assert HuggingFaceDataset.cache_key(HuggingFaceConfig(dataset=folder)) != base


def test_subset_and_revision_reach_the_library(monkeypatch):
    asked = {}

    def load_dataset(place, subset, **rest):
        asked.update(place=place, subset=subset, **rest)
        return [{"text": text} for text in TEXTS]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hf, "_check_reach", lambda _: None)
    corpus = HuggingFaceDataset.prepare(HuggingFaceConfig(dataset="a/b", subset="c", revision="d", split="e"))
    assert asked == {"place": "a/b", "subset": "c", "revision": "d", "split": "e", "streaming": True}
    assert corpus.description.startswith("text of a/b (c), e: 50 documents")


def test_bad_rows_are_named(tmp_path):
    folder = folder_of(tmp_path, ["ACGT", "", "ACXGT"])
    assert "row 1 has no column 'body'; it has: id, text; name one with data.field=COLUMN" in refusal(
        ValueError, dataset=folder, field="body"
    )
    assert "row 1: 'id' holds int, not text" in refusal(ValueError, dataset=folder, field="id")
    assert "row 3, character 3 is 'X', which is no nucleotide" in refusal(
        ValueError, dataset=folder, tokenizer="nucleotides"
    )
    assert "cannot read its split 'validation'.\n" in refusal(ValueError, dataset=folder, split="validation")


def test_no_network_is_said_at_once_and_nothing_is_written(tmp_path):
    message = refusal(RuntimeError, dataset="some/where")
    assert (
        "data.dataset=some/where: no such folder, and the hub does not answer" in message
        and "data=text data.path=FOLDER" in message
    )
    with pytest.raises(RuntimeError, match="the hub does not answer"):
        prepare(part("data", {"name": "hf", "dataset": "some/where"}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "data=hf needs the library datasets, which is not installed; pip install datasets" in refusal(
        RuntimeError, dataset=str(tmp_path)
    )


def test_the_other_strand_belongs_to_nucleotides():
    with pytest.raises(ValueError, match=r"data\.reverse_complement=true belongs to data\.tokenizer=nucleotides"):
        part("data", {"name": "hf", "dataset": "x", "reverse_complement": True})


def test_a_dataset_that_is_a_script_is_named_with_the_revision_that_is_none(monkeypatch):
    def load_dataset(*_, **__):
        raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hf, "_check_reach", lambda _: None)
    message = refusal(ValueError, dataset="Skylion007/openwebtext")
    assert message.startswith("data.dataset=Skylion007/openwebtext is a script") and message.endswith(
        "data.revision=refs/convert/parquet"
    )


@pytest.mark.parametrize("place", ["/nowhere/typo", "./typo", "~/typo", "a/b/c"])
def test_what_can_only_be_a_folder_and_is_none_is_refused_by_a_plan_as_by_a_sweep(place):
    assert refusal(ValueError, dataset=place).startswith(f"data.dataset={place}: no such folder.\n")
    with pytest.raises(ValueError, match="no such folder"):
        HuggingFaceDataset.stand_in(HuggingFaceConfig(dataset=place))
