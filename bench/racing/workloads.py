"""What is raced on: a study's own configuration, space and first points, written down for programs that know no study.

A workload is a JSON file. `base` has every field of the study's configuration by its dotted path, `space` what is
searched, as `Dimension.describe` gives it, `enqueue` the points that the study tries first, `overrides` what hpo is
given by `-o` so that all do the same work: held-out data is measured by all at each epoch, and the gpt writes no
samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

STUDIES = ("mlp", "convnet", "gpt")
TEXT_BYTES = 40_000  # of the text that the gpt reads: an epoch of half a second to some seconds, by its width
STAND_IN = "README.md", "CHANGELOG.md", "docs/performance.md"  # in the place of a text that is not given


def workload(name: str, text: Path | None, directory: Path) -> dict[str, Any]:
    """The workload of a study. The gpt's text, the first TEXT_BYTES of `text`, is written into `directory`."""
    from hpo import load

    overrides: dict[str, Any] = {"data.test": True}
    if name == "gpt":
        overrides |= {"data.path": str(_text(text, directory)), "data.held_out": 0.1, "samples.tokens": 0}
    study = load(name).configure(overrides)
    objective = study.objectives[0]
    base = _flat(study.config.model_dump(mode="json"))
    return {
        "name": name,
        "metric": objective.metric,
        "mode": objective.direction,
        "held_out": objective.metric.replace("val/", "test/"),
        "epochs": base["train.num_epochs"],
        "base": base,
        "space": {path: dimension.describe() for path, dimension in study.space.dimensions.items()},
        "enqueue": list(map(dict, study.enqueue)),
        "overrides": overrides,
    }


def _text(given: Path | None, directory: Path) -> Path:
    root = Path(__file__).parent.parent.parent
    content = b"".join(path.read_bytes() for path in ([given] if given else map(root.joinpath, STAND_IN)))
    file = directory / "text.txt"
    file.write_bytes(content[:TEXT_BYTES])
    return file


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value, of a nested configuration."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
