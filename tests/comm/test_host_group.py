import os

import pytest
import torch
import torch.distributed as dist

from paceline.comm import HostGroup, host_group, shared_memory
from paceline.errors import CommunicationError
from paceline.testing import GROUP_CHECKS, check_group, check_words_of_failure, faults, run_processes

pytestmark = pytest.mark.skipif(
    shared_memory.find_obstacle() is not None, reason=f"no shared memory here: {shared_memory.find_obstacle()}"
)

LARGE = 20_011


def open_group(hosts, name="group", **options):
    """Return the group of ranks of which each letter of `hosts` names the host."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank = int(os.environ["RANK"])
    return HostGroup(dist.PrefixStore(name, store), rank, len(hosts), host=hosts[rank], timeout_s=20, **options)


def make_values(rank, num_elements):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (num_elements,), generator=generator).float()


def exchange_large(group):
    """Return which large operations went wrong."""
    rank, size, wrong = group.rank, group.size, []
    values = [make_values(other, LARGE) for other in range(size)]
    for kind, tensor in (("shared", group.allocate(LARGE, torch.float32)), ("private", torch.empty(LARGE))):
        tensor.copy_(values[rank])
        group.all_reduce(tensor, name="sum").wait()
        if not torch.equal(tensor, torch.stack(values).sum(0)):
            wrong.append(f"{kind} sum")
        for source in range(size):
            tensor.copy_(values[rank])
            group.broadcast(tensor, source=source, name="copy").wait()
            if not torch.equal(tensor, values[source]):
                wrong.append(f"{kind} copy of rank {source}")
    rows = torch.empty(size, LARGE)
    group.all_gather(rows, values[rank], name="rows").wait()
    if not torch.equal(rows, torch.stack(values)):
        wrong.append("rows")
    wide = [make_values(other, size * LARGE).view(size, LARGE) for other in range(size)]
    group.all_to_all(rows, wide[rank], name="swapped rows").wait()
    if not torch.equal(rows, torch.stack([value[rank] for value in wide])):
        wrong.append("swapped rows")
    return wrong


def keep_contract(hosts):
    group = open_group(hosts)
    wrong = exchange_large(group)
    host_group.SMALL_BYTES = -1  # all that can goes through leaders
    names = check_group(group)
    check_words_of_failure(group)
    return [wrong, names]


def test_keeps_the_contract_with_uneven_hosts_and_mixed_ranks():
    for result in run_processes(4, keep_contract, {"hosts": "abaa"}):
        assert result.exit_code == 0, result.output
        assert result.value == [[], [check.__name__ for check in GROUP_CHECKS]]


def sum_with(hosts, algorithms):
    """Return the bits of a sum by each algorithm, and the programs that ran."""
    bits, ran = [], []
    for algorithm in algorithms:
        with open_group(hosts, str(algorithm), algorithm=algorithm) as group:
            tensor = make_values(group.rank, LARGE) / 7
            group.all_reduce(tensor, name="sum").wait()
            bits.append(tensor.view(torch.int32).sum().item())
            ran.append(group._leaders.algorithm.name if group._leaders else None)
            group.barrier()
    return [bits, ran]


def test_the_leaders_program_is_chosen_by_their_number_or_by_the_caller():
    results = run_processes(4, sum_with, {"hosts": "aabc", "algorithms": [None, "naive"]})
    assert all(result.exit_code == 0 for result in results), results
    bits = [result.value[0] for result in results]
    assert all(each == bits[0] for each in bits), "the same on every rank"
    assert [result.value[1] for result in results] == [
        ["ring", "naive"],
        [None, None],
        ["ring", "naive"],
        ["ring", "naive"],
    ]


def lose_one(hosts, script):
    group = open_group(hosts)
    tensor = torch.ones(LARGE)
    group.all_reduce(tensor, name="first").wait()
    faults.strike(script, rank=group.rank, step=1)
    try:
        group.all_reduce(tensor, name="second").wait()
    except CommunicationError as error:
        group.close(error)
        return str(error)
    return None


@pytest.mark.parametrize("lost", [0, 3], ids=["a leader", "another"])
def test_a_lost_rank_is_named_in_ranks_of_all_hosts(lost):
    script = [faults.kill(rank=lost, step=1).model_dump()]
    results = run_processes(4, lose_one, {"hosts": "aabb", "script": script}, timeout_s=25)
    for result in results:
        if result.rank == lost:
            assert result.exit_code == -9
            continue
        assert result.exit_code == 0, result.output
        assert result.value is not None, f"rank {result.rank} went on"
        head, _, blamed = result.value.partition(" lost its peers: ")
        assert head == f"operation 2 'second' on rank {result.rank}"
        assert blamed.startswith(f"rank {lost} (host "), blamed
        assert "is dead or frozen" in blamed.split("; ")[0]
