"""The network of the chaos suite does to connections what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from forwarder import Forwarder
from network import SERVICES, Host, Impossible, Network, missing

pytestmark = pytest.mark.usefixtures("process")

PORT = 4000
ANSWER = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    size = int(connection.recv(64))
    connection.sendall(b"x" * size)
    connection.close()
"""
ASK = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[3]))
connection.sendall(sys.argv[2].encode())
while connection.recv(1 << 16): pass
"""
RECEIVE = f"""
import select, socket, sys
receiver = socket.socket(type=socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 20)  # SO_RCVBUFFORCE: a busy machine may read late
receiver.bind(("", {PORT}))
receiver.settimeout(0.2)
print("ready", flush=True)
count, sent = 0, False
while True:
    try: count += receiver.recv(8) == b"datagram"
    except TimeoutError:
        if sent: break
        sent = bool(select.select([sys.stdin], [], [], 0)[0])
print(count)
"""
SEND = f"""
import socket, sys
sender = socket.socket(type=socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    try: sender.sendto(b"datagram", (sys.argv[1], {PORT}))
    except PermissionError: pass  # which a cut of what this host sends answers datagrams with
"""
_started: list[subprocess.Popen[str]] = []
RESOLVE = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(f"runs where a network of namespaces can be made, as root with iproute2 and iptables: {reason}")
    with closing(Network()) as network:
        yield network
    while _started:  # all of which the network has killed
        with _started.pop() as process:
            process.wait(10)


def start(host: Host, script: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-ISs", "-c", script, *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    _started.append(host.run(command, os.environ, **pipes))
    return _started[-1]


def ready(host: Host, script: str) -> subprocess.Popen[str]:
    process = start(host, script)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ask(host: Host, server: Host, size: int = 1, timeout: float = 0.7) -> bool:
    """Whether a host gets an answer of so many bytes."""
    process = start(host, ASK, server.address, str(size), str(timeout))
    _, errors = process.communicate()
    assert process.returncode == 0 or "imed out" in errors, errors
    return process.returncode == 0


def arrived(sender: Host, receiver: Host, count: int = 1) -> int:
    """How many of so many datagrams arrive."""
    receiving = ready(receiver, RECEIVE)
    start(sender, SEND, receiver.address, str(count)).communicate()
    return int(receiving.communicate()[0])  # which closes its input: all is sent


def test_a_partition_cuts_both_directions_until_it_is_healed(network):
    first, second = network.host("first"), network.host("second")
    ready(second, ANSWER)
    assert ask(first, second)
    network.partition(second)
    assert not ask(first, second)
    assert (arrived(first, second), arrived(second, first)) == (0, 0)
    network.heal()
    assert ask(first, second)


@pytest.mark.parametrize(("lost", "passes"), [("in", (0, 1)), ("out", (1, 0))])
def test_a_one_way_cut_lets_the_other_direction_pass(network, lost, passes):
    first, second = network.host("first"), network.host("second")
    network.one_way(second, lost)
    assert (arrived(first, second), arrived(second, first)) == passes
    ready(second, ANSWER)
    assert not ask(first, second), "TCP needs both directions"
    network.heal()
    assert (arrived(first, second), arrived(second, first)) == (1, 1)


def test_loss_is_of_a_share_of_the_packets(network):
    first, second = network.host("first"), network.host("second")
    network.loss(second, 0.5)
    assert 120 < arrived(first, second, 400) < 280  # eight standard deviations
    network.heal()
    assert arrived(first, second, 400) == 400


def test_a_rate_bounds_each_direction(network):
    first, second = network.host("first"), network.host("second")
    network.rate(second, "4mbit")
    for server, client in ((first, second), (second, first)):
        answering, begun = ready(server, ANSWER), time.monotonic()
        assert ask(client, server, 400_000, timeout=30)
        assert time.monotonic() - begun > 0.7, "400 kB of which the first 4 pass at once"
        answering.kill()
        answering.communicate()


def test_a_name_is_forgotten_and_known_again(network):
    host, other = network.host("first"), network.host("second")

    def resolved(on: Host) -> str:
        process = start(on, RESOLVE, SERVICES)
        output, errors = process.communicate()
        assert process.returncode == 0 or "Temporary failure in name resolution" in errors, errors
        return output.strip()

    assert resolved(host) == network.address
    network.forget(host)
    assert (resolved(host), resolved(other)) == ("", network.address)
    network.heal()
    assert resolved(host) == network.address


def test_a_host_has_its_hostname_and_what_it_starts_is_there_too(network):
    host = network.host("first")
    nested = "import os, subprocess; print(os.uname().nodename, flush=True); subprocess.run(['uname', '-n'])"
    assert start(host, nested).communicate()[0].split() == [host.name] * 2
    assert socket.gethostname() != host.name


def test_a_closed_network_leaves_nothing(network):
    host = network.host("first")
    process = ready(host, ANSWER)
    network.clear()
    assert process.wait(10) == -9
    assert not any(name.startswith(host.name) for name in traces())
    network.host("first")  # whose name is free again


def test_what_a_dead_process_left_is_removed(network):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, living = f"hpo{dead.pid}-0-left", f"hpo{os.getppid()}-0-living"
    for name in (left, living):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with closing(Network()):
            assert left not in traces() and living in traces()
    finally:
        subprocess.run(["ip", "netns", "delete", living], check=True)


def test_what_cannot_be_done_is_told(network):
    network.host("first")
    with pytest.raises(Impossible, match=r"`ip netns add .*` fails: "):
        network.host("first")


def test_the_forwarder_delays_and_keeps_the_order(network):
    def answer() -> None:
        with server, server.accept()[0] as connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    server = socket.create_server((network.address, 0))
    threading.Thread(target=answer, daemon=True).start()
    with closing(Forwarder(network.address, f"{network.address}:{server.getsockname()[1]}")) as forwarder:
        connection = socket.create_connection((network.address, forwarder.ports[0]), timeout=30)
        sent = b"".join(bytes([number]) * 1000 for number in range(50))
        forwarder.delay(0.2, 0.1)
        time.sleep(0.1)  # until it has read that
        begun = time.monotonic()
        for at in range(0, len(sent), 1000):
            connection.sendall(sent[at : at + 1000])
        received = b""
        while len(received) < len(sent):
            received += connection.recv(1 << 16)
        assert received == sent
        assert time.monotonic() - begun > 0.4, "there and back"
        connection.close()


def traces() -> list[str]:
    places = (Path("/run/netns"), Path("/etc/netns"), Path("/sys/class/net"))
    return [path.name for place in places if place.exists() for path in place.iterdir()]
