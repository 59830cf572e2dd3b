"""Put studies in their places in a grid of model sizes and modalities, both read from the studies' own records: what
shares a place and a task (data, objective, number of steps) becomes one study, on which all that is known of one study
can be asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis.drawing.tables import source
from analysis.sections.ablation import tells_all
from analysis.study import naming, wording
from analysis.study.load import Column, Frame, Study

MODALITIES = ("text", "dna", "protein", "image")  # in the paper's order; others follow by name
SHOWN = {"dna": "DNA"}  # the rest are capitalised
SIZE = re.compile(r"(?:^|_)(\d+(?:\.\d+)?[kmg])$", re.IGNORECASE)

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, eq=False)
class Block:
    """One place of the grid. ``modality``: text, dna, protein, …; ``size``: as the paper writes it where the model's
    name holds one (54M of text_54m), else that name; ``study``: all runs there; ``names``: of the studies;
    ``is_shared``: studies of another task stand at the same size and modality."""

    modality: str
    size: str
    study: Study
    names: tuple[str, ...]
    is_shared: bool = False

    @property
    def label(self) -> str:
        """The place among others of its modality: its size, and its studies where that is not enough."""
        return f"{self.size} ({', '.join(self.names)})" if self.is_shared else self.size

    @property
    def title(self) -> str:
        return f"{modality_text(self.modality)} {self.label}"


def modality_text(modality: str) -> str:
    return SHOWN.get(modality, modality.capitalize())


def modality(study: Study) -> str:
    """Return what a study's data are, by the words that its record has for them: text, dna, protein or image; of data
    made up for a task their source's name."""
    words = wording.words(study)
    if words.tokens.startswith("nucleotides"):
        return "dna"
    kind = {"residue": "protein", "patch": "image"}.get(words.position[0])
    if kind or words.held_out == "text":
        return kind or "text"
    return " and ".join(sorted(set(study.runs["data"]) - {""})) or words.held_out


def size(model: str) -> str:
    """Return the size that a model's name ends in, "54M" of text_54m; else the name itself."""
    name = model.partition(" ")[0]
    found = SIZE.search(name)
    return found[1].upper() if found else name or "size not recorded"


def reason_to_leave_out(study: Study) -> str:
    """Say why a study has no place in tables of learning rates; "" where it has one."""
    if study.is_search:
        return "chose its runs' settings by itself"
    if study.is_in_multiples:
        return "counts learning rates in multiples of each optimizer's own"
    return "varies settings at a single learning rate" if tells_all(study) else ""


def blocks(studies: Iterable[Study]) -> list[Block]:
    """Return the grid's places that hold runs: modalities in the paper's order, sizes by their parameters."""
    places: dict[tuple[str, str], dict[str, list[Study]]] = {}
    for study in studies:
        if not reason_to_leave_out(study):
            for name, part in _by_size(study):
                places.setdefault((modality(study), name), {}).setdefault(_task(part), []).append(part)
    found = [
        Block(kind, name, merged(parts), tuple(dict.fromkeys(part.name for part in parts)), len(tasks) > 1)
        for (kind, name), tasks in places.items()
        for parts in tasks.values()
    ]
    return sorted(found, key=_rank)


def _task(study: Study) -> str:
    """Return what the runs of a study were trained to do, and for how long: only runs of one task are compared."""
    steps = sorted(set(study.runs["planned_steps"].dropna()))
    return f"{source(study)} {' '.join(f'{count:g}' for count in steps)}"


def _rank(block: Block) -> tuple[int, str, float, str]:
    known = block.study.runs["num_params"].dropna()
    place = MODALITIES.index(block.modality) if block.modality in MODALITIES else len(MODALITIES)
    found = SIZE.fullmatch(block.size)  # the paper's sizes by their name, which is not what they count
    count = float(found[1][:-1]) * UNITS[found[1][-1]] if found else float(known.median()) if len(known) else np.inf
    return place, block.modality, count, block.label


def _by_size(study: Study) -> Iterator[tuple[str, Study]]:
    """Yield a study's parts of one model size each, in which no series is named after the size any more."""
    sizes = study.runs["model"].map(size)
    for name in dict.fromkeys(sizes):
        if sizes.nunique() == 1:
            yield name, study
        else:
            runs = study.runs[sizes == name].reset_index(drop=True)
            yield name, replace(study, runs=naming.with_series(runs, study.study))


def merged(studies: Sequence[Study]) -> Study:
    """Return studies of one place as one. A run that several hold is counted once; a series that several have of their
    own, since they may differ in what no column says, carries its study's name."""
    if len(studies) == 1:
        return studies[0]
    runs = pd.concat([each.runs.assign(of=each.name) for each in studies], ignore_index=True)
    runs = runs.drop_duplicates("run_id").reset_index(drop=True)
    holders: Column = runs.groupby("series")["of"].transform("nunique")
    told = holders > 1
    runs["series"] = runs["series"].where(~told, runs["series"] + " (" + runs["of"] + ")")
    first, *others = studies
    tables = {name: _joined([getattr(each, name) for each in studies]) for name in ("curvature", "curves")}
    return replace(first, name=" and ".join(each.name for each in (first, *others)), runs=runs, **tables)


def _joined(frames: Sequence[Frame]) -> Frame:
    """Return tables one below the other, the rows of a run as the first of them that knows it has them."""
    known: set[str] = set()
    own = []
    for frame in frames:
        own.append(frame[~frame["run_id"].isin(known)])
        known |= set(frame["run_id"])
    filled = [frame for frame in own if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else frames[0]


def by_modality(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Group the places into columns of the grid."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.modality, []).append(block)
    return found


def all_runs(blocks: Sequence[Block]) -> Study:
    """Return every run of the grid in one study, for what all places share: the order and the looks of the series."""
    runs = pd.concat([block.study.runs for block in blocks], ignore_index=True)
    return replace(blocks[0].study, runs=runs)


def told_once(by_place: dict[str, str]) -> str:
    """Return what is said of places as one text where all say the same, else each after the places that say it."""
    texts = {text: [place for place, each in by_place.items() if each == text] for text in by_place.values() if text}
    if len(texts) == 1 and len(next(iter(texts.values()))) == len(by_place):
        return next(iter(texts))
    return " ".join(f"{', '.join(places)}: {text}" for text, places in texts.items())
