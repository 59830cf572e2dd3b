"""Answer from a deployed model: continue a text, fill masked tokens, or name an image's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stability.build import build_objective
from stability.config.deployment import InferSpec
from stability.config.parts import num_context_of
from stability.corpora.images.corpus import ImageBatch
from stability.corpora.images.folders import decode_image
from stability.corpora.proteins.batch import batch_of
from stability.corpora.proteins.chain import make_chain
from stability.deployed.folder import Deployed
from stability.deployed.tokens import CLASSES, RESIDUES, TEXT
from stability.models import BOS, EOS, MASK, SPECIALS, UNK
from stability.models.passes import computing_in, generator_for
from stability.models.tracks import frame_tokens
from stability.probes.generation.samplers import (
    Draws,
    apply_temperature,
    categorical,
    keep_likeliest,
    unmask,
    unmask_tracks,
)
from stability.training.machine import prepare_torch

Answer = dict[str, Any]
FIRST = len(SPECIALS)  # the first residue's token
OF_LETTERS = "_"  # stands for a masked nucleotide or residue


class Answerer:
    """A deployed model on a device, with a method for its objective.

    Attributes:
        answer: the answer to a text, or to an image's path, and its number among all; a dict of plain values.
        key: "text" or "image", the inputs' key in JSON lines.
    """

    def __init__(self, deployed: Deployed, spec: InferSpec, device: torch.device):
        prepare_torch(deployed.spec.threads, device, deployed.spec.precision)
        self.deployed, self.spec, self.device = deployed, spec, device
        self.model: Any = deployed.model.to(device)
        self.objective: Any = build_objective(deployed.spec, deployed.data_format)
        self.positions = deployed.spec.model.positions
        self.key = "image" if deployed.tokens.kind == CLASSES else "text"
        self.answer: Callable[[str, int], Answer] = self._choose()

    def _choose(self) -> Callable[[str, int], Answer]:
        """Return the method for the model's objective.

        Raises:
            ValueError: the objective's answers are no text and no class.
        """
        run, samplers = self.deployed.spec, self.objective.samplers
        if num_context_of(run.objective):
            raise ValueError(
                "the model reads a context beside its text (objective.context of run "
                f"{self.deployed.manifest['run']}), which infer does not give"
            )
        kind = self.deployed.tokens.kind
        if kind == CLASSES:
            return self._classify
        if kind == RESIDUES:
            return self._fill_residues
        if kind != "numbers" and "ar" in samplers:
            return self._continue
        if kind != "numbers" and self.objective.mask_id is not None and "top_prob" in samplers:
            return self._fill
        raise ValueError(
            f"objective={run.objective.name} on data={run.data.name} has no text to answer; infer answers for models "
            "that continue or fill text, DNA or proteins, and for image classes"
        )

    @torch.no_grad()
    def _continue(self, text: str, index: int) -> Answer:
        """Return a text's NLL per token after the first, and continuations."""
        tokens = self.deployed.tokens.encode(text).tolist()
        separator = self.deployed.tokens.separator
        if not tokens:
            if separator is None:
                raise ValueError("the text is empty; give at least one letter to continue")
            tokens = [separator]  # as before a document
        nats, number = self._score(tokens)
        answer: Answer = {"text": text, "nll": nats / number if number else None, "tokens": number}
        if self.spec.tokens:
            answer["continuations"] = [self.deployed.tokens.decode(row) for row in self._draw(tokens, index)]
        return answer

    def _score(self, tokens: Sequence[int]) -> tuple[float, int]:
        """Return the NLL in nats of all tokens after the first, in pieces as long as the model reads."""
        total = 0.0
        for start in range(0, len(tokens) - 1, self.positions):
            piece_1N = torch.tensor([tokens[start : start + self.positions + 1]], device=self.device)
            with computing_in(self.deployed.spec.precision, self.device):
                logits_1NV = self.model(piece_1N[:, :-1]).float()
            total += float(torch.nn.functional.cross_entropy(logits_1NV[0], piece_1N[0, 1:], reduction="sum"))
        return total, len(tokens) - 1

    def _draw(self, tokens: Sequence[int], index: int) -> list[list[int]]:
        """Return ``spec.num`` continuations; each token is drawn given the last ``positions`` before it."""
        generators = [generator_for(self.spec.seed, f"infer {index}", each) for each in range(self.spec.num)]
        draws = Draws(generators, self.device)
        rows_BN = torch.tensor([list(tokens)] * self.spec.num, device=self.device)
        for _ in range(self.spec.tokens):
            with computing_in(self.deployed.spec.precision, self.device):
                probs_BV = self.model(rows_BN[:, -self.positions :])[:, -1].double().softmax(-1)
            weights_BV = keep_likeliest(apply_temperature(probs_BV, self.spec.temperature), self.spec.top_p)
            rows_BN = torch.cat([rows_BN, categorical(weights_BV, draws.uniforms())[:, None]], 1)
        return rows_BN[:, len(tokens) :].tolist()

    @torch.no_grad()
    def _fill(self, text: str, index: int) -> Answer:
        """Return a text with its masks filled, the likeliest first, and each mask's likeliest tokens."""
        tokens, mask_id = self._encode_masked(text), self.objective.mask_id

        def probs_of(tokens_BN: Tensor) -> Tensor:
            with computing_in(self.deployed.spec.precision, self.device):
                return self.objective.clean_probs(self.model, tokens_BN)

        filled, masks = [], []
        for start in range(0, len(tokens), self.positions):
            piece_1N = torch.tensor([tokens[start : start + self.positions]], device=self.device)
            for place in (piece_1N[0] == mask_id).nonzero().flatten().tolist():
                masks.append({"token": start + place, "top": self._list_top(probs_of(piece_1N)[0, place])})
            draws = Draws([generator_for(self.spec.seed, "infer", index)], self.device)
            for _ in unmask(probs_of, piece_1N, mask_id, draws, order="top_prob", temperature=0.0):
                pass
            filled += piece_1N[0].tolist()
        return {"text": text, "filled": self.deployed.tokens.decode(filled), "masks": masks}

    def _encode_masked(self, text: str) -> list[int]:
        """Return a text's tokens with the mask's number where it is masked.

        Raises:
            ValueError: nothing is masked.
        """
        mask = self._mask
        parts = [self.deployed.tokens.encode(part).tolist() for part in text.split(mask)]
        if len(parts) == 1:
            raise ValueError(f"the text holds no {mask}, which stands for a token to fill")
        number = MASK if self.deployed.tokens.kind == RESIDUES else self.objective.mask_id
        return [token for part in parts for token in (number, *part)][1:]

    @property
    def _mask(self) -> str:
        return self.spec.mask if self.deployed.tokens.kind == TEXT else OF_LETTERS

    def _list_top(self, probs_V: Tensor, first: int = 0) -> list[tuple[str, float]]:
        """Return the likeliest tokens with their probabilities; ``first``: token of the first probability."""
        found = probs_V.topk(min(self.spec.top, len(probs_V)))
        return [
            (self.deployed.tokens.decode([first + token]), value)
            for value, token in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _fill_residues(self, text: str, index: int) -> Answer:
        """Return a protein's letters with ``_`` filled; structure and contexts are unknown to the model."""
        if "sequence" not in self.deployed.spec.objective.settings.sources:  # pyright: ignore
            raise ValueError("the model predicts structure tokens alone (objective.sources=[structure]), no letters")
        tokens, room = self._encode_masked(text), self.positions - 2
        filled, masks = [], []
        for start in range(0, len(tokens), room):
            piece = torch.tensor([tokens[start : start + room]])
            inputs, mask_BN = self.objective.mask_all(batch_of([make_chain(len(piece[0]))]))
            num_B = torch.tensor([len(piece[0])])
            known = {"sequence": piece, "structure": torch.full_like(piece, UNK)}
            names = self.deployed.spec.objective.settings.sources  # pyright: ignore
            tracks = [frame_tokens(known[name], num_B, BOS, EOS).to(self.device) for name in names]
            at = names.index("sequence")

            def probs_of(given: Sequence[Tensor], inputs: Any = inputs, mask_BN: Tensor = mask_BN) -> list[Tensor]:
                with computing_in(self.deployed.spec.precision, self.device):
                    return self.objective.track_probs(self.model, inputs._replace(sources=tuple(given)), mask_BN)

            found = probs_of(tracks)[at][0]
            for place in (tracks[at][0] == MASK).nonzero().flatten().tolist():
                masks.append({"token": start + place - 1, "top": self._list_top(found[place], FIRST)})
            draws = Draws([generator_for(self.spec.seed, "infer", index)], self.device)
            steps = unmask_tracks(
                probs_of, tracks, draws, mask_id=MASK, first_id=FIRST, order="top_prob", temperature=0.0
            )
            for _ in steps:
                pass
            filled += tracks[at][0, 1:-1].tolist()
        return {"text": text, "filled": self.deployed.tokens.decode(filled), "masks": masks}

    @torch.no_grad()
    def _classify(self, image: str, index: int) -> Answer:
        """Return the likeliest classes of an image file, with the size and channels of the training images."""
        size = self.objective.image
        pixels = torch.from_numpy(decode_image(Path(image).expanduser(), image).copy())[None]
        if pixels.shape[1:3] != (size.height, size.width):
            raise ValueError(
                f"{image} has {pixels.shape[1]}×{pixels.shape[2]} pixels; the model reads {size.height}×{size.width}"
            )
        if size.channels == 1:
            if bool((pixels != pixels[..., :1]).any()):
                raise ValueError(f"{image} is coloured; the model reads grey images")
            pixels = pixels[..., :1]
        batch = ImageBatch(pixels, torch.zeros(1, dtype=torch.int64))
        examples = self.objective.examples(batch, generator_for(0, "infer")).to(self.device)
        with computing_in(self.deployed.spec.precision, self.device):
            probs_V = examples.logits(self.model)[0, 0].float().softmax(-1)
        found = probs_V.topk(min(self.spec.top, len(probs_V)))
        names = self.deployed.tokens.classes
        top = [
            (names[number], value) for value, number in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]
        return {"image": image, "label": top[0][0], "probability": top[0][1], "top": top}


def describe(answer: Answer) -> list[str]:
    """Return an answer as lines for a terminal."""
    if "label" in answer:
        others = ", ".join(f"{name} {value:.3f}" for name, value in answer["top"][1:])
        return [f"{answer['label']} {answer['probability']:.3f}" + (f" (then {others})" if others else "")]
    if "filled" in answer:
        lines = [answer["filled"]]
        for mask in answer["masks"]:
            shown = ", ".join(f"{token!r} {value:.3f}" for token, value in mask["top"])
            lines.append(f"  token {mask['token'] + 1}: {shown}")
        return lines
    nll = "" if answer["nll"] is None else f"NLL {answer['nll']:.4f} nats per token over {answer['tokens']} tokens"
    return [*([nll] if nll else []), *(f"{answer['text']}{each}" for each in answer.get("continuations", ()))]
