"""How tokens are shown on a terminal, by what became of their drafts."""

from rich.console import Console

STYLES = {"accepted": "green", "copied": "yellow", "sibling": "blue", "corrected": "red", "bonus": "cyan", "plain": ""}
DRAFT = "magenta italic"
_WITHOUT_COLOUR = {
    "accepted": "underline",
    "copied": "italic underline",
    "sibling": "bold underline",
    "corrected": "bold",
    "bonus": "bold italic",
    "plain": "",
}


def styles_of(console: Console) -> dict[str, str]:
    """The styles by origin; where there are no colours (NO_COLOR), such as differ without them."""
    return _WITHOUT_COLOUR if console.no_color else STYLES
