"""The events of a step's timeline: in order, within the step, and one for each bucket of each worker."""

import time

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.monitor.events import BucketExchanged, StepTimed
from paceline.sync import EveryStep
from paceline.training.log_events import timeline_events
from training_models import make_module, make_replica, run_one_step


@pytest.mark.filterwarnings("ignore::paceline.replica.UnusedParametersWarning")
@pytest.mark.parametrize("codec", ["none", "one_bit"])
def test_buckets_are_ready_then_exchanged_then_landed(codec):
    def worker(group):
        replica = make_replica(make_module(), group, sync=EveryStep(codec=codec), bucket_bytes=300)
        for _ in range(3):
            result = run_one_step(replica)
        events = list(timeline_events(result))
        replica.close()
        return events, replica.wire_bytes

    for (*buckets, step), wire_bytes in LocalGroup.run(2, worker):
        assert isinstance(step, StepTimed)
        assert 0 < step.backward_began_s < step.backward_ended_s <= step.optimizer_began_s
        assert step.optimizer_ended_s <= step.duration_s
        assert len(buckets) > 1
        assert sum(bucket.wire_bytes for bucket in buckets) == wire_bytes
        for bucket in buckets:
            assert isinstance(bucket, BucketExchanged)
            assert step.backward_began_s < bucket.ready_s <= step.backward_ended_s
            assert bucket.ready_s <= bucket.began_s <= bucket.ended_s <= bucket.landed_s <= step.optimizer_began_s
        assert sum(bucket.waited_s for bucket in buckets) <= step.waited_s


def test_evaluation_between_steps_is_no_part_of_them():
    replica = make_replica(make_module())
    run_one_step(replica)
    with torch.no_grad():
        replica(torch.tensor([0]))
    evaluated_s = time.perf_counter()
    assert run_one_step(replica).times.began_s > evaluated_s
