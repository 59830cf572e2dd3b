"""Kinds of files beside plain text and gzip: zstd and Parquet, read alike, and refused alike when they are broken;
nothing is written then."""

import gzip
import json
import lzma
import zlib

import pyarrow
import pytest
from pyarrow import parquet

from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.corpora.io.files import open_unpacked
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.text_files import documents
from stability.data.text import Text, TextConfig

TEXTS = [f"document {index} says é and 日本\n" * (1 + index % 7) for index in range(600)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def table(file, columns):
    parquet.write_table(pyarrow.table(columns), file, row_group_size=100)
    return file


def refusal(path, **settings):
    with pytest.raises(ValueError) as caught:
        prepare(part("data", {"name": "text", "path": str(path), **settings}), path.parent / "cache")
    assert str(caught.value).count("\n") <= 1 and str(path) in str(caught.value)
    assert not (path.parent / "cache").exists()
    return str(caught.value)


def test_every_kind_gives_the_same_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSONL))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(JSONL))
    (tmp_path / "e.ndjson").write_bytes(JSONL)
    (tmp_path / "f.NDJSON.XZ").write_bytes(lzma.compress(JSONL))
    table(tmp_path / "d.PARQUET", {"id": list(range(600)), "text": TEXTS})
    for file in tmp_path.iterdir():
        assert list(documents(file, "text")) == TEXTS, file
    whole = Text.prepare(TextConfig(path=str(tmp_path)))
    assert (
        whole.fingerprint == split_documents(TEXTS, "").fingerprint
        and "3,000 exact repetitions left out" in whole.description
    )


@pytest.mark.parametrize("texts", [["a", None, "b", "", None], ["a", "b", None, None, ""]])
def test_null_texts_are_skipped_and_counted(tmp_path, texts):
    table(tmp_path / "a.parquet", {"text": texts})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for file in tmp_path.iterdir():
        corpus = Text.prepare(TextConfig(path=str(file)))
        assert corpus.description == f"text of {file.name}: 2 documents, 2 characters, 2 null texts left out"
        assert corpus.fingerprint == split_documents(["a", "b"], "").fingerprint


def test_too_few_documents_beside_null_texts_say_so(tmp_path):
    table(tmp_path / "a.parquet", {"text": ["a", None]})
    with pytest.raises(ValueError, match=r"a\.parquet holds 1 distinct document, 1 null text left out; at least 2"):
        Text.prepare(TextConfig(path=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    ("texts", "counts"), [([None] * 1002, r"null \(1,002\)"), ([None, "", None], r"null \(2\) or empty \(1\)")]
)
def test_a_file_of_nulls_alone_is_refused_with_their_number(tmp_path, texts, counts):
    table(tmp_path / "a.parquet", {"text": pyarrow.array(texts, pyarrow.string())})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for file in tmp_path.iterdir():
        with pytest.raises(
            ValueError, match=rf"{file.name} holds no document: every 'text' is {counts}; remove it, or"
        ):
            Text.prepare(TextConfig(path=str(file)))


def test_a_folders_other_files_are_named_and_many_of_them_counted(tmp_path):
    for name in ("a.jsonl", "sub/d.json", "README.md", "z.csv", "sub/e.doc", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(JSONL)
    described = Text.prepare(TextConfig(path=str(tmp_path))).description
    assert "(1 file; left out: README.md, sub/d.json, sub/e.doc and 1 more): " in described
    assert "left out:" not in Text.prepare(TextConfig(path=str(tmp_path / "a.jsonl"))).description


@pytest.mark.parametrize("name", ["a.txt.xz", "a.jsonl.xz"])
def test_broken_xz_is_refused(tmp_path, name):
    packed = lzma.compress(JSONL)
    for broken in (packed[:-20], packed[: len(packed) // 2], b"no xz at all"):
        (tmp_path / name).write_bytes(broken)
        assert f"{name} is cut short or no xz file" in refusal(tmp_path / name)


def test_text_in_zstd_is_text(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstd("".join(TEXTS).encode()))
    assert "".join(documents(tmp_path / "a.txt.zst", "text")) == "".join(TEXTS)


def test_frames_of_zstd_follow_each_other(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"one ") + zstd(b"two"))
    with open_unpacked(tmp_path / "a.txt.zst") as stream:
        assert stream.read() == b"one two"


@pytest.mark.parametrize("name", ["a.txt.zst", "a.jsonl.zst"])
def test_broken_zstd_is_refused(tmp_path, name):
    packed = zstd(JSONL)
    for broken in (packed[:-20], packed[: len(packed) // 2], b"no zstd at all"):
        (tmp_path / name).write_bytes(broken)
        assert f"{name} is cut short or no zstd file" in refusal(tmp_path / name)


def test_bad_bytes_in_zstd_are_named_with_their_offset(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstd(b"fine\n\xff"))
    assert "is not UTF-8 at byte 5 of the unpacked text (0xff), in line 2;" in refusal(tmp_path / "a.txt.zst")


def test_broken_parquet_is_refused(tmp_path):
    content = table(tmp_path / "whole.parquet", {"text": TEXTS}).read_bytes()
    hurt = content[:200] + bytes(80) + content[280:]
    for index, broken in enumerate(
        (content[:-20], content[: len(content) // 2], b"", b"PAR1", b"nothing of the kind", hurt)
    ):
        (tmp_path / f"{index}.parquet").write_bytes(broken)
        assert f"{index}.parquet is cut short or no Parquet file" in refusal(tmp_path / f"{index}.parquet")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_where_a_file_was_cut_is_told_in_lines(tmp_path, name):
    """Of a stream that ends a flush after the 300th line, no more than these 300 can be read."""
    packer = zlib.compressobj(wbits=31)
    lines = JSONL.splitlines(keepends=True)
    content = packer.compress(b"".join(lines[:300])) + packer.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / name).write_bytes(content)
    assert "; 300 whole lines were read)" in refusal(tmp_path / name)


def test_where_a_table_was_hurt_is_told_in_rows(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), file, row_group_size=300, use_dictionary=False)
    content, start = (
        bytearray(file.read_bytes()),
        parquet.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset,
    )
    content[start : start + 200] = bytes(200)
    file.write_bytes(content)
    assert "300 rows were read" in refusal(file) or "256 rows were read" in refusal(file)


def test_a_file_of_the_other_kind_is_told_where_it_is_read(tmp_path):
    (tmp_path / "a.fas").write_text(">a\nACGT\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("text")
    assert "ends in none of .txt" in refusal(tmp_path / "a.fas") and "; data=dna reads a.fas" in refusal(
        tmp_path / "a.fas"
    )
    with pytest.raises(ValueError, match=r"the folder holds no FASTA file; accepted are .*; data=text reads b\.txt"):
        prepare(part("data", {"name": "dna", "path": str(tmp_path / "sub")}), tmp_path / "cache")


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"id": [1, 2], "body": ["a", "b"]}, "has no column 'text'; it has: id, body; name one with data.field=COLUMN"),
        ({"text": [1, 2]}, "row 1: 'text' holds int, not text"),
        ({"text": ["a", "b\0"]}, "row 2: 'text' holds U+0000"),
        ({"text": pyarrow.array([], pyarrow.string())}, "is empty (no document in it)"),
    ],
)
def test_bad_columns_and_rows_are_named(tmp_path, columns, complaint):
    assert complaint in refusal(table(tmp_path / "a.parquet", columns))


def test_another_column_can_be_named(tmp_path):
    assert list(documents(table(tmp_path / "a.parquet", {"text": ["x", "y"], "body": ["a", "b"]}), "body")) == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt.gz", gzip.compress(JSONL)[:-20], "is cut short or no gzip file"),
        ("a.txt", b"", "is empty (no document in it)"),
        ("a.jsonl", JSONL + b'{"body": "x"}\n', "line 601 has no key 'text'; it has: body"),
        ("a.jsonl", JSONL + b'{"text": "\xff"}\n', f"is not UTF-8 at byte {len(JSONL) + 10:,} (0xff), in line 601;"),
    ],
)
def test_bad_data_write_nothing(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    assert complaint in refusal(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == [name]  # nor anything beside the cache


def test_a_full_disk_is_the_machines_fault(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(JSONL)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stability.corpora.io.disk.TokenFile.append", full)
    with pytest.raises(RuntimeError, match="cannot prepare data beside .*cache: .*No space left on device"):
        prepare(part("data", {"name": "text", "path": str(tmp_path / "a.jsonl")}), tmp_path / "cache")


def test_a_terminal_sees_a_bar_and_a_file_does_not(tmp_path, monkeypatch, capfd):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    Text.prepare(TextConfig(path=str(tmp_path / "a.jsonl")))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    Text.prepare(TextConfig(path=str(tmp_path / "a.jsonl")))
    shown = capfd.readouterr().err
    assert "reading text" in shown and "600 read" in shown


RUN = {
    "model": {"name": "nano", "layers": 2, "width": 16, "heads": 2, "positions": 16},
    "objective": "mlm",
    "data": {"name": "text", "path": "a"},
    "schedule": {"name": "constant"},
    "steps": 1,
    "batch": 1,
    "clip_norm": 1.0,
    "mechanism": "sa",
    "residual": "identity",
    "optimizer": "adamw",
    "norm": "layernorm",
    "lr_peak": 1e-3,
    "seed": 0,
    "data_fingerprint": "f",
}


def test_the_fingerprint_stands_for_the_tokenizer_in_a_runs_id():
    plain = run_id(parse_run(RUN))
    tokenised = {"name": "text", "path": "b", "tokenizer": "gpt2", "ranks": "anywhere", "keep": 5}
    assert run_id(parse_run({**RUN, "data": tokenised})) == plain
    assert run_id(parse_run({**RUN, "data_fingerprint": "g"})) != plain
