"""Hold what a study's tables, captions and board call things: the words of its objective and its data source, which a
sweep writes into ``study.json``. Nothing is imported here, so that what only reads files can read them, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Words:
    """The words of an objective; the defaults are a language model's.

    ``position``: what a model's position is called, and several of them; ``counted``: what a run's ``num_tokens``
      counts; ``example``: what a row of a batch is.
    ``nll``: what the validated loss is called, as an axis label; ``unit``: of that loss; ``generative_unit``: of what
      an oracle makes of samples; ``score``: the same as a caption says it, ``{draws}`` for how often each was measured;
      ``of_oracle``: the same of an ``{oracle}`` by name; ``of_sample``: the same beside a sample; ``is_text``: whether
      samples are text, which has bytes.
    ``parts``: what the parts of the loss are measured in, where it is a sum; ``scored_parts``: the same of an oracle.
    ``baseline``: what knows the targets' frequencies and nothing else; ``baseline_nll``: what it reaches;
      ``baseline_source``: whose frequencies these are.

    The rest differs by the settings, and a sweep adds it (`AbstractObjective.summary`, `AbstractDataSource.tokens_of`).
    ``summary``: the objective with the settings that a reader of a table must know; "": its name says it all.
    ``tokens``: what the data's tokens are, "" where that is not said; ``direction``: in which positions are read,
    "causal" or "bidirectional"; "": not known.
    """

    position: tuple[str, str] = ("token", "tokens")
    counted: str = "tokens"
    example: str = "sequence"
    nll: str = "validation NLL"
    unit: str = "nats per predicted token"
    generative_unit: str = "nats per token of the oracle"
    score: str = "Nats per token of the oracle, the first token of a sample given"
    of_oracle: str = "nats per token of {oracle}"
    of_sample: str = "nats per token of the oracle {oracle}"
    is_text: bool = True
    parts: str = "nats of each part"
    scored_parts: str = "Its NLL of the terminal checkpoints' samples: each part averaged over samples"
    baseline: str = "token frequencies"
    baseline_nll: str = "token-frequency NLL"
    baseline_source: str = "training tokens' frequencies"
    summary: str = field(default="", kw_only=True)
    tokens: str = field(default="", kw_only=True)
    direction: str = field(default="", kw_only=True)


def recorded(record: Mapping[str, Any], objectives: Collection[str]) -> Words:
    """Return the words that ``study.json`` holds. Those of a record from before there were any are today's of its
    objective (`of_older`). ``objectives``: names of those that the study's runs have."""
    found = record.get("words")
    if not isinstance(found, dict):
        return of_older(record, next(iter(objectives)) if len(set(objectives)) == 1 else "")
    known: dict[str, Any] = {each.name: found[each.name] for each in fields(Words) if each.name in found}
    return replace(
        Words(), **{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    )


# Of studies older than `words` in their record, which must be reported as they were: the objectives that there were at
# the time. None is ever added; a test holds these to what the objectives themselves say.
OLDER = {
    "ar": Words(direction="causal"),
    "mlm": Words(direction="bidirectional"),
    "score_entropy": Words(unit="upper bound, nats per token", direction="bidirectional"),
    "classify": Words(
        position=("patch", "patches"),
        counted="patches",
        example="image",
        nll="cross entropy",
        unit="cross entropy, nats per image",
        baseline="class frequencies",
        baseline_nll="class-frequency NLL",
        baseline_source="training images' class frequencies",
        direction="bidirectional",
    ),
    "multitrack": Words(
        position=("residue", "residues"),
        unit="nats per masked position, its parts added up",
        generative_unit="nats per residue by the oracle's masked NLL",
        score=(
            "Its masked NLL in nats per residue, a sample's tracks added up, each averaged over {draws} draws of masks"
        ),
        of_oracle="nats per residue by the masked NLL of {oracle}",
        is_text=False,
        parts=(
            "nats per masked residue (sequence) and per masked structure token (structure), each averaged within a "
            "protein, then over proteins"
        ),
        scored_parts=(
            "Its masked NLL of the terminal checkpoints' samples, by its own mask schedules and in the units of the "
            "validation NLL: each part averaged over drawn masks, then over samples"
        ),
        direction="bidirectional",
    ),
}
OLDER_TOKENS = {"dna": "nucleotides", "stdlib": "bytes"}  # of data sources without a tokenizer


def of_older(record: Mapping[str, Any], objective: str) -> Words:
    """Return the words of a record without any, from the settings in its spec where it has one; ``objective``: of all
    its runs, "" where these have several."""
    asked, data = (_part(record, name) for name in ("objective", "data"))
    kept = f", {data['keep']:,} kept" if data.get("keep") else ""
    tokens = f"{data.get('tokenizer') or OLDER_TOKENS.get(data.get('name', ''), '')}{kept}"
    return replace(OLDER.get(objective, Words()), summary=_older_summary(asked), tokens=tokens)


def _older_summary(asked: Mapping[str, Any]) -> str:
    if asked.get("name") == "score_entropy":
        return f"score_entropy, {asked['graph']} graph, {asked['noise']} noise"
    if asked.get("name") == "mlm":
        rate = f"fixed at {asked['fixed_rate']:g}" if asked["mask_rate"] == "fixed" else asked["mask_rate"]
        return f"mlm, mask rate {rate}{', corruption bert' if asked.get('corruption') == 'bert' else ''}"
    if asked.get("name") == "multitrack":
        given = f"given {', '.join(asked['contexts'])}" if asked["contexts"] else "nothing given"
        by = f" (tokenizer {asked['tokenizer']})" if asked.get("tokenizer") else ""
        return f"multitrack, {' and '.join(asked['sources'])}{by} masked, {given}"
    return ""


def _part(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    spec = record.get("spec")
    part = spec.get(key) if isinstance(spec, dict) else None
    return part if isinstance(part, dict) else {}
