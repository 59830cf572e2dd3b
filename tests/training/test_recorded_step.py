"""The recorded training step of a CPU: the plain step's numbers to the last bit, and the plain step itself where
operations could differ from step to step."""

from __future__ import annotations

import math
import random

import jaxtyping
import pytest
import torch

from stability.config.parts import validate_settings
from stability.registry import Registry
from stability.training import captured
from stability.training import step as step_module
from stability.training.captured import CapturedBackward, Uncaptured, capture_on_cpu
from stability.training.devices import shared
from tests.training.test_captured import examples_of, line
from tests.training.test_loop import final_weights, same

STEPS = 4  # recorded and compared, compared, trusted, trusted
NEVER = 10**9
OTHER_NUMBERS = (
    "^a training step's recorded operations gave other numbers than the step itself; it is computed directly$"
)


@pytest.fixture(autouse=True)
def no_checks_of_shapes(monkeypatch):
    """They draw random numbers, which no recording may."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def recording(monkeypatch):
    """Return a function that sets from how many steps on a run is recorded; it is 1."""

    def record_from(steps):
        monkeypatch.setattr(step_module, "RECORDED_FROM", steps)

    record_from(1)
    return record_from


def take_steps(replica):
    return [replica.train_step(step) for step in range(1, STEPS + 1)]


def assert_same_steps(lab, spec, recording):
    """Steps with and without a recording are equal, and there is one."""
    replayed = lab.replica(spec)
    recording(NEVER)
    plain = lab.replica(spec)
    assert take_steps(replayed) == take_steps(plain)
    assert all(map(torch.equal, plain.parameters, replayed.parameters))
    assert replayed._captured is not None, "no recording was trusted"
    assert plain._captured is None


@pytest.mark.parametrize("name", Registry("mechanisms").names(cross=False))
def test_every_mechanism_s_recorded_steps_are_its_plain_ones(lab, recording, name):
    mechanism, settings = Registry("mechanisms").load(name), validate_settings("mechanisms", name, {})
    if mechanism.untrained(settings):
        pytest.skip("it is not trained")
    objective = "mlm" if "bidirectional" in mechanism.supported_directions(settings) else "ar"
    spec = lab.spec(mechanism={"name": name}, objective={"name": objective})
    assert_same_steps(lab, spec, recording)


@pytest.mark.parametrize("name", Registry("optimizers").names())
def test_every_optimizer_s_recorded_steps_are_its_plain_ones(lab, recording, name):
    assert_same_steps(lab, lab.spec(optimizer={"name": name}), recording)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 6, "microbatch": 4},
        {"precision": "bf16"},
        {"clip_norm": None},
        {"objective": {"name": "mlm", "context": 16}, "cross": {"name": "cc"}},
        {"objective": {"name": "score_entropy"}},
        {"log": {"gradients": 3, "activations": 2, "curvature": 2}},
        {"residual": {"name": "mhc_lite"}},
        {"residual": {"name": "hc"}},
        {"norm": "rmsnorm"},
        {"ffn": {"name": "moe"}},
    ],
    ids=str,
)
def test_every_kind_of_step_is_recorded(lab, recording, changes):
    assert_same_steps(lab, lab.spec(**changes), recording)


def test_a_resumed_run_of_recorded_steps_leaves_the_plain_run_s_files(lab, recording):
    spec = lab.spec(seed=3)
    lab.train(spec, steps=5)
    resumed = lab.train(spec)
    rows, weights = resumed.metrics_file.read_bytes(), final_weights(resumed)
    recording(NEVER)
    lab.pool = lab.pool.with_name("plain")
    plain = lab.train(spec)
    assert plain.metrics_file.read_bytes() == rows
    assert same(final_weights(plain), weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "t", "layers": 2, "width": 16, "heads": 2, "positions": 16, "dropout": 0.1}},
        {"plugins": ["tests.training.weighted"]},
    ],
    ids=("dropout", "a plugin, whose code may count its calls"),
)
def test_steps_that_may_differ_are_not_recorded(lab, recording, changes):
    assert lab.replica(lab.spec(**changes))._captured is None


def test_a_pass_of_several_processes_is_not_recorded(lab, recording, monkeypatch):
    """A recording computes the first steps twice: the helpers would wait for ever, or send to another step."""
    monkeypatch.setattr(shared, "Helpers", lambda *_, **__: None)
    spec = lab.spec(batch=4, microbatch=2)
    assert lab.replica(spec)._captured is not None
    devices = shared.SharedDevices(spec, lab.cache, torch.device("cpu"), 2)
    assert lab.replica(spec, devices)._captured is None


def test_a_model_with_a_state_of_its_own_is_not_recorded(lab, recording, monkeypatch):
    """As of a batch norm: a pass that is computed twice to compare would change it twice."""

    def build(*args):
        model = build_model(*args)
        model.register_buffer("mean", torch.zeros(1))
        return model

    build_model = step_module.build_model
    monkeypatch.setattr(step_module, "build_model", build)
    assert lab.replica(lab.spec())._captured is None


def test_a_short_run_is_not_recorded(lab, recording):
    spec = lab.spec(steps=20)
    recording(20)
    assert lab.replica(spec)._captured is not None
    recording(21)
    assert lab.replica(spec)._captured is None


def test_a_step_that_draws_is_a_plain_one(lab, recording):
    def replica_that_draws():
        replica = lab.replica(lab.spec())
        replica.model.register_forward_hook(lambda _, inputs, found: found + 0.1 * torch.randn_like(found))
        return replica

    drawing = replica_that_draws()
    recording(NEVER)
    assert take_steps(drawing) == take_steps(replica_that_draws())
    assert drawing._captured is None


def test_a_step_whose_code_takes_another_branch_later_is_a_plain_one_from_there_on(lab, recording):
    sums = []  # of each step's tokens

    def replica_with(scale):
        replica = lab.replica(lab.spec())
        replica.model.register_forward_hook(lambda _, inputs, found: found * scale(inputs[0].sum()))
        return replica

    recording(NEVER)
    take_steps(replica_with(lambda total: sums.append(total.clone()) or 1.0))
    scale = lambda total: 2.0 if bool(total == sums[-1]) else 1.0  # noqa: E731 - a number that the code reads
    plain = take_steps(replica_with(scale))
    recording(1)
    branching = replica_with(scale)
    assert [branching.train_step(step) for step in range(1, STEPS)] == plain[:-1]
    assert branching._captured is not None
    assert branching.train_step(STEPS) == plain[-1]
    assert branching._captured is None


def test_batches_of_ever_new_shapes_are_computed_plainly(lab, recording, monkeypatch):
    monkeypatch.setattr(captured, "MOST_SHAPES", 0)
    shaped = lab.replica(lab.spec())
    recording(NEVER)
    assert take_steps(shaped) == take_steps(lab.replica(lab.spec()))
    assert shaped._captured is None


def test_a_pass_of_many_bytes_is_not_recorded(monkeypatch):
    monkeypatch.setattr(captured, "MOST_RECORDED", 1 << 20)
    parameter = torch.nn.Parameter(torch.ones(1 << 18))

    def run():
        parameter.grad = None
        total = (parameter * 2).exp().sum()
        total.backward()
        return [total.detach()], [parameter.grad]

    with pytest.raises(Uncaptured, match="^intermediate results exceed 1 MiB$"):
        capture_on_cpu(run)


def test_a_replay_takes_the_new_batch_and_the_parameters_of_now():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    backward = CapturedBackward(squares(parameters), parameters, capture_on_cpu)
    for turn, weights in enumerate(([[1.0, 2.0]], [[5.0, -1.0]], [[0.5, 0.25]], [[3.0, 7.0]])):
        (total,) = backward(examples_of(torch.tensor(weights)))
        scale = torch.tensor(weights[0]) * 2.0**turn
        torch.testing.assert_close(parameters[0].grad, 2 * scale, rtol=0, atol=0)
        torch.testing.assert_close(total, (scale * 2.0**turn).sum(), rtol=0, atol=0)
        assert parameters[1].grad is None, "no gradient reaches it, as in a plain pass"
        parameters[0].grad.mul_(1e-3)  # clipping is in place
        with torch.no_grad():
            parameters[0].mul_(2)


def squares(parameters):
    """A pass with the gradient 2·weights·w."""

    def compute(examples):
        total = (examples.weights_BN * parameters[0] ** 2).sum()
        total.backward()
        return (total.detach(),)

    return compute


@pytest.mark.parametrize("after", [0, 1], ids=("in the first replay", "in the second"))
def test_a_pass_that_python_changes_is_noticed(after):
    """Its number of calls is no tensor: a recording would hold the first one for ever."""
    parameters, calls = [torch.nn.Parameter(torch.ones(2))], []

    def compute(examples):
        calls.append(1)
        return line(parameters, 3.0 if len(calls) <= 1 + after else 4.0)(examples)

    backward = CapturedBackward(compute, parameters, capture_on_cpu)
    batch = examples_of(torch.ones(1, 2))
    for _ in range(after):
        backward(batch)
    with pytest.raises(Uncaptured), pytest.warns(UserWarning, match=OTHER_NUMBERS):
        backward(batch)


@pytest.mark.parametrize("scale", [math.nan, -0.0, math.inf])
def test_numbers_that_are_not_finite_are_recorded_too(scale):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    backward = CapturedBackward(line(parameters, scale), parameters, capture_on_cpu)
    for _ in range(3):
        backward(examples_of(torch.ones(1, 2)))
    torch.testing.assert_close(parameters[0].grad, torch.full((2,), scale), rtol=0, atol=0, equal_nan=True)


def test_a_zero_of_the_other_sign_is_another_number():
    parameters, calls = [torch.nn.Parameter(torch.ones(2))], []

    def compute(examples):
        calls.append(1)
        total = (parameters[0] * (0.0 if len(calls) == 1 else -0.0)).sum()
        total.backward()
        return (total.detach(),)

    with pytest.raises(Uncaptured), pytest.warns(UserWarning, match=OTHER_NUMBERS):
        CapturedBackward(compute, parameters, capture_on_cpu)(examples_of(torch.ones(1, 2)))


def test_a_gradient_that_only_a_later_pass_has_is_noticed():
    parameters, calls = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], []

    def compute(examples):
        calls.append(1)
        total = (examples.weights_BN * parameters[0]).sum()
        if len(calls) > 1:
            total = total + 0 * parameters[1].sum()
        total.backward()
        return (total.detach(),)

    with pytest.raises(Uncaptured), pytest.warns(UserWarning, match=OTHER_NUMBERS):
        CapturedBackward(compute, parameters, capture_on_cpu)(examples_of(torch.ones(1, 2)))


def test_a_pass_that_draws_from_python_is_not_recorded():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    backward = CapturedBackward(
        lambda examples: line(parameters, random.random())(examples), parameters, capture_on_cpu
    )
    with pytest.raises(Uncaptured, match="^random numbers are drawn$"):
        backward(examples_of(torch.ones(1, 2)))


def test_a_pass_whose_numbers_are_checked_is_not_recorded():
    """A singular matrix is an error in the plain pass; a replay would go on with NaN."""
    matrix = torch.nn.Parameter(torch.eye(2))

    def compute(examples):
        total = torch.linalg.inv(matrix * examples.weights_BN).sum()
        total.backward()
        return (total.detach(),)

    with pytest.raises(Uncaptured, match="checks numbers$"):
        CapturedBackward(compute, [matrix], capture_on_cpu)(examples_of(torch.ones(1, 2)))
