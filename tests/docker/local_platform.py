"""Runs scripts in a network of their own, in which `local_compose.py` starts services."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from compose_file import DOCKER

NEEDED = ("bwrap", "unshare", "setpriv", "ip", "curl")
Script = Callable[..., "subprocess.CompletedProcess[str]"]


def skip_where_impossible() -> None:
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"runs as root, with {', '.join(missing or NEEDED)}: apt-get install bubblewrap iproute2 curl")
    sandbox = ["unshare", "--net", "bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-uts", "true"]
    if subprocess.run(sandbox, capture_output=True).returncode:
        pytest.skip("runs where namespaces may be made by unshare and bubblewrap")
    if not all(os.stat(path).st_mode & 0o005 == 0o005 for path in (sys.prefix, DOCKER)):
        pytest.skip("runs where other users may read this Python and the project")


@contextmanager
def platform(state: Path, options: Sequence[str | Path]) -> Iterator[Script]:
    """Yields what runs a script whose $COMPOSE is `local_compose.py` with these options; ends what the script left."""
    words = [sys.executable, Path(__file__).with_name("local_compose.py"), "--state", state, *options]
    compose = " ".join(map(str, words))

    def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
        words = ["unshare", "--net", "sh", "-c", f"ip link set lo up && {script}"]
        given = {**os.environ, "COMPOSE": compose, **environ}
        return subprocess.run(words, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    yield run
    for pid in (state / "containers").glob("*/pid"):
        if not pid.with_name("code").exists():
            os.killpg(int(pid.read_text()), signal.SIGKILL)
