"""A part of `docker compose` without Docker: the services of a compose file as processes of this machine.

Each service has a root of its own that is read-only (bubblewrap), its user, no capabilities, a host name, its process
namespace, its volumes, secrets and configs at the paths that the file names, its own command, environment and
healthcheck, and waits for what it depends on. All share the network namespace that the command runs in, where the
names of services mean loopback. Images of others are replaced by `stand_ins.py`; restart policies are not followed.

    python local_compose.py --state DIRECTORY [--env-file FILE] [--file FILE] up|run|kill|stop|wait|ps|logs|down ...
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from compose_file import DOCKER, image_of, read

ROOT = DOCKER.parent
HERE = Path(__file__).parent
OWN = {"hpo": DOCKER / "Dockerfile", "hpo-mlflow": DOCKER / "mlflow.Dockerfile"}
SYSTEM = ("bin", "lib", "lib64", "sbin")
START_SECONDS = 180.0


@dataclass
class Service:
    """One service of the file, and the files that say what has become of its containers."""

    name: str
    said: Mapping[str, Any]
    model: Mapping[str, Any]
    state: Path

    @property
    def replicas(self) -> int:
        return int(self.said.get("deploy", {}).get("replicas", 1))

    def places(self) -> list[Path]:
        return [self.state / "containers" / f"{self.name}-{number}" for number in range(1, self.replicas + 1)]

    def image(self) -> dict[str, Any]:
        """The entry point and environment of its image; of others' images that of the stand-in."""
        name = self.said["image"].split("@")[0].split(":")[0]
        if name in OWN:
            return image_of(OWN[name])
        return {"entrypoint": [sys.executable, str(HERE / "stand_ins.py")], "environment": {"HOME": "/tmp"}}

    def command(self, words: list[str] | None = None) -> list[str]:
        image = self.image()
        words = words or self.said.get("command") or image.get("command", [])
        return [*(self.said.get("entrypoint") or image["entrypoint"]), *words]

    def environ(self) -> dict[str, str]:
        image = self.image()["environment"]
        given = {key: str(value) for key, value in (self.said.get("environment") or {}).items()}
        programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        return {"LANG": "C.UTF-8", "MKL_CBWR": "AUTO,STRICT"} | image | given | {"PATH": programs}

    def sandbox(self, place: Path) -> list[str]:
        """The words before a command that give it the container's view of the machine, and its user."""
        here = self.image().get("working_dir", "/")
        words = ["bwrap", "--unshare-pid", "--unshare-uts", "--unshare-ipc", "--hostname", place.name, "--clearenv"]
        for mounts in (self._mounts(place), self._machine()):  # the project may lie below /tmp
            for flag, source, target in mounts:
                for path in reversed(Path(target).parents):  # bubblewrap would make them for root alone
                    words += ["--dir", str(path)]
                words += [flag, source, target]
        words += ["--dir", here]
        for name in SYSTEM:
            words += ["--symlink", f"usr/{name}", f"/{name}"] if Path("/", name).is_symlink() else []
        words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/", "--chdir", here]
        words += [word for key, value in self.environ().items() for word in ("--setenv", key, value)]
        uid, gid = self._user()
        words += ["--cap-add", "ALL", "--", "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        return [*words, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]

    def _user(self) -> tuple[int, int]:
        uid, _, gid = self.said["user"].partition(":")
        return int(uid), int(gid)

    def _machine(self) -> Iterator[tuple[str, str, str]]:
        """What stands in for the files of an image: this machine's programs, Python and the project."""
        for path in ("/usr", "/etc", sys.base_prefix, str(ROOT), sys.prefix):
            if path == "/usr" or not path.startswith("/usr/"):
                yield "--ro-bind", path, path
        for name in ("hosts", "passwd"):
            yield "--ro-bind", str(self.state / name), f"/etc/{name}"
        yield "--ro-bind", str(DOCKER / "mlflow_server.py"), "/opt/mlflow_server.py"

    def _mounts(self, place: Path) -> Iterator[tuple[str, str, str]]:
        """What the file mounts: tmpfs, volumes, secrets and configs."""
        for mount in self.said.get("tmpfs", ()):
            path = mount.partition(":")[0]
            yield "--bind", self._kept(place / "tmpfs" / path.strip("/").replace("/", "-")), path
        for volume in self.said.get("volumes", ()):
            *source, target = volume.removesuffix(":ro").split(":")
            if volume.endswith(":ro"):
                yield "--ro-bind", str((DOCKER / source[0]).resolve()), target
            else:  # a named volume stays, one without a name is the container's
                yield "--bind", self._kept(self.state / "volumes" / source[0] if source else place / "volume"), target
        for name in self.said.get("secrets", ()):
            file = DOCKER / self.model["secrets"][name]["file"]
            yield "--ro-bind-try", str(file.resolve()), f"/run/secrets/{name}"
        for config in self.said.get("configs", ()):
            file = DOCKER / self.model["configs"][config["source"]]["file"]
            yield "--ro-bind", str(file.resolve()), config["target"]

    def _kept(self, directory: Path) -> str:
        if not directory.exists():
            directory.mkdir(parents=True)
            os.chown(directory, *self._user())
        return str(directory)

    def start(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / "code").unlink(missing_ok=True)
        for kept in (place / "tmpfs").glob("*"):
            shutil.rmtree(kept)
        supervised = [sys.executable, str(HERE / "local_compose.py"), "--supervise", str(place)]
        log = (place / "log").open("ab")
        process = subprocess.Popen(
            [*supervised, *self.sandbox(place), *self.command()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        (place / "pid").write_text(str(process.pid))

    def healthy(self, place: Path) -> bool:
        test = self.said["healthcheck"]["test"]
        assert test[0] == "CMD", test
        return running(place) is not None and inside(place, self, test[1:]).returncode == 0


def supervise(place: Path, command: list[str]) -> None:
    """Run a container to its end and leave its exit code."""
    code = subprocess.run(command).returncode
    (place / "ended").write_text(str(128 - code if code < 0 else code))
    (place / "ended").rename(place / "code")


def supervised(place: Path) -> bool:
    """Whether a container was started and has not ended."""
    started = (place / "pid").exists() and not (place / "code").exists()
    return started and psutil.pid_exists(int((place / "pid").read_text()))


def running(place: Path) -> psutil.Process | None:
    """The first process of a container that runs, below its supervisor, bubblewrap and bubblewrap's reaper."""
    try:
        process = psutil.Process(int((place / "pid").read_text()))
        for _ in range(3):
            process = process.children()[0]
    except (OSError, psutil.NoSuchProcess, IndexError):
        return None
    return process


def inside(place: Path, service: Service, words: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a command beside a container: its view of the machine, but namespaces of its own."""
    return subprocess.run([*service.sandbox(place), *words], stdin=subprocess.DEVNULL, capture_output=True)


class Project:
    """All services of the file."""

    def __init__(self, state: Path, environ: Mapping[str, str], files: list[Path]) -> None:
        self.state, model = state, read(*files, environ=environ)
        profiles = environ.get("COMPOSE_PROFILES", "").split(",")
        self.services = {
            name: Service(name, said, model, state)
            for name, said in model["services"].items()
            if not said.get("profiles") or set(said["profiles"]) & set(profiles)
        }
        state.mkdir(parents=True, exist_ok=True)
        (state / "hosts").write_text(f"127.0.0.1 localhost {' '.join(model['services'])}\n::1 localhost\n")
        users = {"postgres": 999, "hpo": 10001}
        lines = [f"{name}:x:{uid}:{uid}::/tmp:/usr/sbin/nologin\n" for name, uid in ({"root": 0} | users).items()]
        (state / "passwd").write_text("".join(lines))

    def up(self, names: list[str]) -> None:
        for name in names or self.services:
            service = self.services[name]
            if any(supervised(place) for place in service.places()) or self._done(service):
                continue
            for other, how in service.said.get("depends_on", {}).items():
                self._await(name, other, how)
            for place in service.places():
                service.start(place)

    def _await(self, name: str, other: str, how: Mapping[str, Any]) -> None:
        if other not in self.services:
            assert how.get("required") is False, f"{name} depends on {other}, which is in no profile that is on"
            return
        self.up([other])
        deadline = time.monotonic() + START_SECONDS
        while not self._met(other, how["condition"]):
            place = self.services[other].places()[0]
            code = (place / "code").read_text() if (place / "code").exists() else None
            if time.monotonic() > deadline or (code not in (None, "0")):
                last = (place / "log").read_text().strip().splitlines()[-1:]
                sys.exit(f"{name} waits for {other}, which {f'ended with {code}' if code else 'is not ready'}: {last}")
            time.sleep(0.2)

    def _done(self, service: Service) -> bool:
        """Whether it is a job that has ended well."""
        return service.said.get("restart") == "no" and self._met(service.name, "service_completed_successfully")

    def _met(self, name: str, condition: str) -> bool:
        service = self.services[name]
        if condition == "service_completed_successfully":
            return all((place / "code").exists() and (place / "code").read_text() == "0" for place in service.places())
        return all(service.healthy(place) for place in service.places())

    def signal(self, names: list[str], number: int) -> None:
        """Send it to the services named, or all, the last first, and wait for each to end."""
        for name in reversed(names or list(self.services)):
            places = [place for place in self.services[name].places() if running(place)]
            for place in places:
                process = running(place)
                if process:
                    process.send_signal(number)
            while any(not (place / "code").exists() for place in places):
                time.sleep(0.1)

    def wait(self, name: str) -> int:
        places = self.services[name].places()
        while not all((place / "code").exists() for place in places):
            time.sleep(0.1)
        codes = [int((place / "code").read_text()) for place in places]
        print(*codes)
        return max(codes)

    def run(self, name: str, words: list[str]) -> int:
        service = self.services[name]
        place = self.state / "containers" / f"{name}-run-{os.getpid()}"
        try:
            command = [*service.sandbox(place), *service.command(words)]
            return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        finally:
            shutil.rmtree(place, ignore_errors=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--env-file", type=Path)
    parser.add_argument("--file", type=Path, action="append")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "down", "kill", "stop", "wait", "ps", "logs"):
        one = commands.add_parser(name)
        one.add_argument("names", nargs="*")
        one.add_argument("--detach", action="store_true")
        one.add_argument("--signal", default="SIGKILL")
    run = commands.add_parser("run")
    for flag in ("--rm", "--no-deps", "-T"):
        run.add_argument(flag, action="store_true", required=True)
    run.add_argument("name")
    run.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    lines = given.env_file.read_text().splitlines() if given.env_file else []
    from_file = dict(line.split("=", 1) for line in lines if line.strip() and not line.startswith("#"))
    project = Project(given.state, from_file | os.environ, given.file or [DOCKER / "compose.yaml"])
    match given.command:
        case "up":
            project.up(given.names)
        case "kill":
            project.signal(given.names, signal.Signals[given.signal])
        case "stop" | "down":
            project.signal(given.names, signal.SIGTERM)
        case "wait":
            return project.wait(given.names[0])
        case "run":
            return project.run(given.name, given.words)
        case "ps":
            alive = {place.name: bool(running(place)) for one in project.services.values() for place in one.places()}
            print(json.dumps(alive))
        case "logs":
            for name in given.names or project.services:
                for place in project.services[name].places():
                    print((place / "log").read_text() if (place / "log").exists() else "", end="")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--supervise"]:
        supervise(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
