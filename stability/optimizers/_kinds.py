"""Tell the matrices of a model, which an optimizer of matrices takes, from the rest, which goes to AdamW."""

from __future__ import annotations

from typing import Any

from torch import nn

from stability.config.groups import MATRIX_ROLES

KIND, SPLITS = "kind", "splits"  # entries of a parameter group
MATRICES, REST = "matrices", "rest"
OF_REST = "rest_"  # with which the settings of AdamW begin in an optimizer of matrices


def kind_of(parameter: nn.Parameter, role: str | None, owner: nn.Module | None = None) -> str:
    """Return `MATRICES` for a parameter of two axes whose role is among `MATRIX_ROLES`, or that has no role and is no
    table; else `REST`. A table is that of an ``nn.Embedding``, or of a module that says so (``is_table``)."""
    is_one = parameter.ndim == 2 and (role is None or role in MATRIX_ROLES)
    is_table = isinstance(owner, nn.Embedding) or getattr(owner, "is_table", False)
    return MATRICES if is_one and not is_table else REST


def splits(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the rows of each matrix in a parameter that holds several one above the other, by the parameter's id.

    A module says so of its linear maps (``own_splits``: name of the map → rows of each matrix, in their order), as
    attention does of its fused queries, keys and values. Errors: ``AssertionError`` where the rows are not those of the
    weight.
    """
    found = {}
    for module in model.modules():
        own: dict[str, Any] = getattr(module, "own_splits", {})
        for name, rows in own.items():
            weight = module.get_parameter(f"{name}.weight")
            assert sum(rows) == len(weight), (
                f"own_splits of {name}: {rows} are not the {len(weight)} rows of its weight"
            )
            found[id(weight)] = tuple(rows)
    return found
