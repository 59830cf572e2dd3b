"""What the graph of imports promises: no circle, no look into another package's private modules, and a home for each
third party."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("stability", "sweeps", "analysis", "kernels", "benchmarks")

# Where each third party may be imported, at the head of a file or in a function (CONTRIBUTING): modules, or packages
# with all that is in them. A new dependency is given its home here.
HOMES = {
    "PIL": ("stability.corpora.images",),
    "biotite": ("stability.corpora.proteins",),
    "curvlinops": ("benchmarks",),
    "jax": ("benchmarks",),
    "jinja2": ("stability.web",),
    "evo2": ("stability.probes.generation.evo2_oracle",),
    "datasets": ("stability.data.hf",),
    "huggingface_hub": ("stability.data.hf",),
    "hydra": ("stability.cli",),
    "liger_kernel": ("benchmarks",),
    "mlflow": ("stability.runs.mlflow_sink",),
    "matplotlib": ("analysis", "benchmarks"),
    "omegaconf": ("stability.cli",),
    "optuna": ("sweeps.search.optuna",),
    "pyarrow": (
        "analysis.study",
        "stability.corpora.io",
        "stability.corpora.sentences",
        "stability.corpora.tokens",
        "stability.runs",
    ),
    "pyhessian": ("benchmarks",),
    "pynvml": ("stability.training.devices",),
    "pytorch_optimizer": ("stability.optimizers._base",),
    "ray": ("sweeps.launchers.ray",),
    "rich": ("benchmarks", "stability.cli", "stability.corpora.io", "stability.status", "sweeps"),
    "safetensors": (
        "stability.deployed.folder",
        "stability.sentences.export",
        "stability.structure.tokenizer",
        "stability.training",
    ),
    "scipy": (
        "analysis.numbers",
        "stability.corpora.proteins",
        "stability.corpora.sentences",
        "stability.objectives.sentence_pairs",
        "stability.sentences.neighbours",
        "stability.probes.layers.laplacian",
    ),
    "sentence_transformers": ("stability.sentences.encoder", "stability.sentences.st_module"),
    "starlette": ("benchmarks.web", "stability.web"),
    "submitit": ("sweeps.launchers.slurm",),
    "tensorboard": ("stability.runs.tensorboard_sink",),
    "tiktoken": ("stability.corpora.tokens.gpt2",),
    "tiktoken_ext": ("stability.corpora.tokens.gpt2",),
    "transformers": ("benchmarks", "stability.probes.pretrained"),
    "triton": ("kernels",),
    "typst": ("analysis.report",),
    "plotly": ("analysis.page",),
    "uvicorn": ("stability.web",),
    "wandb": ("stability.dashboards.study_run", "stability.runs.wandb_sink"),
    "wandb_workspaces": ("stability.dashboards.workspace",),
    "yaml": ("stability.web.form",),
}
AT_HOME_EVERYWHERE = {
    "jaxtyping",
    "numpy",
    "pandas",
    "pydantic",
    "pydantic_core",
    "torch",
}  # but for what contracts say


def sources():
    """The source of each module by its dotted name; a package's own is that of its ``__init__``."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {".".join(name_parts(file)): file.read_text() for file in files}


def name_parts(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def without_type_imports(source):
    """The same source without its ``if TYPE_CHECKING`` blocks, which never run."""
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.unparse(tree)


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
    """Imports for type checkers alone may: a rule of `stability.config.rules` names the class of spec that calls it."""
    running = {module: without_type_imports(source) for module, source in sources().items()}
    assert on_circles(imports(running)) == []
    planted = {"a": "from b import f", "b": "def f():\n    import c", "c": "from a import g", "d": "import a"}
    assert on_circles(imports(planted)) == ["a", "b", "c"]
    typed = {"a": "from b import f", "b": "if TYPE_CHECKING:\n    from a import g\nimport c", "c": ""}
    assert on_circles(imports({module: without_type_imports(source) for module, source in typed.items()})) == []


def third_parties(source):
    """The packages beside ours and Python's own that a source imports, wherever, also by ``import_module("name")``; by a
    name that is computed (`stability.registry`, the adapters of `stability.curvature`) they are not seen."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names.update(each.value for each in node.args if isinstance(each, ast.Constant))
    return {name.partition(".")[0] for name in names} - set(PACKAGES) - set(sys.stdlib_module_names)


def is_in(module, home):
    return f"{module}.".startswith(f"{home}.")


def away_from_home(sources):
    """The pairs (who, whom) in which a module imports a third party that has its home elsewhere, or none."""
    return [
        (module, party)
        for module, source in sources.items()
        for party in sorted(third_parties(source) - AT_HOME_EVERYWHERE)
        if not any(is_in(module, home) for home in HOMES.get(party, ()))
    ]


def test_third_parties_are_imported_at_home_only():
    assert away_from_home(sources()) == []
    planted = {
        "stability.runs.directory": "import wandb",
        "stability.runs.wandb_sink": "import wandb",
        "stability.objectives.ar": "def f():\n    import wandb.sdk as w",
        "stability.config.run": "from hydra import compose",
        "stability.cli.conf": "from hydra.errors import HydraException",
        "stability.runs.log": "if TYPE_CHECKING:\n    from matplotlib.figure import Figure",
        "sweeps.dry_run": "importlib.import_module('ray.tune')",
        "stability.runs.schema": "import somebody_new, numpy, json, stability.config",
    }
    assert away_from_home(planted) == [
        ("stability.runs.directory", "wandb"),
        ("stability.objectives.ar", "wandb"),
        ("stability.config.run", "hydra"),
        ("stability.runs.log", "matplotlib"),
        ("sweeps.dry_run", "ray"),
        ("stability.runs.schema", "somebody_new"),
    ]


def at_the_top(source):
    """The packages that are imported as soon as a module is."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.Try)]
    return third_parties(ast.unparse(tree))


def test_libraries_of_an_extra_are_imported_when_they_are_asked_for():
    lazily = {"datasets", "lightning", "mlflow", "submitit", "tensorboard", "transformers", "typst", "wandb"}
    found = {module: at_the_top(source) & lazily for module, source in sources().items()}
    assert not any(names for module, names in found.items() if not is_in(module, "benchmarks"))
    assert at_the_top("import wandb\ndef f():\n    import ray") == {"wandb"}


def test_every_home_is_lived_in():
    importing = {module: third_parties(source) for module, source in sources().items()}
    empty = {
        (party, home)
        for party, homes in HOMES.items()
        for home in homes
        if not any(party in found for module, found in importing.items() if is_in(module, home))
    }
    assert not empty
