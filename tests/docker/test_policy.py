"""What docker/ promises of every service, held against the parsed files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from compose_file import DOCKER, VARIABLE, MissingVariable, image_of, read
from places import ROOT
from setup_env import read_lock

from hpo.cli.secret_files import SECRETS

COMPOSE, CUDA, RAY, CA = (DOCKER / f"compose{overlay}.yaml" for overlay in ("", ".cuda", ".ray", ".ca"))
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "mlflow.Dockerfile")
PROJECTS = {"compose": (COMPOSE,), "cuda": (COMPOSE, CUDA), "ray": (COMPOSE, RAY), "ca": (COMPOSE, CA)}
DOCUMENTED = dict(re.findall(r"^([A-Z][A-Z0-9_]*)=(.*)$", (DOCKER / "env.example").read_text(), re.MULTILINE))
LOCKED = yaml.safe_load((DOCKER / "images.lock").read_text())
DIGESTS = {f"{one['image']}@{one['digest']}" for one in LOCKED}
SHELL_LIKE = re.compile(r"PASSWORD|SECRET|TOKEN|_KEY|STORAGE|STORE_URI|DATABASE_URI")
BRINGS = {
    "postgres": {"pg_isready"},
    "rustfs/rustfs": {"curl"},
    "hpo": {"hpo", "ray", "python"},
    "hpo-mlflow": {"python"},
}


@pytest.fixture(params=PROJECTS)
def project(request):
    return read(*PROJECTS[request.param], environ={"HPO_STUDY": "mlp"})


def services(project):
    return project["services"].items()


def name_of(image: str) -> str:
    return image.split("@")[0].rpartition(":")[0]


def test_every_image_is_pinned_by_a_digest_of_the_lock_or_built_here(project):
    for name, service in services(project):
        assert service["image"] in DIGESTS or "build" in service or name_of(service["image"]) == "hpo", name
    for file in DOCKERFILES:
        for base in re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE):
            assert base in DIGESTS or base in re.findall(r" AS (\S+)", file.read_text()), (file.name, base)


def test_the_lock_names_where_each_digest_was_read():
    for one in LOCKED:
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", one["digest"])
        assert len(re.findall(r"[0-9a-f]{40}$", one["read_from"])) == 1 and one["date"]


def test_no_service_may_do_more_than_it_needs(project):
    for name, service in services(project):
        assert service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service and "privileged" not in service and "pid" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True and service["init"] is True, name
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
        assert any(mount.startswith("/tmp:") for mount in service["tmpfs"]), name
        limits = service["deploy"].get("resources", {}).get("limits", {})
        assert service["deploy"].get("replicas") == 0 or limits.keys() == {"cpus", "memory", "pids"}, name


def test_the_images_run_as_the_user_that_their_services_name(project):
    users = {name_of(service["image"]): service["user"] for _, service in services(project)}
    assert image_of(DOCKERFILES[0])["user"] == users["hpo"] and image_of(DOCKERFILES[1])["user"] == users["hpo-mlflow"]
    assert image_of(DOCKERFILES[0])["entrypoint"] == ["hpo"]


def test_ports_are_published_on_loopback_and_the_databases_not_at_all(project):
    for name, service in services(project):
        for port in service.get("ports", ()):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), (name, port)
    assert {name for name, service in services(project) if "ports" in service} == {"mlflow"}
    assert project["networks"]["data"]["internal"] is True
    assert project["services"]["postgres"]["networks"] == project["services"]["s3"]["networks"] == ["data"]


def test_each_secret_is_a_file_and_none_is_in_an_environment(project):
    for name, service in services(project):
        mounted = {f"/run/secrets/{secret}" for secret in service.get("secrets", ())}
        assert {Path(path).name for path in mounted} <= project["secrets"].keys(), name
        named = set()
        for key, value in (service.get("environment") or {}).items():
            if str(value).startswith("/run/secrets/"):
                assert key.endswith(("_FILE", "_PATH")), (name, key)
                named.add(value)
            else:
                assert not SHELL_LIKE.search(key) or key.endswith("_URI"), (name, key)
                assert "@" not in str(value), (name, key)
        assert named == mounted, name
    assert all(secret.keys() == {"file"} for secret in project["secrets"].values())


def test_hpo_reads_every_secret_that_its_services_name(project):
    for name, service in services(project):
        if name_of(service["image"]) == "hpo" and service.get("entrypoint", [""])[0] != "ray":
            files = {key.removesuffix("_FILE") for key in service["environment"] if key.endswith("_FILE")}
            assert files <= set(SECRETS), name


def test_every_dependency_can_meet_its_condition(project):
    for name, service in services(project):
        for other, how in service.get("depends_on", {}).items():
            target = project["services"][other]
            if how["condition"] == "service_healthy":
                assert "test" in target["healthcheck"], (name, other)
            else:
                assert how["condition"] == "service_completed_successfully" and target["restart"] == "no", (name, other)
            assert not target.get("profiles") or how["required"] is False, (name, other)


def test_health_is_asked_with_what_the_image_has(project):
    for name, service in services(project):
        check = service["healthcheck"]
        if service.get("restart") == "no":
            assert check == {"disable": True}, name
        else:
            assert check["test"][0] == "CMD" and check["test"][1] in BRINGS[name_of(service["image"])], name


def test_who_trains_has_longer_to_stop_than_a_checkpoint_takes(project):
    for name in ("driver", "worker"):
        assert project["services"][name]["stop_grace_period"] == "5m"


def test_every_variable_is_documented_with_its_default():
    used = {}
    for file in (COMPOSE, CUDA, RAY, CA):
        for match in VARIABLE.finditer(file.read_text()):
            used.setdefault(match["name"], set()).add((match["rest"] or "") if match["how"] == ":-" else None)
    assert used.keys() == DOCUMENTED.keys() - {"COMPOSE_FILE", "COMPOSE_PROFILES"}
    for name, defaults in used.items():
        assert defaults - {None, "hpo:cuda"} <= {DOCUMENTED[name]}, name


def test_what_has_no_default_is_asked_for():
    with pytest.raises(MissingVariable, match=r"HPO_STUDY: the study to search, in \.env"):
        read(COMPOSE, environ={})


def test_ray_asks_for_a_token_and_has_no_dashboard():
    project = read(COMPOSE, RAY, environ={"HPO_STUDY": "mlp"})
    for name in ("ray-head", "ray-worker", "driver"):
        environment = project["services"][name]["environment"]
        assert (
            environment["RAY_AUTH_MODE"] == "token" and environment["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
        )
    assert "--include-dashboard=false" in project["services"]["ray-head"]["command"]


def test_whoever_asks_the_store_verifies_it_by_the_authoritys_file():
    below, project = (read(*files, environ={"HPO_STUDY": "mlp"}) for files in ((COMPOSE,), (COMPOSE, CA)))
    asks = {name for name, service in services(project) if "AWS_ENDPOINT_URL" in service.get("environment", {})}
    assert asks == {"buckets", "mlflow", "driver", "worker"}
    for name, service in services(project):
        plain = below["services"][name].get("configs", [])
        added = [each for each in service.get("configs", []) if each not in plain]
        assert added == [{"source": "ca", "target": "/run/ca/ca.pem"}] * (name in asks), name
        assert ("AWS_CA_BUNDLE" in service.get("environment", {})) == (name in asks), name
        assert name not in asks or service["environment"]["AWS_CA_BUNDLE"] == "/run/ca/ca.pem"
        assert len(service.get("configs", [])) == len(plain) + (name in asks), name
    assert project["configs"]["ca"] == {"file": "./ca.pem"}


def test_images_take_a_part_of_the_lock():
    """Every package is one of lock.txt, by hash, and of PyTorch each variant takes one build."""
    lock = read_lock(ROOT / "lock.txt")
    taken = {
        names: [entry for entry in lock if entry.fits(names.split(), (3, 11, 16))]
        for file in DOCKERFILES
        for names in re.findall(r'--list "?([^">]+?)"? >', file.read_text().replace("${VARIANT}", "cpu"))
    }
    taken["torch-cuda"] = [entry for entry in lock if entry.fits(["torch-cuda"], (3, 11, 16))]
    versions = {names: {entry.name: entry.version for entry in entries} for names, entries in taken.items()}
    assert taken.keys() == {"base train plots postgres ray s3 apprise", "torch-cpu", "torch-cuda", "mlflow"}
    assert versions["torch-cpu"].keys() == {"torch"} and versions["torch-cpu"]["torch"].endswith("+cpu")
    assert versions["torch-cuda"].keys() > {"torch", "triton", "nvidia-cudnn-cu13"}
    assert {"ray", "psycopg", "boto3", "sympy"} <= versions["base train plots postgres ray s3 apprise"].keys()
    assert not versions["base train plots postgres ray s3 apprise"].keys() & versions["torch-cuda"].keys()
    [version] = re.findall(r"^ARG VERSION=(\S+)", DOCKERFILES[1].read_text(), re.MULTILINE)
    assert versions["mlflow"]["mlflow"] == versions["mlflow"]["mlflow-skinny"] == version


def test_hadolint_finds_nothing():
    command = [str(Path(sys.executable).with_name("hadolint")), *map(str, DOCKERFILES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_dclint_finds_nothing():
    if shutil.which("npx") is None:
        pytest.skip("runs where Node.js with npx is installed")
    command = ["npx", "--yes", "dclint@3.1.0", "-c", str(DOCKER / ".dclintrc.yaml"), str(DOCKER)]
    done = subprocess.run(command, capture_output=True, text=True)
    if re.search(r"npm error code (ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN)", done.stderr):
        pytest.skip("runs where npm's registry can be reached")
    assert (done.returncode, done.stdout.strip()) == (0, "")
