"""The entry, end to end, on its synthetic chains."""

from __future__ import annotations

import numpy as np
import pytest

from stability.config.parse import parse
from stability.config.tokenizer import TokenizerSpec
from stability.corpora.proteins import synthetic
from stability.train_tokenizer import main
from tests.reading import compose

SMALL = ["encoder", "decoder", "atom_decoder"]
WORDS = [
    "steps=4",
    "atom_steps=3",
    "warmup_steps=1",
    "batch=2",
    "positions=24",
    "every_steps=2",
    "chains=2",
    "structures=1",
    "rotations=1",
]
WORDS += [f"{name}.{key}" for name in SMALL for key in ("layers=1", "width=16", "heads=2")]


def test_the_entry_trains_measures_draws_and_skips_what_is_done(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(synthetic, "NUM_CHAINS", 24)  # all 160 take most of the test's time
    words = [*WORDS, f"runs_dir={tmp_path / 'runs'}", f"reports_dir={tmp_path / 'reports'}"]
    assert main(words) == 0
    first = capsys.readouterr().out
    (folder,) = (tmp_path / "runs" / "tokenizers").iterdir()
    assert f"tokenizer {folder.name}" in first and "synthetic" in first
    assert (
        "backbone RMSD, reconstructed" in first
        and "heavy-atom RMSD, stage 2" in first
        and "same tokens when rotated" in first
    )
    assert (tmp_path / "reports" / f"tokenizer_{folder.name}.pdf").stat().st_size > 5000
    assert len(list((folder / "structures").glob("*.cif"))) == 2
    before = (folder / "results" / "chains.parquet").stat().st_mtime_ns
    assert main(words) == 0
    assert "skips training: finished already" in capsys.readouterr().out
    assert (folder / "results" / "chains.parquet").stat().st_mtime_ns == before


def test_a_folder_for_the_figure_that_cannot_be_written_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(RuntimeError, match="reports_dir=/proc/x: nothing can be written there"):
        main([*WORDS, f"runs_dir={tmp_path}", "reports_dir=/proc/x"])
    assert not (tmp_path / "tokenizers").exists()


def test_data_without_structures_are_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="data=stdlib holds no protein structures; give data=protein"):
        main([*WORDS, "data=stdlib", f"runs_dir={tmp_path}"])
    assert not (tmp_path / "tokenizers").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["mechanism=[sa,sc]"],
            r"mechanism=\[sa,sc\]: a tokenizer has one mechanism; patterns over layers are mechanism=mix",
        ),
        (["optimizer=[sgd,adamw]"], r"optimizer=\[sgd,adamw\]: a tokenizer has one optimizer$"),
        (["mechanism=ca"], "mechanism=ca is a cross mechanism"),
        (["encodr.width=8"], r"encodr.width: unknown key; did you mean 'encoder.width'\?"),
        (["frame=own"], "frame='own'"),
        (["steps=10"], "warmup_steps=50 must be below steps=10"),
        (["levels=[1024]"], "levels.0=1024: .*less than or equal to 512"),
        (
            ["levels=[512,512,5]"],
            r"levels=\[512,512,5\] makes 1,310,720 codes, each a row of an embedding; at most 1,048,576",
        ),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_in_a_line(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        main(words)
    assert len(str(caught.value).splitlines()) <= 2


def test_the_cross_mechanism_is_of_the_mechanisms_kind():
    for mechanism, cross in (("sa", "ca"), ("sc", "cc")):
        spec = parse(TokenizerSpec, compose("train_tokenizer", [f"mechanism={mechanism}"]))
        assert spec.run("x").cross.name == cross
        assert spec.run("x").mechanism.name == mechanism


def test_traces_are_refused_before_a_tokenizer_is_made_of_them(tmp_path):
    from tests.corpora.test_protein_split import letters

    num, length = 6, 30
    seq = np.frombuffer("".join(letters(length, number) for number in range(num)).encode(), np.uint8)
    ca = np.cumsum(np.ones((num * length, 3), np.float32), axis=0)
    np.savez(
        tmp_path / "traces.npz",
        ids=np.array([f"c{number}" for number in range(num)]),
        offsets=np.arange(num + 1) * length,
        seq=seq,
        ca=ca,
    )
    with pytest.raises(ValueError, match="a tokenizer needs backbones, CA traces are not enough"):
        main([*WORDS, f"data.path={tmp_path / 'traces.npz'}", f"runs_dir={tmp_path / 'runs'}"])
