"""Say what a reader of an α_max table must know of how it was measured: the protocol in one line, and the methods that
were used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from analysis.study.load import Column, Frame, Study
from analysis.words import listed, plural


def sentence(protocol: Mapping[str, Any], gradients: Mapping[str, str] | None = None) -> str:
    """Return the protocol in one line, from the fields of `stability.config.curvature.CurvatureSpec`; a null batch or
    clipping norm reads as the run's own. ``dropout``, where it is among them, is the share that the run drops in
    training.

    ``gradients``: whose slope entered α_max, by optimizer state, where rows say so; else what the protocol asks for in
    each of its states.
    """
    decay = "included" if protocol["weight_decay"] else "left out"
    clip = f"{protocol['clip_norm']:g}" if protocol["clip_norm"] else "the run's own"
    batch = f"{protocol['batch']} sequences" if protocol["batch"] else "the run's own batch"
    parts = f", {protocol['microbatch']} at a time" if protocol["microbatch"] else ""
    counted = [f"{protocol[key]} {nouns[protocol[key] != 1]}" for key, nouns in NOUNS.items()]
    if gradients is None:
        gradients = {state: gradient_of(protocol, state) for state in protocol["state"]}
    dropout = protocol.get("dropout")
    dropped = f"; u by gradients with dropout {dropout:g}, the loss along it without" if dropout else ""
    slope = _slope(gradients)
    return (
        f"{', '.join(counted)} of {batch}{parts}; {slope}; weight decay {decay} in u{dropped}; clipping norm {clip}; "
        f"method {protocol['method']}{'; in the precision of the run' if protocol.get('precision') == 'run' else ''}"
    )


def gradient_of(protocol: Mapping[str, Any], state: str) -> str:
    """Say whose slope a protocol asks for in an optimizer state, as
    `stability.config.curvature.CurvatureSpec.gradient_of` has it."""
    gradient = str(protocol["gradient"])
    return gradient if gradient != "auto" else "clipped" if state == "paper" else "true"


def _slope(gradients: Mapping[str, str]) -> str:
    """Name the slope, e.g. ``"slope of the clipped gradient"``; where states differ, of which gradient in which."""
    if len(set(gradients.values())) == 1:
        return f"slope of the {next(iter(gradients.values()))} gradient"
    return f"slope of the {listed(f'{gradient} gradient in state “{state}”' for state, gradient in gradients.items())}"


# the method of a recorded step without an α_max: it is neither stable nor unstable, and no share counts it
NOT_DEFINED = "not defined"
NOUNS = {
    "warmup_batches": ("warm-up batch", "warm-up batches"),
    "warmup_steps": ("warm-up step", "warm-up steps"),
    "recorded_steps": ("recorded step", "recorded steps"),
}
WHOLE = {*NOUNS, "batch", "method"}  # that every record of a protocol has
# Fields younger than some files, and what was done before there were these.
BEFORE = {"microbatch": None, "gradient": "true", "weight_decay": True, "clip_norm": None}


def stated_in(study: Study, rows: Frame, state: str) -> str:
    """Return the protocol as `stated` does; where a table of an optimizer state has no row, the one by which the state
    was measured elsewhere in the study, or was to be."""
    if len(rows):
        return stated(rows)
    others = study.curvature.loc[study.curvature["state"] == state, "protocol"]
    asked = asked_protocol(study)
    whole = [BEFORE | asked] if asked.keys() >= WHOLE else []
    known = [BEFORE | json.loads(text) for text in sorted(set(others) - {""})] or whole
    lines = [sentence(protocol, {state: gradient_of(protocol, state)}) for protocol in known]
    return f"Protocol: {' / '.join(dict.fromkeys(lines)) or 'not recorded'}. No step was recorded."


def stated(rows: Frame) -> str:
    """Return the protocol of recorded steps (each of them, with its runs, where they differ) and the methods that they
    came to, with counts."""
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
    """Return by optimizer state, sorted from paper on, whose slope the rows hold: by their own column, else by their
    protocol; several as "true or clipped"."""
    found: dict[str, set[str]] = {}
    for state, own, protocol in set(zip(rows["state"], rows["gradient"], rows["protocol"], strict=True)):
        told = own or (gradient_of(BEFORE | json.loads(protocol), state) if protocol else "")
        found.setdefault(state, set()).update({told} - {""})
    ordered = ((state, sorted(found[state], reverse=True)) for state in sorted(found, reverse=True))
    return {state: " or ".join(names) for state, names in ordered if names}


def is_literal(rows: Frame) -> bool:
    """Return whether the rows of state "paper" were measured as 5.2.1 says, word for word but for the batch's size:
    gradient clipped to 1 in everything, decay in u, 5 batches of warm-up, 5 steps, 25 recorded. False without such
    rows."""
    paper = rows[rows["state"] == "paper"]
    if paper.empty or gradients(paper) != {"paper": "clipped"} or (paper["protocol"] == "").any():
        return False
    return all(LITERAL.items() <= (BEFORE | json.loads(text)).items() for text in set(paper["protocol"]))


LITERAL = {"warmup_batches": 5, "warmup_steps": 5, "recorded_steps": 25, "weight_decay": True, "clip_norm": 1.0}


def states_explained(rows: Frame) -> str:
    """Say what the optimizer states of a study's recorded steps are, and whether "paper" is the paper's protocol to the
    letter."""
    slopes, literal = gradients(rows), is_literal(rows)
    follows = "follows the paper's protocol to the letter" if literal else "starts from the paper's warm-up"
    own = f", here with the slope of the {slopes.get('paper')} gradient, in the protocol that the tables state"
    own = "" if literal or "paper" not in slopes else own
    return (
        f"State “checkpoint” starts from the run's own optimizer state, state “paper” {follows}{own}: averages over "
        "the warm-up batches, already unbiased, are bias-corrected once more (after five batches m is divided by "
        "0.47, v by 0.006), which shortens the step direction and lengthens α_max accordingly; read “paper” against "
        "the paper's tables, “checkpoint” for what the training met."
    )


def asked_protocol(study: Study) -> dict[str, Any]:
    """Return the protocol by which the sweep itself was to measure α_max, the runs' own batch and clipping norm in
    place of nulls; {} where it was not to."""
    spec = study.spec
    protocol: dict[str, Any] = (spec.get("curvature") or {}) if spec.get("hessian") else {}
    return protocol | {
        key: spec[key] for key in ("batch", "clip_norm") if protocol and protocol.get(key) is None and key in spec
    }


def base_rates(study: Study) -> str:
    """Say in a sentence, with a space before it, that LR and α_max are base rates where roles of parameters train at
    multiples of them; "" where all train at one rate."""
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
    return f" LR and α_max are the base rate: of the parameters' roles {listed(whose)}."


# The project's optimizers that keep Adam's averages, for which state "paper" is defined: known here for runs that left
# no file to say it. A test holds it to them.
ADAMS = ("adamw",)


def lacks_state(study: Study, state: str) -> Column:
    """Return which runs' optimizer does not define an optimizer state, a row of ``study.runs`` each: what an optimizer
    is decides, not what became of a run. Where no run's file tells, state "paper" is one that Adam alone has."""
    told = study.runs["undefined_states"].map(lambda names: state in names.split())
    lacking = set(study.runs.loc[told, "optimizer"])
    if state == "paper":
        measured = study.curvature.loc[study.curvature["state"] == state, "run_id"]
        having = study.runs.loc[study.runs["run_id"].isin(measured), "optimizer"]
        lacking |= {*study.runs["optimizer"]} - {*ADAMS, *having}
    return study.runs["optimizer"].isin(lacking)


def undefined_states(study: Study) -> str:
    """Return the optimizer states that were asked for and that some runs' optimizer does not define, in a sentence
    each; "" where there is none."""
    told = {state for names in study.runs["undefined_states"] for state in names.split()}
    asked = {*told, *study.curvature["state"], *asked_protocol(study).get("state", ())}
    why = (
        "its warm-up sets the averages m and v of Adam; these runs can be measured from their own optimizer state only"
    )
    sentences = []
    for state in sorted(asked):
        optimizers = study.runs.loc[lacks_state(study, state), "optimizer"].tolist()
        if not optimizers:
            continue
        whose = listed(f"{name} ({plural(optimizers.count(name), 'run')})" for name in sorted(set(optimizers)))
        sentences.append(f"State “{state}” is not defined for {whose}{f': {why}' if state == 'paper' else ''}.")
    return " ".join(sentences)


def methods(rows: Frame) -> str:
    """Return the methods used, with counts of steps."""
    return listed(
        f"{method or 'not recorded'} ({plural(count, 'step')})"
        for method, count in rows["method"].value_counts().items()
    )
