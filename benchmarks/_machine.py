"""Record place and time of a benchmark."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch


def machine() -> str:
    """Return date, processor, cores, load and versions, for the record."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    processor = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M %Z')}; {processor}, load {load}; Python {platform.python_version()}, torch "
        f"{torch.__version__}"
    )
