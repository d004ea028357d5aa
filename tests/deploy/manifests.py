"""Renders deploy/kubernetes as `kubectl apply -k` would, and reads its Pods as services of a Compose file."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from places import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir()))
Object = dict[str, Any]


def copied(directory: Path) -> Path:
    """Returns a copy of the manifests beside which the secrets are, as a person makes them."""
    shutil.copytree(KUBERNETES, directory, ignore=shutil.ignore_patterns("secrets"))
    base, ray = directory / "base" / "secrets", directory / "components" / "ray" / "secrets"
    subprocess.run([ROOT / "docker" / "make_secrets.sh", base], check=True, stdout=subprocess.DEVNULL)
    ray.mkdir()
    for name in ("ray_token", "s3_credentials"):
        shutil.copy(base / name, ray / name)
    return directory


def rendered(directory: Path) -> list[Object]:
    """Returns the objects of a kustomization."""
    done = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yields the name of each workload and its template of Pods."""
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        match each["kind"]:
            case "Job" | "Deployment":
                yield name, each["spec"]["template"]
            case "RayCluster":
                groups = [each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]]
                yield from ((f"{name}/{group.get('groupName', 'head')}", group["template"]) for group in groups)


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def data_of(objects: list[Object], name: str) -> dict[str, str]:
    """Returns the content of a ConfigMap."""
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", name)]
    return found["data"]


def environ(container: Object, objects: list[Object]) -> dict[str, str]:
    """Returns a container's environment, beside that of its image."""
    given: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        given |= data_of(objects, source["configMapRef"]["name"])
    return given | {each["name"]: each["value"] for each in container.get("env", ())}


def expanded(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Returns a command with each $(NAME) replaced, as the kubelet does."""
    return [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in words]


def services(objects: list[Object]) -> dict[str, Object]:
    """Returns the containers of all Jobs and Deployments as services of a Compose file, by their names.

    A container that prepares a Pod is a service of its own, on which the Pod's depends; volumes that a Pod loses with
    its end are temporary file systems. What waits for nothing comes first: a cluster starts all at once.
    """
    model: dict[str, Object] = {}
    for each in objects:
        if each["kind"] not in ("Job", "Deployment"):
            continue
        spec, kind = each["spec"]["template"]["spec"], each["metadata"]["name"]
        *before, main = containers(each["spec"]["template"])
        depends = {}
        for container in before:
            depends[name := f"{kind}-{container['name']}"] = {"condition": "service_completed_successfully"}
            model[name] = _service(container, spec, objects) | {"restart": "no"}
        model[kind] = _service(main, spec, objects) | {
            "depends_on": depends,
            "deploy": {"replicas": each["spec"].get("parallelism", 1)},
            "healthcheck": {"test": ["CMD", "python", "-c", _PROBE]},
        }
    return dict(sorted(model.items(), key=lambda item: len(item[1].get("depends_on", {}))))


_PROBE = "import socket, sys; sys.exit(socket.socket().connect_ex(('127.0.0.1', 5000)))"


def _service(container: Object, spec: Object, objects: list[Object]) -> Object:
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = [(mount["mountPath"], volumes[mount["name"]]) for mount in container["volumeMounts"]]
    environment = environ(container, objects)
    service = {
        "image": container["image"],
        "user": f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}",
        "environment": environment,
        "command": expanded(container.get("args", []), environment),
        "tmpfs": [path for path, volume in mounts if "emptyDir" in volume and path != "/dev/shm"],
        "secrets": [item["key"] for _, volume in mounts for item in volume.get("secret", {}).get("items", ())],
    }
    return service | ({"entrypoint": expanded(container["command"], environment)} if "command" in container else {})
