"""Synthetic proteins, the default of `data=protein`.

160 chains of 40 to 100 residues, drawn from a counter (`synthetic_genome.Draws`). A chain is a row of segments, each a
helix (8 to 18 residues), a strand (4 to 8) or a loop (2 to 5). Between two regular segments there is always a loop.

- *Structure*: N, CA, C, O and CB with ideal bond lengths and angles (Engh and Huber 1991). φ and ψ are −57°, −47° in a
  helix, −120°, 130° in a strand (Schulz and Schirmer 1979), and one of five common pairs in a loop. A segment is
  redrawn with other loops, up to 300 times, if its CA come closer than 3.8 Å to earlier ones.
- *Sequence*: a residue's weight is 100 times its Chou–Fasman propensity (1978) for the segment's kind.
- *Secondary structure* is the segment's kind (H, E, C). Single strands have no bonds, so DSSP would not assign E. SASA
  is computed; pLDDT and annotations are absent.

Coordinates are rounded to 0.001 Å. Results show how a model learns such structure, and nothing about any protein.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from stability.corpora.proteins.alphabets import NUM_ATOMS, SS_CLASSES, encode
from stability.corpora.proteins.chain import ProteinChain
from stability.corpora.tokens.synthetic_genome import Draws

SEED = 1
Point = tuple[float, float, float]
Angles = tuple[float, float]
NUM_CHAINS, SHORTEST, LONGEST = 160, 40, 100
DESCRIPTION = (
    "synthetic chains (no data.path given; ideal helices, strands and loops with their propensities; they are no "
    "organism's)"
)
LENGTHS = {"H": (8, 18), "E": (4, 8), "C": (2, 5)}
ANGLES = {
    "H": ((-57.0, -47.0),),
    "E": ((-120.0, 130.0),),
    "C": ((-75.0, 145.0), (-60.0, -30.0), (-90.0, 0.0), (57.0, 47.0), (-100.0, 120.0)),
}
CLOSEST, MOST_TRIES = 3.8, 300  # Å between two CA, as between neighbours

ACIDS = "ACDEFGHIKLMNPQRSTVWY"
# Chou and Fasman 1978, in per cent, in the order of ACIDS; loops use their propensity for turns
PROPENSITY = {
    "H": (142, 70, 101, 151, 113, 57, 100, 108, 116, 121, 145, 67, 57, 111, 98, 77, 83, 106, 108, 69),
    "E": (83, 119, 54, 37, 138, 75, 87, 160, 74, 130, 105, 89, 55, 110, 93, 75, 119, 170, 137, 147),
    "C": (66, 119, 146, 74, 60, 156, 95, 47, 101, 59, 60, 156, 152, 98, 95, 143, 96, 50, 96, 114),
}
N_CA, CA_C, C_N, C_O, CA_CB = 1.458, 1.525, 1.329, 1.231, 1.530  # Å
N_CA_C, CA_C_N, C_N_CA, CA_C_O, N_C_CA_CB, C_CA_CB = 111.0, 117.2, 121.7, 120.1, -122.6, 110.1  # degrees


def chains() -> Iterator[ProteinChain]:
    """Yield the chains, each with SASA from biotite.

    Raises:
        RuntimeError: biotite is not installed.
    """
    from stability.corpora.proteins.shards import require_biotite

    require_biotite()
    draws = Draws(SEED)
    for number in range(NUM_CHAINS):
        kinds, torsions = _segments(draws)
        letters = "".join(
            ACIDS[np.searchsorted(np.cumsum(PROPENSITY[kind]), draws.draw_one(sum(PROPENSITY[kind])), side="right")]
            for kind in kinds
        )
        yield _chain(f"synthetic_{number + 1:03d}", letters, kinds, backbone(torsions))


def _segments(draws: Draws) -> tuple[str, list[Angles]]:
    """Return (kind, (φ, ψ) in degrees) of each residue."""
    target = SHORTEST + draws.draw_one(LONGEST - SHORTEST + 1)
    kinds, torsions, atoms = "", [], []
    while len(kinds) < target:
        for _ in range(MOST_TRIES):
            more_kinds, more_torsions = _loop_and_segment(draws)
            more_atoms = _grow(atoms, [*torsions[-1:], *more_torsions])
            if not _clashes(np.array(more_atoms[1::3]), len(kinds)):
                break
        kinds, torsions, atoms = kinds + more_kinds, torsions + more_torsions, more_atoms
    return kinds[:target], torsions[:target]


def _loop_and_segment(draws: Draws) -> tuple[str, list[Angles]]:
    regular = "HE"[draws.draw_one(2)]
    lengths = {
        kind: LENGTHS[kind][0] + draws.draw_one(LENGTHS[kind][1] - LENGTHS[kind][0] + 1) for kind in ("C", regular)
    }
    kinds = "".join(kind * length for kind, length in lengths.items())
    return kinds, [ANGLES[kind][draws.draw_one(len(ANGLES[kind]))] for kind in kinds]


def _clashes(ca_NX: np.ndarray, num_before: int) -> bool:
    """Return whether a CA from ``num_before`` on is too close to an earlier one.

    Only pairs at least three residues apart count.
    """
    distances = np.linalg.norm(ca_NX[num_before:, None] - ca_NX[None], axis=-1)
    return bool((distances[np.tril(np.ones_like(distances, dtype=bool), k=num_before - 3)] < CLOSEST).any())


def backbone(torsions: list[Angles]) -> np.ndarray:
    """Return N, CA, C, O, CB in Å, (N, 5, 3).

    ``torsions`` are φ and ψ in degrees; ω = 180°.
    """
    atoms = _grow([], torsions)
    residues = list(zip(atoms[::3], atoms[1::3], atoms[2::3], strict=True))
    oxygen = [
        _place_atom(n, ca, c, C_O, CA_C_O, psi + 180.0) for (n, ca, c), (_, psi) in zip(residues, torsions, strict=True)
    ]
    beta = [_place_atom(c, n, ca, CA_CB, C_CA_CB, N_C_CA_CB) for n, ca, c in residues]
    return np.concatenate([np.array(residues), np.array(oxygen)[:, None], np.array(beta)[:, None]], axis=1)


def _grow(atoms: list[Point], torsions: list[Angles]) -> list[Point]:
    """Return ``atoms`` plus N, CA, C for all but the first of ``torsions``.

    The first torsions belong to the last residue of ``atoms``, or to one placed at the origin. Atoms are added one by
    one (NeRF: Parsons et al. 2005).
    """
    angle = math.radians(N_CA_C)
    grown = list(atoms) or [
        (0.0, 0.0, 0.0),
        (N_CA, 0.0, 0.0),
        (N_CA - CA_C * math.cos(angle), CA_C * math.sin(angle), 0.0),
    ]
    for (_, psi), (phi, _) in zip(torsions[:-1], torsions[1:], strict=True):
        for length, bend, torsion in ((C_N, CA_C_N, psi), (N_CA, C_N_CA, 180.0), (CA_C, N_CA_C, phi)):
            grown.append(_place_atom(grown[-3], grown[-2], grown[-1], length, bend, torsion))
    return grown


def _place_atom(a: Point, b: Point, c: Point, length: float, bend: float, torsion: float) -> Point:
    """Return the point at a given distance, angle and torsion.

    Its distance to c is ``length``. The angle at c to b is ``bend``, and the torsion about b–c from a is ``torsion``,
    both in degrees.
    """
    # plain floats: numpy arrays of three numbers are slower
    bend, torsion = math.radians(bend), math.radians(torsion)
    forward = _unit((c[0] - b[0], c[1] - b[1], c[2] - b[2]))
    normal = _unit(_cross((b[0] - a[0], b[1] - a[1], b[2] - a[2]), forward))
    side = _cross(normal, forward)
    along, across, up = (
        -length * math.cos(bend),
        length * math.sin(bend) * math.cos(torsion),
        length * math.sin(bend) * math.sin(torsion),
    )
    x, y, z = (c[i] + along * forward[i] + across * side[i] + up * normal[i] for i in range(3))
    return x, y, z


def _cross(a: Point, b: Point) -> Point:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _unit(a: Point) -> Point:
    length = math.sqrt(a[0] * a[0] + a[1] * a[1] + a[2] * a[2])
    return a[0] / length, a[1] / length, a[2] / length


def _chain(name: str, letters: str, kinds: str, five_NAX: np.ndarray) -> ProteinChain:
    """Build a chain from letters, secondary structure and five atoms a residue.

    SASA is computed.
    """
    atoms_NAX = np.full((len(letters), NUM_ATOMS, 3), np.nan, dtype=np.float32)
    atoms_NAX[:, :5] = np.round(five_NAX, 3)
    atoms_NAX[[letter == "G" for letter in letters], 4] = np.nan
    return ProteinChain(
        id=name,
        group=name,
        sequence=encode(letters).astype(np.int64),
        atoms14_NAX=atoms_NAX,
        ss_N=np.array([SS_CLASSES.index(kind) for kind in kinds], dtype=np.uint8),
        sasa_N=_areas(letters, atoms_NAX),
        plddt_N=np.full(len(letters), np.nan, dtype=np.float32),
        numbers_N=np.arange(1, len(letters) + 1, dtype=np.int32),
    )


def _areas(letters: str, atoms_NAX: np.ndarray) -> np.ndarray:
    """Return the residues' solvent-accessible areas in Å², rounded to 0.01."""
    from biotite.structure import AtomArray

    from stability.corpora.proteins.alphabets import ATOM14, ONE_TO_THREE
    from stability.corpora.proteins.parsing import areas
    from stability.corpora.proteins.residues import LaidOutChain

    rows, slots = np.nonzero(np.isfinite(atoms_NAX).all(axis=2))
    atoms = AtomArray(len(rows))
    names = [ONE_TO_THREE[letter] for letter in letters]
    atoms.coord = atoms_NAX[rows, slots]
    atoms.res_name = np.array([names[row] for row in rows])
    atoms.res_id = rows + 1
    atoms.atom_name = np.array(
        [ATOM14[letters[row]][slot] for row, slot in zip(rows.tolist(), slots.tolist(), strict=True)]
    )
    atoms.element = np.array([name[0] for name in atoms.atom_name])
    return np.round(areas(LaidOutChain(names, np.arange(1, len(names) + 1), atoms, rows)), 2)
