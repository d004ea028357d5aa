"""The digest of what each version of each part of the platform does, and which changes of it may be recorded.

`behaviour.json` holds part -> version -> digest (hpo.declaration.behaviour has the parts). A digest may only change
with its part's version, or with the version of a part that it is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from hpo.declaration import behaviour

Digests = Mapping[str, Mapping[str, str | None]]  # part -> version -> digest; None where it was not computed

# Kind of part -> the kinds that its digest is computed with.
COMPUTED_WITH: dict[str, tuple[str, ...]] = {
    "space": ("space", "search", "sampler"),
    "search": (),
    "warm": ("space", "search", "sampler"),
    "learning": ("space", "search", "sampler"),
    "sampler": ("space", "search", "sampler"),
    "strategy": ("space", "search", "sampler", "strategy"),
    "optimizer": (),
    "schedule": ("optimizer", "trainer"),
    "trainer": ("optimizer", "schedule", "trainer"),
    "study": ("space", "search", "sampler", "strategy", "optimizer", "schedule", "trainer"),
}
# Earlier versions whose digests differ between processors, so that none is recorded.
BY_PROCESSOR = {("strategy pb2", 1)}
# (part, version) -> why that version does in its digest what the one before did.
SAME_DIGEST: dict[tuple[str, int], str] = {
    ("study gpt", 2): "no document of its golden run spells a special token",
    ("study lora", 2): "no record of its golden run spells a special token",
}


def digests(studies: Mapping[str, Any], *, every: bool) -> Digests:
    """Returns the digests that today's code gives. `studies` are the runs of golden_studies, by file; what takes long
    is None unless `every` part is computed."""
    import golden_search
    import golden_trainer

    newest = {**golden_search.digests(), **golden_trainer.digests(every=every)}
    newest |= {f"study {name}": _of_study(studies[f"studies/{name}.json"]) for name in behaviour.BUNDLED}
    result = {part: {str(behaviour.version(part)): digest} for part, digest in newest.items()}
    kept = {part: [*behaviour.runnable(part)[:-1]] for part in behaviour.parts()}
    for part, version in ((part, version) for part, versions in kept.items() for version in versions):
        unstable = (part, version) in BY_PROCESSOR
        digest = None if unstable else golden_search.digests({part: version}, only=[part])[part]
        result[part] = {str(version): digest, **result[part]}
    return {part: result[part] for part in sorted(result)}


def _of_study(run: Mapping[str, Any] | None) -> str | None:
    if run is None:
        return None
    return run.get("digest") or sha256(repr(run).encode()).hexdigest()


def refusals(recorded: Digests, now: Digests) -> Iterator[str]:
    """Yields, in a sentence each, the changes that may not be recorded."""
    raised = {part for part, versions in now.items() if versions.keys() - recorded.get(part, {}).keys()}
    for part, versions in now.items():
        before = recorded.get(part, {})
        others = {other.partition(" ")[0] for other in raised if other != part}
        excused = others.intersection(COMPUTED_WITH[part.partition(" ")[0]])
        for version, digest in versions.items():
            known = version in before and None not in (digest, before[version])
            if known and digest != before[version] and not excused:
                yield (
                    f"{part}, version {version}, does something else than was recorded: undo that, or raise its "
                    "version by a Change in hpo/declaration/behaviour.py."
                )
            previous = str(int(version) - 1)
            same = digest is not None and digest == before.get(previous)
            if version not in before and same and (part, int(version)) not in SAME_DIGEST:
                yield (
                    f"{part}: version {version} does what version {previous} did: say why it was raised in "
                    "SAME_DIGEST of golden_behaviour.py, or leave it."
                )
