"""From committed ids to text: stop strings, cut and held back as needed."""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """`models.tokenizer.IncrementalDecoder`, or a toy in the tests."""

    def push(self, id: int) -> str: ...


class StopStrings:
    """Passes text on, except what may still turn out to be the beginning of a stop string.

    `stop` becomes the stop string that is complete; the text before it has been passed on, and nothing after it.
    Of several the one that is complete first counts, and of those that end at the same character the longest: so it
    does not matter how the text is cut into tokens, or in which order the strings are given.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str], least: int = 0) -> None:
        """least: tokens before the first that may complete a stop string."""
        self._decoder, self._stop, self._least = decoder, tuple(stop), least
        self._held, self._pushed = "", 0
        self.stop: str | None = None

    @property
    def found(self) -> bool:
        return self.stop is not None

    def push(self, id: int) -> str:
        """The text that the token `id` makes certain."""
        self._pushed += 1
        return self._pass_on(self._decoder.push(id))

    def flush(self) -> str:
        """At the end of the answer: what was held back, without a last character that is not whole."""
        text, self._held = self._held, ""
        return text

    def _pass_on(self, piece: str) -> str:
        if not self._stop:
            return piece
        text, self._held = self._held + piece, ""
        found = [(place + len(stop), place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found and self._pushed > self._least:
            _, place, self.stop = min(found)
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
