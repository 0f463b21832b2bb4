"""Published trainings of ResNet-50 on V100: 65 seconds on 1,024 of them, and epochs on one to eight."""

from typing import Any

from pydantic import Field

from paceline.benchmarks.reproductions.predicted import (
    IMAGE,
    IMAGENET,
    RESNET50,
    PredictedRow,
    PredictedTable,
    Steps,
    contains,
    counted,
    predicted,
)
from paceline.registry import register
from paceline.topology import Precision


def _row(num_ranks: int, batch: int, precision: str, memory: str) -> dict[str, Any]:
    return {
        "model": RESNET50, "sample": IMAGE, "device": f"v100_{memory}gb", "cluster": {"name": "dgx1"},
        "num_ranks": num_ranks, "micro_batch": float(batch), "global_batch": float(batch * num_ranks),
        "precision": precision, "is_compiled": False, "optimizer": "momentum",
    }  # fmt: skip


@register("resnet-65s")
class ResNet65s(PredictedTable):
    """ResNet-50 on 1,024 V100 in 65 s at an efficiency of 90.7 %: what one V100 must do for that, and what it does."""

    batch: int = Field(default=80, ge=1)
    """Images of a device in a step; 80 on each of 1,024 are 81,920."""
    num_epochs: int = Field(default=90, ge=1)
    """Epochs of the training, which are not published."""
    precision: Precision = "fp16"

    def reproduce(self) -> list[PredictedRow]:
        """Predict it."""
        steps = Steps([_row(number, self.batch, self.precision, "16") for number in (1, 1024)])
        images, published_s, published = self.num_epochs * IMAGENET, 65.0, 0.907
        alone_s = published_s * 1024 * published
        rate, efficiency = steps.rate(0, self.batch), steps.ratio(0, 1)
        time_s = steps.times(1, images / (1024 * self.batch))
        epochs = tuple(published_s / one * self.num_epochs for one in (time_s[0], time_s[2], time_s[1]))
        needed = images / alone_s
        note = f"{alone_s / 3600:.3g} h on one for {self.num_epochs} epochs"
        if needed > rate[2]:
            note += f": {needed / rate[0]:.2g} times what we predict of one, and beyond its interval"
        return [
            predicted("one V100: images/s", rate, f"{needed:,.0f}", note),
            predicted("1,024 V100: efficiency", efficiency, "0.907", _outside(efficiency, published)),
            predicted(f"1,024 V100: s for {self.num_epochs} epochs", time_s, "65", _outside(time_s, published_s)),
            predicted(
                "1,024 V100: epochs in 65 s",
                (epochs[0], epochs[1], epochs[2]),
                "not stated",
                "without data, start and evaluation, which a step does not have",
            ),
        ]


@register("resnet-epochs")
class ResNetEpochs(PredictedTable):
    """Minutes of an epoch of ResNet-50 on 1, 2, 4 and 8 V100.

    220 minutes are 97 images/s of one V100, far below its own: predicted as it is, and once more with that rate as an
    input, to which our exchanges are added.
    """

    batch: int = Field(default=64, ge=1)
    """Images of a device in a step."""
    precision: Precision = "fp32"

    def reproduce(self) -> list[PredictedRow]:
        """Predict it."""
        published = {1: 220.0, 2: 112.0, 4: 58.0, 8: 30.0}
        steps = Steps([_row(number, self.batch, self.precision, "16") for number in published])
        given_s = published[1] * 60 / IMAGENET * self.batch
        rows = []
        for place, (number, minutes) in enumerate(published.items()):
            ours = steps.times(place, IMAGENET / (number * self.batch) / 60)
            rows.append(predicted(f"{number} V100: minutes of an epoch", ours, f"{minutes:g}", _outside(ours, minutes)))
        for place, (number, minutes) in enumerate(published.items()):
            speedup = steps.ratio(0, place, number)
            theirs = published[1] / minutes
            rows.append(predicted(f"{number} V100: speed-up", speedup, f"{theirs:.3g}", _outside(speedup, theirs)))
        for place, (number, minutes) in enumerate(published.items()):
            added_s = float(steps.seconds[place] - steps.seconds[0])
            ours_min = (given_s + added_s) * IMAGENET / (number * self.batch) / 60
            note = (
                "97 images/s are an input, a quarter (fp32) to a twelfth (mixed) of its vendor's own"
                if number == 1
                else ""
            )
            what = f"{number} V100: minutes of an epoch at 97 images/s of one"
            rows.append(counted(what, ours_min, f"{minutes:g}", note or f"published is {minutes / ours_min:.1%} of it"))
        return rows


def _outside(ours: tuple[float, float, float], published: float) -> str:
    if contains(ours, published):
        return ""
    return f"outside of our interval: {published / ours[0]:.3g} times our estimate"
