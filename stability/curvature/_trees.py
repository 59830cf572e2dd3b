"""Let functions of a dict of tensors accept any pytree of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils import _pytree

Tree = Any  # a dict of name -> tensor, or any other pytree of tensors
P = ParamSpec("P")
R = TypeVar("R")


def accept_any_tree(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``params``, ``direction`` and ``held`` be any pytree of tensors.

    The function gets a dict by dotted path. The caller's loss gets the caller's own structure, and so do the results. A
    flat dict of tensors passes unchanged.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function with flat arguments; return tensors in the caller's structure."""
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}; its arguments are {_format_arguments(signature)}") from None
        given = bound.arguments
        if _is_flat(given["params"]):
            return function(*args, **kwargs)
        pairs, spec = _pytree.tree_flatten_with_path(given["params"])
        names = [".".join(map(_word, path)) or "params" for path, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("params holds two tensors of one dotted path; rename the keys that contain dots")

        def pass_tree(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
            return lambda at, *batch: loss_fn(_pytree.tree_unflatten([at[name] for name in names], spec), *batch)

        for key in ("params", "direction", "held"):
            if given.get(key) is not None or (key == "direction" and key in given):
                leaves, structure = _pytree.tree_flatten(given[key])
                if structure != spec:
                    raise ValueError(f"{key} must have the structure of params: the same nesting, lengths and keys")
                given[key] = dict(zip(names, leaves, strict=True))
        for key in {"loss_fn", "model_fn"} & given.keys():
            if callable(given[key]):
                given[key] = pass_tree(given[key])
        return _restore(function(*bound.args, **bound.kwargs), names, spec)

    return call


def _format_arguments(signature: inspect.Signature) -> str:
    """Return the arguments with their defaults, as in (loss_fn, params, *, batches=None)."""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _is_flat(tree: Any) -> bool:
    """Return True for a flat dict, or an object without tensors (refused later)."""
    if isinstance(tree, Mapping):
        return all(_pytree.tree_structure(item).is_leaf() for item in tree.values())
    return not any(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(tree))


def _word(key: Any) -> str:
    """Return one step of a path: dict key, list index or named tuple's field."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def _restore(result: Any, names: list[str], spec: Any) -> Any:
    """Return a result with tensors by name put into the caller's structure."""
    if isinstance(result, dict):
        whole = list(result) == names and all(isinstance(item, Tensor) for item in result.values())
        return _pytree.tree_unflatten(list(result.values()), spec) if whole else result
    if isinstance(result, list):
        return [_restore(item, names, spec) for item in result]
    if is_dataclass(result) and not isinstance(result, type):
        return replace(
            result, **{field.name: _restore(getattr(result, field.name), names, spec) for field in fields(result)}
        )
    return result
