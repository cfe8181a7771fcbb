"""Progress on a terminal (bars with ETA and the current reward) and in a log (one line per epoch)."""

from __future__ import annotations

import time
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flowmill.configs.escaping import visible
from flowmill.configs.human_units import duration
from flowmill.flows.console import console, stderr
from flowmill.tasks.runs.progress import Silent


class Display(Silent):
    """A reporter that is opened and closed; it shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class Messages(Display):
    """Messages alone, such as alerts, on stderr: another program may read the output of this one."""

    def message(self, text: str) -> None:
        """Print a line."""
        stderr.print(text)


def display(*, quiet: bool, epochs: int) -> Display:
    """Return bars on a terminal, lines elsewhere, and no output when quiet."""
    if quiet:
        return Display()
    return Bars(epochs) if console.is_terminal else Lines(epochs)


class Bars(Display):
    """Two bars: epochs, with the time left and the rollouts' reward, and the current stage."""

    def __init__(self, epochs: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console,
            transient=True,
        )
        self._epochs: TaskID = self._progress.add_task("epochs", total=epochs, detail="")
        self._stage: TaskID = self._progress.add_task("starting", total=None, detail="")
        self._current: tuple[str, int, str] = ("", 0, "")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Move a bar."""
        detail = visible(detail)
        if stage in ("pipeline", "found"):
            self._progress.update(self._epochs, completed=done, detail=detail)
        elif stage == "score":
            self._progress.update(self._epochs, detail=f"reward {detail}")
        else:
            current = (stage, epoch, detail if stage in ("base", "evaluate") else "")
            if current != self._current:
                self._progress.reset(self._stage, total=total, description=stage)
                self._current = current
            self._progress.update(self._stage, completed=done, total=total, detail=detail)

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text)


class Lines(Display):
    """One line per epoch and per long stage, for logs; epochs that were already committed share one line."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._begun = time.monotonic()
        self._first_epoch: tuple[int, float] | None = None
        self._last_epoch = 0
        self._said: set[tuple[str, int, str]] = set()
        self._reused_epochs: list[int] = []

    def __exit__(self, *error: object) -> None:
        self._say_found()

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Print a line when an epoch, the base model or an evaluation is done."""
        if stage in ("pipeline", "found"):
            self._ended(done)
        if stage == "found":
            self._reused_epochs.append(done)
            return
        if stage == "pipeline":
            self.message(f"epoch {done}/{total}  {detail}  {self._left(done, total)}")
        elif stage in ("base", "evaluate") and done == total and (stage, epoch, detail) not in self._said:
            self._said.add((stage, epoch, detail))
            self.message(f"{stage}: {detail} done" if epoch == 0 else f"epoch {epoch} {stage}: {detail} done")

    def message(self, text: str) -> None:
        """Print a line with the time since the start."""
        self._say_found()
        self._print(text)

    def _say_found(self) -> None:
        if self._reused_epochs:
            first, last = self._reused_epochs[0], self._reused_epochs[-1]
            self._reused_epochs = []
            which = f"epoch {first} was" if first == last else f"epochs {first} to {last} were"
            self._print(f"{which} found committed: not trained again")

    def _print(self, text: str) -> None:
        console.print(f"{time.monotonic() - self._begun:8.1f} s  {text}")

    def _ended(self, done: int) -> None:
        """Note an epoch; the next variant of a sweep begins again."""
        self._said.clear()
        if done <= self._last_epoch:
            self._first_epoch = None
        self._last_epoch = done

    def _left(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self._first_epoch is None:
            self._first_epoch = (done, now)
            return ""
        first, since = self._first_epoch
        return f"{duration((now - since) / max(done - first, 1) * (total - done))} left"
