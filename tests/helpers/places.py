"""Where things of the repository lie, for tests at any depth."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tests" / "harness"
