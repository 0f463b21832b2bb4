"""Ways to go on after a failure, as numbers: what keeping the state costs, and how long going on takes."""

from typing import Literal

from pydantic import Field

from paceline.registry import Settings


class Mechanism(Settings):
    """A way to keep the state of training, and to go on from it. Failures come one at a time."""

    restart_s: float = Field(ge=0)
    """Time from the moment at which a failure is known until steps go on."""
    size_share: float = Field(ge=0)
    """Bytes of a save, to those of the state."""
    over: Literal["disk", "network", "nothing"]
    """Path of a save, whose speed says for how long it stops training."""
    overhead: float = Field(default=0.0, ge=0)
    """Additional time of every step, as a share of it."""
    keeps_steps: bool = False
    """Whether the state of the latest step lives on elsewhere, so that at most the step under way is lost."""
    about: str
    """Origin of the numbers."""


_PUBLISHED = "recovery time and size as published for large clusters; measure your own with `paceline bench resilience`"

MECHANISMS: dict[str, Mechanism] = {
    "disk": Mechanism(restart_s=1800, size_share=1.0, over="disk", about=f"full checkpoint on disks: {_PUBLISHED}"),
    "incremental": Mechanism(
        restart_s=600, size_share=0.25, over="disk", about=f"checkpoints of what has changed: {_PUBLISHED}"
    ),
    "peer_memory": Mechanism(
        restart_s=300, size_share=1.0, over="network", about="a copy in another host's memory; recovery as of erasure"
    ),
    "erasure": Mechanism(
        restart_s=300, size_share=0.55, over="network", about=f"parity in the memory of other hosts: {_PUBLISHED}"
    ),
    "hot_replacement": Mechanism(
        restart_s=60,
        size_share=0.0,
        over="nothing",
        overhead=0.005,
        keeps_steps=True,
        about=f"a replica hands its state to a host that waits: {_PUBLISHED}",
    ),
}
"""Mechanisms by name."""
