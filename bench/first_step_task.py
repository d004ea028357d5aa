"""The task of mlp, which says when a trial has taken its first step, and what memory its process has then."""

import json
import os
import time
from pathlib import Path

from studies.mlp.task import MlpTask

SAYS = "HPO_BENCH_FIRST_STEP"  # the directory to say it in


def memory() -> dict[str, float]:
    """MiB of this process: resident, and its share where pages are shared; at most, and what is its own alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0].rstrip(":"): int(line.split()[1]) / 1024 for line in lines}
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    own = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"rss": sizes["Rss"], "pss": sizes["Pss"], "own": own, "peak": int(peak.split()[1]) / 1024}


class FirstStep(MlpTask):
    """As mlp; the second loss comes after the first step."""

    losses = 0

    def loss(self, model, batch):
        self.losses += 1
        if self.losses == 2:
            said = {"at": time.monotonic()} | memory()
            Path(os.environ[SAYS], str(os.getpid())).write_text(json.dumps(said))
        return super().loss(model, batch)
