"""An objective whose sequences count differently, so that the mean over a batch is not the mean of its parts' means."""

from __future__ import annotations

from stability.objectives.mlm import MaskedLanguageModel


class Weighted(MaskedLanguageModel):
    """Masked language modelling; a sequence weighs 1 to 4."""

    def examples(self, tokens_BN, generator):
        examples = super().examples(tokens_BN, generator)
        return examples._replace(weights_BN=examples.weights_BN * (1 + tokens_BN[:, -1:] % 4))


EXPORT = Weighted
