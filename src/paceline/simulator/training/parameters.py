"""Physical parameters that turn numbers of a step into seconds, each with what is believed before any row is seen."""

from dataclasses import dataclass
from math import log


@dataclass(frozen=True)
class Parameter:
    """A positive quantity, or a factor.

    Args:
        name: Name of it.
        prior: Value that is believed.
        spread: Standard deviation of its logarithm.
        meaning: Sentence for a person.
    """

    name: str
    prior: float
    spread: float
    meaning: str

    @property
    def log_prior(self) -> float:
        """Logarithm of the believed value."""
        return log(self.prior)


GENERATIONS = ("volta", "ampere", "hopper")
"""Architectures that the shipped rows know; others have factors of their own that no row has corrected."""
STACKS = ("megatron", "megatron-deepspeed", "fsdp", "fsdp2", "ddp", "mlperf")

PARAMETERS: tuple[Parameter, ...] = (
    Parameter("matrix", 0.75, 0.08, "best share of the peak in products with weights"),
    Parameter("depth", 128.0, 0.4, "inner length at which such a product has half its best speed"),
    Parameter("convolution", 0.50, 0.2, "best share of the peak in convolutions"),
    Parameter("batched", 0.45, 0.2, "best share of the peak in attention that writes its scores"),
    Parameter("fused", 0.50, 0.25, "best share of the peak in attention of one kernel"),
    Parameter("fused_newest", 1.7, 0.15, "speed of the newest fused attention on hopper, over the portable one's"),
    Parameter("memory", 0.80, 0.06, "share of the memory's bandwidth that is reached"),
    Parameter("eager", 1.30, 0.2, "bytes between operators that are not compiled, over those of fused ones"),
    Parameter("loss", 1.0, 0.2, "bytes of the loss, over those counted"),
    Parameter("local", 0.75, 0.1, "share of the links inside a host that is reached"),
    Parameter("network", 0.80, 0.12, "share of the network that is reached"),
    Parameter("latency", 12e-6, 0.3, "seconds of a message"),
    Parameter("launch", 6e-6, 0.3, "seconds of starting a kernel"),
    Parameter("kernel", 4e-6, 0.3, "seconds that a kernel takes at least, beside its work"),
    Parameter("exposed_shard", 0.20, 0.4, "share of computing that cannot hide sharding"),
    Parameter("exposed_data", 0.25, 0.3, "share of computing that cannot hide a step's gradients and parameters"),
    Parameter("exposed_tensor", 0.50, 0.4, "share of exchanges inside layers that matrix products cannot hide"),
    Parameter("slowdown", 0.12, 0.3, "share of a hidden exchange by which it slows computing"),
    Parameter("straggler", 0.010, 0.4, "spread of ranks, whose slowest is waited for"),
    Parameter("update", 1.2, 0.25, "bytes of the optimizer, over those counted"),
    Parameter("fp8", 0.75, 0.12, "speed of products in fp8, over that of the same share of its peak"),
    Parameter("fp32", 1.2, 0.08, "speed of products in fp32, likewise"),
    Parameter("tf32", 1.0, 0.08, "speed of products in tf32, likewise"),
    Parameter("fused_norm", 0.65, 0.15, "bytes between convolutions where norms and activations are one kernel"),
    Parameter("misaligned", 0.15, 0.4, "speed of products with lengths that are no multiple of 8, likewise"),
    *(Parameter(f"matrix_{name}", 1.0, 0.08, f"speed of products on {name}, over others") for name in GENERATIONS),
    *(Parameter(f"fused_{name}", 1.0, 0.2, f"speed of fused attention on {name}") for name in GENERATIONS),
    *(Parameter(f"memory_{name}", 1.0, 0.06, f"memory of {name}") for name in GENERATIONS),
    *(
        Parameter(f"stack_{name}", 1.1 if name == "mlperf" else 1.0, 0.07, f"time of a step of {name}, over others")
        for name in STACKS
    ),
)
"""Parameters of every step. Printed times of MLPerf's runs contain evaluation and start: 5-15 %."""

CASE: tuple[Parameter, ...] = (
    Parameter("case", 1.0, 0.06, "time of a step of one case: model, software and machines together"),
    Parameter("case_matrix", 1.0, 0.04, "time of its products"),
    Parameter("case_attention", 1.0, 0.1, "time of its attention"),
    Parameter("case_pointwise", 1.0, 0.075, "time of what moves bytes"),
    Parameter("case_tensor", 1.0, 0.125, "time of its exchanges inside layers"),
    Parameter("case_network", 1.0, 0.3, "time of its other exchanges"),
)
"""Factors that differ from case to case: a few rows of a case correct them; without rows, they widen intervals."""

INDEX = {parameter.name: index for index, parameter in enumerate((*PARAMETERS, *CASE))}
