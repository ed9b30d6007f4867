"""Files that an experiment needs and nobody may ship with it: their places are in variables of the environment."""

import os
from pathlib import Path


class NotGiven(SystemExit):
    """One line that says what to set."""


def given(variable: str, what: str) -> Path:
    """Where it is, by its variable."""
    place = os.environ.get(variable, "")
    if not place or not Path(place).exists():
        raise NotGiven(f"papers.py: set {variable} to {what}" + (f": {place} is not there" if place else ""))
    return Path(place)
