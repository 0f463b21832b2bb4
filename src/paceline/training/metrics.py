"""Metrics of the user's: means over held-out data, combined over batches and workers by their weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.data.batch import Batch, call, describe
from paceline.errors import SettingsError
from paceline.training.objective import OnBatch

Sums = dict[str, tuple[float, float]]
"""Numerator and weight of each mean, by name."""


class Metrics(OnBatch):
    """The metrics that a function returns for a batch.

    The function takes ``(output, batch)``, or ``(model, batch)`` and then calls the model itself, without gradients. It
    returns a mapping from names to pairs ``(sum, weight)``, such as correct answers and all answers, or to means over
    the batch's samples.
    """

    def measure(self, model: "Recorder", output: Any, batch: Batch) -> Sums:
        """Call the function.

        Args:
            model: Model that the loss has called.
            output: Output of the model in that call.
            batch: Batch of samples.

        Raises:
            SettingsError: The function returns something else than metrics.
        """
        made = self.call(model if self.takes_model else output, batch)
        if not isinstance(made, Mapping):
            self._refuse(made)
        sums: Sums = {}
        for name, value in made.items():
            if isinstance(value, tuple) and len(value) == 2:
                sums[name] = (float(value[0]), float(value[1]))
            elif isinstance(value, float | int) or (isinstance(value, Tensor) and value.numel() == 1):
                sums[name] = (float(value) * batch.num_samples, float(batch.num_samples))
            else:
                self._refuse(made)
        if "loss" in sums:
            raise SettingsError(f"a metric of {self.path} must not be called loss, the name of the training loss")
        # A borrowed sample does not count.
        return sums if batch.num_samples else dict.fromkeys(sums, (0.0, 0.0))

    def _refuse(self, made: Any) -> None:
        raise SettingsError(
            f"{self.path} must return a mapping from names to pairs (sum, weight), or to means over samples, but got "
            f"{describe(made)}"
        )


class Recorder:
    """A model that remembers its latest output."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._output: Any = None
        self._is_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._output, self._is_called = self._model(*args, **kwargs), True
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def output_of(self, batch: Batch) -> Any:
        """Return the model's latest output; it is called with the inputs of `batch` if it has none yet."""
        return self._output if self._is_called else call(self, batch.inputs)
