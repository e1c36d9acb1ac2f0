"""What the bench_*.py scripts share: the record of where a number was made, and timing."""

from __future__ import annotations

import collections
import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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


class Spent(NamedTuple):
    """What the profiler saw of one kernel (on a CPU, operation) in a run."""

    calls: int
    seconds: float  # all calls together


def kernels(run: Callable[[], Any]) -> dict[str, Spent]:
    """What each kernel of all devices took in one `run`, which returns arrays to wait for; the longest first."""
    durations: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        for path in Path(folder).rglob("*.xplane.pb"):
            planes = jax.profiler.ProfileData.from_file(str(path)).planes
            for plane, line in ((p, line) for p in planes for line in p.lines):
                on_gpu = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
                on_cpu = plane.name == "/host:CPU" and jax.default_backend() == "cpu"
                for event in line.events if on_gpu or on_cpu else ():
                    # The host's lines hold Python's calls and XLA's own work, too; its operations are named like HLO's.
                    if on_gpu or re.fullmatch(r"[a-z][a-z_\-]*(\.\d+)?", event.name):
                        durations[event.name].append(event.duration_ns / 1e9)
    spent = {name: Spent(len(each), sum(each)) for name, each in durations.items()}
    return dict(sorted(spent.items(), key=lambda item: -item[1].seconds))


def peak_memory() -> int | None:
    """Most bytes that the first device has held, None where it does not tell."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def report(name: str, results: list[dict[str, Any]]) -> None:
    """Prints the last line of a benchmark: one JSON object."""
    print(json.dumps(dict(benchmark=name, environment=environment(), results=results)))
