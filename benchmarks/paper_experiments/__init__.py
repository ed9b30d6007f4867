"""The experiments of papers.py, in the order of docs/papers.md."""

from .clock import CLOCK
from .exits import EXITS_AND_LENGTHS
from .experiment import Claim, Experiment
from .lengths import LENGTHS
from .lossless import LOSSLESS
from .stages import STAGES
from .waste import WASTE

EXPERIMENTS = (LOSSLESS, WASTE, LENGTHS, EXITS_AND_LENGTHS, CLOCK, STAGES)  # the shortest first

__all__ = ["EXPERIMENTS", "Claim", "Experiment"]
