"""Modules that something else has wrapped: compiled ones train under their own names, others are refused."""

import copy

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


class Configured(nn.Linear):
    """A module with a setting, a method of its own, and one that reads it all."""

    def __init__(self):
        super().__init__(2, 1)
        self.config = {"width": 2}

    def judge(self, inputs):
        return self(inputs).square().mean()


def make_configured(**settings):
    module = Configured()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return paceline.Replica(module, optimizer, group=LocalGroup(), **settings)


def test_a_replica_has_the_attributes_of_its_module_and_its_methods_run_as_forward_does():
    replica = make_configured(precision="bf16")
    assert replica.config is replica.module.config
    assert replica.weight is replica.module.weight
    assert list(replica.parameters()) == list(replica.module.parameters())
    inputs = torch.ones(3, 2)
    assert torch.equal(replica.judge(inputs), replica(inputs).square().mean())
    assert not torch.equal(replica.judge(inputs), replica.module.judge(inputs)), "which is not in bf16"
    replica.backward(replica.judge(inputs), weight=3)
    assert replica.update().gradient_norm is None
    assert replica.state_dict().keys() != replica.module.state_dict().keys(), "its own come first"


def test_what_neither_has_or_a_replica_must_do_itself_is_an_attribute_error():
    replica = make_configured()
    assert not hasattr(replica, "confgi")
    with pytest.raises(AttributeError, match="'Configured' object has no attribute 'confgi'"):
        _ = replica.confgi
    with pytest.raises(AttributeError, match=r"forward of the Replica must be run by calling it"):
        _ = replica.forward
    assert copy.copy(replica).module is replica.module
    assert not hasattr(object.__new__(paceline.Replica), "config"), "as while it is unpickled"


@pytest.mark.parametrize("name", ["weight", "judge", "parameters"])
def test_parameters_that_may_be_late_are_not_read_through_a_replica(name):
    replica = make_configured(landing="next_forward")
    assert replica.config == {"width": 2}
    with pytest.raises(AttributeError, match=rf"call replica.flush\(\), then take replica.module.{name}"):
        getattr(replica, name)


def test_what_is_no_module_is_refused():
    replica = make_configured()
    with pytest.raises(SettingsError, match=r"the module must be a torch.nn.Module, but got a Replica"):
        paceline.Replica(replica, replica.optimizer, group=LocalGroup())
