"""The first module of an exported folder: our model within sentence-transformers 6."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import InputModule  # pyright: ignore[reportMissingImports]
from torch import Tensor

from stability.sentences import export
from stability.sentences.encoder import tokenise


class Encoder(InputModule):
    """Text → the output of the final norm at every position; pooling and normalisation are the library's modules."""

    config_file_name = export.OURS
    save_in_root = True

    def __init__(self, folder: str | Path):
        super().__init__()
        self.spec, self.backbone, self._format = export.load(Path(folder))
        self.backbone.pool = None  # the library's module pools
        self.max_seq_length = self.spec.model.positions

    def get_embedding_dimension(self) -> int:
        return self.spec.model.width

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **options: Any) -> dict[str, Tensor]:
        """Return tokens and mask of the texts, each after the prompt.

        Args:
            inputs: the texts.
            prompt: text before each of them.
            **options: unused.
        """
        texts = [f"{prompt or ''}{text}" for text in inputs]
        tokens_BN, mask_BN = tokenise(texts, self.max_seq_length, self._format["vocab_size"])
        return {"input_ids": tokens_BN, "attention_mask": mask_BN.long()}

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Add ``token_embeddings`` (B, N, D) to the features.

        Args:
            features: ``input_ids`` and ``attention_mask``.
            **options: unused.
        """
        hidden_BND = self.backbone(features["input_ids"], features["attention_mask"].bool())
        return features | {"token_embeddings": hidden_BND.to(torch.float32)}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **options: Any) -> None:
        """Write our spec and weights into a folder.

        Args:
            output_path: the folder.
            *args: unused.
            safe_serialization: unused: weights are always safetensors.
            **options: unused.
        """
        export.write_weights(Path(output_path), self.spec, self.backbone, self._format)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> Encoder:
        """Return the module of an exported folder on this disk.

        Args:
            model_name_or_path: the folder.
            subfolder: a folder within it.
            **options: unused.
        """
        return cls(Path(model_name_or_path, subfolder))
