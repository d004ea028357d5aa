"""Where a study ran, on what data, and what changed meanwhile.

{
    "facts": [[name, value]]    texts, to be shown in this order
    "versions": {package: version or null}
    "data": {path: sha256}      of the files that the configuration names
    "read": {what: value}       what the study has counted of its data
    "drift": [{"at": float, "changed": [str]}]      what changed although the study went on: allowed by --allow-drift
    "moves": [{"at": float, "changed": {name: [before, after]}}]   changes of host, versions or workers
    "replays": int              reports that a later attempt has made again with another value
    "digest": str               of the study: equal digests are equal studies, to the last bit
}
Times are seconds since 1970.
"""

from __future__ import annotations

import json
from typing import Any

from hpo.analysis.report.snapshot import Snapshot


def environment(of: Snapshot) -> dict[str, Any]:
    """As the ledger has recorded it."""
    where, spec = of.study["environment"], of.spec
    git = where.get("git") or {}
    commit = f"{git['commit'][:12]}{', with changes that are not committed' if git.get('dirty') else ''}" if git else ""
    strategy = spec["strategy"]
    options = ", ".join(f"{key} {json.dumps(value)}" for key, value in strategy.items() if key != "name")
    facts = {
        "declared in": spec["reference"],
        "overrides": ", ".join(f"{path}={json.dumps(value)}" for path, value in spec["overrides"].items()),
        "objectives": ", ".join(
            f"{one['metric']}, {one['direction']}d, {one['select']} value" for one in of.objectives
        ),
        "sampler": spec["sampler"],
        "strategy": strategy["name"] + (f" ({options})" if options else ""),
        "order": f"{spec['order']}, window {spec['window']}" if spec["order"] == "ordered" else spec["order"],
        "seed": str(spec["seed"]),
        "host": where.get("host", ""),
        "platform": where.get("platform", ""),
        "python": where.get("python", ""),
        "git commit": commit,
    }
    data = of.study["identity"].get("data", {})
    return {
        "facts": [[name, value] for name, value in facts.items() if value],
        "versions": where.get("versions", {}),
        "data": data if isinstance(data, dict) else {},
        "read": where.get("data", {}),
        "drift": [{"at": one["at"], **one["fields"]} for one in of.befell if one["kind"] == "drift"],
        "moves": [{"at": one["at"], "changed": one["fields"]} for one in of.befell if one["kind"] == "environment"],
        "replays": of.replays,
        "digest": of.digest,
    }
