"""Import pytorch_optimizer, only when an optimizer is built: the import takes over a second."""

from __future__ import annotations

from typing import Any


def library_class(name: str) -> Any:
    """Return a class of pytorch_optimizer by name.

    Raises:
        ImportError: the library is missing; one line.
    """
    try:
        import pytorch_optimizer
    except ImportError:
        missing = f"{name} comes from pytorch_optimizer, which is missing"
        raise ImportError(f"{missing}: pip install 'pytorch_optimizer>=4.1,<4.2'") from None
    return getattr(pytorch_optimizer, name)
