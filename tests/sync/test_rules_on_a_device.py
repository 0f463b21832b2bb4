"""Every rule trains on a device that is not the CPU as it does there: nothing is mixed, nothing is left behind."""

import threading

import pytest
import torch
import torch.nn.functional as F
from distant import DEVICE, OnDevice

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.compression import Int8, PowerSGD, TopK
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import ASGD, ChocoSGD, DiLoCo, EveryStep, ParameterServer
from paceline.testing.rule_contract import every_rule, make_batch, make_module

RULES = every_rule() | {
    "every_step int8": EveryStep(codec=Int8()),
    "choco_sgd power_sgd": ChocoSGD(codec=PowerSGD(dense_below=0)),
    "diloco int8": DiLoCo(period=2, codec=Int8()),
    "asgd with codecs": ASGD(codec=TopK(), pull_codec=Int8()),
    "parameter_server of 2": ParameterServer(num_servers=2, codec=Int8()),
    "parameter_server with backups": ParameterServer(num_servers=2, num_backups=1),
    "parameter_server with hosts": ParameterServer(host_size=2),
}


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and here is none")


def train(group, rule, device, store):
    """Train, go on from a checkpoint half way, and return the consensus."""
    group.device = device
    replica = make_replica(group, rule)
    for step in range(4):
        if step == 2:
            tensors, document = capture(replica)
            if group.rank == 0:
                store.save(tensors, document, step)
            replica.close()
            replica = make_replica(group, rule)
            restore(store.find_newest_valid(raise_damage) if group.rank == 0 else None, replica)
        inputs, targets = (tensor.to(device) for tensor in make_batch(group.rank, step))
        replica.backward(F.mse_loss(replica(inputs), targets), weight=1.0 + group.rank)
        replica.update()
    with replica.consensus():
        values = torch.cat([parameter.detach().cpu().flatten() for parameter in replica.module.parameters()])
    group.barrier()
    replica.close()
    return values


def make_replica(group, rule):
    module = make_module().to(group.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return Replica(module, optimizer, group=group, sync=rule, clip_norm=10.0)


def raise_damage(path, reason):
    raise AssertionError(f"{path} is damaged: {reason}")


def run_on_device(thread, run=threading.Thread.run):
    with OnDevice():
        run(thread)


def mark(name):
    """Return a rule, of a campaign if it differs from another in its first, synchronous steps alone."""
    is_more = name.endswith("after synchronous steps") and not name.startswith("local_sgd")
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.campaign] if is_more else [])


@pytest.mark.parametrize("name", [mark(name) for name in sorted(RULES)])
@pytest.mark.parametrize("device", [DEVICE, pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, needs_cuda])])
def test_every_rule_trains_as_on_the_cpu(tmp_path, monkeypatch, device, name):
    def train_on(device):
        with CheckpointStore(tmp_path / device.type) as store:
            return LocalGroup.run(4, lambda group: train(group, RULES[name], device, store), timeout_s=20)

    near = train_on(torch.device("cpu"))
    if device == DEVICE:  # workers are threads, and have threads; each must know it
        monkeypatch.setattr(threading.Thread, "run", run_on_device)
    distant = train_on(device)
    assert all(torch.equal(distant[0], other) for other in distant)
    assert not torch.equal(distant[0], torch.cat([p.flatten() for p in make_module().parameters()]))
    if not RULES[name].is_asynchronous:
        torch.testing.assert_close(distant[0], near[0], rtol=1e-4, atol=1e-6)


def test_tensors_of_two_devices_do_not_mix():
    with OnDevice():
        distant = torch.zeros(3, device=DEVICE)
        assert distant.device == DEVICE
        with pytest.raises(RuntimeError, match="must have tensors of one device"):
            distant + torch.zeros(3)
        distant.copy_(torch.ones(3))
        assert distant.cpu().sum() == 3
