"""Small models whose workers begin apart, and the plain loop that gossip rules must equal."""

import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm import join
from paceline.comm.local_group import LocalGroup
from paceline.replica.replica import Replica
from paceline.sync.dpsgd import DPSGD
from paceline.sync.push_sum import PushSum


class CountingGroup(LocalGroup):
    """Counts the bytes of messages that its rank sends, on connections of any name."""

    sent: dict

    def send(self, tensor, destination, *, tag, name):
        self.sent[self.rank] = self.sent.get(self.rank, 0) + tensor.nbytes
        return super().send(tensor, destination, tag=tag, name=name)

    def duplicate(self, name):
        other = super().duplicate(name)
        counting = CountingGroup(other.rank, other._room)
        counting.sent = self.sent
        return counting


def make_module(rank=0, dtype=torch.float64):
    """Return a small network; each rank's is another."""
    generator = torch.Generator().manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return module


def loss_of(module, rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + 100 * step + rank)
    inputs = torch.randn(8, 4, generator=generator, dtype=dtype)
    targets = torch.stack([inputs[:, 0] + 0.1 * rank, inputs[:, 1] * inputs[:, 2]], 1)
    return F.mse_loss(module(inputs), targets)


def make_optimizer(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)


def make_replica(group, rule, *, lr=0.1, apart=True, dtype=torch.float64, **settings):
    """Return a replica; each worker begins with parameters of its own where they are `apart`."""
    module = make_module(0, dtype)
    replica = Replica(module, make_optimizer(module, lr), group=group, sync=rule, **settings)
    if apart:
        module.load_state_dict(make_module(group.rank, dtype).state_dict())
        replica.begin_anew()
    return replica


def take_step(replica, step, weight=1.0, dtype=torch.float64):
    replica.backward(loss_of(replica, replica.group.rank, step, dtype), weight=weight)
    return replica.update()


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train(group, rule, num_steps, **settings):
    """Return this worker's parameters after some steps, and the mean of all."""
    replica = make_replica(group, rule, **settings)
    for step in range(num_steps):
        take_step(replica, step)
    own = flat(replica.module)
    with replica.consensus():
        mean = flat(replica.module)
    assert torch.equal(flat(replica.module), own), "the worker has its own again"
    replica.close()
    return own, mean


def train_plainly(mix, num_workers, num_steps, lr=0.1):
    """Return the parameters of workers that mix as ``mix(models, step)`` says and step by gradients from before."""
    modules = [make_module(rank) for rank in range(num_workers)]
    optimizers = [make_optimizer(module, lr) for module in modules]
    for step in range(num_steps):
        for rank, module in enumerate(modules):
            module.zero_grad()
            loss_of(module, rank, step).backward()
        mixed = mix(torch.stack([flat(module) for module in modules]), step)
        for module, optimizer, model in zip(modules, optimizers, mixed, strict=True):
            nn.utils.vector_to_parameters(model, module.parameters())
            optimizer.step()
    return torch.stack([flat(module) for module in modules])


def mix_by(graph, num_workers):
    return lambda models, step: torch.from_numpy(graph.mixing_matrix(num_workers, step)) @ models


RULES = {"dpsgd": DPSGD(graph="complete"), "push_sum": PushSum()}
_NUM_STEPS = 8


def train_here(group, rule, lr=0.1, num_steps=_NUM_STEPS):
    """Return this worker's parameters after some steps, and the mean of all, as JSON."""
    replica = make_replica(group, rule, lr=lr)
    for step in range(num_steps):
        take_step(replica, step)
    with replica.consensus():
        mean = flat(replica.module).tolist()
    own = flat(replica.module).tolist()
    replica.close()
    return own, mean


def train_in_a_process():
    """Return, for each of RULES and then ad_psgd, this rank's parameters and the mean."""
    with join() as group:
        results = [train_here(group, rule) for rule in RULES.values()]
        results.append(train_here(group, "ad_psgd", lr=0.0, num_steps=30))
    return results
