"""What the graph of imports promises: no circle, and no look into another package's private modules."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("stability", "sweeps", "analysis", "kernels", "benchmarks")


def sources():
    """The source of each module by its dotted name; a package's own is that of its ``__init__``."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {".".join(name_parts(file)): file.read_text() for file in files}


def name_parts(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(sources):
    """The modules among ``sources`` that each of them imports, wherever in its file, also in functions."""
    graph = {}
    for module, source in sources.items():
        found = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        graph[module] = {name for name in found if name in sources and name != module}
    return graph


def private(graph):
    """The pairs (who, whom) in which a module imports a ``_module`` that lies in another package's folder."""
    return [
        (module, name)
        for module, names in graph.items()
        for name in names
        if name.rpartition(".")[2].startswith("_") and not f"{module}.".startswith(f"{name.rpartition('.')[0]}.")
    ]


def on_circles(graph):
    """The modules that remain when those that import nothing, or are imported by nothing, are taken away one after
    another: every circle is among them."""
    left = {module: set(names) for module, names in graph.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        ends = {module for module, names in left.items() if not names or module not in imported}
        if not ends:
            return sorted(left)
        left = {module: names - ends for module, names in left.items() if module not in ends}


def test_no_module_imports_another_package_s_private_modules():
    assert private(imports(sources())) == []
    planted = {"a.x": "from b import _y\nfrom a import _own", "b._y": "", "a._own": "", "a.sub.z": "import a._own"}
    assert private(imports(planted)) == [("a.x", "b._y")]


def test_no_modules_import_each_other_in_a_circle():
    assert on_circles(imports(sources())) == []
    planted = {"a": "from b import f", "b": "def f():\n    import c", "c": "from a import g", "d": "import a"}
    assert on_circles(imports(planted)) == ["a", "b", "c"]
