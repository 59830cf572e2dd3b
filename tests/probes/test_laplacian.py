"""The sparse block Laplacian against dense matrices built by slow loops, and the plain graphs against the paper's
closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from stability.probes.graphs.pdmm import (
    complete,
    connectivity_rows,
    cycle,
    cycle_connectivity,
    path_bounds,
    window_path,
)
from stability.probes.layers import laplacian as module
from stability.probes.layers.laplacian import BlockLaplacian, connectivity
from tests.within import assert_within


def random_edges(num_nodes, width, density=0.3, seed=0):
    """A directed edge set, R_ij ≠ R_ji, some edges without their opposite."""
    draws = np.random.default_rng(seed)
    edges = [
        (i, j)
        for i in range(num_nodes)
        for j in range(num_nodes)
        if i != j and (abs(i - j) == 1 or draws.random() < density)
    ]
    roots = draws.standard_normal((len(edges), width, width))
    weights = roots @ roots.transpose(0, 2, 1) / width + draws.uniform(0.1, 1.0, (len(edges), 1, 1)) * np.eye(width)
    source, target = np.array(edges).T
    return source, target, weights


def dense_laplacian(source, target, weights, num_nodes):
    """½(D_out + D_in − W − Wᵀ), entry by entry (Eqs. 21 to 23 with both degrees)."""
    width = weights.shape[-1]
    found = np.zeros((num_nodes * width, num_nodes * width))
    for i, j, weight in zip(source, target, weights, strict=True):
        if i == j:
            continue
        for a, b in itertools.product(range(width), repeat=2):
            found[i * width + a, i * width + b] += weight[a, b] / 2
            found[j * width + a, j * width + b] += weight[a, b] / 2
            found[i * width + a, j * width + b] -= weight[a, b] / 2
            found[j * width + a, i * width + b] -= weight[b, a] / 2
    return found


@pytest.fixture(params=["scattered", "window", "cycle", "complete", "two pieces"])
def graph(request):
    """(source, target, weights, nodes) of every kind of graph."""
    num_nodes, width = 12, 3
    draws = np.random.default_rng(1)
    if request.param == "scattered":
        return *random_edges(num_nodes, width), num_nodes
    if request.param == "two pieces":
        source, target, weights = random_edges(6, width)
        return (
            np.concatenate([source, source + 6]),
            np.concatenate([target, target + 6]),
            np.concatenate([weights, 2 * weights]),
            num_nodes,
        )
    low, high = {"window": lambda: window_path(12, 2), "cycle": lambda: cycle(12, 2), "complete": lambda: complete(12)}[
        request.param
    ]()
    source, target = np.concatenate([low, high]), np.concatenate([high, low])
    roots = draws.standard_normal((len(source), width, width))
    return source, target, roots @ roots.transpose(0, 2, 1) + 0.2 * np.eye(width), num_nodes


def test_eigenvalues_and_counts_are_those_of_the_dense_matrix(graph):
    sparse, dense = BlockLaplacian(*graph), dense_laplacian(*graph)
    assert_within(np.abs(sparse.matrix.toarray() - dense).max(), 1e-12)
    values = np.linalg.eigvalsh(dense)
    zeros = sparse.num_components * sparse.width
    assert_within(np.abs(values[:zeros]).max(), 1e-10)
    assert values[zeros] > 1e-10
    assert sparse.largest() == pytest.approx(values[-1], rel=1e-10)
    assert sparse.fiedler() == pytest.approx(values[zeros], rel=1e-9)
    for threshold in (0.5 * values[zeros], float(np.median(values)), 0.9 * values[-1], 1.1 * values[-1]):
        assert sparse.count_below(threshold) == (values <= threshold).sum()


def test_components_are_counted(graph):
    pieces = BlockLaplacian(*graph).num_components
    assert pieces == (
        2
        if graph[0].max() == 11 and not any(i < 6 <= j or j < 6 <= i for i, j in zip(graph[0], graph[1], strict=True))
        else 1
    )


def test_the_quadrature_has_the_moments_of_the_dense_matrix(graph):
    sparse, dense = BlockLaplacian(*graph), dense_laplacian(*graph)
    start = np.random.default_rng(3).standard_normal(sparse.size)
    nodes, weights = sparse.quadrature(start, 6)
    for power in range(12):
        exact = start @ np.linalg.matrix_power(dense, power) @ start / (start @ start)
        assert (weights * nodes**power).sum() == pytest.approx(exact, rel=1e-8)


def test_the_densitys_probes_scatter_around_the_trace():
    edges = random_edges(20, 3)
    sparse, dense = BlockLaplacian(*edges, 20), dense_laplacian(*edges, 20)
    density = sparse.density(200, 20, seed=0)
    means = np.array([(density.weights * density.nodes**2)[density.probe == probe].sum() for probe in range(200)])
    exact = np.trace(dense @ dense) / len(dense)
    assert abs(means.mean() - exact) < 3 * means.std(ddof=1) / math.sqrt(200)
    assert np.array_equal(density.nodes, sparse.density(200, 20, seed=0).nodes)
    assert not np.array_equal(density.nodes, sparse.density(200, 20, seed=1).nodes)


def test_energy_is_the_sum_over_directed_edges(graph):
    source, target, weights, num_nodes = graph
    u_NK = np.random.default_rng(4).standard_normal((num_nodes, weights.shape[-1]))
    slow = sum(
        0.5 * (u_NK[i] - u_NK[j]) @ weight @ (u_NK[i] - u_NK[j])
        for i, j, weight in zip(source, target, weights, strict=True)
    )
    assert BlockLaplacian(*graph).energy(u_NK) == pytest.approx(slow, rel=1e-12)


def test_far_reaching_graphs_are_solved_by_iteration_with_the_same_result(graph, monkeypatch):
    direct = BlockLaplacian(*graph).fiedler()
    monkeypatch.setattr(module, "MOST_FILL", 0)
    assert BlockLaplacian(*graph).fiedler() == pytest.approx(direct, rel=1e-8)
    assert BlockLaplacian(*graph).count_below(1.0) is None


def test_loops_add_nothing_and_a_graph_without_edges_has_no_fiedler_value():
    source, target, weights = random_edges(6, 2)
    looped = BlockLaplacian(np.append(source, 3), np.append(target, 3), np.concatenate([weights, weights[:1]]), 6)
    assert np.array_equal(looped.matrix.toarray(), BlockLaplacian(source, target, weights, 6).matrix.toarray())
    none = BlockLaplacian(np.zeros(0, int), np.zeros(0, int), np.zeros((0, 2, 2)), 6)
    assert none.largest() == 0 and math.isnan(none.fiedler()) and none.num_components == 6


def test_a_fiedler_value_below_rounding_is_zero():
    low, high = window_path(6, 1)
    weights = np.array([1.0, 1.0, 1e-20, 1.0, 1.0])[:, None, None] * np.eye(2)
    assert BlockLaplacian(low, high, weights, 6).fiedler() == 0, "a pivot is exactly zero"
    roots = np.random.default_rng(5).standard_normal((5, 2, 2))
    uneven = roots @ roots.transpose(0, 2, 1) + weights
    uneven[2] *= 1e-18
    assert BlockLaplacian(low, high, uneven, 6).fiedler() == 0, "a pivot is a rounding"
    assert BlockLaplacian(low, high, np.maximum(weights, 1e-9 * np.eye(2)), 6).fiedler() == pytest.approx(
        1e-9 / 3, rel=1e-4
    )


def test_weight_bounds_hold_the_fiedler_value(graph):
    source, target, _, num_nodes = graph
    sparse = BlockLaplacian(*graph)
    lightest, heaviest = sparse.weight_bounds()
    unweighted = connectivity(source, target, num_nodes)
    assert lightest * unweighted <= sparse.fiedler() <= heaviest * unweighted
    pairs = {(min(i, j), max(i, j)) for i, j in zip(source, target, strict=True)}
    zero = np.zeros((sparse.width, sparse.width))
    of = {(i, j): weight for i, j, weight in zip(*graph[:3], strict=True)}
    values = np.concatenate([np.linalg.eigvalsh((of.get((i, j), zero) + of.get((j, i), zero)) / 2) for i, j in pairs])
    assert (lightest, heaviest) == (pytest.approx(values.min(), rel=1e-10), pytest.approx(values.max(), rel=1e-10))


@pytest.mark.parametrize("num_nodes", [3, 4, 7, 20, 41, 60, 101, 200])
def test_cycles_have_the_closed_form_of_equation_15_up_to_200_nodes_and_windows_of_20(num_nodes):
    for window in (window for window in range(1, 21) if 2 * window < num_nodes):
        closed = 2 * window - 2 * sum(math.cos(2 * math.pi * j / num_nodes) for j in range(1, window + 1))
        assert connectivity(*cycle(num_nodes, window), num_nodes) == pytest.approx(closed, rel=1e-9), window
        assert cycle_connectivity(num_nodes, window) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("num_nodes", [3, 4, 7, 20, 41, 60, 101, 200])
def test_window_paths_lie_within_the_bounds_of_equation_16(num_nodes):
    for window in (window for window in range(1, 21) if 2 * window < num_nodes):
        found = connectivity(*window_path(num_nodes, window), num_nodes)
        squares = sum(math.sin(math.pi * j / (2 * num_nodes)) ** 2 for j in range(1, window + 1))
        assert path_bounds(num_nodes, window) == (pytest.approx(2 * squares), pytest.approx(4 * squares))
        assert 2 * squares <= found <= 4 * squares * (1 + 1e-9), window


@pytest.mark.parametrize("num_nodes", [2, 3, 10, 200])
def test_complete_graphs_and_plain_paths_have_their_closed_forms(num_nodes):
    assert connectivity(*complete(num_nodes), num_nodes) == pytest.approx(num_nodes, rel=1e-9)
    assert connectivity(*window_path(num_nodes, 1), num_nodes) == pytest.approx(
        2 - 2 * math.cos(math.pi / num_nodes), rel=1e-9
    )


def test_a_cycles_window_stays_below_half_its_nodes():
    with pytest.raises(ValueError, match="a cycle of 8 nodes takes a window below 4, got 4"):
        cycle(8, 4)


def test_the_table_of_graphs_grows_as_the_cube_of_the_window_over_the_square_of_the_length():
    rows = [row for row in connectivity_rows() if row["graph"] == "window"]
    value = {(row["positions"], row["window"]): row["connectivity"] for row in rows}
    assert math.log2(value[512, 8] / value[1024, 8]) == pytest.approx(2, abs=0.01)
    assert math.log2(value[1024, 32] / value[1024, 16]) == pytest.approx(3, abs=0.1)
    assert all(row["bound_low"] <= row["connectivity"] <= row["bound_high"] * (1 + 1e-9) for row in rows)


def test_eigenvalues_that_hardly_differ_are_found():
    """Weights that are nearly multiples of I leave clusters of K eigenvalues, as of K graphs that are nearly the same."""
    num_nodes, width = 16, 16
    for seed in range(10, 18):
        draws = np.random.default_rng(seed)
        source = np.repeat(np.arange(num_nodes), 2)
        ahead = [draws.choice(np.arange(1, num_nodes), 2, replace=False) for _ in range(num_nodes)]
        target = (source + np.concatenate(ahead)) % num_nodes
        scale = draws.uniform(0.02, 0.03, (len(source), 1, 1))
        roots = draws.standard_normal((len(source), width, width))
        weights = scale * (np.eye(width) + 1e-7 / width * roots @ roots.transpose(0, 2, 1))
        values = np.linalg.eigvalsh(dense_laplacian(source, target, weights, num_nodes))
        found = BlockLaplacian(source, target, weights, num_nodes)
        assert_within(found.fiedler() - values[width], 1e-7 * values[width])
        assert_within(found.largest() - values[-1], 1e-7 * values[-1])
