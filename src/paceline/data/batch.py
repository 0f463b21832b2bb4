"""A batch: any nesting of tensors whose first dim is the samples, and the number of samples that count."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.streams import keep_for_stream, send_to, wait_in_queue
from paceline.data.order import Interval
from paceline.errors import DataError

LABELS = ("labels", "label", "targets", "target")
"""Keys under which a mapping holds targets."""
NEXT_LABELS = "next_labels"
"""Key under which a mapping of parts of sequences holds the label of the token after each, which may be elsewhere."""


@dataclass(frozen=True)
class Batch:
    """One worker's part of a global batch (or, while accumulating, of a part of it)."""

    data: Any
    """Tensors in any nesting of mappings, tuples, lists, dataclasses and namespaces, each with the samples as its first
    dim; all other values are passed on."""
    num_samples: int
    """Number of samples that count. It is 0 where the worker's share is empty: the tensors then hold one borrowed
    sample of weight 0, so that forward and backward run as everywhere."""
    interval: Interval
    """Positions of the whole global batch in the global order, the same on every worker."""
    last: bool = True
    """Whether this is the last micro-batch of the step, after which gradients are exchanged."""
    virtual_worker: int | None = None
    """Number of the virtual worker whose part of the global batch this is; None without virtual workers."""
    copied: tuple[Any, Any] | None = field(default=None, repr=False, compare=False)
    """Data on a GPU, and in host memory, where it was copied from; see `on_host`."""
    arrival: Any = field(default=None, repr=False, compare=False)
    """Event of the stream that copies the data to a GPU, if it is not the computing one."""

    def count(self, mask: Tensor | None = None) -> float:
        """Return the weight of a mean loss over this batch.

        Args:
            mask: True, or 1, for each element that the mean is taken over, such as tokens that are no padding; False,
                or 0, for others. Its first dim is that of the batch, or a multiple if it is flattened. Without it the
                mean is over samples.

        Returns:
            Number of samples, or of elements of the mask; 0 for a batch of borrowed samples.

        Raises:
            DataError: The mask is not of this batch, or holds other numbers than 0 and 1.
        """
        if not self.num_samples:
            return 0.0
        if mask is None:
            return float(self.num_samples)
        mask = torch.as_tensor(mask)
        lengths = {len(tensor) for tensor in list_tensors(self.data) if tensor.dim()}  # of packed samples another one
        if not mask.dim() or (len(mask) % self.num_samples and len(mask) not in lengths):
            raise DataError(
                f"a mask must have the batch's {self.num_samples} samples as its first dim, but got {describe(mask)}; "
                "compute it from batch.data, or give backward the number of elements itself as the weight"
            )
        if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
            raise DataError(
                f"a mask must be True or False, 1 or 0, for each element, but got {describe(mask)} with other numbers; "
                "compare, such as in batch.count(labels != -100)"
            )
        return float(mask.count_nonzero())

    @property
    def inputs(self) -> Any:
        """Inputs of the model: the first of a pair, all but the labels of a mapping, else all of the data."""
        if _is_pair(self.data):
            return self.data[0]
        label = self._label
        if not label:
            return self.data
        return {key: value for key, value in self.data.items() if key not in (label, NEXT_LABELS)}

    @property
    def targets(self) -> Any:
        """Targets of the model's output: the second of a pair, or the labels of a mapping.

        Raises:
            DataError: The data is neither a pair nor a mapping with labels.
        """
        if _is_pair(self.data):
            return self.data[1]
        if self._label:
            return self.data[self._label]
        raise DataError(
            f"a batch must be a pair (inputs, targets) or a mapping with {LABELS[0]!r} to have targets, but got "
            f"{describe(self.data)}; give a loss of your own, which takes what it needs of batch.data"
        )

    @property
    def next_labels(self) -> Tensor:
        """Label of the token after each, x_BT, for logits of all tokens; -100 after the last.

        These are the targets of a pair, and the ``labels`` of a mapping, one token later. In a loss they are right in
        every layout: where ranks have parts of sequences, the label after a part's last token is elsewhere.

        Raises:
            DataError: The data has no labels of tokens.
        """
        if isinstance(self.data, Mapping) and isinstance(cut := self.data.get(NEXT_LABELS), Tensor):
            return cut
        labels = self.targets
        if not isinstance(labels, Tensor) or labels.dim() < 2:
            raise DataError(
                f"labels of next tokens must be of tokens, but targets are {describe(labels)}; give a loss of your own"
            )
        return labels if _is_pair(self.data) else F.pad(labels[:, 1:], (0, 1), value=-100)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`; the host goes on while it is copied there."""
        if all(tensor.device == device for tensor in list_tensors(self.data)):
            return self
        data = map_tensors(partial(send_to, device), self.data)
        return dataclasses.replace(self, data=data, copied=(data, self.data))

    @property
    def on_host(self) -> "Batch":
        """The batch in host memory, if it was copied from there: to count in it, the host need not wait for a GPU."""
        if self.copied is None or self.copied[0] is not self.data:
            return self
        return dataclasses.replace(self, data=self.copied[1], copied=None)

    @property
    def both(self) -> tuple[Any, ...]:
        """The data, and if it was copied to a GPU also that in host memory; see `part`."""
        return (self.data,) if self.on_host is self else (self.data, self.on_host.data)

    def part(self, both: tuple[Any, ...], num_samples: int) -> "Batch":
        """Return the batch of a part of `both`, of which `num_samples` count."""
        return dataclasses.replace(self, data=both[0], num_samples=num_samples, copied=(both[0], both[-1]))

    def arrived(self) -> "Batch":
        """Return the batch, for the stream of the calling thread: what is queued from now on waits for its copy."""
        if self.arrival is None:
            return self
        tensors = list_tensors(self.data)
        wait_in_queue(tensors[0].device, self.arrival)
        for tensor in tensors:
            keep_for_stream(tensor)
        return dataclasses.replace(self, arrival=None)

    @property
    def _label(self) -> str | None:
        keys = self.data.keys() if isinstance(self.data, Mapping) else ()
        return next((label for label in LABELS if label in keys), None)


_given = threading.local()


def note_given(batch: Batch | None) -> None:
    """Record that a loader gives `batch` to this thread, or that it has ended."""
    _given.is_borrowed = batch is not None and not batch.num_samples


def is_borrowed() -> bool:
    """Return whether this thread's last batch from a loader holds only a borrowed sample, of weight 0."""
    return getattr(_given, "is_borrowed", False)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with its inputs: a mapping by keyword, a tuple or list by position, anything else as it is."""
    if isinstance(inputs, Mapping):
        try:
            return model(**inputs)
        except TypeError as error:
            if "argument" in str(error):
                error.add_note(
                    f"a model gets a mapping's values by keyword, here {', '.join(inputs)}; name them in the "
                    "data set, or a collate_fn, as the model's forward names its arguments"
                )
            raise
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def map_tensors(change: Callable[[Tensor], Any], data: Any) -> Any:
    """Return `data` with each of its tensors changed, in containers of the same types; other values stay."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, Mapping):
        changed = {key: map_tensors(change, value) for key, value in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return changed
        same = copy.copy(data)  # such as a BatchEncoding of transformers, with its other attributes
        for key, value in changed.items():  # a ModelOutput has no update
            same[key] = value
        return same
    if isinstance(data, tuple | list):
        items = [map_tensors(change, item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if is_record(data):
        fields = {f.name: map_tensors(change, getattr(data, f.name)) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **fields)
    if isinstance(data, SimpleNamespace):
        return SimpleNamespace(**{name: map_tensors(change, value) for name, value in vars(data).items()})
    return data


def is_record(data: Any) -> bool:
    """Return whether `data` is an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def list_tensors(data: Any) -> list[Tensor]:
    """Return the tensors of `data`, in their order."""
    found: list[Tensor] = []
    map_tensors(found.append, data)
    return found


def select(data: Any, samples: slice | list[int], num_samples: int) -> Any:
    """Return some samples of `data`, which holds `num_samples`.

    Raises:
        DataError: A tensor's first dim is not the samples.
    """

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != num_samples:
            raise DataError(
                f"the first dim of each tensor must be the batch's {num_samples} samples for it to be divided, but got "
                f"{describe(data)}; let collate_fn stack samples first"
            )
        return tensor[samples]

    return map_tensors(cut, data)


def check_batch(data: Any) -> None:
    """Raise `DataError` for a batch without tensors."""
    if not list_tensors(data):
        raise DataError(
            f"a batch must hold tensors, but got {describe(data)}; turn samples into tensors in the data set, or in a "
            "collate_fn"
        )


def describe(data: Any) -> str:
    """Return the structure of `data` in a line, such as ``{ids: int64[4, 128], label: int64[4]}``."""
    if isinstance(data, Tensor | np.ndarray):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in data.items()) + "}"
    if isinstance(data, tuple | list):
        return "(" + ", ".join(describe(item) for item in data[:8]) + (", ..." if len(data) > 8 else "") + ")"
    if is_record(data):
        inside = ", ".join(f"{f.name}={describe(getattr(data, f.name))}" for f in dataclasses.fields(data))
        return f"{type(data).__name__}({inside})"
    return type(data).__name__


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and not hasattr(data, "_fields")
