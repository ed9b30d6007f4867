"""A short run of the differential fuzzer: the same cases every time. `python -m fuzz.differential` is the long one."""

import pytest

pytest.importorskip("transformers")

from fuzz.differential import CASES, quiet, try_case


@pytest.mark.parametrize("kind", CASES)
def test_a_few_models_are_what_their_references_say(kind):
    quiet()
    for number in range(3):
        try_case(kind, number)
