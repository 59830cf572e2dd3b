"""Recorded losses: the numbers of the loss itself, and refusals where its operations may differ."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from stability.curvature import GradientWithGraph, RecordedLoss, directional, loss_along
from stability.curvature.tape import Refused, Tape


class Net(nn.Module):
    """Embedding, attention, LayerNorm, GELU: views, in-place rules, products, softmax, constants."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.qkv = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        x = self.tokens(tokens) + torch.linspace(-1, 1, tokens.shape[1])[:, None].cos()
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return (x + self.down(F.gelu(self.up(x)))) @ self.tokens.weight.T


@pytest.fixture
def case():
    torch.manual_seed(0)
    net = Net()
    params = {name: param.detach() for name, param in net.named_parameters()}
    u = {name: torch.randn_like(param) for name, param in params.items()}

    def loss(at, batch):
        logits = functional_call(net, at, (batch,))
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()

    return loss, params, u


def batches_of(count, rows=3):
    return [torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def moved(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: param + 0.1 * torch.randn(param.shape, generator=generator) for name, param in params.items()}


def test_every_run_gives_the_losss_own_numbers(case):
    loss, params, u = case
    recorded = RecordedLoss(loss)
    for seed, batch in enumerate(batches_of(4)):
        at = moved(params, seed)
        mine, own = (directional(fn, at, u, "taylor", batches=[batch]) for fn in (recorded, loss))
        assert (mine.loss, mine.slope, mine.curvature) == pytest.approx((own.loss, own.slope, own.curvature), rel=1e-5)
        mine, own = (GradientWithGraph(fn, at, [batch]).gradient() for fn in (recorded, loss))
        torch.testing.assert_close(mine, own)
        mine, own = (loss_along(fn, at, u, [0.0, 0.01], batches=[batch]) for fn in (recorded, loss))
        assert mine == pytest.approx(own, rel=1e-5)


def test_several_microbatches_and_shapes_are_summed_as_without_a_recording(case):
    loss, params, u = case
    recorded, batches = RecordedLoss(loss), [*batches_of(3), *batches_of(2, rows=2)]
    for seed in range(3):
        at = moved(params, seed)
        mine, own = (directional(fn, at, u, "taylor", batches=batches) for fn in (recorded, loss))
        assert (mine.loss, mine.slope, mine.curvature) == pytest.approx((own.loss, own.slope, own.curvature), rel=1e-5)
        # a run overwrites the memory of the one before
        mine, own = (GradientWithGraph(fn, at, batches).gradient() for fn in (recorded, loss))
        torch.testing.assert_close(mine, own)


def test_central_differences_agree_in_float64(case):
    loss, params, u = case
    params, u = ({name: tensor.double() for name, tensor in given.items()} for given in (params, u))
    recorded, batches = RecordedLoss(loss), batches_of(3)
    for batch in batches:
        found = directional(recorded, params, u, "taylor", batches=[batch])
    h = 1e-4
    below, at, above = loss_along(loss, params, u, [-h, 0.0, h], batches=[batches[-1]])
    assert found.loss == pytest.approx(at, rel=1e-12)
    assert found.slope == pytest.approx((above - below) / (2 * h), rel=1e-6)
    assert found.curvature == pytest.approx((above - 2 * at + below) / h**2, rel=1e-4)


def test_a_branch_on_numbers_is_never_run_with_the_other_branchs_operations():
    w = {"w": torch.tensor([1.0, 2.0])}

    def loss(at, x):
        return ((at["w"] * x).square() if (x > 0).all() else 3 * at["w"] * x).sum(), 1

    recorded = RecordedLoss(loss)
    for x in (torch.ones(2), 2 * torch.ones(2), -torch.ones(2), 3 * torch.ones(2), torch.tensor([1.0, -1.0])) * 2:
        mine, own = (directional(fn, w, w, "taylor", batches=[x]) for fn in (recorded, loss))
        assert (mine.loss, mine.slope, mine.curvature) == (own.loss, own.slope, own.curvature)


def test_a_guard_reads_the_number_of_its_own_moment():
    def function(inputs):
        total = inputs[0] * 1
        branch = bool(total.sum() > 0)
        total.sub_(100)
        return [total if branch else -total]

    tape = Tape(function, [torch.ones(2)])
    assert tape.run([2 * torch.ones(2)]) and tape.outputs[0].tolist() == [-98, -98]
    assert not tape.run([-torch.ones(2)])


def test_a_batch_that_the_loss_holds_itself_is_noticed():
    held = []
    w = {"w": torch.tensor([1.0, 2.0])}
    recorded = RecordedLoss(lambda at: (at["w"] * held[-1]).square().sum())
    with pytest.warns(RuntimeWarning, match="gave other numbers"):
        for number in range(1, 9):
            held.append(torch.full((2,), float(number)))
            assert directional(recorded, w, w, "taylor").loss == pytest.approx(5.0 * number**2)


def test_buffers_are_read_anew_and_not_shared():
    scale, shared, w = torch.ones(2), {}, {"w": torch.tensor([1.0, 2.0])}
    recorded = RecordedLoss(lambda at: (at["w"] * scale).square().sum(), shared)
    for number in range(1, 6):
        scale.fill_(number)
        assert directional(recorded, w, w, "taylor").loss == pytest.approx(5.0 * number**2)
    assert not shared


def test_a_recording_that_holds_much_memory_is_not_shared(monkeypatch):
    monkeypatch.setattr("stability.curvature.recorded._MOST_SHARED", 7)  # the parameters alone have eight bytes
    shared, w = {}, {"w": torch.tensor([1.0, 2.0])}
    directional(RecordedLoss(lambda at: at["w"].square().sum(), shared), w, w, "taylor")
    assert not shared


def test_shared_recordings_are_compared_with_each_losss_own_numbers():
    shared, w, x = {}, {"w": torch.tensor([1.0, 2.0])}, torch.tensor([1.0, 3.0])
    for factor in (1.0, 2.0):  # the same operations, another constant
        recorded = RecordedLoss(lambda at, batch, factor=factor: ((at["w"] * batch * factor).square().sum(), 1), shared)
        for scale in (1.0, 2.0, 3.0):
            found = directional(recorded, w, w, "taylor", batches=[scale * x])
            assert found.loss == pytest.approx(37 * (factor * scale) ** 2)
    assert len(shared) == 1


def random_scale(x):
    return x * random.random()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, True),
        random_scale,
        lambda x: x[x > 0],
        lambda x: x * x.tolist()[0],
        lambda x: x * float(x.detach().numpy()[0]),
        lambda x: x.add_(1),
        lambda x: torch.complex(x, x).abs(),
        lambda x: (x * 1).unsqueeze_(0),
    ],
)
def test_what_a_recording_cannot_repeat_is_refused(function):
    with pytest.raises(Refused):
        Tape(lambda inputs: [function(inputs[0])], [torch.ones(3)])


def test_a_loss_with_dropout_is_evaluated_as_it_is():
    w = {"w": torch.ones(50)}

    def loss(at):
        return F.dropout(at["w"], 0.5, True).square().sum()

    recorded = RecordedLoss(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            torch.manual_seed(seed)
            assert directional(recorded, w, w, "taylor") == directional(loss, w, w, "taylor")


def test_constants_are_not_computed_again_and_memory_is_reused():
    def function(inputs):
        x = inputs[0]
        for power in range(20):
            x = x * torch.arange(1000.0).cos().add_(power)
        return [x]

    tape = Tape(function, [torch.ones(1000)])
    assert len(tape._calls) == 20
    assert tape.num_bytes == 2 * 4000  # two that alternate
    assert tape.run([torch.full((1000,), 2.0)])
    torch.testing.assert_close(tape.outputs[0], function([torch.full((1000,), 2.0)])[0])


def test_a_zeroed_buffer_is_zero_in_every_run():
    def function(inputs):
        total = torch.zeros(3)
        for _ in range(2):
            total += inputs[0]
        return [total]

    tape = Tape(function, [torch.ones(3)])
    for number in (1.0, 2.0):
        assert tape.run([torch.full((3,), number)])
        assert tape.outputs[0].tolist() == [2 * number] * 3
