"""The text that formats are evaluated on."""

from importlib.resources import files

from ..cli.common import given_text


def evaluation_text(path: str | None = None) -> str:
    """A text to measure with; None: the one that comes with the package."""
    if path is None:
        return (files("ppsd_rt") / "data" / "eval.txt").read_text(encoding="utf-8")
    return given_text(path)
