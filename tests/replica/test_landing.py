"""Landing bucket by bucket: the same training, with others still on the wire, at most while the next forward runs."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import GradientError, SettingsError
from paceline.replica import next_forward
from paceline.replica.next_forward import PriorityReducer, plan_launch_order
from paceline.replica.replica import Replica
from paceline.sync import EveryStep
from paceline.sync.reducer import FlatBucket
from scripted_time import ScriptedTime
from training_models import make_module


class Tied(nn.Module):
    """A weight used by two modules, one of which reads it from outside its owner."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return F.linear(self.middle(self.embed(x * self.scale)), self.embed.weight.t())


def _inputs(seed, width=4):
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed))


def _train(group, make, landing, optimizer=torch.optim.AdamW, num_steps=8, **settings):
    module = make_module(make=make)
    replica = Replica(
        module, optimizer(module.parameters(), lr=0.05), group=group, landing=landing, bucket_bytes=64, **settings
    )
    losses = []
    for step in range(num_steps):
        for param_group in replica.optimizer.param_groups:
            param_group["lr"] = 0.05 / (1 + step)
        loss = replica(_inputs(step * 10 + group.rank)).square().mean()
        replica.backward(loss, weight=group.rank + 1)
        losses.append(replica.update().loss)
    replica.flush()
    replica.close()
    return losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("landing", ["arrival", "next_forward"])
@pytest.mark.parametrize("codec", ["none", "one_bit", "power_sgd"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["sgd", "adamw"])
def test_it_is_the_same_training_bit_for_bit(optimizer, codec, landing):
    sync = EveryStep(codec={"name": codec, "dense_below": 0}, codec_of="gradient")
    at_update = LocalGroup.run(2, lambda group: _train(group, Tied, "update", optimizer, sync=sync))
    by_bucket = LocalGroup.run(2, lambda group: _train(group, Tied, landing, optimizer, sync=sync, hash_interval=3))
    for rank in range(2):
        assert by_bucket[rank][0] == at_update[rank][0]
        for name, tensor in at_update[rank][1].items():
            assert torch.equal(by_bucket[rank][1][name], tensor), name


def test_the_optimizer_steps_with_buckets_that_have_come_while_the_last_is_under_way():
    """The first bucket's parameters have changed when the wire has the last one."""
    seen = []

    class Watched(LocalGroup):
        def all_reduce(self, tensor, *, name):
            work = super().all_reduce(tensor, name=name)
            return Spy(work) if name == "bucket 2" else work

    class Spy:
        def __init__(self, work):
            self._work = work

        def __getattr__(self, name):
            return getattr(self._work, name)

        def wait(self):
            if now["module"] is not None:
                pairs = zip(now["old"], now["module"].parameters(), strict=True)
                seen.append([not torch.equal(old, new) for old, new in pairs])
            self._work.wait()

    now = {"module": None, "old": []}

    def worker(group):
        group.__class__ = Watched
        module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        replica = Replica(
            module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, landing="arrival", bucket_bytes=64
        )
        for step in range(3):
            replica.backward(replica(_inputs(step)).square().mean(), weight=1.0)
            if step == 2 and group.rank == 0:
                now.update(module=module, old=[p.clone() for p in module.parameters()])
            replica.update()
        replica.close()

    LocalGroup.run(2, worker)
    assert [False, True, True] in seen  # gradients of the last layer come first


def test_forward_begins_before_the_last_bucket_has_come():
    """The first layer's update is there when forward begins; that of the last layer comes while it runs."""
    seen = []

    def worker(group):
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        replica = Replica(
            module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, landing="next_forward", bucket_bytes=8
        )
        for step in range(7):
            if step == 6:
                before = [layer.weight.clone() for layer in module if isinstance(layer, nn.Linear)]
                linear = [layer for layer in module if isinstance(layer, nn.Linear)]
                handle = linear[0].register_forward_hook(
                    lambda *_, before=before, linear=linear: seen.append(
                        [not torch.equal(old, layer.weight) for old, layer in zip(before, linear, strict=True)]
                    )
                )
            replica.backward(replica(_inputs(step, 8)).square().mean(), weight=1.0)
            if step == 6:
                handle.remove()
            replica.update()
        replica.flush()
        replica.close()

    LocalGroup.run(2, worker)
    assert seen == [[True, False, False]] * 2


def test_a_parameter_used_elsewhere_than_before_is_an_error():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.last = nn.Linear(4, 4, bias=False)
            self.early = False

        def forward(self, x):
            if self.early:
                x = x * self.last.weight.diagonal()
            return self.last(self.first(x)) if not self.early else self.first(x)

    def worker(group):
        module = Fickle()
        replica = Replica(
            module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, landing="next_forward", bucket_bytes=8
        )
        for step in range(7):
            module.early = step == 6
            replica.backward(replica(torch.ones(2, 4)).square().mean(), weight=1.0)
            replica.update()

    # Autograd itself may notice first that a weight it saved was changed by the late landing.
    with pytest.raises((GradientError, RuntimeError), match=r"used elsewhere|modified by an inplace"):
        LocalGroup.run(2, worker)


@pytest.mark.parametrize("landing", ["arrival", "next_forward"])
@pytest.mark.parametrize(
    ("settings", "rule"),
    [({"clip_norm": 1.0}, "clip_norm"), ({"precision": "fp16"}, "fp16"), ({"optimizer": "lbfgs"}, "LBFGS")],
    ids=["clipping", "fp16", "lbfgs"],
)
def test_what_needs_the_whole_step_is_refused(settings, rule, landing):
    module = make_module()
    kind = torch.optim.LBFGS if "optimizer" in settings else torch.optim.SGD
    settings = {name: value for name, value in settings.items() if name != "optimizer"}
    with pytest.raises(SettingsError, match=rule):
        Replica(module, kind(module.parameters(), lr=0.1), landing=landing, **settings)


def test_urgent_buckets_go_first_and_the_wire_is_never_idle():
    # Gradients become ready from the last layer (bucket 0) to the first (bucket 3), which forward needs first.
    ready_s, needed = [0.0, 1.0, 2.0, 3.0], [3, 2, 1, 0]
    assert plan_launch_order(ready_s, [0.5] * 4, needed) == [0, 1, 2, 3]
    assert plan_launch_order(ready_s, [3.0] * 4, needed) == [0, 3, 2, 1]
    assert plan_launch_order(ready_s, [1.5] * 4, needed) == [0, 1, 3, 2]


def test_exchanges_that_share_the_wire_are_planned_as_one_at_a_time(monkeypatch):
    """Each takes 2 s of two lanes, 1 s alone; when the first would be through, the one needed first is not ready."""
    scripted, launched = ScriptedTime(), []
    monkeypatch.setattr(next_forward, "time", scripted)

    class TwoLanes:
        can_split, bucket_bytes, state_of, max_in_flight = False, None, "", 2

        def reduce(self, bucket, *_):
            launched.append(flat.name)
            return SimpleNamespace(began_s=scripted.perf_counter(), ended_s=scripted.perf_counter() + 2.0)

    parcels = [FlatBucket(name, torch.zeros(1), {name: torch.zeros(1)}) for name in ("last", "middle", "first")]
    reducer = PriorityReducer(TwoLanes(), LocalGroup())
    reducer.begin_layout(parcels)
    while reducer.is_measuring:
        for flat in parcels:
            reducer.reduce(flat, lambda: 1.0, 0)
            scripted.sleep(0.75)
        reducer.end_step({"first": 0, "middle": 1, "last": 2})
    launched.clear()
    for flat in parcels:
        reducer.reduce(flat, lambda: 1.0, 0)
    assert launched == ["last", "middle", "first"]


def test_the_wire_is_busy_while_the_next_forward_runs():
    """The bucket that is sent last stays on the wire until the next forward has begun, which does not wait for it."""
    backward_ended = [threading.Semaphore(0) for _ in range(2)]
    backward_began_s = [0.0, 0.0]
    num_forwards, num_kept, is_kept, changed = [0, 0], [0, 0], [False, False], threading.Condition()

    class Slow(LocalGroup):
        def all_reduce(self, tensor, *, name):
            work = super().all_reduce(tensor, name=name)
            if name == "bucket 0 chunk 0":  # it takes longer than backward: all others then go as forward needs them
                assert backward_ended[self.rank].acquire(timeout=30)
                time.sleep(time.perf_counter() - backward_began_s[self.rank])
            if name == "bucket 1 chunk 0" and is_kept[self.rank]:
                work.wait()
                num_kept[self.rank] += 1
                with changed:
                    has_begun = changed.wait_for(lambda: num_forwards[self.rank] > num_kept[self.rank], timeout=30)
                assert has_begun, "the next forward waits for what is on the wire"
            return work

        def duplicate(self, name):
            copy = super().duplicate(name)
            copy.__class__ = Slow
            return copy

    def begin_forward(group):
        with changed:
            num_forwards[group.rank] += 1
            changed.notify_all()

    def worker(group):
        group.__class__ = Slow
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        replica = Replica(
            module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, landing="next_forward", bucket_bytes=80
        )
        for step in range(16):
            if step == 10:  # the order is measured
                replica.flush()
                is_kept[group.rank] = True
                module[0].register_forward_hook(lambda *_: begin_forward(group))
            loss = replica(torch.ones(2, 4)).square().mean()
            backward_began_s[group.rank] = time.perf_counter()
            replica.backward(loss, weight=1.0)
            backward_ended[group.rank].release()
            replica.update()
        begin_forward(group)
        replica.close()

    LocalGroup.run(2, worker)
    assert num_kept == [6, 6]


def test_a_large_bucket_is_exchanged_in_chunks_between_which_urgent_ones_pass():
    """The last layer's gradient is there first and is large; the first layer's need not wait for all of it."""
    names = []

    class Slow(LocalGroup):
        def all_reduce(self, tensor, *, name):
            work = super().all_reduce(tensor, name=name)
            if "chunk" in name:
                work.wait()
                time.sleep(0.004)
                if self.rank == 0:
                    names.append(name)
            return work

        def duplicate(self, name):
            copy = super().duplicate(name)
            copy.__class__ = Slow
            return copy

    def worker(group):
        group.__class__ = Slow
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 500_000, bias=False))
        replica = Replica(
            module, torch.optim.SGD(module.parameters(), lr=1e-9), group=group, landing="next_forward", bucket_bytes=400
        )
        for _ in range(6):
            replica.backward(replica(_inputs(1, 8)).square().mean(), weight=1.0)
            replica.update()
        replica.close()

    LocalGroup.run(2, worker)
    step = names[-6:]  # 4 chunks of 4 MB of the large bucket, and two small ones
    places = [place for place, name in enumerate(step) if name.startswith("bucket 0 ")]
    assert len(places) == 4
    assert any(place < places[-1] for place, name in enumerate(step) if not name.startswith("bucket 0 "))
