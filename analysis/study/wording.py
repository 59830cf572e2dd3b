"""Describe the common properties of a study's runs: objective, tokens, size and steps.

The terms and the spec come from `study.json`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from analysis.study import multiples
from analysis.study.load import Frame, Study
from analysis.study.naming import BLIND
from analysis.words import count_range, join_words, lr_text, plural, value_text
from stability.runs.older import words_of_record
from stability.runs.words import Words


def words(study: Study) -> Words:
    """Return the terms of the study's objective."""
    return words_of_record(study.study)


def nats(study: Study) -> str:
    """Return the unit of the loss as the end of a label: " (nats)"; "" for a loss that is no NLL."""
    return " (nats)" if words(study).in_nats else ""


def objective(study: Study) -> str:
    """Name the objective, e.g. ``"score_entropy, absorbing graph, geometric noise"``.

    The name alone if the record has no summary.
    """
    return words(study).summary or join_words(sorted(set(study.runs["objective"]) - {""}))


def data(study: Study) -> str:
    """Name the data and its tokens, without counts and without files left out of their folder; "" if not recorded."""
    description = str(study.study.get("provenance", {}).get("data_description") or "")
    origin = re.sub(r" \(left out: .*?\):", ":", re.sub(r"; left out: .*?\):", "):", description)).partition(":")[0]
    return "; ".join(filter(None, (origin, words(study).tokens)))


def facts(study: Study) -> list[tuple[str, str]]:
    """Return the rows under "What was run"."""
    rows = [("Objective", objective(study)), ("Model", model(study)), ("Training", training(study))]
    rows += [("Mechanisms", text)] if (text := mechanisms(study)) else []
    start = [("Initialisation", weights(study))] if weights(study) else []
    own = [("Reference rates", reference_rates(study))] if reference_rates(study) else []
    return [(name, said or "not recorded") for name, said in rows] + own + start


def mechanisms(study: Study) -> str:
    """Name each mechanism's non-default settings (``"sc: rank=8"``), formula readings and order-blindness.

    "" if there are none.
    """
    bases = study.runs[study.runs["variant"] == ""]
    rows = sorted({tuple(map(str, row)) for row in bases[["mechanism", "settings", "reading"]].itertuples(index=False)})
    parts = [f"{mechanism}: {'; '.join(filter(None, said))}" for mechanism, *said in rows if any(said)]
    is_any_blind = bool((study.runs["blind_to_order"] == 1).any())
    blind = [f"{BLIND}: hardly or never distinguishes a text from its mirror image"] if is_any_blind else []
    text = "; ".join([*parts, *blind])
    for explained in {f", {reading.partition(', ')[2]}" for *_, reading in rows if reading.partition("=")[0] == "rope"}:
        first, *others = text.split(explained)  # mix has the readings of its sc, too
        text = first + explained + "".join(others)
    return text


def reference_rates(study: Study) -> str:
    """Name each optimizer's reference rate, or "" if not recorded.

    E.g. ``"adamw 1e-3, sgd 1e-1; LR and α_max are multiples of them"``.
    """
    known = multiples.references(study.study)
    text = ", ".join(f"{name} {lr_text(lr)}" for name, lr in known.items())
    return f"{text}; LR and α_max are multiples of them" if study.is_in_multiples else text


def rate_axis(study: Study) -> str:
    """Return the label of an axis of learning rates."""
    return "times each optimizer's own rate" if study.is_in_multiples else "learning rate"


def weights(study: Study) -> str:
    """Name the runs' initial weights; "" if each run draws its own from its seed."""
    asked = _part(study, "init")
    if not asked:
        return ""
    how = ", as far as name and shape of a tensor match" if asked["partial"] else ""
    return f"starts from the weights of {asked['label']} (sha256 {asked['sha256'][:12]}){how}"


def model(study: Study) -> str:
    """Return the model's name with unusual backbone parts, its size and parameters.

    E.g. ``"nano ffn=glu: 2 layers, …"``.
    """
    known, parameters = _part(study, "model"), count_parameters(study.runs)
    sizes, labels = varied_sizes(study), set(study.runs["model"])
    # what differs between the runs is in their series' names
    differing = {*sizes, *(["parametrization"] if len({"parametrization=" in label for label in labels}) > 1 else [])}
    names = join_words(sorted({_without(label, differing) for label in labels} - {""}))
    if not known:
        return f"{names or 'size not recorded'}; {parameters}"
    layers = f"{sizes['layers']} layers" if "layers" in sizes else plural(known["layers"], "layer")
    heads = f"heads {known['head_width']} wide" if known.get("head_width") else plural(known["heads"], "head")
    counts = f"{layers}, width {sizes.get('width', known['width'])}, {heads}"
    return f"{names or known['name']}: {counts}, {known['positions']} positions; {parameters}"


def count_parameters(runs: Frame) -> str:
    """Return the parameters of runs; with experts that a router leaves out also the active ones, as text."""
    whole, idle = runs["num_params"], runs.get("idle_params")
    active = "" if idle is None or not idle.any() else f", {count_range(whole - idle.fillna(0))} of them active"
    return f"{count_range(whole)} parameters{active}"


def varied_sizes(study: Study) -> dict[str, str]:
    """Return the values of each field that the sweep varies as a size, by its short name: ``"64, 128 and 256"``."""
    axes = [axis for axis in study.spec.get("vary") or () if len(axis["values"]) > 1]
    return {axis["field"].rpartition(".")[2]: join_words(map(value_text, axis["values"])) for axis in axes}


def _without(label: str, keys: Collection[str]) -> str:
    """Return a run's model label without its words of some keys."""
    return " ".join(word for word in label.split(" ") if word.partition("=")[0] not in keys)


def training(study: Study) -> str:
    """Return steps and batch size of a run."""
    spec = study.spec
    if not {"steps", "batch"} <= spec.keys():
        return "not recorded"
    parts = f", {spec['microbatch']} at a time" if spec.get("microbatch") else ""
    sizes = varied_sizes(study)
    steps = f"{sizes['steps']} steps" if "steps" in sizes else plural(spec["steps"], "step")
    batch = (
        f"{sizes['batch']} {words(study).example}s" if "batch" in sizes else plural(spec["batch"], words(study).example)
    )
    return f"{steps} of {batch}{parts}"


def recipe(study: Study) -> str:
    """Name optimizer, schedule and clipping in one phrase; "" if not recorded."""
    spec, schedule = study.spec, _part(study, "schedule")
    if not schedule or "clip_norm" not in spec:
        return ""
    warmup = f" after {plural(schedule['warmup_steps'], 'warm-up step')}" if schedule.get("warmup_steps") else ""
    if share := schedule.get("warmup_share"):
        warmup = f" after a warm-up over {100 * share:g} % of the steps"
    clip = f"gradient norm clipped at {spec['clip_norm']:g}" if spec["clip_norm"] else "no gradient clipping"
    return f"{join_words(sorted(set(study.runs['optimizer'])))}, {schedule['name']} learning rate{warmup}, {clip}"


def _part(study: Study, key: str) -> dict[str, Any]:
    part = study.spec.get(key)
    return part if isinstance(part, dict) else {}


MASK = "mask_diagonal"


def sees_itself(study: Study, series: str) -> bool | None:
    """Return whether `sa` or `attentionx` sees its diagonal; None if unknown.

    Unknown: the record lacks the spec or the objective's direction, or the mechanism is another. An ablation's variant
    (``mask_diagonal=true``) overrides the study's spec. Defaults: `sa` sees the diagonal; so do specs older than its
    setting. `attentionx` sees it if causal, not if bidirectional.
    """
    row = study.of(series).iloc[0]
    parts = {part.get("name"): part for part in study.spec.get("mechanism", [])}
    if row["mechanism"] not in parts or row["mechanism"] not in ("sa", "attentionx"):
        return None
    masked = {"true": True, "false": False, "null": None}.get(
        row["variant"].removeprefix(f"{MASK}="), parts[row["mechanism"]].get(MASK)
    )
    if masked is not None:
        return not masked
    if row["mechanism"] == "sa":
        return True
    return {"causal": True, "bidirectional": False}.get(words(study).direction)
