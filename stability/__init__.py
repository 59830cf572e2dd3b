"""A laboratory for the stability of training: how large can the learning rate be, and why does it fail?

It trains runs, measures α_max and prints tables.
"""

import importlib.util
import sys

__version__ = "0.1.0"

NEEDED = ("hydra", "jaxtyping", "numpy", "omegaconf", "pandas", "pydantic", "rich", "torch")  # required by every entry

# only for `python -m stability.…`; an import of the package raises Python's own error
if sys.argv[:1] == ["-m"] and (_lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]):
    sys.stderr.write(
        f"error: {sys.executable} has no module {_lacking[0]}: run `source .venv/bin/activate` first, or install the "
        "packages: pip install -e .\n"
    )
    raise SystemExit(2)
