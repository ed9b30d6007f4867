"""The experiments of papers.py, in the order of docs/papers.md."""

from .branches import BRANCHES
from .clock import CLOCK
from .denominators import DENOMINATORS
from .devices import DEVICES
from .eesd_head import EESD_HEAD
from .engines import ENGINES
from .exits import EXITS_AND_LENGTHS
from .experiment import Claim, Experiment
from .heads import HEADS
from .lengths import LENGTHS
from .long_answers import LONG_ANSWERS
from .lossless import LOSSLESS
from .prompts import PROMPTS, PROMPTS_LARGE
from .real_ranks import RANKS
from .rivals import RIVAL_RULES
from .sensitivity import SENSITIVITY
from .siblings import SIBLINGS
from .stages import STAGES
from .thompson import THOMPSON
from .ticks import TICKS
from .trees import TREES
from .vanilla import VANILLA
from .waste import WASTE

# The shortest first.
EXPERIMENTS = (
    LOSSLESS, ENGINES, TICKS, WASTE, DEVICES, BRANCHES, SIBLINGS, TREES, LENGTHS, THOMPSON, RIVAL_RULES, DENOMINATORS,
    VANILLA, SENSITIVITY, PROMPTS, PROMPTS_LARGE, EXITS_AND_LENGTHS, CLOCK, STAGES, LONG_ANSWERS,
    EESD_HEAD, RANKS, HEADS,
)  # fmt: skip

__all__ = ["EXPERIMENTS", "Claim", "Experiment"]
