"""A step of AdamW over 124 M parameters that also says ⟨g, u⟩, ‖u‖ and ‖g‖."""

from __future__ import annotations

from benchmarks._kernel_cases._case import Case


def cases(smoke: bool) -> list[Case]:
    return []
