from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from stability.structure.frames import (
    aligned_squared_error,
    centre,
    in_frame,
    kabsch_rotation,
    random_rotations,
    rotate,
    superpose,
)
from tests.within import assert_within


def points(num: int, seed: int, batch: int = 6) -> torch.Tensor:
    return torch.randn(batch, num, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cases() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    x, y = points(12, 0), points(12, 1)
    mirrored = x * torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    flat = x * torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    return {"unrelated": (x, y), "reflection": (x, mirrored), "plane": (flat, points(12, 2)), "near": (x, x + 0.01 * y)}


@pytest.mark.parametrize("name", cases())
def test_rotations_are_scipys(name):
    x, y = cases()[name]
    weight = torch.rand(x.shape[:2], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x, y = centre(x, weight), centre(y, weight)
    ours = kabsch_rotation(x, y, weight)
    for index in range(len(x)):
        theirs, _ = Rotation.align_vectors(y[index].numpy(), x[index].numpy(), weights=weight[index].numpy())
        np.testing.assert_allclose(ours[index].numpy(), theirs.as_matrix(), atol=1e-8)
        assert torch.linalg.det(ours[index]).item() == pytest.approx(1.0)


def test_points_on_a_line_still_give_a_proper_rotation_and_the_least_error():
    line = torch.linspace(-1, 1, 9, dtype=torch.float64)[None, :, None] * torch.tensor(
        [1.0, 2.0, -1.0], dtype=torch.float64
    )
    moved = line @ torch.from_numpy(Rotation.from_rotvec([0.3, -1.0, 2.0]).as_matrix()).T
    weight = torch.ones(1, 9, dtype=torch.float64)
    assert torch.linalg.det(kabsch_rotation(line, moved, weight)).item() == pytest.approx(1.0)
    assert aligned_squared_error(line, moved, weight.bool()).item() == pytest.approx(0.0, abs=1e-14)
    assert aligned_squared_error(line * 0, moved * 0, weight.bool()).item() == 0.0


def test_the_error_is_scipys_residual():
    x, y = cases()["unrelated"]
    found = aligned_squared_error(x, y, torch.ones(x.shape[:2], dtype=torch.bool))
    for index in range(len(x)):
        a, b = (one[index].numpy() - one[index].numpy().mean(0) for one in (x, y))
        _, rssd = Rotation.align_vectors(a, b)
        assert found[index].item() == pytest.approx(rssd**2 / len(a), rel=1e-9)


def test_the_error_ignores_rotations_and_shifts_of_either_side_and_sees_mirror_images():
    x, y = cases()["unrelated"]
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    rotation = torch.from_numpy(Rotation.random(6, random_state=0).as_matrix())
    moved = x @ rotation.transpose(1, 2) + 7.0
    torch.testing.assert_close(
        aligned_squared_error(moved, y, mask), aligned_squared_error(x, y, mask), rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(
        aligned_squared_error(y, moved, mask), aligned_squared_error(y, x, mask), rtol=1e-10, atol=1e-12
    )
    assert_within(aligned_squared_error(moved, x, mask).max(), 1e-12)
    assert aligned_squared_error(*cases()["reflection"], mask).min() > 0.05


def test_what_masked_points_hold_changes_nothing():
    x, y = points(12, 0), points(12, 1)
    mask = torch.rand(6, 12, generator=torch.Generator().manual_seed(5)) < 0.7
    shorter = torch.stack(
        [
            aligned_squared_error(
                x[i : i + 1, mask[i]], y[i : i + 1, mask[i]], torch.ones(1, int(mask[i].sum())).bool()
            )[0]
            for i in range(6)
        ]
    )
    poisoned_x, poisoned_y = x.clone(), y.clone()
    poisoned_x[~mask], poisoned_y[~mask] = torch.nan, torch.inf
    poisoned_x.requires_grad_()
    error = aligned_squared_error(poisoned_x, poisoned_y, mask)
    torch.testing.assert_close(error, shorter, rtol=1e-12, atol=1e-14)
    error.sum().backward()
    assert poisoned_x.grad.isfinite().all()
    assert poisoned_x.grad[~mask].abs().max() == 0


def test_the_gradient_is_that_of_the_minimised_error_though_the_rotation_is_held_fixed():
    """Central differences let the rotation follow; the envelope theorem says that makes no difference."""
    x, y = points(7, 0, batch=1).requires_grad_(), points(7, 1, batch=1)
    mask = torch.tensor([[True] * 6 + [False]])
    aligned_squared_error(x, y, mask).sum().backward()
    expected, step = torch.zeros_like(x), 1e-5
    for place in range(21):
        shift = torch.zeros(21, dtype=torch.float64)
        shift[place] = step
        high, low = (aligned_squared_error(x.detach() + sign * shift.view(1, 7, 3), y, mask) for sign in (1, -1))
        expected.view(-1)[place] = (high - low) / (2 * step)
    torch.testing.assert_close(x.grad, expected, rtol=1e-7, atol=1e-9)


def test_superposition_lays_a_moved_copy_onto_its_original():
    x = points(12, 0)
    rotation = torch.from_numpy(Rotation.random(6, random_state=1).as_matrix())
    mask = torch.ones(6, 12, dtype=torch.bool)
    mask[:, 9:] = False
    torch.testing.assert_close(superpose(x @ rotation.transpose(1, 2) - 3.0, x, mask), x, rtol=1e-10, atol=1e-12)


def test_a_number_that_is_not_finite_shows_in_the_error_and_raises_nothing():
    x, y = points(5, 0, batch=2), points(5, 1, batch=2)
    x[0, 2, 1] = torch.nan
    error = aligned_squared_error(x, y, torch.ones(2, 5, dtype=torch.bool))
    assert error.isnan().tolist() == [True, False]


def test_random_rotations_are_proper_and_uniform():
    """Of a uniform rotation each entry has mean 0 and variance 1/3, and the trace a mean of 0 and a variance of 1."""
    rotations = random_rotations(4000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        rotations @ rotations.transpose(1, 2), torch.eye(3, dtype=torch.float64).expand(4000, 3, 3), rtol=0, atol=1e-12
    )
    assert_within((torch.linalg.det(rotations) - 1).abs().max(), 1e-12)
    traces = rotations.diagonal(dim1=1, dim2=2).sum(1)
    assert rotations.mean(0).abs().max() < 0.05
    assert traces.var().item() == pytest.approx(1.0, abs=0.1)
    assert (rotations.var(0) - 1 / 3).abs().max() < 0.03


def chain(seed: int = 0, num: int = 20) -> torch.Tensor:
    return torch.cumsum(torch.randn(3, num, 3, 3, generator=torch.Generator().manual_seed(seed)), 1)


@pytest.mark.parametrize("frame", ["principal", "raw"])
def test_frames_centre_and_move_rigidly(frame):
    coords, mask = chain(), torch.ones(3, 20, dtype=torch.bool)
    mask[1, 5:9] = False
    found = in_frame(coords + 5.0, mask, frame)
    valid = mask.repeat_interleave(3, 1)
    assert_within(aligned_squared_error(found.flatten(1, 2), coords.flatten(1, 2), valid).max(), 1e-9)
    assert_within((found * mask[..., None, None]).sum((1, 2)).abs().max(), 1e-3)


def test_the_principal_frame_does_not_see_how_the_chain_lies_and_tells_mirror_images_apart():
    coords, mask = chain(1), torch.ones(3, 20, dtype=torch.bool)
    mask[2, 15:] = False
    coords = torch.where(mask[..., None, None], coords, torch.nan)
    rotation = torch.from_numpy(Rotation.random(3, random_state=2).as_matrix())
    moved = rotate(coords.double(), rotation) + 30.0
    torch.testing.assert_close(
        in_frame(moved, mask, "principal"), in_frame(coords, mask, "principal"), rtol=0, atol=1e-4
    )
    mirrored = coords * torch.tensor([1.0, 1.0, -1.0])
    assert (in_frame(mirrored, mask, "principal") - in_frame(coords, mask, "principal")).abs().max() > 0.1
    assert (in_frame(moved, mask, "raw") - in_frame(coords, mask, "raw")).abs().max() > 0.1


def test_the_principal_frame_is_numpys_eigenvectors_in_falling_order():
    coords = chain(3)
    found = in_frame(coords, torch.ones(3, 20, dtype=torch.bool), "principal").flatten(1, 2).double()
    moments = found.transpose(1, 2) @ found
    off_diagonal = moments - torch.diag_embed(moments.diagonal(dim1=1, dim2=2))
    assert_within(off_diagonal.abs().max(), 1e-3 * moments.max())
    for index in range(3):
        flat = coords[index].reshape(-1, 3).double().numpy()
        expected = np.linalg.eigvalsh((flat - flat.mean(0)).T @ (flat - flat.mean(0)))[::-1]
        np.testing.assert_allclose(moments[index].diagonal().numpy(), expected, rtol=1e-5)
