"""Adaptive optimizers of workers that step alone: a bound on beta1, and a learning rate for their smaller batch."""

import pytest
import torch
from stepping import ForeignAdamW, flatten, make_linear, run_step, train

from paceline.comm import LocalGroup
from paceline.optim import LAMB
from paceline.replica.replica import Replica
from paceline.sync import AdaptiveLocalSGD, DiLoCo, EveryStep, HierarchicalLocalSGD, LocalSGD, StreamingDiLoCo
from paceline.sync.local_hyperparameters import LocalHyperparameters

AS_GIVEN = {"local_beta1": None, "scale_rate": False}


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


def make_adam(learning_rate=0.05, beta1=0.9):
    return lambda module: torch.optim.AdamW(
        module.parameters(), lr=learning_rate, betas=(beta1, 0.99), weight_decay=0.0
    )


@pytest.mark.parametrize(
    ("rule", "num_apart"),
    [
        (LocalSGD(period=4), 3),
        (LocalSGD(period=4, scale_rate=False), 1),
        (AdaptiveLocalSGD(period=4), 3),
        (HierarchicalLocalSGD(period=4, host_size=1), 3),
        (DiLoCo(period=4), 1),
        (DiLoCo(period=4, scale_rate=True), 3),
        (StreamingDiLoCo(period=4, num_fragments=2), 1),
    ],
    ids=str,
)
def test_workers_step_with_a_small_beta1_and_a_rate_for_their_batch(rule, num_apart):
    changed = train(3, rule, 10, uneven, make_adam())
    optimizer = make_adam(0.05 * num_apart**0.25, 0.5)
    assert torch.equal(changed, train(3, rule.model_copy(update=AS_GIVEN), 10, uneven, optimizer))
    assert not torch.equal(changed, train(3, rule.model_copy(update=AS_GIVEN), 10, uneven, make_adam()))


def test_a_smaller_beta1_stays():
    rule = DiLoCo(period=4, local_beta1=0.7)
    given = rule.model_copy(update={"local_beta1": None})
    assert torch.equal(
        train(2, rule, 6, uneven, make_adam(beta1=0.3)), train(2, given, 6, uneven, make_adam(beta1=0.3))
    )


def test_rates_of_optimizers_without_betas_are_scaled_too():
    def make_optimizer(learning_rate):
        return lambda module: torch.optim.RMSprop(module.parameters(), lr=learning_rate)

    changed = train(4, LocalSGD(period=3), 7, uneven, make_optimizer(0.01))
    assert torch.equal(changed, train(4, LocalSGD(period=3, **AS_GIVEN), 7, uneven, make_optimizer(0.01 * 4**0.25)))


@pytest.mark.parametrize(("flags", "factor"), [({}, 1.0), ({"decoupled_weight_decay": True}, 4**0.25)])
def test_rates_of_an_optimizer_of_somebody_else_are_scaled_only_where_its_decay_is_known(flags, factor, recwarn):
    def make_optimizer(lr, weight_decay):
        return lambda module: ForeignAdamW(module.parameters(), lr, weight_decay, **flags)

    changed = train(4, LocalSGD(period=3, local_beta1=None), 7, uneven, make_optimizer(0.05, 0.5))
    told = [str(each.message) for each in recwarn]
    given = train(4, LocalSGD(period=3, **AS_GIVEN), 7, uneven, make_optimizer(0.05 * factor, 0.5 / factor))
    assert torch.equal(changed, given)
    assert [each.split(" keep")[0] for each in told] == ([] if flags else ["steps of stepping.ForeignAdamW"])
    assert all('group["decoupled_weight_decay"] = True' in each.replace("'", '"') for each in told)


def test_workers_of_one_host_do_not_step_alone():
    rule = HierarchicalLocalSGD(period=4, host_size=3)
    torch.testing.assert_close(
        train(3, rule, 6, uneven, make_adam()), train(3, EveryStep(), 6, uneven, make_adam()), rtol=1e-12, atol=1e-13
    )


def test_nor_does_the_only_worker():
    rule = DiLoCo(period=4)
    given = rule.model_copy(update=AS_GIVEN)
    assert torch.equal(train(1, rule, 6, uneven, make_adam()), train(1, given, 6, uneven, make_adam()))


@pytest.mark.parametrize("rule", [LocalSGD(period=3), StreamingDiLoCo(period=3, num_fragments=2)], ids=str)
def test_between_updates_the_optimizer_has_what_it_was_given(rule):
    """So that learning-rate schedulers and checkpoints see nothing else; a schedule's rate is scaled when it is due."""

    def work(group, rule, factor):
        module = make_linear()
        optimizer = make_adam(beta1=0.5)(module)
        replica = Replica(module, optimizer, group=group, sync=rule)
        for step in range(8):
            rate = 0.05 / (step + 1)
            optimizer.param_groups[0]["lr"] = rate * factor
            run_step(replica, step)
            assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (rate * factor, (0.5, 0.99))
        replica.close()
        return flatten(module)

    factor = 4**0.25 if rule.scale_rate else 1.0
    given = rule.model_copy(update=AS_GIVEN)
    assert torch.equal(
        LocalGroup.run(4, lambda group: work(group, rule, 1.0))[0],
        LocalGroup.run(4, lambda group: work(group, given, factor))[0],
    )


def test_a_step_that_failed_leaves_no_factor_behind():
    optimizer = make_adam()(make_linear())
    hyperparameters = LocalHyperparameters(optimizer, largest_beta1=0.5, rate_factor=2.0)
    for _ in range(2):
        hyperparameters.apply()
        assert optimizer.param_groups[0]["lr"] == 0.1
    hyperparameters.restore()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.05, (0.9, 0.99))


@pytest.mark.parametrize(
    ("make", "decay"),
    [
        (lambda w: torch.optim.AdamW([w], lr=0.1, weight_decay=0.5), 0.05),
        (lambda w: torch.optim.Adam([w], lr=0.1, weight_decay=0.5, decoupled_weight_decay=True), 0.05),
    ],
)
def test_decoupled_weight_decay_is_no_part_of_what_makes_steps_longer(make, decay):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    optimizer = make(weight)
    with LocalHyperparameters(optimizer, rate_factor=3.0, step_factor=2.0).applied():
        optimizer.step()
    torch.testing.assert_close(2.0 * (1 - weight.detach()), torch.full((3,), decay))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_decay_inside_a_trust_ratio_is_no_part_of_what_makes_steps_longer():
    """One element has a gradient, the other decays only; the ratio has |w| / |u| with decay in u, which is small."""

    def change(**factors):
        module = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(module.weight)
        module.weight.grad = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        optimizer = LAMB(learning_rate=0.01, weight_decay=1e-3).build(module)
        with LocalHyperparameters(optimizer, **factors).applied():
            optimizer.step()
        return factors.get("step_factor", 1.0) * (1 - module.weight.detach().flatten())

    longer, given = change(rate_factor=3.0, step_factor=2.0), change()
    torch.testing.assert_close(longer / given, torch.tensor([6.0, 1.0], dtype=torch.float64), rtol=2e-3, atol=0)
    assert given[1] > 1e-6
