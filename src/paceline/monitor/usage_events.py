"""The typed events of what a run uses: energy, carbon and money, and of a budget that is spent."""

from pydantic import Field

from paceline.monitor.event import Event, Float, event


@event("resources_used")
class ResourcesUsed(Event):
    """Energy and money of one worker since its last such event, or since it met the others; each worker writes its own.

    Their sums are those of the run, the steps that a restart made again included.
    """

    duration_s: Float
    """Time that they are of."""
    energy_j: Float
    """Energy of this worker's device and of its share of the host, as far as it is known."""
    energy_of: dict[str, Float] = Field(default_factory=dict)
    """Energy in joules by part: gpu, cpu, memory."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Origin of the energy by part, in words: measured or declared; a part that is not known says so."""
    carbon_kg: Float = 0.0
    """Greenhouse gases of that energy, with the overhead of the data centre, as kg of CO2."""
    carbon_by: str = ""
    """Carbon of the grid and overhead that it was computed with, and their origins."""
    money: Float | None = None
    """Price of this worker's share of its host; None without a price."""
    currency: str = ""
    price: str = ""
    """Price of a host, and its origin."""


@event("budget_spent")
class BudgetSpent(Event):
    """The budget of the run does not pay for another step: all workers stopped, with a checkpoint."""

    checkpoint: str
    name: str
    """Limit that was reached: money, hours or energy."""
    spent: Float
    limit: Float
    unit: str
    """Unit of the two: a currency, h or J."""
