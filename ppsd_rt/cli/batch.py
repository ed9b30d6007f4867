"""Answers to a file of prompts, side by side; they are printed in the order of the file, each when it is whole."""

from collections.abc import Callable, Sequence

from ..engine import Engine
from ..generation import Committed, Completion, Generation
from ..many import Generations
from . import signals
from .notes import complain


def answer_all(engine: Engine, asked: Sequence[Generation], show: Callable[[int, Completion], None]) -> bool:
    """show: prints the answer of this number. False when it was interrupted; those that had begun are printed too."""
    shown = 0
    generations = Generations(asked, engine.backend.concurrency)
    try:
        with generations:
            for number, event in generations.events():
                if number == shown and isinstance(event, Committed):
                    shown = _show_whole(asked, shown, show)
    except KeyboardInterrupt:
        for number in range(shown, len(asked)):
            if asked[number].completion.ids:
                show(number, asked[number].completion)
        left = sum(one.completion.finish_reason == "cancelled" for one in asked)
        complain(f"ppsd-run: {signals.said()}; {left} of {len(asked)} prompts are left")
        return False
    except BaseException:
        _show_whole(asked, shown, show)
        raise
    _show_whole(asked, shown, show)
    return True


def _show_whole(asked: Sequence[Generation], shown: int, show: Callable[[int, Completion], None]) -> int:
    """Those from `shown` on, up to one that has not ended -> its number."""
    while shown < len(asked) and asked[shown].completion.finish_reason != "cancelled":  # as it is until it has ended
        show(shown, asked[shown].completion)
        shown += 1
    return shown
