"""Word what the runs of a study have in common and no column says: objective, tokens, size, steps, from the spec that
its sweep left in `study.json`."""

from __future__ import annotations

import re
from typing import Any

from analysis.study.load import Study
from analysis.words import count_range, listed, plural

TOKENS = {"dna": "nucleotides", "stdlib": "bytes"}  # of the data sources that have no other
WORDS_OF_IMAGES = {
    "token frequencies": "class frequencies",
    "token-frequency NLL": "class-frequency NLL",
    "training tokens' frequencies": "training images' class frequencies",
    "tokens per run": "patches per run",
    "Tokens per second": "Patches per second",
    "nats per predicted token": "cross entropy, nats per image",
}
WORDS_OF_TOKENS = re.compile("|".join(WORDS_OF_IMAGES))


def objective(study: Study) -> str:
    """Name the objective and its settings, e.g. ``"score_entropy, absorbing graph, geometric noise"``; the names alone
    where the study keeps no spec."""
    known = _part(study, "objective")
    if known.get("name") == "score_entropy":
        return f"score_entropy, {known['graph']} graph, {known['noise']} noise"
    if known.get("name") == "mlm":
        rate = f"fixed at {known['fixed_rate']:g}" if known["mask_rate"] == "fixed" else known["mask_rate"]
        return f"mlm, mask rate {rate}{', corruption bert' if known.get('corruption') == 'bert' else ''}"
    if known.get("name") == "multitrack":
        given = f"given {', '.join(known['contexts'])}" if known["contexts"] else "nothing given"
        by = f" (tokenizer {known['tokenizer']})" if known.get("tokenizer") else ""
        return f"multitrack, {' and '.join(known['sources'])}{by} masked, {given}"
    return listed(sorted(set(study.runs["objective"]) - {""}))


def tokens(study: Study) -> str:
    """Name the tokenizer and its size, e.g. ``"gpt2, 4,096 kept"``; "" where the study does not say."""
    known = _part(study, "data")
    kept = f", {known['keep']:,} kept" if known.get("keep") else ""
    return f"{known.get('tokenizer') or TOKENS.get(known.get('name', ''), '')}{kept}"


def unit(study: Study) -> str:
    """Return the unit of the validation NLL: score entropy bounds the NLL of all tokens from above, a classifier's
    counts images, the others' the tokens that they predict."""
    if is_classification(study):
        return "cross entropy, nats per image"
    if set(study.runs["objective"]) == {"multitrack"}:
        return "nats per masked position, its parts added up"
    return (
        "upper bound, nats per token"
        if set(study.runs["objective"]) == {"score_entropy"}
        else "nats per predicted token"
    )


def generative_unit(study: Study) -> str:
    """Return the unit of the generative NLL: what an oracle gives its own tokens, or by its own masks the hidden
    residues of a protein."""
    return (
        "nats per residue by the oracle's masked NLL"
        if set(study.runs["objective"]) == {"multitrack"}
        else "nats per token of the oracle"
    )


def is_classification(study: Study) -> bool:
    """Return whether all runs tell the classes of images."""
    return set(study.runs["objective"]) == {"classify"}


def baseline(study: Study) -> str:
    """Return the label of what knows the frequencies of what is predicted and nothing else."""
    return "class frequencies" if is_classification(study) else "token frequencies"


def worded(study: Study, text: str) -> str:
    """Return a sentence about tokens as it reads for a study's runs: for images where they are those."""
    return WORDS_OF_TOKENS.sub(lambda found: WORDS_OF_IMAGES[found.group()], text) if is_classification(study) else text


def facts(study: Study) -> list[tuple[str, str]]:
    """Return the rows of "What was run"."""
    return [("Objective", objective(study) or "not recorded"), ("Model", _model(study)), ("Training", _training(study))]


def _model(study: Study) -> str:
    known, parameters = _part(study, "model"), f"{count_range(study.runs['num_params'])} parameters"
    if not known:
        return f"{listed(sorted(set(study.runs['model']) - {''})) or 'size not recorded'}; {parameters}"
    counts = [
        plural(known["layers"], "layer"),
        f"width {known['width']}",
        plural(known["heads"], "head"),
        f"{known['positions']} positions",
    ]
    return f"{known['name']}: {', '.join(counts)}; {parameters}"


def _training(study: Study) -> str:
    spec = _spec(study)
    if not {"steps", "batch"} <= spec.keys():
        return "not recorded"
    parts = f", {spec['microbatch']} at a time" if spec.get("microbatch") else ""
    return (
        f"{plural(spec['steps'], 'step')} of "
        f"{plural(spec['batch'], 'image' if is_classification(study) else 'sequence')}{parts}"
    )


def _spec(study: Study) -> dict[str, Any]:
    spec = study.study.get("spec")
    return spec if isinstance(spec, dict) else {}


def _part(study: Study, key: str) -> dict[str, Any]:
    part = _spec(study).get(key)
    return part if isinstance(part, dict) else {}
