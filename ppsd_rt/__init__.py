"""ppsd-rt: Llama-family models that draft from their own early layers, with exactly the output of plain decoding."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .async_generation import AsyncGeneration as AsyncGeneration
    from .backend import Oracle as Oracle
    from .backend import RunOptions as RunOptions
    from .engine import Engine as Engine
    from .errors import PpsdError as PpsdError
    from .errors import UsageError as UsageError
    from .generation import Committed as Committed
    from .generation import Completion as Completion
    from .generation import Generation as Generation
    from .generation import Token as Token
    from .many import Generations as Generations
    from .pipeline.rounds import Drafted as Drafted
    from .pipeline.rounds import Logprob as Logprob
    from .pipeline.schedule import Schedule as Schedule
    from .sampling.grammar import Grammar as Grammar
    from .sampling.params import SamplingParams as SamplingParams
    from .stages import Stages as Stages

_HOMES = {
    "AsyncGeneration": "async_generation",
    "Committed": "generation",
    "Completion": "generation",
    "Drafted": "pipeline.rounds",
    "Engine": "engine",
    "Generation": "generation",
    "Generations": "many",
    "Grammar": "sampling.grammar",
    "Logprob": "pipeline.rounds",
    "Oracle": "backend",
    "PpsdError": "errors",
    "RunOptions": "backend",
    "SamplingParams": "sampling.params",
    "Schedule": "pipeline.schedule",
    "Stages": "stages",
    "Token": "generation",
    "UsageError": "errors",
}

__all__ = list(_HOMES)


def _folders() -> list[str]:
    """Where the modules of this package are.

    Python that is started in a checkout takes the checkout's own folder `ppsd_rt` for the package. Without a build in
    place that is not whole (see setup.py): then the package that is installed is meant.
    """
    built = find_spec(f"{__name__}._native") is not None
    if built and find_spec(f"{__name__}.models") is not None:
        return list(__path__)
    here = Path(__file__).resolve().parent
    if built:
        return [*__path__, str(here.parent)]
    for folder in sys.path:
        installed = Path(folder, __name__).resolve()
        if installed != here and (installed / "models" / "__init__.py").is_file():
            return [str(installed)]
    raise ImportError(f"{here} is not built, and ppsd-rt is not installed: run `pip install .` in {here.parent}")


__path__[:] = _folders()


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes a second, and `ppsd-run --help` does not need it."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
