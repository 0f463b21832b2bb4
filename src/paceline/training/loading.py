"""The loader of a run's training data."""

from collections.abc import Callable

from paceline.comm.group import Group
from paceline.data import Batch, IterableSource, Loader, Splits
from paceline.data.order import Dispatcher
from paceline.errors import SettingsError
from paceline.training.run import Run


def make_loader(
    run: Run,
    splits: Splits,
    workers: Group,
    *,
    split: Callable[[Batch], Batch] | None = None,
    dispatcher: Dispatcher | None = None,
) -> Loader:
    """Return the loader of a run's training data.

    Args:
        run: The run.
        splits: Data of the run.
        workers: Ranks that take different samples.
        split: See `Loader`.
        dispatcher: See `Loader`.

    Raises:
        SettingsError: The settings do not fit each other, the data or the number of workers.
    """
    schedule = run.batch_schedule
    if schedule.smallest(run.global_batch) < workers.size:
        raise SettingsError(
            f"global_batch must be at least the number of workers, but batch_schedule {schedule.name} may take it to "
            f"{schedule.smallest(run.global_batch)} with {workers.size} workers; start fewer, or keep it larger"
        )
    return Loader(
        splits.train,
        run.global_batch,
        group=workers,
        num_epochs=run.num_epochs,
        collate_fn=splits.train.collate if isinstance(splits.train, IterableSource) else None,
        drop_last=run.drop_last or splits.drop_last,
        join_epochs=run.join_epochs,
        split=split,
        seed=run.seed,
        order=run.order,
        shuffle=splits.shuffle if run.order is None else None,
        shares=run.fixed_shares,
        num_micro_batches=run.num_micro_batches,
        num_virtual_workers=run.num_virtual_workers,
        bad_samples=run.bad_samples,
        num_processes=run.num_data_processes or splits.num_processes,
        num_threads=run.num_data_threads,
        read_ahead_bytes=run.read_ahead_bytes,
        augment=run.augment,
        dispatcher=dispatcher,
        changes=schedule.plan(run.global_batch, run.count_steps(splits)),
        adds_micro_batches=schedule.adds_micro_batches,
    )
