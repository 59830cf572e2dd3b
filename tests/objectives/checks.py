"""The contract of every objective, as plain functions that raise AssertionError: the faults in `faults.py` prove that
each of them bites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from stability.curvature import NoRule, directional
from tests.objectives.subjects import Subject
from tests.within import assert_within

SAMPLERS = frozenset({"ar", "top_prob", "random", "analytic", "euler"})  # which stability.probes.generation has


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def examples_of(subject: Subject, seed: int = 0) -> Any:
    """Return the examples of a training batch, their numbers in float64 as the model's."""
    draws = generator(seed)
    examples = subject.objective.examples(subject.objective.augmented(subject.batch, draws), draws)
    return examples.map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tuple(value)) if isinstance(leaf, Tensor)]


def equal(first: Any, second: Any) -> bool:
    ours, theirs = tensors(first), tensors(second)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def check_microbatches_add_up(subject: Subject) -> None:
    """Sums and counts of any microbatches make those of the batch, and the loss is their quotient whichever way."""
    examples = examples_of(subject)
    total, count = subject.objective.loss(subject.model, examples)
    assert total.shape == count.shape == torch.Size(), "a sum or a count is no scalar"
    assert total.isfinite() and count > 0
    assert torch.equal(count, subject.objective.count(examples, total.dtype)), "count and loss_sum disagree"
    for rows in (1, 4):
        pairs = [subject.objective.loss(subject.model, part) for part in examples.split(rows)]
        sums = torch.stack([torch.stack(pair) for pair in pairs]).sum(0)
        whole = torch.stack((total, count))
        assert torch.allclose(sums, whole, rtol=1e-12, atol=0), f"parts of {rows} rows make {sums} of {whole}"


def check_loss_is_a_mean(subject: Subject) -> None:
    """A batch with every row twice has the same loss."""
    objective, examples = subject.objective, examples_of(subject)
    logits = examples.logits(subject.model)
    once, count = objective.loss_sum(logits, examples)
    twice, more = objective.loss_sum(torch.cat([logits, logits]), examples.map_tensors(lambda x: torch.cat([x, x])))
    assert torch.allclose(twice / more, once / count, rtol=1e-12), "the loss depends on the size of the batch"


def check_generator_decides(subject: Subject) -> None:
    """The same generator gives the same examples whatever the global random state is; another one gives others, where
    anything is drawn; and the batch stays as it was."""
    before = [tensor.clone() for tensor in tensors(_fields(subject.batch))]
    drawn = []
    for global_seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            drawn.append(examples_of(subject))
    assert equal(before, _fields(subject.batch)), "the batch was written to"
    assert equal(*drawn), "the examples depend on more than the generator"
    used = generator()
    subject.objective.examples(subject.objective.augmented(subject.batch, used), used)
    if not torch.equal(used.get_state(), generator().get_state()):
        assert not equal(drawn[0], examples_of(subject, 1)), "two seeds give the same examples"


def check_what_does_not_count_is_unread(subject: Subject) -> None:
    """Where no weight is, neither logits nor targets change the loss, and there is no gradient; padding has no weight,
    and what stands there is unread."""
    objective, examples = subject.objective, examples_of(subject)
    logits = examples.logits(subject.model).detach().requires_grad_()
    total, _ = objective.loss_sum(logits, examples)
    (gradient,) = torch.autograd.grad(total, logits)
    counts = examples.weights_BN if examples.weights_BN.ndim == 2 else examples.weights_BN.any(-1)
    unread_BN = counts == 0
    assert not gradient[unread_BN].count_nonzero(), "a position without weight has a gradient"
    other = objective.loss_sum(logits.detach().masked_fill(unread_BN[..., None], 50.0), examples)[0]
    assert torch.allclose(other, total, rtol=1e-12), "logits without weight change the loss"
    moved = examples._replace(targets_BN=examples.targets_BN.masked_fill(examples.weights_BN == 0, 0))
    assert torch.allclose(objective.loss_sum(logits, moved)[0], total, rtol=1e-12), "targets without weight are read"
    if examples.mask_BN is not None:
        if examples.mask_BN.ndim == unread_BN.ndim:  # else a weight is that of a whole sentence
            assert unread_BN[~examples.mask_BN].all(), "padding has a weight"
        losses = [_with_padding(subject, examples, content) for content in (0.0, 100.0)]
        assert torch.equal(*losses), "what stands in padding changes the loss"


def _with_padding(subject: Subject, examples: Any, content: float) -> Tensor:
    """Return the loss where every embedded padding position holds ``content``."""
    embedding = subject.model.get_submodule("embedding")
    padded_BN1 = ~examples.mask_BN.flatten(0, -2)[..., None]
    hook = embedding.register_forward_hook(lambda module, given, made: made.masked_fill(padded_BN1, content))
    try:
        return subject.objective.loss(subject.model, examples)[0]
    finally:
        hook.remove()


def check_second_derivatives(subject: Subject) -> None:
    """Taylor's slope and curvature of the loss, microbatch by microbatch, are those of double backward over the whole
    batch."""
    examples = examples_of(subject)
    params = {name: value.detach() for name, value in subject.model.named_parameters()}
    direction = {
        name: torch.randn(value.shape, generator=generator(number), dtype=value.dtype)
        for number, (name, value) in enumerate(params.items())
    }

    def loss(values: dict[str, Tensor], part: Any) -> tuple[Tensor, Tensor]:
        return subject.objective.loss(subject.model, part, values)

    try:
        found = directional(loss, params, direction, "taylor", batches=examples.split(4))
    except NoRule as error:
        raise AssertionError(f"taylor cannot differentiate the loss: {error}") from None
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        total, count = loss(leaves, examples)
        gradients = torch.autograd.grad(total / count, list(leaves.values()), create_graph=True)
        slope = torch.stack(
            [(gradient * step).sum() for gradient, step in zip(gradients, direction.values(), strict=True)]
        ).sum()
        products = torch.autograd.grad(slope, list(leaves.values()), materialize_grads=True)
    curvature = sum((product * step).sum() for product, step in zip(products, direction.values(), strict=True))
    for name, ours, theirs in (("slope", found.slope, slope), ("curvature", found.curvature, curvature)):
        expected = float(theirs)
        assert expected != 0, f"the {name} is zero, so that nothing is compared"
        assert_within(
            abs(ours - expected), 1e-9 * abs(expected), f"{name} {ours} by taylor, {expected} by double backward"
        )


def check_what_is_said(subject: Subject) -> None:
    """Words for tables, names of what is validated, and components that make the loss."""
    objective, examples = subject.objective, examples_of(subject)
    words = objective.words
    said = (*words.position, words.counted, words.nll, words.unit, words.baseline, words.baseline_nll)
    assert all(isinstance(word, str) and word for word in said), "a word is missing"
    assert objective.direction in ("causal", "bidirectional")
    total, count, scores = objective.validate(subject.model, examples)
    assert tuple(scores) == objective.score_names, f"{tuple(scores)} are validated, {objective.score_names} are named"
    assert all(name.startswith("val_") for name in scores)
    assert torch.allclose(torch.stack(objective.loss(subject.model, examples)), torch.stack((total, count)))
    if objective.components:
        sums = objective.component_sums(examples.logits(subject.model), examples)
        assert sums.shape == (len(objective.components),), f"{tuple(sums.shape)} sums for {objective.components}"
        assert torch.allclose(sums.sum(), total, rtol=1e-12), "the components do not make the loss"


def check_samplers(subject: Subject) -> None:
    """Each sampler is one that generation knows, and finds what it reads."""
    objective, model = subject.objective, subject.model
    assert set(objective.samplers) <= SAMPLERS, f"{objective.samplers}: generation knows {sorted(SAMPLERS)}"
    if "ar" in objective.samplers:
        assert objective.direction == "causal", "what is sampled from left to right must not read what comes"
    if {"top_prob", "random"} & set(objective.samplers):
        for probs, size in _probabilities(objective, model, subject.batch):
            assert probs.shape[-1] == size, f"{probs.shape[-1]} probabilities for {size} tokens"
            assert (probs >= 0).all(), "a probability is negative"
            assert torch.allclose(probs.sum(-1), torch.ones_like(probs[..., 0])), "probabilities do not sum to 1"
    if {"analytic", "euler"} & set(objective.samplers):
        tokens_BN = examples_of(subject).inputs_BN
        score_BNS = objective.log_score(model, tokens_BN, torch.full((len(tokens_BN),), 0.7, dtype=torch.float64))
        assert score_BNS.shape == (*tokens_BN.shape, objective.num_inputs)
        own = score_BNS.gather(-1, tokens_BN[..., None])
        assert not own.count_nonzero(), "a token's ratio to itself is not 1"


def _probabilities(objective: Any, model: nn.Module, batch: Any) -> list[tuple[Tensor, int]]:
    if isinstance(batch, Tensor):
        tokens_BN = batch[:, : batch.shape[1] - objective.num_context(objective.config)].clone()
        tokens_BN[:, ::2] = objective.mask_id
        return [(objective.clean_probs(model, tokens_BN), objective.num_outputs)]
    tracks = objective.track_probs(model, *objective.mask_all(batch))
    assert sum(probs.shape[-1] for probs in tracks) == objective.num_outputs, "tracks do not make the outputs"
    return [(probs, probs.shape[-1]) for probs in tracks]


def trace(subject: Subject) -> list[Any]:
    """Return what an objective does with a batch and a model, as plain values: what a setting may change."""
    objective, examples = subject.objective, examples_of(subject)
    shapes: list[tuple[int, ...]] = []
    loss_sum = objective.loss_sum

    def seen(logits: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(logits.shape))
        return loss_sum(logits, part)

    objective.loss_sum = seen
    try:
        losses = [float(item) for item in objective.loss(subject.model, examples)]
    finally:
        del objective.loss_sum
    return [
        [(tuple(tensor.shape), tensor.flatten().tolist()) for tensor in tensors(examples)],
        losses,
        float(objective.training_loss(subject.model, examples).total),
        shapes,
        {name: tuple(value.shape) for name, value in subject.model.named_parameters()},
        _read(objective),
    ]


def _read(objective: Any) -> str:
    """What it reads of prepared data, or how it refuses that a tokenizer is not there."""
    corpus = object()
    try:
        return "the corpus" if type(objective).reads(objective.config, corpus, Path("no pool")) is corpus else "more"
    except ValueError as error:
        return str(error)


def check_setting_changes_something(base: Subject, changed: Subject) -> None:
    assert trace(base) != trace(changed), "the setting changes neither examples, loss, its pieces nor the model"


def _fields(batch: Any) -> list[Any]:
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch) if isinstance(batch, tuple) else list(vars(batch).values())
