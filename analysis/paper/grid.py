"""Place studies in a grid of model sizes and modalities, read from their records.

Studies with the same place and task (data, objective, number of steps) become one study.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis.drawing.tables import source
from analysis.numbers.ablations import tells_all
from analysis.study import naming, wording
from analysis.study.load import Column, Frame, Study

MODALITIES = ("text", "dna", "protein", "image")  # in the paper's order; others follow by name
SHOWN = {"dna": "DNA"}  # the rest are capitalised
SIZES = ("width", "layers")
SIZE = re.compile(r"(?:^|_)(\d+(?:\.\d+)?[kmg])$", re.IGNORECASE)

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, eq=False)
class Block:
    """One place of the grid.

    Attributes:
        modality: text, dna, protein, …
        size: in the paper's form if the model's name ends in it (54M for text_54m), else that name.
        study: all runs there.
        names: names of the merged studies.
        is_shared: whether another task has the same size and modality.
    """

    modality: str
    size: str
    study: Study
    names: tuple[str, ...]
    is_shared: bool = False

    @property
    def label(self) -> str:
        """The place within its modality: its size, and its studies if the size is shared."""
        return f"{self.size} ({', '.join(self.names)})" if self.is_shared else self.size

    @property
    def title(self) -> str:
        return f"{modality_text(self.modality)} {self.label}"


def modality_text(modality: str) -> str:
    return SHOWN.get(modality, modality.capitalize())


def modality(study: Study) -> str:
    """Return the data's kind: text, dna, protein or image, else the source's name for synthetic data."""
    words = wording.words(study)
    if words.tokens.startswith("nucleotides"):
        return "dna"
    kind = {"residue": "protein", "patch": "image"}.get(words.position[0])
    if kind or words.held_out == "text":
        return kind or "text"
    return " and ".join(sorted(set(study.runs["data"]) - {""})) or words.held_out


def size(model: str) -> str:
    """Return the size at the end of a model's name, "54M" of text_54m, else the name; then a swept width and depth."""
    name, *settings = model.split() or ("size not recorded",)
    found = SIZE.search(name)
    swept = [setting for setting in settings if setting.partition("=")[0] in SIZES]
    return " ".join([found[1].upper() if found else name, *swept])


def reason_to_leave_out(study: Study) -> str:
    """Return the reason for leaving a study out of tables of learning rates; "" if it has a place."""
    if study.is_search:
        return "chose its runs' settings by itself"
    if study.is_in_multiples:
        return "counts learning rates in multiples of each optimizer's own"
    return "varies settings at a single learning rate" if tells_all(study) else ""


def blocks(studies: Iterable[Study]) -> list[Block]:
    """Return the grid's places with runs: modalities in the paper's order, sizes by their parameters."""
    places: dict[tuple[str, str], dict[str, list[Study]]] = {}
    for study in studies:
        if not reason_to_leave_out(study):
            for name, part in _split_by_size(study):
                places.setdefault((modality(study), name), {}).setdefault(_task(part), []).append(part)
    found = [
        Block(kind, name, merge(parts), tuple(dict.fromkeys(part.name for part in parts)), len(tasks) > 1)
        for (kind, name), tasks in places.items()
        for parts in tasks.values()
    ]
    return sorted(found, key=_rank)


def _task(study: Study) -> str:
    """Return a study's task and number of steps: only runs of one task are compared."""
    steps = sorted(set(study.runs["planned_steps"].dropna()))
    return f"{source(study)} {' '.join(f'{count:g}' for count in steps)}"


def _rank(block: Block) -> tuple[int, str, float, str]:
    known = block.study.runs["num_params"].dropna()
    place = MODALITIES.index(block.modality) if block.modality in MODALITIES else len(MODALITIES)
    found = SIZE.fullmatch(block.size)  # by the paper's name, which differs from the counted parameters
    count = float(found[1][:-1]) * UNITS[found[1][-1]] if found else float(known.median()) if len(known) else np.inf
    return place, block.modality, count, block.label


def _split_by_size(study: Study) -> Iterator[tuple[str, Study]]:
    """Yield a study's parts by model size, without the size in series' names."""
    sizes = study.runs["model"].map(size)
    for name in dict.fromkeys(sizes):
        if sizes.nunique() == 1:
            yield name, study
        else:
            runs = study.runs[sizes == name].reset_index(drop=True)
            yield name, replace(study, runs=naming.name_series(runs, study.study))


def merge(studies: Sequence[Study]) -> Study:
    """Return one place's studies as one; a run shared by several is counted once.

    A series of several studies gets its study's name, because they may differ in a setting without a column.
    """
    if len(studies) == 1:
        return studies[0]
    runs = pd.concat([each.runs.assign(of=each.name) for each in studies], ignore_index=True)
    runs = runs.drop_duplicates("run_id").reset_index(drop=True)
    holders: Column = runs.groupby("series")["of"].transform("nunique")
    told = holders > 1
    runs["series"] = runs["series"].where(~told, runs["series"] + " (" + runs["of"] + ")")
    first, *others = studies
    tables = {name: _join([getattr(each, name) for each in studies]) for name in ("curvature", "curves")}
    return replace(first, name=" and ".join(each.name for each in (first, *others)), runs=runs, **tables)


def _join(frames: Sequence[Frame]) -> Frame:
    """Concatenate tables; a run's rows are from the first table that has them."""
    known: set[str] = set()
    own = []
    for frame in frames:
        own.append(frame[~frame["run_id"].isin(known)])
        known |= set(frame["run_id"])
    filled = [frame for frame in own if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else frames[0]


def group_by_modality(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Group the places into the grid's columns."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.modality, []).append(block)
    return found


def join_runs(blocks: Sequence[Block]) -> Study:
    """Return all the grid's runs in one study, for a common order and look."""
    runs = pd.concat([block.study.runs for block in blocks], ignore_index=True)
    return replace(blocks[0].study, runs=runs)


def join_texts(by_place: dict[str, str]) -> str:
    """Return the places' text once if all are equal, else each after its places."""
    texts = {text: [place for place, each in by_place.items() if each == text] for text in by_place.values() if text}
    if len(texts) == 1 and len(next(iter(texts.values()))) == len(by_place):
        return next(iter(texts))
    return " ".join(f"{', '.join(places)}: {text}" for text, places in texts.items())
