"""Stop strings: found wherever the token borders fall, and never printed, not even in part."""

from hypothesis import given
from hypothesis import strategies as st

from ppsd_rt.generation import StopStrings


class Pieces:
    """A decoder whose ids are indices into a list of pieces."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, id):
        return self.pieces[id]


def play(pieces, stop):
    """(what each token printed, what the flush printed, found)."""
    text = StopStrings(Pieces(pieces), stop)
    printed = []
    for id in range(len(pieces)):
        printed.append(text.push(id))
        if text.found:
            break
    return printed, text.flush(), text.found


def test_held_back_text_is_released_when_it_turns_out_harmless():
    printed, rest, found = play(["a E", "N", "ough", " E"], ("END",))
    assert printed == ["a ", "", "ENough", " "]
    assert (rest, found) == ("E", False)


def test_none_counts_among_the_first_tokens():
    text = StopStrings(Pieces(["a.", "b.", "c", ".d"]), (".", "c.d"), 2)
    assert [text.push(id) for id in range(3)] == ["a.", "b.", ""]
    assert text.push(3) == "c" and text.found


@given(
    st.lists(st.text(alphabet="ab<>", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=3),
)
def test_equals_cutting_the_whole_text(pieces, stop):
    printed, rest, found = play(pieces, stop)
    # The stop string that is complete first decides, character by character; of several, the one that begins first.
    whole, expected = "".join(pieces), None
    for end in range(1, len(whole) + 1):
        places = [end - len(s) for s in stop if whole[:end].endswith(s)]
        if places:
            expected = whole[: min(places)]
            break
    assert found == (expected is not None)
    assert "".join(printed) + rest == ("".join(pieces) if expected is None else expected)
