"""The replay's slope against that of the gradient that the optimizer stepped by: a note where they disagree, and none
where a loop only rescales its gradients."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.curvature import AlphaMaxMonitor


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Words(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def batch_of(model):
    x = torch.randint(5, (8, 4)) if isinstance(model, Words) else torch.randn(8, 4)
    return x, torch.randint(3, (8,))


def train(block, model=None, optimizer=torch.optim.AdamW, loss_fn=classify, steps=3, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = optimizer((param for param in model.parameters() if param.requires_grad), lr=0.05)
    monitor = AlphaMaxMonitor(model, optimizer, loss_fn, **options)
    for _ in range(steps):
        batch = batch_of(model)
        with monitor.step(batch):
            block(model, optimizer, batch)
    assert len(monitor.history) == steps
    return [row.note for row in monitor.history]


def backward(model, optimizer, batch, scale=1.0):
    optimizer.zero_grad()
    (scale * classify(model, batch)).backward()


def plain(model, optimizer, batch):
    backward(model, optimizer, batch)
    optimizer.step()


def clipped(model, optimizer, batch):
    backward(model, optimizer, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def scaled(model, optimizer, batch):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer.zero_grad()
    scaler.scale(classify(model, batch)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()


def by_value(model, optimizer, batch):
    backward(model, optimizer, batch)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()


def by_hand(model, optimizer, batch):
    grads = torch.autograd.grad(classify(model, batch), list(model.parameters()))
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad.sign()
    optimizer.step()


def sharpness_aware(model, optimizer, batch):
    backward(model, optimizer, batch)
    shifts = [0.5 * param.grad for param in model.parameters()]
    with torch.no_grad():
        for param, shift in zip(model.parameters(), shifts, strict=True):
            param.add_(shift)
    backward(model, optimizer, batch)
    with torch.no_grad():
        for param, shift in zip(model.parameters(), shifts, strict=True):
            param.sub_(shift)
    optimizer.step()


def averaged_weights(model, optimizer, batch):
    start = [param.detach().clone() for param in model.parameters()]
    plain(model, optimizer, batch)
    with torch.no_grad():
        for param, old in zip(model.parameters(), start, strict=True):
            param.lerp_(old, 0.7)


def twice(model, optimizer, batch):
    plain(model, optimizer, batch)
    plain(model, optimizer, batch)


@pytest.mark.parametrize(
    "block",
    [plain, clipped, scaled, by_value, by_hand, sharpness_aware, averaged_weights],
    ids=lambda block: block.__name__,
)
@pytest.mark.parametrize("method", ["auto", "finite_difference"])
def test_what_a_loop_does_to_its_gradients_is_no_disagreement(block, method):
    assert train(block, method=method) == [None] * 3


def test_other_parameters_and_optimizers_are_no_disagreement():
    frozen = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    frozen[0].weight.requires_grad_(False)
    assert train(clipped, frozen) == [None] * 3
    assert train(plain, Words()) == [None] * 3
    assert train(plain, Words(sparse=True), torch.optim.SGD) == [None] * 3
    assert train(clipped, optimizer=lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=5.0)) == [None] * 3
    assert train(plain, optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=1.0)) == [None] * 3
    assert train(twice, steps=1) == ["optimizer.step() was called 2 times; u is their sum"]

    def closure(model, optimizer, batch):
        optimizer.step(lambda: backward(model, optimizer, batch) or classify(model, batch))

    assert train(closure, optimizer=torch.optim.LBFGS) == [None] * 3


@pytest.mark.parametrize("weigh", [1.0, 0.5], ids=["added", "averaged"])
def test_accumulated_losses_may_be_added_or_averaged(weigh):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, classify)
    for index in range(4):
        batch = batch_of(model)
        with monitor.step(batch, accumulate=index % 2 == 0):
            (weigh * classify(model, batch)).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert [row.note for row in monitor.history] == [None, None]


def smoothed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.3)


@pytest.mark.parametrize("block", [plain, clipped, scaled], ids=lambda block: block.__name__)
def test_another_loss_than_the_loops_is_noted(block):
    for note in train(block, loss_fn=smoothed, optimizer=torch.optim.SGD):
        assert "the gradient that the optimizer stepped by has the slope" in note


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_the_first_disagreement_of_a_monitor_is_its_only_warning(factor):
    """Of a loss_fn that is the loop's but for a factor; the loop's own loss gives none."""
    with pytest.warns(RuntimeWarning) as given:
        notes = train(plain, loss_fn=lambda model, batch: factor * classify(model, batch))
    assert [str(warning.message) for warning in given] == [
        f"AlphaMaxMonitor: at step 0, {notes[0]}; later rows say so in their note only"
    ]
    assert given[0].filename == __file__ and all("loss_fn is not the loss of this step" in note for note in notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(plain) == [None] * 3


def test_a_step_that_was_not_measured_does_not_silence_a_disagreement():
    def loss_fn(model, batch):
        calls.append(batch)
        if len(calls) == 1:
            raise ArithmeticError("not this one")
        return 2 * classify(model, batch)

    calls = []
    with pytest.warns(RuntimeWarning) as given:
        train(plain, loss_fn=loss_fn)
    said = [str(warning.message) for warning in given]
    assert len(said) == 2 and "step 0 was not measured" in said[0] and "at step 1, the gradient" in said[1]


def test_a_disagreement_that_is_raised_leaves_its_row():
    """As under ``python -W error``."""
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="loss_fn is not the loss"):
            train(plain, loss_fn=lambda model, batch: 2 * classify(model, batch), log=rows.append)
    assert [row["method"] for row in rows] == ["taylor"]


def test_a_forward_pass_that_does_not_repeat_is_noted():
    def forgetful(model, batch):
        model.calls = getattr(model, "calls", 0) + 1
        return classify(model, batch) / model.calls

    def block(model, optimizer, batch):
        model.calls = 0
        optimizer.zero_grad()
        forgetful(model, batch).backward()
        optimizer.step()

    assert all("does not repeat its forward pass" in note for note in train(block, loss_fn=forgetful))


@pytest.mark.parametrize("amplitude", [0.0, 1.0])
def test_differences_compare_the_slope_with_that_of_the_loss_itself(amplitude):
    """A straight-through round: its gradient is not the derivative of its loss."""

    def loss_fn(model, batch):
        weight = model.weight + amplitude * (model.weight.round() - model.weight).detach()
        return F.cross_entropy(F.linear(batch[0], weight, model.bias), batch[1])

    def block(model, optimizer, batch):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    notes = train(block, nn.Linear(4, 3), torch.optim.SGD, loss_fn, method="finite_difference")
    if amplitude:
        assert all("its gradient is not its derivative" in note for note in notes)
    else:
        assert notes == [None] * 3
