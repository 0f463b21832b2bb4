"""Elastic averaging: its two ends are known, and between them the workers' pull and the centre's are opposite."""

import random
import threading
import time

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import SettingsError
from paceline.replica.replica import Replica
from paceline.sync import EASGD
from paceline.testing.rule_contract import make_batch, make_module


def _train(group, elasticity, num_steps=6, period=1, momentum=0.0, **options):
    module = make_module().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, nesterov=momentum > 0)
    replica = Replica(module, optimizer, group=group, sync=EASGD(period=period, elasticity=elasticity, **options))
    history = []
    for step in range(num_steps):
        inputs, targets = make_batch(group.rank, step)
        replica.backward(nn.functional.mse_loss(replica(inputs.double()), targets.double()), weight=1.0)
        replica.update()
        with replica.consensus():
            centre = _flat(module)
        history.append((_flat(module), centre))
    replica.close()
    return history


def _flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def _plain(rank, num_steps=6, momentum=0.0):
    """Return x before each step and after it, of one that trains alone; also from given parameters."""
    module = make_module().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, nesterov=momentum > 0)
    for step in range(num_steps):
        inputs, targets = make_batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs.double()), targets.double()).backward()
        optimizer.step()
    return _flat(module)


def _gradient(parameters, rank, step):
    module = make_module().double()
    nn.utils.vector_to_parameters(parameters, module.parameters())
    inputs, targets = make_batch(rank, step)
    nn.functional.mse_loss(module(inputs.double()), targets.double()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_elasticity_workers_run_by_themselves(momentum):
    for rank, history in enumerate(LocalGroup.run(3, lambda group: _train(group, 0.0, momentum=momentum))):
        assert torch.equal(history[-1][0], _plain(rank, momentum=momentum))
        assert torch.equal(history[-1][1], _flat(make_module().double()))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_with_elasticity_one_over_workers_the_centre_is_their_mean(size):
    """It is the mean of what workers were at before their step, as in the paper's equations."""
    histories = LocalGroup.run(size, lambda group: _train(group, 1 / size))
    for step in range(1, 6):
        mean = sum(history[step - 1][0] for history in histories) / size
        for history in histories:
            torch.testing.assert_close(history[step][1], mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("period", [1, 3])
def test_each_step_is_the_papers(period):
    size, elasticity = 3, 0.2
    histories = LocalGroup.run(size, lambda group: _train(group, elasticity, period=period))
    x = [_flat(make_module().double())] * size
    centre = x[0]
    for step in range(6):
        pull = elasticity if (step + 1) % period == 0 else 0.0
        moved = [x[i] - 0.1 * _gradient(x[i], i, step) - pull * (x[i] - centre) for i in range(size)]
        centre = centre + pull * sum(x[i] - centre for i in range(size))
        x = moved
        for rank, history in enumerate(histories):
            torch.testing.assert_close(history[step][0], x[rank], rtol=0, atol=1e-14)
            torch.testing.assert_close(history[step][1], centre, rtol=0, atol=1e-14)


def test_the_centre_has_the_same_bits_everywhere_also_with_a_codec():
    for codec in ("none", "int8", "top_k"):
        options = {"codec": {"name": codec, "dense_below": 0}}
        first, *others = LocalGroup.run(3, lambda group, options=options: _train(group, 0.3, **options))
        for other in others:
            assert torch.equal(first[-1][1], other[-1][1])
            assert not torch.equal(first[-1][0], other[-1][0])


def test_nobody_goes_on_before_the_centre_is_loaded():
    has_gone_on = threading.Event()

    def work(group):
        module = make_module()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        replica = Replica(module, optimizer, group=group, sync=EASGD(asynchronous=True))
        _, shared = replica.state.sync_state()
        assert group.rank or not has_gone_on.wait(0.1)
        replica.state.load_sync_state([{}, {}], shared)
        has_gone_on.set()
        replica.close()

    LocalGroup.run(2, work)


def _swap_at_own_pace(group, elasticity, num_steps):
    """Take steps with no gradient from parameters of one's own, at random speed; return them, and the centre."""
    module = make_module().double()
    replica = Replica(
        module,
        torch.optim.SGD(module.parameters(), lr=0.0),
        group=group,
        sync=EASGD(period=1, elasticity=elasticity, asynchronous=True),
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(group.rank + 1.0)
    replica.begin_anew()
    pause = random.Random(group.rank)
    for step in range(num_steps):
        time.sleep(0.003 * pause.random())
        inputs, _ = make_batch(group.rank, step)
        replica.backward(replica(inputs.double()).mean(), weight=1.0)
        replica.update()
    own = _flat(module)
    with replica.consensus():
        centre = _flat(module)
    replica.close()
    return own, centre


def test_what_a_worker_loses_the_centre_gains_in_whatever_order_they_come():
    start = _flat(make_module().double())
    results = LocalGroup.run(4, lambda group: _swap_at_own_pace(group, 0.2, num_steps=5 + 3 * group.rank))
    before = start + sum(start + rank + 1.0 for rank in range(4))
    torch.testing.assert_close(results[0][1] + sum(own for own, _ in results), before, rtol=0, atol=1e-12)
    for own, centre in results:
        assert torch.equal(centre, results[0][1])
        assert (centre - start).min() > 0.5, "the centre must have gone to the workers"
        assert (own - centre).abs().max() < 4, "and they to it"


def test_one_worker_and_its_centre_meet_half_way():
    [(own, centre)] = LocalGroup.run(1, lambda group: _swap_at_own_pace(group, 0.5, num_steps=1))
    torch.testing.assert_close(own, centre)
    torch.testing.assert_close(centre, _flat(make_module().double()) + 0.5)


def test_a_codec_is_refused_where_the_swap_is_of_parameters_as_they_are():
    with pytest.raises(ValidationError, match="must be left out with asynchronous, but got int8"):
        EASGD(asynchronous=True, codec="int8")


def test_a_centre_that_would_overshoot_is_refused():
    with pytest.raises(SettingsError, match=r"0\.5 \* 3 = 1\.5; give at most 0\.333"):
        LocalGroup.run(3, lambda group: _train(group, 0.5))
