import pytest
import torch
from torch import nn

from paceline.comm import LocalGroup, join
from paceline.errors import SettingsError
from paceline.parallel import start
from paceline.parallel.start import broadcast_module, broadcast_tensors, check_same_model
from paceline.testing import run_processes


def make_tensors(rank):
    """Return tensors of every kind that a model's state may hold, different on each rank."""
    return {
        "float": torch.full((3, 4), rank + 0.5),
        "half": torch.full((5,), rank + 1, dtype=torch.bfloat16),
        "double": torch.full((2,), rank + 1e-12, dtype=torch.float64),
        "bool": torch.tensor([True, False, True]) ^ (rank == 1),
        "int": torch.full((2, 2), 2**60 + rank),
        "short": torch.full((3,), rank - 300, dtype=torch.int16),
        "byte": torch.full((4,), rank + 200, dtype=torch.uint8),
        "complex": torch.full((2,), rank + 2j),
        "0-dim": torch.tensor(rank + 7),
        "0-dim float": torch.tensor(rank + 0.25),
        "empty": torch.zeros(0, 3),
        "strided": torch.full((4, 6), float(rank)).t()[::2],
        "channels last": torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.full((3,), float(rank))),
    }


def assert_equal(tensors, expected):
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
        assert (tensor.dtype, tensor.stride()) == (expected[name].dtype, expected[name].stride()), name


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
def test_every_kind_of_tensor_is_copied_from_the_source(monkeypatch, source, chunk_bytes):
    monkeypatch.setattr(start, "_CHUNK_BYTES", chunk_bytes)

    def work(group):
        tensors = make_tensors(group.rank)
        broadcast_tensors(tensors.values(), group, source)
        return tensors

    for tensors in LocalGroup.run(3, work, timeout_s=20):
        assert_equal(tensors, make_tensors(source))


def copy_between_processes():
    """Return what went wrong with each kind of tensor."""
    group = join(device="cpu", timeout_s=58)
    problems = {}
    for name, tensor in make_tensors(group.rank).items():
        try:
            broadcast_tensors([tensor], group, source=1)
            assert_equal({name: tensor}, make_tensors(1))
        except Exception as error:
            problems[name] = str(error)
    group.close()
    return problems


def test_every_kind_of_tensor_is_copied_between_processes():
    for result in run_processes(2, copy_between_processes):
        assert result.value == {}, result.output


def test_gradients_are_still_possible_after_the_copy():
    def work(group):
        torch.manual_seed(group.rank)
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        module[1].running_mean += group.rank
        broadcast_module(module, group)
        module(torch.ones(4, 2)).sum().backward()
        return module

    first, second = LocalGroup.run(2, work, timeout_s=20)
    for (name, mine), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert all(parameter.is_leaf and parameter.grad is not None for parameter in second.parameters())


def compare(*modules):
    """Return what all ranks raise that build these modules, or None."""

    def work(group):
        try:
            check_same_model(modules[group.rank], group)
        except SettingsError as error:
            return str(error)
        return None

    messages = LocalGroup.run(len(modules), work, timeout_s=20)
    assert len(set(messages)) == 1, "all ranks say the same"
    return messages[0]


def test_the_same_model_with_other_values_passes():
    assert compare(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3)) is None
    assert compare(nn.Identity(), nn.Identity()) is None


@pytest.mark.parametrize(
    ("theirs", "here", "there"),
    [
        (nn.Linear(2, 4), "weight: (3, 2) torch.float32", "weight: (4, 2) torch.float32"),
        (nn.Linear(2, 3).double(), "weight: (3, 2) torch.float32", "weight: (3, 2) torch.float64"),
        (nn.Linear(2, 3, bias=False), "bias: (3,) torch.float32", "nothing"),
        (nn.Identity(), "weight: (3, 2) torch.float32", "nothing"),
        (nn.Sequential(nn.Linear(2, 3)), "weight: (3, 2) torch.float32", "0.weight: (3, 2) torch.float32"),
    ],
    ids=["shape", "dtype", "missing", "empty", "name"],
)
def test_another_model_is_told_by_rank_and_first_difference(theirs, here, there):
    message = compare(nn.Linear(2, 3), nn.Linear(2, 3), theirs)
    assert f"every rank must build the same model, but rank 2 has {there} where rank 0 has {here};" in message


def test_what_only_another_rank_has_is_told_too():
    message = compare(nn.Linear(2, 3, bias=False), nn.Linear(2, 3))
    assert "rank 1 has bias: (3,) torch.float32 where rank 0 has nothing;" in message


def test_buffers_are_compared_as_parameters_are():
    class Buffered(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.register_buffer("table", torch.zeros(size), persistent=False)

    assert compare(Buffered(3), Buffered(3)) is None
    assert "rank 1 has table: (4,)" in compare(Buffered(3), Buffered(4))


class Hiding(nn.Module):
    """A model with modules in lists and dicts, of which one is registered too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.shown = nn.Linear(2, 2)
        torch.manual_seed(seed)
        self.layers = [self.shown, {"more": (nn.Linear(2, 2), 3)}]
        self.layers.append(self.layers)
        self.layers[1]["graph"] = nn.Module()
        self.layers[1]["graph"].register_buffer("edges", torch.eye(3).to_sparse())
        self.layers[1]["graph"].register_buffer("phases", torch.tensor([1j, 2.0]).conj())


def test_what_is_registered_nowhere_must_be_the_same_on_every_rank() -> None:
    assert compare(Hiding(0), Hiding(0)) is None
    message = compare(Hiding(0), Hiding(0), Hiding(1))
    assert "rank 2 has layers[1]['more'][0].weight, which is not registered (take nn.ModuleList), of " in message
