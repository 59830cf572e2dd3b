"""Find a family's parts by file name.

Each file in the family's package is a public name; no other list exists.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FAMILIES = ("mechanisms", "residuals", "optimizers", "norms", "objectives", "data", "ffns", "positions", "linears",
            "parametrizations")  # fmt: skip
MOST_CHOICES = 24
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")  # a module's dotted name
# module path of each plugin by (family, name); filled by `add_plugin`, equal in the driver and in every worker
_plugins: dict[tuple[str, str], str] = {}


def import_on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` that imports some names on their first use.

    Args:
        package: the package's name.
        homes: module of each name, within the package.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find


class Registry:
    """The parts of one family, e.g. ``Registry("mechanisms")``.

    A part's name is the stem of its file; its class is the file's ``EXPORT``.
    """

    def __init__(self, family: str):
        if family not in FAMILIES:
            raise ValueError(f"no family '{family}': {', '.join(FAMILIES)}")
        self.family = family

    @property
    def noun(self) -> str:
        return {"data": "data source"}.get(self.family, self.family.removesuffix("s"))

    def names(self, **having: Any) -> tuple[str, ...]:
        """Return every public name in sorted order; files that begin with ``_`` are helpers.

        ``having`` selects parts by class attributes, e.g. ``cross=False``. Without it no part is imported.
        """
        return _names(self.family, tuple(_plugins.items()), tuple(having.items()))

    def load(self, name: str, **having: Any) -> Any:
        """Return the class of a name.

        Raises:
            ValueError: the name is unknown; the message has the nearest one with the attributes in ``having``. Or its
                file has no ``EXPORT``.
        """
        if name not in self.names():
            raise ValueError(f"no {self.noun} called '{name}'; {near_misses(name, self.names(**having))}")
        path = _plugins.get((self.family, name), f"stability.{self.family}.{name}")
        module = importlib.import_module(path)
        if not hasattr(module, "EXPORT"):
            raise ValueError(f"{path} has no EXPORT = YourClass")
        return module.EXPORT


@functools.cache  # called for every key of every part
def _names(
    family: str, plugins: tuple[tuple[tuple[str, str], str], ...], having: tuple[tuple[str, Any], ...]
) -> tuple[str, ...]:
    """Return `Registry.names` with these plugins."""
    registry = Registry(family)
    known = sorted({*_files(family), *(name for (of, name), _ in plugins if of == family)})
    return tuple(name for name in known if all(getattr(registry.load(name), key) == value for key, value in having))


@functools.cache  # no file is added while a process runs
def _files(family: str) -> tuple[str, ...]:
    """Return the public names of the files in a family's package."""
    package = importlib.util.find_spec(f"stability.{family}")
    assert package is not None
    found = pkgutil.iter_modules(package.submodule_search_locations)
    return tuple(info.name for info in found if not info.name.startswith("_"))


def near_misses(name: str, choices: tuple[str, ...], noun: str = "choices") -> str:
    """Return ``did you mean 'sc'? (choices: …)``: the closest choice, then all if they fit in a line.

    The initials of several words come first: sa of self_attention.

    Args:
        name: what was given.
        choices: the names that exist.
        noun: what they are, before the colon.
    """
    near = difflib.get_close_matches(str(name), choices, cutoff=0.5)
    initials = "".join(word[0] for word in re.findall(r"[a-z]+", str(name).lower()))
    short = [choice for choice in choices if len(choice) > 1 and len(initials) > 1 and initials.startswith(choice)]
    longer = [choice for choice in choices if choice.startswith(f"{name}_")]
    begun = [choice for choice in near if choice.startswith(str(name))]  # adam: adamw, not radam
    close = short or longer or begun or near
    shown = choices if len(choices) <= MOST_CHOICES else tuple(choice for choice in choices if "." not in choice)
    listing = f"{noun}: {', '.join(shown) if shown else 'none'}"
    if not close:
        return listing
    return f"did you mean '{close[0]}'?" + (f" ({listing})" if len(choices) <= MOST_CHOICES else "")


def describe_syntax_error(error: SyntaxError) -> str:
    """Return one line with the file, the line and the text that Python cannot parse."""
    return f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"


def _describe_import_error(error: ImportError) -> str:
    """Return one line with the file, the line and the text of an import that fails."""
    places = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
    return f"{places[-1].filename}:{places[-1].lineno}: {error}: {places[-1].line}"


def plugins_of(family: str) -> tuple[str, ...]:
    """Return the family's parts registered by `add_plugin`."""
    return tuple(name for known, name in _plugins if known == family)


def list_plugin_files() -> set[Path]:
    """Return the files of the registered plugins."""
    found = (getattr(sys.modules.get(module), "__file__", None) for module in _plugins.values())
    return {Path(file).resolve() for file in found if file}


def add_plugins(modules: Any) -> None:
    """Register the modules named by a command.

    A value that is not a list is ignored here and refused with its spec.
    """
    for module in modules if isinstance(modules, list | tuple) else ():
        add_plugin(module)


def require_plugins(modules: Any, place: Path | str) -> None:
    """Refuse a run's file if its plugins are not registered.

    Only the command line may import a module, never a file.

    Args:
        modules: the file's ``plugins``; untrusted.
        place: the run's name in the message.

    Raises:
        ValueError: a plugin was not registered by `add_plugin`.
    """
    listed = [str(module) for module in modules] if isinstance(modules, list | tuple) else []
    if not set(listed) <= set(_plugins.values()):
        typed = ",".join(module if MODULE.fullmatch(module) else repr(module[:40]) for module in listed)
        raise ValueError(f"{place}: was trained with plugins=[{typed}]; add plugins=[{typed}] to import it")


def add_plugin(module: str) -> tuple[str, str]:
    """Register a part outside this package under the stem of its module.

    Args:
        module: importable dotted path; its ``EXPORT`` is a class with a ``family`` (every ``Abstract*`` base has one).

    Returns:
        (family, name).

    Raises:
        ValueError: the module is missing, has no such ``EXPORT``, or has the name of an existing part.
    """
    if not MODULE.fullmatch(str(module)):
        raise ValueError(
            f"plugins: '{module}' is no module's name; give one that can be imported, e.g. "
            "plugins=[my_pkg.my_mechanism]"
        )
    try:
        export = importlib.import_module(module).EXPORT
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if not is_missing:  # an import of the plugin's own
            raise ValueError(f"plugins: {_describe_import_error(error)}") from None
        raise ValueError(
            f"plugins: no module '{module}' to import ({error}); if its file is there, put PYTHONPATH=FOLDER before "
            "the command, the folder that holds it"
        ) from None
    except SyntaxError as error:
        raise ValueError(f"plugins: {describe_syntax_error(error)}") from None
    except AttributeError:
        raise ValueError(f"plugins: '{module}' has no EXPORT = YourClass") from None
    family = getattr(export, "family", None)
    if family not in FAMILIES:
        raise ValueError(f"plugins: EXPORT of '{module}' belongs to no family; subclass one of the Abstract* bases")
    name = module.rsplit(".", 1)[-1]
    if (family, name) not in _plugins and name in Registry(family).names():
        raise ValueError(f"plugins: '{module}' would replace the {Registry(family).noun} '{name}'; rename its file")
    _plugins[family, name] = module
    return family, name
