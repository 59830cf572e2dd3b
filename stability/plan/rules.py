"""Rules of a plan: requirements of a sweep on its data, its models and its pool of runs.

Rules of the spec alone are in `stability.config.rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability.config.identity import run_id
from stability.optimizers import check_roles, require_matrices
from stability.registry import Registry
from stability.runs.directory import RunDirectory

if TYPE_CHECKING:
    from stability.plan.plan import Plan


def data_are_long_enough(plan: Plan) -> None:
    """Refuse data too short for the model's windows, and an objective with missing requirements."""
    spec, objective = plan.spec, plan.objective
    # refused data stay in the cache: they are complete, and other settings may fit them
    objective.require()
    more = objective.tokens_needed(spec.model.positions) - spec.model.positions
    remedy = Registry("data").load(spec.data.name).remedy(spec.data.settings, plan.corpus)
    plan.corpus.require(spec.model.positions, more, remedy)


def optimizers_have_their_parameters(plan: Plan) -> None:
    """Refuse optimizer settings for a role without parameters, and a matrix optimizer without matrices."""
    for kind in plan.kinds:
        optimizer = kind.spec.optimizer
        takes_matrices = Registry("optimizers").load(optimizer.name).takes_matrices
        if optimizer.groups or takes_matrices:
            check_roles(optimizer.groups, kind.model)
        if takes_matrices:
            require_matrices(kind.model, optimizer.groups)


def samples_can_be_drawn(plan: Plan) -> None:
    """Refuse an unfit sampler, an unfit oracle, and finished samples that would be replaced."""
    spec = plan.spec
    if spec.generate is None:
        return
    from stability.probes.generation.generating import check_kept, check_oracle, resolve_sampler

    run = plan.points[0][1]
    resolve_sampler(run, spec.generate)
    # a dry run checks no oracle that might be downloaded, and none if the data were not read
    oracle = spec.generate.oracle
    if oracle is not None and (not spec.dry_run or (plan.is_read and oracle.startswith("ckpt:"))):
        check_oracle(run, spec.generate, plan.corpus)
    check_kept((RunDirectory(plan.pool, run_id(run)) for _, run in plan.points), spec.generate)


OF_PLAN = (data_are_long_enough, optimizers_have_their_parameters, samples_can_be_drawn)
