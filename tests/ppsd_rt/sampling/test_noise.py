"""Philox against published answers; the distributions against theory."""

import numpy as np
import pytest
import scipy
from noise_twin import gumbel, philox, uniform

# Known answers of philox4x32-10 in the Random123 distribution (kat_vectors): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(counter, key, output):
    assert philox(key, counter) == output
    first, *rest = counter
    words = philox(key, (np.array([first, 1], np.uint64), *rest))
    assert tuple(int(word[0]) for word in words) == output


def test_a_number_depends_on_its_place_alone():
    ids = np.arange(5000)
    whole = uniform(42, 17, ids)
    some = np.array([4999, 3, 77])
    assert np.array_equal(uniform(42, 17, some), whole[some])
    assert not np.array_equal(uniform(43, 17, ids), whole)
    assert not np.array_equal(uniform(42, 18, ids), whole)
    assert not np.array_equal(uniform(42, 17, ids, stream=1), whole)
    assert not np.array_equal(uniform(42 + 2**32, 17, ids), whole)


def test_uniform_and_gumbel_are_distributed_as_they_say():
    ids = np.arange(200_000)
    numbers = uniform(5, 0, ids)
    assert numbers.dtype == np.float32
    assert 0 < numbers.min() < 1e-4
    assert numbers.max() < 1
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert scipy.stats.kstest(gumbel(5, 1, ids), "gumbel_r").pvalue > 1e-3
    across = np.concatenate([uniform(9, position, ids[:1]) for position in range(3000)])
    assert scipy.stats.kstest(across, "uniform").pvalue > 1e-3
