"""Settings of Weights & Biases: where runs are sent, and a study's dashboard."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stability.config.base import Settings
from stability.config.identity import Place

PROJECT = "stability"


class WandbSpec(Settings):
    """The settings of ``logger=wandb``."""

    project: str = Field(default=PROJECT, min_length=1, description="project that runs go to")
    entity: str | None = Field(
        default=None, min_length=1, description="user or team that it belongs to; null: the account's default"
    )
    checkpoints: bool = Field(
        default=False, description="whether the last checkpoint of each finished run is sent as an artifact"
    )


class DashboardSpec(Settings):
    """The settings of `stability.dashboard`: a study's runs, its tables and figures, and a workspace on W&B."""

    name: Annotated[str, Place()] = Field(
        min_length=1, description="a study's name under runs_dir/studies, or its folder"
    )
    send: Literal["missing", "all", "none"] = Field(
        default="missing",
        description="runs that are sent from their own files: those missing or incomplete on W&B, all, or none",
    )
    project: str = Field(default=PROJECT, min_length=1, description="project that they go to")
    entity: str | None = Field(
        default=None, min_length=1, description="user or team that it belongs to; null: the account's default"
    )
    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")
    reports_dir: Annotated[str, Place()] = Field(
        default="reports", min_length=1, description="folder of the PDF that is sent, made where it is not up to date"
    )
