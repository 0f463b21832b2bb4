import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.comm import LocalGroup
from paceline.sync.batch_statistics import find_statistics, pool_moments, pooled_over_workers, set_moments


def moments_of(samples):
    return samples.mean(0), samples.var(0, unbiased=False)


@settings(deadline=None, derandomize=True)
@given(num_shards=st.integers(1, 6), num_samples=st.integers(1, 20), seed=st.integers(0, 100), skew=st.floats(0, 100))
def test_pooled_moments_are_those_of_the_union(num_shards, num_samples, seed, skew):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_shards, num_samples, 3)
    shards = torch.randn(shape, generator=generator, dtype=torch.float64)
    shards += skew * torch.arange(num_shards).view(-1, 1, 1)
    mean, variance = pool_moments([moments_of(shard) for shard in shards])
    exact_mean, exact_variance = moments_of(shards.flatten(0, 1))
    # The second moment is a difference of squares: rounding is relative to the square of the largest value.
    scale = float(shards.abs().max()) ** 2 + 1
    torch.testing.assert_close(mean, exact_mean, rtol=1e-13, atol=1e-13 * scale)
    torch.testing.assert_close(variance, exact_variance, rtol=1e-13, atol=1e-13 * scale)


def test_averaging_variances_would_be_wrong_on_skewed_shards():
    shards = [torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [12.0]])]
    moments = [moments_of(shard) for shard in shards]
    mean, variance = pool_moments(moments)
    assert (mean.item(), variance.item()) == (6, 26)
    assert sum(variance.item() for _, variance in moments) / 2 == 1, "the average knows nothing of the gap between them"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_shards", [2, 3, 5, 7])
def test_a_variance_never_becomes_negative_by_rounding(num_shards, dtype):
    """BatchNorm takes its root: below minus its epsilon it is NaN from there on."""
    generator = torch.Generator().manual_seed(num_shards)
    mean = torch.randn(1000, generator=generator, dtype=dtype) * 1e6
    _, variance = pool_moments([(mean, torch.zeros_like(mean))] * num_shards)
    assert bool((variance >= 0).all())


class Convolutional(nn.Module):
    def __init__(self, track=True):
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.inner = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.BatchNorm2d(5, track_running_stats=False))
        self.group = nn.GroupNorm(1, 5)

    def forward(self, x):
        return self.group(self.inner(self.first(x)))


def test_only_layers_that_keep_statistics_are_found():
    assert list(find_statistics(Convolutional())) == ["first", "inner.1"]
    assert list(find_statistics(nn.Linear(2, 2))) == []


def shard_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(6, 3, 4, 4, generator=generator) * (rank + 1) + 5 * rank


@pytest.mark.parametrize("size", [1, 2, 3])
def test_inside_a_layer_has_the_statistics_of_all_workers_and_outside_its_own(size):
    def work(group):
        layer = nn.BatchNorm2d(3, momentum=None)  # the plain mean over batches: of one batch, its own
        layer(shard_of(group.rank))
        samples = shard_of(group.rank).numel() // 3
        layer.running_var *= (samples - 1) / samples  # torch keeps the unbiased one
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        with pooled_over_workers(layer, group):
            inside = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
        return before, inside

    results = LocalGroup.run(size, work, timeout_s=20)
    union = torch.cat([shard_of(rank).transpose(0, 1).flatten(1) for rank in range(size)], dim=1).double()
    for _, inside in results:
        # Running statistics are float32, whose rounding of the second moment this tolerance allows.
        torch.testing.assert_close(inside["running_mean"].double(), union.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inside["running_var"].double(), union.var(1, unbiased=False), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(tensor, results[0][1][name]) for name, tensor in inside.items()), "equal on all ranks"
        assert inside["num_batches_tracked"] == 1
    if size > 1:
        assert not torch.equal(results[0][0]["running_mean"], results[0][1]["running_mean"])


def test_every_layer_gets_its_own_part_back_also_after_an_error():
    def work(group):
        torch.manual_seed(group.rank)
        module = Convolutional()
        for layer in find_statistics(module).values():
            set_moments(layer, (torch.randn(layer.num_features), torch.rand(layer.num_features)))
        own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        pooled = {}
        try:
            with pooled_over_workers(module, group):
                pooled = {name: tensor.clone() for name, tensor in module.state_dict().items()}
                raise KeyError("inside")
        except KeyError:
            pass
        assert all(torch.equal(tensor, own[name]) for name, tensor in module.state_dict().items())
        return own, pooled

    results = LocalGroup.run(2, work, timeout_s=20)
    for name in ("first", "inner.1"):
        moments = [(own[f"{name}.running_mean"], own[f"{name}.running_var"]) for own, _ in results]
        mean, variance = pool_moments(moments)
        for _, pooled in results:
            assert torch.equal(pooled[f"{name}.running_mean"], mean.float())
            assert torch.equal(pooled[f"{name}.running_var"], variance.float())


def test_a_module_without_statistics_sends_nothing():
    first, _ = LocalGroup.create(2, timeout_s=0.1)
    with pooled_over_workers(nn.GroupNorm(1, 2), first):
        pass
