"""Modules shared by several layers of a model."""

from __future__ import annotations

from torch import nn


class SharedByLayers(nn.Module):
    """A module made by each layer and shared by all after `hold_once`.

    Its parameters are then in the model's state and gradient once. Its constructor draws no random numbers and depends
    on no layer.
    """


def hold_once(model: nn.Module) -> None:
    """Let all layers below ``model`` share the first equal `SharedByLayers`.

    Equal means the same class and shapes of parameters. The first one remains a child of its own layer. The others are
    replaced by plain references, so no tensor has two names.
    """
    first: dict[object, SharedByLayers] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SharedByLayers):
                kind = (type(child), tuple((key, value.shape) for key, value in child.named_parameters()))
                kept = first.setdefault(kind, child)
                if kept is not child:
                    delattr(parent, name)
                    parent.__dict__[name] = kept  # not registered as a child module
