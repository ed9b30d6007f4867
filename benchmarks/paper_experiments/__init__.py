"""The experiments of papers.py, the shortest first."""

from .clock import CLOCK
from .experiment import Experiment
from .lossless import LOSSLESS
from .prompts import PROMPTS, PROMPTS_LARGE
from .real_ranks import RANKS

EXPERIMENTS = (LOSSLESS, PROMPTS, PROMPTS_LARGE, CLOCK, RANKS)

__all__ = ["EXPERIMENTS", "Experiment"]
