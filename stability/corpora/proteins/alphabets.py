"""Protein alphabets: residues, secondary structure, heavy atoms, bins for SASA and pLDDT."""

from __future__ import annotations

import numpy as np

from stability.models import BOS as BOS
from stability.models import EOS as EOS
from stability.models import MASK as MASK
from stability.models import PAD as PAD
from stability.models import SPECIALS as SPECIALS
from stability.models import UNK as UNK

# B is D or N, Z is E or Q, J is I or L; U selenocysteine, O pyrrolysine
LETTERS = "ACDEFGHIKLMNPQRSTVWYBUZOJ"
PIECES = (*SPECIALS, *LETTERS)
VOCAB_SIZE = len(PIECES)

# DSSP's: C coil, E strand in a ladder, B lone bridge, T turn, S bend, H α-, G 3₁₀-, I π-helix, P polyproline II
SS_CLASSES = "CEBTSHGIP"
NO_SS = 255  # unknown class

# upper edges in Å² of 16 quantile bins, the last one open
SASA_EDGES = (0.14, 2.09, 6.49, 12.69, 20.23, 29.03, 38.17, 47.43, 56.62, 65.50, 76.08, 86.71, 99.48, 115.35, 137.27)
NUM_SASA_BINS = len(SASA_EDGES) + 1
NUM_PLDDT_BINS = 50

BACKBONE = ("N", "CA", "C")
NUM_ATOMS = 14
_SIDE_CHAINS = {
    "ALA": "A CB",
    "ARG": "R CB CG CD NE CZ NH1 NH2",
    "ASN": "N CB CG OD1 ND2",
    "ASP": "D CB CG OD1 OD2",
    "CYS": "C CB SG",
    "GLN": "Q CB CG CD OE1 NE2",
    "GLU": "E CB CG CD OE1 OE2",
    "GLY": "G",
    "HIS": "H CB CG ND1 CD2 CE1 NE2",
    "ILE": "I CB CG1 CG2 CD1",
    "LEU": "L CB CG CD1 CD2",
    "LYS": "K CB CG CD CE NZ",
    "MET": "M CB CG SD CE",
    "PHE": "F CB CG CD1 CD2 CE1 CE2 CZ",
    "PRO": "P CB CG CD",
    "SER": "S CB OG",
    "THR": "T CB OG1 CG2",
    "TRP": "W CB CG CD1 CD2 NE1 CE2 CE3 CZ2 CZ3 CH2",
    "TYR": "Y CB CG CD1 CD2 CE1 CE2 CZ OH",
    "VAL": "V CB CG1 CG2",
    "SEC": "U CB SE",
}
THREE_TO_ONE = {name: words.split()[0] for name, words in _SIDE_CHAINS.items()}
# N, CA, C, O, then the side chain from CB outwards: the order of AlphaFold's atom14 (Jumper et al. 2021, supplement
# 1.2.1)
ATOM14 = {words.split()[0]: (*BACKBONE, "O", *words.split()[1:]) for words in _SIDE_CHAINS.values()}
ONE_TO_THREE = {letter: name for name, letter in THREE_TO_ONE.items()}


def encode(letters: str) -> np.ndarray:
    """Return each letter's token, uint8; `UNK` for letters without a residue.

    Case is ignored.
    """
    table = np.full(256, UNK, dtype=np.uint8)
    for number, letter in enumerate(LETTERS, start=len(SPECIALS)):
        table[ord(letter)] = table[ord(letter.lower())] = number
    return table[np.frombuffer(letters.encode("latin-1", "replace"), dtype=np.uint8)]


def decode(tokens: np.ndarray) -> str:
    """Return one letter a token; X for `UNK`, - for the other special tokens."""
    return "".join(
        PIECES[token] if token >= len(SPECIALS) else ("X" if token == UNK else "-") for token in tokens.tolist()
    )


def encode_ss(letters: str) -> np.ndarray:
    """Return each DSSP letter's number in `SS_CLASSES`, uint8.

    A blank is coil; - and any other letter is `NO_SS`.
    """
    numbers = [0 if letter == " " else SS_CLASSES.find(letter) for letter in letters]
    return np.array([NO_SS if number < 0 else number for number in numbers], dtype=np.uint8)


def sasa_bins(sasa_N: np.ndarray) -> np.ndarray:
    """Return the bin, 0 … 15, of areas in Å², int64; −1 for NaN.

    An area on an edge belongs to the lower bin.
    """
    return np.where(np.isnan(sasa_N), -1, np.searchsorted(np.array(SASA_EDGES), sasa_N, side="left"))


def plddt_bins(plddt_N: np.ndarray) -> np.ndarray:
    """Return the bin, 0 … 49, of pLDDT 0 … 100, int64; −1 for NaN.

    A bin is 2 wide.
    """
    known_N = np.nan_to_num(plddt_N, nan=0.0)
    bins_N = np.clip(np.floor(known_N * NUM_PLDDT_BINS / 100), 0, NUM_PLDDT_BINS - 1).astype(np.int64)
    return np.where(np.isnan(plddt_N), -1, bins_N)
