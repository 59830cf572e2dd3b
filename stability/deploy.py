"""``python -m stability.deploy ckpt=… format=…``: write a trained model as a folder of its own, in few bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stability.cli.entry import check_writable, run_entry
from stability.cli.subjects import read_about
from stability.cli.words import Invocation
from stability.config.deployment import DeploySpec
from stability.config.run import RunSpec
from stability.plan.runs import RunPlan, read_spec
from stability.printable import print_notes, print_text, shell_text
from stability.runs.directory import RunDirectory, step_of
from stability.runs.phases import TERMINAL, phases

HELP = """
python -m stability.deploy ckpt=FOLDER format=fp32|bf16|int8|ternary [out=DIR] [key=value …]

ckpt: a study (runs/studies/<name>: its run of the lowest validation NLL), a run (runs/<run_id>) or a checkpoint.

  format=fp32     the checkpoint's weights, bit for bit
  format=bf16     tensors of two or more axes in bfloat16, but for routers of experts
  format=int8     linear maps of mixers and feed-forward networks in int8, symmetric, one scale a row; all other tensors
                  of two or more axes in bfloat16 (rest=fp32: as they are; head=int8: tables in int8, too)
  format=ternary  of a run with linear=bitnet: its maps in 2 bits a weight (pack=base3: 1.6), exactly as it computes;
                  force=true makes the maps of any other run ternary and prints what it costs

The folder holds model.safetensors, spec.json, tokenizer.json and manifest.json: measured sizes, sha256 of each file and
the validation. A fresh process loads it and measures the run's held-out examples; above `tolerance` nothing is written
and the exit code is 1. No pickle. `python -m stability.infer dir=DIR text=…` answers from it without the run.
"""
ABOVE_TOLERANCE = 1


def main(argv: list[str]) -> int:
    """Write the folder of one checkpoint after its validation."""
    spec = read_about(DeploySpec, Invocation.of(argv))
    plan = RunPlan.of(spec.ckpt, kept="deployed model", without_checkpoint="there is nothing to deploy")
    print_notes(plan.notes)
    directory, checkpoint = _choose_checkpoint(plan)
    run = read_spec(directory)
    _check_format(run, spec)
    out = Path(spec.out or f"deployed/{directory.run_id}_{spec.format}")
    _check_place(out, spec)
    return _deploy(run, directory, checkpoint, out, spec, plan.cache_dir)


def _choose_checkpoint(plan: RunPlan) -> tuple[RunDirectory, Path]:
    """Return a plan's checkpoint with its run; of a study that of the lowest validation NLL.

    Raises:
        ValueError: there is none.
    """
    if plan.checkpoint is not None:
        return plan.directory, plan.checkpoint
    found = {each: phases(each, TERMINAL).get(TERMINAL) for each in plan.runs}
    ended = {each: folder for each, folder in found.items() if folder is not None}
    nlls = {each: each.status().get("result", {}).get("val_nll") for each in ended}
    known = {each: nll for each, nll in nlls.items() if nll is not None}
    if not known:
        what = "no run of this study" if plan.study is not None else "the run"
        raise ValueError(f"{what} reached its last step with a checkpoint; give the folder of an earlier checkpoint")
    best = min(known, key=known.__getitem__)
    if plan.study is not None:
        run = plan.runs[best]
        print_text(
            f"best of {len(known)} runs: {best.run_id}, {run.mechanism.name} at lr={run.lr_peak:.3g}, seed {run.seed}, "
            f"validation NLL {known[best]:.4f}"
        )
    return best, ended[best]


def _check_format(run: RunSpec, spec: DeploySpec) -> None:
    if spec.format == "ternary" and run.linear.name != "bitnet" and not spec.force:
        raise ValueError(
            f"format=ternary needs a run with linear=bitnet, and this one has linear={run.linear.name}; train one, "
            "choose format=int8, or add force=true to see what rounding costs"
        )


def _check_place(out: Path, spec: DeploySpec) -> None:
    """Refuse a place that holds anything but a deployed model to replace."""
    from stability.deployed.folder import MANIFEST

    check_writable("out", str(out))
    if not out.exists():
        return
    if not (out / MANIFEST).is_file() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"out={out}: is there already and no deployed model; give another folder")
    if (out / MANIFEST).is_file() and not spec.overwrite:
        raise ValueError(f"out={out}: holds a deployed model; add overwrite=true to replace it, or give another folder")


def _deploy(
    run: RunSpec, directory: RunDirectory, checkpoint: Path, out: Path, spec: DeploySpec, cache_dir: Path
) -> int:
    """Write, validate and describe a folder; return the exit code."""
    from stability.deployed.folder import MODEL
    from stability.deployed.writing import Rejected, write

    before = (checkpoint / MODEL).stat().st_size
    origin = {"run": directory.run_id, "step": step_of(checkpoint), "checkpoint_bytes": before}
    try:
        manifest = write(out, checkpoint, spec, origin, cache_dir)
    except Rejected as rejected:
        print_text(f"error: {rejected}", file=sys.stderr)
        return ABOVE_TOLERANCE
    for line in [*_describe(out, manifest), f"next: {_next(out, run, directory.path)}"]:
        print_text(line)
    return 0


def _next(out: Path, run: RunSpec, place: Path) -> str:
    """Return the command that uses a deployed model, or how to read one that `stability.infer` does not answer for."""
    from stability.config.parts import num_context_of
    from stability.deployed.folder import TOKENS
    from stability.deployed.tokens import NUMBERS, Tokens

    kind = Tokens.of_json((out / TOKENS).read_text(encoding="utf-8")).kind
    if kind != NUMBERS and not num_context_of(run.objective):
        return f"python -m stability.infer {shell_text(f'dir={out}')} text='…'"
    text = (
        f"stability.deployed.load({str(out)!r}) in Python; infer answers for no model of objective={run.objective.name}"
    )
    if run.objective.name != "sentence_pairs":
        return text
    return f"{text}; sentence embeddings: python -m stability.embed mode=export {shell_text(f'ckpt={place}')} out=…"


def _describe(out: Path, manifest: dict[str, Any]) -> list[str]:
    """Return sizes and validation, a line each."""
    files = ", ".join(f"{name} {each['bytes']:,}" for name, each in manifest["files"].items())
    found = manifest["validation"]
    limit = "no limit" if found["tolerance"] is None else f"at most {100 * found['tolerance']:g} %"
    return [
        f"{out}: {manifest['format']} of run {manifest['run']}, step {manifest['step']}",
        f"bytes: {manifest['bytes']:,} ({files}); the checkpoint's weights have {manifest['checkpoint_bytes']:,}",
        f"held-out NLL: {found['nll_before']:.4f} before, {found['nll_after']:.4f} loaded by a fresh process: "
        f"{100 * found['relative_change']:+.3g} % ({limit}), {found['examples']} examples",
        f"largest difference of a logit: {found['largest_logit_difference']:.2g}",
        f"time of that: {found['seconds_before']:.2f} s before, {found['seconds_after']:.2f} s after; both compute in "
        "float32",
    ]


if __name__ == "__main__":
    run_entry(main, "deploy", HELP)
