"""Describes the environment of a study, its data, and what changed in between.

{
    "facts": [[name, value]]    texts, to be shown in this order
    "versions": {package: version or null}
    "data": {path: sha256}      of the files that the configuration names
    "read": {what: value}       what the study has counted of its data
    "drift": [{"at": float, "changed": [str]}]      changes under which the study went on: allowed by --allow-drift
    "moves": [{"at": float, "changed": {name: [before, after]}}]   changes of host, versions or workers
    "replays": int              reports that a later attempt has made again with another value
    "digest": str               of the study: equal digests are equal studies, to the last bit
}
Times are seconds since 1970.
"""

from __future__ import annotations

import json
from typing import Any

from hpo.analysis.report.snapshot import REPLAYED, Snapshot


def environment(of: Snapshot) -> dict[str, Any]:
    """Returns the environment that the ledger has recorded."""
    recorded, spec = of.study.environment, of.spec
    git = recorded.get("git") or {}
    commit = f"{git['commit'][:12]}{', with changes that are not committed' if git.get('dirty') else ''}" if git else ""
    strategy = spec.strategy
    options = ", ".join(f"{key} {json.dumps(value)}" for key, value in strategy.items() if key != "name")
    facts = {
        "declared in": spec.reference,
        "overrides": ", ".join(f"{path}={json.dumps(value)}" for path, value in spec.overrides.items()),
        "objectives": ", ".join(
            f"{objective['metric']}, {objective['direction']}d, {objective['select']} value"
            for objective in of.objectives
        ),
        "sampler": spec.sampler,
        "learned from": ", ".join(lesson["study"] for lesson in spec.json.get("knowledge", {}).get("studies", ())),
        "strategy": strategy["name"] + (f" ({options})" if options else ""),
        "order": f"{spec.order}, window {spec.window}" if spec.order == "ordered" else spec.order,
        "seed": str(spec.seed),
        "host": recorded.get("host", ""),
        "platform": recorded.get("platform", ""),
        "python": recorded.get("python", ""),
        "git commit": commit,
    }
    data = of.study.identity.get("data", {})
    return {
        "facts": [[name, value] for name, value in facts.items() if value],
        "versions": recorded.get("versions", {}),
        "data": data if isinstance(data, dict) else {},
        "read": recorded.get("data", {}),
        "drift": [{"at": event.at, **event.fields} for event in of.befell if event.kind == "drift"],
        "moves": [{"at": event.at, "changed": event.fields} for event in of.befell if event.kind == "environment"],
        "replays": len(of.befell_trials(REPLAYED)),
        "digest": of.digest,
    }
