"""A user's files: what becomes a document, and what each unreadable file is told."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from stability.config.parts import part
from stability.corpora.tokens.split import split_documents
from stability.corpora.tokens.text_files import BLOCK_CHARACTERS, blocks, documents, text_files
from stability.data.text import Text, TextConfig
from stability.registry import Registry

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "text"
NO_TOKENIZER = {"tokenizer": "bytes", "ranks": None, "keep": None}
LINES = "".join(f"line {index} says é and 日本\n" for index in range(3000))


def corpus_of(path, field="text"):
    return Text.prepare(TextConfig(path=str(path), field=field))


def as_jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def refusal(path, **settings):
    """The message, checked to be one or two lines."""
    with pytest.raises(ValueError) as caught:
        Text.prepare(TextConfig(path=str(path), **settings))
    assert str(caught.value).count("\n") <= 1
    return str(caught.value)


def test_txt_is_cut_at_line_ends_into_blocks_that_give_the_file_back(tmp_path):
    (tmp_path / "a.txt").write_text(LINES, newline="")
    found = list(documents(tmp_path / "a.txt", "text"))
    assert "".join(found) == LINES and len(found) == -(-len(LINES) // 4120)
    assert all(block.endswith("\n") and BLOCK_CHARACTERS <= len(block) < BLOCK_CHARACTERS + 40 for block in found[:-1])


def test_a_file_without_line_ends_is_cut_all_the_same(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 20_000)
    assert [len(block) for block in documents(tmp_path / "a.txt", "text")] == [8192, 8192, 3616]


@pytest.mark.parametrize("step", [1, 7, 4096, 10**6])
def test_blocks_do_not_depend_on_the_pieces_that_were_read(step):
    text = LINES[:30_000] + "y" * 9000 + LINES[:5000]
    assert list(blocks(text[start : start + step] for start in range(0, len(text), step))) == list(blocks(iter([text])))


def test_characters_on_the_border_of_two_reads_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("stability.corpora.tokens.text_files.BYTES_PER_READ", 5)
    (tmp_path / "a.txt").write_text(LINES[:2000])
    assert "".join(documents(tmp_path / "a.txt", "text")) == LINES[:2000]
    (tmp_path / "a.txt").write_bytes("日本".encode() + b"ab\xe6\x97c")
    assert "not UTF-8 at byte 8 (0xe6)" in refusal(tmp_path / "a.txt")


def test_windows_files_lose_their_mark_and_keep_their_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + as_jsonl(["three"]).replace(b"\n", b"\r\n"))
    assert [list(documents(tmp_path / name, "text")) for name in ("a.txt", "b.jsonl")] == [
        ["one\r\ntwo\r\n"],
        ["three"],
    ]


def test_jsonl_gives_one_document_a_line(tmp_path):
    texts = ["first\nwith a line end", "second", "日本"]
    (tmp_path / "a.jsonl").write_bytes(
        as_jsonl(texts, "body").replace(b"\n", b"\n\n") + b"  \n" + as_jsonl([""], "body")
    )
    assert list(documents(tmp_path / "a.jsonl", "body")) == texts


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_packing_and_place_leave_the_fingerprint_alone(tmp_path, name):
    content = LINES.encode() if name == "a.txt" else as_jsonl(LINES.splitlines())
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "far" / "away" / f"B{name}.GZ").write_bytes(gzip.compress(content))
    plain, packed = corpus_of(tmp_path / name), corpus_of(tmp_path / "far")
    assert plain.fingerprint == packed.fingerprint
    assert np.array_equal(plain.train_tokens, packed.train_tokens)


def test_a_folder_mixes_kinds_and_ignores_the_rest(tmp_path):
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    (tmp_path / "sub" / "a.txt").write_text("from txt")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"from txt.gz"))
    (tmp_path / "c.jsonl").write_bytes(as_jsonl(["from jsonl"]))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(as_jsonl(["from jsonl.gz"])))
    for ignored in ("e.csv", "f.txt.zip", ".g.txt", "sub/.hidden/h.txt"):
        (tmp_path / ignored).write_bytes(b"\xff")
    corpus = corpus_of(tmp_path)
    assert (
        corpus.fingerprint
        == split_documents(["from txt", "from txt.gz", "from jsonl", "from jsonl.gz"], "").fingerprint
    )
    assert (
        corpus.description
        == f"text of {tmp_path.name} (4 files; left out: e.csv, f.txt.zip): 4 documents, 42 characters"
    )


def test_links_are_followed_once(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    assert text_files(str(tmp_path / "linked")) == [tmp_path / "linked" / "a.txt"]


def test_cache_key_sees_content_kind_and_field_only(tmp_path):
    def key(name, content, field="text"):
        (tmp_path / name).write_bytes(content)
        return Text.cache_key(TextConfig(path=str(tmp_path / name), field=field))

    same = key("a.jsonl", as_jsonl(["x"]))
    assert same == key("b.JSONL", as_jsonl(["x"]))
    assert (
        len(
            {
                same,
                key("a.txt", as_jsonl(["x"])),
                key("a.jsonl", as_jsonl(["y"])),
                key("a.jsonl", as_jsonl(["x"]), "body"),
            }
        )
        == 4
    )


def test_missing_path_names_a_near_miss(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("x")
    message = refusal(tmp_path / "shakespere.txt")
    assert (
        "data.path=" in message
        and "no such file or folder" in message
        and f"did you mean '{tmp_path / 'shakespeare.txt'}'?" in message
    )
    assert "did you mean" not in refusal(tmp_path / "no" / "where.txt")


def test_other_names_and_kinds_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    assert "ends in none of .txt, .txt.gz, .txt.zst, .txt.xz, .jsonl, .jsonl.gz" in refusal(tmp_path / "a.csv")
    assert "neither a file nor a folder" in refusal("/dev/null")


def test_a_folder_without_text_lists_what_is_accepted(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    assert "the folder holds no text file; accepted are .txt, .txt.gz, .txt.zst, .txt.xz, .jsonl, .jsonl.gz" in refusal(
        tmp_path
    )


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    (tmp_path / "full.txt").write_text(LINES)
    assert f"{tmp_path / name} is empty (no document in it)" in refusal(tmp_path)


@pytest.mark.parametrize(("name", "before"), [("a.txt", "fine é\n"), ("a.jsonl", '{"text": "é"}\n')])
@pytest.mark.parametrize("packed", [False, True])
def test_bad_bytes_are_named_with_their_offset(tmp_path, name, before, packed):
    content = before.encode() + b'{"text": "\xe9"}\n'
    file = tmp_path / (name + ".gz" * packed)
    file.write_bytes(gzip.compress(content) if packed else content)
    place = (
        f"{len(before.encode()) + 10} of the unpacked text (0xe9)" if packed else f"{len(before.encode()) + 10} (0xe9)"
    )
    assert f"{file} is not UTF-8 at byte {place}, in line 2; convert it to UTF-8" in refusal(file)


def test_a_character_cut_off_at_the_end_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc" + "é".encode()[:1])
    assert "not UTF-8 at byte 3 (0xc3)" in refusal(tmp_path / "a.txt")


def test_utf16_is_recognised(tmp_path):
    (tmp_path / "a.txt").write_bytes("abc".encode("utf-16-le"))
    assert "holds a zero byte at byte 1: binary, or UTF-16" in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_broken_gzip_is_refused(tmp_path, name):
    content = gzip.compress(LINES.encode() if "txt" in name else as_jsonl(LINES.splitlines()))
    for broken in (
        content[:-20],
        content[: len(content) // 2],
        content[:200] + bytes(50) + content[250:],
        b"no gzip at all",
    ):
        (tmp_path / name).write_bytes(broken)
        assert f"{tmp_path / name} is cut short or no gzip file" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            '{"text": "a"',
            "line 3 is no JSON (Expecting ',' delimiter, column 13); each line must be one object with the key 'text'",
        ),
        ("[1, 2]", "line 3 is list, no JSON object"),
        ('{"body": "a", "id": 1}', "line 3 has no key 'text'; it has: body, id; name one with data.field=KEY"),
        ("{}", "line 3 has no key 'text'; it has: none"),
        ('{"text": 5}', "line 3: 'text' holds int, not text"),
        ('{"text": "a\\ud800"}', "line 3: 'text' holds U+0000 or half of a surrogate pair"),
        ('{"text": "a\\u0000"}', "line 3: 'text' holds U+0000"),
        ("[" * 100_000, "line 3 cannot be read as JSON"),
        ("1" * 10_000, "line 3 cannot be read as JSON"),
    ],
)
def test_bad_lines_are_named_by_number(tmp_path, line, complaint):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["one"]) + b"\n" + line.encode() + b"\n")
    assert f"data.path: {tmp_path / 'a.jsonl'}, {complaint}" in refusal(tmp_path / "a.jsonl")


def test_unreadable_files_and_folders_are_named(tmp_path, monkeypatch):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert f"cannot read {tmp_path / 'gone.txt'}: No such file" in refusal(tmp_path)
    with pytest.raises(ValueError, match=r"cannot read .*gone\.txt: No such file"):
        Text.cache_key(TextConfig(path=str(tmp_path)))

    def forbidden(root, onerror, followlinks):
        onerror(PermissionError(13, "Permission denied", root))

    monkeypatch.setattr("stability.corpora.io.files.os.walk", forbidden)
    assert f"cannot read the folder {tmp_path}: Permission denied" in refusal(tmp_path)


def test_too_little_text_is_told_what_a_document_is(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    message = refusal(tmp_path / "a.txt")
    assert (
        "text of a.txt holds 1 distinct document; at least 2 are needed" in message
        and "a block of 4,096 characters of a .txt file" in message
    )


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"data\.path: a value is missing"):
        part("data", "text")
    with pytest.raises(ValueError, match=r"data\.feild: unknown key; did you mean 'field'"):
        part("data", {"name": "text", "path": "x", "feild": "y"})
    assert part("data", {"name": "text", "path": "x"}).model_dump() == {
        **NO_TOKENIZER,
        "name": "text",
        "path": "x",
        "field": "text",
    }


@pytest.mark.parametrize(
    ("name", "num_documents", "num_characters", "nats"),
    [("tinyshakespeare.txt", 272, 1_115_394, 3.3324), ("peps.jsonl.gz", 703, 13_611_878, 3.3514)],
)
def test_real_text_is_read_whole(name, num_documents, num_characters, nats):
    if not (SHARED / name).is_file():
        pytest.skip(f"{SHARED / name} is not on this machine")
    corpus = corpus_of(SHARED / name)
    assert corpus.description == f"text of {name}: {num_documents} documents, {num_characters:,} characters"
    assert corpus.num_val_documents == -(-num_documents // 100)
    assert corpus.unigram_nats == pytest.approx(nats, abs=1e-4)
    corpus.require(1024)


def test_the_inputs_of_a_folder_contain_files_behind_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "one.txt").write_text("one")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "real")
    source = Registry("data").load("text")
    found = set(source.inputs(source.Config(path=str(tmp_path / "corpus"))))
    assert tmp_path / "corpus" / "link" / "one.txt" in found
