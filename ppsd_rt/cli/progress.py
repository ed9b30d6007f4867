"""Progress bars on standard error, where a terminal is there to show them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from time import monotonic

from ..printable import printable

DELAY = 0.5  # seconds: most prompts take less


@contextmanager
def progress_bar(title: str, transient: bool = False) -> Iterator[Callable[..., None]]:
    """Gives advance(done, total, title, figures after the bar). transient: the bar goes away at the end."""
    from rich.console import Console  # which takes longer to import than most prompts
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=transient, disable=not console.is_terminal) as progress:
        task = progress.add_task(printable(title), total=None, figures="")

        def advance(done: int, total: int, title: str = title, figures: str = "") -> None:
            progress.update(task, description=printable(title), completed=done, total=total, figures=figures)

        yield advance


@contextmanager
def loading_bar(bytes: int, over: Callable[[Event], bool] = lambda ended: ended.wait(DELAY)) -> Iterator[None]:
    """A bar on standard error once loading weights has taken DELAY. over: waits for so long; has it ended by then?"""
    ended = Event()

    def show() -> None:
        if over(ended):
            return
        with progress_bar(f"loading {bytes / 1e9:.1f} GB" if bytes >= 1e9 else f"loading {bytes / 1e6:.0f} MB", True):
            ended.wait()

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class PromptBar:
    """A `RunOptions.prompt_progress` that shows a bar on standard error once a prompt has taken DELAY.

    shown: is there anybody to show it to? now: seconds by any clock. rows: done, and to do, as of the last call before
    all were done.
    """

    def __init__(self, now: Callable[[], float] = monotonic, shown: bool = True) -> None:
        self._now, self._begun, self._shown = now, now(), shown
        self.rows = (0, 0)
        self._bar = ExitStack()
        self._advance: Callable[[int, int], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self._bar.close()
            return
        self.rows = done, total
        if not self._shown:
            return
        if self._advance is None and self._now() - self._begun >= DELAY:
            self._advance = self._bar.enter_context(progress_bar(f"reading {total:,} tokens", transient=True))
        if self._advance is not None:
            self._advance(done, total)
