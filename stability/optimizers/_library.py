"""Import what comes from pytorch_optimizer, and only where an optimizer is built: that takes over a second."""

from __future__ import annotations

from typing import Any


def library_class(name: str) -> Any:
    """Return a class of pytorch_optimizer by its name. Errors: ``ImportError`` of one line where that is missing."""
    try:
        import pytorch_optimizer
    except ImportError:
        missing = f"{name} comes from pytorch_optimizer, which is missing"
        raise ImportError(f"{missing}: pip install 'pytorch_optimizer>=4.1,<4.2'") from None
    return getattr(pytorch_optimizer, name)
