"""`tests.proofs` sees each kind of difference, and none where only the clock or the folder differs."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import proofs

METRICS = [{"step": 1, "loss": 2.5, "wall_s": 0.1}, {"step": 2, "loss": float("nan"), "wall_s": 0.2}]


def pool(folder, *, loss=2.5, wall_s=0.1, alpha=0.3, spec_seed=0, text="word"):
    """Write one file of each kind, and return their digests."""
    folder.mkdir()
    rows = [{"step": 1, "loss": loss, "wall_s": wall_s}, METRICS[1]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"alpha_max": [alpha, None], "wall_s": [wall_s, 1.0]}), folder / "terminal.parquet")
    (folder / "spec.json").write_text(json.dumps({"seed": spec_seed, "started_at": wall_s}))
    (folder / "model.safetensors").write_bytes(text.encode())
    (folder / "timing.jsonl").write_text(str(wall_s))
    return {
        "answers": [["sweep x", 0, proofs.plain(f"{folder}: {text} in {wall_s} s", folder)]],
        "files": proofs.files(folder),
    }


def test_the_clock_and_the_folder_make_no_difference(tmp_path):
    before, after = pool(tmp_path / "a"), pool(tmp_path / "b", wall_s=7.25)
    assert set(before["files"]) == {"metrics.jsonl", "terminal.parquet", "spec.json", "model.safetensors"}
    assert list(proofs.differences(before, after)) == []


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"loss": 2.5000000000000004}, ["metrics.jsonl: row 0"]),
        ({"alpha": 0.30000000000000004}, ["terminal.parquet: alpha_max"]),
        ({"alpha": 1}, ["terminal.parquet: alpha_max, type of alpha_max"]),
        ({"spec_seed": 1}, ["spec.json: seed"]),
    ],
)
def test_a_number_that_differs_in_its_last_digit_is_named(tmp_path, change, seen):
    assert list(proofs.differences(pool(tmp_path / "a"), pool(tmp_path / "b", **change))) == seen


def test_words_weights_exit_codes_and_missing_files_are_named(tmp_path):
    before, after = pool(tmp_path / "a"), pool(tmp_path / "b", text="another")
    after["answers"][0][1] = 2
    del after["files"]["spec.json"]
    code, text, weights, lost = proofs.differences(before, after)
    assert code == "sweep x\n  exit code 0 → 2"
    assert "-FOLDER: word" in text and "+FOLDER: another" in text
    assert (weights, lost) == ("model.safetensors: content", "spec.json: only before")


def test_the_layout_of_a_table_counts_unless_a_time_stands_in_the_line():
    assert proofs.plain("a   b") != proofs.plain("a  b")
    assert proofs.plain("a     1.5 s   b") == proofs.plain("a   12 s  b")


TABLE = """
mechanism  parameters  time of a step  state
--------------------------------------------
sa             15,040            {time}  {state}
               1.00           {time} ms  {state}
--------------------------------------------
1.00 and 2.00 are numbers, too, and this ends {end}
"""


def test_a_column_of_times_makes_no_difference_and_its_neighbours_do():
    plain = proofs.plain(TABLE.format(time="1.24", state="0.5", end="1.00"))
    assert proofs.plain(TABLE.format(time="1.25", state="0.5", end="1.00")) == plain
    assert proofs.plain(TABLE.format(time="1.24", state="0.6", end="1.00")) != plain
    assert proofs.plain(TABLE.format(time="1.24", state="0.5", end="1.01")) != plain


def test_lines_that_a_clock_writes_are_left_out():
    short = "done sa val NLL 2.1 [1/2]\nended 2 runs in 1 min 3 s: 2 stable\n"
    long = "done sa val NLL 2.1 in 3.5 s [1/2]\nso far 2 runs: 1 done\nended 2 runs in 8 s: 2 stable\n"
    assert proofs.plain(short) == proofs.plain(long)
    assert proofs.plain(short) != proofs.plain(long.replace("2.1", "2.2"))


def test_words_of_a_command_replace_those_of_every_command():
    assert "seeds=1" in proofs.sweep("some") and "data.path" not in proofs.sweep("some", "", "data.path")
    words = proofs.sweep("some", "seeds=2 cross=ca").split()
    assert words[:2] == ["sweep", "name=some"] and words.count("seeds=2") == 1 and "cross=ca" in words
    assert "seeds=1" not in words


def test_a_command_that_is_refused_proves_nothing_and_is_named():
    first, refused = proofs.COMMANDS[0], proofs.REFUSED[0]
    fine = [(first, 0, "help"), (refused, 2, "no such study")]
    assert not list(proofs.find_unexpected(fine))
    found = list(proofs.find_unexpected([(first, 2, "sc sees both sides"), (refused, 0, "")]))
    assert [line.splitlines()[0] for line in found] == [first, refused] and "sc sees both sides" in found[0]
