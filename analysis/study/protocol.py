"""Describe how α_max was measured: the protocol in one line, the methods used, and unusual optimizers.

Those are optimizers whose step is not rate times direction, or whose state is frozen while measuring. The recorded
steps' protocols identify them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.study.load import Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import join_words, plural
from stability.runs.schema import own_settings


def sentence(protocol: Mapping[str, Any], gradients: Mapping[str, str] | None = None) -> str:
    """Return the protocol in one line.

    Args:
        protocol: fields as in `stability.config.curvature.CurvatureSpec`. A null batch or clipping norm means the run's
            own; ∞ means no clipping. ``dropout``, if present, is the run's share in training.
        gradients: slope in α_max by optimizer state, if recorded; by default as requested in the protocol.
    """
    decay = "included" if protocol["weight_decay"] else "left out"
    clip = f"clipping norm {protocol['clip_norm']:g}" if protocol["clip_norm"] else "clipping norm the run's own"
    clip = "no clipping" if protocol["clip_norm"] == math.inf else clip
    batch = f"{protocol['batch']} sequences" if protocol["batch"] else "the run's own batch"
    parts = f", {protocol['microbatch']} at a time" if protocol["microbatch"] else ""
    counted = [f"{protocol[key]} {nouns[protocol[key] != 1]}" for key, nouns in NOUNS.items()]
    if gradients is None:
        gradients = {state: gradient_of(protocol, state) for state in protocol["state"]}
    dropout = protocol.get("dropout")
    dropped = f"; u by gradients with dropout {dropout:g}, the loss along it without" if dropout else ""
    slope = _slope(gradients)
    return (
        f"{', '.join(counted)} of {batch}{parts}; {slope}; weight decay {decay} in u{dropped}; {clip}; "
        f"method {protocol['method']}{'; in the precision of the run' if protocol.get('precision') == 'run' else ''}"
    )


def state_text(state: str) -> str:
    """Name an optimizer state, as ``curvature.state`` calls it, in words."""
    return {"checkpoint": "run's own state", "paper": "paper's warm-up state"}.get(state, f"state {state}")


def gradient_of(protocol: Mapping[str, Any], state: str) -> str:
    """Return the gradient requested for an optimizer state.

    As in `stability.config.curvature.CurvatureSpec.gradient_of`.
    """
    gradient = str(protocol["gradient"])
    return gradient if gradient != "auto" else "clipped" if state == "paper" else "true"


def _slope(gradients: Mapping[str, str]) -> str:
    """Name the slope, e.g. ``"slope of the clipped gradient"``; by state if they differ."""
    if len(set(gradients.values())) == 1:
        return f"slope of the {next(iter(gradients.values()))} gradient"
    named = join_words(f"{gradient} gradient in the {state_text(state)}" for state, gradient in gradients.items())
    return f"slope of the {named}"


# method of a recorded step without α_max: neither stable nor unstable, and excluded from shares
NOT_DEFINED = "not defined"
NOUNS = {
    "warmup_batches": ("warm-up batch", "warm-up batches"),
    "warmup_steps": ("warm-up step", "warm-up steps"),
    "recorded_steps": ("recorded step", "recorded steps"),
}
WHOLE = {*NOUNS, "batch", "method"}  # fields in every recorded protocol
# Newer fields, with the values older files imply.
BEFORE = {"microbatch": None, "gradient": "true", "weight_decay": True, "clip_norm": None}


def describe_protocol_in(study: Study, rows: Frame, state: str) -> str:
    """Return the protocol as `stated`; without rows, the one measured elsewhere or planned.

    Args:
        study: supplies the other measurements.
        rows: recorded steps in a table.
        state: optimizer state.
    """
    if len(rows):
        return describe_protocol(rows)
    others = study.curvature.loc[study.curvature["state"] == state, "protocol"]
    asked = requested_protocol(study)
    whole = [BEFORE | asked] if asked.keys() >= WHOLE else []
    known = [BEFORE | json.loads(text) for text in sorted(set(others) - {""})] or whole
    lines = [sentence(protocol, {state: gradient_of(protocol, state)}) for protocol in known]
    return f"Protocol: {' / '.join(dict.fromkeys(lines)) or 'not recorded'}. No step was recorded."


def describe_protocol(rows: Frame) -> str:
    """Return the steps' protocol and methods with counts; several protocols with their numbers of runs."""
    counts: dict[str, int] = {}
    for text, group in rows.groupby("protocol"):
        if text:
            line = sentence(BEFORE | json.loads(text), gradients(group))
            counts[line] = counts.get(line, 0) + group["run_id"].nunique()
    missing = int(rows.loc[rows["protocol"] == "", "run_id"].nunique())
    lines = [
        line if len(counts) == 1 and not missing else f"{line} ({plural(runs, 'run')})" for line, runs in counts.items()
    ]
    lines += [f"not recorded ({plural(missing, 'run')})"] if missing and counts else ["not recorded"] if missing else []
    return f"Protocol: {' / '.join(lines)}. Methods: {methods(rows)}."


def gradients(rows: Frame) -> dict[str, str]:
    """Return the slope's gradient by optimizer state, from paper on; several as "true or clipped".

    Taken from the rows' own column, else from their protocol.
    """
    found: dict[str, set[str]] = {}
    for state, own, protocol in set(zip(rows["state"], rows["gradient"], rows["protocol"], strict=True)):
        told = own or (gradient_of(BEFORE | json.loads(protocol), state) if protocol else "")
        found.setdefault(state, set()).update({told} - {""})
    ordered = ((state, sorted(found[state], reverse=True)) for state in sorted(found, reverse=True))
    return {state: " or ".join(names) for state, names in ordered if names}


def is_literal(rows: Frame) -> bool:
    """Return whether the rows in state "paper" follow section 5.2.1 literally.

    The batch size may differ. Literally: gradient clipped to 1 throughout, decay in u, 5 warm-up batches, 5 steps, 25
    recorded. False without such rows.
    """
    paper = rows[rows["state"] == "paper"]
    if paper.empty or gradients(paper) != {"paper": "clipped"} or (paper["protocol"] == "").any():
        return False
    return all(LITERAL.items() <= (BEFORE | json.loads(text)).items() for text in set(paper["protocol"]))


LITERAL = {"warmup_batches": 5, "warmup_steps": 5, "recorded_steps": 25, "weight_decay": True, "clip_norm": 1.0}


def states_explained(rows: Frame) -> str:
    """Describe the optimizer states in a study, and whether "paper" follows the paper literally."""
    slopes, literal = gradients(rows), is_literal(rows)
    follows = "follows the paper's protocol to the letter" if literal else "starts from the paper's warm-up"
    own = f", here with the slope of the {slopes.get('paper')} gradient, in the protocol that the tables state"
    own = "" if literal or "paper" not in slopes else own
    return (
        f"Run's own state: the optimizer's as in training. Paper's warm-up state: it {follows}{own}; averages over "
        "the warm-up batches, already unbiased, are bias-corrected once more (after five batches m is divided by "
        "0.47, v by 0.006), which shortens the step direction and lengthens α_max accordingly; compare it with "
        "the paper's tables, and the run's own state with the training."
    )


def requested_protocol(study: Study) -> dict[str, Any]:
    """Return the sweep's own α_max protocol; {} without one.

    The runs' batch and clipping norm replace nulls.
    """
    spec = study.spec
    protocol: dict[str, Any] = (spec.get("curvature") or {}) if spec.get("hessian") else {}
    return protocol | own_settings(protocol, spec) if protocol else {}


def base_rates(study: Study) -> str:
    """Return a sentence if parameter roles train at multiples of the base rate, else "".

    The sentence has a leading space.
    """
    spec = study.spec
    optimizers = [each for each in spec.get("optimizer") or [] if isinstance(each, dict)]
    scales: dict[str, list[float]] = {}
    for optimizer in optimizers:
        for role, settings in (optimizer.get("groups") or {}).items():
            scales.setdefault(role, []).append(settings.get("lr_scale", 1.0))
    for ablation in spec.get("ablate") or []:
        kind, _, setting = str(ablation["setting"]).partition(".")
        if kind == "groups" and setting.endswith(".lr_scale"):
            scales.setdefault(setting.removesuffix(".lr_scale"), []).extend(ablation["values"])
    told = {role: sorted(set(each)) for role, each in scales.items() if set(each) != {1.0}}
    if not told:
        return ""
    whose = (f"{role} at {' or '.join(f'{scale:g}' for scale in each)} times it" for role, each in told.items())
    return f" LR and α_max are the base rate: of the parameters' roles {join_words(whose)}."


# Optimizers with Adam's averages, so with a defined state "paper": a fallback for runs without a record.
# A test compares this list with the optimizers.
ADAMS = ("adamw",)


def lacks_state(study: Study, state: str) -> Column:
    """Return for each row in ``study.runs`` whether its optimizer lacks an optimizer state.

    The optimizer decides, not the run's outcome. Without a record or a measurement, state "paper" needs Adam.
    """
    told = study.runs["undefined_states"].map(lambda names: state in names.split())
    lacking = set(study.runs.loc[told, "optimizer"])
    if state == "paper":
        measured = study.curvature.loc[study.curvature["state"] == state, "run_id"]
        having = study.runs.loc[study.runs["run_id"].isin(measured), "optimizer"]
        lacking |= {*study.runs["optimizer"]} - {*ADAMS, *having}
    return study.runs["optimizer"].isin(lacking)


def explain_undefined_states(study: Study) -> str:
    """Return a sentence for each requested state undefined for some optimizer; "" if none."""
    told = {state for names in study.runs["undefined_states"] for state in names.split()}
    asked = {*told, *study.curvature["state"], *requested_protocol(study).get("state", ())}
    why = (
        "its warm-up sets the averages m and v of Adam; these runs can be measured from their own optimizer state only"
    )
    sentences = []
    for state in sorted(asked):
        optimizers = study.runs.loc[lacks_state(study, state), "optimizer"].tolist()
        if not optimizers:
            continue
        whose = join_words(f"{name} ({plural(optimizers.count(name), 'run')})" for name in sorted(set(optimizers)))
        sentences.append(f"The {state_text(state)} is not defined for {whose}{f': {why}' if state == 'paper' else ''}.")
    return " ".join(sentences)


def methods(rows: Frame) -> str:
    """Return the methods used, with their numbers of steps."""
    return join_words(
        f"{method or 'not recorded'} ({plural(count, 'step')})"
        for method, count in rows["method"].value_counts().items()
    )


MOST_IN_A_CAPTION = 2
OPTIMIZER = "optimizer"  # protocol key: unusual flags of `stability.optimizers.AbstractOptimizer`


def step_terms(study: Study) -> str:
    """Return a sentence for each optimizer with an unusual α_max, or "".

    Each has a leading space.
    """
    return "".join(f" {sentence}" for sentence in explain(_protocols(study)))


def terms_in_brief(study: Study) -> str:
    """Return these sentences for a caption if short, else a reference to the report's section."""
    if not refers_to_section(study):
        return step_terms(study)
    return f" What α_max means of {join_words(sorted(_terms(_protocols(study))))}: see the section on α_max."


def refers_to_section(study: Study) -> bool:
    """Return whether captions leave these sentences to the section on α_max, since they are too many."""
    known = _terms(_protocols(study))
    return sum(len(_sentences(name, terms)) for name, terms in known.items()) > MOST_IN_A_CAPTION


@once_per_study
def _protocols(study: Study) -> frozenset[str]:
    return frozenset(study.curvature["protocol"])


def explain(protocols: Iterable[str]) -> list[str]:
    """Return these sentences from recorded protocols, sorted by optimizer."""
    found = _terms(protocols)
    return [sentence for name in sorted(found) for sentence in _sentences(name, found[name])]


def _terms(protocols: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    known = (json.loads(text).get(OPTIMIZER, {}) for text in set(protocols) if text)
    return {terms["name"]: terms for terms in known if terms}


def _sentences(name: str, terms: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each flag that changes an optimizer's α_max."""
    found = []
    if terms.get("is_multiplier"):
        found.append(
            f"The LR of {name} multiplies a rate that it finds by itself, and so does its α_max; α_max over the LR is "
            "a multiplier of the step that was taken."
        )
    elif not terms.get("linear_in_lr", True):
        found.append(
            f"The step of {name} is not proportional to its LR: its α_max holds at the run's own LR only, where α_max "
            "over the LR is a multiplier of the step that was taken."
        )
    if terms.get("frozen"):
        found.append(f"α_max of {name} holds {terms['frozen']} where the checkpoint has it.")
    if terms.get("first_step_zero"):
        found.append(f"The first step of {name} only sets up its state: no α_max there is its own.")
    return found
