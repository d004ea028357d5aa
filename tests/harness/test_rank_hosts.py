"""A trial whose ranks are on two hosts ends with the bits of one host, whatever the network between them does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from chaos import HANGS, Kind, Placed, Whole, prepared, values_of, whole
from kill import end_all, wait_until
from network import Network, missing
from sqlalchemy import select
from torchruns import Nodes

from hpo.ledger import Ledger
from hpo.ledger.database.tables import attempts, reports

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process", "ranks"), pytest.mark.timeout(600)]

RANKS = ("-o", "train.parallel.data=2", "-o", "train.micro_batch_size=3", "-o", "pause=0.05")
KIND = Kind("tiny_study.py", "tiny", RANKS, trials=3)
BEYOND = 40  # seconds, longer than a node may be silent


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(f"runs where a network of namespaces can be made, as root with iproute2 and iptables: {reason}")
    with closing(Network()) as network:
        yield network


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Whole:
    return whole(KIND, tmp_path_factory.mktemp("one-host") / "home")


@pytest.fixture
def over_hosts(tmp_path, network, postgres_server) -> Iterator[tuple[Placed, Nodes]]:
    url = postgres_server().listen(network.address, network.subnet)
    storage = url.render_as_string(hide_password=False)
    with closing(Ledger(storage)):  # the nodes may come before the driver has made it
        pass
    run = prepared(KIND, tmp_path / "home", {"HPO_STORAGE": storage})
    run.extra = (*run.extra, "--workers", "0")  # of two the last counts
    with ExitStack() as stack:
        stack.callback(end_all)
        nodes = Nodes(run.home, storage, [network.host("node0"), network.host("node1")], study=KIND.name)
        stack.callback(nodes.end)
        yield run, nodes
        sys.stderr.write(nodes.said())


def is_training(run: Placed) -> bool:
    return bool(run.query(select(reports.c.value).limit(1)))


@pytest.mark.parametrize("fault", ["none", "partition", "one way", "loss", "slow"])
def test_ranks_on_two_hosts_train_the_study_of_one(uninterrupted, over_hosts, network, fault):
    run, nodes = over_hosts
    driver = run.run()
    torchruns = [nodes.begin(), nodes.begin()]
    wait_until(lambda: is_training(run), driver)
    _, far = network.hosts
    strike = {
        "partition": lambda: network.partition(far),
        "one way": lambda: network.one_way(far),
        "loss": lambda: network.loss(far, 0.2),
        "slow": lambda: network.rate(far),
    }
    if fault != "none":
        strike[fault]()
        time.sleep(BEYOND if fault in ("partition", "one way") else BEYOND / 4)
        network.heal()
    run.finished(driver, timeout=HANGS)
    assert [torchrun.wait(60) for torchrun in torchruns] == [0, 0]
    assert run.status()["digest"] == uninterrupted.digest and values_of(run) == uninterrupted.values
    assert "0 differences" in run.says("verify")
    outcomes = {outcome for (outcome,) in run.query(select(attempts.c.outcome))}
    assert ("lost" in outcomes) == (fault in ("partition", "one way")), outcomes
