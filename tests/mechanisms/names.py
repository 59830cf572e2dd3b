"""Which mechanisms there are, and what each can do, written once: messages list them, and a new one is added here."""

from __future__ import annotations

SOFTMAX = ("attentionx", "bigbird", "gated_softmax", "sa", "sparse_transformer", "sw")
UNTRAINED = ("fasa", "sparge")
ATTENTION = tuple(sorted((*SOFTMAX, *UNTRAINED, "fox", "longformer", "nsa", "sigmoid", "sparsek")))
RECURRENT = ("deltanet", "gated_deltanet", "gla", "hgrn2", "kda", "mamba", "mamba2", "retnet", "titans")
CAUSAL_ONLY = tuple(sorted(("fox", "nsa", *RECURRENT)))
BIDIRECTIONAL_ONLY = ("mix", "sc", "two_way")
OTHERS: tuple[str, ...] = ()  # both directions, neither attention nor recurrent: a running mean
ALL = tuple(sorted((*ATTENTION, *RECURRENT, *BIDIRECTIONAL_ONLY, *OTHERS)))
TRAINED = tuple(name for name in ALL if name not in UNTRAINED)
CAUSAL = tuple(name for name in TRAINED if name not in BIDIRECTIONAL_ONLY)


def listed(*names: str) -> str:
    """Return names as a message lists them."""
    return ", ".join(sorted(names))
