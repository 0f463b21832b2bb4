"""A training of three hosts, network namespaces whose links fail, as torchrun starts it."""

import time
from contextlib import ExitStack
from pathlib import Path

from scenarios import Scenario
from warm import Launcher

from paceline.launch import ExitCode
from paceline.testing.netlab import INTERFACE, _Network, address
from paceline.testing.processes import open_store

_BANDWIDTH_BITS_PER_S = 1e9
_FLAP_S, _NUM_FLAPS = 0.3, 5
_NUM_STARTS = 3


def train_on_hosts(scenario: Scenario, folder: Path, words: list[str], timeout_s: float) -> tuple[int, int, list[str]]:
    """Train; return the last exit code, how often the training was started again, and what was wrong."""
    problems: list[str] = []
    network = _Network([_BANDWIDTH_BITS_PER_S] * scenario.num_workers)
    try:
        codes: list[int] = []
        for number in range(_NUM_STARTS):
            is_cut = bool(scenario.faults) and number == 0
            codes = _start(scenario, network, folder, words, timeout_s, is_cut=is_cut)
            if set(codes) == {ExitCode.FINISHED}:
                return 0, number, problems
            if not is_cut:
                problems.append(f"with a whole network, ranks ended with codes {codes}")
            elif set(codes) - {ExitCode.FINISHED, ExitCode.PEERS_LOST}:
                problems.append(f"ranks must notice that peers are lost, but ended with codes {codes}")
        return max(codes, key=abs), _NUM_STARTS - 1, problems
    finally:
        network.close()


def _start(
    scenario: Scenario, network: _Network, folder: Path, words: list[str], timeout_s: float, *, is_cut: bool
) -> list[int]:
    store = network.hosts[0].call(open_store)
    environment = {
        "WORLD_SIZE": str(scenario.num_workers),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(network.hosts):
            own = environment | {"RANK": str(rank)}
            launcher = Launcher(words, folder, environment=own, namespace=host.path, name=f"rank{rank}")
            stack.callback(launcher.close)
            ranks.append(launcher)
        if is_cut and _wait_for(folder / "struck-0", deadline_s):
            _cut(network, scenario.faults[0].rank, scenario.detail)
        codes = [launcher.wait(max(1.0, deadline_s - time.monotonic())) for launcher in ranks]
    _mend(network, scenario.faults[0].rank if scenario.faults else 0)
    return codes


def _cut(network: _Network, host: int, how: str) -> None:
    match how:
        case "down":
            network._bridge.batch("ip", f"link set host{host} down")
        case "sends nothing":
            network.hosts[host].batch("tc", f"qdisc replace dev {INTERFACE} root pfifo limit 0")
        case "receives nothing":
            network._bridge.batch("tc", f"qdisc replace dev host{host} root pfifo limit 0")
        case "flaps":
            for _ in range(_NUM_FLAPS):
                network._bridge.batch("ip", f"link set host{host} down")
                time.sleep(_FLAP_S)
                network._bridge.batch("ip", f"link set host{host} up")
                time.sleep(_FLAP_S)


def _mend(network: _Network, host: int) -> None:
    network._bridge.batch("ip", f"link set host{host} up")
    network.limit(host, _BANDWIDTH_BITS_PER_S)


def _wait_for(path: Path, deadline_s: float) -> bool:
    while not path.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True
