import pytest
import torch
from optimizing import make, train
from pydantic import ValidationError
from torch import nn

from paceline.optim import SGD, Adafactor, Adam, AdamW, Optimizer


def split_by_decay(module, weight_decay):
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def plain_sgd(module, lr, weight_decay, **options):
    return torch.optim.SGD(split_by_decay(module, weight_decay), lr=lr, foreach=False, **options)


def plain_adam(module, lr, weight_decay, **options):
    return torch.optim.Adam(split_by_decay(module, weight_decay), lr=lr, foreach=False, **options)


def plain_adafactor(module, lr, weight_decay, **options):
    return torch.optim.Adafactor(split_by_decay(module, weight_decay), lr=lr, foreach=False, **options)


def plain_adamw(module, lr, weight_decay, **options):
    return torch.optim.AdamW(split_by_decay(module, weight_decay), lr=lr, foreach=False, **options)


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        (SGD(learning_rate=0.3), lambda m: plain_sgd(m, 0.3, 0.0, momentum=0.9)),
        (SGD(momentum=0), lambda m: plain_sgd(m, 0.1, 0.0)),
        (SGD(nesterov=True, weight_decay=0.2), lambda m: plain_sgd(m, 0.1, 0.2, momentum=0.9, nesterov=True)),
        (AdamW(learning_rate=0.02), lambda m: plain_adamw(m, 0.02, 0.1, betas=(0.9, 0.95), eps=1e-8)),
        (
            AdamW(betas=(0.5, 0.6), epsilon=0.01, weight_decay=0.3),
            lambda m: plain_adamw(m, 1e-3, 0.3, betas=(0.5, 0.6), eps=0.01),
        ),
        (Adam(weight_decay=0.3), lambda m: plain_adam(m, 1e-3, 0.3)),
        (Adam(betas=(0.5, 0.6), epsilon=0.01), lambda m: plain_adam(m, 1e-3, 0.0, betas=(0.5, 0.6), eps=0.01)),
        (Adafactor(), lambda m: plain_adafactor(m, 3e-2, 0.0)),
        (
            Adafactor(learning_rate=0.3, weight_decay=0.2, beta2_decay=-0.5, epsilon=0.1, clip_threshold=2),
            lambda m: plain_adafactor(m, 0.3, 0.2, beta2_decay=-0.5, eps=(None, 0.1), d=2.0),
        ),
    ],
)
def test_settings_build_the_update_rule_of_torch(settings, plain):
    module, reference = make(), make()
    trained, expected = train(module, settings.build(module)), train(reference, plain(reference))
    for name, value in expected.items():
        # Fused kernels and the loop of torch round in a different order: a few units of 1e-16 a step.
        torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-14, msg=name)
    moved = [name for name, before in make().named_parameters() if not torch.equal(before, trained[name])]
    assert "frozen" not in moved
    assert set(moved) == {name for name, _ in make().named_parameters()} - {"frozen"}


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_begins_with_the_first_gradient_however_late_it_comes(nesterov):
    modules = [nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    settings = SGD(nesterov=nesterov, weight_decay=0.2)
    optimizers = [settings.build(modules[0]), plain_sgd(modules[1], 0.1, 0.2, momentum=0.9, nesterov=nesterov)]
    assert all(group["fused"] for group in optimizers[0].param_groups)
    for num_used in (1, 2, 1, 3):  # branches used later, and one not used any more
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
            for layer in module[:num_used]:
                x = layer(x).tanh()
            x.square().sum().backward()
            optimizer.step()
        for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            # Fused kernels and the loop of torch round in a different order: a few units of 1e-16 a step.
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("settings", [SGD(weight_decay=0.5), AdamW(weight_decay=0.5)], ids=["sgd", "adamw"])
def test_only_matrices_decay_and_each_parameter_is_held_once(settings):
    module = make()
    groups = settings.build(module).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert sum(len(group["params"]) for group in groups) == len(trained) == len(decays)
    for parameter in trained:
        assert decays[id(parameter)] == (0.5 if parameter.dim() >= 2 else 0.0)


def test_adamw_without_decay_is_adam():
    module, reference = make(), make()
    expected = train(reference, torch.optim.Adam(split_by_decay(reference, 0.0), lr=1e-3, betas=(0.9, 0.95)))
    for name, value in train(module, AdamW(weight_decay=0).build(module)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("settings", [SGD(), AdamW()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("only", ["matrices", "vectors"])
def test_a_module_with_parameters_of_one_kind_has_one_group(settings, only):
    module = nn.Linear(3, 3, bias=False) if only == "matrices" else nn.LayerNorm(3)
    assert len(settings.build(module).param_groups) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "sgd", "learning_rate": 0},
        {"name": "sgd", "learning_rate": -1},
        {"name": "sgd", "learning_rate": float("nan")},
        {"name": "sgd", "learning_rate": float("inf")},
        {"name": "sgd", "weight_decay": -0.1},
        {"name": "sgd", "momentum": 1},
        {"name": "sgd", "momentum": 0, "nesterov": True},
        {"name": "adamw", "betas": (0.9, 1.0)},
        {"name": "adamw", "betas": (-0.1, 0.9)},
        {"name": "adamw", "betas": (0.9,)},
        {"name": "adamw", "epsilon": 0},
    ],
)
def test_what_torch_would_refuse_later_is_refused_when_it_is_made(fields):
    with pytest.raises(ValidationError, match=list(fields)[-1]):
        Optimizer.model_validate(fields)
