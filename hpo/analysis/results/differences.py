"""Compares the settings of studies: first those that change the measure, then the training, then the search.

Values of studies with different measures, such as means over two and over three folds, are not comparable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpo.declaration import release_0_1
from hpo.declaration.code_digest import STUDYS
from hpo.declaration.identity import shown
from hpo.declaration.imported import REFERENCE
from hpo.ledger.rows import StudyRow

Kind = Literal["measure", "training", "search"]
KINDS: tuple[Kind, ...] = ("measure", "training", "search")
STUDY = "study"
_CODE, _CONTENT = "code of ", "content of "
_MEASURES = (STUDY, "objectives", "constraints", "train.folds", "train.seeds")
_MEASURED_BY = ("data.", "evaluation.", _CONTENT)  # prefixes of settings, and of files
_OF_A_LOSS = "loss."  # changes only objectives that are losses
_SEARCH = ("sampler", "strategy", "order", "window", "seed", "tier", "trials of the warm start")
_SEARCH += (
    "knowledge of earlier studies",
    "densities of good values",
    "enqueued configurations",
    "study of the listed configurations",
)


@dataclass(frozen=True)
class Difference:
    """A setting that studies do not share: `values` has a text for each study, empty if it lacks the setting."""

    name: str
    kind: Kind
    values: tuple[str, ...]

    def described(self, studies: Sequence[str]) -> str:
        """Returns text such as `train.folds: 2 in a, 3 in b`."""
        values = (f"{value or 'none'} in {study}" for study, value in zip(studies, self.values, strict=True))
        return f"{self.name}: {', '.join(values)}"


def settings(study: StudyRow) -> dict[str, str]:
    """Returns a study's settings by name.

    They are each path of its configuration, with its dimension if it is searched, and its objectives, data, sampler,
    strategy and code. An imported study has no configuration.
    """
    spec, identity = study.spec, release_0_1.translated(study.identity)
    judged = {"objectives": spec.objectives, "constraints": spec.constraints}
    config = {**identity.get("config", {}), **identity.get("space", {})}
    return {
        STUDY: spec.reference,
        **{name: "; ".join(map(_objective, listed)) for name, listed in judged.items()},
        **{path: shown(value) for path, value in config.items()},
        **_entries(_CONTENT, identity.get("data")),
        **_entries(_CODE, identity.get("code")),
        **{name: shown(identity[name]) for name in _SEARCH if name in identity},
    }


def differences(studies: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Returns the settings that are not the same in all studies, in the order of KINDS."""
    losses = any("loss" in settings.get("objectives", "") for settings in studies)
    return sorted(_differing(studies, losses), key=lambda difference: KINDS.index(difference.kind))


def incomparable(studies: Sequence[str], differences: Sequence[Difference]) -> str:
    """Returns a sentence that warns of comparing the values of `studies`; empty if they have one measure."""
    measures = [difference.described(studies) for difference in differences if difference.kind == "measure"]
    if not measures:
        return ""
    return f"the values of {' and '.join(studies)} are not of one measure: {'; '.join(measures)}."


def _differing(studies: Sequence[Mapping[str, str]], losses: bool) -> Iterator[Difference]:
    imported = [settings for settings in studies if settings[STUDY].startswith(REFERENCE)]
    codes = [{name: value for name, value in settings.items() if name.startswith(_CODE)} for settings in studies]
    moved = bool(codes[0]) and all(code == codes[0] for code in codes)  # the same declaration, in another place
    for name in dict.fromkeys(name for settings in studies for name in settings):
        values = tuple(settings.get(name, "") for settings in studies)
        known = all(name in settings for settings in imported)
        if len(set(values)) > 1 and known and not (name == STUDY and moved) and not _follows(name, values):
            yield Difference(name, _kind(name, losses), values)


def _follows(name: str, values: Sequence[str]) -> bool:
    """Returns whether the values differ only because other settings do: `paired` compares the folds that trials
    have."""
    if name != "strategy" or not all(value.startswith("{") for value in values):
        return False
    strategies = [json.loads(value) for value in values]
    return all(strategy.get("name") == "paired" for strategy in strategies) and (
        len({json.dumps({**strategy, "parts": 0}, sort_keys=True) for strategy in strategies}) == 1
    )


def _kind(name: str, losses: bool) -> Kind:
    if name in _MEASURES or name.startswith(_MEASURED_BY) or (losses and name.startswith(_OF_A_LOSS)):
        return "measure"
    return "search" if name in _SEARCH else "training"


def _objective(objective: Mapping[str, object]) -> str:
    options = (f"{name}={json.dumps(value)}" for name, value in objective.items() if name != "metric")
    return f"{objective['metric']} ({', '.join(options)})"


def _entries(what: str, digests: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the shortened digests of files by name."""
    shortened = {label: digest.removeprefix(STUDYS)[:12] for label, digest in (digests or {}).items()}
    return {f"{what}{label or 'the study'}": digest for label, digest in shortened.items()}
