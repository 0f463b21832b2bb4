"""Memory of buckets: one allocation of a dtype serves all layouts, the first and those that are learnt or loaded."""

import torch
from torch import nn

from paceline.comm.local_group import LocalGroup
from paceline.replica.buckets import make_buckets
from paceline.replica.gradients import Gradients
from paceline.sync.every_step import EveryStep


class CountingGroup(LocalGroup):
    """A group that counts what it allocates."""

    num_allocations = 0

    def allocate(self, num_elements, dtype):
        self.num_allocations += 1
        return super().allocate(num_elements, dtype)


def make_parameters():
    sizes = {"a": (3, 4), "b": (5,), "c": (2, 2)}
    parameters = {name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()}
    return parameters | {"d": nn.Parameter(torch.ones(7, dtype=torch.float64))}


def test_another_layout_lies_in_the_same_memory_and_begins_with_zeros():
    parameters, group, memory = make_parameters(), CountingGroup(), {}
    first = make_buckets(parameters, [["a", "b"], ["c"], ["d"]], group, memory)
    for bucket in first:
        bucket.flat.buffer.fill_(3.0)
    second = make_buckets(parameters, [["c"], ["b"], ["a"], ["d"]], group, memory)
    assert group.num_allocations == 2, "one of each dtype"
    assert {b.flat.buffer.untyped_storage().data_ptr() for b in second} == {
        b.flat.buffer.untyped_storage().data_ptr() for b in first
    }
    assert all(not bucket.flat.buffer.any() for bucket in second)
    for bucket in second:
        for slot in bucket.slots:
            assert slot.view.shape == parameters[slot.name].shape
            slot.view.fill_(1.0)
    assert sum(float(bucket.flat.numerators.sum()) for bucket in second) == 12 + 5 + 4 + 7, "no two overlap"


def test_a_layout_that_is_loaded_allocates_nothing():
    group = CountingGroup()
    gradients = Gradients(make_parameters(), group, EveryStep().start_reducer(group, 0, step=0), bucket_bytes=64)
    before = group.num_allocations
    gradients.load_state_dict({"layout": [["a"], ["c", "b"], ["d"]], "is_learnt": True})
    assert gradients.layout == [["a"], ["c", "b"], ["d"]]
    assert group.num_allocations == before == 2
    gradients.close()
