"""Settings of the launchers. None of them is part of a run's identity."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from stability.config.base import Settings


def _check_share(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "auto" or (is_number and (0 <= value <= 1 or (value > 1 and float(value).is_integer()))):
        return value
    raise ValueError(
        f"gpus_per_trial={value}: give auto, a share of a GPU from 0 to 1 (0.25), or a whole number of GPUs"
    )


GpuShare = Annotated[float | Literal["auto"], BeforeValidator(_check_share)]


class RaySpec(Settings):
    """The settings of `launcher=ray`."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="running Ray cluster to join: auto or HOST:PORT; null: Ray on this machine alone",
    )
    node_retries: int = Field(
        default=2,
        ge=0,
        description="how often a run resumes after the death of its node or process, before it counts as failed",
    )
    hang_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds without a training step after which a run's process is killed and the run resumes in "
        "another; must be longer than a validation; null: never",
    )

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        """Refuse an address that is neither auto nor HOST:PORT of a cluster's head."""
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                f"ray.address={value}: Ray's client protocol is not used here; run the command on a machine of the "
                "cluster with ray.address=auto"
            )
        if (
            value is not None
            and value != "auto"
            and not (re.fullmatch(r".+:\d{1,5}", value) and 0 < int(value.rpartition(":")[2]) < 65_536)
        ):
            raise ValueError(f"ray.address={value}: must be auto, or HOST:PORT of a cluster's head, e.g. 10.0.0.1:6379")
        return value


class SlurmSpec(Settings):
    """The settings of `launcher=slurm`: one job per run, in arrays."""

    executor: Literal["slurm", "local"] = Field(
        default="slurm", description="slurm: sbatch; local: the same jobs as processes of this machine"
    )
    partition: str | None = Field(default=None, min_length=1, description="partition; null: the cluster's default")
    account: str | None = Field(default=None, min_length=1, description="account that is charged")
    qos: str | None = Field(default=None, min_length=1, description="quality of service")
    constraint: str | None = Field(default=None, min_length=1, description="features that a node must have")
    minutes: int = Field(
        default=240, ge=3, description="time limit of a job; a run that is not done by then saves and is queued again"
    )
    grace_s: int = Field(
        default=90,
        ge=10,
        le=3600,
        description="seconds before the limit at which a job saves; must be longer than a step and a checkpoint",
    )
    requeues: int = Field(
        default=10,
        ge=0,
        description="how often a job that was preempted or ran out of time is queued again, before its run counts as "
        "failed",
    )
    cpus: int | None = Field(default=None, ge=1, description="CPUs of a job; null: as many as a run has threads")
    gpus: int = Field(default=0, ge=0, description="GPUs of a job")
    mem_gb: float | None = Field(default=None, gt=0, description="memory of a job; null: the cluster's default")
    max_parallel: int = Field(
        default=256, ge=1, description="jobs of the sweep that run at a time; local: no more than cores and GPUs allow"
    )
    setup: tuple[str, ...] = Field(default=(), description="shell lines before each job, e.g. ['module load cuda']")

    @field_validator("grace_s")
    @classmethod
    def _check_grace(cls, value: int, info) -> int:
        if "minutes" in info.data and value >= 60 * info.data["minutes"]:
            raise ValueError(
                f"slurm.grace_s={value} must be below the job's {60 * info.data['minutes']} s "
                f"(slurm.minutes={info.data['minutes']})"
            )
        return value
