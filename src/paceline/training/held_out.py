"""Evaluation of a run's held-out data while it trains."""

from paceline.comm.membership import CHANGE
from paceline.data import IterableSource, Source
from paceline.errors import DataError
from paceline.monitor.events import Evaluated, Warned
from paceline.training.best import BestSoFar
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.log_events import log_bad_samples
from paceline.training.session import Session


def evaluate_held_out(session: Session, held_out: Source | IterableSource) -> Evaluation | None:
    """Evaluate the parameters, and their moving averages if there are any; None if a signal arrived meanwhile."""
    training = session.training
    session.replica.flush()
    evaluation = _evaluate(session, held_out, averaged=training.run.ema is not None)
    plain = _evaluate(session, held_out, averaged=False) if training.run.ema is not None else None
    log_bad_samples(session)
    if evaluation is None or (training.run.ema is not None and plain is None):
        return None
    if not evaluation.weight:
        raise DataError(
            f"held-out data must have targets that count in the loss, but its {evaluation.num_samples} samples "
            "have none; check their targets"
        )
    training.evaluation, training.evaluated_step = evaluation, training.step
    warned = training.best.warning
    session.log_event(
        Evaluated(
            loss=evaluation.loss,
            metrics=evaluation.metrics,
            num_samples=evaluation.num_samples,
            duration_s=evaluation.duration_s + (plain.duration_s if plain is not None else 0.0),
            is_best=training.best.note(evaluation, training.step),
            unaveraged={"loss": plain.loss} | plain.metrics if plain is not None else None,
        )
    )
    if training.best.warning != warned:
        session.log_event(Warned(message=training.best.warning))
    return evaluation


def _evaluate(session: Session, held_out: Source | IterableSource, *, averaged: bool) -> Evaluation | None:
    run = session.training.run
    num_workers = session.replica.shard.data_parallel_group.size
    return evaluate(
        session.replica,
        run.loss,
        held_out,
        metrics=run.metrics,
        batch_size=max(1, run.global_batch // run.count_parts(num_workers)),
        max_samples=run.evaluate_samples,
        averaged=averaged,
        is_stopped=lambda: session.membership.stop_requested_by not in ("", CHANGE),
        bad_samples=session.training.held_out_bad,
    )


def try_evaluation(session: Session) -> None:
    """Evaluate a sample per worker before the first step, so that wrong metrics of the user's fail then.

    Raises:
        SettingsError: The function returns no metrics, or none of the name in `keep_best`.
    """
    training = session.training
    run, held_out = training.run, training.splits.held_out
    if training.step or held_out is None or (run.metrics is None and not training.best.is_used):
        return
    most = session.replica.shard.data_parallel_group.size
    tried = evaluate(
        session.replica,
        run.loss,
        held_out,
        metrics=run.metrics,
        batch_size=1,
        max_samples=most,
        bad_samples=training.held_out_bad,
    )
    if tried is not None:
        BestSoFar(run.keep_best, run.stop_after).note(tried, 0)
