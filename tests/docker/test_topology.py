"""The platform of compose.yaml as processes of this machine: `smoke.sh`, unchanged, and what its services say."""

from __future__ import annotations

import json
import re
import subprocess

import local_platform
import pytest
from compose_file import DOCKER
from local_platform import skip_where_impossible


@pytest.fixture
def platform(process, tmp_path):
    skip_where_impossible()
    subprocess.run([DOCKER / "make_secrets.sh", tmp_path / "secrets"], check=True, stdout=subprocess.DEVNULL)
    settings = {"HPO_STUDY": "mlp", "HPO_SECRETS": str(tmp_path / "secrets"), "HPO_LEASE_SECONDS": "5"}
    lines = [f"{key}={value}" for key, value in (settings | {"COMPOSE_PROFILES": "s3"}).items()]
    (tmp_path / "env").write_text("\n".join(lines))
    with local_platform.platform(tmp_path / "state", ["--env-file", tmp_path / "env"]) as run:
        yield run


@pytest.mark.timeout(900)
def test_smoke_sh_loses_nothing(platform):
    done = platform(str(DOCKER / "smoke.sh"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    [trained] = re.findall(r"(\d+) epochs trained in (\d+) attempts", done.stdout)[-1:]
    assert trained[0] == "40"  # 8 trials of 5, each counted once
    assert int(trained[1]) > 8  # workers were killed and the driver was stopped while they trained
    assert "smoke: complete, 8 of 8 trials ended" in done.stdout
    assert re.search(r"^0 differences; checked 1 study, 8 trials", done.stdout, re.MULTILINE)
    assert done.stdout.rstrip().endswith("smoke: nothing is lost")


def test_a_container_sees_what_compose_says_and_no_more(platform, tmp_path):
    look = """
import json, os, pathlib, socket
status = pathlib.Path("/proc/self/status").read_text()
held = "CapEff:\\t0000000000000000" in status, "NoNewPrivs:\\t1" in status
writable = [os.access(path, os.W_OK) for path in ("/", "/etc", "/tmp")]
environment = sorted(name for name in os.environ if "SECRET" in name)
found = os.getuid(), *held, *writable, sorted(os.listdir("/run/secrets")), socket.gethostbyname("postgres"), environment
print(json.dumps(found))
"""
    overlay = tmp_path / "look.yaml"
    overlay.write_text("services:\n  driver:\n    entrypoint: [python, -c]\n")
    done = platform(
        f'$COMPOSE --file {DOCKER}/compose.yaml --file {overlay} run --rm --no-deps -T driver "$LOOK"', LOOK=look
    )
    assert done.returncode == 0, done.stdout
    uid, no_capabilities, no_new, root, etc, tmp, secrets, postgres, environment = json.loads(done.stdout)
    assert (uid, no_capabilities, no_new) == (10001, True, True)
    assert (root, etc, tmp) == (False, False, True)
    assert secrets == ["hpo_storage", "mlflow_password", "s3_access_key", "s3_secret_key"]
    assert postgres == "127.0.0.1" and environment == ["AWS_SECRET_ACCESS_KEY_FILE"]


def test_a_service_waits_for_its_dependencies_and_stops_with_a_sentence(platform, tmp_path):
    (tmp_path / "secrets" / "hpo_storage").chmod(0o600)
    (tmp_path / "secrets" / "hpo_storage").write_text("")
    (tmp_path / "secrets" / "hpo_storage").chmod(0o444)
    done = platform("$COMPOSE up --detach driver; $COMPOSE ps; $COMPOSE down")
    assert re.search(
        r"^driver waits for migrate, which ended with 2: .*HPO_STORAGE_FILE: /run/secrets/hpo_storage is empty",
        done.stdout,
        re.M,
    )
    assert '"driver-1": false' in done.stdout and '"worker-1": false' in done.stdout
