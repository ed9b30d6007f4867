"""The experiments of papers.py, in the order of docs/papers.md."""

from .clock import CLOCK
from .denominators import DENOMINATORS
from .devices import DEVICES
from .engines import ENGINES
from .experiment import Experiment
from .lengths import LENGTHS
from .long_answers import LONG_ANSWERS
from .lossless import LOSSLESS
from .prompts import PROMPTS, PROMPTS_LARGE
from .real_ranks import RANKS
from .sensitivity import SENSITIVITY
from .siblings import SIBLINGS
from .stages import STAGES
from .waste import WASTE

# The shortest first.
EXPERIMENTS = (
    LOSSLESS, ENGINES, WASTE, DEVICES, SIBLINGS, LENGTHS, DENOMINATORS, SENSITIVITY, PROMPTS, PROMPTS_LARGE, CLOCK,
    STAGES, LONG_ANSWERS, RANKS,
)  # fmt: skip

__all__ = ["EXPERIMENTS", "Experiment"]
