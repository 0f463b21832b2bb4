"""How often the host waits for a GPU in a training step, and whether streams wait for each other, on a stand-in.

A wait that comes back while later work is queued leaves the GPU busy; one for all that is queued leaves it idle.
"""

import copy
import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from distant import DEVICE, Streams, recorded_syncs
from test_rules_on_a_device import run_on_device

from paceline.comm import LocalGroup
from paceline.comm.streams import BACKENDS, HostCopy, SideStream
from paceline.compression import BF16, DGC, FP16, Int8, OneBit, PowerSGD, RandomK, TopK
from paceline.compression.codec import all_of
from paceline.data import Batch, Interval, Loader
from paceline.data.pipeline import _copy_stream
from paceline.errors import SettingsError
from paceline.memory import ActivationOffload
from paceline.parallel.activations import Activations
from paceline.parallel.gradient_use import GradientUse
from paceline.parallel.mixture_of_experts import Experts
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.pipeline import Pipeline
from paceline.parallel.pipeline.times import Clock
from paceline.parallel.pipeline.traced import find_layers
from paceline.parallel.token_exchange import TokenExchange
from paceline.replica.buckets import attach_arrived, make_buckets
from paceline.replica.loss import Loss
from paceline.replica.replica import Replica
from paceline.replica.step_result import StepTimes
from paceline.replica.step_scalars import _scalar_stream
from paceline.sync import EveryStep
from paceline.testing.rule_contract import make_batch, make_module
from paceline.topology.layout import Layout
from paceline.training.load_balancing import LoadBalancer
from paceline.training.objective import MaskedLM, NextToken

NUM_STEPS = 3
CODECS = [FP16, BF16, Int8, OneBit, TopK, RandomK, DGC, PowerSGD]


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Let threads make tensors on the device, which has streams."""
    made = Streams()
    monkeypatch.setitem(BACKENDS, DEVICE.type, made)
    monkeypatch.setattr(threading.Thread, "run", run_on_device)
    for stream in (_scalar_stream, _copy_stream):
        stream.cache_clear()
    yield made
    for stream in (_scalar_stream, _copy_stream):
        stream.cache_clear()


def train(group, streams, rule, shard=None, **settings):
    """Train some steps; return the syncs of the last step's backward, all its syncs, and its waits for less."""
    group.device = DEVICE
    module = make_module().to(DEVICE)
    if shard is not None:
        module = shard(module, group)
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.05), group=group, sync=rule, **settings)
    for number in range(NUM_STEPS):
        inputs, targets = (tensor.to(DEVICE) for tensor in make_batch(group.rank, number))
        group.all_reduce(torch.zeros(1, device=DEVICE), name="begin together").wait()
        before = streams.num_waits
        with recorded_syncs() as syncs:
            replica.backward(F.mse_loss(replica.module(inputs), targets), weight=1.0 + group.rank)
            in_backward = [what for name, what in syncs if name == threading.current_thread().name]
            result = replica.update()
        group.all_reduce(torch.zeros(1, device=DEVICE), name="end together").wait()
    mine = [what for name, what in syncs if name == threading.current_thread().name]
    in_jobs = [what for name, what in syncs if "codec" in name]
    return SimpleNamespace(
        in_backward=in_backward, syncs=mine, in_jobs=in_jobs, result=result, waits=streams.num_waits - before
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("settings", "num_syncs"),
    [
        ({}, 0),
        ({"landing": "arrival"}, 0),
        ({"clip_norm": 1.0}, 1),
        ({"precision": "fp16"}, 1),
        ({"precision": "fp16", "clip_norm": 1.0}, 1),
        ({"ema": 0.9}, 0),
    ],
    ids=str,
)
def test_a_step_waits_once_for_all_that_is_queued_at_most(streams, size, settings, num_syncs):
    for rank in LocalGroup.run(size, lambda group: train(group, streams, EveryStep(), **settings), timeout_s=20):
        assert rank.in_backward == []
        assert len(rank.syncs) == num_syncs, rank.syncs
        assert rank.waits == size  # for the scalars of the step, which were queued before backward


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_jobs_of_codecs_never_wait(streams, codec):
    rule = EveryStep(codec=codec(dense_below=0), codec_of="gradient")
    for rank in LocalGroup.run(2, lambda group: train(group, streams, rule), timeout_s=20):
        assert rank.in_jobs == rank.in_backward == []
        assert len(rank.syncs) == 1, rank.syncs  # whether gradients were finite, of all buckets at once


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}], ids=str)
def test_ranks_of_one_worker_begin_backward_without_waiting(streams, settings):
    def shard(module, group):
        made = ModelShard(group, Layout(tensor=2), module=module)
        made.model_parallel_group, made.group = group, LocalGroup(device=DEVICE)
        group.membership.shards.append(made)
        return module

    for rank in LocalGroup.run(2, lambda group: train(group, streams, EveryStep(), shard, **settings), timeout_s=20):
        assert rank.in_backward == []
        assert len(rank.syncs) == len(settings), rank.syncs
        assert rank.result.weight == 1.0 + 2.0  # here the losses of both ranks count


def of_this_thread(syncs):
    return [what for name, what in syncs if name == threading.current_thread().name]


@pytest.mark.parametrize(
    ("has_codec", "settings", "num_syncs"),
    [(False, {}, 0), (True, {}, 1), (True, {"checks_finite": False}, 0)],  # the last reads a norm later
)
def test_which_sharded_parameters_were_used_is_known_without_waiting(has_codec, settings, num_syncs):
    """FSDP2 itself needs processes; what it adds to a step of ours is this exchange."""

    def work(group):
        group.device = DEVICE
        coded = SimpleNamespace(take_flags=lambda: torch.ones(2, device=DEVICE)) if has_codec else None
        use = GradientUse(torch.nn.Linear(2, 2), [], group, "", coded)
        use._used = {"weight"} if group.rank else set()
        with recorded_syncs() as syncs:
            found = use.exchange(LocalGroup(device=DEVICE), **settings)
        return found, len(of_this_thread(syncs))

    num_odd = 2 if num_syncs else 0
    assert LocalGroup.run(2, work, timeout_s=20) == [((["bias"], num_odd, num_odd), num_syncs)] * 2


def test_buckets_with_unused_parameters_wait_once_for_all():
    def work():
        parameters = dict(torch.nn.Linear(2, 2).to(DEVICE).named_parameters())
        buckets = make_buckets(parameters, [[name] for name in parameters], LocalGroup(device=DEVICE), {})
        for bucket in buckets:
            bucket.clear_unused()
        buckets[0].flat.flags[0] = 1  # another rank used it
        with recorded_syncs() as syncs:
            unused = attach_arrived(buckets)
        return unused, len(syncs), [parameter.grad is None for parameter in parameters.values()]

    assert run_on_stand_in(work) == (["bias"], 1, [False, True])


def test_tokens_on_their_way_to_experts_wait_for_their_numbers_only():
    torch.manual_seed(0)  # all threads draw from one generator
    whole, tokens, weights = Experts(8, 4, 8), torch.randn(6, 8), torch.rand(6, 2)
    index = torch.tensor([[0, 1], [2, 3], [1, 4], [0, 4], [3, 0], [2, 0]])
    expected = whole(tokens, index, weights)

    def work(group):
        group.device = DEVICE
        mine = Experts(8, 2, 8)
        for own, parameter in zip(mine.parameters(), whole.parameters(), strict=True):
            own.data.copy_(parameter.data.chunk(2)[group.rank])
        mine.to(DEVICE)
        TokenExchange("moe", mine, group, 4)
        given = [one.to(DEVICE) for one in (tokens, index, weights)]
        given[0].requires_grad_()
        with recorded_syncs() as syncs:
            output = mine(*given)
            in_forward = of_this_thread(syncs)
            output.sum().backward()
            in_all = of_this_thread(syncs)
        with pytest.raises(SettingsError, match="taken once over the expert axis"):
            torch.autograd.grad(mine(*given).sum(), given[0], create_graph=True)
        return in_forward, len(in_all), torch.allclose(output.cpu(), expected)

    for in_forward, number, is_right in LocalGroup.run(2, work, timeout_s=20):
        assert len(in_forward) == number == 1, in_forward
        assert is_right


def run_on_stand_in(work):
    return LocalGroup.run(1, lambda group: work(), timeout_s=20)[0]


def test_the_stand_in_sees_what_waits():
    def work():
        value = torch.ones(3, device=DEVICE)
        kinds = [value.tolist, value.sum().item, lambda: bool(value.sum() > 0), value.nonzero, value.cpu]
        kinds += [lambda: torch.tensor([1.0], device=DEVICE), lambda: value.copy_(torch.zeros(3))]
        found = []
        for kind in kinds:
            with recorded_syncs() as syncs:
                kind()
            found.append(len(syncs))
        with recorded_syncs() as syncs:
            value.to("cpu", non_blocking=True)
            value[0] = 5.0
            value.sum().isfinite() & True
        return found, syncs

    assert run_on_stand_in(work) == ([1] * 7, [])


def test_the_stand_in_sees_streams_that_do_not_wait():
    def work():
        value, stream = torch.ones(3, device=DEVICE), SideStream(DEVICE)
        with pytest.raises(AssertionError, match="another stream"), stream.running(None):
            value + 1
        with stream.running(stream.mark()):
            total = value + 1
            ended = stream.mark()
        with pytest.raises(AssertionError, match="another stream"):
            total + 1
        BACKENDS[DEVICE.type].current_stream().wait_event(ended)
        return (total + 1).tolist()

    assert run_on_stand_in(work) == [3, 3, 3]


def test_a_copy_is_of_the_moment_and_not_of_what_is_queued_after_it(streams):
    def work():
        sent = HostCopy(torch.ones(2, device=DEVICE))
        torch.ones(3, device=DEVICE)
        with recorded_syncs() as syncs:
            return sent.tolist(), sent.tolist(), syncs, streams.num_waits

    assert run_on_stand_in(work) == ([1, 1], [1, 1], [], 1)


def test_samples_are_copied_on_a_stream_of_their_own():
    dataset = torch.utils.data.TensorDataset(torch.arange(16.0))

    def work(group):
        group.device = DEVICE
        with recorded_syncs() as syncs:
            batches = [
                (batch, batch.inputs[0] + 1) for batch in Loader(dataset, 4, group=group, num_steps=4, shuffle=False)
            ]
        return batches, [total.tolist() for _, total in batches], syncs

    batches, totals, syncs = LocalGroup.run(1, work, timeout_s=20)[0]
    assert totals == [[4 * step + 1.0 + place for place in range(4)] for step in range(4)]
    assert syncs == []
    assert all(batch.on_host.inputs[0].device.type == "cpu" for batch, _ in batches)


@pytest.mark.parametrize("objective", [NextToken(), MaskedLM()], ids=lambda objective: objective.name)
def test_tokens_are_counted_without_waiting(objective):
    def work():
        tokens = torch.tensor([[1, 2, -100], [3, -100, -100]])
        batch = Batch((tokens.clamp(min=0), tokens), 2, Interval(0, 2)).to(DEVICE)
        table = torch.randn(4, 4, device=DEVICE)
        with recorded_syncs() as syncs:
            whole = objective.loss(lambda inputs: F.embedding(inputs, table), batch)
            half = objective.loss(lambda inputs: F.embedding(inputs, table), batch.part(_first(batch.both), 1))
        assert dataclasses.replace(batch, data=batch.data[1]).on_host.data.device == DEVICE  # not what was copied
        return whole.weight, half.weight, syncs

    assert run_on_stand_in(work) == (3, 2, [])


def _first(both):
    return tuple(tuple(tensor[:1] for tensor in data) for data in both)


def test_speeds_are_read_when_the_device_has_measured_them(streams):
    def work(group):
        group.device = DEVICE
        loader = Loader(torch.utils.data.TensorDataset(torch.zeros(8)), 4, group=group)
        balancer = LoadBalancer(loader, group, interval=2, is_following=False)
        times, told = StepTimes(), []
        for number in range(1, 9):
            streams.is_busy = number % 2 == 0  # at the end of an interval the last step still runs
            with balancer.computing(2):
                torch.zeros(1, device=DEVICE)
            with recorded_syncs() as syncs:
                told += balancer.end_step(number, times)
            assert [what for what in syncs if "event" in what] == []
        return told, balancer._last is not None

    streams.has_later_work = lambda _: False  # each wait for an event would be one for all
    assert LocalGroup.run(2, work, timeout_s=20) == [([], True)] * 2


def test_activations_leave_and_come_back_on_a_stream_of_their_own():
    def work():
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).to(DEVICE)
        saving = copy.deepcopy(plain)
        offload = ActivationOffload(saving, smallest_bytes=1)
        x = torch.randn(5, 8, device=DEVICE)
        with recorded_syncs() as syncs:
            for module in (plain, saving):
                module(x).square().sum().backward()
        pairs = zip(plain.parameters(), saving.parameters(), strict=True)
        return offload.num_sent, syncs, [torch.equal(one.grad.cpu(), other.grad.cpu()) for one, other in pairs]

    assert run_on_stand_in(work) == (4, [], [True] * 8)


class Counting(torch.nn.Module):
    """A model whose last part needs the shape of an input, but not its values."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) / tokens.shape[1]
        return x


def test_parts_of_a_forward_wait_for_shapes_of_the_first_batch_only():
    def work():
        torch.manual_seed(0)
        model, tokens = Counting(), torch.arange(6).reshape(2, 3)
        expected = model(tokens)
        first, *others = find_layers(model, (), tokens)
        model.to(DEVICE)
        for _ in range(2):
            with recorded_syncs() as syncs:
                value = first.run((tokens.to(DEVICE, non_blocking=True),))
                for layer in others:
                    value = layer.run(value)
        return syncs, torch.allclose(value.cpu(), expected)

    assert run_on_stand_in(work) == ([], True)


def test_flags_of_both_kinds_combine():
    assert all_of([True, True]) is True
    assert all_of([True, False]) is False
    assert not all_of([True, torch.tensor(False)])
    assert all_of([torch.tensor(True), True])


class OneStage:
    """A pipeline of one stage. Torch's schedule and DTensor's redistribution need processes; all around them runs."""

    def __init__(self, module, activations):
        self.shared, self.place, self.last_place, self.module, self.activations = {}, 0, 0, module, activations
        self._driver = Pipeline.__new__(Pipeline)
        self._driver.module = module
        self._driver._clock, self._driver.num_stages, self._driver._num_losses = Clock(DEVICE), 1, 0
        self._driver.check_loss, self._driver.stages = (
            lambda loss, first: None,
            [SimpleNamespace(rebuild=lambda output: output)],
        )

    def run(self, inputs, data, loss, *, timed=False):
        self._driver._loss = lambda output, places: loss(output, data)
        output = self.activations.add(self.module(*inputs))
        self._driver._compute_loss(output, torch.arange(len(inputs[0]))).backward()


def test_a_step_through_stages_and_split_matrices_waits_once(monkeypatch):
    monkeypatch.setattr(Activations, "_move", lambda self, part, *placements: part)

    def shard(module, group):
        made = ModelShard(group, Layout(), module=module)
        made.pipeline = OneStage(module, Activations(None, cuts_tokens=False))
        group.membership.shards.append(made)
        return module

    def work(group):
        group.device = DEVICE
        module = shard(make_module().to(DEVICE), group)
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.05), group=group, sync=EveryStep())
        for number in range(NUM_STEPS):
            data = tuple(tensor.to(DEVICE) for tensor in make_batch(group.rank, number))
            batch = Batch(data, len(data[0]), Interval(0, len(data[0])))
            group.all_reduce(torch.zeros(1, device=DEVICE), name="begin together").wait()
            with recorded_syncs() as syncs:
                replica.backward_through(
                    batch, lambda output, part: Loss(F.mse_loss(output, part.targets), float(part.num_samples))
                )
                replica.update()
            group.all_reduce(torch.zeros(1, device=DEVICE), name="end together").wait()
        return of_this_thread(syncs)

    [[wait]] = LocalGroup.run(1, work, timeout_s=20)
    assert wait.startswith("wait for an event")  # the step's scalars, which are known after all micro-batches
