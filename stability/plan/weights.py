"""Initial weights of a plan's runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stability.config.sweep import SweepSpec
from stability.plan.resolved import ResolvedRun
from stability.training import hugging_face
from stability.training.weights import Weights, describe_weights


def resolve_weights(
    spec: SweepSpec, kinds: Sequence[ResolvedRun], cache_dir: Path
) -> tuple[SweepSpec, tuple[str, ...]]:
    """Find the weights named by ``init`` and copy them into the pool's cache; a dry run copies nothing.

    Args:
        spec: the sweep.
        kinds: its kinds of runs; the weights must fit their tensors.
        cache_dir: the pool's folder of prepared data.

    Returns:
        The spec with the sha256 of its weights, and a text with the tensors used by each kind; without ``init`` the
            spec itself and no text.

    Raises:
        ValueError: the weights do not exist or do not fit every kind; one or two lines.
    """
    if spec.init is None:
        return spec, ()
    if spec.init.source.startswith("hf:"):
        config = hugging_face.read_config(spec.init.place)
        for kind in () if spec.init.partial else kinds:
            hugging_face.require(config, kind.spec, f"init={spec.init.source}")
    with TemporaryDirectory() as scratch:
        weights = Weights.find(spec.init, kinds[0].shapes, Path(scratch))
        fits = {kind.name: weights.fit(kind.shapes) for kind in kinds}
        for name, fit in fits.items():
            fit.require(weights.spec, name)
        if not spec.dry_run:
            weights.keep(cache_dir)
    return spec.model_copy(update={"init": weights.spec}), (describe_weights(weights.spec, fits),)
