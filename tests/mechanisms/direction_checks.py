"""The contract's question whether a mixer tells a text from its mirror image: trained on pairs of letters of which the
second follows from the first, it is surer of a wrong letter than of none where the pairs stand the other way round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stability.models.block import split_loss

LETTERS, NUM_POSITIONS, SEQUENCES = 8, 16, 16
STEPS, LEARNING_RATE = 150, 1e-2
WIDTH, HEADS = 16, 2
# nats, of the log 8 that a letter holds: what the mirror image costs a mixer that tells it, at least, and a blind one, at most
TOLD, BLIND = math.log(LETTERS) / 4, math.log(LETTERS) / 6


class Text(NamedTuple):
    """Letters, and where one is hidden (or, causal, to be foretold) that follows from the one before it."""

    tokens_BN: Tensor
    asked_BN: Tensor

    def mirrored(self) -> Text:
        return Text(self.tokens_BN.flip(1), self.asked_BN.flip(1))


def drawn(sequences: int, seed: int, causal: bool) -> Text:
    """Draw pairs (a, a + 1), a at random, cut at a random place: the letter after a pair says nothing of it. Hidden are
    half of the second letters, no first or last position; causal ones are asked for all of them."""
    generator = torch.Generator().manual_seed(seed)
    first_BP = torch.randint(LETTERS, (sequences, NUM_POSITIONS // 2 + 1), generator=generator)
    pairs_BM = torch.stack([first_BP, (first_BP + 1) % LETTERS], 2).flatten(1)
    place_BN = torch.randint(2, (sequences, 1), generator=generator) + torch.arange(NUM_POSITIONS)
    asked_BN = place_BN % 2 == 1
    if not causal:
        asked_BN &= torch.rand(asked_BN.shape, generator=generator) < 0.5
    asked_BN[:, [0, -1]] = False
    return Text(pairs_BM.gather(1, place_BN), asked_BN)


class Reader(nn.Module):
    """One mixer between an embedding and a head; positions are the mixer's own affair."""

    def __init__(self, mixer: nn.Module, causal: bool):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(LETTERS + 1, WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.head, self.causal = mixer, nn.Linear(WIDTH, LETTERS), causal

    def nll(self, text: Text) -> Tensor:
        """Return the mean NLL, in nats, of the letters that are asked for."""
        hidden_BN = text.tokens_BN.masked_fill(text.asked_BN & (not self.causal), LETTERS)
        x_BND = self.embedding(hidden_BN)
        x_BND = x_BND + split_loss(self.mixer(self.norm(x_BND)), [])
        logits_BNV = self.head(F.layer_norm(x_BND, (WIDTH,)))
        if self.causal:
            asked_BN = text.asked_BN[:, 1:]
            return F.cross_entropy(logits_BNV[:, :-1][asked_BN], text.tokens_BN[:, 1:][asked_BN])
        return F.cross_entropy(logits_BNV[text.asked_BN], text.tokens_BN[text.asked_BN])


def cost_of_the_mirror_image(build: Callable[[], nn.Module], causal: bool, steps: int = STEPS) -> float:
    """Return the NLL of the mirrored text minus that of the text itself, after some steps on the latter, or as soon as
    it is twice what tells them apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reader = Reader(build(), causal)
        optimizer, cost = torch.optim.AdamW(reader.parameters(), lr=LEARNING_RATE), 0.0
        held_out = drawn(4 * SEQUENCES, steps, causal)
        for step in range(steps):
            optimizer.zero_grad()
            reader.nll(drawn(SEQUENCES, step, causal)).backward()
            optimizer.step()
            if (step + 1) % 10 and step + 1 < steps:
                continue
            with torch.no_grad():
                cost = float(reader.nll(held_out.mirrored()) - reader.nll(held_out))
            if cost > 2 * TOLD:
                break
    return cost


def check_the_mirror_image_is_told(
    build: Callable[[], nn.Module], *, causal: bool = False, blind: bool, steps: int = STEPS
) -> None:
    """A mixer tells a text from its mirror image, or says of itself that it is blind, and then hardly does."""
    cost = cost_of_the_mirror_image(build, causal, steps)
    is_as_said = cost < BLIND if blind else cost > TOLD
    assert is_as_said, f"mirrored, the text costs {cost:.2f} nats more, and blind_to_order is {blind}"
