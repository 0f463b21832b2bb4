import os
import sys
import threading
import time
import warnings
from random import Random

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.comm import LocalGroup
from paceline.comm.join import agree_generation
from paceline.errors import CommunicationError, SettingsError
from paceline.testing import run_processes

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    """Set exactly the launcher's variables that are given."""

    def set_only(variables):
        for name in (*LAUNCHED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_only


def test_too_few_gpus_are_left_alone_with_a_warning(environment, monkeypatch):
    environment({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.warns(UserWarning, match="on CPUs, since this host has 2 GPUs for 3 processes"),
        paceline.join() as group,
    ):
        assert group.device == torch.device("cpu")
    environment({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    with paceline.join() as group:
        assert group.device == torch.device("cuda", 1)


@pytest.mark.parametrize("variables", [{}, {**LAUNCHED, "WORLD_SIZE": "1"}], ids=["no launcher", "a launcher's"])
def test_a_world_of_one_needs_no_network(environment, variables):
    environment(variables)
    with paceline.join(device="cpu") as group:
        assert isinstance(group, LocalGroup)
        assert (group.rank, group.size, group.device) == (0, 1, torch.device("cpu"))
        assert group.gather_documents("alone", name="who") == ["alone"]


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_told_by_the_missing_name(environment, missing):
    environment({name: value for name, value in LAUNCHED.items() if name != missing})
    with pytest.raises(SettingsError, match=f"but {missing} is missing") as caught:
        paceline.join()
    assert "torchrun" in str(caught.value)
    assert "paceline train" in str(caught.value)


def test_workers_that_cannot_be_reached_are_told_by_their_address(environment):
    environment({**LAUNCHED, "RANK": "1"})  # nobody listens at port 1
    with pytest.raises(CommunicationError, match=r"rank 1 could not join the 2 workers at 127\.0\.0\.1:1"):
        paceline.join(timeout_s=0.1)


@pytest.mark.parametrize(("rank", "words"), [(0, "must have 2 workers"), (1, "waited for rank 0")])
def test_nobody_waits_for_ever_for_those_who_do_not_come(rank, words):
    with pytest.raises(CommunicationError, match=words):
        agree_generation(dist.HashStore(), rank, 2, timeout_s=0.1)


class Starts:
    """Starts of one run over one store, which keeps what dead processes left in it."""

    def __init__(self, store):
        self.store = store

    def run(self, size, *, ranks=None, delays_s=None, timeout_s=30.0):
        """Start `ranks` of `size`, each after its delay, and return what each agreed to; None where it gave up."""
        agreed = {}

        def run_one(rank):
            time.sleep((delays_s or {}).get(rank, 0))
            try:
                agreed[rank] = agree_generation(self.store, rank, size, timeout_s)
            except CommunicationError:
                agreed[rank] = None

        threads = [threading.Thread(target=run_one, args=(r,)) for r in (range(size) if ranks is None else ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return agreed


@pytest.fixture
def starts(monkeypatch):
    monkeypatch.setattr(sys.modules[agree_generation.__module__], "_POLL_S", 0.001)
    return Starts(dist.PrefixStore("paceline", dist.HashStore()))


def assert_agreed(agreed, size, earlier=0):
    assert agreed.keys() == set(range(size))
    assert None not in agreed.values(), f"some rank waited in vain: {agreed}"
    assert len(set(agreed.values())) == 1, f"ranks of one start must agree: {agreed}"
    assert agreed[0] > earlier, "a generation is never used twice"
    return agreed[0]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_agree_whoever_comes_last(starts, late):
    assert assert_agreed(starts.run(3, delays_s={late: 0.05}), 3) == 1


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_start_that_was_complete_is_not_joined_again(starts, late):
    first = assert_agreed(starts.run(3), 3)
    assert_agreed(starts.run(3, delays_s={late: 0.05}), 3, first)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 5), (3, 2), (5, 2)])
def test_a_start_of_another_size_does_not_join_the_one_before(starts, before, after):
    first = assert_agreed(starts.run(before), before)
    assert_agreed(starts.run(after, delays_s={0: 0.1}), after, first)


@pytest.mark.parametrize("dead", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_entries_of_ranks_that_died_before_all_had_come_do_no_harm(starts, dead):
    assert set(starts.run(3, ranks=dead, timeout_s=0.03).values()) == {None}
    for late in (0, 2):
        assert_agreed(starts.run(3, delays_s={late: 0.05}), 3)


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_starts_agrees(starts, seed):
    random = Random(seed)
    latest = 0
    for _ in range(5):
        size = random.randint(2, 5)
        delays_s = {rank: random.choice([0, 0, 0.002, 0.01, 0.03]) for rank in range(size)}
        if random.random() < 0.5:
            some = random.sample(range(size), random.randint(1, size - 1))
            assert set(starts.run(size, ranks=some, delays_s=delays_s, timeout_s=0.02).values()) == {None}
        else:
            latest = assert_agreed(starts.run(size, delays_s=delays_s), size, latest)


def test_ranks_agree_over_a_real_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
        agreed = [None] * 3

        def enter(rank, agreed=agreed, stores=stores):
            agreed[rank] = agree_generation(stores[rank], rank, 3, 10)

        threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(agreed)) == 1
        assert agreed[0] is not None


def join_all(attempts):
    """Join once for each attempt, with what it says of this rank, and return the groups' kinds and what was said."""
    rank, outcomes = int(os.environ["RANK"]), []
    module = sys.modules[agree_generation.__module__]
    for attempt in attempts:
        module.host_key = lambda attempt=attempt: attempt["hosts"][rank]
        module.find_obstacle = lambda attempt=attempt: "it is broken" if attempt.get("broken") == rank else None
        transport = attempt.get("transports", {}).get(str(rank), attempt.get("transport", "auto"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with paceline.join(device="cpu", timeout_s=20, transport=transport) as group:
                    total = torch.ones(1)
                    group.all_reduce(total, name="sum").wait()
                    kind = type(group).__name__ if float(total) == group.size else "one that cannot add"
                    group.barrier()
            except SettingsError as error:
                kind = str(error)
        outcomes.append([kind, [str(each.message) for each in caught]])
    return outcomes


ATTEMPTS = {
    "one host": {"hosts": "aaa"},
    "two hosts": {"hosts": "aba"},
    "three hosts": {"hosts": "abc"},
    "network": {"hosts": "aaa", "transport": "network"},
    "shared memory, three hosts": {"hosts": "abc", "transport": "shared_memory"},
    "one broken": {"hosts": "aaa", "broken": 1},
    "one broken, alone on its host": {"hosts": "aba", "broken": 1},
    "one broken, shared memory": {"hosts": "aaa", "broken": 1, "transport": "shared_memory"},
    "not the same": {"hosts": "aaa", "transports": {"1": "network"}},
}


@pytest.fixture(scope="module")
def joined():
    results = run_processes(3, join_all, {"attempts": list(ATTEMPTS.values())})
    for result in results:
        assert result.exit_code == 0, result.output
    return {name: [result.value[number] for result in results] for number, name in enumerate(ATTEMPTS)}


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        ("one host", "SharedMemoryGroup"),
        ("two hosts", "HostGroup"),
        ("three hosts", "TorchGroup"),
        ("network", "TorchGroup"),
        ("shared memory, three hosts", "HostGroup"),
        ("one broken, alone on its host", "HostGroup"),
    ],
)
def test_the_transport_is_chosen_by_who_shares_a_host(joined, attempt, kind):
    assert joined[attempt] == [[kind, []]] * 3


def test_all_take_the_network_where_one_cannot_share_memory_and_one_says_why(joined):
    assert [kind for kind, _ in joined["one broken"]] == ["TorchGroup"] * 3
    (warning,), *others = [caught for _, caught in joined["one broken"]]
    assert "rank 1: it is broken" in warning
    assert "transport='network'" in warning
    assert others == [[], []]


def test_shared_memory_that_was_asked_for_and_cannot_be_had_is_an_error(joined):
    for kind, caught in joined["one broken, shared memory"]:
        assert "rank 1: it is broken" in kind
        assert caught == []


def test_a_transport_that_is_not_the_same_everywhere_is_told(joined):
    for kind, _ in joined["not the same"]:
        assert "got ['auto', 'network', 'auto'] by rank" in kind


def test_an_unknown_transport_is_told_with_those_that_are_known(environment):
    environment({})
    with pytest.raises(SettingsError, match=r"transport must be one of \('auto', 'shared_memory', 'network'\)"):
        paceline.join(transport="carrier pigeon")
