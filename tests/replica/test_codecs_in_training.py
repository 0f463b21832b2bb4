"""Codecs inside a replica: what a worker holds back is neither lost, nor counted twice, nor dependent on buckets."""

import threading

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.compression import Codec
from paceline.errors import CommunicationError, NonFiniteError
from paceline.registry import list_variants
from paceline.replica.state import capture, restore
from paceline.sync import EveryStep
from training_models import make_batch, make_module, make_replica

LOSSY = sorted(set(list_variants(Codec)) - {"none"})
SETTINGS = {name: {"density": 0.2} for name in ("top_k", "random_k", "dgc")} | {"power_sgd": {"low_rank": 1}}
WITH_FEEDBACK = ["int8", "one_bit", "top_k", "power_sgd"]


def _sync(name):
    return EveryStep(codec={"name": name, "dense_below": 0, **SETTINGS.get(name, {})})


def _fail(path, reason):
    raise AssertionError(f"{path} is damaged: {reason}")


def _step(replica, step, weight=None):
    inputs, targets = make_batch(seed=step + 10 * replica.group.rank)
    loss = F.cross_entropy(replica(inputs, use_optional=step % 3 != 1).float(), targets)
    replica.backward(loss, weight=weight or replica.group.rank + 1)
    return replica.update()


def _train(group, name, num_steps=6, **options):
    module = make_module()
    replica = make_replica(module, group, sync=_sync(name), hash_interval=1, **options)
    for step in range(num_steps):
        _step(replica, step)
    state = {key: tensor.clone() for key, tensor in (module.state_dict() | replica.state.feedback()).items()}
    replica.close()
    return state


@pytest.mark.filterwarnings("ignore::paceline.replica.UnusedParametersWarning")
@pytest.mark.parametrize("name", LOSSY)
def test_bucket_size_changes_nothing_and_three_uneven_workers_stay_equal(name):
    small = LocalGroup.run(3, lambda group: _train(group, name, bucket_bytes=100))
    large = LocalGroup.run(3, lambda group: _train(group, name))
    for one, other in zip(small, large, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key


@pytest.mark.filterwarnings("ignore::paceline.replica.UnusedParametersWarning")
@pytest.mark.parametrize("name", LOSSY)
def test_a_killed_run_goes_on_bit_for_bit_with_its_feedback(name, tmp_path):
    def worker(group, stop_at=None):
        module = make_module()
        replica = make_replica(module, group, sync=_sync(name))
        store = CheckpointStore(tmp_path / str(stop_at))
        for step in range(6):
            if step == stop_at:
                tensors, document = capture(replica)
                if group.rank == 0:
                    store.save(tensors, document, step)
                replica.close()
                module = make_module(seed=5)
                replica = make_replica(module, group, sync=_sync(name))
                restore(store.find_newest_valid(_fail) if group.rank == 0 else None, replica)
            _step(replica, step)
        state = {key: tensor.clone() for key, tensor in (module.state_dict() | replica.state.feedback()).items()}
        replica.close()
        store.close()
        return state

    straight = LocalGroup.run(2, worker)
    resumed = LocalGroup.run(2, lambda group: worker(group, stop_at=3))
    for one, other in zip(straight, resumed, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key


def _held_back(states, parameter, shape):
    """What all workers hold back of one parameter's gradient."""
    total = torch.zeros(shape, dtype=torch.float64)
    for state in states:
        total += state.get(f"{parameter}/worker", torch.zeros(shape)).double()
    owners = [state[f"{parameter}/owner"].double().flatten() for state in states if f"{parameter}/owner" in state]
    return total + torch.cat(owners)[: total.numel()].view(shape) if owners else total


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_has_landed_and_what_is_held_back_are_the_gradients(name):
    """With a learning rate of 1 and gradients that do not depend on parameters, nothing of their sum is lost."""

    def worker(group):
        module = torch.nn.Linear(40, 30, bias=False)
        with torch.no_grad():
            module.weight.zero_()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        replica = make_replica(module, group, sync=_sync(name))
        replica.optimizer = optimizer
        given = torch.zeros(30, 40, dtype=torch.float64)
        for step in range(12):
            weights = [1.0, 3.0, 0.5 if step % 2 else 2.0]  # the weight changes from step to step
            gradients = [torch.randn(30, 40, generator=torch.Generator().manual_seed(step * 3 + r)) for r in range(3)]
            mean = sum(w * g.double() for w, g in zip(weights, gradients, strict=True)) / sum(weights)
            given += mean
            loss = (replica(torch.eye(40)).T * gradients[group.rank]).sum()
            replica.backward(loss, weight=weights[group.rank])
            replica.update()
        state = replica.state.feedback()
        replica.close()
        return -module.weight.detach().double(), given, state

    results = LocalGroup.run(3, worker)
    landed, given, _ = results[0]
    held_back = _held_back([state for *_, state in results], "weight", (30, 40))
    assert held_back.abs().max() > 0.01
    # float32 rounding of a few additions a step
    assert (landed + held_back - given).abs().max() < 2e-5 * given.abs().max()


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("num_after", [2, 5], ids=str)
def test_another_number_of_workers_shares_out_what_was_held_back(name, num_after, tmp_path):
    store = CheckpointStore(tmp_path)

    def before(group):
        module = make_module()
        replica = make_replica(module, group, sync=_sync(name))
        for step in range(3):
            _step(replica, 3 * step)
        tensors, document = capture(replica)
        if group.rank == 0:
            store.save(tensors, document, 3)
        replica.close()
        return {key: tensor.clone() for key, tensor in replica.state.feedback().items()}

    def after(group):
        replica = make_replica(make_module(seed=1), group, sync=_sync(name))
        restore(store.find_newest_valid(_fail) if group.rank == 0 else None, replica)
        state = replica.state.feedback()
        replica.close()
        return state

    saved = LocalGroup.run(3, before)
    shared = LocalGroup.run(num_after, after)
    store.close()
    for parameter, tensor in make_module().named_parameters():
        old = _held_back(saved, parameter, tensor.shape)
        new = _held_back(shared, parameter, tensor.shape)
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSY)
def test_a_gradient_that_is_not_finite_is_found_behind_a_finite_loss(name):
    def worker(group):
        module = make_module()
        replica = make_replica(module, group, sync=_sync(name))
        _step(replica, 0)
        before = {key: tensor.clone() for key, tensor in (module.state_dict() | replica.state.feedback()).items()}
        if group.rank == 1:
            module.block.weight.register_hook(lambda gradient: gradient * torch.inf)
        with pytest.raises(NonFiniteError, match="on 1 of 2 ranks"):
            _step(replica, 2)
        after = module.state_dict() | replica.state.feedback()
        replica.close()
        return all(torch.equal(tensor, after[key]) for key, tensor in before.items())

    assert LocalGroup.run(2, worker) == [True, True]


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_an_overflow_under_loss_scaling_is_skipped_and_forgotten(name):
    def worker(group):
        module = make_module()
        replica = make_replica(module, group, sync=_sync(name), precision="fp16")
        results = []
        before = {}
        for step in range(3):
            before = {key: tensor.clone() for key, tensor in (module.state_dict() | replica.state.feedback()).items()}
            handle = None
            if step == 2 and group.rank == 1:
                handle = module.block.weight.register_hook(lambda gradient: gradient * torch.inf)
            results.append(_step(replica, 0).skipped)
            if handle is not None:
                handle.remove()
        after = module.state_dict() | replica.state.feedback()
        same = all(torch.equal(tensor, after[key]) for key, tensor in before.items())
        results.append(_step(replica, 0).skipped)
        replica.close()
        return results, same

    for results, same in LocalGroup.run(2, worker):
        assert results == [False, False, True, False]
        assert same


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_an_exchange_that_is_cut_off_leaves_state_and_parameters_as_they_were(name):
    unchanged = {}

    def worker(group):
        module = make_module()
        replica = make_replica(module, group, sync=_sync(name), bucket_bytes=100)
        _step(replica, 0)
        before = {key: tensor.clone() for key, tensor in (module.state_dict() | replica.state.feedback()).items()}
        if group.rank == 1:
            inputs, targets = make_batch()
            calls = []

            def die(gradient):
                calls.append(1)
                raise RuntimeError("struck by lightning")

            module.embedding.weight.register_hook(die)  # the last gradient: other buckets are under way
            replica.backward(F.cross_entropy(replica(inputs), targets), weight=1.0)
        with pytest.raises(CommunicationError, match="lightning"):
            _step(replica, 2)
        after = module.state_dict() | replica.state.feedback()
        unchanged[group.rank] = all(torch.equal(tensor, after[key]) for key, tensor in before.items())

    with pytest.raises(RuntimeError, match="lightning"):
        LocalGroup.run(2, worker)
    for thread in threading.enumerate():
        if thread.name == "paceline-codec":
            thread.join(timeout=0.1)
    assert unchanged == {0: True}


def test_a_program_that_cannot_carry_a_codec_is_refused_with_those_that_can():
    with pytest.raises(ValidationError, match=r"codec 'top_k' with program 'double_tree'; take one of: .*ring"):
        EveryStep(codec="top_k", program="double_tree")
    assert EveryStep(codec="fp16", program="double_tree").program.name == "double_tree"


@pytest.mark.parametrize("program", ["ring", "halving_doubling", "direct"])
@pytest.mark.parametrize("name", ["none", "int8", "top_k"])
def test_programs_carry_gradients_and_payloads(program, name):
    def worker(group, chosen):
        module = make_module()
        replica = make_replica(module, group, sync=EveryStep(codec=_sync(name).codec, program=chosen), hash_interval=1)
        for _ in range(3):
            _step(replica, 0)
        replica.close()
        return module.state_dict()

    ours = LocalGroup.run(3, lambda group: worker(group, program))[0]
    native = LocalGroup.run(3, lambda group: worker(group, None))[0]
    for key, tensor in native.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-6)
