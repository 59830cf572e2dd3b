"""The laboratory finds how far the learning rate can be pushed, and what breaks first: train, measure α_max, print the
tables."""

import importlib.util
import sys

__version__ = "0.1.0"

NEEDED = ("hydra", "jaxtyping", "numpy", "omegaconf", "pandas", "pydantic", "rich", "torch")  # by every entry

# an entry is being looked for by `python -m stability.…`; who imports the package gets Python's own error
if sys.argv[:1] == ["-m"] and (_lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]):
    sys.stderr.write(
        f"error: {sys.executable} has no module {_lacking[0]}: run `source .venv/bin/activate` first, or install the "
        "packages: pip install -e .\n"
    )
    raise SystemExit(2)
