"""Our top-level package `kernels` has the name of a Hugging Face package that transformers looks for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import kernels
assert kernels.__file__ == {ours!r}, kernels.__file__
from transformers import GPT2Config, GPT2LMHeadModel
import torch
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0))
print(tuple(model(torch.zeros(1, 4, dtype=torch.long)).logits.shape))
"""


@pytest.mark.slow  # `tests/probes/test_hugging_face.py` imports transformers where our package is found, too
def test_transformers_imports_and_runs_beside_our_kernels_package():
    pytest.importorskip("transformers")
    code = CODE.format(ours=str(ROOT / "kernels" / "__init__.py"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 4, 8)"
