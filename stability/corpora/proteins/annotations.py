"""Read protein annotations by UniProt accession: domains, descriptions, orthologous groups.

Descriptions are GO terms and keywords. Two formats, each also as .gz:

- A UniProt flat file (.txt or .dat), in either style of features.
- A table (.tsv) with column names in its first line: ``accession`` and any of ``domains`` ("SH3:61-121; Protein
  kinase:242-493"), ``descriptions`` and ``orthologs`` ("GO:0016021; Membrane").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from stability.corpora.io.files import lines_of, open_unpacked, suffix_of

KEY = "data.annotations"
SUFFIXES = (".txt", ".dat", ".tsv", ".txt.gz", ".dat.gz", ".tsv.gz")
COLUMNS = ("accession", "domains", "descriptions", "orthologs")
DOMAIN_FEATURES = frozenset(("DOMAIN", "REPEAT", "ZN_FING", "DNA_BIND", "COILED", "TRANSMEM"))
ORTHOLOGS = frozenset(("eggNOG", "KO", "OMA", "OrthoDB", "TreeFam", "HOGENOM", "HOVERGEN", "GeneTree"))
RANGE = re.compile(r"^<?(\d+)(?:\.\.|\s+)>?(\d+)\s*(.*)$")
NUMBERED = re.compile(r"\s+\d+$")  # removed, so repeated domains have one name
EVIDENCE = re.compile(r"\s*\{ECO:[^}]*\}")
PLACED = re.compile(r"^(.+):(\d+)-(\d+)$")


class Annotation(NamedTuple):
    """One protein's annotation by UniProt.

    Attributes:
        domains: (name, first, last residue), counted from 1 in UniProt's sequence.
        descriptions: names in the file's order.
        orthologs: names in the file's order.
    """

    domains: tuple[tuple[str, int, int], ...] = ()
    descriptions: tuple[str, ...] = ()
    orthologs: tuple[str, ...] = ()


def read_annotations(file: Path) -> dict[str, Annotation]:
    """Return the annotations by accession, secondary ones included.

    If several entries have an accession, the first is used.

    Raises:
        ValueError: the file is invalid; the message names file and line.
    """
    check_annotations(file)
    with open_unpacked(file, KEY) as stream:
        lines = _text_lines(stream, file)
        found = dict(_table(lines, file)) if ".tsv" in file.name.lower() else _flat(lines, file)
    if not found:
        raise ValueError(
            f"{KEY}={file}: no entry in it; a UniProt flat file has lines 'AC   …', a table one line for each accession"
        )
    return found


def check_annotations(file: Path) -> None:
    """Raise a ``ValueError`` if the file is missing or has an unknown suffix."""
    if not file.is_file():
        raise ValueError(f"{KEY}={file}: no such file")
    if not suffix_of(file, SUFFIXES):
        raise ValueError(f"{KEY}={file}: the name ends in none of {', '.join(SUFFIXES)}; rename or convert it")


def _text_lines(stream: BufferedIOBase, file: Path) -> Iterator[str]:
    for number, line in enumerate(lines_of(stream, file, KEY), start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"{KEY}: {file}, line {number} is not UTF-8; convert it") from None


def _table(lines: Iterator[str], file: Path) -> Iterator[tuple[str, Annotation]]:
    """Yield a table's annotations by accession.

    Raises:
        ValueError: a line is invalid; the message names the line.
    """
    header = next(lines, "").removeprefix("\ufeff").split("\t")
    if "accession" not in header or set(header) - set(COLUMNS):
        raise ValueError(
            f"{KEY}: {file}, line 1 has the columns {', '.join(header) or 'none'}; accession and any of "
            f"{', '.join(COLUMNS[1:])} are read"
        )
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        cells = dict(zip(header, line.split("\t"), strict=False))
        if len(line.split("\t")) != len(header):
            raise ValueError(
                f"{KEY}: {file}, line {number} has {len(line.split(chr(9)))} columns, line 1 has {len(header)}"
            )
        accession = cells["accession"].strip()
        if not accession:
            raise ValueError(f"{KEY}: {file}, line {number} has no accession")
        if line_of.setdefault(accession, number) != number:
            raise ValueError(
                f"{KEY}: {file}, line {number} has {accession} again, as line {line_of[accession]}; put all of it "
                "into one line, parted by ;"
            )
        domains = tuple(_parse_place(word, file, number) for word in _words(cells.get("domains", "")))
        yield accession, Annotation(domains, _words(cells.get("descriptions", "")), _words(cells.get("orthologs", "")))


def _words(cell: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in cell.split(";") if word.strip()))


def _parse_place(word: str, file: Path, number: int) -> tuple[str, int, int]:
    found = PLACED.match(word)
    if not found or not 1 <= int(found[2]) <= int(found[3]):
        raise ValueError(f"{KEY}: {file}, line {number}: '{word}' is no domain; write NAME:FIRST-LAST, as SH3:61-121")
    return found[1].strip(), int(found[2]), int(found[3])


def _flat(lines: Iterator[str], file: Path) -> dict[str, Annotation]:
    found: dict[str, Annotation] = {}
    entry: list[str] = []
    for line in lines:
        entry.append(line)
        if line.startswith("//"):
            _add(found, entry)
            entry = []
    if any(line.strip() if found else line.startswith(("ID   ", "AC   ")) for line in entry):
        raise ValueError(f"{KEY}: {file} is cut short: its last entry has no closing '//'")
    return found


def _add(found: dict[str, Annotation], entry: list[str]) -> None:
    """Add one UniProt text entry's annotation under each of its accessions."""
    accessions = [
        word.strip() for line in entry if line.startswith("AC   ") for word in line[5:].split(";") if word.strip()
    ]
    references = [
        [word.strip().rstrip(".") for word in line[5:].split(";")] for line in entry if line.startswith("DR   ")
    ]
    terms = [words[1] for words in references if words[0] == "GO"]
    keywords = EVIDENCE.sub("", " ".join(line[5:] for line in entry if line.startswith("KW   "))).rstrip(".").split(";")
    groups = [f"{words[0]}:{words[1]}" for words in references if words[0] in ORTHOLOGS]
    descriptions = dict.fromkeys([*terms, *(word.strip() for word in keywords if word.strip())])
    annotation = Annotation(tuple(_domains(entry)), tuple(descriptions), tuple(dict.fromkeys(groups)))
    for accession in accessions:
        found.setdefault(accession, annotation)


def _domains(entry: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) for features of `DOMAIN_FEATURES` with both ends known.

    The name is the note without its number, or the feature's kind.
    """
    features: list[list[str]] = []
    for line in entry:
        if line.startswith("FT   ") and line[5:13].strip():
            features.append([line[5:13].strip(), line[13:].strip()])
        elif line.startswith("FT   ") and features:
            features[-1].append(line[5:].strip())
    for kind, place, *more in features:
        if kind in DOMAIN_FEATURES and (found := RANGE.match(place)):
            text = " ".join([found[3], *more])
            note = re.search(r'/note="([^"]*)"', text)
            name = note[1] if note else re.split(r"[.{]", found[3])[0]
            yield NUMBERED.sub("", name.split(";")[0].strip()) or kind, int(found[1]), int(found[2])
