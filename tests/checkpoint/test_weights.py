"""Weights alone: read from what anything has written, and put into models."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from paceline.checkpoint.weights import Weights, find_misfits, load_weights, open_weights, write_safetensors
from paceline.errors import CheckpointError
from training_models import Tied, make_module


def same(module, other):
    return all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )


def save_sharded(folder, state):
    """Write two files and their index, as `save_pretrained` does with large models."""
    folder.mkdir()
    names = list(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in parts.items():
        save_file({name: state[name].clone() for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_weights_are_read_from_what_other_tools_write(tmp_path):
    made = make_module(seed=1)
    save_model(made, tmp_path / "model.safetensors")
    torch.save(made.state_dict(), tmp_path / "model.pt")
    save_sharded(tmp_path / "sharded", made.state_dict())
    for name in ("model.safetensors", "model.pt", "sharded"):
        module = make_module(seed=2)
        assert not load_weights(module, open_weights(tmp_path / name))
        assert same(module, made), name
        assert module.head.weight is module.embedding.weight


def test_weights_of_every_dtype_are_written_as_they_are(tmp_path):
    tensors = {
        "half": torch.randn(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
    }
    write_safetensors(tmp_path / "x.safetensors", Weights.of_tensors("here", tensors), {})
    read = open_weights(tmp_path / "x.safetensors")
    assert all(torch.equal(read.read(name), tensor) for name, tensor in tensors.items())
    assert {name: spec.dtype for name, spec in read.specs.items()} == {name: t.dtype for name, t in tensors.items()}


def test_what_does_not_fit_is_listed_and_nothing_is_copied():
    module, before = make_module(), make_module()
    state = make_module(seed=1).state_dict()
    state["block.weight"] = torch.zeros(2, 2)
    state["other"] = state.pop("block.bias")
    weights = Weights.of_tensors("here", state)
    told = r"missing: block\.bias; unexpected: other; of another shape: block\.weight \(2, 2\) instead of \(8, 8\)"
    with pytest.raises(CheckpointError, match=told):
        load_weights(module, weights)
    assert same(module, before)
    assert re.fullmatch(told, load_weights(module, weights, strict=False))
    assert torch.equal(module.embedding.weight, state["embedding.weight"])
    assert torch.equal(module.block.weight, before.block.weight)


def test_what_is_tied_here_must_not_differ_there():
    state = make_module(seed=1).state_dict()
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"tied in the model must be the same, but embedding\.weight and head\.w"):
        load_weights(make_module(), Weights.of_tensors("here", state))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_not_a_number_is_told(tied):
    """And not as tied weights that differ, since NaN differs from itself."""
    state = make_module(seed=1).state_dict()
    for name in ("embedding.weight", "head.weight") if tied else ("block.weight",):
        state[name] = torch.full_like(state[name], torch.nan)
    names = r"embedding\.weight and head\.weight" if tied else r"block\.weight"
    with pytest.raises(CheckpointError, match=f"weights must be numbers, but {names} in here have NaN"):
        load_weights(make_module(), Weights.of_tensors("here", state))


def test_weights_of_another_kind_of_type_do_not_fit():
    """Another precision does; integers are another thing, quantised for instance."""
    module, before = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    state = {name: tensor + 3 for name, tensor in before.state_dict().items()}
    integers = Weights.of_tensors("here", state | {"weight": state["weight"].to(torch.int64)})
    told = r"of another type: weight torch\.int64 instead of torch\.float32"
    with pytest.raises(CheckpointError, match=told):
        load_weights(module, integers)
    assert re.fullmatch(told, load_weights(module, integers, strict=False))
    assert module.weight.tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match=r"num_batches_tracked torch\.float32 instead of torch\.int64"):
        load_weights(module, Weights.of_tensors("here", {name: tensor.float() for name, tensor in state.items()}))
    assert not load_weights(module, Weights.of_tensors("here", state | {"weight": state["weight"].half()}))
    assert module.weight.tolist() == [4.0, 4.0]


def test_the_prefix_of_a_wrapper_is_left_out_where_all_names_have_it_and_the_model_has_not():
    names = make_module().state_dict().keys()
    wrapped = Weights.of_tensors(
        "here", {f"_orig_mod.module.{name}": tensor for name, tensor in make_module(seed=1).state_dict().items()}
    )
    module, found = make_module(), wrapped.without_wrapper(names)
    assert found.prefix == "_orig_mod.module."
    assert not load_weights(module, found)
    assert same(module, make_module(seed=1))
    assert wrapped.without_wrapper([f"_orig_mod.{name}" for name in names]).prefix == ""
    assert (
        Weights.of_tensors("here", {"module.a": torch.ones(1), "b": torch.ones(1)}).without_wrapper(names).prefix == ""
    )
    assert Weights.of_tensors("here", {}).without_wrapper(names).prefix == ""


def test_weights_of_another_model_are_refused_even_where_not_all_must_fit():
    with torch.device("meta"):
        module = Tied()
    with pytest.raises(CheckpointError, match="must fit the model, but of 8 names in it and 2 in there"):
        find_misfits(module, Weights.of_tensors("there", nn.Linear(2, 2).state_dict()), strict=False)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.safetensors", b"", "header cannot be read"),
        ("x.safetensors", b"\xff" * 40, "header cannot be read"),
        ("x.safetensors", (2).to_bytes(8, "little") + b"[]", "header cannot be read"),
        ("x.pt", b"no zip", "must be a state_dict that torch.save wrote"),
        ("x.bin", b"", r"must be a directory or a file that ends in \.safetensors or \.pt or \.pth"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        open_weights(tmp_path / name)


def test_a_file_that_is_cut_short_or_holds_more_than_weights_is_refused(tmp_path):
    save_model(make_module(), tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="is cut short; copy it again"):
        open_weights(tmp_path / "x.safetensors")
    torch.save({"model": make_module().state_dict(), "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="but it holds model, epoch; save the state_dict inside"):
        open_weights(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="must be readable, but: No such file"):
        open_weights(tmp_path / "none.safetensors")
