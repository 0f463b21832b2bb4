"""How a model runs as a pipeline: the order, the number of micro-batches, and the cuts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.errors import SettingsError
from paceline.parallel.pipeline.orders import ORDERS, Order, OrderName
from paceline.registry import Settings


class PipelineSettings(Settings):
    """How the stages of a model work together; the layout says how many ranks hold them."""

    order: OrderName = "1f1b"
    """Order in which a rank works: layer_wise (one micro-batch, one rank at a time), gpipe, 1f1b, interleaved,
    zero_bubble, zbv."""
    num_micro_batches: int | None = Field(default=None, ge=1)
    """Largest number of equal micro-batches that a worker's samples are split into; by default twice as many as
    ranks."""
    stages_per_rank: int | None = Field(default=None, ge=1)
    """Stages that each rank holds; by default 2 if the order needs several, else 1."""
    cuts: Literal["estimated", "measured"] | tuple[str, ...] = "estimated"
    """First layers of stages: balanced by flops and bytes (estimated: the same at each start) or by time (measured); or
    the names of the first layers of all stages but the first."""
    sequence: tuple[str, ...] = ()
    """Children of the model in the order of execution, each applied to the output of the one before; ``layers.*`` are
    all children of ``layers``. Not needed for `torch.nn.Sequential`, nor for a model that has `pipeline_layers`."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.order == "layer_wise" and self.num_micro_batches not in (None, 1):
            raise SettingsError(
                f"num_micro_batches must be 1 with order layer_wise, but got {self.num_micro_batches}; leave it out, "
                "or take order gpipe"
            )
        least, most = self.behaviour.stages_per_rank
        if self.stages_per_rank is not None and not least <= self.stages_per_rank <= (most or self.stages_per_rank):
            rule = f"{least}" if most == least else f"at least {least}"
            others = ", ".join(name for name, order in ORDERS.items() if order.takes(self.stages_per_rank))
            raise SettingsError(
                f"stages_per_rank must be {rule} with order {self.order}, but got {self.stages_per_rank}; leave it "
                f"out, or take an order that can: {others}"
            )
        return self

    @property
    def behaviour(self) -> Order:
        """Properties of `order`."""
        return ORDERS[self.order]

    @property
    def num_local_stages(self) -> int:
        """Number of stages of each rank."""
        return self.stages_per_rank or self.behaviour.stages_per_rank[0]

    def most_micro_batches(self, num_ranks: int) -> int:
        """Return the largest number of micro-batches of a pipeline of `num_ranks`."""
        return 1 if self.order == "layer_wise" else self.num_micro_batches or 2 * num_ranks

    def count_micro_batches(self, num_samples: int, num_ranks: int) -> int:
        """Return the number of equal micro-batches of `num_samples`: the largest allowed that divides it.

        A number of samples with few divisors makes few micro-batches (a prime number makes 1) and a large bubble.
        """
        most = min(num_samples, self.most_micro_batches(num_ranks))
        fitting = (n for n in range(most, 0, -1) if num_samples % n == 0 and self.behaviour.can_run(n, num_ranks))
        return next(fitting)

    def count_stages(self, num_ranks: int, num_layers: int) -> int:
        """Return the number of stages of a model of `num_layers`.

        Raises:
            SettingsError: There are fewer layers than stages, or `cuts` has the wrong length.
        """
        num_stages = num_ranks * self.num_local_stages
        product = f"pipeline({num_ranks}) * stages_per_rank({self.num_local_stages}) = {num_stages} stages"
        if num_stages > num_layers:
            raise SettingsError(
                f"each stage must have a layer of the model, but {product} and the model has {num_layers} layers; take "
                "fewer ranks or stages, or give the pipeline a sequence (--pipeline.sequence) of finer layers"
            )
        if isinstance(self.cuts, tuple) and len(self.cuts) != num_stages - 1:
            raise SettingsError(
                f"cuts must name the first layer of each stage but the first, but {product} need {num_stages - 1} "
                f"names and got {len(self.cuts)}: {', '.join(self.cuts)}; name as many, or take cuts estimated"
            )
        return num_stages
