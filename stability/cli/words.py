"""The grammar of the words on a command line, before Hydra sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stability.cli.conf import AXES
from stability.cli.places import quoted
from stability.config.run import ModelSpec

OF_EVERY_MODEL = tuple(f"model.{key}" for key, field in ModelSpec.model_fields.items() if not field.is_required())
CHOICES = (*AXES, "model", "objective", "data", "schedule", "lr", "search")
PRESET_ROOT = "sweep"  # the one entry that has presets, in conf/study


def given_values(argv: Sequence[str]) -> dict[str, str]:
    """The words by key, as Hydra gets them."""
    return dict(word.split("=", 1) for word in hydra_overrides(argv) if "=" in word)


def key_of(word: str) -> str:
    """``mechanism.sc.window`` of ``++mechanism.sc.window=4``."""
    return word.lstrip("+~").partition("=")[0]


def hydra_overrides(argv: Sequence[str]) -> list[str]:
    """The argv shim: ``lr=1e-3`` and ``lr=[…]`` choose conf/lr/values.yaml, paths are quoted, ``ablate.…``, ``search.space.…`` and what
    a model's yaml may leave to its default are added; everything else passes unchanged."""
    overrides: list[str] = []
    for word in argv:
        key, _, value = word.partition("=")
        if key == "lr" and re.match(r"^([\[\d.+-]|nan$|inf$)", value):
            overrides += ["lr=values", f"lr.values={value if value.startswith('[') else f'[{value}]'}"]
        elif key.startswith(("ablate.", "search.space.")) or key in OF_EVERY_MODEL:  # the parts' own, which no root yaml can list; or in few of conf/model
            overrides.append(f"++{word}")
        elif (whole := quoted(key, value)) is not None:
            overrides.append(f"{key}={whole}")
        else:
            overrides.append(word)
    return overrides
