"""What is offloaded comes back as it was."""

import copy

import pytest
import torch
from memory_models import compute_loss, loss_and_gradients, make_transformer

from paceline.memory import ActivationOffload, OffloadedOptimizer, find_recomputable, recompute


@pytest.mark.parametrize("choice", ["none", "full"])
def test_activations_make_the_same_gradients(choice):
    plain, saving = make_transformer(), make_transformer()
    if choice != "none":
        recompute(saving, dict.fromkeys(find_recomputable(saving), choice))
    offload = ActivationOffload(saving, smallest_bytes=256)
    loss, gradients, _ = loss_and_gradients(plain)
    saving_loss, saving_gradients, _ = loss_and_gradients(saving)
    assert offload.num_sent > 2
    assert torch.equal(loss, saving_loss)
    assert all(torch.equal(gradients[name], saving_gradients[name]) for name in gradients)


def test_parameters_and_small_tensors_stay_and_nothing_is_sent_twice():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64, bias=False))
    offload = ActivationOffload(module, smallest_bytes=1024)
    x = torch.ones(8, 64)
    module(x).sum().backward()
    assert offload.num_sent == 2  # the input of each; weights, though larger, stay
    module(x[:1]).sum().backward()
    assert offload.num_sent == 2
    squared = torch.nn.Identity()
    offload = ActivationOffload(squared, smallest_bytes=1)
    squared.register_forward_pre_hook(lambda _, inputs: inputs[0] * inputs[0])
    squared(torch.ones(3, requires_grad=True)).sum().backward()
    assert offload.num_sent == 1


def test_forward_that_fails_leaves_no_hooks_behind():
    module = torch.nn.Linear(4, 4)
    offload = ActivationOffload(module, smallest_bytes=1)
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(2, 3))
    num_sent = offload.num_sent
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert offload.num_sent == num_sent


RULES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def train(module, optimizer, steps):
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        torch.manual_seed(step)
        compute_loss(module).backward()
        if step == 1:  # one that nobody used
            module.layers[0].mlp.gate.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rule", RULES)
def test_an_optimizer_whose_state_is_elsewhere_takes_the_same_steps(rule):
    plain, away = make_transformer(), make_transformer()
    optimizers = [RULES[rule](module.parameters()) for module in (plain, away)]
    OffloadedOptimizer(optimizers[1])
    for module, optimizer in zip((plain, away), optimizers, strict=True):
        train(module, optimizer, range(3))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), away.parameters(), strict=True))
    assert [p for group in optimizers[1].param_groups for p in group["params"]] == list(away.parameters())
    assert set(optimizers[1].state) == set(away.parameters())


def test_its_state_loads_into_one_that_is_not_and_back():
    plain, away = make_transformer(), make_transformer()
    here, there = (RULES["adamw"](module.parameters()) for module in (plain, away))
    OffloadedOptimizer(there)
    train(away, there, range(2))
    plain.load_state_dict(away.state_dict())
    here.load_state_dict(copy.deepcopy(there.state_dict()))
    train(plain, here, range(2, 4))
    train(away, there, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), away.parameters(), strict=True))
    there.load_state_dict(copy.deepcopy(here.state_dict()))
    train(plain, here, range(4, 5))
    train(away, there, range(4, 5))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), away.parameters(), strict=True))


def test_state_lives_where_it_was_told_to():
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    OffloadedOptimizer(optimizer, device="meta")
    module(torch.ones(1, 4)).sum().backward()
    with pytest.raises(NotImplementedError, match="meta"):  # values do not come back from there, but state went
        optimizer.step()
    held = [value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert held
    assert set(held) == {"meta"}
