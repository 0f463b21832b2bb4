"""Bucket sizes chosen by measurement, alike on all workers."""

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.replica.gradients import Gradients
from paceline.replica.step_result import StepTimes
from paceline.replica.tuning import BucketTuner
from paceline.sync import EveryStep
from training_models import make_module, make_replica, run_one_step

MIB = 2**20


def _tune(num_bytes, seconds_of):
    """Feed two workers' tuners with steps that take `seconds_of[rank][size]`; return what each tried and chose."""

    def worker(group):
        tuner = BucketTuner({"weight": torch.nn.Parameter(torch.empty(num_bytes // 4))}, group)
        tried = [tuner.first_bytes]
        while not tuner.is_done:
            change = tuner.measure(seconds_of[group.rank][tried[-1]])
            if change is not None:
                tried.append(change)
        return tried

    return LocalGroup.run(2, worker)


def test_the_size_with_the_shortest_steps_on_the_slowest_worker_wins():
    fast = {16 * MIB: 1.0, 1 * MIB: 0.5, 4 * MIB: 0.7, 64 * MIB: 0.9}
    slow = {16 * MIB: 1.0, 1 * MIB: 2.0, 4 * MIB: 0.8, 64 * MIB: 0.9}
    assert _tune(100 * MIB, [fast, slow]) == [[16 * MIB, 1 * MIB, 4 * MIB, 64 * MIB, 4 * MIB]] * 2


def test_sizes_that_no_model_of_this_size_fills_are_not_tried():
    same = {16 * MIB: 1.0, 1 * MIB: 2.0, 4 * MIB: 2.0}
    assert _tune(8 * MIB, [same, same]) == [[16 * MIB, 1 * MIB, 4 * MIB, 16 * MIB]] * 2


@pytest.mark.parametrize("fastest", [2, 3, 8])
def test_gradients_travel_in_the_size_that_was_fastest(fastest):
    """Steps take half as long with as many buckets as are fastest."""

    def worker(group):
        parameters = {f"{i}": torch.nn.Parameter(torch.empty(MIB // 4)) for i in range(8)}
        gradients = Gradients(parameters, group, EveryStep().start_reducer(group), None)
        seen = []
        while gradients.is_learning():
            seen.append(len(gradients.layout))
            gradients.adapt_layout(StepTimes(began_s=7.0, ended_s=7.5 if seen[-1] == fastest else 8.0))
        resumed = Gradients(parameters, group, EveryStep().start_reducer(group), None)
        resumed.load_state_dict(gradients.state_dict())
        return sorted(set(seen)), len(gradients.layout), len(resumed.layout), resumed.is_learning()

    assert LocalGroup.run(2, worker) == [([2, 3, 8], fastest, fastest, False)] * 2


def test_a_tuned_replica_settles_on_one_layout_and_keeps_it_when_resumed():
    def worker(group):
        module = make_module()
        replica = make_replica(module, group, bucket_bytes="tuned", hash_interval=1)
        states = []
        for _ in range(30):
            run_one_step(replica)
            states.append(replica.state.document()["gradients"])
        resumed = make_replica(make_module(), group, bucket_bytes="tuned")
        resumed.state.load_document(replica.state.document())
        run_one_step(resumed)
        return states, resumed.state.document()["gradients"]

    for states, resumed in LocalGroup.run(2, worker):
        assert states[-1]["is_tuned"]
        assert states[-1] == states[-2] == resumed


def test_a_resumed_tuning_measures_its_first_size_and_not_the_saved_layout():
    def worker(group):
        replica = make_replica(make_module(), group, bucket_bytes="tuned")
        run_one_step(replica)
        first = replica.state.document()["gradients"]
        in_midst = {"layout": [[name] for names in first["layout"] for name in names], "is_tuned": False}
        resumed = make_replica(make_module(), group, bucket_bytes="tuned")
        resumed.state.load_document(replica.state.document() | {"gradients": in_midst})
        return first, resumed.state.document()["gradients"]

    for first, resumed in LocalGroup.run(2, worker):
        assert len(first["layout"]) == 1
        assert resumed["layout"] == first["layout"]


def test_what_is_learnt_of_a_step_does_not_grow_from_step_to_step():
    def worker(group):
        replica = make_replica(make_module(), group)
        for _ in range(5):
            run_one_step(replica)
        return len(replica._reduction.gradients._launcher.ready_order)

    assert LocalGroup.run(2, worker) == [len([p for p in make_module().parameters() if p.requires_grad])] * 2
