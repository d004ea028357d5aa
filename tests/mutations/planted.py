"""The defects of this directory, as their patches describe themselves.

A patch is a unified diff against the root of the repository. Above the diff it says in a sentence what is wrong, and on
lines `caught-by: TEST` which tests fail with it.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Defect:
    """A mistake that can be planted in the tree, and the tests that notice it."""

    patch: Path
    sentence: str
    caught_by: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.patch.stem

    def apply(self, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
        """Runs `git apply` on a tree, which need not be a checkout."""
        command = ["git", "apply", *options, str(self.patch)]
        environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
        return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)


def read(patch: Path) -> Defect:
    """Returns the defect that a patch describes above its diff."""
    header = patch.read_text().partition("\ndiff --git ")[0].splitlines()
    label = "caught-by: "
    tests = tuple(line.removeprefix(label) for line in header if line.startswith(label))
    return Defect(patch, " ".join(line for line in header if line and not line.startswith(label)), tests)


DEFECTS = {patch.stem: read(patch) for patch in sorted(HERE.glob("*.patch"))}
