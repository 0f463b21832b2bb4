"""A trained model judged again: on other data, by other metrics, or from another checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.find import find_checkpoint
from paceline.checkpoint.weights import Weights
from paceline.comm import LocalGroup
from paceline.data.bad_samples import BadSampleCount
from paceline.errors import SettingsError
from paceline.exporting.load import load_checkpoint_model, load_checkpoint_run
from paceline.parallel.model_shard import ModelShard
from paceline.replica.attributes import find_attribute
from paceline.replica.checks import Precision
from paceline.replica.optimizer_step import autocast
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.run import Run

JUDGED_BY = ("data", "collate_fn", "loss", "metrics", "precision", "global_batch", "evaluate_samples", "bad_samples")
"""Settings of a run that may be others when its model is judged."""


@dataclass(frozen=True)
class Judgement:
    """What a trained model is worth, and on what."""

    evaluation: Evaluation
    checkpoint: Path
    step: int
    """Updates after which the checkpoint was saved."""
    averaged: bool
    """Whether moving averages of the parameters were judged."""
    held_out: bool
    """Whether the samples were the held-out part of the data; else it has none, and they were all of it."""


def evaluate_run(
    run: str | Path,
    checkpoint: str = "newest",
    *,
    averaged: bool | None = None,
    change: Callable[[Run], Run] = lambda settings: settings,
) -> Judgement:
    """Return the loss and the metrics of a run's trained model, computed in this process.

    Args:
        run: Directory of the run, or of a checkpoint of it; or the run's `checkpoint_url`.
        checkpoint: ``newest`` for the newest that is whole, ``best`` for the one that `keep_best` has kept, or the step
            after which it was saved.
        averaged: Whether the moving averages of parameters are judged; by default where the run has them.
        change: Takes the run's settings and returns those to judge by, which may differ in `JUDGED_BY`.

    Raises:
        CheckpointError: There is no such checkpoint, or it does not fit the model that the run builds by now.
        SettingsError: A setting was changed that has no part in judging a model.
    """
    found = find_checkpoint(run, checkpoint)
    trained = load_checkpoint_run(found)
    settings = change(trained)
    for name in type(trained).model_fields:
        if name not in JUDGED_BY and getattr(settings, name) != getattr(trained, name):
            raise SettingsError(
                f"only {', '.join(JUDGED_BY)} may be others where a trained model is judged, but got another {name}; "
                "leave it out"
            )
    weights = Weights.of_checkpoint(found, averaged=averaged)
    splits = settings.open_data()
    source = splits.held_out if splits.held_out is not None else splits.train
    model = _Judged(load_checkpoint_model(found, weights), settings.precision)
    evaluation = evaluate(
        model,
        settings.loss,
        source,
        metrics=settings.metrics,
        batch_size=max(1, settings.global_batch // settings.num_micro_batches),
        max_samples=settings.evaluate_samples,
        bad_samples=BadSampleCount(settings.bad_samples),
    )
    assert evaluation is not None, "nothing stops it"
    return Judgement(evaluation, found.path, found.step, weights.averaged, splits.held_out is not None)


class _Judged:
    """A loaded model, called as a replica is."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        self.module, self._precision = module, precision
        self.shard = ModelShard(LocalGroup(), module=module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return find_attribute(self, name, self._run)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            return function(*args, **kwargs)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._precision, self.shard.group.device.type)

    def consensus(self) -> AbstractContextManager[None]:
        return nullcontext()  # as a checkpoint holds it

    averaged = consensus
