"""Energy of a step: idle power all the time, and the rest while devices compute."""

from paceline.simulator.training.case import StepCase

WORKING = frozenset({"matrix", "attention", "pointwise", "loss", "slowdown", "optimizer", "coding"})
"""Terms of a step in which devices compute; in the others they wait."""


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
