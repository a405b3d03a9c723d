"""Reads metrics of this machine's GPUs from the driver by NVML; needs the extra ``metrics``."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

# By a GPU's index, the value of each measure.
GpuMeasures = dict[str, dict[str, float]]
MEANS = ("busy", "watts")  # of a window; the largest value of other measures says more


def read_gpus() -> GpuMeasures:
    """Return, by index, ``used_bytes``, ``total_bytes``, ``busy`` (0 to 1), ``celsius`` and ``watts``, if known.

    Empty without the extra or without a driver. See NVML's reference (docs.nvidia.com/deploy/nvml-api).
    """
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        return {str(index): _read(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())}
    except pynvml.NVMLError:  # a lost GPU is missing in the metrics
        return {}
    finally:
        pynvml.nvmlShutdown()


def of_window(samples: Sequence[GpuMeasures]) -> GpuMeasures:
    """Summarise measures of a window: the mean of ``busy`` and ``watts``, and the largest of the others."""
    found: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        for index, measures in sample.items():
            for name, value in measures.items():
                found.setdefault(index, {}).setdefault(name, []).append(value)
    return {
        index: {name: fmean(values) if name in MEANS else max(values) for name, values in measures.items()}
        for index, measures in found.items()
    }


def _read(nvml: Any, index: int) -> dict[str, float]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    measures: dict[str, Callable[[], float]] = {
        "used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
        "total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).total,
        "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
        "celsius": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
    }
    found: dict[str, float] = {}
    for name, measure in measures.items():
        with suppress(nvml.NVMLError):  # not every device has every sensor
            found[name] = float(measure())
    return found
