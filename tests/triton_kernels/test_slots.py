"""Many texts side by side, each at its own length, against torch's attention of each text alone."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import torch.nn.functional as F
from kernel_support import DEVICE, close, make

from ppsd_rt.triton_kernels.slots import TILE, attend_slots

CAPACITY = 2 * TILE + 40


def rotated(x, cos, sin, position):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos[position] - b * sin[position], b * cos[position] + a * sin[position]), dim=-1)


@pytest.mark.parametrize(("rotary", "window"), [(True, None), (False, None), (True, 1), (True, TILE + 3)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (2, 2, 16), (3, 1, 48), (20, 1, 64)])
def test_each_text_is_attended_to_as_if_alone(heads, kv_heads, head_dim, rotary, window):
    positions = torch.tensor([0, 3, TILE - 1, TILE, 2 * TILE + 5, CAPACITY - 1], device=DEVICE)
    slots = len(positions)
    q, k, v = (make(slots, count, head_dim, seed=n) for n, count in enumerate((heads, kv_heads, kv_heads)))
    keys, values = (make(slots, kv_heads, CAPACITY, head_dim, seed=n) for n in (3, 4))
    cos, sin = (make(CAPACITY, head_dim // 2, seed=n) for n in (5, 6))
    expected = []
    new_keys, new_values = keys.clone(), values.clone()
    for slot, position in enumerate(positions.tolist()):
        keys[slot, :, position:], values[slot, :, position:] = torch.nan, torch.nan  # it must not read these
        new_keys[slot, :, position:], new_values[slot, :, position:] = torch.nan, torch.nan
        new_keys[slot, :, position] = rotated(k[slot], cos, sin, position) if rotary else k[slot]
        new_values[slot, :, position] = v[slot]
        query = rotated(q[slot], cos, sin, position) if rotary else q[slot]
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        its = new_keys[None, slot, :, seen], new_values[None, slot, :, seen]
        expected.append(F.scaled_dot_product_attention(query[None, :, None], *its, enable_gqa=True)[0, :, 0])
    got = attend_slots(q, k, v, keys, values, positions, cos, sin, rotary=rotary, window=window)
    close(got, torch.stack(expected))
    for cache, new in ((keys, new_keys), (values, new_values)):
        torch.testing.assert_close(cache, new, equal_nan=True)
