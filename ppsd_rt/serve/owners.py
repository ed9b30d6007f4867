"""Whose texts an answer may copy drafts from, and what its client may see of them: decided here and nowhere else.

docs/design/trust.md says why.
"""

import hashlib
from ipaddress import ip_address

from ..backend import RunOptions
from ..generation import Completion
from .settings import Settings


class Owners:
    def __init__(self, settings: Settings, secret: bytes) -> None:
        self._memory, self._secret = settings.memory, secret
        self._one_person = is_loopback(settings.host)

    def options(self, key: str, user: str | None, stored: bool, shows_drafts: bool) -> RunOptions:
        """Of a request. key: that it has brought; empty: none is asked for. stored: false where it says `store: false`.

        What a reply shows of its drafts would show the texts that they are copied from. Such an answer has no memory.
        """
        known = bool(key or user or self._one_person)
        alone = self._memory == "off" or not stored or shows_drafts or not (known or self._memory == "shared")
        owner = None if alone else self._number(key, user or "")
        return RunOptions(report_drafts=shows_drafts, owner=owner, shared=self._memory == "shared", kept=stored)

    def _number(self, key: str, user: str) -> int:
        """Nobody who lacks the secret knows it. Odd: no number that a program would choose for itself."""
        texts = (text.encode(errors="surrogatepass") for text in (key, user))
        name = b"".join(len(text).to_bytes(8, "big") + text for text in texts)
        return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=self._secret).digest(), "big") | 1

    @property
    def tells_counts(self) -> bool:
        """Where memory is shared, counts of drafts would tell whether somebody else's text goes on as a guess does."""
        return self._memory != "shared"

    def counts(self, completion: Completion) -> tuple[int, int]:
        """(accepted, rejected) drafts that a client may hear of: the exit head's, and copies from the text at hand."""
        s = completion.statistics
        if not self.tells_counts:
            return 0, 0
        accepted = s.accepted + s.copied_accepted - s.recycled_accepted
        return accepted, s.judged + s.copied_judged - s.recycled_judged - accepted


def is_loopback(host: str | None) -> bool:
    """May this machine alone connect to a server that listens there? None: who listens is not known."""
    try:
        return host == "localhost" or (bool(host) and ip_address(str(host)).is_loopback)
    except ValueError:
        return False
