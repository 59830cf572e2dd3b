"""Rules of launchers and devices: settings match the launcher, and no device is idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability.registry import Registry

if TYPE_CHECKING:
    from stability.config.sweep import SweepSpec

INSTEAD = {"slurm": "give slurm.{0}s=…", "serial": "add launcher=ray"}  # remedies for cpus_per_trial, gpus_per_trial


def shards_are_not_compiled(sweep: SweepSpec) -> None:
    if sweep.shard_parameters and sweep.compile:
        raise ValueError("compile=true does not go together with shard_parameters=true; leave one of the two out")


def shards_are_not_differentiated_twice(sweep: SweepSpec) -> None:
    if sweep.shard_parameters and sweep.log.curvature is not None:
        raise ValueError(
            f"log.curvature={sweep.log.curvature} takes Hessian-vector products of whole parameters, and "
            "shard_parameters=true splits them; leave one of the two out"
        )


def graphs_are_of_one_device(sweep: SweepSpec) -> None:
    if sweep.cuda_graphs and sweep.devices_per_trial > 1:
        raise ValueError(
            f"cuda_graphs=true works on one device only, and devices_per_trial={sweep.devices_per_trial}; leave one "
            "of the two out"
        )


def settings_are_of_the_launcher(sweep: SweepSpec) -> None:
    """Refuse a setting ignored by the chosen launcher."""
    launcher = sweep.launcher
    reader = "ray" if launcher == "auto" else launcher  # auto chooses ray for such a setting
    for owner, settings in (("ray", sweep.ray), ("slurm", sweep.slurm)):
        fields = type(settings).model_fields
        given = [
            f"{owner}.{name}={getattr(settings, name)}"
            for name in fields
            if getattr(settings, name) != fields[name].default
        ]
        if given and reader != owner:
            raise ValueError(
                f"{given[0]} is read by launcher={owner} only, and this is launcher={launcher}; add "
                f"launcher={owner}, or leave it out"
            )
    if reader == "ray":
        return
    for name, value, default in (("cpu", sweep.cpus_per_trial, None), ("gpu", sweep.gpus_per_trial, "auto")):
        if value != default:
            given = f"{name}s_per_trial={value:g}" if isinstance(value, float | int) else f"{name}s_per_trial={value}"
            raise ValueError(
                f"{given} is read by launcher=ray only, and this is launcher={launcher}; "
                f"{INSTEAD[launcher].format(name)}, or leave it out"
            )


def shards_are_equal(sweep: SweepSpec) -> None:
    """Refuse sharding over one device, of an indivisible batch, or with a non-elementwise optimizer."""
    if not sweep.shard_parameters:
        return
    devices, registry = sweep.devices_per_trial, Registry("optimizers")
    if devices == 1:
        raise ValueError(
            "shard_parameters=true splits a run among its devices, and devices_per_trial is 1; give "
            "devices_per_trial=2 or more"
        )
    if sweep.batch % devices:
        raise ValueError(
            f"shard_parameters=true: batch={sweep.batch} must be a multiple of devices_per_trial={devices}, since all "
            "devices take equally many sequences"
        )
    if whole := [item.name for item in sweep.optimizer if not registry.load(item.name).elementwise]:
        raise ValueError(
            f"shard_parameters=true: optimizer={whole[0]} needs whole tensors, but a device has only slices; "
            "choose an elementwise optimizer, e.g. adamw"
        )


def devices_have_work(sweep: SweepSpec) -> None:
    """Refuse more devices than sequences or microbatches, and fewer GPUs per job than devices."""
    devices, batch, gpus = sweep.devices_per_trial, sweep.batch, sweep.slurm.gpus
    parts = devices if sweep.shard_parameters else -(-batch // (sweep.microbatch or batch))
    if devices > batch:
        raise ValueError(
            f"devices_per_trial={devices} is more than batch={batch}, the sequences of a step; give at most {batch} "
            "devices"
        )
    if devices > parts:
        most = -(-batch // devices)
        while -(-batch // most) < devices:
            most -= 1
        raise ValueError(
            f"devices_per_trial={devices} is more than the {parts} microbatches of batch={batch}; give "
            f"microbatch={most} or less"
        )
    if 0 < gpus < devices:
        raise ValueError(f"slurm.gpus={gpus} must be at least devices_per_trial={devices}, or 0 for CPUs")


OF_SWEEP = (
    shards_are_not_compiled,
    shards_are_not_differentiated_twice,
    graphs_are_of_one_device,
    settings_are_of_the_launcher,
    shards_are_equal,
    devices_have_work,
)
