"""The synchronous parameter server: equal to synchronous SGD, however it is laid out; backups are left behind."""

import math
import random
import time

import pytest
import torch
from pydantic import ValidationError
from serving import ByHand
from stepping import flatten, make_linear, make_samples, make_sgd, run_step, train

from paceline.comm import LocalGroup
from paceline.errors import CommunicationError, SettingsError
from paceline.optim import SGD
from paceline.replica.replica import Replica
from paceline.sync import ASGD, ParameterServer
from paceline.sync.parameter_server.blocks import PackedTensors, copy_all, partition_parameters
from paceline.sync.parameter_server.placement import serve
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.state import cut_blocks, join_blocks, pack_state, unpack_state
from paceline.sync.synchroniser import LocalStep, WorkerContext
from paceline.testing.rule_contract import prices_are_stated


def _uneven(rank, step):
    return float((2 * rank + step) % 4)  # some have nothing


def _adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def _with_momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("make", [make_sgd, _with_momentum, _adamw], ids=["sgd", "nesterov", "adamw"])
def test_it_is_every_step(make, servers):
    ours = train(3, ParameterServer(num_servers=servers), 8, _uneven, make)
    torch.testing.assert_close(ours, train(3, "every_step", 8, _uneven, make), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("host_size", [2, 4, None])
def test_bytes_inside_hosts_and_between_them_are_those_stated(host_size):
    prices_are_stated(ParameterServer(host_size=host_size))


@pytest.mark.parametrize(("size", "host_size"), [(4, 2), (5, 2), (3, 3), (4, None)])
def test_hosts_that_sum_first_are_every_step_too(size, host_size):
    ours = train(size, ParameterServer(host_size=host_size), 6, _uneven, _with_momentum)
    torch.testing.assert_close(ours, train(size, "every_step", 6, _uneven, _with_momentum), rtol=1e-12, atol=1e-12)


def test_it_is_the_same_to_the_last_bit_at_every_run():
    def one():
        return train(3, ParameterServer(num_servers=2, codec="int8"), 5, _uneven, dtype=torch.float32)

    assert torch.equal(one(), one())


def test_parameters_that_nobody_used_stay_as_they_are():
    def work(group):
        module = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
        replica = Replica(module, optimizer, group=group, sync="parameter_server")
        before = module["unused"].weight.detach().clone()
        replica.backward(module["used"](torch.ones(1, 2)).sum(), weight=1.0)
        replica.update()
        replica.close()
        return torch.equal(before, module["unused"].weight)

    with pytest.warns(UserWarning, match="had no gradient"):
        assert LocalGroup.run(2, work) == [True, True]


def test_with_backups_a_step_is_of_those_that_came_first():
    by_hand = ByHand(ParameterServer(num_backups=1), num_workers=3, learning_rate=1.0, start=(0.0, 0.0))
    pulls = [by_hand.push(0, [4.0, 0.0], weight=3.0), by_hand.push(2, [0.0, 4.0], weight=1.0)]
    torch.testing.assert_close(by_hand.x, torch.tensor([-3.0, -1.0], dtype=torch.float64))
    for pull in pulls:
        pull()
    by_hand.swap(1, [100.0, 100.0])
    assert by_hand.dropped == [False, True, False]
    assert by_hand.shard.num_dropped == 1
    torch.testing.assert_close(by_hand.have[1], torch.tensor([-3.0, -1.0], dtype=torch.float64))
    assert by_hand.clocks == [1, 1, 1]


def lag_behind(steps, noted, num_intervals):
    """Wait, as the last worker, until each of the others has taken a step, or only this one has samples left."""
    before, deadline_s = list(steps), time.monotonic() + 30
    while len(noted) < num_intervals - 1 and any(steps[rank] == before[rank] for rank in range(len(steps) - 1)):
        assert time.monotonic() < deadline_s, "the others wait for the last worker"
        time.sleep(0.001)


def test_a_straggler_is_left_behind_and_its_samples_are_not_lost():
    position = iter(range(0, 10**6, 4))
    noted, steps = [], [0, 0, 0]

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=ParameterServer(num_backups=1))
        replica.dispatcher.set_source(
            lambda n: (start := next(position), start + n), lambda *interval: noted.append(interval)
        )
        replica.dispatcher.set_boundary(120)
        group.barrier()
        while (interval := replica.dispatcher.claim(4)) is not None:
            if group.rank == 2:
                lag_behind(steps, noted, 30)
            run_step(replica, interval[0])
            steps[group.rank] += replica.dispatcher.ack(interval)
        with replica.consensus():
            parameters = flatten(module)
        dropped = replica._synchroniser.count_delays().num_dropped if group.rank == 0 else None
        group.barrier()
        replica.close()
        return parameters, dropped

    (first, dropped), *others = LocalGroup.run(3, work)
    assert all(torch.equal(first, parameters) for parameters, _ in others)
    assert dropped >= 1
    assert steps[2] < max(steps[:2])
    assert sorted(noted) == [(start, start + 4) for start in range(0, 120, 4)], "each sample counts exactly once"


@pytest.mark.parametrize(("num_servers", "num_workers"), [(2, 3), (3, 5)])
def test_with_backups_all_servers_take_the_gradients_of_the_same_workers(num_servers, num_workers):
    position = iter(range(0, 10**6, 4))
    noted, steps = [], [0] * num_workers

    def work(group):
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(3)])
        rule = ParameterServer(num_servers=num_servers, num_backups=num_workers // 2)
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        replica.dispatcher.set_source(
            lambda n: (start := next(position), start + n), lambda *interval: noted.append(interval)
        )
        replica.dispatcher.set_boundary(240)
        group.barrier()
        while (interval := replica.dispatcher.claim(4)) is not None:
            time.sleep(random.Random(interval[0]).random() * 0.01)
            if group.rank == num_workers - 1:
                lag_behind(steps, noted, 60)
            replica.backward(sum((parameter * math.sin(interval[0])).sum() for parameter in module), weight=4)
            replica.update()
            steps[group.rank] += replica.dispatcher.ack(interval)
            assert len({link.clock for link in replica._synchroniser._links}) == 1
        with replica.consensus():
            values = [parameter.detach().clone() for parameter in module]
        group.barrier()
        replica.close()
        return values

    all_values = LocalGroup.run(num_workers, work)
    first = all_values[0][0]
    assert first.abs().min() > 0
    assert all(torch.equal(first, value) for values in all_values for value in values)
    assert steps[-1] < max(steps)
    assert sorted(noted) == [(start, start + 4) for start in range(0, 240, 4)], "each sample counts exactly once"


class Falling(torch.optim.SGD):
    def step(self, closure=None):
        if any(len(parameter) == 5 for group in self.param_groups for parameter in group["params"]):
            raise RuntimeError("the roof fell in")
        super().step(closure)


def test_a_step_that_fails_on_a_server_that_follows_ends_all_workers_with_its_cause():
    def work(group):
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (6, 5)])
        rule = ParameterServer(num_servers=2, num_backups=1)
        replica = Replica(module, Falling(module.parameters(), lr=0.1), group=group, sync=rule)
        try:
            for _ in range(3):
                replica.backward(sum(parameter.sum() for parameter in module), weight=1)
                replica.update()
        except (CommunicationError, RuntimeError) as error:
            return str(error)

    errors = LocalGroup.run(3, work)
    assert all(errors)
    assert not any("must finish within" in error for error in errors), "nobody waits until time is out"
    assert "the roof fell in" in errors[1], "the process of that server knows"


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_codecs_both_ways_stay_near_the_exact_way(codec):
    sync = ParameterServer(
        codec={"name": codec, "dense_below": 0}, pull_codec={"name": codec, "dense_below": 0}, num_servers=2
    )
    ours = train(3, sync, 20, dtype=torch.float32)
    exact = train(3, "every_step", 20, dtype=torch.float32)
    moved = (exact[:, -1] - exact[:, 0]).norm()
    assert 0 < (ours[:, -1] - exact[:, -1]).norm() < 0.02 * moved


def _serve_beside(world, rule, num_workers, num_steps):
    """Train as a replica does, with servers that are the last of the `world`."""
    module = make_linear(seed=world.rank if world.rank >= num_workers else 0)  # a server's own start is of no account
    optimizer = _adamw(module)
    if world.rank >= num_workers:
        serve(rule, WorkerContext(module, optimizer, world, world=world), num_workers)
        return None
    group = world.subgroup(range(num_workers), "workers")
    synchroniser = rule.start_synchroniser(WorkerContext(module, optimizer, group, world=world))
    for step in range(num_steps):
        inputs, targets = make_samples(group.rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        now = LocalStep(step, 1.0)
        synchroniser.before_update(now)
        synchroniser.after_update(now)
    shared = synchroniser.shared_state()
    synchroniser.close()
    return flatten(module), shared


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_with_processes_of_their_own_are_every_step(servers):
    rule = ParameterServer(num_servers=servers, placement="own")
    results = LocalGroup.run(2 + servers, lambda world: _serve_beside(world, rule, 2, 5))
    expected = train(2, "every_step", 5, make_optimizer=_adamw)[:, -1]
    for parameters, _ in results[:2]:
        torch.testing.assert_close(parameters, expected[0], rtol=1e-12, atol=1e-12)
    assert results[0][1]["optimizer/weight/exp_avg"].shape == (2, 3), "state is of whole parameters"
    assert results[2:] == [None] * servers


def test_a_server_of_its_own_says_which_workers_it_lost():
    announced = []

    def work(world):
        rule = ASGD(placement="own")
        if world.rank == 2:
            with pytest.raises(CommunicationError, match=r"server 0 lost workers: .*rank 1: .*lightning"):
                _serve_beside(world, rule, 2, 3)
            announced.append(True)
        elif world.rank == 1:
            _die(world, rule)
        else:
            _serve_beside(world, rule, 2, 3)

    with pytest.raises((RuntimeError, CommunicationError)):
        LocalGroup.run(3, work)
    assert announced == [True]


def _die(world, rule):
    module = make_linear()
    group = world.subgroup(range(2), "workers")
    rule.start_synchroniser(WorkerContext(module, _adamw(module), group, world=world))
    raise RuntimeError("struck by lightning")


def test_what_cannot_be_is_refused():
    with pytest.raises(ValidationError, match="host_size must be 1 with backup workers"):
        ParameterServer(host_size=2, num_backups=1)
    with pytest.raises(ValidationError, match="pull_codec must have no momentum"):
        ParameterServer(pull_codec="dgc")
    with pytest.raises(ValidationError, match="pull_codec must not be scaled"):
        ParameterServer(pull_codec={"name": "random_k", "scaled": True, "error_feedback": False})
    with pytest.raises(SettingsError, match="num_backups must be less than the number of workers, but got 2 of 2"):
        train(2, ParameterServer(num_backups=2), 1)
    with pytest.raises(SettingsError, match="must be started with the workers"):
        train(2, ParameterServer(placement="own"), 1)


@pytest.mark.parametrize("may_cut", [True, False])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_blocks_are_all_parameters_and_even(num_servers, may_cut):
    generator = torch.Generator().manual_seed(num_servers)
    shapes = {"large": (100, 30), "wide": (1, 500), "vector": (70,), "scalar": (), "empty": (0, 4), "cube": (9, 4, 4)}
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    blocks_by_server = partition_parameters(parameters, num_servers, may_cut=may_cut)
    rebuilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in parameters.items()}
    for blocks in blocks_by_server:
        packed = PackedTensors(blocks)
        copy_all(packed.tensors, [block.of(parameters[block.parameter]) for block in blocks])
        assert sum(block.num_bytes for block in blocks) <= len(packed.bytes)
        for block, tensor in zip(blocks, packed.tensors, strict=True):
            assert block.of(rebuilt[block.parameter]).isnan().all(), "no element may be in two blocks"
            block.of(rebuilt[block.parameter]).copy_(tensor)
    for name, tensor in parameters.items():
        assert torch.equal(rebuilt[name], tensor)
    loads = [sum(block.num_bytes for block in blocks) for blocks in blocks_by_server]
    if may_cut:
        assert max(loads) <= 1.2 * sum(loads) / num_servers + 2000
    else:
        assert all(block.stop == 0 for blocks in blocks_by_server for block in blocks)


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_state_of_some_servers_is_that_of_another_number(num_servers):
    parameters = {"a": torch.arange(24.0).view(12, 2), "b/c": torch.arange(5.0), "s": torch.tensor(3.0)}
    of_three = [block for blocks in partition_parameters(parameters, 3, may_cut=True) for block in blocks]
    of_some = [block for blocks in partition_parameters(parameters, num_servers, may_cut=True) for block in blocks]

    def state_of(blocks):
        state = {}
        for block in blocks:
            state[f"parameter/{block.name}"] = block.of(parameters[block.parameter])
            state[f"optimizer/{block.name}/exp_avg"] = block.of(parameters[block.parameter]) + 1
            state[f"optimizer/{block.name}/step"] = torch.tensor(7.0)
        return state

    whole = join_blocks(state_of(of_three), of_three)
    assert whole.keys() == {f"{k}/{n}{e}" for n in parameters for k, e in _KEYS}
    body = pack_state(cut_blocks(whole, of_some), {"said": [1, "ü"]})
    tensors, document = unpack_state(body)
    assert document == {"said": [1, "ü"]}
    expected = state_of(of_some)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


_KEYS = (("parameter", ""), ("optimizer", "/exp_avg"), ("optimizer", "/step"))


@pytest.mark.parametrize("host_size", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_step_that_overflows_in_half_precision_is_not_pushed(host_size, clip_norm):
    """It is as if its worker had had no samples; where workers of a host sum first, none of them had."""
    bad_step, hit = 2, [0, 1] if host_size == 2 else [1]

    def work(group, overflows):
        module = make_linear(dtype=torch.float32)
        rule = ParameterServer(host_size=host_size)
        replica = Replica(module, _adamw(module), group=group, sync=rule, precision="fp16", clip_norm=clip_norm)
        skipped, seen = [], []
        for step in range(5):
            handle = None
            is_bad = step == bad_step and group.rank == 1
            if is_bad and overflows:
                handle = module.weight.register_hook(lambda gradient: gradient * torch.inf)
            inputs, targets = make_samples(group.rank, step, torch.float32)
            # Small, so that the first scale of 65,536 does not overflow by itself.
            loss = 0.01 * torch.nn.functional.mse_loss(replica(inputs).float(), targets)
            is_absent = step == bad_step and group.rank in hit
            replica.backward(loss, weight=0.0 if is_absent and not overflows else 1.0)
            skipped.append(replica.update().skipped)
            if handle is not None:
                handle.remove()
            seen.append(flatten(module))
        replica.close()
        return skipped, torch.stack(seen), replica.loss_scale

    results = LocalGroup.run(4, lambda group: work(group, True))
    without = LocalGroup.run(4, lambda group: work(group, False))
    for rank, ((skipped, seen, scale), (_, expected, usual)) in enumerate(zip(results, without, strict=True)):
        assert skipped == [rank in hit and step == bad_step for step in range(5)]
        assert scale == (usual / 2 if rank in hit else usual)
        assert seen.isfinite().all()
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


def test_asynchronous_workers_push_nothing_of_an_overflow():
    def work(group):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_sgd(module), group=group, sync=ASGD(), precision="fp16")
        moved = []
        for step in range(3):
            before = flatten(module)
            handle = module.weight.register_hook(lambda gradient: gradient * torch.inf) if step == 1 else None
            inputs, targets = make_samples(0, step, torch.float32)
            replica.backward(0.01 * torch.nn.functional.mse_loss(replica(inputs).float(), targets), weight=1.0)
            replica.update()
            if handle is not None:
                handle.remove()
            moved.append(not torch.equal(before, flatten(module)))
        replica.close()
        return moved

    assert LocalGroup.run(1, work) == [[True, False, True]]


def test_momentum_of_a_servers_parameter_may_begin_late():
    module = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2)).double()
    parameters = dict(module.named_parameters())
    [blocks] = partition_parameters(parameters, 1, may_cut=False)
    shard = Shard(blocks, parameters, SGD().build(module))
    plain = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for used in ([True, False], [True, True], [False, True]):
        gradients = [torch.ones_like(tensor) for tensor in shard.values.tensors]
        shard.step(gradients, used, [0.1])
        for block, is_used in zip(blocks, used, strict=True):
            parameter = parameters[block.parameter]
            parameter.grad = torch.ones_like(parameter) if is_used else None
        plain.step()
    for block, tensor in zip(blocks, shard.values.tensors, strict=True):
        torch.testing.assert_close(tensor, parameters[block.parameter].detach(), rtol=1e-12, atol=1e-12)
