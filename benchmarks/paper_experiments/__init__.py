"""The experiments of papers.py, in the order of docs/papers.md."""

from .experiment import Claim, Experiment
from .lengths import LENGTHS
from .lossless import LOSSLESS
from .stages import STAGES
from .waste import WASTE

EXPERIMENTS = (LOSSLESS, WASTE, LENGTHS, STAGES)  # the shortest first

__all__ = ["EXPERIMENTS", "Claim", "Experiment"]
