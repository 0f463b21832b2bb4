"""How far workers are from their consensus: measured, logged, and warned of."""

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.monitor.events import ConsensusMeasured, Warned
from paceline.monitor.reader import read_log, summarise
from paceline.replica import Replica, distance
from paceline.sync import DPSGD, ChocoSGD, EveryStep, LocalSGD
from plain_functions import make_points_run, read, train_here


def apart(group, sync):
    """Return a worker's parameters, those of the consensus, and what two calls get as their distance."""
    torch.manual_seed(0)
    module = torch.nn.Linear(40, 30)
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), sync=sync, group=group)
    for step in range(3):
        inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + group.rank))
        replica.backward(replica(inputs).square().mean(), weight=4.0)
        replica.update()
    own = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    with replica.consensus():
        common = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    found = replica.state.distance.take(), replica.state.distance.take()
    replica.close()
    return own, common, found


@pytest.mark.parametrize("sync", [LocalSGD(period=100), DPSGD(graph="ring")], ids=lambda rule: rule.name)
def test_the_distance_is_that_of_parameters_from_what_is_evaluated(sync):
    results = LocalGroup.run(3, lambda group: apart(group, sync), timeout_s=20)
    squares = [float((own - common).double().square().sum()) for own, common, _ in results]
    lengths = [float(common.double().square().sum()) for _, common, _ in results]
    for _, _, (measured, again) in results:
        assert measured == pytest.approx((sum(squares) / sum(lengths)) ** 0.5, rel=1e-5)
        assert measured > 1e-3
        assert again is None, "each measurement is taken once"


def test_workers_that_are_equal_measure_nothing():
    assert [found for _, _, found in LocalGroup.run(2, lambda group: apart(group, EveryStep()))] == [(None, None)] * 2


def test_of_large_models_a_part_is_compared(monkeypatch):
    whole = LocalGroup.run(3, lambda group: apart(group, LocalSGD(period=100)), timeout_s=20)[0][2][0]
    monkeypatch.setattr(distance, "_MOST_ELEMENTS", 300)
    part = LocalGroup.run(3, lambda group: apart(group, LocalSGD(period=100)), timeout_s=20)[0][2][0]
    assert part != whole
    assert part == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("sync", ["diloco", "every_step"])
def test_a_run_logs_it_once_a_step_where_workers_may_differ(tmp_path, sync):
    train_here(make_points_run(sync=sync, num_steps=6, evaluate_interval=2, checkpoint_interval=3), tmp_path, 2)
    logged = read(tmp_path, ConsensusMeasured)
    assert [record.step for record in logged] == ([2, 3, 4, 6] if sync == "diloco" else [])
    assert [record.event for record in summarise(read_log(tmp_path / "events.jsonl")).distances] == [
        record.event for record in logged
    ]
    assert not [one for one in read(tmp_path, Warned) if "drift apart" in one.event.message]


def test_workers_that_drift_apart_are_warned_of_once(tmp_path):
    """CHOCO-SGD with a step far beyond what its codec bears: the distance grows for ever, and the mean looks right."""
    codec = {"name": "top_k", "density": 0.05, "dense_below": 0}
    rule = ChocoSGD(graph="ring", codec=codec, step_size=1.0)
    train_here(make_points_run(sync=rule, num_steps=60, evaluate_interval=5), tmp_path, 4)
    logged = [record.event.distance for record in read(tmp_path, ConsensusMeasured)]
    assert logged[-1] > 3 * logged[0]
    (warned,) = [one for one in read(tmp_path, Warned) if "drift apart" in one.event.message]
    assert "--sync.codec" in warned.event.message
