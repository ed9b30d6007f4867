"""Packages that come with the extras of pyproject.toml only."""

from importlib.util import find_spec

from .errors import PpsdError


def is_there(package: str) -> bool:
    """Without importing it."""
    return find_spec(package) is not None


def need(package: str, extra: str, what: str) -> None:
    """Raises PpsdError where the package, which `what` needs and the extra brings, is not installed."""
    if not is_there(package):
        raise PpsdError(f'{what} needs {package}: pip install "ppsd-rt[{extra}]"')
