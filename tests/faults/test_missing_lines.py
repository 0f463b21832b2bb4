"""The first worker is lost before it has logged a step that others have made too: one of them logs it."""

import pytest
from reforming_threads import LOST_STEP, NUM_STEPS, lose_in, run_threads

from paceline.monitor.events import StepFinished
from paceline.monitor.reader import select
from paceline.replica.hashing import ReplicaComparison
from paceline.sync import EveryStep, LocalSGD
from paceline.training import loop

WITHOUT_W0 = [[["w0", "w1", "w2"]], [["w1", "w2"]]]
IN_THE_LOG = lose_in(loop, "log_step", lambda session, *_: session.training.step == LOST_STEP)
COMPARING = lose_in(ReplicaComparison, "check", lambda self, number, **_: number == LOST_STEP)


@pytest.mark.parametrize(
    ("sync", "lose"),
    [(EveryStep(), IN_THE_LOG), (EveryStep(), COMPARING), (LocalSGD(period=3), IN_THE_LOG)],
    ids=["every_step", "before its result is known", "local_sgd"],
)
def test_a_step_that_the_lost_first_worker_has_not_logged_is_logged(tmp_path, monkeypatch, sync, lose):
    settings = {"num_steps": NUM_STEPS, "hash_interval": 1}
    (tmp_path / "whole").mkdir()
    _, records = run_threads(tmp_path / "whole", monkeypatch, sync, WITHOUT_W0[:1], **settings)
    before = select(records, StepFinished)[LOST_STEP - 1].event
    _, records = run_threads(tmp_path, monkeypatch, sync, WITHOUT_W0, lose, "w0", **settings)
    steps = select(records, StepFinished)
    assert [record.step for record in steps] == list(range(1, NUM_STEPS + 1))
    late = steps[LOST_STEP - 1]
    assert (late.rank, late.epoch) == (0, 1)
    told = [(one.num_samples, one.position, one.learning_rate) for one in (before, late.event)]
    assert told[0] == told[1]
    if sync.keeps_replicas_equal:  # else each worker has a loss of its own
        assert (late.event.loss, late.event.weight) == (before.loss, before.weight)
