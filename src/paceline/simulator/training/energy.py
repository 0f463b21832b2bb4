"""Energy of a step: idle power all the time, and the rest while devices compute."""

from math import hypot

from paceline.simulator.training.case import StepCase
from paceline.simulator.training.parameters import GENERATIONS

WORKING = frozenset({"matrix", "attention", "pointwise", "loss", "slowdown", "optimizer", "coding"})
"""Terms of a step in which devices compute; in the others they wait."""
_KNOWN_POWER_SPREAD = 0.14
"""Standard deviation of the logarithm of hosts' mean power on GPUs that the shipped rows know.

No parameter is fitted to power. Of three published runs (MLPerf Training 4.0, hosts of 8 H100) predictions were off by
4, 9 and 15 %, 10 % in the mean square, which is widened for how few they are: by the 95 % point of Student's
distribution, 2.35, over the normal one's, 1.645.
"""
_DECLARED_POWER_SPREAD = 0.30
"""The same of other machines, whose power is declared and compared with nothing: an assumption."""


def estimate_energy_j(case: StepCase, step_s: float, busy_share: float) -> float:
    """Return the energy of all hosts in a step: P = idle + u (load - idle), u the share of time that is busy.

    Args:
        case: Case of the step.
        step_s: Seconds of it.
        busy_share: Share of them in which devices compute.
    """
    device, host = case.device, case.cluster.host
    devices_w = device.idle_w + busy_share * (device.working_w - device.idle_w)
    hosts_w = 0.0 if device.is_host else host.idle_w + busy_share * (host.load_w - host.idle_w)
    return step_s * (case.row.num_ranks * devices_w + case.num_hosts * hosts_w)


def widen_by_power(case: StepCase, log_spread: float) -> float:
    """Return the standard deviation of the logarithm of a step's energy, from that of its time.

    Args:
        case: Case of the step.
        log_spread: Standard deviation of the logarithm of its time.
    """
    is_known = case.device.generation in GENERATIONS and not case.device.is_host
    return hypot(log_spread, _KNOWN_POWER_SPREAD if is_known else _DECLARED_POWER_SPREAD)
