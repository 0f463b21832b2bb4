"""The recipe whose data is made while it trains: its physics, what actors give the learner, and its known return."""

import json
import math
import shutil
import time

import numpy as np
import pytest
import torch

from forked_launcher import ForkedLauncher
from paceline.cli.prepare import make_run
from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.data.base import Spec
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.errors import SettingsError
from paceline.monitor.events import Evaluated, RunFinished, StepFinished
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.recipes.actor_critic import cart_pole
from paceline.recipes.actor_critic.episodes import CartPole, weigh
from paceline.recipes.actor_critic.loss import ActorCriticLoss, measure_return
from paceline.recipes.actor_critic.model import ActorCritic
from paceline.training import train

SMALL = {
    "global_batch": 6,
    "num_steps": 8,
    "checkpoint_interval": 4,
    "evaluate_interval": 4,
    "data.num_evaluated": 5,
    "data.max_steps": 30,
    "model.width": 8,
    "num_threads": 1,
}
KNOWN = 475


def build(width=8, max_steps=30):
    torch.manual_seed(0)
    return ActorCritic(width=width).build(Spec(cart_pole.NUM_ACTIONS, (max_steps, cart_pole.NUM_OBSERVED)))


def train_here(directory, num_workers, **settings):
    run = make_run("actor_critic", [(name, str(value)) for name, value in {**SMALL, **settings}.items()])
    directory.mkdir(exist_ok=True)

    def work(group):
        with EventLog(directory / "events.jsonl", run="run", rank=group.rank) as log:
            return train(run, directory, group, log, recipe="actor_critic")

    assert LocalGroup.run(num_workers, work) == [True] * num_workers
    return read_log(directory / "events.jsonl")


def read_losses(records):
    return {one.step: one.event.loss for one in select(records, StepFinished)}


def test_a_push_moves_the_cart_as_the_equations_say():
    """Equations of Barto, Sutton and Anderson 1983, written once more, for one state."""
    x, v, angle, turning = state = (0.3, -0.2, 0.1, 0.4)
    for action, force in ((0, -10.0), (1, 10.0)):
        mass, half = 1.1, 0.5
        inner = (-force - 0.1 * half * turning**2 * math.sin(angle)) / mass
        top = 9.8 * math.sin(angle) + math.cos(angle) * inner
        bend = top / (half * (4 / 3 - 0.1 * math.cos(angle) ** 2 / mass))
        slide = (force + 0.1 * half * (turning**2 * math.sin(angle) - bend * math.cos(angle))) / mass
        expected = [x + 0.02 * v, v + 0.02 * slide, angle + 0.02 * turning, turning + 0.02 * bend]
        moved = cart_pole.move(torch.tensor([state], dtype=torch.float64), torch.tensor([action]))
        assert moved[0].tolist() == pytest.approx(expected, rel=1e-12)
    edge = torch.tensor([[2.39, 0, 0, 0], [2.41, 0, 0, 0], [0, 0, 0.2, 0], [0, 0, -0.22, 0]])
    assert cart_pole.has_fallen(edge).tolist() == [False, True, False, True]


def test_an_actor_without_a_model_plays_as_long_as_chance_lets_it():
    """A pole that is pushed at random falls after 22 steps on average, as is known of the task."""
    train = CartPole().open().train
    _, played = train.read(np.arange(400))
    lengths = played["is_played"].sum(dim=1).float()
    assert 20 < lengths.mean() < 25
    assert lengths.max() < 200
    first_fell = int(lengths[0])
    assert played["returns"][0, first_fell - 1] == pytest.approx(1 - 0.99)
    assert not played["returns"][0, first_fell:].any()
    assert played["log_probabilities"][0, 0] == pytest.approx(math.log(0.5))


def test_an_episode_depends_on_its_number_and_the_parameters_alone():
    source = CartPole(max_steps=30).open().train
    module = build()
    source.watch(module)
    together = source.read(np.array([3, 2**39]))
    alone = source.read(np.array([2**39]))
    torch.testing.assert_close(together[0][1], alone[0][0])  # a product of more rows may round otherwise
    assert torch.equal(together[1]["actions"][1], alone[1]["actions"][0])
    assert not torch.equal(together[0][0], alone[0][0])
    with torch.no_grad():
        module.actor[-1].bias += torch.tensor([0.0, 50.0])
    assert source.read(np.array([3]))[1]["actions"][0, :5].tolist() == [1] * 5


def test_advantages_are_those_of_their_definition():
    values = np.array([[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2]])
    advantages, returns = weigh(values, np.array([2, 3]), np.array([True, False]), 0.9, 0.8)
    last = 0.1 - 0.4
    assert advantages[0].tolist() == pytest.approx([0.1 + 0.9 * 0.4 - 0.5 + 0.72 * last, last, 0])
    broken_off = 0.1 + 0.9 * 0.2 - 0.3  # by the limit of steps: the last state's value goes on
    assert advantages[1, 2] == pytest.approx(broken_off)
    assert returns[1, 2] == pytest.approx(0.1 + 0.9 * 0.2)


def test_without_a_lag_the_gradient_is_the_plain_policy_gradient():
    source, module = CartPole(max_steps=30).open().train, build()
    source.watch(module)
    batch = Batch(source.read(np.arange(4)), 4, Interval(0, 4))
    loss = ActorCriticLoss(entropy_factor=0, value_factor=0)
    found = loss.loss(module, batch)
    assert found.weight == batch.targets["is_played"].sum()
    gradient = torch.autograd.grad(found.mean, list(module.actor.parameters()))
    log_odds = torch.log_softmax(module(batch.inputs)[0], -1).gather(-1, batch.targets["actions"][..., None])[..., 0]
    plain = -(log_odds * batch.targets["advantages"]).sum() / found.weight
    for one, other in zip(gradient, torch.autograd.grad(plain, list(module.actor.parameters())), strict=True):
        torch.testing.assert_close(one, other)
    borrowed = Batch(batch.data, 0, Interval(0, 4))
    assert loss.loss(module, borrowed).weight == 0
    assert measure_return(None, batch)["return"] == (found.weight, 4)


def test_no_episode_is_played_before_the_learner_asks_for_it():
    """Without a lag the parameters that actors play with are those of the step before."""
    source = CartPole(max_steps=5).open().train
    module, versions = build(), []
    source.watch(module)
    read = source.read

    def read_and_note(indices):
        versions.append(module.actor[-1].bias[0].item())
        return read(indices)

    source.read = read_and_note
    for number, _ in enumerate(Loader(source, 2, num_steps=6, shuffle=False)):
        with torch.no_grad():
            module.actor[-1].bias[0] = number + 1
    assert versions[0] == pytest.approx(build().actor[-1].bias[0].item())
    assert versions[1:] == [1, 2, 3, 4, 5]


def test_what_cannot_play_is_refused():
    source = CartPole().open().train
    with pytest.raises(SettingsError, match="must have a method twin"):
        source.watch(torch.nn.Linear(4, 2))
    module = build()
    module.actor[0] = torch.nn.Linear(4, 3)
    with pytest.raises(SettingsError, match="must be whole on each rank"):
        source.watch(module)
    with pytest.raises(SettingsError, match="num_processes must be 0 for samples that are made with the model"):
        Loader(source, 2, num_processes=1)


def test_a_run_resumes_bit_for_bit_and_counts_its_episodes(tmp_path):
    straight = train_here(tmp_path / "straight", 2)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for newer in [*(tmp_path / "resumed").glob("checkpoints/step-00000008*"), tmp_path / "resumed" / "events.jsonl"]:
        shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
    resumed = train_here(tmp_path / "resumed", 2)
    losses = read_losses(straight)
    assert read_losses(resumed) == {step: losses[step] for step in range(5, 9)}
    steps = [one.event for one in select(straight, StepFinished)]
    assert [event.position for event in steps] == [6 * step for step in range(1, 9)]
    assert all(6 <= event.weight <= 6 * 30 for event in steps)
    ends = [select(records, RunFinished)[0].event.metrics["return"] for records in (straight, resumed)]
    assert ends[0] == ends[1]
    assert 0 < ends[0] <= 30


@pytest.mark.parametrize("settings", [{"sync": "asgd"}, {"data.lag": 2}], ids=["asgd", "lag"])
def test_actors_may_be_ahead_of_the_learner(tmp_path, settings):
    records = train_here(tmp_path / "run", 1, **settings)
    assert [one.event.position for one in select(records, StepFinished)][-1] == 48
    assert math.isfinite(select(records, RunFinished)[0].event.held_out_loss)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["--workers", "1"], marks=pytest.mark.campaign, id="one"),
        pytest.param(["--workers", "2"], id="every_step"),
        pytest.param(["--workers", "3", "--sync", "asgd"], marks=pytest.mark.campaign, id="asgd"),
    ],
)
def test_it_reaches_its_known_return(tmp_path, settings):
    """The run is stopped once it has: what comes after takes as long again."""
    words = ["train", "actor_critic", "--out", str(tmp_path / "run"), "--evaluate_interval", "25", *settings]
    log = tmp_path / "run" / "events.jsonl"
    process = ForkedLauncher(words, tmp_path / "output.txt")
    try:
        while process.poll() is None and max([0.0, *find_returns(log)]) < KNOWN:
            time.sleep(1.0)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (0, 75), output
    assert max(find_returns(log)) >= KNOWN
    assert select(read_log(log), Evaluated)[0].event.num_samples == 100


def find_returns(log):
    """Return the means over 100 episodes that a run has told of."""
    records = read_log(log) if log.exists() else []
    return [one.event.metrics["return"] for kind in (Evaluated, RunFinished) for one in select(records, kind)]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_that_is_stopped_and_started_again_plays_each_episode_once(tmp_path, run_here, wait_for_step):
    directory = tmp_path / "run"
    settings = {**SMALL, "num_steps": 60, "checkpoint_interval": 10, "evaluate_interval": 0}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = ["train", "actor_critic", "--workers", "2", "--out", str(directory), *words]
    process = ForkedLauncher(command, tmp_path / "output.txt")
    try:
        wait_for_step(directory, 15, process)
        process.terminate()
        process.communicate(timeout=60)
    finally:
        process.kill()
    done = run_here("train", "--resume", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = {one.step: one.event.position for one in select(read_log(directory / "events.jsonl"), StepFinished)}
    assert steps == {step: 6 * step for step in range(1, 61)}
    assert json.loads((directory / "run.json").read_text())["recipe"] == "actor_critic"
