"""Requests and replies over links: what arrives, who waits for whom, and who is lost."""

import os
import signal
import threading
import time

import pytest
import torch

from paceline.comm import LocalGroup, join, rpc
from paceline.comm.host_group import HostGroup
from paceline.comm.rpc import NOTHING, RpcEndpoint, RpcHeader, RpcService
from paceline.errors import CommunicationError
from paceline.testing.processes import run_processes


class Sums(RpcService):
    """Adds up what is pushed, and gives the sum to who pulls; kind 1 waits until `gate` is set."""

    def __init__(self, size=4):
        self.total = torch.zeros(size)
        self.bodies = {}
        self.lost = {}
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.failure = None

    def request_buffer(self, caller):
        return self.bodies.setdefault(caller, torch.empty(16, dtype=torch.uint8))

    def handle(self, caller, header, body):
        if header.kind == 9:
            raise RuntimeError("the roof fell in")
        with self.lock:
            if len(body):
                self.total += body.view(torch.float32)
        if header.kind == 1:
            self.gate.set()

        def wait():
            if header.kind == 2:
                self.gate.wait(30)
            if self.failure is not None:
                raise self.failure
            with self.lock:
                reply = RpcHeader(header.kind, header.clock + 1, header.version, caller, 7, header.weight, header.value)
                return reply, self.total.clone().view(torch.uint8)

        return wait

    def drop_caller(self, caller, error):
        self.lost[caller] = error

    def fail(self, error):
        self.failure = error
        self.gate.set()


def _open(group, servers=1):
    service = Sums() if group.rank < servers else None
    routes = [(caller, server) for caller in range(group.size) for server in range(servers)]
    return RpcEndpoint(group, routes, service, "sums"), service


def _ones(value=1.0):
    return torch.full((4,), value).view(torch.uint8)


def _call_for_ever(client):
    while True:
        client.call(RpcHeader(0), _ones())


@pytest.mark.parametrize(("size", "servers"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_every_header_and_body_arrives_at_every_server_and_back(size, servers):
    def work(group):
        opened, service = _open(group, servers)
        for number, client in enumerate(opened.clients.values()):
            client.begin(RpcHeader(0, 3, 2**40, 5, 6, weight=0.1, value=-1e300), _ones(number + 1.0))
        into = torch.zeros(16, dtype=torch.uint8)
        for client in opened.clients.values():
            header, body = client.finish(into)
            assert header == RpcHeader(0, 4, 2**40, group.rank, 7, 0.1, -1e300)
            assert body is into
        group.barrier()
        sums = [client.call(RpcHeader(0))[1].view(torch.float32).tolist() for client in opened.clients.values()]
        opened.close()
        return sums, dict(service.lost) if service else None

    for sums, lost in LocalGroup.run(size, work):
        assert sums == [[size * (server + 1.0)] * 4 for server in range(servers)]
        assert lost is None or lost == dict.fromkeys(range(size))


def test_one_that_waits_holds_up_nobody_else():
    def work(group):
        opened, _ = _open(group)
        if group.rank == 1:
            opened.clients[0].call(RpcHeader(2), _ones())  # waits for rank 2's last request
        if group.rank == 2:
            for _ in range(5):
                opened.clients[0].call(RpcHeader(0), _ones())
            opened.clients[0].call(RpcHeader(1))
        opened.close()
        return True

    assert LocalGroup.run(3, work) == [True] * 3


def test_a_caller_that_computes_longer_than_the_time_out_is_not_lost(monkeypatch):
    monkeypatch.setattr(rpc, "_ALIVE_INTERVAL_S", 0.05)

    def work(group):
        opened, service = _open(group)
        if group.rank == 1:
            time.sleep(2.0)
            opened.clients[0].call(RpcHeader(0), _ones())
        opened.close()
        return service.lost if service else None

    assert LocalGroup.run(2, work, timeout_s=0.8)[0] == {0: None, 1: None}


def test_a_caller_that_dies_is_lost_and_the_others_go_on():
    def work(group):
        opened, service = _open(group)
        if group.rank == 2:
            group.close(RuntimeError("struck by lightning"))
            return None
        for _ in range(3):
            opened.clients[0].call(RpcHeader(0), _ones())
        opened.close()
        return service.lost if service else None

    lost = LocalGroup.run(3, work)[0]
    assert lost.keys() == {0, 1, 2}
    assert "lightning" in str(lost[2])
    assert lost[1] is None


def test_a_server_that_dies_is_named_to_every_caller():
    def work(group):
        opened, _ = _open(group, servers=2)
        opened.clients[1].call(RpcHeader(0), _ones())
        group.barrier()
        if group.rank == 1:
            group.close(RuntimeError("struck by lightning"))
            return "dead"
        with pytest.raises(CommunicationError, match="the server on rank 1 is lost"):
            _call_for_ever(opened.clients[1])
        opened.clients[0].call(RpcHeader(0), _ones())  # the other server is still there
        return "told"

    assert LocalGroup.run(3, work) == ["told", "dead", "told"]


def test_a_service_that_fails_ends_every_request_and_says_why():
    def work(group):
        opened, _ = _open(group)
        error = CommunicationError
        if group.rank == 2:
            time.sleep(0.2)  # rank 1 waits by now
        with pytest.raises(error, match="the roof fell in"):
            opened.clients[0].call(RpcHeader(9 if group.rank == 2 else 2), NOTHING)
        return True

    def work_but_for_the_server(group):
        if group.rank:
            return work(group)
        opened, _ = _open(group)
        opened.close()
        return True

    assert LocalGroup.run(3, work_but_for_the_server) == [True] * 3


def test_ranks_on_gpus_exchange_over_their_group_on_cpus():
    class OnGpus(LocalGroup):
        def on_cpu(self):
            return beside[self.rank]

        def link(self, peer, name):
            raise AssertionError("NCCL has no messages")

    beside = LocalGroup.create(2)

    def work(group):
        opened, service = _open(OnGpus(group.rank, group._room))
        opened.clients[0].call(RpcHeader(0), _ones())
        group.barrier()
        opened.close()
        return None if service is None else service.total.tolist()

    assert LocalGroup.run(2, work) == [[2.0] * 4, None]


def _push_over_processes(killed):
    group = join(timeout_s=58)
    opened, service = _open(group)
    client = opened.clients[0]
    for step in range(30):
        if (group.rank, step) == (killed, 10):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            client.call(RpcHeader(0), _ones())
        except CommunicationError as error:
            return str(error)
        time.sleep(0.005)
    if service is not None:
        opened.close()
        return [float(service.total[0]), sorted(rank for rank, error in service.lost.items() if error)]
    opened.close()
    return "done"


@pytest.mark.parametrize("killed", [0, 2])
def test_processes_that_are_killed(killed):
    results = run_processes(3, _push_over_processes, {"killed": killed})
    assert results[killed].exit_code == -signal.SIGKILL
    others = [result.value for result in results if result.rank != killed]
    if killed:
        assert others == [[70.0, [2]], "done"], [result.output for result in results]
    else:
        assert all("the server on rank 0 is lost" in value for value in others), [r.output for r in results]


class _Doubles(RpcService):
    """Replies twice what is asked, in the memory that it was lent."""

    def __init__(self):
        self.lent = {}
        self.addresses = set()

    def set_reply_buffer(self, caller, outbox):
        self.lent[caller] = outbox

    def handle(self, caller, header, body):
        self.addresses.add(body.data_ptr())
        reply = self.lent[caller] if caller in self.lent else torch.empty(16, dtype=torch.uint8)
        torch.mul(body.view(torch.float32), 2, out=reply.view(torch.float32))
        return lambda: (RpcHeader(header.kind), reply)


def _double_in_shared_memory(hosts):
    group = join(timeout_s=58)
    if hosts is not None:
        group = HostGroup(group.store, group.rank, group.size, timeout_s=20, host=hosts[group.rank])
    service = _Doubles() if group.rank < 2 else None
    routes = [(caller, server) for caller in range(group.size) for server in range(2)]
    opened = RpcEndpoint(group, routes, service, "doubles", {0: (32, 16), 1: (16, 16)})
    seen = {}
    for server, client in opened.clients.items():
        for step in range(3):
            value = torch.full((4,), float(10 * group.rank + step))
            asked = value.view(torch.uint8)
            if len(client.outbox):
                asked = client.outbox[:16].copy_(asked)
            _, body = client.call(RpcHeader(0), asked)
            assert body.view(torch.float32).equal(2 * value), (server, step, body)
            assert (len(client.inbox) > 0) == (len(client.outbox) > 0) == (body.data_ptr() == client.inbox.data_ptr())
            _, body = client.call(RpcHeader(0), value.view(torch.uint8))  # what lies elsewhere is sent
            assert body.view(torch.float32).equal(2 * value)
        seen[server] = [len(client.outbox), len(client.inbox)]
    opened.close()
    return [[seen[0], seen[1]], len(service.lent) if service else 0]


def test_bodies_in_memory_that_both_ends_share_need_not_be_sent():
    results = run_processes(3, _double_in_shared_memory, {"hosts": None})
    assert [result.value for result in results] == [
        [[[0, 0], [16, 16]], 2],
        [[[32, 16], [0, 0]], 2],
        [[[32, 16], [16, 16]], 0],
    ], [result.output for result in results]


def test_bodies_are_sent_to_servers_of_other_hosts():
    results = run_processes(3, _double_in_shared_memory, {"hosts": ["a", "b", "a"]})
    assert [result.value for result in results] == [
        [[[0, 0], [0, 0]], 1],
        [[[0, 0], [0, 0]], 0],
        [[[32, 16], [0, 0]], 0],
    ], [result.output for result in results]
