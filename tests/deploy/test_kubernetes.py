"""deploy/kubernetes: every overlay is valid and keeps its promises, and its own commands run a study to its end."""

from __future__ import annotations

import gzip
import json
import re
import shutil

import jsonschema
import local_platform
import pytest
import yaml
from compose_file import DOCKER
from manifests import OVERLAYS, containers, copied, data_of, environ, expanded, pod_templates, rendered, services
from places import ROOT

from hpo.cli.main import app
from hpo.cli.secret_files import SECRETS

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="runs where kubectl is installed")

README = (ROOT / "deploy" / "kubernetes" / "README.md").read_text()
RELEASE = "1.32"
SHELL_LIKE = re.compile(r"PASSWORD|SECRET|TOKEN|_KEY|STORAGE|STORE_URI|DATABASE_URI")


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("manifests") / "kubernetes")


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request, manifests):
    return rendered(manifests / request.param)


def by_name(objects, kind, name):
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_kubernetes_takes_every_object(objects):
    import kubernetes_validate

    assert {"Job", "NetworkPolicy"} <= {each["kind"] for each in objects}
    for each in objects:
        if each["kind"] != "RayCluster":
            kubernetes_validate.validate(each, RELEASE, strict=True)
    for name, template in pod_templates(objects):
        as_object = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}, "template": template}
        if name.startswith("RayCluster"):
            kubernetes_validate.validate(as_object, RELEASE, strict=True)


def test_kuberay_takes_the_cluster(manifests):
    cluster = by_name(rendered(manifests / "overlays" / "ray"), "RayCluster", "hpo")
    schema = json.loads(gzip.decompress((ROOT / "tests" / "assets" / "raycluster-v1.json.gz").read_bytes()))
    jsonschema.validate(cluster, schema)
    cluster["spec"]["headGroup"] = cluster["spec"].pop("headGroupSpec")
    with pytest.raises(jsonschema.ValidationError, match="headGroup"):
        jsonschema.validate(cluster, schema)


def test_pods_are_restricted(objects):
    """Pod Security Standards, restricted, and a file system that nobody writes."""
    assert by_name(objects, "Namespace", "hpo")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == (
        "restricted"
    )
    for name, template in pod_templates(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 10001, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert all({"emptyDir", "secret", "configMap"} & volume.keys() for volume in spec["volumes"]), name
        for container in containers(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), name
            assert any(mount["mountPath"] == "/tmp" for mount in container["volumeMounts"]), name


def test_secrets_are_files_alone(objects):
    for name, template in pod_templates(objects):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for container in containers(template):
            mounted = {
                f"{mount['mountPath']}/{item['path']}"
                for mount in container["volumeMounts"]
                for item in volumes[mount["name"]].get("secret", {}).get("items", ())
            }
            environment = environ(container, objects)
            for key, value in environment.items():
                assert value in mounted if key.endswith("_FILE") else "@" not in value, (name, key)
                assert not SHELL_LIKE.search(key) or key.endswith(("_FILE", "_PATH", "_URI", "AUTH_MODE")), (name, key)
            if container["image"].startswith("hpo:") and "RAY_AUTH_MODE" not in environment:
                files = {key.removesuffix("_FILE") for key in environment if key.endswith("_FILE")}
                assert files <= set(SECRETS), name


def test_every_container_sees_the_authority_by_which_it_verifies(manifests):
    """The lines of README.md, beside the base and beside Ray: a ConfigMap that each container has as a file."""
    lines = re.search(r"```yaml\n(# mine/kustomization.yaml, in addition\n.*?)```", README, re.DOTALL)
    for overlay in ("base", "overlays/ray"):
        mine = manifests / f"mine-{overlay.rpartition('/')[2]}"
        mine.mkdir()
        (mine / "ca.pem").write_text("the authority's certificate\n")
        (mine / "kustomization.yaml").write_text(f"resources: [../{overlay}]\n{lines[1]}")
        objects = rendered(mine)
        assert data_of(objects, "ca") == {"ca.pem": "the authority's certificate\n"}
        assert data_of(objects, "settings")["AWS_CA_BUNDLE"] == "/run/ca/ca.pem"
        for name, template in pod_templates(objects):
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            for container in containers(template):
                [at] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/run/ca"]
                assert volumes[at["name"]]["configMap"] == {"name": "ca", "optional": True}, name
    assert README.count("sslrootcert=/run/ca/ca.pem") == 1


def test_nothing_is_reached_that_no_policy_names(objects):
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    denied = by_name(objects, "NetworkPolicy", "default-deny")["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    labels = {name: template.get("metadata", {}).get("labels", {}) for name, template in pod_templates(objects)}
    for policy in policies:
        chosen = policy["podSelector"].get("matchLabels", {})
        if chosen and "ray.io/cluster" not in chosen:  # which KubeRay sets
            assert any(chosen.items() <= each.items() for each in labels.values()), chosen
        assert all("from" in rule for rule in policy.get("ingress", ())), "nobody from elsewhere comes in"
    assert not [each for each in objects if each["kind"] == "Service" and each["spec"].get("type")]


def test_exit_codes_decide_what_starts_again(objects):
    """2 and 5 end a Job; a node that is drained counts for nothing; 75, 1 and a kill are tried again."""
    for kind in ("driver", "worker"):
        for job in (each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Job", kind)):
            ignored, fatal, refused = job["spec"]["podFailurePolicy"]["rules"]
            assert ignored["action"] == "Ignore"
            assert ignored["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            assert (fatal["action"], fatal["onExitCodes"]["values"]) == ("FailJob", [2, 5])
            assert fatal["onExitCodes"]["containerName"] == kind
            waits = {"containerName": "wait-for-ledger", "operator": "In", "values": [2]}
            assert (refused["action"], refused["onExitCodes"]) == ("FailJob", waits)
            template = job["spec"]["template"]["spec"]
            assert template["restartPolicy"] == "Never"  # which a podFailurePolicy needs
            assert template["terminationGracePeriodSeconds"] >= 25
            assert job["spec"].get("backoffLimit", 0) or job["spec"].get("backoffLimitPerIndex", 0)


def test_hpo_takes_the_arguments(objects):
    import typer

    command = typer.main.get_command(app)
    seen = 0
    for _, template in pod_templates(objects):
        for container in containers(template):
            words = expanded(container.get("args", []), environ(container, objects))
            if container["image"].startswith("hpo:") and words:
                chosen = command.commands[words[0]]  # type: ignore[attr-defined]
                chosen.make_context(words[0], [*words[1:], *(["--storage", "x"] if words[0] != "run" else [])])
                seen += 1
    assert seen >= 2


def test_settings_are_read_by_someone(objects):
    readers = [*(ROOT / "hpo").rglob("*.py"), *(ROOT / "trainer").rglob("*.py"), ROOT / "docker" / "mlflow_server.py"]
    texts = "\n".join(path.read_text() for path in readers)
    arguments = {"HPO_STUDY", "HPO_NAME", "HPO_TRIALS", "HPO_WINDOW"}
    elsewhere = {"AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "MLFLOW_S3_ENDPOINT_URL"}  # read by boto3 and by MLflow
    for name in data_of(objects, "settings").keys() - arguments - elsewhere:
        assert name in texts, name


def test_ranks_agree_on_their_number(manifests):
    objects = rendered(manifests / "overlays" / "ranks")
    worker, driver = (by_name(objects, "Job", name)["spec"] for name in ("worker", "driver"))
    command = worker["template"]["spec"]["containers"][0]["command"]
    assert f"--nnodes={worker['parallelism']}" in command and worker["completions"] == worker["parallelism"]
    assert f"-otrain.parallel.data={worker['parallelism']}" in driver["template"]["spec"]["containers"][0]["args"]
    service = by_name(objects, "Service", worker["template"]["spec"]["subdomain"])
    assert service["spec"]["clusterIP"] == "None" and "--rdzv-endpoint=worker-0.worker:29400" in command


def test_overlays_change_what_they_say(manifests):
    gpu, kueue, spot = (rendered(manifests / "overlays" / name) for name in ("gpu", "kueue", "spot"))
    for kind in ("driver", "worker"):
        [container] = by_name(gpu, "Job", kind)["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1 and container["image"] == "hpo:cuda"
        job = by_name(kueue, "Job", kind)
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "hpo" and job["spec"]["suspend"] is True
    assert by_name(spot, "Job", "worker")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 25
    assert by_name(spot, "Job", "driver")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300


SMALL = """
resources: [../base]
configMapGenerator:
  - name: settings
    namespace: hpo
    behavior: merge
    literals: [HPO_NAME=smoke, HPO_TRIALS=8, HPO_LEASE_SECONDS=5]
patches:
  - target: {kind: Job, name: driver}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: -otrain.num_epochs=20}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: -otrain.batch_size=2}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --strategy=none}
      - {op: replace, path: /spec/template/spec/containers/0/args/4, value: --workers=0}
  - target: {kind: Job, name: worker}
    patch: |  # two Pods would take one port of this host
      - {op: remove, path: /spec/template/spec/containers/0/args/3}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("process")
def test_the_commands_of_the_manifests_lose_nothing(tmp_path):
    """docker/smoke.sh with the Pods' own commands: workers are killed, the driver stops and begins in a new Pod."""
    local_platform.skip_where_impossible()
    directory = copied(tmp_path / "kubernetes")
    (directory / "small").mkdir()
    (directory / "small" / "kustomization.yaml").write_text(SMALL)
    stores = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    model = {
        "services": {name: stores["services"][name] for name in ("postgres", "s3", "buckets")}
        | services(rendered(directory / "small")),
        "secrets": {name: {"file": str(directory / "base" / "secrets" / name)} for name in stores["secrets"]},
        "configs": stores["configs"],
    }
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump(model, sort_keys=False))
    (tmp_path / "env").write_text("COMPOSE_PROFILES=s3\n")
    files = ["--env-file", tmp_path / "env", "--file", tmp_path / "pods.yaml"]
    with local_platform.platform(tmp_path / "state", files) as run:
        done = run(f"{DOCKER}/smoke.sh && $COMPOSE wait worker")
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "smoke: complete, 8 of 8 trials ended" in done.stdout and "0 differences" in done.stdout
    assert (tmp_path / "state" / "containers" / "worker-2" / "code").read_text() == "0"
