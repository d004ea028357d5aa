"""The search proposes the same on every processor: OpenBLAS' kernels, which differ in the last bits, change nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection

import golden_record
import pytest

KERNELS = ("Prescott", "Sandybridge", "Haswell")  # without AVX, with AVX, and with AVX2 and FMA
# The parts whose libraries multiply or solve matrices by OpenBLAS.
COMPUTED = ("sampler gp", "sampler cmaes", "strategy pb2")
PROGRAM = """
import json, sys
import golden_search, scipy.linalg, threadpoolctl
pools = [pool for pool in threadpoolctl.threadpool_info() if pool["internal_api"] == "openblas"]
kernels = sorted({pool["architecture"] for pool in pools})
print(json.dumps({"kernels": kernels, "digests": golden_search.digests(only=json.loads(sys.argv[1]))}))
"""


def differing(only: Collection[str] | None = None) -> list[str]:
    """Returns the parts, of all or of those in `only`, that do something else under another kernel.

    Skips the test where OpenBLAS has not three kernels for the processor.
    """
    path = os.pathsep.join([str(golden_record.HERE), *filter(None, sys.path)])
    command = [sys.executable, "-P", "-c", PROGRAM, json.dumps(only)]
    started = [
        subprocess.Popen(
            command,
            env=golden_record.pinned_environment() | {"OPENBLAS_CORETYPE": kernel, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kernel in KERNELS
    ]
    printed = [process.communicate() for process in started]
    if any(process.returncode == -signal.SIGILL for process in started):
        pytest.skip(f"runs where the processor has the instructions of {', '.join(KERNELS)}")
    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(errors for _, errors in printed)
    results = [json.loads(output) for output, _ in printed]
    kernels = [result["kernels"] for result in results]
    if [] in kernels or len(set(map(str, kernels))) < len(KERNELS):
        pytest.skip(f"runs where OpenBLAS takes the kernels {', '.join(KERNELS)}; here it takes {kernels}")
    digests = [result["digests"] for result in results]
    return [part for part in digests[0] if len({by_part[part] for by_part in digests}) > 1]


@pytest.mark.timeout(600)
def test_samplers_that_compute_propose_the_same_under_three_kernels(process):
    assert differing(COMPUTED) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_of_the_search_does_the_same_under_three_kernels(process):
    assert differing() == []
