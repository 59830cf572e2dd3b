"""Open the report with runs, data, provenance and the verdicts on the papers' claims; close it with troubles.

Troubles are runs that diverged, failed, or learned nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from analysis.claims import judging
from analysis.claims.claim import Claim, correction_note
from analysis.claims.judging import judge
from analysis.claims.reference import BEST, BEYOND, COMMON, COST, OWN, RATIO, STABLE, against_reference, short_verdict
from analysis.drawing import pieces
from analysis.drawing.pieces import Pieces, box, heading, paragraph, shown
from analysis.drawing.tables import find_guarded, guarded_note
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.window_ends import shown_states
from analysis.sections.section import Drawn, Section, make_printer
from analysis.study import wording
from analysis.study.load import ENDED, Study
from analysis.study.once import once_per_study
from analysis.study.reference import references
from analysis.words import duration, join_words, lr_text, plural, power, without_folders, without_places
from stability.runs.words import EXPLODED, LEARNED_NOTHING


def body(study: Study, drawn: Drawn) -> Pieces:
    """Return the part "What was run": command, commit, hardware, versions, data, and the runs' common settings."""
    provenance = study.study.get("provenance")
    known: dict[str, Any] = provenance if isinstance(provenance, dict) else {}
    commit = _value_text(known.get("commit"))
    versions = [f"{name} {version}" for name, version in _mapping(known.get("versions")).items()]
    started = _value_text(known.get("started_at")).replace("T", " ")
    earlier = [each for each in study.study.get("earlier", []) if each["reported"]]
    num = len({run_id for each in earlier for run_id in each["run_ids"]} & set(study.runs["run_id"]))
    pairs = [
        ("Command", without_folders(_value_text(known.get("command") or study.study.get("command")))),
        ("Commit", f"{commit}, with uncommitted changes" if known.get("dirty") else commit),
        *([("Runs trained by", text)] if (text := _trained_by(study)) else []),
        ("Hardware", _hardware(known.get("hardware"))),
        ("Versions", ", ".join(versions) or "not recorded"),
        ("Data", f"{_value_text(known.get('data_description'))} (fingerprint {study.fingerprint})"),
        *wording.facts(study),
        ("Started", f"{started}, launcher: {_value_text(study.study.get('launcher'))}"),
        ("Training time", f"{duration(float(study.runs['wall_s'].sum()))}, the sum of the runs’ own clocks"),
        ("Runs", ", ".join(f"{count} {status}" for status, count in shown_states(study.runs).value_counts().items())),
        *([("Of earlier commands", plural(num, "run"))] if num else []),
    ]
    return pieces.heading("What was run") + pieces.facts(pairs)


def provenance_line(study: Study) -> str:
    """Return study, commit, machine, data, date and command in one line."""
    provenance = study.study.get("provenance")
    known: dict[str, Any] = provenance if isinstance(provenance, dict) else {}
    parts = [
        f"Study {study.name}",
        f"commit {_value_text(known.get('commit'))[:12]}{' with uncommitted changes' if known.get('dirty') else ''}",
        _trained_by_in_brief(study) or _hardware(known.get("hardware")),
        f"data fingerprint {study.fingerprint}",
        _value_text(known.get("started_at")).replace("T", " "),
        f"{duration(float(study.runs['wall_s'].sum()))} of training",
        without_folders(_value_text(known.get("command") or study.study.get("command"))),
    ]
    return "; ".join(parts) + "."


def _trained_by(study: Study) -> str:
    """Name the commits and processors that trained the runs; "" if not recorded, or all are the record's own."""
    found, known = study.study.get("trained_by") or [], _mapping(study.study.get("provenance"))
    if {each["commit"] for each in found} <= {known.get("commit")}:
        return ""
    return join_words(
        f"commit {_value_text(each['commit'])[:12]}{' with uncommitted changes' if each['dirty'] else ''} on "
        f"{each['cpu'] or 'an unrecorded processor'} ({plural(each['runs'], 'run')})"
        for each in found
    )


def _trained_by_in_brief(study: Study) -> str:
    """Return `_trained_by` for a line: of several commits or processors their numbers."""
    text, found = _trained_by(study), study.study.get("trained_by") or []
    if len(found) < 2 or not text:
        return f"its runs by {text}" if text else ""
    commits, processors = ({each[key] for each in found} for key in ("commit", "cpu"))
    return f"its runs by {plural(len(commits), 'commit')} on {plural(len(processors), 'processor')} (“What was run”)"


def _value_text(value: Any) -> str:
    return "not recorded" if value is None or value == "" else str(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _hardware(value: Any) -> str:
    known = _mapping(value)
    memory = known.get("memory_gb")
    parts = [
        str(known["cpu"]) if known.get("cpu") else "",
        f"{known['cores']} cores" if known.get("cores") else "",
        f"{memory:.0f} GB memory" if isinstance(memory, int | float) else "",
        (str(known["gpu"]) if known["gpu"] else "no GPU") if "gpu" in known else "",
    ]
    return ", ".join(part for part in parts if part) or "not recorded"


SECTION = Section(body, applies=lambda study: True)


def _claim_tables(study: Study) -> list[Table]:
    return [table for table in (reference_table(study), judging.claims_table(study)) if table is not None]


def _sentences(study: Study) -> list[str]:
    """Return remarks, and the sentences on windows with their common ones; tables have the other claims."""
    claims = judging.judge(study)
    return [each.text for each in claims if not each.statement or (each.paper and each.test[:1] == ("own",))]


CLAIMED = "What is supported here"


def _claims_body(study: Study, drawn: Drawn) -> Pieces:
    return heading(CLAIMED) + shown(_claim_tables(study)) + box(_sentences(study))


def _claims_brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the tables, and what they do not say: which mechanisms learned too little or little."""
    return heading(CLAIMED) + shown(_claim_tables(study)) + box(judging.list_learning_remarks(study))


CLAIMS = Section(
    _claims_body,
    brief=_claims_brief,
    tables=make_printer(_claim_tables, lambda study: [" ".join(_sentences(study))]),
)


TROUBLES_SHOWN = 60
TROUBLED = "Runs that diverged, failed, or learned nothing"


def trouble_table(study: Study, left_out: Collection[str] = ()) -> Table | None:
    """Return every run not `stable`, or stable only by its guards, with its reason; None without any.

    Runs with a state in ``left_out`` have no row.
    """
    runs = study.runs[
        (study.runs["status"] != "stable") | study.runs["run_id"].isin(find_guarded(study.runs)["run_id"])
    ]
    ends = shown_states(runs)
    runs = runs.assign(shown=ends)
    runs = runs[~runs["shown"].isin(left_out)]
    runs = runs.assign(order=runs["series"].map(study.series.index)).sort_values(["order", "lr", "seed"], kind="stable")
    if runs.empty:
        return None
    rows = []
    for run in runs.head(TROUBLES_SHOWN).itertuples():
        why = ", ".join(filter(None, (_shorten(without_places(run.reason)), guards_did(run)))) or "--"
        steps = f"{run.num_steps:g}" if math.isfinite(run.num_steps) else "--"
        texts = (run.run_id, run.series, lr_text(run.lr), f"{run.seed:g}", run.shown, steps, why)
        rows.append(tuple(map(Cell, texts)))
    hidden = len(runs) - len(rows)
    more = f" {plural(hidden, 'further run')} not shown: results/runs.parquet has them." if hidden else ""
    counts = ends[ends.isin(left_out)].value_counts()
    counted = join_words(f"{number} {state}" for state, number in counts.items())
    more += f" Counted in the table of NLLs, not here: {counted}." if counted else ""
    caption = f"A divergence is a result; only “failed” is a crash.{guarded_note(study)}{more}"
    align = ("left", "left", "right", "right", "left", "right", "left")
    widths = ("auto",) * 6 + ("1fr",)
    title = f"Runs that did not end stable{'' if (runs['status'] != 'stable').all() else ' by themselves'}"
    header = ("run", "mechanism", "LR", "seed", "status", "steps", "reason")
    return Table(title, caption, header, tuple(rows), (), align, widths)


def _shorten(reason: str) -> str:
    """Return a reason with numbers of many digits as powers: "rose 1.7e7 nats" for 17305677.07."""
    return re.sub(r"\b\d{5,}\.\d+", lambda found: power(float(found[0])), reason)


def guards_did(run) -> str:
    """Describe the guards' actions in a run, e.g. 2 steps skipped, 1 restore; "" for none."""
    skipped, restores = (0 if math.isnan(number) else int(number) for number in (run.skipped_steps, run.restores))
    told = [f"{plural(skipped, 'step')} skipped"] if skipped else []
    return ", ".join([*told, *([plural(restores, "restore")] if restores else [])])


def cut_short(study: Study) -> str:
    """Return the number of finished runs with an incomplete log, as text; "" for none.

    Verdict and final NLL are stored apart from the log; values read from the missing steps are lost.
    """
    runs = study.runs[study.runs["status"].isin(ENDED)]
    last = runs["run_id"].map(study.curves.groupby("run_id")["step"].max()).fillna(0)
    short = runs.assign(last=last)[last < runs["num_steps"]]
    if short.empty:
        return ""
    first = short.iloc[0]
    return (
        f"The log (metrics.jsonl) of {plural(len(short), 'finished run')} ends early, that of {first['run_id']} at "
        f"step {first['last']:g} of {first['num_steps']:g}: verdicts and final NLL stand, curves and what is read off "
        "them end there."
    )


def troubles_body(study: Study, drawn: Drawn) -> Pieces:
    table, short = trouble_table(study), cut_short(study)
    head = heading(TROUBLED) + (paragraph(short) if short else ())
    return head + (paragraph("None: every run ended stable.") if table is None else shown([table]))


COUNTED = ("diverged", EXPLODED, LEARNED_NOTHING)  # the tables of NLLs count these runs, rate by rate


def _troubles_brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the runs that failed, spiked, are missing or were held up by guards; () without any.

    The first page and the table of NLLs count the others.
    """
    short, table = cut_short(study), trouble_table(study, COUNTED)
    return heading(TROUBLED) + (paragraph(short) if short else ()) + shown([table])


TROUBLES = Section(
    troubles_body,
    lambda study: True,
    brief=_troubles_brief,
    tables=make_printer(lambda study: [short] if (short := cut_short(study)) else []),
)


EXPLAINED = {
    OWN: "own window: its width in decades of learning rate",
    COMMON: "common window: the same, by the reference's limit",
    BEYOND: "NLL beyond: mean NLL over the rates above the reference's window, a diverged run counting as untrained",
    STABLE: "% stable: share of terminal steps below α_max at the highest common rates, run's own state",
    RATIO: "α_max / α: at each one's best rate",
    COST: "time of a step: over the reference's",
}


@once_per_study
def reference_table(study: Study) -> Table | None:
    """Return a row for each series: its differences from the reference, with interval and verdict; or None."""
    claims, plains = judge(study), references(study)
    found = against_reference(claims)
    names = list(dict.fromkeys(name for quantities in found.values() for name in quantities if name))
    bests = [name for name in names if name.startswith(BEST)]
    is_timed = any(quantities[COST].interval for quantities in found.values() if COST in quantities)
    costs = [COST] if is_timed else []  # the first page has the runs' own clocks
    columns = [name for name in (OWN, COMMON, *bests, BEYOND, STABLE, RATIO, *costs) if name in names]
    if not columns:
        return None
    rows = tuple(_row(series, plains[series], quantities, columns) for series, quantities in found.items())
    explained = "; ".join(text for name, text in EXPLAINED.items() if name in columns)
    explained = f": {explained}" if explained else ""
    caption = (
        f"Paired differences over seeds, mechanism less reference{explained}. Below: interval (95 % by Student's t, "
        "for two seeds their range), then the verdict on “better than the reference”: wider window, lower NLL, more "
        f"stable steps, larger α_max / α, less time. {correction_note(claims)}"
    )
    widths = ("1.1fr", *("1fr",) * len(columns))
    return Table("Each mechanism against the reference", caption, ("mechanism", *columns), rows, (), (), widths)


def _row(series: str, plain: str, quantities: dict[str, Claim], columns: list[str]) -> tuple[Cell, ...]:
    name = Cell(series, f"against {plain}")
    if "" in quantities:
        return (name, Cell(quantities[""].text.rpartition(": ")[2].rstrip(".")), *(Cell("--"),) * (len(columns) - 1))
    return (name, *(_cell(quantities.get(column)) for column in columns))


def _cell(claim: Claim | None) -> Cell:
    """Return the difference, the interval without unit, and the verdict."""
    if claim is None:
        return Cell("--")
    interval = claim.interval.removesuffix(f" {claim.difference.rpartition(' ')[2]}")
    below = "\n".join((interval, *filter(None, [claim.corrected]), short_verdict(claim)))
    return Cell(claim.difference or "--", below, claim.verdict in ("holds", "contradicted"))
