"""Workers that each fit a line through data of their own, in float64, and what they hold after each step."""

import torch
import torch.nn.functional as F

from paceline.comm import LocalGroup
from paceline.replica.replica import Replica


def make_linear(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Linear(3, 2, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return module


def make_samples(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + step)
    shift = 0.5 * rank  # workers disagree about the best line
    inputs = torch.randn(4, 3, generator=generator, dtype=dtype) + shift
    return inputs, torch.randn(4, 2, generator=generator, dtype=dtype) - shift


def make_sgd(module, momentum=0.0, learning_rate=0.05):
    return torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=momentum)


class ForeignAdamW(torch.optim.Optimizer):
    """AdamW as written by somebody else: betas, decoupled weight decay, and no flag that says so."""

    def __init__(self, params, lr=0.05, weight_decay=0.0, **flags):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay, **flags})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for weight in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[weight]
                zeros = torch.zeros_like(weight)
                first, second = state.get("first", zeros), state.get("second", zeros)
                first, second = first.lerp(weight.grad, 1 - beta1), second.lerp(weight.grad**2, 1 - beta2)
                number = state.get("number", 0) + 1
                state.update(first=first, second=second, number=number)
                weight.mul_(1 - rate * group["weight_decay"])
                weight.sub_(rate * first / (1 - beta1**number) / ((second / (1 - beta2**number)).sqrt() + 1e-8))


def flatten(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def run_step(replica, step, weight=1.0):
    inputs, targets = make_samples(replica.group.rank, step, next(replica.module.parameters()).dtype)
    replica.backward(F.mse_loss(replica(inputs), targets), weight=weight)
    return replica.update()


def train(size, sync, num_steps, weigh=lambda rank, step: 1.0, make_optimizer=make_sgd, dtype=torch.float64):
    """Return the parameters of each worker after each step: shape (size, num_steps, num_parameters)."""

    def work(group):
        module = make_linear(dtype=dtype)
        replica = Replica(module, make_optimizer(module), group=group, sync=sync)
        seen = []
        for step in range(num_steps):
            run_step(replica, step, weigh(group.rank, step))
            seen.append(flatten(module))
        replica.close()
        return torch.stack(seen)

    return torch.stack(LocalGroup.run(size, work))


def descend(start, rank, steps, weigh=lambda rank, step: 1.0, learning_rate=0.05):
    """Return where plain SGD leads one worker from the parameters `start`."""
    module = make_linear()
    torch.nn.utils.vector_to_parameters(start.clone(), module.parameters())
    optimizer = make_sgd(module, learning_rate=learning_rate)
    for step in steps:
        if weigh(rank, step):
            inputs, targets = make_samples(rank, step)
            optimizer.zero_grad()
            F.mse_loss(module(inputs), targets).backward()
            optimizer.step()
    return flatten(module)
