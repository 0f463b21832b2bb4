"""Samples that BatchNorm cannot learn from: borrowed ones leave no trace, one alone is refused in words."""

import pytest
import torch
import torch.nn.functional as F
from test_batch_norm import CLASSES, make_data, make_sgd
from torch import nn

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.errors import SettingsError
from paceline.replica import Replica


class Unsteady(nn.Module):
    """Layers that could not learn from one sample, one of them without running statistics."""

    def __init__(self):
        super().__init__()
        self.kept = nn.BatchNorm1d(6, momentum=None)
        self.not_kept = nn.BatchNorm1d(6, track_running_stats=False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.not_kept(self.kept(x)))


@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_borrowed_sample_leaves_no_trace_in_statistics(scope):
    """The second worker has no samples: its own statistics stay, and those of all workers are the first one's."""

    def work(group):
        module = Unsteady().double()
        replica = Replica(module, make_sgd(module), group=group, batch_norm=scope)
        shares = [2, 0][: group.size]
        for batch in Loader(make_data("perceptron"), 10, group=group, num_steps=2, shares=shares):
            replica.backward(F.cross_entropy(replica(batch.inputs), batch.targets), weight=batch.count())
            replica.update()
        assert module.state_dict().keys() == Unsteady().state_dict().keys()
        return dict(module.kept.named_buffers())

    alone = work(LocalGroup())
    first, second = LocalGroup.run(2, work, timeout_s=20)
    expected = dict(nn.BatchNorm1d(6).double().named_buffers()) if scope == "local" else alone
    for name, buffer in expected.items():
        torch.testing.assert_close(first[name], alone[name])
        torch.testing.assert_close(second[name], buffer)
    assert alone["num_batches_tracked"] == 2


def test_one_value_of_each_channel_is_refused_in_words():
    def work(group, scope):
        module = Unsteady()
        replica = Replica(module, make_sgd(module), group=group, batch_norm=scope)
        replica(torch.randn(1 if scope == "local" else 1 - group.rank, 6))

    with pytest.raises(
        SettingsError, match=r"got one in an input of shape torch.Size\(\[1, 6\]\); leave out .* \(drop_last"
    ):
        LocalGroup.run(1, lambda group: work(group, "local"))
    with pytest.raises(SettingsError, match=r"got one of all workers together in kept; .*take fewer micro-batches$"):
        LocalGroup.run(2, lambda group: work(group, "global"), timeout_s=20)


def test_other_errors_of_a_model_stay_what_they_are():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            raise ValueError("of its own")

    module = Broken()
    with pytest.raises(ValueError, match=r"^of its own$"):
        Replica(module, make_sgd(module), group=LocalGroup())(1)
