"""Call checkpointed blocks directly while a loss is evaluated: nothing is left to recompute in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


@contextmanager
def called_through() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint`, reentrant or not, call its function and keep the activations.

    A checkpointed block is computed again in the backward pass. By then a `functional_call` has given the model its own
    parameters back, and a context such as the attention backend is left, so that the gradient would be of another
    function. The two names replaced here are those that `checkpoint` itself looks up; whoever imported it is reached.
    """
    own = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    torch_checkpoint.CheckpointFunction = _Direct  # type: ignore[misc, assignment]
    torch_checkpoint._checkpoint_without_reentrant_generator = _around_nothing  # type: ignore[assignment]
    try:
        yield
    finally:
        (
            torch_checkpoint.CheckpointFunction,  # type: ignore[misc]
            torch_checkpoint._checkpoint_without_reentrant_generator,
        ) = own


class _Direct:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _around_nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield
