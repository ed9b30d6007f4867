"""The experiments of papers.py, in the order of docs/papers.md."""

from .branches import BRANCHES
from .clock import CLOCK
from .exits import EXITS_AND_LENGTHS
from .experiment import Claim, Experiment
from .heads import HEADS
from .lengths import LENGTHS
from .lossless import LOSSLESS
from .real_ranks import RANKS
from .siblings import SIBLINGS
from .stages import STAGES
from .trees import TREES
from .waste import WASTE

# The shortest first.
EXPERIMENTS = (LOSSLESS, WASTE, BRANCHES, SIBLINGS, TREES, LENGTHS, EXITS_AND_LENGTHS, CLOCK, STAGES, RANKS, HEADS)

__all__ = ["EXPERIMENTS", "Claim", "Experiment"]
