"""Checks the processors, memory and GPUs of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from hpo.doctor.finding import Finding
from hpo.door import option
from hpo.text import counted, megabytes

DRIVER = Path("/proc/driver/nvidia/version")


def processors() -> Iterator[Finding]:
    """Yields the cores that this process may use, and the memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    text = f"{usable} of {counted(os.cpu_count() or 1, 'core')} usable, "
    text += f"{megabytes(memory.available)} of {megabytes(memory.total)} of memory free"
    if memory.available < 1e9:
        yield Finding(
            "devices",
            "note",
            text,
            f"a worker takes half a gigabyte before its model: begin with {option('workers', '1')}.",
        )
    else:
        yield Finding("devices", "ok", text)


def abilities(capability: tuple[int, int]) -> str:
    """Returns the precisions and kernels that an NVIDIA GPU of a compute capability supports (docs/guide/gpu.md)."""
    least = {"bf16 and attention within documents": (8, 0), "fp8": (8, 9)}
    has = [name for name, needed in least.items() if capability >= needed]
    return f"compute capability {capability[0]}.{capability[1]}: {', '.join(has) or 'fp16, without bf16'}"


def accelerators(driver: Path = DRIVER) -> Iterator[Finding]:
    """Yields the GPUs that torch sees.

    A driver whose GPUs torch does not see is a failure: trials would silently train on the processor.
    """
    if not find_spec("torch"):
        yield Finding("devices", "ok", "no GPU is looked for: PyTorch is not installed")
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("devices", "fails", f"torch cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    seen = f"driver {driver.read_text().splitlines()[0].split('  ')[1]}" if driver.is_file() else ""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            text = f"cuda:{index} {torch.cuda.get_device_name(index)}, {megabytes(free)} of {megabytes(total)} free"
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
            can = abilities(torch.cuda.get_device_capability(index))
            yield Finding("devices", "ok", ", ".join(filter(None, [text, built, seen, can])))
    elif seen:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        fix = "install the torch of https://pytorch.org/get-started that fits the driver, or set train.device=cpu."
        yield Finding("devices", "fails", f"NVIDIA's {seen} is there, and torch {torch.__version__} {built}", fix)
    elif torch.backends.mps.is_available():
        yield Finding("devices", "ok", "mps (Apple)")
    else:
        yield Finding("devices", "ok", f"no GPU: torch {torch.__version__} trains on the processor")
