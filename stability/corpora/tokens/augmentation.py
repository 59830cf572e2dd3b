"""Change training windows of tokens by chance, and say what of it a corpus keeps on disk. Held-out windows stay as they
are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from stability.corpora.tokens.nucleotides import in_rna
from stability.corpora.tokens.vocabulary import Vocabulary


class AbstractAugmentation:
    """Base of what a data source gives to a corpus of tokens. A subclass implements `augmented`.

    ``name``: the key that marks it in a corpus's folder; ``array_names``: of the arrays that it may keep there, each
      1-D and an attribute of it, None where it keeps none.
    """

    name: ClassVar[str]
    array_names: ClassVar[tuple[str, ...]] = ()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what it keeps beside the tokens, by name."""
        found = {name: getattr(self, name) for name in self.array_names}
        return {name: array for name, array in found.items() if array is not None}

    def require(self, vocabulary: Vocabulary | None, num_stretches: int) -> None:
        """Raise ``AssertionError`` where it does not fit a corpus; ``num_stretches``: between its training
        borders."""

    def augmented(
        self, tokens_BN: Tensor, vocabulary: Vocabulary | None, stretch_B: np.ndarray, generator: Generator
    ) -> Tensor:
        """Return training windows as they are trained on; ``stretch_B``: the number of the stretch that each lies
        in."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class ReverseComplement(AbstractAugmentation):
    """A window becomes, with probability one half, that of the other strand, read in its own direction.

    ``train_are_rna``: of each training stretch 1 where A pairs with U in it, else 0 (uint16); None: nowhere.
    """

    train_are_rna: np.ndarray | None = None

    name = "reverse_complement"
    array_names = ("train_are_rna",)

    def require(self, vocabulary: Vocabulary | None, num_stretches: int) -> None:
        assert vocabulary is not None and vocabulary.complement, "only nucleotides have a reverse complement"
        assert self.train_are_rna is None or len(self.train_are_rna) == num_stretches, (
            "one number for each training stretch"
        )

    def augmented(
        self, tokens_BN: Tensor, vocabulary: Vocabulary | None, stretch_B: np.ndarray, generator: Generator
    ) -> Tensor:
        assert vocabulary is not None
        turned_B = torch.rand(len(tokens_BN), generator=generator, device=generator.device).cpu() < 0.5
        other_BN = torch.tensor(vocabulary.complement)[tokens_BN].flip(1)
        if self.train_are_rna is not None:
            rna_B = torch.from_numpy(self.train_are_rna[stretch_B] == 1)
            other_BN = torch.where(rna_B[:, None], in_rna(other_BN), other_BN)
        return torch.where(turned_B[:, None], other_BN, tokens_BN)


# Those that a corpus's folder can hold.
AUGMENTATIONS: tuple[type[AbstractAugmentation], ...] = (ReverseComplement,)
NAMES = tuple(each.name for each in AUGMENTATIONS)
ARRAY_NAMES = tuple(name for each in AUGMENTATIONS for name in each.array_names)


def kept_in(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> AbstractAugmentation | None:
    """Return the augmentation that a corpus's folder holds, from its description and those of `ARRAY_NAMES` that lie
    there."""
    return next((each(**arrays) for each in AUGMENTATIONS if meta.get(each.name)), None)
