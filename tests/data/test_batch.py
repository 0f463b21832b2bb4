"""A batch is any nesting of tensors: what it is made of, how it is moved, divided, counted and given to a model."""

import dataclasses
import types
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from paceline.comm import LocalGroup
from paceline.data import Batch, Interval, Loader
from paceline.data.batch import call, check_batch, describe, list_tensors, map_tensors, select
from paceline.errors import DataError
from paceline.replica import Replica

Point = namedtuple("Point", "x y")
META = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    edges: tuple
    name: str = "graph"
    num_moves: int = dataclasses.field(default=0, init=False)


def make_batch(data, num_samples=2, **options):
    return Batch(data, num_samples, Interval(0, 4), **options)


NESTINGS = {
    "tensor": torch.ones(2),
    "tuple": (torch.ones(2), torch.ones(2, 3)),
    "list": [torch.ones(2), "text", None, 3],
    "dict": {"a": torch.ones(2), "b": {"c": [torch.ones(2)]}, "text": ["a", "b"]},
    "ordered": OrderedDict(a=torch.ones(2)),
    "frozen": types.MappingProxyType({"a": torch.ones(2)}),
    "namedtuple": Point(torch.ones(2), (torch.ones(2),)),
    "dataclass": Graph(torch.ones(2), (torch.ones(2), torch.ones(2)), "mine"),
    "encoding": BatchEncoding({"input_ids": torch.ones(2)}),
    "output": BaseModelOutput(last_hidden_state=torch.ones(2)),
}


@pytest.mark.parametrize("kind", NESTINGS)
def test_a_batch_is_moved_in_containers_of_the_same_types(kind):
    data = NESTINGS[kind]
    moved = make_batch(data).to(META)
    assert type(moved.data) is (dict if kind == "frozen" else type(data))
    assert {tensor.device for tensor in list_tensors(moved.data)} == {META}
    assert {tensor.device for tensor in list_tensors(data)} == {torch.device("cpu")}, "the first is left as it was"
    assert describe(map_tensors(lambda tensor: tensor + 1, data)) == describe(data)
    assert all(tensor.unique().tolist() == [2.0] for tensor in list_tensors(map_tensors(lambda t: t + 1, data)))


def test_what_is_there_already_is_not_copied():
    batch = make_batch({"a": torch.ones(2)})
    assert batch.to(torch.device("cpu")) is batch


def test_what_is_no_tensor_is_passed_on():
    assert map_tensors(lambda tensor: tensor + 1, Graph) is Graph
    assert describe(Graph) == "type"
    moved = make_batch(NESTINGS["list"]).to(META)
    assert moved.data[1:] == ["text", None, 3]
    assert make_batch(NESTINGS["dataclass"]).to(META).data.name == "mine"
    assert make_batch(NESTINGS["encoding"]).to(META).data.input_ids.device == META, "it is a BatchEncoding still"


@pytest.mark.parametrize("kind", NESTINGS)
def test_some_samples_are_selected_of_every_tensor(kind):
    data = NESTINGS[kind]
    assert [len(tensor) for tensor in list_tensors(select(data, slice(1, 2), 2))] == [1] * len(list_tensors(data))


@pytest.mark.parametrize("odd", [torch.tensor(3.0), torch.ones(5)])
def test_what_has_no_samples_in_its_first_dim_is_not_divided(odd):
    with pytest.raises(DataError, match=r"the batch's 2 samples .* but got {a: float32\[2\], odd: float32\[5?\]}; "):
        select({"a": torch.ones(2), "odd": odd}, slice(1), 2)


def test_the_first_of_a_pair_are_inputs_and_the_second_targets():
    for data in (("x", "y"), ["x", "y"], ({"a": "x", "b": "z"}, "y")):
        assert (make_batch(data).inputs, make_batch(data).targets) == (data[0], "y")


@pytest.mark.parametrize("label", ["labels", "label", "targets", "target"])
def test_labels_of_a_mapping_are_targets_and_the_rest_inputs(label):
    batch = make_batch({"ids": 1, label: 2, "mask": 3})
    assert (batch.inputs, batch.targets) == ({"ids": 1, "mask": 3}, 2)
    assert make_batch(BatchEncoding({"ids": 1, label: 2})).inputs == {"ids": 1}


@pytest.mark.parametrize(
    "data", [torch.ones(2), {"x": torch.ones(2), "y": torch.ones(2)}, (torch.ones(2),), Point(1, 2), (1, 2, 3)], ids=str
)
def test_all_else_is_inputs_and_has_no_targets(data):
    assert make_batch(data).inputs is data
    with pytest.raises(DataError, match=r"pair .* or a mapping with 'labels' .* a loss of your own"):
        _ = make_batch(data).targets


def test_a_batch_counts_samples_or_what_a_mask_holds():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = make_batch(mask, num_samples=2)
    assert (batch.count(), batch.count(mask), batch.count(mask > 0)) == (2.0, 3.0, 3.0)
    borrowed = make_batch(mask, num_samples=0)
    assert (borrowed.count(), borrowed.count(mask)) == (0.0, 0.0)
    assert batch.count(mask.flatten()) == 3.0
    packed = make_batch(torch.ones(7), num_samples=2)
    assert packed.count(torch.ones(7, dtype=torch.bool)) == 7.0


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (torch.ones(3, 4), r"must have the batch's 2 samples as its first dim, but got float32\[3, 4\]; compute it"),
        (torch.tensor(2), r"must have the batch's 2 samples as its first dim, but got int64\[\]"),
        (torch.tensor([-100, 5]), r"must be True or False, 1 or 0, for each element, but got int64\[2\] with other"),
        (torch.tensor([0.5, 1.0]), r"must be True or False, 1 or 0, for each element, but got float32\[2\]"),
    ],
    ids=["length", "number", "labels", "fractions"],
)
def test_what_is_no_mask_of_the_batch_is_refused(mask, problem):
    with pytest.raises(DataError, match=f"a mask {problem}"):
        make_batch(torch.ones(2, 3), num_samples=2).count(mask)


def test_models_are_called_with_what_inputs_are():
    def model(*args, **kwargs):
        return args, kwargs

    assert call(model, {"a": 1, "b": 2}) == ((), {"a": 1, "b": 2})
    assert call(model, BatchEncoding({"a": 1})) == ((), {"a": 1})
    assert call(model, (1, 2)) == call(model, [1, 2]) == call(model, Point(1, 2)) == ((1, 2), {})
    assert call(model, 1) == ((1,), {})


def test_names_that_a_model_does_not_know_are_told():
    with pytest.raises(TypeError, match="unexpected keyword argument 'image'") as caught:
        call(nn.Linear(1, 1), {"image": torch.ones(2, 1)})
    assert "by keyword, here image; name them in the data set, or a collate_fn" in caught.value.__notes__[0]


def test_structures_are_described_in_a_line():
    assert (
        describe({"ids": torch.ones(4, 8, dtype=torch.int64), "x": np.ones(2)}) == "{ids: int64[4, 8], x: float64[2]}"
    )
    assert describe((1, "a", None, [torch.tensor(1.0)])) == "(int, str, NoneType, (float32[]))"
    assert describe([1] * 9) == "(int, int, int, int, int, int, int, int, ...)"
    assert describe(NESTINGS["dataclass"]).startswith(
        "Graph(nodes=float32[2], edges=(float32[2], float32[2]), name=str"
    )


@pytest.mark.parametrize("data", [None, [], {"text": ["a"]}, [np.ones(2)]], ids=str)
def test_what_holds_no_tensors_is_no_batch(data):
    with pytest.raises(DataError, match=r"a batch must hold tensors, but got .* or in a collate_fn"):
        check_batch(data)


class Ragged(nn.Module):
    """Two inputs by name, one of variable length, and a loss for each token that is there."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(5, 7)

    def forward(self, ids, mask, bias):
        x = self.embedding(ids)
        means = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head(torch.cat([x + means, bias[:, None, None].expand(-1, ids.shape[1], 1)], -1))


def pad(samples):
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample["ids"]) for sample in samples])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    labels = torch.where(mask > 0, (ids * 2 + 1) % 7, -100)
    return BatchEncoding(
        {"ids": ids, "mask": mask, "bias": torch.stack([s["bias"] for s in samples]), "labels": labels}
    )


def train(shares, num_micro_batches):
    """Return the losses and parameters of a training on so many workers."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        {"ids": torch.randint(1, 7, (1 + number % 5,), generator=generator), "bias": torch.tensor(float(number))}
        for number in range(11)
    ]
    state = {name: torch.randn(value.shape, generator=generator) for name, value in Ragged().state_dict().items()}

    def worker(group):
        model = Ragged()
        model.load_state_dict(state)
        replica = Replica(model, torch.optim.SGD(model.parameters(), 0.1), group=group)
        options = {"shares": shares, "num_micro_batches": num_micro_batches, "num_epochs": 2, "collate_fn": pad}
        losses = []
        for batch in Loader(samples, 4, group=group, **options):
            loss = F.cross_entropy(call(replica, batch.inputs).flatten(0, 1), batch.targets.flatten())
            replica.backward(loss, weight=batch.count(batch.targets != -100), last=batch.last)
            if batch.last:
                losses.append(replica.update().loss)
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    results = LocalGroup.run(len(shares), worker)
    assert all(losses == results[0][0] for losses, _ in results)
    return results[0]


def test_padded_batches_of_any_shares_train_as_one_process_does():
    losses, parameters = train([1.0], 1)
    assert len(losses) == 6
    for shares, num_micro_batches in (([1.0, 1.0], 1), ([2.0, 0.0, 1.0], 2)):
        others, other_parameters = train(shares, num_micro_batches)
        # Sums over tokens are made in another order: some roundings of float32.
        torch.testing.assert_close(others, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(other_parameters, parameters, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tensors", [1, 2, 3])
@pytest.mark.parametrize("share", [1, 2, 3])
def test_a_share_of_two_is_no_pair(num_tensors, share):
    """One tensor a sample is inputs, whatever their number; two are inputs and targets; more are all inputs."""
    tensors = [torch.arange(6.0) + 10 * number for number in range(num_tensors)]
    batch = next(iter(Loader(TensorDataset(*tensors), share, shuffle=False)))
    inputs = [one.tolist() for one in list_tensors(batch.inputs)]
    expected = [tensor[:share].tolist() for tensor in tensors]
    assert inputs == (expected[:1] if num_tensors == 2 else expected)
    (plain,) = list_tensors(next(iter(Loader(tensors[0], share, shuffle=False))).inputs)
    assert plain.tolist() == expected[0]
