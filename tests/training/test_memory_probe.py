"""The memory of one step, measured while a replica trains."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from paceline.comm import LocalGroup
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.training.memory_probe import MEASURED_STEP, MemoryProbe
from training_models import make_batch, make_module, make_replica


def test_buffers_of_gradients_count_from_the_beginning_of_the_step():
    def worker(group):
        replica = make_replica(make_module(), group, bucket_bytes=200)
        probe = MemoryProbe(replica.shard, is_together=True)
        inputs, targets = make_batch()
        batch = Batch((inputs, targets), len(inputs), Interval(0, len(inputs)), True)
        found = []
        for _ in range(MEASURED_STEP + 2):
            with probe.watching(replica, batch):
                replica.backward(F.cross_entropy(replica(inputs), targets), weight=12)
                replica.update()
            found.append(probe.end_step(replica))
        return found, sum(buffer.nbytes for buffer in replica.state.gradient_buffers)

    (found, buffer_bytes), (elsewhere, _) = LocalGroup.run(2, worker)
    assert elsewhere == [None] * len(found)
    assert [number for number, one in enumerate(found) if one is not None] == [MEASURED_STEP]
    measured, module = found[MEASURED_STEP], make_module()
    assert measured.bytes_of["gradients"] == buffer_bytes
    assert buffer_bytes >= sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert measured.bytes_of["parameters"] == sum(p.nbytes for p in module.parameters())
    assert measured.bytes_of["activations"] >= torch.float32.itemsize * 12 * 11, "logits"
    assert measured.peak_bytes == sum(measured.bytes_of.values())


def test_on_a_gpu_the_peak_is_of_what_comes_after_the_build(monkeypatch):
    allocated = {"peak": 1000, "now": 10}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: allocated["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: allocated.update(peak=allocated["now"]))
    replica = SimpleNamespace(group=SimpleNamespace(device=torch.device("cuda", 0)))
    probe = MemoryProbe(SimpleNamespace(mesh=None, world=SimpleNamespace(rank=0)), is_together=True)
    found = []
    for step_bytes in (300, 200, 100):
        with probe.watching(replica, None):
            allocated["peak"] = max(allocated["peak"], step_bytes)
        found.append(probe.end_step(replica))
    assert [one and one.peak_bytes for one in found] == [None, None, 300]
