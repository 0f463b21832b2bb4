import pytest
import torch
from torch import nn

from paceline.comm import LocalGroup
from paceline.replica.hashing import describe_difference, find_difference, hash_tensor

TENSORS = {
    "float": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "brain float": torch.ones(5, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "0-dim": torch.tensor(2, dtype=torch.int64),
    "parameter": nn.Parameter(torch.ones(2)),
    "strided": torch.arange(12.0).view(3, 4).t(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_hash_is_of_the_values_and_sees_a_single_bit(tensor):
    assert hash_tensor(tensor) == hash_tensor(tensor.clone(memory_format=torch.contiguous_format))
    for element in range(tensor.numel()):
        changed = tensor.detach().clone(memory_format=torch.contiguous_format)
        view = changed.view(-1).view(torch.uint8)
        view[element * tensor.element_size()] ^= 1
        assert hash_tensor(changed) != hash_tensor(tensor)


def test_a_hash_tells_what_equality_does_not():
    assert hash_tensor(torch.tensor(0.0)) != hash_tensor(torch.tensor(-0.0))
    nan = torch.tensor(float("nan"))
    assert hash_tensor(nan) == hash_tensor(nan.clone())
    assert hash_tensor(torch.zeros(0)) == hash_tensor(torch.zeros(0, 3))
    assert hash_tensor(torch.tensor([1.0, 2.0])) != hash_tensor(torch.tensor([2.0, 1.0]))


def compare(values):
    """Compare ranks that each hold a value for every parameter; return what all of them say."""

    def work(group):
        hashes = {name: hash_tensor(torch.full((3,), value)) for name, value in values[group.rank].items()}
        return describe_difference(find_difference(hashes, group), group.names)

    messages = LocalGroup.run(len(values), work, timeout_s=20)
    assert len(set(messages)) == 1, "all ranks say the same"
    return messages[0]


SAME = {"c": 1.0, "b": 2.0, "a": 3.0}  # the order of the model, not of the alphabet


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_equal_replicas_pass(size):
    assert compare([SAME] * size) == ""


def test_of_two_ranks_it_is_only_known_that_they_differ():
    assert compare([SAME, {**SAME, "b": 2.5}]) == "the 2 ranks differ, first in b"


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_ranks_the_odd_one_is_named(odd):
    ranks = [dict(SAME) for _ in range(3)]
    ranks[odd] = {**SAME, "c": -1.0}
    assert compare(ranks) == f"rank {odd} differs from the others, first in c"


def test_the_first_parameter_that_differs_is_named_though_others_do_too():
    message = compare([SAME, SAME, {"c": 1.0, "b": 7.0, "a": 7.0}])
    assert "first in b" in message
    message = compare([SAME, {**SAME, "a": 9.0}, {**SAME, "b": 9.0}])
    assert "the 3 ranks differ, first in b" in message


def test_two_odd_ones_of_five_are_both_named():
    ranks = [SAME, {**SAME, "a": 0.0}, SAME, {**SAME, "b": 0.0}, SAME]
    assert "rank 1, 3 differs from the others" in compare(ranks)


def test_two_against_two_accuses_nobody():
    other = {**SAME, "a": 0.0}
    message = compare([SAME, SAME, other, other])
    assert "the 4 ranks differ" in message, "there is no majority that could be right"
