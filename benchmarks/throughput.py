"""Measure the throughput of a study's kinds of run, side by side in one process: ``python -m benchmarks.throughput
runs/studies/NAME``; its report then shows it.

One run stands for each series: a step is its forward and backward pass over a training batch (in its microbatches),
clipping and optimizer, on its own data; where the optimizer asks for an estimate of the Hessian's diagonal before some
of its steps, that, too. The series take turns, so that what else the machine does hits all alike, and
``results/throughput.json`` keeps the seconds of every turn: a ratio is of the same turn; and the most memory that a
step holds at once beyond parameters and the optimizer's state. Validation, checkpoints and logging are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks._measuring import peak_bytes  # isort: skip (before torch, see there)
import torch
from torch import Tensor, nn

from analysis.study.load import load
from benchmarks._machine import machine
from benchmarks._training import Training, interleaved
from stability.build import build_model, build_objective, build_optimizer
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.curvature import hutchinson_diagonal
from stability.models.backbone import num_parameters
from stability.objectives import Examples, training_examples
from stability.optimizers import TakingHessian
from stability.probes.checkpoints import corpus_of
from stability.runs.directory import read_json
from stability.runs.study import StudyFolder

VERSION = 1


def training(spec: RunSpec, cache_dir: Path, device: str) -> Training:
    """Return the steps of one run on its first training batch.

    Args:
        spec: the run's spec.
        cache_dir: prepared data's folder.
        device: "cpu" or "cuda".
    """
    corpus = corpus_of(spec, cache_dir)
    net, objective = build_model(spec, corpus.format).to(device), build_objective(spec, corpus.format)
    optimizer = build_optimizer(spec, net)
    examples = training_examples(spec, corpus, objective, "train", 1, seed=spec.seed, batch=spec.batch).to(
        torch.device(device)
    )
    parts, count = examples.split(spec.microbatch or spec.batch), objective.count(examples, torch.float32)

    generator = torch.Generator().manual_seed(spec.seed)

    def mean_loss(params: Mapping[str, Tensor], part: Examples) -> tuple[Tensor, Tensor]:
        return objective.training_loss(net, part, params)[:2]

    def step() -> None:
        """Take a training step on the batch, in its microbatches."""
        for part in parts:
            (objective.loss(net, part)[0] / count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), spec.clip_limit)
        if isinstance(optimizer, TakingHessian) and optimizer.hessian_is_due():
            named = dict(net.named_parameters())
            found = hutchinson_diagonal(mean_loss, named, generator=generator, batches=parts)
            optimizer.take_hessian({parameter: found[name] for name, parameter in named.items()})
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.stack([objective.loss(net, part, params)[0] for part in parts]).sum() / count

    return Training(step, num_parameters(net), net, loss)


def measure(study: StudyFolder, repeats: int, device: str, threads: int) -> Path:
    """Write ``results/throughput.json`` of a study with collected results, and return its path.

    Args:
        study: the study.
        repeats: turns.
        device: "cpu" or "cuda".
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    runs = load(study.path).runs.drop_duplicates("series")
    folders = {directory.run_id: directory for directory in study.runs()}
    specs = {run.series: parse_run(read_json(folders[run.run_id].spec_file)) for run in runs.itertuples()}
    trainings = {series: training(spec, study.path.parent.parent / "cache", device) for series, spec in specs.items()}
    seconds = interleaved({series: each.step for series, each in trainings.items()}, repeats, device)
    rows = [
        {
            "run_id": run.run_id,
            "series": run.series,
            "num_params": trainings[run.series].num_parameters,
            "tokens_per_step": specs[run.series].batch * specs[run.series].model.positions,
            "seconds": seconds[run.series],
            "peak_bytes": peak_bytes(trainings[run.series].step, device),
        }
        for run in runs.itertuples()
    ]
    place = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {threads} thread{'s' * (threads > 1)}, seconds that this process computed"
    )
    path = study.results / "throughput.json"
    path.write_text(
        json.dumps({"version": VERSION, "device": place, "machine": machine(), "rows": rows}, indent=1),
        encoding="utf-8",
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="a study's folder, e.g. runs/studies/residuals_mini")
    parser.add_argument("--repeats", type=int, default=25, help="turns (default 25; fewer than 6 make no claim)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = parser.parse_args()
    path = measure(StudyFolder(arguments.study), arguments.repeats, arguments.device, arguments.threads)
    print(f"measured: {path}; drawn by: python -m stability.report name={Path(arguments.study).name}")


if __name__ == "__main__":
    main()
