"""Ways in which the workers of a run may change while it trains, beside losses and `paceline scale`."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.comm.control import ControlServer
from paceline.errors import SettingsError
from paceline.launch.scaling import PolicySettings
from paceline.training.reforming import can_reform, find_fixed
from paceline.training.run import Run


@dataclass(frozen=True)
class Changes:
    """Ways in which workers change; by default none.

    Args:
        listen: Address of this machine's interface, and port or 0, at which agents of other machines offer workers.
        notice_s: Time in which a worker that gets SIGTERM leaves, while the others go on; without it all stop.
        scaling: Policy by which the number of workers changes.
        launcher_timeout_s: Time for which workers train on after the launcher was killed, for another one to take its
            place; then they save and end.
    """

    listen: tuple[str, int] | None = None
    notice_s: float | None = None
    scaling: PolicySettings | None = None
    launcher_timeout_s: float = 60.0

    def check(self, find_run: Callable[[], Run]) -> None:
        """Check that workers of a run may change, if they are to, and that address and policy are there.

        Args:
            find_run: Function that returns the run.

        Raises:
            SettingsError: Workers must stay the same, or there is no such address or policy.
        """
        options = {"--listen": self.listen, "--notice_s": self.notice_s, "--scale_policy": self.scaling}
        given = [name for name, value in options.items() if value is not None]
        if given and (obstacle := find_fixed(run := find_run()) or can_reform(run, 2)):
            raise SettingsError(
                f"{given[0]} must be given for a run whose workers may change, but {obstacle}; leave it out"
            )
        if self.listen is not None:
            ControlServer(*self.listen).close()
        if self.scaling is not None:
            self.scaling.find_policy()
