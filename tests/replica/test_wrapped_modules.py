"""Modules that something else has wrapped: compiled ones train under their own names, others are refused."""

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import LocalGroup
from paceline.errors import SettingsError


def train(group, folder, module, *, compiler=None):
    """Train three steps, or what is left of them, with a checkpoint after the second, and return the losses."""
    with group:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        trained = torch.compile(module, backend=compiler) if compiler else module
        replica = paceline.Replica(trained, optimizer)
        inputs = torch.randn(12, 3, generator=generator)
        loader = paceline.Loader(torch.utils.data.TensorDataset(inputs), 4, num_steps=3)
        paceline.load_latest(folder, replica, loader)
        losses = []
        for batch in loader:
            replica.backward(replica(batch.data[0]).square().mean(), weight=batch.count())
            losses.append(replica.update().loss)
            if replica.num_updates == 2:
                paceline.save(folder, replica, loader)
        replica.close()
        return losses


def test_a_compiled_module_trains_and_is_saved_under_its_own_names(tmp_path):
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    (plain,) = LocalGroup.run(1, lambda group: train(group, tmp_path / "plain", make()))
    (losses,) = LocalGroup.run(1, lambda group: train(group, tmp_path / "compiled", make(), compiler=count))
    assert compiled, "it is the compiled module that runs"
    assert losses == pytest.approx(plain, rel=1e-5)  # kernels may round in another way
    (later,) = LocalGroup.run(1, lambda group: train(group, tmp_path / "compiled", make()))
    assert later == pytest.approx(plain[2:], rel=1e-5)


def test_nothing_lands_inside_a_compiled_module():
    module = torch.compile(nn.Linear(2, 1), backend="eager")
    with pytest.raises(
        SettingsError, match="got next_forward with a compiled model, inside which no bucket can be applied"
    ):
        paceline.Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), landing="next_forward")


def test_a_module_whose_gradients_torch_exchanges_is_refused():
    module = nn.DataParallel(nn.Linear(2, 1))
    with pytest.raises(SettingsError, match=r"must be the model itself.*wrapped in DataParallel; give Replica the mod"):
        paceline.Replica(module, torch.optim.SGD(module.parameters(), lr=0.1))
