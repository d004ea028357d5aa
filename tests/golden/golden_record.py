"""The recorded files, what today's code gives in their place, and what differs between the two."""

from __future__ import annotations

import difflib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ACCEPT = "Accept what is there now by `make golden ACCEPT=1`, and commit the files it writes."

# Rounding depends on the instructions that a processor has. These variables restrict torch, oneDNN, MKL, OpenBLAS and
# numpy to AVX2 and one thread, so that every x86-64 processor that has AVX2 gives the same numbers.
# OpenBLAS cuts matrices into blocks by the size of a cache, in KiB.
PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_L2_SIZE": "512",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "HPO_LEARN_FROM": "none",  # a study of the matrix is its own, whatever studies share its home
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# On another platform losses may differ by so much, since training amplifies a difference in the last bit. Other metrics
# are not compared there: one prediction more or less moves an accuracy or a Sharpe ratio of little data by far more.
RELATIVE, ABSOLUTE = 0.02, 0.02
_OF_THE_PLATFORM = ("digest", "states", "epochs")  # entries that are not compared on another platform either


def pinned_environment() -> dict[str, str]:
    """Returns this process's environment with the processor pinned and without the settings of hpo and MLflow."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HPO_", "MLFLOW_", "PYTHONW"))}
    return kept | PINNED | {"COLUMNS": "100"}


def computed(*options: str) -> dict[str, Any]:
    """Returns what today's code gives: file name -> text of a help file or JSON of any other; computed in a process of
    its own, which takes `options` as golden_now.py explains them."""
    with tempfile.TemporaryDirectory(prefix="hpo-golden-") as directory:
        output = Path(directory, "now.json")
        command = [sys.executable, str(HERE / "golden_now.py"), str(output), *options]
        ran = subprocess.run(command, env=pinned_environment(), cwd=directory, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"golden_now.py exits {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return json.loads(output.read_text())


def recorded_names() -> list[str]:
    """Returns the names of the recorded files, relative to this directory."""
    return sorted(str(path.relative_to(HERE)) for kind in ("json", "txt") for path in HERE.rglob(f"*.{kind}"))


def recorded(name: str) -> Any:
    """Returns the content of a recorded file."""
    text = (HERE / name).read_text(encoding="utf-8")
    return text if name.endswith(".txt") else json.loads(text)


def write(name: str, content: Any) -> None:
    """Records `content` in the file."""
    path = HERE / name
    path.parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def differences(name: str, before: Any, now: Any, *, exact: bool = True) -> list[str]:
    """Returns the differences in the file, a line each.

    A value that is None now was not computed. Unless `exact`, only losses are compared of a run, with a tolerance.
    """
    if isinstance(before, str) and isinstance(now, str):
        changed = difflib.unified_diff(before.splitlines(), now.splitlines(), "recorded", "now", n=1, lineterm="")
        return [f"{name}: {line}" for line in list(changed)[2:]]
    return [f"{name}: {line}" for line in _differences(before, now, "", exact)]


def _differences(before: Any, now: Any, path: str, exact: bool) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{path} > {key}" if path else key
            if key not in now or key not in before:
                yield f"{inner} is {'gone' if key not in now else 'new'}"
            elif exact or (key not in _OF_THE_PLATFORM and ("/" not in key or "loss" in key)):
                yield from _differences(before[key], now[key], inner, exact)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]", exact)
    elif isinstance(before, list) and isinstance(now, list):
        yield from (f"{path} lacks {value!r}" for value in before if value not in now)
        yield from (f"{path} has a new {value!r}" for value in now if value not in before)
    elif not _alike(before, now, exact):
        yield f"{path}: recorded {before!r}, now {now!r}"


def _alike(before: Any, now: Any, exact: bool) -> bool:
    if now is None:
        return True
    if isinstance(before, float) and isinstance(now, float):
        if math.isnan(before) or math.isnan(now) or exact:
            return repr(before) == repr(now)
        return math.isclose(before, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return before == now


def platform_differences(now: Mapping[str, Any]) -> str:
    """Returns in words what differs between the recorded platform and the one that gave `now`; empty where nothing."""
    before, here = recorded("platform.json"), now["platform.json"]
    changed = [key for key in {**before, **here} if before.get(key) != here.get(key)]
    return ", ".join(f"{key} {here.get(key)} instead of {before.get(key)}" for key in changed)
