import pytest

from paceline.benchmarks.reproductions.large_batch import Perceptron
from paceline.comm.local_group import LocalGroup
from paceline.data.images import Images
from paceline.errors import SettingsError
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, summarise
from paceline.optim import LAMB, LARS, Adafactor, AdamW8bit
from paceline.schedules import Constant
from paceline.training.loop import train
from paceline.training.objective import Classification
from paceline.training.run import Run


def run_in(directory, optimizer, num_steps, **fields):
    run = Run(
        model=Perceptron(widths=(65,)),
        data=Images(size=8),
        loss=Classification(),
        optimizer=optimizer,
        schedule=Constant(),
        global_batch=32,
        num_steps=num_steps,
        evaluate_samples=32,
        **fields,
    )
    directory.mkdir(exist_ok=True)
    with EventLog(directory / "events.jsonl", run="test", rank=0) as log:
        assert train(run, directory, LocalGroup(), log, recipe="test")
    return summarise(read_log(directory / "events.jsonl"))


@pytest.mark.parametrize("optimizer", [LARS(), LAMB(), Adafactor(), AdamW8bit()], ids=lambda settings: settings.name)
def test_a_run_that_goes_on_from_a_checkpoint_is_the_uninterrupted_one(tmp_path, optimizer):
    whole = run_in(tmp_path / "whole", optimizer, 4)
    run_in(tmp_path / "cut", optimizer, 2)
    resumed = run_in(tmp_path / "cut", optimizer, 4)
    assert resumed.starts[-1].event.start_step == 2
    losses = [[step.event.loss for step in summary.steps] for summary in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4
    assert whole.held_out_loss == resumed.held_out_loss


@pytest.mark.parametrize("optimizer", [LARS(), LAMB(), Adafactor(), AdamW8bit()], ids=lambda settings: settings.name)
def test_landing_in_the_next_forward_is_refused(tmp_path, optimizer):
    with pytest.raises(SettingsError, match="may need the whole step at once"):
        run_in(tmp_path / "run", optimizer, 2, clip_norm=None, landing="next_forward")
