"""What torch makes numbers of by default is the model's affair: what is exchanged has a dtype of its own."""

import pytest
import torch
import torch.nn.functional as F

from paceline.comm import LocalGroup
from paceline.replica import Replica
from paceline.sync import ASGD, ChocoSGD, DiLoCo, EveryStep, StreamingDiLoCo
from paceline.testing.rule_contract import every_rule, make_batch, make_module

LOSSY = {"dense_below": 0}
RULES = every_rule()
RULES |= {f"every_step {name}": EveryStep(codec={"name": name, **LOSSY}) for name in ("int8", "top_k", "power_sgd")}
RULES |= {
    "choco_sgd": ChocoSGD(codec={"name": "power_sgd", **LOSSY}),
    "asgd with codecs": ASGD(codec={"name": "top_k", **LOSSY}, pull_codec={"name": "int8", **LOSSY}),
    "diloco int8": DiLoCo(period=2, synchronous_steps=0, codec={"name": "int8", **LOSSY}),
}


def train(group, rule, module, batches):
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, sync=rule, clip_norm=10.0)
    for inputs, targets in batches:
        replica.backward(F.mse_loss(replica(inputs), targets), weight=1.0 + group.rank)
        replica.update()
    with replica.consensus():
        values = [parameter.detach().clone() for parameter in module.parameters()]
    replica.close()
    return values


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_wider_default_dtype_changes_no_bit(name):
    num_workers = 1 if RULES[name].is_asynchronous else 2  # of several the first to come decides

    def train_all():
        modules, batches = zip(*given, strict=True)
        return LocalGroup.run(
            num_workers, lambda group: train(group, RULES[name], modules[group.rank], batches[group.rank])
        )[0]

    def give():
        return [(make_module(), [make_batch(rank, step) for step in range(4)]) for rank in range(num_workers)]

    given = give()
    narrow = train_all()
    given = give()
    torch.set_default_dtype(torch.float64)
    try:
        wide = train_all()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("rule", [ASGD(), StreamingDiLoCo()])
def test_a_wider_default_dtype_changes_no_price(rule):
    shapes = [parameter.shape for parameter in make_module().parameters()]
    narrow = rule.traffic(shapes, 4)
    torch.set_default_dtype(torch.float64)
    try:
        assert rule.traffic(shapes, 4) == narrow
    finally:
        torch.set_default_dtype(torch.float32)
