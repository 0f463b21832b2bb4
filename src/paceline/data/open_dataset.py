"""A data set as a loader reads it: under an index or as a stream, in its global order."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from paceline.data.base import Source
from paceline.data.first_samples import sketch_dataset
from paceline.data.map_source import CollateFn, check_dataset, open_source
from paceline.data.order import ENDLESS, Era, GlobalOrder, choose_tail
from paceline.data.orders import Full, SampleOrder, Sequential
from paceline.data.pipeline import NumProcesses
from paceline.data.stream import Stream, refuse_for_stream
from paceline.errors import DataError, SettingsError
from paceline.registry import check_whole, validate


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
    grows: bool
    """Whether the source may get more samples."""
    chosen: SampleOrder
    """Settings of that order."""
    collate_fn: CollateFn | None
    """Function that makes a batch from a list of samples, if there is one."""

    def grow(self, position: int) -> int | None:
        """Let epochs have all samples that the source has by now, from the first that begins at `position` or later.

        Returns:
            Position at which that epoch begins; None if there are no more samples than before.

        Raises:
            DataError: There are fewer samples than before.
        """
        assert self.source is not None
        arrangement = self.source.arrange(self.chosen, self.order.seed)
        if arrangement.num_samples < self.order.num_samples:
            raise DataError(
                f"data that grows must keep its samples, but got {arrangement.num_samples} after "
                f"{self.order.num_samples}; put the missing ones back"
            )
        return self.order.grow(position, arrangement) if arrangement.num_samples > self.order.num_samples else None

    def _restore_eras(self, source: Source, state: dict[str, Any]) -> None:
        """Give the order the epochs of a checkpoint, which had the first samples of those that there are now."""
        eras = []
        for epoch, position, num_samples, _ in [[0, 0, state["num_samples"], {}], *state.get("eras", [])]:
            sizes, left = [], num_samples
            for size in source.shard_sizes:
                sizes.append(min(size, left))
                left -= sizes[-1]
            if left:
                return  # fewer samples than then: refused
            while len(sizes) > 1 and not sizes[-1]:
                sizes.pop()
            eras.append(Era(epoch, position, self.chosen.arrange(sizes, self.order.seed)))
        self.order.restore(eras)

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse the state of a loader of other data, or of another order; of data that grows, take its epochs.

        Raises:
            DataError: The state is of other data or another seed, for which "the rest of the epoch" means nothing.
        """
        if ("stream" in state) != (self.stream is not None):
            raise DataError(
                "a data set must be iterable where that of the checkpoint is, and only there, but one of them is not; "
                "resume with the data that the run was started with"
            )
        if self.source is not None and self.grows:
            self._restore_eras(self.source, state)
        older = {"tail": "short", "order": {"name": "full" if state.get("shuffle", True) else "sequential"}}
        for name, here in self.order.state().items():
            saved = state.get(name, older.get(name, []))
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
    order: SampleOrder | str | None,
    shuffle: bool | None,
    drop_last: bool,
    join_epochs: bool,
    num_epochs: int | None,
    num_processes: NumProcesses,
    grows: bool,
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
    chosen = choose_order(order, shuffle)
    tail = choose_tail(drop_last=drop_last, join_epochs=join_epochs)
    if isinstance(dataset, IterableDataset):
        refuse_for_stream(
            shuffle=bool(shuffle) or not isinstance(chosen, Sequential | None),
            drop_last=drop_last,
            num_processes=num_processes if num_processes != "auto" else 0,
            dispatcher=dispatcher,
        )
        endless = GlobalOrder(ENDLESS, seed, tail="join", arrangement=Sequential().arrange([ENDLESS], seed))
        return OpenDataset(name, sketch, None, Stream(dataset, num_epochs), endless, False, Sequential(), collate_fn)
    source = open_source(dataset, collate_fn)
    chosen, grows = chosen or Full(), grows or source.grows
    if grows and type(source).arrange is not Source.arrange:
        raise SettingsError(
            f"grows must be false for a {type(source).__name__}, whose epochs have one length; leave it out"
        )
    if grows and num_processes:
        raise SettingsError(
            f"num_processes must be 0 for data that grows, whose new samples forked processes would not see, but got "
            f"{num_processes}; leave it out"
        )
    if source.steps_ahead is not None and num_processes:
        raise SettingsError(
            f"num_processes must be 0 for samples that are made with the model, which forked processes would not see "
            f"learn, but got {num_processes}; leave it out"
        )
    arrangement = source.arrange(chosen, seed)
    global_order = GlobalOrder(arrangement.num_samples, seed, tail=tail, arrangement=arrangement)
    return OpenDataset(name, sketch, source, None, global_order, grows, chosen, collate_fn)


def choose_order(order: SampleOrder | str | None, shuffle: bool | None) -> SampleOrder | None:
    """Return the order of a loader's samples; None for the default.

    Raises:
        SettingsError: An order was given together with `shuffle`.
    """
    if order is None:
        return Sequential() if shuffle is False else Full() if shuffle else None
    if shuffle is not None:
        raise SettingsError(
            f"shuffle must be left out where an order is given, but got {shuffle} with {order}; shuffle=True is the "
            "order full, and shuffle=False is sequential"
        )
    return validate(SampleOrder.model_validate, order, "order")
