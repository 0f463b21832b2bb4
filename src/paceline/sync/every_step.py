"""Synchronous SGD: every gradient is averaged over all workers at every step."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Size

from paceline.comm.group import Group
from paceline.comm.torch_group import TorchGroup
from paceline.compression import AutoCodec, Codec, NoCodec
from paceline.compression.codec import Algebra, CodecSetting
from paceline.errors import SettingsError
from paceline.programs import Algorithm, Collective, Direct, list_algorithms
from paceline.registry import register
from paceline.sync.codec_choice import count_buckets
from paceline.sync.reducer import GradientReducer
from paceline.sync.reducers import NEEDS, CodecReducer, DenseReducer
from paceline.sync.rule import Rule, Traffic

_BACKWARD = 2 / 3
"""Backward's part of a step's computing, in which gradients are ready one after another."""


class _Gathers(Direct):
    """Direct exchange of what is gathered; sums are the group's own."""

    collectives: ClassVar = frozenset({Collective.ALL_TO_ALL, Collective.ALL_GATHER})


@register("every_step")
class EveryStep(Rule):
    """Synchronous data-parallel SGD, x <- x - lr * sum_i w_i g_i / sum_i w_i.

    Without a codec it equals one process on the same global batch up to the order of summation, and sends 2(n-1)/n
    bytes a rank for each byte of gradient. With a codec, workers apply the same sum of the values really sent, and keep
    the rest for later steps (error feedback), except in the first `dense_steps`. Gradients are clipped after they are
    averaged, so clipping is that of the one process; with feedback, residuals are clipped in the step in which they are
    sent.

    Where steps are coded, each worker's optimizer steps with its own gradient, x <- x - sum_i w_i s_i / sum_i w_i: that
    is local_sgd with a period of 1. Parameters are equal on all workers, the optimizers' states are not, and each
    worker clips its own gradient.
    """

    codec: CodecSetting = NoCodec()
    """Codec of the gradients or steps. On a fast network none is best; auto measures, and changes it in mid-run."""
    codec_of: Literal["gradient", "step"] | None = None
    """Input of the codec: the gradient, or the step that each worker's optimizer takes with its own gradient.
    Adaptive optimizers, such as Adam, end much worse if they see coded gradients, whose size comes in bursts. By
    default steps with Adam and its kin (all with betas), RMSprop, Adagrad or Adadelta, and one_bit, top_k, random_k
    or power_sgd; else gradients."""
    step_beta1: float | None = Field(default=0.5, ge=0, lt=1)
    """Largest beta1 of Adam and its kin where steps are coded, since residuals act like momentum already; none leaves
    the optimizer's own."""
    step_length: Literal["synchronous", "own"] = "synchronous"
    """Length of coded steps of adaptive optimizers, which divide by the size of gradients: a worker's own are noisier
    than the mean of all, so that its steps are too short. synchronous multiplies them, and the bound of clipping, by
    sqrt(E|g_i|^2 / E|g|^2), of own and mean gradients, at most sqrt(num_workers), measured on about one of 1,024
    elements; own leaves them."""
    program: Algorithm | None = None
    """Collective program that sums the gradients; by default the group's own choice."""
    dense_steps: int = Field(default=0, ge=0)
    """Steps at the beginning without the codec. They help where the gradients of adaptive optimizers are coded, and
    cost most of what a codec saves (Tang et al. 2021, arXiv:2102.02888, take about a fifth of the steps for one_bit
    with Adam; Lin et al. 2018, arXiv:1712.01887, let the density of top_k fall over four epochs)."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if not isinstance(self.codec, Codec):
            return self._check_auto()
        needs = NEEDS[self.codec.algebra]
        if self.program is not None and not needs <= self.program.collectives:
            legal = [name for name, known in list_algorithms().items() if needs <= known.collectives]
            raise SettingsError(
                f"the program of a codec that is {self.codec.algebra} must have {', '.join(sorted(needs))}, but got "
                f"codec {self.codec.name!r} with program {self.program.name!r}; take one of: {', '.join(legal)}"
            )
        return self

    def _check_auto(self) -> Self:
        """Refuse what would have to fit whichever codec comes."""
        for name in ("program", "codec_of", "dense_steps"):
            if value := getattr(self, name):
                shown = value.name if isinstance(value, Algorithm) else value
                raise SettingsError(f"{name} must be left out with codec auto, but got {shown}; or name one codec")
        return self

    @model_validator(mode="after")
    def _check_dense_steps(self) -> Self:
        if self.dense_steps and self.carries_momentum:
            raise SettingsError(
                f"dense_steps must be 0 with a codec that carries momentum, but got {self.dense_steps} and "
                f"{self.codec.name}, without which nothing would carry it; take a codec without, such as top_k"
            )
        return self

    @property
    def keeps_replicas_equal(self) -> bool:
        """Always true: all workers apply the same bits."""
        return True

    @property
    def keeps_optimizers_equal(self) -> bool:
        """Whether gradients are exchanged; with steps each optimizer has seen its worker's own gradients."""
        return self.codec_of != "step"

    @model_validator(mode="after")
    def _check_coded(self) -> Self:
        if self.codec_of == "step" and self.carries_momentum:
            raise SettingsError(
                f"codec_of must be gradient with a codec that carries momentum, but got step with {self.codec.name}; "
                "take a codec without, such as top_k"
            )
        return self

    @property
    def carries_momentum(self) -> bool:
        """Whether the codec corrects momentum."""
        return isinstance(self.codec, Codec) and self.codec.carries_momentum

    def with_codec(self, codec: Codec, codec_of: Literal["gradient", "step"]) -> Self:
        """Return the rule with a codec of gradients or steps in place of its own."""
        return self.model_copy(update={"codec": codec, "codec_of": codec_of})

    @property
    def survives_loss(self) -> bool:
        """Always true: all workers hold the same, and each its own residuals."""
        return True

    def phase(self, step: int) -> int:
        """Return 0 in the dense steps, 1 after them; without a codec of gradients all steps are dense."""
        is_dense = isinstance(self.codec, NoCodec | AutoCodec) and self.codec_of != "step"
        return 0 if is_dense or step < self.dense_steps else 1

    def codes_steps(self, step: int) -> bool:
        """Return whether workers exchange the steps of their optimizers in `step`, rather than gradients."""
        return self.codec_of == "step" and self.phase(step) == 1

    def next_change(self, step: int) -> int | None:
        """Return the end of the dense steps, if they lie ahead."""
        return self.dense_steps if self.phase(step) != self.phase(self.dense_steps) else None

    def start_reducer(self, group: Group, seed: int = 0, *, step: int = 0) -> GradientReducer:
        """Return the reducer of whole buffers, or of a codec's blocks."""
        if self.phase(step) == 0 or isinstance(self.codec, NoCodec | AutoCodec):
            return DenseReducer(group, self.program)
        assert isinstance(self.codec, Codec)
        program = self.program
        if program is None and self.codec.algebra is not Algebra.LINEAR and isinstance(group, TorchGroup):
            # Measured: gloo's own all-to-all and all-gather take up to half as long again as messages to each peer. Its
            # all-reduce, which sums small blocks here, takes less of a processor than 2 (n - 1) messages.
            program = _Gathers() if group.device.type == "cpu" else None
        return CodecReducer(group, self.codec, program, seed)

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """One all-reduce a step, of gradients, encoded if there is a codec; what codec auto begins with is none.

        Backward hides that of gradients but for the last bucket; steps count as exposed, since clipped ones are known
        only after it.
        """
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        codec = self.codec if isinstance(self.codec, Codec) else NoCodec()
        wire_bytes = sum(codec.wire_bytes(shape, num_workers) for shape in shapes)
        overlap = 0.0 if self.codec_of == "step" else _BACKWARD
        last = 1 / count_buckets(codec, num_bytes)
        first_step = self.dense_steps
        encoded = Traffic("all_reduce", num_bytes, wire_bytes, first_step=first_step, overlap=overlap, last_part=last)
        if not self.dense_steps:
            return (encoded,)
        dense_bytes = sum(NoCodec().wire_bytes(shape, num_workers) for shape in shapes)
        last = 1 / count_buckets(NoCodec(), num_bytes)
        dense = Traffic("all_reduce", num_bytes, dense_bytes, end_step=first_step, overlap=_BACKWARD, last_part=last)
        return (dense, encoded)
