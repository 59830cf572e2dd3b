"""Estimate a structure tokenizer's training cost on a named GPU.

The estimate uses a trace of one step per stage. It reads no data and trains nothing.
"""

from __future__ import annotations

import torch

from stability.config.tokenizer import TokenizerRunSpec
from stability.corpora.proteins.alphabets import NUM_ATOMS, VOCAB_SIZE
from stability.models.backbone import num_parameters
from stability.structure.crops import PaddedCrops
from stability.structure.tokenizer import StructureTokenizer, build_tokenizer
from stability.structure.training import squared_errors
from sweeps.estimated import FLOAT32, GPUS, Gpu, state_of, step_traffic
from sweeps.traced import trace
from sweeps.view.board import duration

STAGES = ((1, ("encoder", "decoder")), (2, ("atom_decoder",)))  # the parts trained in each stage


def describe(run: TokenizerRunSpec, gpu_name: str) -> str:
    """Return the plan as text: one line per part and one per stage."""
    gpu = GPUS[gpu_name]
    with torch.device("meta"):
        tokenizer = build_tokenizer(run, VOCAB_SIZE)
    parts = {name: part for name, part in tokenizer.named_children() if num_parameters(part)}
    lines = [f"structure tokenizer, {num_parameters(tokenizer):,} parameters, {tokenizer.num_tokens:,} codes"]
    lines += [f"{name:<14}{num_parameters(part):>13,} parameters" for name, part in parts.items()]
    for stage, trained in STAGES:
        num_steps = run.steps if stage == 1 else run.atom_steps
        if num_steps:
            lines.append(_stage_line(run, gpu, tokenizer, stage, trained, num_steps))
    lines.append(
        f"at least, estimated for one {gpu.describe()}: each operation of a step takes its bytes or its matrix "
        f"products at these peaks, one after another, every crop {run.positions} residues long; "
        "memory: all tensors of a step; nothing was trained"
    )
    return "\n".join(lines)


def _stage_line(
    run: TokenizerRunSpec, gpu: Gpu, tokenizer: StructureTokenizer, stage: int, trained: tuple[str, ...], num_steps: int
) -> str:
    """Return one stage's line: seconds of a step and of all steps, and peak memory."""
    crops, what = _crops(run), f"stage {stage} ({' and '.join(trained)}), {num_steps:,} steps of {run.batch} crops"
    num_params = sum(num_parameters(getattr(tokenizer, name)) for name in trained)
    state = state_of(run.optimizer)
    if state is None:
        return f"{what}: optimizer={run.optimizer.name} has state whose memory cannot be predicted"
    found = trace(
        tokenizer,
        lambda: squared_errors(tokenizer, crops, atoms=stage == 2).mean(),
        device=gpu.device,
        precision="float32",
        num_counted=run.batch * run.positions,
        times=1,
    )
    tokenizer.zero_grad(set_to_none=True)
    step_s = found.seconds + step_traffic(num_params, state) / gpu.device.bandwidth
    memory = found.peak_bytes + num_params * (state + FLOAT32)
    return f"{what}: at least {step_s * 1e3:,.0f} ms each, {duration(num_steps * step_s)}, {memory / 1e9:.1f} GB"


def _crops(run: TokenizerRunSpec) -> PaddedCrops:
    """Return crops of full length on the meta device."""
    shape = (run.batch, run.positions)
    return PaddedCrops(
        torch.empty(*shape, 3, 3, device="meta"),
        torch.empty(shape, dtype=torch.bool, device="meta"),
        torch.empty(*shape, NUM_ATOMS, 3, device="meta"),
        torch.empty(*shape, NUM_ATOMS, dtype=torch.bool, device="meta"),
        torch.empty(shape, dtype=torch.int64, device="meta"),
    )
