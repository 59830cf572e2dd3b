"""Resolve ``impl=auto`` once, when a sweep is parsed.

The choice is triton if its kernels run here and support the sweep, else reference. Records and runs contain the choice,
never ``auto``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stability.config.base import AXES
from stability.config.impl import AUTO, Kernels
from stability.config.parts import COMPUTED, OF_THE_LOSS, CrossOfEach, Part, computed_parts, kernels_of, use_of
from stability.config.rules.kernels import require_alpha_max, require_trained_through

Choose = Callable[[str, str], str]  # (path of the setting, its value) -> its new value


def resolve_auto(sweep: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a sweep's spec with ``impl=auto`` resolved, and one line each.

    A line names the choice and its reason.
    """
    changes, said = {}, []
    for key in COMPUTED:
        held = getattr(sweep, key)
        found = _resolve_field(sweep, key, held, said)
        if found != held:
            changes[key] = found
    return changes, tuple(said)


def _resolve_field(sweep: Any, key: str, held: Any, said: list[str]) -> Any:
    """Return a field's value (one part, several, or those of ``cross=auto``) with ``impl=auto`` resolved."""
    if isinstance(held, CrossOfEach):
        return CrossOfEach(parts=_resolve_field(sweep, key, held.parts, said))
    if isinstance(held, tuple):
        return tuple(_resolve_part(sweep, key, item, said) for item in held)
    return None if held is None else _resolve_part(sweep, key, held, said)


def _resolve_part(sweep: Any, key: str, item: Part, said: list[str]) -> Part:
    """Return a part with ``impl=auto`` resolved in its settings and nested parts; append the lines to ``said``."""
    asked = {each.path: each for each in kernels_of({key: item}) if each.impl == AUTO}

    def choose(path: str, written: str) -> str:
        if path not in asked:
            return written
        refusal = _find_refusal(sweep, replace(asked[path], setting=f"{path}=triton"), key in OF_THE_LOSS)
        chosen = "triton" if refusal is None else "reference"
        said.append(f"{path}={AUTO}: {chosen}, " + (refusal or "on this machine's CUDA device"))
        return chosen

    return _replace_impl(item, f"{key}.{item.name}" if key in AXES else key, choose) if asked else item


def _replace_impl(item: Part, path: str, choose: Choose) -> Part:
    """Return a part with ``choose`` applied to each ``impl``, nested parts included."""
    changes: dict[str, Any] = {}
    for name in type(item.settings).model_fields:
        value = getattr(item.settings, name)
        if name == "impl":
            changes[name] = choose(f"{path}.{name}", value)
        elif isinstance(value, Part):
            changes[name] = _replace_impl(value, f"{path}.{value.name}", choose)
        elif isinstance(value, tuple) and value and all(isinstance(each, Part) for each in value):
            changes[name] = tuple(_replace_impl(each, f"{path}.{each.name}", choose) for each in value)
    return item.model_copy(update={"settings": item.settings.model_copy(update=changes)})


def _find_refusal(sweep: Any, asked: Kernels, in_loss: bool) -> str | None:
    """Return why kernels cannot be used in a sweep, or None; the rules are those for ``impl=triton``."""
    if (lacking := _find_lacking(sweep.device)) is not None:
        return f"since triton's kernels need {lacking}"
    try:
        asked.check(use_of(sweep))
        if in_loss:
            for optimizer in sweep.optimizer:
                require_trained_through([asked], optimizer, compiled=sweep.compile, log_curvature=sweep.log.curvature)
            if sweep.hessian:
                require_alpha_max([asked], sweep.curvature, "hessian=true measures", "")
    except ValueError as error:
        return f"since {str(error).split(';')[0]}"
    return None


def _find_lacking(name: str) -> str | None:
    """Return the missing requirement of Triton's kernels on a device, or None."""
    import torch

    from kernels import availability

    # interpreted kernels do not count: they are far slower than the reference
    return availability.find_lacking(torch.device("cpu") if name == "cpu" else None, interpreted=False)


def use_reference(run: Any) -> dict[str, Part]:
    """Return the parts of a run with kernels, by field, with ``impl=reference`` instead.

    They have the same parameters and use torch's own operations.
    """
    return {
        key: _replace_impl(item, key, lambda path, written: "reference")
        for key, item in computed_parts(run).items()
        if item is not None and kernels_of({key: item})
    }
