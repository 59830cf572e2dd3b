"""A value and its first two derivatives along a line, in one tensor.

Operations are dispatched to their second-order rules on two levels:

- `__torch_function__` gets the user's calls. It refuses operations that silently drop derivatives, and applies the
  fused rules (linear, attention, LayerNorm, cross entropy …).
- `__torch_dispatch__` gets all other calls, decomposed by torch into ATen operations. It applies the remaining rules,
  and raises an error for an operation without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _DisableAutocast, _is_any_autocast_enabled
from torch._C import _set_grad_enabled as set_grad_enabled

Component = Tensor | None
Rule = Callable[..., Any]

# user's function -> rule(*args, **kwargs); a rule returns NotImplemented to use torch's own decomposition
FUNCTION_RULES: dict[Any, Rule] = {}
# autocast's cast of an argument, by function with a rule; None: torch casts and decomposes the call
AUTOCAST: dict[Any, Callable[[Any], Any] | None] = {}
ATEN_RULES: dict[Any, Rule] = {}  # torch.ops.aten packet -> rule(func, args, kwargs)


class NoRule(RuntimeError):
    """An operation cannot be carried to second order; the message names it."""


class HeldConstant(NoRule):
    """An operation makes a constant of a tensor that depends on the parameters.

    Autograd treats that tensor as a constant, too.
    """


class Jet(Tensor):
    """A tensor with its derivatives along a line: f(t), f′(t), f″(t) at t = 0.

    The derivatives have the shape and dtype of the value; None is zero.
    """

    value: Tensor
    first: Component
    second: Component

    @staticmethod
    def __new__(cls, value: Tensor, first: Component = None, second: Component = None) -> Jet:
        jet = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device, layout=value.layout
        )
        jet.value, jet.first, jet.second = value, first, second
        return jet

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Jet(shape={tuple(self.value.shape)}, dtype={self.value.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FLAGS and all((*args[1:], *kwargs.values())):
            return args[0]  # a jet already reports requires_grad=True
        if func not in _METADATA:
            _refuse_drops(func)
            return cls._call_by_rule(func, args, kwargs)
        if func is _getter("requires_grad"):
            return True  # code that branches on this flag then runs its training branch
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def _call_by_rule(cls, func, args, kwargs):
        """Call an operation's second-order rule, or torch's function if no rule applies."""
        rule = FUNCTION_RULES.get(func) or _find_own_rule(func)
        # gradients are enabled here (`_refuse_drops` raises otherwise); torch.no_grad would cost as much as the rest of
        # this function
        set_grad_enabled(False)
        try:
            with DisableTorchFunctionSubclass():
                result = NotImplemented if rule is None else _call_rule(func, rule, args, kwargs)
                return func(*args, **kwargs) if result is NotImplemented else result
        except NoRule as error:
            raise (
                type(error)(f"{error} (called by {name_of(func)})") if " (called by " not in str(error) else error
            ) from None
        finally:
            set_grad_enabled(True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            raise NoRule(f"taylor cannot follow {func}, which writes into a tensor in place")
        rule = ATEN_RULES.get(func.overloadpacket)
        if rule is not None:
            with _DisableAutocast() if _is_any_autocast_enabled() else nullcontext():  # arguments are cast already
                return rule(func, args, kwargs or {})
        decomposed = func.decompose(*args, **(kwargs or {}))  # inside a rule, composite operations arrive undecomposed
        if decomposed is NotImplemented:
            raise NoRule(f"taylor has no rule for {func.overloadpacket}")
        return decomposed


def _call_rule(func: Any, rule: Rule, args: Any, kwargs: Any) -> Any:
    """Call a rule on arguments cast as by autocast; NotImplemented if torch must cast."""
    if not _is_any_autocast_enabled():
        return rule(*args, **kwargs)
    cast = AUTOCAST.get(func, lambda x: x)
    if cast is None:
        return NotImplemented
    args, kwargs = [cast(item) for item in args], {name: cast(item) for name, item in kwargs.items()}
    with _DisableAutocast():
        return rule(*args, **kwargs)


def _find_own_rule(func: Any) -> Rule | None:
    """Return an external operation's own rule, from its ``second_order`` attribute; None without it."""
    if not hasattr(func, "second_order"):
        return None
    if func.second_order is None:
        raise NoRule(f"taylor has no rule for {name_of(func)}")

    # second_order maps (f, f′, f″) of each positional argument to those of the result, or of several results
    def rule(*args: Any, **kwargs: Any) -> Any:
        found = func.second_order(*map(parts, args), **kwargs)
        return tuple(jet(*each) for each in found) if isinstance(found[0], tuple) else jet(*found)

    return rule


def _getter(attribute: str) -> Any:
    """Return the function passed to `__torch_function__` when a tensor's attribute is read."""
    return getattr(Tensor, attribute).__get__


_ATTRIBUTES = (
    "shape dtype device ndim layout requires_grad is_cuda is_sparse is_nested is_leaf is_cpu is_meta is_mps is_xpu "
    "grad_fn itemsize nbytes"
)
_QUESTIONS = (
    "size dim numel stride is_contiguous is_floating_point is_complex element_size __len__ nelement ndimension "
    "get_device is_signed __repr__ __hash__"
)
_METADATA = {
    *(_getter(name) for name in _ATTRIBUTES.split()),
    *(getattr(Tensor, name) for name in _QUESTIONS.split()),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
# requests for a tensor's gradient; transformers makes one for embeddings with gradient checkpointing
_FLAGS = {Tensor.requires_grad_, Tensor.retain_grad, vars(torch._C.TensorBase)["requires_grad"].__set__}
_LEAVING = (
    "detach numpy tolist item data_ptr storage untyped_storage new_tensor pin_memory "
    "__bool__ __float__ __int__ __complex__ __index__ __array__ __dlpack__ __deepcopy__ __reduce_ex__ __contains__"
)
_DROPS = {  # operations that leave torch, or make a constant of a tensor
    *(getattr(Tensor, name) for name in _LEAVING.split()),
    *(torch.detach, _getter("data"), _getter("grad")),
    *(vars(torch._C.TensorBase)[name].__set__ for name in ("data", "requires_grad")),
}
# differentiated twice by autograd, but impossible in a forward pass
_BACKWARD = {Tensor.__setitem__, Tensor.backward, Tensor.register_hook, torch.autograd.backward}


def _refuse_drops(func: Any) -> None:
    """Raise `NoRule` for no_grad, a detaching operation or an in-place write."""
    # The pass runs with gradients enabled, although none is recorded. Code that disables them wants a constant, or is a
    # custom Function's forward.
    if not torch.is_grad_enabled():
        raise HeldConstant(
            f"taylor refuses {name_of(func)} inside torch.no_grad or a custom autograd.Function: derivatives would "
            "be dropped or wrong"
        )
    if func in _KEEPS:
        return
    if func in _DROPS:
        raise HeldConstant(f"taylor refuses {name_of(func)}: it would drop derivatives")
    if func in _BACKWARD:
        raise NoRule(f"taylor has no rule for {name_of(func)}")
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        raise NoRule(
            f"taylor refuses {name_of(func)}: it writes into a tensor in place, where derivatives would be lost"
        )
    _KEEPS.add(func)


_KEEPS: set[Any] = set()  # functions checked already: they drop no derivatives


def name_of(func: Any) -> str:
    """Return a readable name: Tensor.detach, torch.nn.functional.elu, Tensor.data."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{owner.__name__}"
    name = getattr(func, "__qualname__", getattr(func, "__name__", str(func)))
    module = getattr(func, "__module__", None)
    if name.startswith(("_TensorBase.", "TensorBase.")):
        return "Tensor." + name.split(".", 1)[1]
    return name if module is None or "." in name else f"{module}.{name}"


def register_rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions called by users."""

    def register(rule: Rule) -> Rule:
        FUNCTION_RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def register_aten_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operations by name."""

    def register(rule: Rule) -> Rule:
        ATEN_RULES.update({getattr(torch.ops.aten, name): rule for name in names})
        return rule

    return register


def parts(x: Any) -> tuple[Any, Component, Component]:
    """Return (f, f′, f″) of a jet; (x, None, None) of a constant."""
    return (x.value, x.first, x.second) if isinstance(x, Jet) else (x, None, None)


def jet(value: Tensor, first: Component, second: Component) -> Tensor:
    """Make a jet, or return the plain value if both derivatives are zero.

    Args:
        value: f.
        first: f′, cast and expanded to the value's dtype and shape; None is zero.
        second: f″, likewise.
    """
    if first is None and second is None:
        return value
    return Jet(value, _fit(first, value), _fit(second, value))


def value_of(x: Any) -> Any:
    """Return the value of a jet; anything else unchanged."""
    return parts(x)[0]


def replace_value(value: Tensor, x: Any) -> Tensor:
    """Return ``x`` with its value replaced by torch's own result ``value``.

    The strides of torch's result decide the masks drawn by dropout.
    """
    return jet(value, *parts(x)[1:])


def map_components(function: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """Return function(x) of a linear function, applied to each component."""
    value, first, second = parts(x)
    return jet(
        function(value), None if first is None else function(first), None if second is None else function(second)
    )


def _fit(component: Component, like: Tensor) -> Component:
    if component is None:
        return None
    if component.dtype != like.dtype:
        component = component.to(like.dtype)
    return component if component.shape == like.shape else component.expand_as(like)


def add(a: Component, b: Component) -> Component:
    """Return a + b; None is zero."""
    return b if a is None else a if b is None else a + b


def multiply(a: Component, b: Any, factor: float = 1.0) -> Component:
    """Return factor·a·b; None is zero.

    Args:
        a: a component.
        b: a tensor or a number.
        factor: a constant.
    """
    if a is None or b is None:
        return None
    product = a * b
    return product if factor == 1.0 else product.mul_(factor)


def fill_missing(component: Component, like: Tensor) -> Tensor:
    """Return the component, or zeros like ``like`` if it is None."""
    return torch.zeros_like(like) if component is None else component


@register_rule(torch.autograd.grad)
def _grad(*args: Any, create_graph: bool = False, **kwargs: Any) -> Any:
    if create_graph or any(args[4:5]):
        raise NoRule("taylor has no rule for torch.autograd.grad")
    raise HeldConstant("taylor refuses torch.autograd.grad without create_graph: it would drop derivatives")
