"""``python -m stability.sweep``: train a product of mechanisms, learning rates and seeds.

It then measures α_max, prints the tables and writes the PDF.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.cli.compose import composed
from stability.cli.entry import check_writable, run_entry
from stability.cli.publish import publish
from stability.cli.study_on_wandb import send_after_sweep
from stability.cli.words import Invocation
from stability.config.parse import parse
from stability.config.sweep import SweepSpec
from stability.printable import print_note, print_text
from stability.registry import Registry
from stability.runs.study import StudyFolder

if TYPE_CHECKING:
    from stability.plan.plan import Plan
    from sweeps.trial import Trial

HELP = """
python -m stability.sweep [key=value …]

Train mechanisms across learning rates, measure the largest stable learning rate (α_max), print tables, write
reports/<name>.pdf. Without arguments: study=quickstart. The same command again trains only what is missing.

Axes: one choice or several, [a,b]; a sweep is their product. Their settings: mechanism.sc.window=4 norm.dyt.alpha=0.7
  mechanism=   sa, sw, sc, mix, attentionx, two_way (a causal one read from both ends), sigmoid, gated_softmax, fox,
               sparse_transformer, longformer, bigbird, sparsek, nsa; recurrent: retnet, gla, hgrn2, mamba, mamba2,
               deltanet, gated_deltanet, kda, titans; or your own: plugins=[my.module]
               (sparge, fasa: for checkpoints of sa, by stability.probe what=training_free)
  residual=    identity, hc, mhc, mhc_lite, ode     norm=  layernorm, rmsnorm, dyt, derf
  optimizer=   adamw, sgd, adafactor, adan, ademamix, adopt, cautious_adamw, galore_adamw, lamb, lion, mars_adamw, muon,
               prodigy, radam, schedulefree_adamw, shampoo, soap, sophia, turbo_muon
               optimizer.groups.ROLE.lr_scale=0.5  weight_decay=…  settings by role: embedding, position, norm, mixer,
               cross, residual, ffn, condition, head
  precision=   float32, tf32, bf16                seeds=3        ablate.sc.window=[2,4,8]: one at a time around the base
  lr=          1e-3 | [1e-4,1e-3] | values | range: lr.low= lr.high= lr.num= | edge: the best rate and the largest
               stable ones to 0.05 decades | scaled, edge_scaled: multiples of each optimizer's own rate | mini_text,
               mini_dna, mini_protein | Table 11: paper_small, paper_medium, paper_large, paper_text_385m,
               paper_text_385m_mix; with Tables 3 and 4's: paper_large_tables

One choice for all runs
  model=       nano, nano_2, text_54m, text_193m, text_385m, dna_51m, dna_172m, dna_331m, protein_35m, protein_133m,
               protein_320m, gpt_s, gpt_m, gpt_l, nanogpt_s, nanogpt_m, nanogpt_l, sedd_small, sedd_medium, vit_nano,
               vit_small, vit_small_spt; model.layers=6 model.dropout=0.1 model.init=ours|torch|nanogpt|sedd
  ffn=         mlp, glu          position=  rope, learned, none          linear=  dense, bitnet
  objective=   mlm, ar, score_entropy, classify (images), multitrack (proteins), recall (data=mqar, copy)
  cross=       none, auto, ca, cc; with objective.context=32 each block reads the 32 tokens before its sequence
  data=        stdlib | text data.path=PATH (txt, jsonl, ndjson, .gz, .zst, .xz, parquet) | dna data.path=FASTA |
               images data.path=PATH | hf data.dataset=ID | protein data.path=FOLDER | mqar | copy; data.tokenizer=gpt2
  study=       a preset; its data, objective, … apply while you choose no other: quickstart, flagship, optimizers,
               curvature, ablation_consensus, ablation_consensus_193m, consensus_readings, residuals,
               residuals_fineweb_edu, residuals_mini, nanogpt, sedd, vit_small, vit_small_cifar100, text_mini, text_54m,
               text_193m, text_385m, text_385m_mix, dna_mini, dna_51m, dna_172m, dna_331m, protein_mini,
               protein_readings, protein_35m, protein_133m, protein_320m, attentionx_gpt, attentionx_gpt_mini,
               attentionx_vit, attentionx_vit_mini, attentionx_2x2, mixers_softmax, mixers_softmax_ar, mixers_recurrent,
               mixers_recurrent_mlm, hybrids, recall, recall_recurrent, recall_memory, edge_prediction

Training
  steps=500 batch=16 microbatch=4 clip_norm=1 compile=true threads=1     schedule=constant|linear|cosine|wsd
  init=ckpt:FOLDER | hf:FOLDER   every run starts from these weights; init.partial=true: from those tensors that match
  evaluation.every_steps=100     checkpoint.every_steps=50 checkpoint.keep_last=2     log.gradients=20: of each block
  verdict.spike_nats=0.5         guards.on_nonfinite=skip_step guards.retries=3: off by default, they hide divergence

Fewer runs, or others
  search=      none | optuna search.num=40 'search.space.mechanism.sc.step_size={low:0.1,high:2,log:true}' |
               asha: stops worse runs early | pbt: a schedule of the learning rate
  halving.reduction=3            leaves all but a third of a grid's learning rates at each of up to two rungs

Measured, and written
  hessian=false: without α_max   curvature.phase=all: earliest checkpoints, too     report=false reports_dir=DIR
  generate.num=32                samples of each run; generate.oracle=ckpt:FOLDER | hf:NAME | evo2:CHECKPOINT scores

Where it runs
  name=NAME runs_dir=DIR  device=auto|cpu|cuda  wandb.project=NAME   dry_run=true plan_gpu=a40|a100|h100|h200: its cost
  launcher=ray|serial|slurm      retry=failed|none       logger=files|wandb|tensorboard|mlflow, several in brackets
  cpus_per_trial=1 gpus_per_trial=0.5 devices_per_trial=2 shard_parameters=true    ray.address=auto slurm.partition=NAME

Every key with its default and meaning: conf/sweep.yaml and the folders beside it; docs/getting_started.md.
"""


def main(argv: list[str]) -> int:
    values = composed(SweepSpec, Invocation.of(argv))
    if values.get("dry_run") is True:
        _plan_without_what_is_not_trained(values)
    with ray_begun_early(values):
        return _sweep(parse(SweepSpec, values))


def _plan_without_what_is_not_trained(values: dict[str, Any]) -> None:
    """Let a dry run continue if its objective needs a part trained first; ``values`` are not validated yet."""
    objective, registry = values.get("objective"), Registry("objectives")
    if isinstance(objective, dict) and objective.get("name") in registry.names():
        values["objective"] = registry.load(objective["name"]).for_plan(objective)


def ray_begun_early(values: dict[str, Any]) -> AbstractContextManager[None]:
    """Start local Ray while torch is imported, if the sweep will probably need it.

    ``values`` are a sweep's, not validated yet; the study's folder shows whether runs are left.
    """
    num_threads, settings = values.get("threads"), values.get("ray")
    is_plan = values.get("launcher") != "ray" or values.get("dry_run")
    if is_plan or not isinstance(num_threads, int) or not isinstance(settings, dict):
        return nullcontext()
    data = values.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    is_lacking = isinstance(path, str) and not Path(path).expanduser().exists()  # the sweep will fail at once
    if settings.get("address") is not None or is_lacking:
        return nullcontext()
    study = StudyFolder.of(str(values.get("runs_dir")), str(values.get("name")))
    if study.file.exists() and all(run.finished for run in study.runs()):
        return nullcontext()
    from sweeps.launchers.ray import head as ray_head

    return ray_head.early(num_threads)


def _sweep(spec: SweepSpec) -> int:
    """Prepare a sweep's plan, then print it or run it."""
    if not (spec.dry_run and Path(spec.runs_dir).is_dir()):  # a dry run with prepared data writes nothing
        check_writable("runs_dir", spec.runs_dir)
    if spec.report and not spec.dry_run:
        check_writable("reports_dir", spec.reports_dir)  # now, not after an hour of training
    from stability.plan.plan import Plan
    from sweeps.dry_run import data_line, describe, objective_line
    from sweeps.trial import trials_of

    plan = Plan.of(spec)
    _print(plan.notes)
    trials = trials_of(plan.spec, plan.points)
    if spec.dry_run:
        print_text(describe(plan, trials))
        return 0
    print_note(objective_line(spec))
    print_note(data_line(spec, plan.corpus))
    return _run(plan, trials)


def _run(plan: Plan, trials: Sequence[Trial]) -> int:
    """Run a grid's ``trials`` at once, or a search's in rounds; record and publish the study."""
    from sweeps import earlier
    from sweeps.alpha_share import alpha_share
    from sweeps.launch import run
    from sweeps.record import StudyRecord
    from sweeps.search.rounds import run_rounds, search_of
    from sweeps.slots import slots

    spec = plan.spec
    record = StudyRecord.begun(spec, plan.corpus)
    if search := search_of(spec, plan.corpus.fingerprint, record.before):
        outcome, trials = run_rounds(spec, search, record)
        _print(earlier.lines(record.study, record.before, trials))
    else:
        _print(earlier.lines(record.study, record.before, trials))
        outcome = run(spec, trials, record=record)
    has_worked = bool(outcome.num_trained or outcome.num_failed or outcome.interrupted)
    record.close(trials, search.record() if search else None, has_worked=has_worked)
    if outcome.interrupted:
        return 130
    ended = time.time()
    if outcome.num_failed and not any(trial.directory.has_rows for trial in trials):
        return 1  # no step was logged, so there are no tables: the failures remain the last printed lines
    publish(record.study, spec.reports_dir if spec.report else None, unless_same=True)
    if "wandb" in spec.logger and has_worked:
        pdf = Path(spec.reports_dir) / f"{spec.name}.pdf" if spec.report else None
        send_after_sweep(record.study, pdf, spec.wandb.model_dump(include={"project", "entity"}))
    if share := alpha_share([trial.directory for trial in trials], record.started, ended, slots(spec)):
        print_note(share)
    return 1 if outcome.num_failed else 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print_note(line)


if __name__ == "__main__":
    run_entry(main, HELP)
