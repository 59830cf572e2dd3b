"""Lines and archives that would take more memory than they may: refused in a line that names the file."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import tracemalloc

import numpy as np
import pyarrow
import pytest

from stability.corpora.images import cifar
from stability.corpora.io import files
from stability.corpora.proteins import shards
from stability.corpora.proteins.annotations import read_annotations
from stability.corpora.proteins.npz import read_npz
from stability.corpora.tokens import fasta
from stability.corpora.tokens.text_files import documents
from stability.data.images import Images, ImagesConfig

PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
    ".xz": lambda content: lzma.compress(content, preset=0),
}


@pytest.fixture
def short_lines(monkeypatch):
    """At most a megabyte a line, so that a test need not write 64."""
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20, raising=False)


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(
    ("name", "first", "read"),
    [
        ("a.jsonl", b'{"text": "fine"}\n', lambda file: documents(file, "text")),
        ("a.ndjson", b'{"text": "fine"}\n', lambda file: documents(file, "text")),
        ("a.fa", b">name\n", fasta.records),
    ],
)
def test_a_line_that_is_too_long_is_named_and_not_read_whole(tmp_path, short_lines, name, first, read, packed):
    file = tmp_path / f"{name}{packed}"
    file.write_bytes(PACKERS[packed](first + b"A" * (24 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            list(read(file))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    unpacked = " unpacked" if packed else ""
    assert f"data.path: {file}, line 2 is longer than 1 MB{unpacked}, the most" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ends", ["\n", ""])
def test_a_line_as_long_as_it_may_be_is_read(tmp_path, short_lines, ends):
    (tmp_path / "a.fa").write_text(">a\n" + "A" * ((1 << 20) - len(ends)) + ends)
    assert [len(tokens) for _, tokens in fasta.records(tmp_path / "a.fa")] == [(1 << 20) - len(ends)]


def test_a_line_of_annotations_is_bounded_too(tmp_path, short_lines):
    (tmp_path / "a.tsv").write_text("accession\n" + "A" * (2 << 20))
    with pytest.raises(ValueError, match=r"data\.annotations: .*a\.tsv, line 2 is longer than 1 MB, the most"):
        read_annotations(tmp_path / "a.tsv")


def test_a_record_that_memory_does_not_hold_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fasta, "machine_memory", lambda: 1000, raising=False)
    (tmp_path / "a.fa").write_text(">short\nACGT\n>long x\n" + "ACGTACGTAC\n" * 30)
    with pytest.raises(
        ValueError, match=r"a\.fa, record 'long' is longer than 300 nucleotides, more than this machine"
    ):
        list(fasta.records(tmp_path / "a.fa"))


@pytest.mark.parametrize("read", [lambda file: Images.prepare(ImagesConfig(path=str(file))), read_npz])
def test_arrays_larger_than_memory_are_refused_before_they_are_unpacked(tmp_path, monkeypatch, read):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((4, 1 << 10, 1 << 10, 1), np.uint8), y=np.arange(4))
    monkeypatch.setattr(files, "machine_memory", lambda: 1 << 20, raising=False)
    with pytest.raises(
        ValueError, match=r"a\.npz unpacks to 0\.0 GiB, more than the 0\.0 GiB of memory of this machine"
    ):
        read(tmp_path / "a.npz")


def test_a_single_array_is_no_file_of_proteins(tmp_path):
    with open(tmp_path / "a.npz", "wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(ValueError, match=r"a\.npz is cut short or no \.npz file"):
        read_npz(tmp_path / "a.npz")


def archive_of(file, name, num_bytes):
    with tarfile.open(file, "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = num_bytes
        archive.addfile(entry, io.BytesIO(bytes(num_bytes)))
    return file


def test_members_of_an_archive_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 1000, raising=False)
    with pytest.raises(ValueError, match=r"a\.tar\.gz: its batches unpack to 1,001 bytes, more than any of CIFAR"):
        cifar.archive_files(archive_of(tmp_path / "a.tar.gz", "data_batch_1", 1001))
    assert len(cifar.archive_files(archive_of(tmp_path / "b.tar.gz", "data_batch_1", 1000))["data_batch_1"]) == 1000
    monkeypatch.setattr(shards, "MOST_UNPACKED", 1000, raising=False)
    with pytest.raises(ValueError, match=r"c\.tar\.gz: a\.pdb unpacks to 1,001 bytes, more than a structure file has"):
        list(shards.shards([archive_of(tmp_path / "c.tar.gz", "a.pdb", 1001)], tmp_path / "shards", "auto", 10))


def test_a_packed_structure_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MOST_UNPACKED", 1000, raising=False)
    (tmp_path / "a.pdb.gz").write_bytes(gzip.compress(b"\n" * 1001))
    (shard,) = shards.shards([tmp_path / "a.pdb.gz"], tmp_path / "shards", "auto", 10)
    assert read_npz(shard)[1] == [("a.pdb.gz", "unpacks to more than 1,000 bytes, which no structure file has")]
