"""``python -m stability.sweep``: train a product of mechanisms, learning rates and seeds, measure α_max, print the
tables, write the PDF."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
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
    from stability.corpora.base import AbstractCorpus
    from stability.objectives import AbstractObjective
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

SIZES_IN_TOKENS = ("text_", "gpt_", "nanogpt_", "sedd_")  # of models whose sources train them on GPT-2's tokens


def main(argv: list[str]) -> int:
    values = composed(SweepSpec, Invocation.of(argv))
    if values.get("dry_run") is True:
        _plan_without_what_is_not_trained(values)
    with ray_begun_early(values):
        return _sweep(parse(SweepSpec, values))


def _plan_without_what_is_not_trained(values: dict[str, Any]) -> None:
    """Let a plan go on where its objective needs something that is trained first. ``values``: a sweep's, which are not
    validated yet."""
    objective, registry = values.get("objective"), Registry("objectives")
    if isinstance(objective, dict) and objective.get("name") in registry.names():
        values["objective"] = registry.load(objective["name"]).for_plan(objective)


def ray_begun_early(values: dict[str, Any]) -> AbstractContextManager[None]:
    """Start Ray on this machine while torch is imported, where as far as the study's folder tells it will be needed.
    ``values``: a sweep's, which are not validated yet."""
    num_threads, settings = values.get("threads"), values.get("ray")
    is_plan = values.get("launcher") != "ray" or values.get("dry_run")
    if is_plan or not isinstance(num_threads, int) or not isinstance(settings, dict):
        return nullcontext()
    data = values.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    is_lacking = isinstance(path, str) and not Path(path).expanduser().exists()  # which ends the sweep at once
    if settings.get("address") is not None or is_lacking:
        return nullcontext()
    study = StudyFolder.of(str(values.get("runs_dir")), str(values.get("name")))
    if study.file.exists() and all(run.finished for run in study.runs()):
        return nullcontext()
    from sweeps.launchers.ray import head as ray_head

    return ray_head.early(num_threads)


def _sweep(spec: SweepSpec) -> int:
    """Prepare the data, refuse what does not fit them, then print the plan or run it."""
    from stability.build import as_read
    from stability.corpora.cache import prepare, prepare_for_plan
    from sweeps.plan import data_line, describe, objective_line
    from sweeps.trial import trials_of

    pool = Path(spec.runs_dir).resolve()
    if not (spec.dry_run and pool.is_dir()):  # a plan of data that are prepared writes nothing
        check_writable("runs_dir", spec.runs_dir)
    if spec.report and not spec.dry_run:
        check_writable("reports_dir", spec.reports_dir)  # now, not after an hour of training
    cache = pool / "cache"
    corpus, is_read = prepare_for_plan(spec.data, cache) if spec.dry_run else (prepare(spec.data, cache), True)
    corpus = as_read(corpus, spec.objective, pool, for_plan=spec.dry_run)
    objective = Registry("objectives").load(spec.objective.name)(spec.objective.settings, corpus.format)
    _require_fit(spec, corpus, objective)
    spec = _with_weights(spec, corpus, cache)
    _require_roles(spec, corpus)
    if note := _note_of_bytes(spec):
        print_note(note)
    if is_read and (short := _short_validation(spec, corpus, objective)):
        print_note(short)
    trials = trials_of(spec, spec.points(corpus.fingerprint))
    _check_generation(spec, corpus, trials, is_read)
    if not spec.dry_run:
        print_note(objective_line(spec))
        print_note(data_line(spec, corpus))
        return _run(spec, trials, corpus)
    from sweeps import earlier
    from sweeps.requirements import require_for_plan
    from sweeps.search.rounds import search_of
    from sweeps.slots import slots

    require_for_plan(spec, trials)
    known = trials if is_read else None  # data that was not read decides which runs they are
    search = search_of(spec, corpus.fingerprint, {})
    print_text(describe(spec, corpus, slots(spec), known, search))
    study = StudyFolder.of(pool, spec.name)
    if is_read and search is None and study.file.exists():
        _print(earlier.lines(study, study.read(), trials))
    return 0


def _require_fit(spec: SweepSpec, corpus: AbstractCorpus, objective: AbstractObjective) -> None:
    """Raise a ``ValueError`` where the data are too short for the model's windows, or the objective's settings do not
    fit them. They stay in the cache: they are whole, and other settings fit."""
    objective.require()
    more = objective.tokens_needed(spec.model.positions) - spec.model.positions
    remedy = Registry("data").load(spec.data.name).remedy(spec.data.settings, corpus)
    corpus.require(spec.model.positions, more, remedy)


def _require_roles(spec: SweepSpec, corpus: AbstractCorpus) -> None:
    """Refuse settings of an optimizer for a role that the parameters of one of the sweep's models do not play, and an
    optimizer of matrices where one of the models has none."""
    from stability.build import require_roles

    runs = (run for _, run in spec.points(corpus.fingerprint))
    for run in dict.fromkeys(run.model_copy(update={"lr_peak": 1.0, "seed": 0}) for run in runs):
        require_roles(run, corpus.format)


def _with_weights(spec: SweepSpec, corpus: AbstractCorpus, cache_dir: Path) -> SweepSpec:
    """Return the spec with what its ``init`` was found to hold, kept where runs look for it; a line says which tensors
    each kind of run takes. A plan keeps nothing.

    Errors: ``ValueError`` of one or two lines where there are no such weights, or where they fit not every kind.
    """
    if spec.init is None:
        return spec
    from stability.build import shapes
    from stability.training import hugging_face
    from stability.training.weights import Weights, described
    from sweeps.costs import timed_as

    points = spec.model_copy(update={"init": None}).points(corpus.fingerprint)
    kinds = {timed_as(run, variant): run for variant, run in points}
    tensors = {kind: shapes(run, corpus.format) for kind, run in kinds.items()}
    if spec.init.source.startswith("hf:"):
        config = hugging_face.read_config(spec.init.place)
        for run in () if spec.init.partial else kinds.values():
            hugging_face.require(config, run, f"init={spec.init.source}")
    with TemporaryDirectory() as scratch:
        weights = Weights.found(spec.init, next(iter(tensors.values())), Path(scratch))
        fits = {kind: weights.fit(own) for kind, own in tensors.items()}
        for kind, fit in fits.items():
            fit.require(weights.spec, kind)
        if not spec.dry_run:
            weights.keep(cache_dir)
    print_text(described(weights.spec, fits))
    return spec.model_copy(update={"init": weights.spec})


def _note_of_bytes(spec: SweepSpec) -> str:
    """Return a line where a model's size is known for GPT-2's tokens and the data are read as bytes, else nothing."""
    if getattr(spec.data.settings, "tokenizer", None) != "bytes" or not spec.model.name.startswith(SIZES_IN_TOKENS):
        return ""
    return (
        f"data={spec.data.name} trains on bytes, a vocabulary of 256, and model={spec.model.name} is a size for "
        "GPT-2's tokens: add data.tokenizer=gpt2 for these"
    )


def _short_validation(spec: SweepSpec, corpus: AbstractCorpus, objective: AbstractObjective) -> str:
    """Return a line where there is less to validate on than was asked for, else nothing."""
    asked, positions = spec.evaluation.sequences, objective.tokens_needed(spec.model.positions)
    num = len(corpus.windows("val", asked, positions))
    if num >= asked:
        return ""
    return f"validation: on all {num:,} held-out examples, fewer than evaluation.sequences={asked} asks for"


def _check_generation(spec: SweepSpec, corpus: AbstractCorpus, trials: Sequence[Trial], is_read: bool) -> None:
    """Refuse, now and not after an hour of training, what could not be generated afterwards.

    Errors: ``ValueError`` for a sampler that does not fit the objective, for an oracle that cannot score it, and for
    finished samples that would be replaced. A plan asks for no oracle that may have to be downloaded, nor for one
    where the data was not read.
    """
    if spec.generate is None:
        return
    from stability.probes.generation.generating import check_kept, check_oracle, resolved_sampler

    run = spec.points(corpus.fingerprint)[0][1]
    resolved_sampler(run, spec.generate)
    oracle = spec.generate.oracle
    if oracle is not None and (not spec.dry_run or (is_read and oracle.startswith("ckpt:"))):
        check_oracle(run, spec.generate, corpus)
    check_kept((trial.directory for trial in trials), spec.generate)


def _run(spec: SweepSpec, trials: Sequence[Trial], corpus: AbstractCorpus) -> int:
    """Run a grid's ``trials`` all at once, or a search's round by round; record and publish the study."""
    from sweeps import earlier
    from sweeps.alpha_share import alpha_share
    from sweeps.launch import run
    from sweeps.record import StudyRecord
    from sweeps.search.rounds import run_rounds, search_of
    from sweeps.slots import slots

    record = StudyRecord.begun(spec, corpus)
    if search := search_of(spec, corpus.fingerprint, record.before):
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
        return 1  # no step was logged, so that nothing can be tabulated: the failures stay the last that is printed
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
