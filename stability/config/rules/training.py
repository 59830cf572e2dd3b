"""Rules of training: schedule, optimizer, clipping, guards, batch and compiler fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability.registry import Registry

if TYPE_CHECKING:
    from stability.config.parts import Part
    from stability.config.run import AbstractRecipe, RunSpec
    from stability.config.sweep import SweepSpec


def warmup_and_decay_fit_steps(recipe: AbstractRecipe) -> None:
    """Refuse more steps of warm-up and decay than there are in training."""
    schedule, num_steps = recipe.schedule.settle(recipe.steps), recipe.steps
    if schedule.warmup_steps >= num_steps and schedule.warmup_steps > 0:
        raise ValueError(f"schedule.warmup_steps={schedule.warmup_steps} must be below steps={num_steps}")
    decay_steps = schedule.decay_steps(num_steps)
    if schedule.name == "wsd" and schedule.warmup_steps + decay_steps > num_steps:
        raise ValueError(
            f"schedule.warmup_steps={schedule.warmup_steps} and the {decay_steps} steps of "
            f"schedule.decay_share={schedule.decay_share:g} are more than steps={num_steps}; give less of either"
        )


def guards_can_act(recipe: AbstractRecipe) -> None:
    """Refuse a guard that could never act with these settings."""
    guards = recipe.guards
    if guards.post_clip_norm is not None and guards.post_clip_norm >= recipe.clip_limit:
        raise ValueError(
            f"guards.post_clip_norm={guards.post_clip_norm:g} is never exceeded: gradients are clipped to "
            f"clip_norm={recipe.clip_norm:g}; give less"
        )
    if guards.on_nonfinite == "restore_last_good" and recipe.checkpoint.keep_last == 1:
        raise ValueError(
            "guards.on_nonfinite=restore_last_good needs checkpoint.keep_last=2 or more: the newest "
            "checkpoint may already contain the bad step"
        )


def loss_can_be_compiled(recipe: AbstractRecipe) -> None:
    if recipe.compile and getattr(recipe.objective.settings, "loss_chunk", None) is not None:
        raise ValueError(
            "compile=true does not go together with objective.loss_chunk, whose chunks are computed again in the "
            "backward pass; leave one of the two out"
        )


def graphs_replay_one_pass(recipe: AbstractRecipe) -> None:
    """Refuse CUDA graphs beside other compilers, and of passes that differ from step to step."""
    if not recipe.cuda_graphs:
        return
    other = None
    if recipe.compile:
        other = "compile=true, which makes the same pass"
    elif recipe.model.dropout:
        other = f"model.dropout={recipe.model.dropout:g}, which is seeded on the host for each microbatch"
    elif getattr(recipe.objective.settings, "impl", "reference") == "triton":
        other = "objective.impl=triton, whose number of rows is read on the host"
    if other is not None:
        raise ValueError(f"cuda_graphs=true does not go together with {other}; leave one of the two out")


def microbatch_is_a_part(recipe: AbstractRecipe) -> None:
    """Refuse a microbatch that is no part of the batch; it need not divide it, the last one is smaller."""
    if recipe.microbatch is not None and recipe.microbatch >= recipe.batch:
        raise ValueError(
            f"microbatch={recipe.microbatch} must be below batch={recipe.batch}; microbatch=null uses the whole batch"
        )


def batch_is_whole(recipe: AbstractRecipe) -> None:
    """Refuse parts of a batch for a loss that compares its examples with each other."""
    objective = Registry("objectives").load(recipe.objective.name)
    if (reason := objective.needs_whole_batch(recipe.objective.settings)) and recipe.microbatch is not None:
        raise ValueError(f"microbatch={recipe.microbatch} splits a batch, and {reason}; use microbatch=null")


def batches_are_measured_whole(sweep: SweepSpec) -> None:
    """Refuse devices or measurements that split a batch whose examples are compared with each other."""
    objective = Registry("objectives").load(sweep.objective.name)
    if objective.compares_rows and sweep.devices_per_trial > 1:
        raise ValueError(
            f"devices_per_trial={sweep.devices_per_trial} splits the held-out examples, and objective="
            f"{sweep.objective.name} ranks all of them together; use devices_per_trial=1"
        )
    if not sweep.hessian or not (reason := objective.needs_whole_batch(sweep.objective.settings)):
        return
    if sweep.curvature.microbatch is not None:
        raise ValueError(
            f"curvature.microbatch={sweep.curvature.microbatch} splits a batch, and {reason}; use "
            "curvature.microbatch=null"
        )


def schedule_fits_optimizer(run: RunSpec) -> None:
    _require_schedule(run.optimizer, run.schedule.name)


def schedule_fits_each_optimizer(sweep: SweepSpec) -> None:
    for item in sweep.optimizer:
        _require_schedule(item, sweep.schedule.name)


def initial_step_is_below_steps(run: RunSpec) -> None:
    if run.init is not None and run.init.step >= run.steps:
        raise ValueError(f"init.step={run.init.step} must be below steps={run.steps}")


def _require_schedule(optimizer: Part, schedule: str) -> None:
    fitting = Registry("optimizers").load(optimizer.name).schedules
    if fitting is not None and schedule not in fitting:
        raise ValueError(
            f"schedule={schedule} does not fit optimizer={optimizer.name}, which takes "
            f"schedule={' or '.join(fitting)}; choose that, or leave {optimizer.name} out"
        )


OF_RECIPE = (
    warmup_and_decay_fit_steps,
    guards_can_act,
    loss_can_be_compiled,
    graphs_replay_one_pass,
    microbatch_is_a_part,
    batch_is_whole,
)
OF_RUN = (schedule_fits_optimizer, initial_step_is_below_steps)
OF_SWEEP = (schedule_fits_each_optimizer, batches_are_measured_whole)
