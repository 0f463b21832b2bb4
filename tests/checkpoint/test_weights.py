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
