"""Gradients that are on their way to other workers: what a training loop may do with them, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from test_beginning import make_dataset, make_replica, run

from paceline.errors import GradientError
from paceline.sync import EveryStep


@pytest.mark.parametrize(
    "meddle",
    [
        lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-6),
        lambda module: module.weight.grad.zero_(),
        lambda module: module.weight.grad.norm(),
    ],
    ids=["clip", "zero", "norm"],
)
@pytest.mark.parametrize("settings", [{}, {"landing": "arrival"}, {"clip_norm": 1.0}], ids=str)
def test_gradients_on_their_way_are_left_alone(meddle, settings):
    def work(group):
        replica = make_replica(group, **{"sync": EveryStep(), **settings})
        for _ in range(2):
            inputs, targets = make_dataset(8).tensors
            replica.backward(F.mse_loss(replica(inputs), targets), weight=8)
            with pytest.raises(GradientError, match="to clip them give Replica clip_norm"):
                meddle(replica.module)
            before = replica.module.weight.detach().clone()
            replica.update()
            assert not torch.equal(replica.module.weight, before), "the step is taken as if nothing had been"
        replica.close()

    run(work)


@pytest.mark.parametrize(
    "settings", [{}, {"landing": "arrival"}, {"landing": "next_forward"}, {"bucket_bytes": 8}], ids=str
)
def test_a_gradient_that_a_loop_sets_to_none_leaves_its_parameter_alone(settings):
    def work(group):
        replica = make_replica(group, **{"sync": EveryStep(), **settings})
        kept, bias = (one.detach().clone() for one in replica.module.parameters())
        for is_dropped in (True, False):
            inputs, targets = make_dataset(8).tensors
            replica.backward(F.mse_loss(replica(inputs), targets), weight=8)
            if is_dropped:
                replica.module.weight.grad = None
            result = replica.update()
            replica.flush()
            assert torch.equal(replica.module.weight, kept) is is_dropped
            assert not torch.equal(replica.module.bias, bias)
            assert not result.newly_unused, "ranks have used it"
        replica.close()

    run(work)
