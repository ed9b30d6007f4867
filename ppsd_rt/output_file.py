"""Files that are written at the end of a command."""

from pathlib import Path

from .errors import PpsdError, UsageError


class OutputFile:
    """Opened at once, so that a bad path is told before hours of work; written and closed by `finish`.

    kind: what errors call it, as in `trace`.
    """

    def __init__(self, path: str | Path, kind: str) -> None:
        self._path, self._kind = path, kind
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed in finish)
        except OSError as error:
            raise UsageError(self._problem(error)) from None

    def finish(self, text: str) -> None:
        """PpsdError where it cannot be written."""
        try:
            with self._file as file:
                file.write(text)
        except OSError as error:
            raise PpsdError(self._problem(error)) from None

    def _problem(self, error: OSError) -> str:
        return f"cannot write the {self._kind} to {self._path}: {error.strerror}"
