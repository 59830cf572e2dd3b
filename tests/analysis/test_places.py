"""A report names files and never says where they lie."""

import pytest

from analysis import assembly
from analysis.report import summary
from analysis.study.load import load
from analysis.words import without_folders
from tests.analysis.synthetic import write_study


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        ("data.path=/home/me/my notes/a b.jsonl lr=1e-3", "data.path=a b.jsonl lr=1e-3"),
        ("data.path=~/text.txt", "data.path=text.txt"),
        ("data.path='../up/text.txt'", "data.path='text.txt'"),
        ("init=ckpt:/pool/0123/checkpoints/step_000200", "init=ckpt:step_000200"),
        ("name=[/pool/studies/a,b]", "name=[a,b]"),
        ("runs_dir=/scratch/me/runs/", "runs_dir=runs/"),
        (
            "data.path=data/text.txt generate.oracle=hf:openai/gpt2",
            "data.path=data/text.txt generate.oracle=hf:openai/gpt2",
        ),
        ("mechanism.sc.window=4", "mechanism.sc.window=4"),
    ],
)
def test_a_command_names_files_and_not_where_they_lie(typed, printed):
    assert without_folders(f"python -m stability.sweep {typed}") == f"python -m stability.sweep {printed}"
    assert without_folders(f"python /home/me/own.py {typed}") == f"python own.py {printed}"


def test_no_form_of_a_report_says_where_files_lie(tmp_path):
    folder = write_study(
        tmp_path,
        mechanisms=["sa"],
        lrs=[1e-3],
        provenance={"command": "python -m stability.sweep data=text data.path=/home/me/secret/text.txt"},
        statuses={("sa", 1e-3, 0): ("failed", "OSError: no file '/home/me/secret/part.txt' in 2/3 of /home/me/secret")},
    )
    parts = [piece for pieces in assembly.pieces(load(folder)) for piece in pieces]
    said = "\n".join([*map(repr, parts), summary(folder)])
    assert "data.path=text.txt" in said and "no file 'part.txt' in 2/3 of secret" in said
    assert "/home" not in said and "secret/" not in said
