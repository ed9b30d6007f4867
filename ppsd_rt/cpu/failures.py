"""What the C++ extension says where it fails, as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _native
from ..errors import PpsdError


@contextmanager
def one_line(what: str, threads: int, mend: str = "free some, or choose a smaller --dtype") -> Iterator[None]:
    """PpsdError for what the extension says, or lacks to `what`; mend: what helps against a lack of memory."""
    try:
        yield
    except MemoryError:
        raise PpsdError(f"not enough memory to {what}: {mend}") from None
    except _native.NoThread as error:
        raise PpsdError(f"cannot {what} with {threads} threads: {error}") from None
    except RuntimeError as error:
        raise PpsdError(f"cannot {what}: {error}") from None
