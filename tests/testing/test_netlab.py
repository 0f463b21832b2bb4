import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.comm import join
from paceline.errors import SettingsError
from paceline.testing import Netlab, netlab, netlab_missing
from paceline.testing.netlab_namespaces import Namespace

needs_netlab = pytest.mark.skipif(bool(netlab_missing()), reason=netlab_missing() or "a netlab can be made")


def sum_ones(num_bytes, num_times):
    """Return how long each of some all-reduces took, and what this rank sees of its host."""
    times_s = []
    with join() as group:
        for _ in range(num_times):
            tensor = torch.ones(num_bytes // 4)
            group.barrier()
            began_s = time.perf_counter()
            group.all_reduce(tensor, name="ones").wait()
            times_s.append(time.perf_counter() - began_s)
            assert tensor.unique().tolist() == [group.size]
        group.barrier()
    return {
        "times_s": times_s,
        "place": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
        "namespace": os.readlink("/proc/self/ns/net"),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
    }


def values(results):
    assert [result.exit_code for result in results] == [0] * len(results), [result.output for result in results]
    return [result.value for result in results]


@needs_netlab
def test_what_hosts_exchange_passes_their_links():
    num_bytes, num_times, bandwidth_bits_per_s = 2**19, 2, 50e6
    with Netlab(3, bandwidth_bits_per_s) as lab:
        before = lab.counters()
        ranks = values(lab.run(sum_ones, {"num_bytes": num_bytes, "num_times": num_times}, ranks_per_host=2))
        after = lab.counters()
    assert [rank["place"] for rank in ranks] == [[rank, rank % 2, 6, 2] for rank in range(6)]
    namespaces = [rank["namespace"] for rank in ranks]
    assert namespaces[::2] == namespaces[1::2], "ranks of one host share its network"
    assert len({*namespaces, os.readlink("/proc/self/ns/net")}) == 4, "hosts have networks of their own"
    assert all(rank["interfaces"] == ["eth0", "lo"] for rank in ranks)
    # Whatever the group does, what every host lacks must come to it, and to sum takes as much again.
    least_bytes = num_times * 2 * (3 - 1) * num_bytes
    for direction in ("sent_bytes", "received_bytes"):
        moved_bytes = [getattr(after[host], direction) - getattr(before[host], direction) for host in range(3)]
        assert least_bytes <= sum(moved_bytes) <= 2 * least_bytes, "what neighbours exchange must not pass the links"
        assert min(moved_bytes) > num_times * num_bytes / 2
    shortest_s = 8 * least_bytes / num_times / 3 / bandwidth_bits_per_s
    assert all(took_s > 0.8 * shortest_s for rank in ranks for took_s in rank["times_s"])


def send_and_wait(num_bytes, ports):
    """Send from host 0 to host 1 some times when the test says so, and return how long the quickest took of each."""
    rank = int(os.environ["RANK"])
    quickest_s = []
    with join() as group:
        for port in ports:
            tensor = torch.zeros(num_bytes, dtype=torch.uint8)
            while rank == 0 and not Path(port).exists():
                time.sleep(0.005)
            times_s = []
            for _ in range(4):
                group.barrier()
                began_s = time.perf_counter()
                if rank == 0:
                    group.send(tensor, 1, tag=0, name="bytes").wait()
                else:
                    group.receive(tensor, 0, tag=0, name="bytes").wait()
                times_s.append(time.perf_counter() - began_s)
                group.barrier()
            quickest_s.append(min(times_s))
            Path(f"{port}.{rank}").touch()
    return quickest_s


@needs_netlab
def test_links_are_limited_each_its_own_way_and_while_in_use(tmp_path):
    num_bytes = 2**18
    signals = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]
    with Netlab(2, [80e6, 20e6]) as lab:

        def change():
            for bandwidths, path in zip([(80e6, 20e6), (5e6, 20e6), (80e6, 80e6)], signals, strict=True):
                for host, bandwidth in enumerate(bandwidths):
                    lab.set_bandwidth(host, bandwidth)
                path.touch()
                while len(list(tmp_path.glob(f"{path.name}.*"))) < 2:
                    time.sleep(0.005)

        thread = threading.Thread(target=change, daemon=True)
        thread.start()
        ranks = values(lab.run(send_and_wait, {"num_bytes": num_bytes, "ports": [str(path) for path in signals]}))
        thread.join()
    took_s = ranks[1]
    for measured_s, slowest_bits_per_s in zip(took_s, (20e6, 5e6, 80e6), strict=True):
        assert measured_s > 0.8 * 8 * num_bytes / slowest_bits_per_s, "the slowest link of the way says how long"
    assert took_s[1] > took_s[0] > took_s[2]  # by 4 times each, on a machine that does nothing else


OWNER = """
import json, os, sys
from pathlib import Path
from paceline.testing import Netlab

lab = Netlab(3, 50e6)
spaces = [*lab._network.hosts, lab._network._bridge]
document = {"paths": [space.path for space in spaces], "links": [os.readlink(space.path) for space in spaces]}
Path(sys.argv[1]).write_text(json.dumps(document))
lab.run(sys.argv[2] + ":write_and_sleep", {"folder": sys.argv[3]})
"""


def write_and_sleep(folder):
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(1000)


def find_processes(marker):
    """Return the processes with `marker` in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition, what):
    deadline_s = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.mark.slow
@needs_netlab
@pytest.mark.timeout(120)
def test_nothing_is_left_of_it_when_its_owner_is_killed(tmp_path):
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    started.mkdir()
    temporary.mkdir()
    document = tmp_path / "document"
    marker = f"PACELINE_TEST_OWNER={tmp_path}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(document), __file__, str(started)],
        env={**os.environ, "PACELINE_TEST_OWNER": str(tmp_path), "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(list(started.iterdir())) == 3 or owner.poll() is not None, "the ranks must start")
        spaces = json.loads(document.read_text())
        # An interface here with its other end in each namespace: it goes when the kernel takes the namespace down.
        witness = Namespace()
        witness.batch(
            "ip", *(f"link add w{n} type veth peer name v netns {path}" for n, path in enumerate(spaces["paths"]))
        )
        assert witness.call(socket.if_nameindex)[1:], "the witness sees the netlab while it is there"
        assert len(find_processes(marker)) == 5, "the owner, the starter and three ranks"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not find_processes(marker), "no process may remain")
    wait_until(lambda: len(witness.call(socket.if_nameindex)) == 1, "no namespace may remain")
    assert list(temporary.iterdir()) == []
    witness.close()


@needs_netlab
def test_it_takes_itself_down():
    witness = Namespace()
    with Netlab(2, 1e6) as lab:
        for number, host in enumerate([*lab._network.hosts, lab._network._bridge]):
            witness.batch("ip", f"link add w{number} type veth peer name v netns {host.path}")
        assert len(witness.call(socket.if_nameindex)) == 4
    wait_until(lambda: len(witness.call(socket.if_nameindex)) == 1, "no namespace may remain")
    lab.close()
    witness.close()


@needs_netlab
def test_this_process_stays_where_it_is():
    before = os.readlink("/proc/self/ns/net"), socket.if_nameindex()
    files = set(os.listdir("/proc/self/fd"))
    with Netlab(2, 1e6) as lab:
        lab.counters()
        assert lab._network.hosts[0].call(lambda: os.readlink("/proc/thread-self/ns/net")) != before[0]
        assert (os.readlink("/proc/self/ns/net"), socket.if_nameindex()) == before
    assert set(os.listdir("/proc/self/fd")) == files


@needs_netlab
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: Netlab(0, 1e6), r"num_hosts must be in \[1, 254\], but got 0"),
        (lambda: Netlab(2, [1e6]), "one for each of 2 hosts, but got 1"),
        (lambda: Netlab(2, 100.0), "bandwidth_bits_per_s must be in .*, but got 100;"),
        (lambda: Netlab(1, 1e6).set_bandwidth(1, 1e6), r"host must be in \[0, 1\), but got 1"),
        (lambda: Netlab(1, 1e6).set_bandwidth(0, 0.0), "bandwidth_bits_per_s must be in .*, but got 0;"),
    ],
    ids=["no hosts", "too few bandwidths", "too slow", "no such host", "changed to nothing"],
)
def test_a_netlab_that_cannot_be_is_refused(change, words):
    with pytest.raises(SettingsError, match=words):
        change()


@pytest.fixture
def asked_anew():
    netlab_missing.cache_clear()
    yield
    netlab_missing.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the reason is another elsewhere")
def test_a_missing_tool_is_the_reason(monkeypatch, asked_anew):
    monkeypatch.setenv("PATH", "")
    assert netlab_missing() == "the command ip is missing; install iproute2"
    with pytest.raises(SettingsError, match="the command ip is missing"):
        Netlab(2, 1e6)


@needs_netlab
def test_a_missing_permission_is_the_reason(monkeypatch, asked_anew):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netlab, "Namespace", refuse)
    assert "Operation not permitted); it takes root" in netlab_missing()


@needs_netlab
def test_a_command_that_fails_inside_says_why():
    space = Namespace()
    with pytest.raises(OSError, match=r'ip could not .*Cannot find device "nothing"'):
        space.batch("ip", "link set nothing up")
    space.close()
    space.close()
