"""Text to embeddings, by a run's checkpoint, an exported folder, or a folder of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stability.build import build_objective
from stability.config.parts import Part
from stability.config.run import RunSpec
from stability.corpora.sentences.corpus import pad_sentences
from stability.corpora.tokens.vocabulary import ByteTokenizer
from stability.data.stdlib import clean
from stability.printable import line_of
from stability.sentences import export
from stability.training.checkpoint import load, manifest_of

NEEDS_LIBRARY = "pip install 'sentence-transformers>=6,<7'"


class Encoder:
    """A trained model that embeds text.

    Attributes:
        name: its checkpoint or folder, for messages.
        width: numbers of an embedding.
        positions: tokens after which a text is cut.
    """

    def __init__(self, name: str, spec: RunSpec, model: nn.Module, data_format: Any, device: torch.device):
        require_pairs(spec.objective, name)
        self.name, self.spec, self.data_format = name, spec, data_format
        self.model, self._device = model.to(device).eval(), device
        self._objective: Any = build_objective(spec, data_format)
        self.width, self.positions = spec.model.width, spec.model.positions

    @classmethod
    def of_checkpoint(cls, folder: Path, device: torch.device) -> Encoder:
        """Return the encoder of a checkpoint.

        Raises:
            ValueError: the folder is no checkpoint, or its run did not train sentence embeddings.
        """
        spec, model = load(folder)
        return cls(str(folder), spec, model, manifest_of(folder).get("format"), device)

    @classmethod
    def of_folder(cls, folder: Path, device: torch.device) -> Encoder:
        """Return the encoder of an exported folder.

        Raises:
            ValueError: a file is missing or altered.
        """
        spec, model, data_format = export.load(folder)
        return cls(str(folder), spec, model, data_format, device)

    def encode(self, texts: Sequence[str], batch: int = 64) -> np.ndarray:
        """Return the embeddings, (texts, width) float32; of unit length with objective.normalise.

        Args:
            texts: the texts; none may be empty.
            batch: texts per pass of the model.

        Raises:
            ValueError: a text is empty.
        """
        parts = [self._embed(texts[start : start + batch]) for start in range(0, len(texts), batch)]
        return torch.cat(parts).cpu().numpy() if parts else np.empty((0, self.width), np.float32)

    @torch.no_grad()
    def _embed(self, texts: Sequence[str]) -> Tensor:
        tokens_BN, mask_BN = (each.to(self._device) for each in tokenise(texts, self.positions, self.vocab_size))
        x_BD = self.model(tokens_BN, mask_BN).squeeze(1).float()
        return nn.functional.normalize(x_BD, dim=-1) if self._objective.config.normalise else x_BD

    @property
    def vocab_size(self) -> int:
        return self.data_format["vocab_size"]


def tokenise(texts: Sequence[str], positions: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return tokens (B, N) and mask of texts, cleaned as the training data are.

    Args:
        texts: the texts.
        positions: N.
        vocab_size: the padding token.

    Raises:
        ValueError: a text is empty.
    """
    cleaned = [" ".join(clean(text).split()) for text in texts]
    if empty := [number for number, text in enumerate(cleaned, 1) if not text]:
        raise ValueError(f"text {empty[0]} of {len(texts)} is empty; an embedding needs at least one character")
    return pad_sentences([ByteTokenizer().encode(text) for text in cleaned], positions, vocab_size)


def require_pairs(objective: Part, name: str) -> None:
    """Raise a ``ValueError`` unless a run trained sentence embeddings."""
    if objective.name != "sentence_pairs":
        raise ValueError(
            f"{name}: objective={objective.name} trains no sentence embeddings; train one from it by objective="
            "sentence_pairs init=ckpt:… init.partial=true"
        )


class LibraryEncoder:
    """A folder of sentence-transformers of other origin, read by that library.

    Raises:
        RuntimeError: the library is missing.
        ValueError: it cannot read the folder.
    """

    def __init__(self, folder: Path, device: torch.device):
        try:
            from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise RuntimeError(
                f"dir={folder} is read by sentence-transformers, which is missing; {NEEDS_LIBRARY}"
            ) from None
        self.name = str(folder)
        try:
            self._model = SentenceTransformer(str(folder), device=str(device), local_files_only=True)
        except Exception as error:  # noqa: BLE001  # of many kinds, by the files that are missing or damaged
            raise ValueError(f"dir={folder}: sentence-transformers cannot read it: {line_of(error)}") from None

    def encode(self, texts: Sequence[str], batch: int = 64) -> np.ndarray:
        """Return the library's own embeddings, (texts, width) float32.

        Args:
            texts: the texts.
            batch: texts per pass of the model.
        """
        return self._model.encode(list(texts), batch_size=batch, show_progress_bar=False, convert_to_numpy=True)


def open_encoder(folder: Path, device: torch.device) -> Encoder | LibraryEncoder:
    """Return the encoder of ``dir=FOLDER``: one of ours, or one of sentence-transformers.

    Args:
        folder: the folder.
        device: device of the model.

    Raises:
        ValueError: the folder holds no such model.
        RuntimeError: the library is needed and missing.
    """
    if (folder / export.OURS).is_file():
        return Encoder.of_folder(folder, device)
    if not (folder / "modules.json").is_file():
        raise ValueError(
            f"dir={folder}: no modules.json there; give a folder written by mode=export or by sentence-transformers"
        )
    return LibraryEncoder(folder, device)
