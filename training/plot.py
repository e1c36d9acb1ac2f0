"""The picture of a training run: loss, learning rate and gradient norm against batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llama_jax.errors import ArgumentError
from training.loop import METRICS, read_metrics


def plot_run(run: Path, out: Path | None = None, title: str | None = None) -> Path:
    """Draws metrics.jsonl of a run and returns where the PNG is.

    Raises:
      ArgumentError: there is no such file, it holds no batch, or matplotlib is not installed.
    """
    path = run if run.is_file() else run / METRICS
    if not path.is_file():
        raise ArgumentError(f"{str(path)!r} does not exist; name the folder of a training run.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("Drawing needs matplotlib: pip install -e '.[plot]'.") from None

    lines = list(read_metrics(path))
    series: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        for name in ("loss", "validation_loss", "learning_rate", "gradient_norm"):
            if isinstance(line.get(name), (int, float)):
                steps, values = series.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(line[name])
    if "loss" not in series:
        raise ArgumentError(f"{str(path)!r} holds no batch yet.")
    panels = [name for name in ("loss", "learning_rate", "gradient_norm") if name in series]
    figure = Figure(figsize=(8, 2 + 2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, panels, strict=True):
        axis.plot(*series[name], linewidth=0.8, label="training")
        if name == "loss" and "validation_loss" in series:
            axis.plot(*series["validation_loss"], marker=".", label="validation")
            axis.legend()
        axis.set_ylabel(name.replace("_", " ") + (", nats a token" if name == "loss" else ""))
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("batch")
    axes[0].set_title(title or path.parent.resolve().name)
    out = out or path.with_name("metrics.png")
    temporary = out.with_name(f".{out.name}.part")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, out)
    return out
