"""``log.curvature``: the numbers are those of the step, and nothing of the run changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stability.config.curvature import CurvatureSpec
from stability.curvature import top_eigenvalue
from stability.curvature.lanczos import Operator
from stability.curvature.spectrum import compute_largest
from stability.objectives import training_examples
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.runs.directory import read_jsonl
from stability.training import checkpoint
from stability.training.signals import Edge
from tests.sweeps.real import make_sweep
from tests.training.test_compile import trained
from tests.training.test_loop import final_weights, same

SIZE = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16}
VARIANTS = {
    "plain": {},
    "dropout": {"model": SIZE | {"dropout": 0.3}, "batch": 5, "microbatch": 2, "log": {"activations": 3}},
    "recurrent": {"objective": {"name": "ar"}, "mechanism": {"name": "gla"}, "optimizer": {"name": "sgd"}},
    "streams": {"residual": {"name": "mhc_lite"}, "mechanism": {"name": "sc"}, "precision": "bf16"},
    "averages": {"optimizer": {"name": "schedulefree_adamw"}},
}


def rows(directory):
    return list(read_jsonl(directory.edge_file))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_run_is_the_same_byte_for_byte(lab, name):
    changes = VARIANTS[name]
    log = changes.get("log", {}) | {"curvature": 4}
    plain, watched = lab.train(lab.spec(**changes)), lab.train(lab.spec(**changes | {"log": log}))
    assert plain.metrics_file.read_bytes() == watched.metrics_file.read_bytes()
    assert same(final_weights(plain), final_weights(watched))
    assert [row["step"] for row in rows(watched)] == [4, 8, 12]
    has_adam = changes.get("optimizer", {}).get("name", "adamw") == "adamw"
    assert all(("adam_ratio" in row) is has_adam and row["curvature"] for row in rows(watched))


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_a_resumed_run_logs_the_same_bytes(lab, name):
    """It goes on from step 4; the second measurement starts from the first one's eigenvector."""
    spec = lab.spec(**VARIANTS[name] | {"log": {"curvature": 2}})
    whole = lab.train(spec)
    expected = whole.metrics_file.read_bytes(), whole.edge_file.read_bytes()
    whole.status_file.unlink()
    checkpoint.remove(whole.checkpoints()[-1])
    lab.train(spec)
    assert (whole.metrics_file.read_bytes(), whole.edge_file.read_bytes()) == expected


@pytest.mark.slow
def test_a_compiled_run_is_the_same_byte_for_byte(lab, tmp_path):
    plain, watched = (
        trained(lab, tmp_path / str(every), lab.spec(steps=6, compile=True, log={"curvature": every}))
        for every in (None, 3)
    )
    assert plain.metrics_file.read_bytes() == watched.metrics_file.read_bytes()
    assert len(rows(watched)) == 2


@pytest.mark.parametrize(
    "changes", [{}, {"microbatch": 2}, {"optimizer": {"name": "sgd"}}, {"ffn": "glu", "norm": "rmsnorm"}]
)
def test_the_numbers_are_those_of_stability_hessian_at_the_same_step(lab, monkeypatch, changes):
    """By taylor, which shares no code with double backward, from the checkpoint before the step and on its batch."""
    spec = lab.spec(**changes, lr_peak=1e-2, checkpoint={"every_steps": 1}, log={"curvature": 6})
    directory = lab.train(spec)
    loaded = Loaded.read(directory.path / "checkpoints" / "step_000005", lab.cache)
    curvature = CurvatureSpec(state=("checkpoint",), warmup_batches=1, warmup_steps=0, recorded_steps=1, parity_steps=0)
    probe = Probe(loaded, curvature, torch.device("cpu"))
    batch = training_examples(spec, probe.corpus, probe.objective, "train", 6, seed=0, batch=spec.batch)
    monkeypatch.setattr(probe.descent, "examples", lambda index: batch)
    (expected,) = (row for row in probe.rows("checkpoint") if row is not None)
    assert expected["method"] == "taylor"
    found = rows(directory)[0]
    assert {key: found[key] for key in ("slope", "curvature", "alpha_max")} == pytest.approx(
        {key: expected[key] for key in ("slope", "curvature", "alpha_max")}, rel=2e-4
    )
    assert found["alpha"] == 1e-2


@pytest.mark.parametrize("parts", [1, 2])
def test_the_warm_started_iteration_is_lanczos_to_a_hundredth(parts):
    """On a deep net's batch, the same at every step: from the second measurement on. By Lanczos of its own scaling."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)).double()
    params = dict(net.named_parameters())
    x, y = torch.randn(32, 8, dtype=torch.float64), torch.randn(32, 8, dtype=torch.float64)
    optimizer, edge = torch.optim.AdamW(net.parameters(), lr=3e-3), Edge()

    def loss(at, part):
        out = torch.func.functional_call(net, at, (x[part],))
        return ((out - y[part]) ** 2).sum(), torch.tensor(float(len(x[part])))

    batches = [slice(0, 32)] if parts == 1 else [slice(0, 20), slice(20, 32)]
    errors = []
    for step in range(1, 13):
        before = {name: param.detach().clone() for name, param in params.items()}
        optimizer.zero_grad()
        total, count = loss(params, slice(0, 32))
        (total / count).backward()
        optimizer.step()
        row = edge.measure(loss, before, batches, optimizer, params, 3e-3)
        assert 1 <= row["products"] <= 5
        roots = {
            name: ((optimizer.state[param]["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + 1e-8).sqrt()
            for name, param in params.items()
        }
        scaled = {name: root * before[name] for name, root in roots.items()}  # z = P^{1/2} θ has the Hessian wanted
        exact = top_eigenvalue(
            lambda z, part, roots=roots: loss({name: value / roots[name] for name, value in z.items()}, part),
            scaled,
            batches=[slice(0, 32)],
            tolerance=1e-6,
            iterations=200,
        )
        assert row["adam_sharpness"] <= exact.value * (1 + 1e-6), "a Ritz value is never above"
        errors.append(1 - row["adam_sharpness"] / exact.value)
        assert row["adam_threshold"] == pytest.approx(38 / 3e-3)
        assert row["adam_ratio"] == pytest.approx(row["adam_sharpness"] * 3e-3 / 38)
    assert max(errors[3:]) < 1e-2, errors


@pytest.mark.parametrize("growth", [0.3, 0.05, 0.01])
def test_the_iteration_ends_at_the_first_product_that_hardly_raises_the_eigenvalue(growth):
    """The Ritz values by numpy: of the matrix within the space of its powers, orthogonalised by QR."""
    sizes = np.linspace(0.1, 4.0, 40) ** 2
    start = np.random.default_rng(0).normal(size=40)
    values = []
    for number in range(1, 31):
        basis = np.linalg.qr(np.stack([(sizes / 16) ** power * start for power in range(number)], 1))[0]
        values.append(np.linalg.eigvalsh(basis.T @ (sizes[:, None] * basis))[-1])
    expected = next(i for i in range(1, 30) if values[i] - values[i - 1] <= growth * values[i]) + 1
    operator = Operator(lambda v: torch.tensor(sizes) * v, 40, torch.float64, torch.device("cpu"))
    params = {"w": torch.zeros(40, dtype=torch.float64)}
    found = compute_largest(operator, params, 1e-9, 30, 0, torch.tensor(start), growth)
    assert found.products == expected > 2
    assert found.value == pytest.approx(values[expected - 1], rel=1e-6)


@pytest.mark.parametrize("beta1", [0.9, 0.5])
def test_a_quadratic_driven_by_adam_grows_where_the_ratio_crosses_1(beta1):
    """λ₁ of the loss rises by 2 % a round; v stands still, so that λ₁(P^{-1/2} H P^{-1/2}) is λ₁/√v by hand."""
    lr, square = 1e-2, 4.0
    w = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64))
    optimizer = torch.optim.Adam([w], lr=lr, betas=(beta1, 1 - 1e-15), eps=1e-30)
    optimizer.state[w] = {
        "step": torch.tensor(1e18, dtype=torch.float64),
        "exp_avg": torch.zeros(3, dtype=torch.float64),
        "exp_avg_sq": torch.full((3,), square, dtype=torch.float64),
    }
    edge, sizes, ratios = Edge(), [], []
    shape = torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
    edge_of_adam = math.sqrt(square) * (2 + 2 * beta1) / (1 - beta1) / lr
    for round_ in range(-4, 5):
        largest = edge_of_adam * 1.02**round_ * 1.01
        w.data[0], optimizer.state[w]["exp_avg"][0] = 1.0, 0.0  # each round from the same place

        def loss(params, part, largest=largest):
            return (0.5 * largest * shape * params["w"] ** 2).sum(), torch.tensor(1.0)

        for _ in range(300):
            before = {"w": w.detach().clone()}
            optimizer.zero_grad()
            loss({"w": w}, None)[0].backward()
            optimizer.step()
            optimizer.state[w]["exp_avg_sq"].fill_(square)
        row = edge.measure(loss, before, [None], optimizer, {"w": w}, lr)
        sizes.append(abs(w[0].item()))
        ratios.append(row["adam_ratio"])
        assert row["adam_sharpness"] == pytest.approx(largest / math.sqrt(square), rel=5e-3)
    assert [size > 1 for size in sizes] == [ratio > 1 for ratio in ratios]
    assert ratios[3] < 1 < ratios[4]


def test_a_step_that_is_left_out_is_not_measured(lab):
    replica = lab.replica(lab.spec(guards={"post_clip_norm": 1e-6}, log={"curvature": 1}))
    replica.train_step(1)
    assert replica.signals == {} and replica.edge.start is None


def test_slices_of_parameters_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"log.curvature=50 takes Hessian-vector products .* leave one of the two out"):
        make_sweep(tmp_path, "shard_parameters=true", "devices_per_trial=2", "log.curvature=50")


def test_kernels_without_second_derivatives_are_refused(lab):
    with pytest.raises(ValueError, match=r"log.curvature=2 takes second derivatives.* or impl=reference"):
        lab.spec(mechanism={"name": "sw", "impl": "triton"}, log={"curvature": 2})
