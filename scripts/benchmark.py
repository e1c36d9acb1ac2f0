"""What the bench_*.py scripts share: the record of where a number was made, and timing."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Device, driver, versions, flags and date, to stand beside every number."""
    device = jax.devices()[0]
    driver = None
    if device.platform == "gpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return dict(
        device=device.device_kind,
        devices=jax.device_count(),
        cores=os.cpu_count(),
        driver=driver,
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        date=datetime.date.today().isoformat(),
    )


def median_seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of `run`, which returns arrays that are waited for; the first call is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def peak_memory() -> int | None:
    """Most bytes that the first device has held, None where it does not tell."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def report(name: str, results: list[dict[str, Any]]) -> None:
    """Prints the last line of a benchmark: one JSON object."""
    print(json.dumps(dict(benchmark=name, environment=environment(), results=results)))
