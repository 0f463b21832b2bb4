"""Codecs beside unused parameters, odd parameters, and checkpoints of other codecs and worlds."""

import warnings
from math import inf

import pytest
import torch
from torch import nn

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import NonFiniteError, SettingsError
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import EveryStep
from training_models import make_module


class Odd(nn.Module):
    """Parameters of every layout and dtype."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 8).t().detach())
        self.scalar = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.precise = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.coarse = nn.Linear(6, 5).bfloat16()

    def forward(self, x):
        x = self.convolution(x).mean((2, 3)) @ self.transposed * self.scalar + self.empty.sum()
        return (self.coarse(x.bfloat16()).double() * self.precise).sum()


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x, use_last=True):
        x = self.first(x)
        return self.last(x) if use_last else x


def _sync(name):
    return EveryStep(codec={"name": name, "dense_below": 0})


def _make(group, name, make, **options):
    module = make_module(make=make)
    return Replica(module, torch.optim.SGD(module.parameters(), lr=0.01), group=group, sync=_sync(name), **options)


@pytest.mark.parametrize("landing", ["update", "next_forward"])
@pytest.mark.parametrize("name", ["none", "int8", "top_k", "power_sgd"])
def test_parameters_of_any_layout_and_dtype_are_exchanged(name, landing):
    """Replicas stay equal, and what landed is what a codec that sends all sends: the plain mean, in its dtype."""

    def worker(group):
        options = {"int8": {}, "top_k": {"density": 1.0}, "power_sgd": {"low_rank": 8}}.get(name, {})
        module = make_module(make=Odd)
        sync = EveryStep(codec={"name": name, "dense_below": 0, **options})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        replica = Replica(module, optimizer, group=group, sync=sync, landing=landing, bucket_bytes=200, hash_interval=1)
        for step in range(6):
            for part in range(2):
                generator = torch.Generator().manual_seed(step * 10 + part * 3 + group.rank)
                loss = replica(torch.randn(2, 3, 5, 5, generator=generator)).square() / 100
                replica.backward(loss, weight=group.rank + 0.5, last=part == 1)
            replica.update()
        replica.close()
        return [parameter.detach() for parameter in module.parameters()]

    def alone(group):
        module = make_module(make=Odd)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for step in range(6):
            for part in range(2):
                for rank in range(2):
                    generator = torch.Generator().manual_seed(step * 10 + part * 3 + rank)
                    loss = module(torch.randn(2, 3, 5, 5, generator=generator)).square() / 100
                    (loss * (rank + 0.5) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in module.parameters()]

    together, expected = LocalGroup.run(2, worker), LocalGroup.run(1, alone)[0]
    for ours, other, right in zip(*together, expected, strict=True):
        assert torch.equal(ours, other)
        # bfloat16 sums of four gradients round; int8 sends 1 part in 127, and the rest later.
        torch.testing.assert_close(ours, right, rtol=0.02, atol=0.02 if name == "int8" else 4e-3)


@pytest.mark.filterwarnings("ignore::paceline.replica.UnusedParametersWarning")
def test_an_overflow_is_skipped_where_the_first_parameter_of_its_bucket_is_unused():
    """The fp16 codec cuts infinities to numbers, so that only the replica can tell the scaler."""

    def worker(group):
        replica = _make(group, "fp16", Optional, precision="fp16")
        skipped = []
        for step in range(3):
            if step == 2 and group.rank == 1:
                replica.module.first.weight.register_hook(lambda gradient: gradient * torch.inf)
            before = replica.module.first.weight.detach().clone()
            replica.backward(replica(torch.ones(2, 8), step < 2).float().square().mean(), weight=1.0)
            skipped.append(replica.update().skipped)
        assert replica._reduction.gradients.layout == [["last.weight", "first.weight"]]
        replica.close()
        return skipped, torch.equal(before, replica.module.first.weight)

    assert LocalGroup.run(2, worker) == [([False, False, True], True)] * 2


@pytest.mark.parametrize(
    "codec", [*({"name": name, "density": 0.5, "dense_below": 0} for name in ("top_k", "random_k")), "power_sgd"]
)
@pytest.mark.parametrize(("second", "told"), [(3e38, "in the sum over ranks"), (inf, "on 1 of 2 ranks")])
def test_a_sum_of_gradients_that_overflows_is_told_and_blames_no_rank(codec, second, told):
    """All-reduce hides whose part was not finite; with power_sgd the block is a small one, summed as it is."""

    def worker(group):
        model = nn.Linear(8, 8, bias=False)
        sync = EveryStep(codec=codec, codec_of="gradient")
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group, sync=sync)
        before = model.weight.detach().clone()
        model.weight.register_hook(lambda gradient: torch.full_like(gradient, second if group.rank else 3e38))
        replica.backward(replica(torch.ones(1, 8)).sum(), weight=1.0)
        with pytest.raises(NonFiniteError, match=f"some between weight and weight are not, {told}"):
            replica.update()
        replica.close()
        return torch.equal(model.weight, before)

    assert LocalGroup.run(2, worker) == [True, True]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gradient_that_is_not_finite_is_refused_without_a_codec_too(size):
    """A finite loss may have one, such as that of a root at 0; afterwards training goes on."""

    def worker(group):
        model = nn.Linear(8, 8, bias=False)
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
        before = model.weight.detach().clone()
        bad = model.weight.register_hook(lambda gradient: gradient * (inf if group.rank == size - 1 else 1.0))
        replica.backward(replica(torch.ones(1, 8)).sum(), weight=1.0)
        with pytest.raises(NonFiniteError, match="gradients must be finite, but at step 0"):
            replica.update()
        kept = torch.equal(model.weight, before)
        bad.remove()
        replica.backward(replica(torch.ones(1, 8)).sum(), weight=1.0)
        replica.update()
        replica.close()
        return kept, bool(model.weight.isfinite().all()), torch.equal(model.weight, before)

    assert LocalGroup.run(size, worker) == [(True, True, False)] * size


def _save_three(store, name):
    def worker(group):
        replica = _make(group, name, Optional)
        for step in range(2):
            replica.backward(replica(torch.ones(2, 8) * (step + group.rank)).square().mean(), weight=1.0)
            replica.update()
        tensors, document = capture(replica)
        if group.rank == 0:
            store.save(tensors, document, 2)
        replica.close()

    LocalGroup.run(3, worker)


@pytest.mark.parametrize(
    ("name", "num_workers", "here"),
    [("one_bit", 3, "codec 'one_bit' runs among 3"), ("none", 3, "no codec runs among 3"), ("int8", 1, "no codec")],
    ids=["another", "none", "alone"],
)
def test_feedback_that_cannot_be_used_is_dropped_with_a_warning(name, num_workers, here, tmp_path):
    with CheckpointStore(tmp_path) as store:
        _save_three(store, "int8")

        def worker(group):
            replica = _make(group, name, Optional)
            restore(store.find_newest_valid(pytest.fail) if group.rank == 0 else None, replica)
            assert replica.state.feedback() == {}
            replica.backward(replica(torch.ones(2, 8)).square().mean(), weight=1.0)
            replica.update()
            replica.close()

        with pytest.warns(FeedbackDroppedWarning, match=f"'int8' of 3 workers .* dropped, since {here}"):
            LocalGroup.run(num_workers, worker)


def test_feedback_of_the_same_codec_is_kept_without_a_warning(tmp_path):
    with CheckpointStore(tmp_path) as store:
        _save_three(store, "int8")

        def worker(group):
            replica = _make(group, "int8", Optional)
            restore(store.find_newest_valid(pytest.fail) if group.rank == 0 else None, replica)
            replica.close()
            return sorted(replica.state.feedback())

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept = LocalGroup.run(2, worker)
        assert kept == [["first.weight/worker", "last.weight/worker"]] * 2


def test_a_parameter_in_half_precision_is_priced_in_half_precision():
    def worker(group):
        module = nn.Linear(30, 20, bias=False).bfloat16()
        dense = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group)
        dense.close()
        return dense.wire_bytes

    assert LocalGroup.run(2, worker) == [2 * 30 * 20] * 2


def test_a_codec_that_carries_momentum_refuses_an_optimizer_with_its_own():
    module = make_module()
    sync = EveryStep(codec="dgc")
    with pytest.raises(SettingsError, match="SGD without momentum"):
        Replica(module, torch.optim.AdamW(module.parameters()), sync=sync)
    with pytest.raises(SettingsError, match="SGD without momentum"):
        Replica(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), sync=sync)
    Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), sync=sync)
