"""Samples in the report: collected from runs' folders, shown side by side, whatever characters they hold."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pypdf
import pytest
import typst

from analysis.drawing import typeset
from analysis.report import build, summary
from analysis.sections.generation import has_samples as applies
from analysis.sections.generation import sample_tables
from analysis.study.load import load
from stability.printable import visible
from stability.runs.directory import RunDirectory
from stability.runs.parquet import read_table, write_parquet
from stability.runs.results import collect, write
from stability.runs.samples import sample_rows
from stability.runs.schema import GENERATION_COLUMNS as SCORES
from stability.runs.schema import SAMPLES_COLUMNS
from stability.runs.study import StudyFolder
from tests.analysis.synthetic import write_study

NASTY = "# Head *bold* _low_ $x^2$ `raw` <tag> @ref \\ back \"quote\" 'one' [c] {d} // no ~ = - + / 1. #let a = 1; ]#"
UNPRINTABLE = "a\x00b\x1bc\x7fd\u202ee\u200bf\ufefffg"
EMOJI = "😀 👩‍👩‍👧 é ß 日本 \U0001f9ec"


def text_of(pdf):
    return " ".join(" ".join(page.extract_text() for page in pypdf.PdfReader(pdf).pages).replace("\u200b", "").split())


def samples(study_dir, rows):
    """``results/samples.parquet`` as `collect` writes it, one row a run in the order of runs.parquet."""
    runs = pd.read_parquet(study_dir / "results" / "runs.parquet")
    full = [
        {"run_id": run, "phase": "terminal", "sample": 0, "sampler": "top_prob", "temperature": 1.0} | row
        for run, row in zip(runs["run_id"], rows)  # noqa: B905
    ]
    write_parquet(
        pd.DataFrame(full, columns=SAMPLES_COLUMNS), study_dir / "results" / "samples.parquet", {"schema_version": "1"}
    )
    return load(study_dir)


def of(text, **more):
    return {"text": text[:200], "num_characters": len(text), **more}


@pytest.fixture
def study_dir(tmp_path):
    return write_study(tmp_path, mechanisms=["sa", "sc"], lrs=[1e-3, 1e-2], seeds=1)


def test_samples_stand_side_by_side_with_their_score(study_dir):
    long = "word " * 60
    study = samples(
        study_dir,
        [
            of("first", nll=1.25, oracle="hf:big"),
            of(long, oracle="hf:big"),
            of("", nll=2.0),
            {"reason": "a logit is not finite"},
        ],
    )
    (table,) = sample_tables(study)
    assert table.header == ("LR", "sa", "sc")
    assert [[(cell.text, cell.detail) for cell in row[1:]] for row in table.rows] == [
        [("nll 1.250", "first"), ("nll 2.000", "(empty)")],
        [("not scored", long[:200] + "…"), ("--", "a logit is not finite")],
    ]
    assert (
        "of each cell's lowest seed (seed 0)" in table.caption
        and "nats per token of the oracle hf:big" in table.caption
    )
    assert "Sampler: top_prob, temperature 1." in table.caption


def test_of_several_seeds_the_lowest_that_sampled_is_shown_and_a_run_without_samples_keeps_its_cell(tmp_path):
    study_dir = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=2)
    (table,) = sample_tables(samples(study_dir, [of("zero"), of("one")]))
    assert [cell.detail or cell.text for row in table.rows for cell in row[1:]] == ["zero", "--"]


def test_a_study_without_samples_has_no_section(study_dir):
    assert not applies(load(study_dir))


def test_every_character_is_seen_as_itself_or_as_a_sign(study_dir):
    study = samples(study_dir, [of("a\nb\r\tc\u2028d"), of(UNPRINTABLE), of(NASTY), of(EMOJI)])
    (table,) = sample_tables(study)
    assert [cell.detail for row in table.rows for cell in row[1:]] == [
        "a↵b↵→c↵d",
        NASTY,
        r"a\x00b\x1bc\x7fd\u202ee\u200bf\ufefffg",
        EMOJI,
    ]


def test_nasty_samples_reach_the_page_as_they_are(study_dir, tmp_path, drawn):
    drawn("generative")
    samples(study_dir, [of(NASTY), of(UNPRINTABLE + "\nnext\r\nline"), of(EMOJI), of("ACGT" * 80)])
    read = text_of(build(study_dir, tmp_path / "out"))
    assert "What the models write" in read
    for piece in ("# Head *bold* _low_ $x^2$", '<tag> @ref \\ back "quote"', "#let a = 1; ]#", "next↵↵line", "é ß"):
        assert "".join(piece.split()) in "".join(read.split()), piece
    assert "ACGT" * 10 in "".join(read.split())
    assert "What the models write" not in summary(study_dir)


@pytest.mark.parametrize("seed", range(3))
def test_random_characters_compile_as_text(seed):
    """Any code point, surrogates left out as a parquet leaves them out: typst never takes one for markup, so nothing
    but the text comes out."""
    draws = np.random.default_rng(seed)
    points = np.concatenate([draws.integers(0, 0x250, 400), draws.integers(0, 0x110000, 400)])
    text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
    marked = f"BEGIN{visible(text)}END"
    pdf = typst.compile(typeset.document("t", "s", f"#{typeset.literal(marked)}").encode(), ignore_system_fonts=True)
    assert pdf[:4] == b"%PDF"


def written(pool, run_id, texts, made_by=None, scores=()):
    """A run that `stability.generate` left samples of, by hand."""
    directory = RunDirectory(pool, run_id)
    directory.set_status("stable", step=1)
    parts = ("mechanism", "residual", "optimizer", "norm", "objective", "data", "model")
    numbers = {"lr_peak": 0.1, "seed": 0, "steps": 1, "data_fingerprint": "f"}
    directory.spec_file.write_text(json.dumps({**{part: {"name": part} for part in parts}, **numbers}))
    folder = directory.path / "samples"
    folder.mkdir()
    (folder / "terminal.jsonl").write_text(
        "".join(json.dumps({"sample": i, "text": text, "tokens": [7, 8]}) + "\n" for i, text in enumerate(texts))
    )
    (folder / "terminal.json").write_text(
        json.dumps({"file": "terminal.jsonl", "sampler": "ar", "temperature": 0.5, **(made_by or {})})
    )
    if scores:
        rows = [
            {"run_id": run_id, "phase": "terminal", "sample": number, "nll": nll, "oracle": "hf:x"}
            for number, nll in scores
        ]
        write_parquet(pd.DataFrame(rows).reindex(columns=SCORES), directory.generation_file("terminal"), {})
    return directory


def test_the_first_sample_of_each_run_is_collected_with_its_own_score(tmp_path):
    pool = tmp_path / "runs"
    written(pool, "a" * 12, ["x\ud800\n" * 100, "second"], scores=[(1, 9.0), (0, 1.5)])
    written(pool, "b" * 12, [None])
    written(pool, "c" * 12, [], {"reason": "logits are not finite"})
    folder = StudyFolder.of(pool, "mine")
    folder.write(["a" * 12, "b" * 12, "c" * 12, "d" * 12])
    write(collect(folder.path), folder.results)
    found = read_table(folder.results / "samples.parquet").to_pylist()
    assert [(row["run_id"][0], row["text"], row["num_characters"], row["nll"], row["reason"]) for row in found] == [
        ("a", ("x?\n" * 100)[:200], 300, 1.5, None),
        ("b", "7 8", 3, None, None),
        ("c", None, None, None, "logits are not finite"),
    ]
    (RunDirectory(pool, "b" * 12).path / "samples" / "terminal.jsonl").unlink()
    assert sample_rows(RunDirectory(pool, "b" * 12), "terminal", None) == []


def test_fasta_is_read_as_letters_and_old_tables_go(tmp_path):
    directory = written(tmp_path, "a" * 12, [])
    (directory.path / "samples" / "terminal.fasta").write_text(">sample_0 sampler=ar\nACGT\nTT\n>sample_1\nGG\n")
    meta = directory.path / "samples" / "terminal.json"
    meta.write_text(json.dumps({"file": "terminal.fasta", "sampler": "ar", "temperature": 1.0}))
    assert [(row["text"], row["num_characters"]) for row in sample_rows(directory, "terminal", None)] == [("ACGTTT", 6)]
    folder = StudyFolder.of(tmp_path, "mine")
    folder.write(["a" * 12])
    write(collect(folder.path), folder.results)
    assert pq.read_table(folder.results / "samples.parquet").num_rows == 1
    meta.unlink()
    write(collect(folder.path), folder.results)
    assert not (folder.results / "samples.parquet").exists()
