"""A progress bar on standard error, where a terminal is there to show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..printable import printable


@contextmanager
def progress_bar(title: str, transient: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Gives advance(done, total). transient: the bar goes away at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=transient, disable=not console.is_terminal) as progress:
        task = progress.add_task(printable(title), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
