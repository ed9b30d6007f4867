"""How far a prompt is, until the answer begins."""

from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

DELAY = 1.0  # seconds: most prompts take less


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
            from .progress import progress_bar  # with rich, which takes longer to import than most prompts

            self._advance = self._bar.enter_context(progress_bar("prompt", transient=True))
        if self._advance is not None:
            self._advance(done, total)
