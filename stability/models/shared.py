"""A module of which a model holds one, read by several of its layers."""

from __future__ import annotations

from torch import nn


class SharedByLayers(nn.Module):
    """A module that each layer makes for itself, and of which a model then holds one for all (`hold_once`): its
    parameters stand in the state of the model, and in its gradient, once.

    Its constructor draws nothing, and depends on no layer.
    """


def hold_once(model: nn.Module) -> None:
    """Let all layers below ``model`` read the first `SharedByLayers` of each class and shape of parameters. It is held
    where it was made; the others refer to it, and have no parameters of their own left there, so that no tensor has two
    names."""
    first: dict[object, SharedByLayers] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SharedByLayers):
                kind = (type(child), tuple((key, value.shape) for key, value in child.named_parameters()))
                kept = first.setdefault(kind, child)
                if kept is not child:
                    delattr(parent, name)
                    parent.__dict__[name] = kept  # not as a module of it
