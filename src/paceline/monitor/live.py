"""The live view of a run in a terminal."""

import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from paceline.monitor.events import (
    AnomalyFound,
    BudgetSpent,
    CheckpointSkipped,
    Evaluated,
    Event,
    Failed,
    Preempted,
    Record,
    ReplicasHealed,
    ResourceLow,
    ResourcesUsed,
    Restarted,
    RolledBack,
    RunFinished,
    RunStarted,
    Showcased,
    SlowWorker,
    StepFinished,
    StoppedEarly,
    UnusedParameters,
    Warned,
)
from paceline.monitor.formatting import describe, describe_failure, duration, number, one_line, printable, share
from paceline.monitor.reader import follow
from paceline.monitor.usage import J_PER_KWH

_STYLES: dict[type[Event], str] = {
    RunStarted: "bold",
    CheckpointSkipped: "yellow",
    SlowWorker: "yellow",
    AnomalyFound: "yellow",
    RolledBack: "bold yellow",
    ReplicasHealed: "bold yellow",
    ResourceLow: "bold yellow",
    UnusedParameters: "yellow",
    Warned: "yellow",
    Restarted: "bold yellow",
    Preempted: "bold yellow",
    BudgetSpent: "bold yellow",
    StoppedEarly: "bold",
    Failed: "bold red",
    RunFinished: "bold green",
}


class LiveView:
    """Shows records as they come: a progress bar in a terminal, and a line for each important event.

    If the output is not a terminal (a file, a pipe, a dumb terminal) there are only the lines. Texts from the run
    are shown literally, never as rich's markup, and with control characters escaped.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._status = _Status()
        self._live: Live | None = None
        self._showcase: str | None = None
        self._failures = _Failures()
        self._warned: set[tuple[str, int]] = set()
        """Warnings that were shown, each with its step: every worker has its own of most."""

    def run(self, path: str | os.PathLike[str], stop: threading.Event, offset: int = 0) -> None:
        """Show the log at `path` from byte `offset` on as it grows, until `stop` is set."""
        with contextlib.suppress(OSError):  # the terminal was closed, or the reader of the pipe is gone
            for record in follow(path, stop, offset=offset, on_pause=self._show_failures_if_due):
                self.show(record)
            self.close()

    @contextlib.contextmanager
    def following(self, path: Path) -> Iterator[None]:
        """While active, show additions to the log at `path` from a thread, without its earlier contents."""
        path.touch()
        stop = threading.Event()
        thread = threading.Thread(target=self.run, args=(path, stop, path.stat().st_size), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=10)

    def show(self, record: Record) -> None:
        """Show one record."""
        event = record.event
        self._status.take(record)
        if isinstance(event, Warned):
            if (event.message, record.step) in self._warned:
                return
            self._warned.add((event.message, record.step))
        if isinstance(event, RunFinished | Failed | Preempted | BudgetSpent):
            self._drop_bar()
        if isinstance(event, Failed) and record.rank >= 0:
            self._failures.take(event, record.rank, record.step)
            return
        line = describe(record)
        if line is not None:
            self._show_failures()
            self._print(line, type(event))
        if isinstance(event, RunStarted):
            self._failures.forget()
            self._open()
        self._show_showcase(event)

    def close(self) -> None:
        """Show held failures, and remove the bar; printed lines stay."""
        self._drop_bar()
        self._show_failures()

    def _print(self, line: str, kind: type[Event]) -> None:
        text = one_line(printable(line, self._console.encoding))
        self._console.print(Text(text, style=_STYLES.get(kind, "")), soft_wrap=True)

    def _show_failures(self) -> None:
        for line in self._failures.release():
            self._print(line, Failed)

    def _show_failures_if_due(self) -> None:
        if self._failures.are_due:
            self._show_failures()

    def _drop_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        if self._live is None and self._console.is_terminal:
            self._live = Live(self._status, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()

    def _show_showcase(self, event: Event) -> None:
        """Show the showcase when the run is over, whichever of the two came first."""
        if isinstance(event, RunStarted):
            self._showcase = None
        elif isinstance(event, Showcased):
            self._showcase = event.text
        if self._showcase is None or not self._status.finished:
            return
        text = Text(printable(self._showcase, self._console.encoding))
        if self._console.is_terminal:
            self._console.print(Panel(text, title="what it does now", title_align="left", border_style="dim"))
        else:
            self._console.print(Text("    ") + Text("\n    ").join(text.split("\n")), soft_wrap=True)
        self._showcase = None


class _Failures:
    """Failures of workers, held back for a moment: an error of several workers is then shown once, with their ranks."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, str], tuple[Failed, list[int], int]] = {}
        self._shown: set[tuple[str, str, str]] = set()
        self._due_s = 0.0

    def take(self, event: Failed, rank: int, step: int) -> None:
        """Hold a failure, unless an equal one was shown already."""
        key = (event.error, event.message, event.place)
        if not self._held:
            self._due_s = time.monotonic() + 1.0
        if key not in self._shown:
            self._held.setdefault(key, (event, [], step))[1].append(rank)

    @property
    def are_due(self) -> bool:
        """Whether the first failure has been held for long enough."""
        return bool(self._held) and time.monotonic() >= self._due_s

    def release(self) -> list[str]:
        """Return a line for each held failure, and hold none; where one quotes another, its kind alone is quoted."""
        held, self._held = self._held, {}
        self._shown |= held.keys()
        quotes = {f"{error}: {message}": error for error, message, _ in self._shown if message}
        lines = []
        for event, ranks, step in held.values():
            message = event.message
            for quote, error in quotes.items():
                message = message.replace(quote, error)
            lines.append(describe_failure(dataclasses.replace(event, message=message), sorted(ranks), step))
        return lines

    def forget(self) -> None:
        """Forget the failures that were shown: the workers have started again."""
        self._shown.clear()


class _Status:
    """The two live lines: a progress bar, and the latest numbers."""

    def __init__(self) -> None:
        self.finished = False
        self._step = 0
        self._total_steps = 0
        self._loss: float | None = None
        self._held_out_loss: float | None = None
        self._energy_j = self._money = 0.0
        self._currency = ""
        self._recent: deque[tuple[float, StepFinished]] = deque(maxlen=100)  # (time_s, step)

    def take(self, record: Record) -> None:
        """Update the numbers from a record."""
        match record.event:
            case RunStarted() as event:
                self.finished = False
                self._step, self._total_steps = event.start_step, event.total_steps
                self._loss = None
                self._recent.clear()  # another process's clock may start elsewhere
            case StepFinished() as event:
                self._step = record.step
                self._loss = _smooth(self._loss, event.loss)
                self._recent.append((record.time_s, event))
            case ResourcesUsed() as event:
                self._energy_j += event.energy_j
                self._money, self._currency = self._money + (event.money or 0.0), event.currency
            case Evaluated(loss=loss):
                self._held_out_loss = loss
            case RunFinished():
                self.finished = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(1, options.max_width - 1)  # a full last column makes some terminals wrap
        for line in (self._bar(width, ascii_only=options.ascii_only), self._numbers(width)):
            line.truncate(width)
            line.no_wrap = True
            yield line

    def _bar(self, width: int, ascii_only: bool) -> Text:
        done = min(1.0, max(0.0, self._step / self._total_steps)) if self._total_steps > 0 else 0.0
        left = f"step {self._step:,}/{self._total_steps:,} "
        right = f" {share(done)}{self._remaining()}"
        bar_width = width - len(left) - len(right)
        if bar_width < 5:
            return Text(left.strip() + right)
        num_full = round(done * bar_width)
        full, empty = ("#", "-") if ascii_only else ("━", "─")
        return Text.assemble(left, (full * num_full, "green"), (empty * (bar_width - num_full), "dim"), right)

    def _numbers(self, width: int) -> Text:
        steps = [step for _, step in list(self._recent)]  # a copy: the bar is drawn by another thread
        if self._loss is None or not steps:
            return Text("waiting for the first step", style="dim")
        parts = [f"loss {number(self._loss)}"]
        if self._held_out_loss is not None:
            parts.append(f"held-out {number(self._held_out_loss)}")
        duration_s = sum(step.duration_s for step in steps)
        if duration_s > 0:
            parts.append(f"{number(sum(step.num_samples for step in steps) / duration_s)} samples/s")
            parts.append(f"communication {share(sum(step.communication_s for step in steps) / duration_s)}")
        parts += [f"{number(self._energy_j / J_PER_KWH)} kWh"] if self._energy_j else []
        parts += [f"{number(self._money)} {self._currency}"] if self._money else []
        while len(parts) > 1 and len("   ".join(parts)) > width:
            parts.pop()
        return Text("   ".join(parts), style="" if isfinite(self._loss) else "red")

    def _remaining(self) -> str:
        times_s = [time_s for time_s, _ in list(self._recent)]
        if len(times_s) < 2 or self._step >= self._total_steps:
            return ""
        step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        return f", {duration(step_s * (self._total_steps - self._step))} left"


def _smooth(previous: float | None, loss: float, keep: float = 0.9) -> float:
    """Return the moving average; a non-finite loss is shown at once, and forgotten with the next."""
    if previous is None or not isfinite(previous) or not isfinite(loss):
        return loss
    return keep * previous + (1 - keep) * loss
