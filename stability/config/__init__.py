"""Validated, frozen settings of sweeps, runs and measurements.

This module exports the names used by other packages.
"""

from stability.config.base import Settings
from stability.config.identity import Place, run_id
from stability.config.parse import parse, parse_run
from stability.config.parts import Part
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec

__all__ = ["Part", "Place", "RunSpec", "Settings", "SweepSpec", "parse", "parse_run", "run_id"]
