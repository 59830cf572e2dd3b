from __future__ import annotations

import numpy as np
import pytest

from stability.structure.measure import InternalGeometry, ideal_backbone, mean_geometry
from tests.structure.small import chain

HELIX = InternalGeometry(
    np.array([1.33, 1.46, 1.52]), np.radians([116.6, 121.7, 111.0]), np.radians([-47.0, 180.0, -57.0])
)


def test_an_ideal_alpha_helix_rises_by_a_known_length_and_turn():
    """Textbook numbers: 1.5 Å and 100° a residue, α carbons 3.8 Å apart."""
    ca = ideal_backbone(HELIX, 60)[:, 1]
    assert np.linalg.norm(np.diff(ca, axis=0), axis=1) == pytest.approx(3.8, abs=0.03)
    axis = np.linalg.svd(ca - ca.mean(0))[2][0]
    rise = np.abs(np.diff(ca @ axis))[10:-10].mean()
    assert rise == pytest.approx(1.5, abs=0.06)
    flat = ca - np.outer(ca @ axis, axis)
    flat -= flat.mean(0)
    steps = [
        np.degrees(np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
        for a, b in zip(flat[10:-11], flat[11:-10], strict=True)
    ]
    assert np.mean(steps) == pytest.approx(100, abs=4)


def test_an_ideal_helix_is_right_handed():
    ca = ideal_backbone(HELIX, 30)[:, 1]
    bonds = np.diff(ca, axis=0)
    assert np.einsum("ni,ni->n", np.cross(bonds[:-2], bonds[1:-1]), bonds[2:]).min() > 0


def test_means_of_an_ideal_chain_are_what_it_was_built_from():
    made = chain(0, 40)
    made.atoms14_NAX[:, :3] = ideal_backbone(HELIX, 40)
    made.atoms14_NAX[17] = np.nan  # a gap takes part in nothing
    found = mean_geometry([made])
    np.testing.assert_allclose(found.lengths_A, HELIX.lengths_A, atol=1e-4)
    np.testing.assert_allclose(found.angles_A, HELIX.angles_A, atol=1e-4)
    np.testing.assert_allclose(np.cos(found.torsions_A - HELIX.torsions_A), 1, atol=1e-6)


def test_torsions_are_averaged_on_the_circle():
    made = []
    for seed, omega in enumerate((170.0, -170.0)):
        made.append(chain(seed, 30))
        torsions = HELIX.torsions_A.copy()
        torsions[1] = np.radians(omega)
        made[-1].atoms14_NAX[:, :3] = ideal_backbone(InternalGeometry(HELIX.lengths_A, HELIX.angles_A, torsions), 30)
    assert abs(np.degrees(mean_geometry(made).torsions_A[1])) == pytest.approx(180, abs=0.1)


def test_chains_without_an_unbroken_piece_are_refused_in_words():
    empty = chain(0, 20)
    empty.atoms14_NAX[::2] = np.nan
    with pytest.raises(ValueError, match="no unbroken piece of backbone"):
        mean_geometry([empty])
