"""A data set as a loader reads it: under an index or as a stream, in its global order."""

from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from paceline.data.base import Source
from paceline.data.first_samples import sketch_dataset
from paceline.data.map_source import CollateFn, check_dataset, open_source
from paceline.data.order import ENDLESS, GlobalOrder, choose_tail
from paceline.data.pipeline import NumProcesses
from paceline.data.stream import Stream, refuse_for_stream
from paceline.errors import DataError
from paceline.registry import check_whole


@dataclass(frozen=True)
class OpenDataset:
    """A data set, and the global order of its samples."""

    name: str
    """Name of the data set's class."""
    sketch: list[float] | None
    """Some numbers of the samples, by which ranks notice that their data differs; None if none are known."""
    source: Source | None
    """Samples under an index; None of an iterable data set."""
    stream: Stream | None
    """Samples of an iterable data set, not read yet; None of any other."""
    order: GlobalOrder
    """Global order of the samples."""
    collate_fn: CollateFn | None
    """Function that makes a batch from a list of samples, if there is one."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse the state of a loader of other data, or of another order.

        Raises:
            DataError: The state is of other data or another seed, for which "the rest of the epoch" means nothing.
        """
        if ("stream" in state) != (self.stream is not None):
            raise DataError(
                "a data set must be iterable where that of the checkpoint is, and only there, but one of them is not; "
                "resume with the data that the run was started with"
            )
        for name, here in asdict(self.order).items():
            saved = state.get(name, "short")  # older checkpoints know no other tail
            if saved != here:
                name = "way to end an epoch (drop_last, join_epochs)" if name == "tail" else name
                raise DataError(
                    f"the data's {name} must be that of the checkpoint, but got {here} instead of {saved}; "
                    "resume with the data and order that the run was started with"
                )


def open_dataset(
    dataset: Dataset[Any],
    collate_fn: CollateFn | None,
    *,
    seed: int | None,
    shuffle: bool | None,
    drop_last: bool,
    join_epochs: bool,
    num_epochs: int | None,
    num_processes: NumProcesses,
    dispatcher: object,
) -> OpenDataset:
    """Open a data set for a loader, by the settings of the `Loader`.

    Raises:
        SettingsError: The settings do not fit each other, or the data set.
        DataError: The kind of data set cannot be read.
    """
    check_dataset(dataset, collate_fn)
    seed = check_whole("seed", 0 if seed is None else seed)
    name, sketch = type(dataset).__name__, sketch_dataset(dataset)
    tail = choose_tail(drop_last=drop_last, join_epochs=join_epochs)
    if isinstance(dataset, IterableDataset):
        refuse_for_stream(
            shuffle=bool(shuffle),
            drop_last=drop_last,
            num_processes=num_processes if num_processes != "auto" else 0,
            dispatcher=dispatcher,
        )
        endless = GlobalOrder(ENDLESS, seed, shuffle=False, tail="join")
        return OpenDataset(name, sketch, None, Stream(dataset, num_epochs), endless, collate_fn)
    source = open_source(dataset, collate_fn)
    return OpenDataset(
        name, sketch, source, None, GlobalOrder(len(source), seed, shuffle is not False, tail), collate_fn
    )
