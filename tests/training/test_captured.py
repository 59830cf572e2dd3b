"""``cuda_graphs=true``: a replayed pass is the plain pass bit for bit, refusals have one line, and nothing but the pass
is captured. CUDA's own graphs are tested in tests/cuda; here a graph is a call that writes into the same tensors."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stability.config.identity import run_id
from stability.config.parts import validate_settings
from stability.registry import Registry
from stability.training import captured
from stability.training import step as step_module
from tests.reading import read_spec
from tests.training.test_loop import final_weights, same

READ_ON_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "repeat_interleave")


def replaying(run):
    """Return what a CUDA graph gives: results in fixed memory, and a call that computes them anew into it."""
    sums, gradients = run()

    def replay():
        for held, new in zip([*sums, *gradients], [part for parts in run() for part in parts], strict=True):
            assert (held is None) == (new is None)
            if held is not None:
                held.copy_(new)

    return sums, gradients, replay


@pytest.fixture
def graphs_on_a_cpu(monkeypatch):
    recorded = []
    monkeypatch.setattr(captured, "capture_on_cuda", lambda run: recorded.append(run) or replaying(run))
    monkeypatch.setattr(captured, "require_graphs", lambda device: None)
    return recorded


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 6, "microbatch": 4},
        {"precision": "bf16", "optimizer": {"name": "muon"}},
        {"mechanism": {"name": "sc"}, "residual": {"name": "mhc_lite"}, "log": {"gradients": 3}},
        {"objective": {"name": "mlm", "context": 16}, "cross": {"name": "cc"}},
        {"objective": {"name": "score_entropy"}},
        {"optimizer": {"name": "sophia"}},
        {"guards": {"post_clip_norm": 0.5, "on_nonfinite": "skip_step", "retries": 20}},
    ],
    ids=str,
)
def test_a_run_leaves_the_metrics_and_weights_of_the_plain_run_to_the_last_bit(lab, graphs_on_a_cpu, changes):
    plain, replayed = lab.train(lab.spec(**changes)), lab.train(lab.spec(**changes, cuda_graphs=True))
    assert len(graphs_on_a_cpu) == 1, "one shape of batch, one capture"
    assert plain.run_id != replayed.run_id
    assert plain.metrics_file.read_bytes() == replayed.metrics_file.read_bytes()
    assert same(final_weights(plain), final_weights(replayed))


def test_a_run_that_was_left_goes_on_to_the_same_bytes(lab, graphs_on_a_cpu):
    spec = lab.spec(cuda_graphs=True, seed=3)
    lab.train(spec, steps=5)
    resumed = lab.train(spec)
    plain = lab.train(lab.spec(seed=3))
    assert len(graphs_on_a_cpu) == 2, "the resumed process captures again"
    assert resumed.metrics_file.read_bytes() == plain.metrics_file.read_bytes()


def test_draws_of_a_pass_depend_on_seed_and_step_alone(lab, graphs_on_a_cpu):
    """Plugins may draw in a forward pass; a resumed run must draw what the undisturbed one drew."""
    losses = []
    for before in (1, 2):
        replica = lab.replica(lab.spec(cuda_graphs=True))
        replica.model.register_forward_hook(lambda _, inputs, found: found + 0.1 * torch.randn_like(found))
        torch.manual_seed(before)
        losses.append([replica.train_step(step)["loss"] for step in (1, 2)])
        assert torch.initial_seed() == before
    assert losses[0] == losses[1]


def line(parameters, scale):
    """A pass whose gradient is known: Σ scale·x·w over the batch, for w of two parameters, the second unused."""

    def compute(examples):
        total = (scale * examples.weights_BN * parameters[0]).sum()
        total.backward()
        return (total.detach(),)

    return compute


def examples_of(weights_BN):
    return step_module.Examples(torch.zeros(1, 2), torch.zeros(1, 2), weights_BN)


def test_a_replay_takes_the_new_batch_and_leaves_no_trace_of_the_last():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    graph = captured.CapturedBackward(line(parameters, 3.0), parameters, replaying)
    for weights in ([[1.0, 2.0]], [[5.0, -1.0]], [[0.5, 0.25]]):
        parameters[0].grad = torch.full((2,), 99.0)  # nothing is added to what was there
        (total,) = graph(examples_of(torch.tensor(weights)))
        torch.testing.assert_close(parameters[0].grad, 3.0 * torch.tensor(weights[0]), rtol=0, atol=0)
        torch.testing.assert_close(total, 3.0 * torch.tensor(weights).sum(), rtol=0, atol=0)
        assert parameters[1].grad is None, "no gradient reaches it, as without a graph"
        parameters[0].grad.mul_(1e-3)  # clipping is in place


def test_the_batch_is_copied_and_never_held():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    graph, first = captured.CapturedBackward(line(parameters, 1.0), parameters, replaying), torch.ones(1, 2)
    graph(examples_of(first))
    graph(examples_of(torch.full((1, 2), 7.0)))
    assert first.tolist() == [[1.0, 1.0]]


def test_each_shape_and_each_place_of_the_parameters_has_a_graph_and_too_many_are_refused():
    captures, parameters = [], [torch.nn.Parameter(torch.ones(1))]
    graph = captured.CapturedBackward(
        line(parameters, 1.0), parameters, lambda run: captures.append(run) or replaying(run)
    )
    for rows in (1, 2, 1, 2):
        graph(examples_of(torch.ones(rows, 2)))
    assert len(captures) == 2
    old = parameters[0].data  # stays alive, so that the new memory is another
    parameters[0].data = old.clone()
    graph(examples_of(torch.ones(1, 2)))
    assert len(captures) == 3
    graph(examples_of(torch.ones(3, 2)))
    with pytest.raises(RuntimeError, match=r"^cuda_graphs=true: batches of more than 4 shapes; use cuda_graphs=false$"):
        graph(examples_of(torch.ones(4, 2)))


def test_a_cpu_is_refused_in_a_line(lab):
    with pytest.raises(
        ValueError, match=r"^cuda_graphs=true needs device=cuda, and this device is a CPU; use cuda_graphs=false$"
    ):
        lab.replica(lab.spec(cuda_graphs=True))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"compile": True}, "compile=true, which makes the same pass"),
        (
            {"model": {"name": "t", "layers": 2, "width": 16, "heads": 2, "positions": 16, "dropout": 0.1}},
            "model.dropout=0.1, which is seeded on the host for each microbatch",
        ),
        ({"objective": {"name": "mlm", "impl": "triton"}}, "objective.impl=triton, whose number of rows is read"),
    ],
)
def test_what_a_graph_would_freeze_is_refused(lab, changes, what):
    with pytest.raises(ValueError, match=rf"cuda_graphs=true does not go together with {what}"):
        lab.spec(cuda_graphs=True, **changes)


def test_several_devices_are_refused():
    with pytest.raises(ValueError, match=r"^cuda_graphs=true works on one device only, and devices_per_trial=2; "):
        read_spec("sweep", ["cuda_graphs=true", "launcher=serial", "devices_per_trial=2", "microbatch=1"])


def test_a_graph_is_part_of_a_run_s_identity_and_its_absence_is_not(lab):
    assert run_id(lab.spec(cuda_graphs=True)) != run_id(lab.spec()) == run_id(lab.spec(cuda_graphs=False))


class NoHostReads(TorchDispatchMode):
    """Fail at operations whose result the host must see: CUDA refuses them within a capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in READ_ON_THE_HOST, f"{name} is read on the host"
        if name in ("index", "index_put", "index_put_"):
            chosen = [each for each in args[1] if each is not None]
            assert all(each.dtype not in (torch.bool, torch.uint8) for each in chosen), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


def test_a_read_on_the_host_is_noticed():
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHostReads():
        torch.ones(1).item()
    with pytest.raises(AssertionError, match="by a mask"), NoHostReads():
        torch.ones(2)[torch.tensor([True, False])]


@pytest.mark.parametrize("name", Registry("mechanisms").names(cross=False))
def test_no_mechanism_s_pass_reads_on_the_host(lab, graphs_on_a_cpu, name):
    mechanism, settings = Registry("mechanisms").load(name), validate_settings("mechanisms", name, {})
    if mechanism.untrained(settings):
        pytest.skip("it is not trained")
    objective = "mlm" if "bidirectional" in mechanism.supported_directions(settings) else "ar"
    replica = lab.replica(lab.spec(mechanism={"name": name}, objective={"name": objective}, cuda_graphs=True))
    replica.train_step(1)
    (run,) = graphs_on_a_cpu
    with NoHostReads():
        run()
