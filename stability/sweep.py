"""``python -m stability.sweep``: train a product of mechanisms, learning rates and seeds, measure α_max, print the tables, write the PDF."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from stability.cli.compose import read_spec
from stability.cli.entry import check_writable, run_entry
from stability.cli.publish import publish
from stability.registry import Registry
from stability.runs.study import StudyFolder

HELP = """
python -m stability.sweep [key=value …]

Train mechanisms across learning rates, measure the largest stable learning rate (α_max), print tables, write reports/<name>.pdf.
Without arguments: the preset quickstart. The same command again trains only what is missing.

  mechanism=sc | mechanism=[sa,sc]     sa, sw, sc, mix, attentionx, yours   mechanism.sc.window=4   a mechanism's setting
  lr=range | lr=1e-3 | lr=[1e-4,1e-3]  lr.low= lr.high= lr.num=             lr=paper_small          Table 11's rates
  lr=edge                              the best rate and the largest stable ones to 0.05 decades, in a third of the runs of a grid as fine
  search=optuna search.num=40          'search.space.mechanism.sc.step_size={low:0.1,high:2,log:true}'   looks for the best of any numbers
  halving.reduction=3                  leave all but a third of the learning rates of a grid at each of up to two rungs
  seeds=3 steps=500 batch=16           model=text_54m (Table 10)            objective=mlm | ar | score_entropy | classify | multitrack
  data=text data.path=FILE_OR_FOLDER   txt, jsonl (.gz, .zst), parquet      optimizer=adamw | sgd   norm=layernorm | rmsnorm
  data.tokenizer=gpt2 data.keep=4096   data.ranks=FOLDER: its rank files    data=dna data.path=FASTA   data=hf data.dataset=ID
  data=images data.path=PATH           npz, CIFAR's python batches, train/<class>/*.png; with objective=classify model=vit_nano | vit_small
  study=quickstart | text_mini | dna_mini | curvature | ablation_consensus | text_54m, text_193m, text_385m, text_385m_mix, dna_51m, dna_172m, dna_331m,
                                       attentionx_vit, attentionx_gpt, attentionx_vit_mini, attentionx_gpt_mini, protein_mini, protein_35m, _133m, _320m
                                       a preset; what it sets of data, objective, … applies while you choose no other data=, objective=, …
  data=protein data.path=STRUCTURES    objective=multitrack objective.tokenizer=ID cross=auto; objective.sources=[sequence] objective.contexts=[ss,sasa]
  name=NAME runs_dir=DIR               launcher=ray | serial | slurm        logger=files | wandb
  hessian=false                        leave α_max out                      dry_run=true            print plan and cost only
  generate.num=32                      samples of each run                  generate.oracle=ckpt:FOLDER | hf:NAME   who scores them
  curvature.phase=all                  earliest and last checkpoints, too   device=auto | cpu | cuda
  cross=auto objective.context=32      a cross mechanism in every block (ca, cc) reads the 32 tokens before each sequence
  ablate.sc.window=[2,4,8]             settings one at a time around the base; study=ablation_consensus is the paper's Table 9
  log.gradients=20                     norms of each block's gradient       checkpoint.every_steps=50 checkpoint.keep_last=2 checkpoint.keep_best=1
  guards.on_nonfinite=skip_step guards.retries=3   (or restore_last_good) off by default: they hide divergence; tables mark what they did

Every key with its default and meaning: conf/sweep.yaml and the folders beside it.
"""


def main(argv: list[str]) -> int:
    with ExitStack() as begun:
        spec = read_spec("sweep", argv, composed=partial(_begin_ray, begun))
        return _main(spec)


def _begin_ray(begun: ExitStack, values: dict[str, Any]) -> None:
    """Ray on this machine starts while torch is imported, where as far as the study's folder tells it will be needed. ``values`` are not validated yet."""
    num_threads, settings = values.get("threads"), values.get("ray")
    if values.get("launcher") != "ray" or values.get("dry_run") or not isinstance(num_threads, int) or not isinstance(settings, dict):
        return
    if settings.get("address") is not None:
        return
    study = StudyFolder.of(str(values.get("runs_dir")), str(values.get("name")))
    if study.file.exists() and all(run.finished for run in study.runs()):
        return
    from sweeps.launchers.ray import head as ray_head

    begun.enter_context(ray_head.early(num_threads))


def _main(spec: Any) -> int:
    from stability.corpora.cache import prepare, prepare_for_plan
    from stability.structure.tokens import as_read

    pool = Path(spec.runs_dir).resolve()
    if not (spec.dry_run and pool.is_dir()):  # a plan of data that are prepared writes nothing
        check_writable("runs_dir", spec.runs_dir)
    if spec.report and not spec.dry_run:
        check_writable("reports_dir", spec.reports_dir)  # now, not after an hour of training
    corpus, is_read = prepare_for_plan(spec.data, pool / "cache") if spec.dry_run else (prepare(spec.data, pool / "cache"), True)
    corpus = as_read(corpus, spec.objective, pool)
    objective = Registry("objectives").load(spec.objective.name)(spec.objective.settings, corpus.format)
    _require_fit(spec, corpus, objective)
    if is_read and (short := _short_validation(spec, corpus, objective)):
        print(short)
    trials = _trials(spec, pool, spec.points(corpus.fingerprint))
    _check_generation(spec, corpus, trials, is_read)
    if spec.dry_run:
        return _print_plan(spec, corpus, trials if is_read else None)
    study = StudyFolder.of(pool, spec.name)
    return _run(spec, trials, study, corpus)


def _require_fit(spec, corpus, objective) -> None:
    """Errors: ``ValueError`` where the data are too short for the model's windows, or the objective's settings do not fit them. They stay in the cache: they
    are whole, and other settings fit."""
    objective.require()
    more = objective.tokens_needed(spec.model.positions) - spec.model.positions
    corpus.require(spec.model.positions, more, Registry("data").load(spec.data.name).remedy(spec.data.settings, corpus))


def _short_validation(spec, corpus, objective) -> str:
    """A line where there is less to validate on than was asked for, else nothing."""
    num = len(corpus.windows("val", spec.evaluation.sequences, objective.tokens_needed(spec.model.positions)))
    asked = f"evaluation.sequences={spec.evaluation.sequences}"
    return f"validation: on all {num:,} held-out examples, fewer than {asked} asks for" if num < spec.evaluation.sequences else ""


def _check_generation(spec, corpus, trials, is_read: bool) -> None:
    """Errors: ``ValueError`` for a sampler that does not fit the objective, for an oracle that cannot score it, and for finished samples that would be
    replaced: now, not after an hour of training. A plan asks for no oracle that may have to be downloaded, nor for one where the data was not read."""
    if spec.generate is None:
        return
    from stability.probes.generation.generating import check_kept, check_oracle, resolved_sampler

    run = spec.points(corpus.fingerprint)[0][1]
    resolved_sampler(run, spec.generate)
    oracle = spec.generate.oracle
    if oracle is not None and (not spec.dry_run or (is_read and not oracle.startswith("hf:"))):
        check_oracle(run, spec.generate, corpus)
    check_kept((trial.directory for trial in trials), spec.generate)


def _trials(spec, pool, points):
    from stability.config.identity import run_id
    from stability.runs.provenance import command_line
    from sweeps.trial import AXES, Trial, several_of

    curvature = spec.curvature.model_dump(mode="json") if spec.hessian else None
    generation = None if spec.generate is None else spec.generate.absolute().model_dump(mode="json")
    common = {"pool": str(pool), "curvature": curvature, "device": spec.device, "wandb": None, "command": command_line(), "generate": generation}
    common["several"] = several_of({axis: getattr(spec, axis) for axis in AXES})
    return [Trial(run_id(run), run.model_dump(mode="json"), variant=variant, **common) for variant, run in points]


def _print_plan(spec, corpus, trials) -> int:
    """``trials``: None where the data was not read, which decides which runs they are."""
    from sweeps.launch import slots
    from sweeps.plan import describe
    from sweeps.search.rounds import search_of

    print(describe(spec, corpus, slots(spec), trials, search_of(spec, corpus.fingerprint, {})))
    return 0


def _run(spec, trials, study, corpus) -> int:
    from sweeps.search.rounds import search_of

    before = study.read() if study.file.exists() else {}
    started, record = time.time(), _record(spec, corpus)
    if search := search_of(spec, corpus.fingerprint, before):
        outcome, trials = _run_rounds(spec, search, study, record)
    else:
        outcome = _run_grid(spec, trials, study, record)
    found = _variants(spec, trials) | (search.record() if search else {})
    run_ids = [trial.run_id for trial in trials]
    begun = before.get("run_ids") or [None]
    earlier_s = before.get("provenance", {}).get("wall_s", 0.0) if begun == (run_ids[: len(begun)] if search else run_ids) else 0.0
    if not (outcome.num_trained or outcome.num_failed or outcome.interrupted) and earlier_s:
        # nothing ran: what did stays on record
        study.write(run_ids, **{key: value for key, value in before.items() if key not in ("name", "run_ids")} | found)
    else:
        record["provenance"]["wall_s"] = earlier_s + time.time() - started
        study.write(run_ids, **record | found)
    if outcome.interrupted:
        return 130
    publish(study, spec.reports_dir if spec.report else None, unless_same=True)
    return 1 if outcome.num_failed else 0


def _run_grid(spec, trials, study, record):
    """All trials at once, on record before the first one starts."""
    from sweeps.launch import run

    def begin() -> None:
        for trial in trials:
            trial.directory.write_spec(trial.spec)
        study.write([trial.run_id for trial in trials], **record | _variants(spec, trials))

    return run(spec, trials, begin=begin)


def _run_rounds(spec, search, study, record):
    """Round by round; the study lists what was asked for so far. Returns the outcome and all trials."""
    from sweeps.search.rounds import run_rounds

    def write(trials):
        study.write([trial.run_id for trial in trials], **record | _variants(spec, trials) | search.record())

    return run_rounds(spec, search, trials_of=partial(_trials, spec, study.pool), write=write)


def _record(spec, corpus) -> dict[str, Any]:
    """What ``study.json`` says beside the runs: command, launcher, spec, code, machine, data."""
    from stability.build import described
    from stability.runs.provenance import provenance

    origin = provenance()
    data = {"data_description": described(spec, corpus), "data_fingerprint": corpus.fingerprint}
    started_at = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {
        "launcher": spec.launcher,
        "command": origin["command"],
        "spec": spec.model_dump(mode="json"),
        "provenance": {**origin, "started_at": started_at, **data},
    }


def _variants(spec, trials) -> dict[str, Any]:
    """Where settings vary one at a time: which variant each run is, and of each setting the values with their variants. Nothing without `ablate`."""
    if not spec.ablate:
        return {}
    ablations = [
        {"axis": axis, "part": item.part, "setting": item.setting, "values": [{"value": value, "variant": label} for value, label, _ in variants]}
        for item, axis, variants in spec.ablations()
    ]
    return {"variants": {trial.run_id: trial.variant for trial in trials if trial.variant}, "ablations": ablations}


if __name__ == "__main__":
    run_entry(main, HELP)
