"""Numbers that each forward of a module moves."""

import pytest
import torch
from torch import nn

from paceline.parallel.counters import find_counters, set_numbers
from paceline.parallel.trial import restored


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_calls, self.share, self.name = 3, 0.5, "counting"
        self.register_buffer("num_batches", torch.tensor(7))
        self.register_buffer("mean", torch.tensor(0.25))

    def forward(self):
        self.num_calls += 2
        self.num_batches -= 1
        self.mean += 0.1


def test_numbers_are_what_they_will_be_after_many_forwards_and_the_module_is_as_before():
    module = Counting()
    counters = find_counters(module, module)
    assert (module.num_calls, int(module.num_batches), float(module.mean)) == (3, 7, 0.25)
    with restored(module):
        set_numbers(counters)
        assert (module.num_calls, int(module.num_batches)) == (2003, -993)
        assert (module.share, float(module.mean)) == (0.5, 0.25), "statistics do not grow for ever"
        module.num_batches += 1
    assert int(module.num_batches) == 7
    assert [int(value) for _, key, value in counters if key == "num_batches"] == [-993], "what is set is a copy"


@pytest.mark.parametrize(
    ("dtype", "before", "after", "later"),
    [
        (torch.uint8, 0, 1, 255),  # as layers tell whether they have seen data
        (torch.uint8, 1, 0, 0),
        (torch.int8, 0, -1, -128),
        (torch.bool, 0, 1, 1),
        (torch.bool, 1, 0, 0),
        (torch.float16, 0, 100, 65504),
        (torch.int32, 0, 1, 1000),
    ],
)
def test_what_a_dtype_cannot_hold_is_the_nearest_that_it_can(dtype, before, after, later):
    module = nn.Module()
    module.register_buffer("is_ready", torch.tensor(before, dtype=dtype))
    ((_, _, value),) = find_counters(module, lambda: module.is_ready.fill_(after))
    assert (value.dtype, float(value)) == (dtype, later)
