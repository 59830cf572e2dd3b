"""A run on CUDA that was left resumes bit for bit, whatever the training step is made of."""

from __future__ import annotations

import pytest
import torch

from stability.runs.directory import read_jsonl
from tests.cuda import DEVICE, HAS_CUDA, here
from tests.training.test_loop import final_weights, same

DROPPED = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "dropout": 0.2}
PORTABLE = {
    "plain": {},
    "sc": {"mechanism": {"name": "sc"}, "residual": {"name": "mhc_lite"}},
    "dropout in microbatches": {"model": DROPPED, "batch": 6, "microbatch": 4},
    "bf16": {"precision": "bf16"},
    "muon": {"optimizer": {"name": "muon"}},
}
ON_CUDA = {
    "tf32": {"precision": "tf32"},
    "gla": {"mechanism": {"name": "gla"}, "objective": {"name": "ar"}},
    "graphs": {"cuda_graphs": True},
    "graphs of microbatches": {"cuda_graphs": True, "batch": 6, "microbatch": 4, "mechanism": {"name": "sc"}},
    "kernels": {"mechanism": {"name": "sw", "impl": "triton"}, "optimizer": {"name": "adamw", "impl": "triton"}},
}
CASES = here(PORTABLE | ON_CUDA, ("plain", "dropout in microbatches"))


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_left_resumes_bit_for_bit(lab, name):
    spec = lab.spec(**(PORTABLE | ON_CUDA)[name])
    straight = lab.train(spec, device=DEVICE)
    rows, weights = straight.metrics_file.read_bytes(), final_weights(straight)
    straight.path.rename(lab.pool / "aside")
    lab.train(spec, steps=5, device=DEVICE)
    resumed = lab.train(spec, device=DEVICE)
    assert resumed.metrics_file.read_bytes() == rows
    assert same(final_weights(resumed), weights)


@pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA graphs; tests/training/test_captured.py has the rest")
@pytest.mark.parametrize("mechanism", ["sa", "sc", "titans", "nsa"])
def test_a_run_by_graphs_is_the_plain_run_up_to_rounding(lab, mechanism):
    objective = {"name": "mlm" if mechanism in ("sa", "sc") else "ar"}
    parts = {"mechanism": {"name": mechanism}, "objective": objective}
    runs = [lab.train(lab.spec(**parts, **more), device="cuda") for more in ({}, {"cuda_graphs": True})]
    for plain, replayed in zip(*(read_jsonl(run.metrics_file) for run in runs), strict=True):
        for key in ("loss", "grad_norm", "update_norm"):
            if plain.get(key) is not None:
                assert replayed[key] == pytest.approx(plain[key], rel=1e-5), (key, plain["step"])


@pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA")
def test_a_run_on_cuda_is_the_run_on_a_cpu_up_to_rounding(lab):
    """The batches, masks and weights are drawn on the CPU: the curves of 12 steps differ by roundings alone."""
    pools = []
    for device in ("cpu", "cuda"):
        run = lab.train(lab.spec(), device=device)
        pools.append(list(read_jsonl(run.metrics_file)))
        run.path.rename(lab.pool / device)
    for on_cpu, on_cuda in zip(*pools, strict=True):
        if on_cpu.get("loss") is not None:
            assert on_cuda["loss"] == pytest.approx(on_cpu["loss"], rel=1e-4)
    assert torch.cuda.is_initialized()
