"""The mirror image of examples: by hand-made lists, and by models of which the direction that they read is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from stability.corpora.proteins.alphabets import BOS, EOS, MASK, PAD
from stability.corpora.proteins.batch import batch_of
from stability.objectives.multitrack import ALIGNED
from stability.registry import Registry
from tests.objectives.subjects import subject
from tests.objectives.test_multitrack import generator, objective, protein, some_proteins
from tests.within import assert_within

WITH_A_MIRROR = [("mlm", {}), ("mlm", {"corruption": "bert"}), ("score_entropy", {}), ("score_entropy", {"graph": "uniform"})]  # fmt: skip


class Bigram(nn.Module):
    """Logits of a position by its neighbour at ``offset`` alone; a row of their own beyond the text's end."""

    def __init__(self, num_inputs: int, num_outputs: int, offset: int):
        super().__init__()
        table = torch.randn(num_inputs + 1, num_outputs, dtype=torch.float64, generator=generator(1))
        self.table, self.offset = nn.Parameter(table), offset

    def forward(self, inputs_BN: Tensor, sigma_B: Tensor | None = None) -> Tensor:
        beyond_B1 = torch.full_like(inputs_BN[:, :1], len(self.table) - 1)
        padded = [beyond_B1, inputs_BN[:, :-1]] if self.offset < 0 else [inputs_BN[:, 1:], beyond_B1]
        return self.table[inputs_BN if self.offset == 0 else torch.cat(padded, 1)]


def nats(row_V: Tensor, token: int) -> float:
    values = row_V.tolist()
    return math.log(sum(math.exp(value) for value in values)) - values[token]


def mean_loss(own, model, examples) -> float:
    total, count = own.loss(model, examples)
    return float((total / count).detach())


@pytest.mark.parametrize(("name", "settings"), WITH_A_MIRROR)
def test_what_reads_its_left_neighbour_reads_the_right_one_of_the_mirror_image(name, settings):
    """The loss of a table of left neighbours on the mirror image is that of the same table of right ones."""
    own, batch, _ = subject(name, **settings)
    examples = own.examples(batch, generator(2))
    left, right = (Bigram(own.num_inputs, own.num_outputs, offset) for offset in (-1, 1))
    found, truth = mean_loss(own, left, own.mirrored(examples)), mean_loss(own, right, examples)
    assert_within(abs(found - truth), 1e-12 * abs(truth))
    assert abs(found - mean_loss(own, left, examples)) > 1e-3, "this table tells the directions apart"


@pytest.mark.parametrize(("name", "settings"), WITH_A_MIRROR)
def test_what_reads_no_neighbour_has_the_same_loss_on_the_mirror_image(name, settings):
    own, batch, _ = subject(name, **settings)
    examples = own.examples(batch, generator(2))
    blind = Bigram(own.num_inputs, own.num_outputs, 0)
    one, other = mean_loss(own, blind, examples), mean_loss(own, blind, own.mirrored(examples))
    assert_within(abs(one - other), 1e-12 * abs(one))


def test_the_nll_of_a_masked_text_and_of_its_mirror_image_are_those_of_a_slow_loop():
    own, batch, _ = subject("mlm")
    examples = own.examples(batch, generator(2))
    model = Bigram(own.num_inputs, own.num_outputs, -1)
    for mirrored, step in ((False, -1), (True, 1)):
        total = 0.0
        for row, tokens in enumerate(batch.tolist()):
            seen = examples.inputs_BN[row].tolist()
            hidden = [place for place, token in enumerate(seen) if token == own.mask_id]
            for place in hidden:
                beside = place + step
                known = seen[beside] if 0 <= beside < len(seen) else own.num_inputs
                total += nats(model.table[known], tokens[place]) / len(hidden)
        found = mean_loss(own, model, own.mirrored(examples) if mirrored else examples)
        assert found == pytest.approx(total / len(batch), rel=1e-6), "weights of examples are float32"


def test_autoregression_predicts_the_reversed_text_from_left_to_right():
    own, batch, _ = subject("ar")
    model = Bigram(own.num_inputs, own.num_outputs, 0)  # the next token by the one that is read
    examples = own.examples(batch, generator(0))
    for shown, texts in ((examples, batch.tolist()), (own.mirrored(examples), [row[::-1] for row in batch.tolist()])):
        losses = [nats(model.table[one], after) for text in texts for one, after in zip(text, text[1:], strict=False)]
        assert mean_loss(own, model, shown) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert shown.inputs_BN.tolist() == [text[:-1] for text in texts]


def test_a_context_is_read_backwards_too():
    own, batch, _ = subject("mlm", context=3)
    examples = own.examples(batch, generator(0))
    assert own.mirrored(examples).context_BJ.tolist() == [row[:3][::-1] for row in batch.tolist()]


def test_of_a_protein_residues_are_reversed_between_bos_and_eos_and_words_stay():
    chains = [*some_proteins(), protein("d", "ACD", 4)]
    own = objective()
    examples = own.examples(batch_of(chains), generator(5))
    found = own.mirrored(examples)

    def turned(row: list, chain) -> list:
        num = len(chain)
        return [row[0], *row[1 : num + 1][::-1], *row[num + 1 :]]

    pairs = [
        *zip(examples.inputs_BN.sources, found.inputs_BN.sources, strict=True),
        (examples.targets_BN, found.targets_BN),
        (examples.weights_BN, found.weights_BN),
    ]
    for name, before, after in zip(
        own.config.contexts, examples.inputs_BN.contexts, found.inputs_BN.contexts, strict=True
    ):
        if name in ALIGNED:
            pairs += zip(before, after, strict=True)
        else:
            assert all(torch.equal(*both) for both in zip(before, after, strict=True)), name
    assert len(pairs) == 2 + 2 + 2 * len(ALIGNED)
    for before, after in pairs:
        for row, chain in enumerate(chains):
            assert after[row].tolist() == turned(before[row].tolist(), chain)
    assert torch.equal(found.mask_BN, examples.mask_BN)
    for row, chain in enumerate(chains):
        sequence = found.inputs_BN.sources[0][row].tolist()
        assert sequence[0] == BOS and sequence[len(chain) + 1] == EOS
        assert set(sequence[len(chain) + 2 :]) <= {PAD}
        assert [token == MASK for token in sequence] == (found.weights_BN[row, :, 0] > 0).tolist()
    again = own.mirrored(found)
    assert all(torch.equal(*both) for both in zip(again.inputs_BN.sources, examples.inputs_BN.sources, strict=True))


@pytest.mark.parametrize(
    ("name", "why"),
    [("recall", "an answer stands before what it answers"), ("classify", "patches of an image, not of a text")],
)
def test_what_has_no_mirror_image_says_why_in_a_line(name, why):
    own, batch, _ = subject(name)
    with pytest.raises(ValueError, match=f"objective={name} has no mirror image: .*{why}") as caught:
        own.mirrored(own.examples(batch, generator(0)))
    assert len(str(caught.value).splitlines()) == 1


def test_every_objective_says_whether_it_has_a_mirror_image():
    for name in Registry("objectives").names():
        made = Registry("objectives").load(name)
        assert "without_mirror" in vars(made) and ("mirrored" in vars(made)) == (made.without_mirror is None), name
