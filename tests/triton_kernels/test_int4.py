"""int4 on the device: weights near its levels, and the permutations of bytes that make levels of codes."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import make

from ppsd_rt.triton_kernels import int4
from ppsd_rt.triton_kernels.linear import quantise_int4


@pytest.mark.parametrize("inputs", [32, 96, 128, 576])
def test_weights_go_to_the_nearest_levels(inputs):
    weight = 0.02 * make(48, inputs)
    weight[3] = 0.0
    weight[5] *= 1e8  # scales that float16 does not hold
    weight[7, :32] = torch.tensor(int4.LEVELS).repeat(2) * -(2.0**-9)
    packed = quantise_int4(weight)
    assert packed.inputs == inputs
    assert packed.values.shape == (48, -(-inputs // 128) * 16)
    blocks, wide = weight.cpu().view(48, -1, 32), packed.wide().cpu().view(48, -1, 32)
    scales = packed.scales.view(torch.float16).float().view(48, -1)[:, : inputs // 32, None, None].cpu()
    nearest = (scales * torch.tensor(int4.LEVELS) - blocks.unsqueeze(-1)).abs().min(-1).values
    assert ((wide - blocks).abs() <= nearest + 1e-6 * blocks.abs()).all()
    assert (wide - blocks)[:3].square().sum() < 0.01 * blocks[:3].square().sum()
    assert torch.equal(packed.wide()[7, :32], weight[7, :32]), "what levels can say they say exactly"
    assert torch.equal(packed.rows(torch.tensor([9, 2])).wide(), packed.wide()[[9, 2]])


def test_errors_go_where_inputs_matter_least():
    weight, importance = make(64, 256), torch.full((256,), 0.01)
    importance[3::16] = 1.0
    errors = [((quantise_int4(weight, of).wide() - weight).square() * importance).sum() for of in (importance, None)]
    assert errors[0] < 0.9 * errors[1]


def test_the_assembly_makes_levels_of_codes():
    """Its instructions, as the PTX manual describes them, on every code in every place."""
    dice = np.random.default_rng(0)
    words = [*(0x11111111 * code for code in range(16)), *dice.integers(0, 2**32, 200).tolist()]
    for word in words:
        registers = {"$4": word} | {f"${5 + i}": int4.TABLES[2 * i] & 0xFFFFFFFF for i in range(4)}
        run(int4.ASSEMBLY, registers)
        pairs = np.array([registers[f"${i}"] for i in range(4)], np.uint32).view(np.uint16)
        found = (pairs.astype(np.uint32) << 16).view(np.float32)
        assert found.tolist() == [int4.CODED[word >> 4 * i & 15] for i in range(8)]


def run(assembly, registers):
    def value(name):
        return registers[name] if name in registers else int(name, 0) & 0xFFFFFFFF

    for line in assembly.strip("{}").split(";"):
        operation, *names = re.split(r",?\s+", line.strip())
        if operation in ("", ".reg"):
            continue
        result, sources = names[0], [value(name) for name in names[1:]]
        if operation == "prmt.b32":
            registers[result] = permuted(*sources)
        elif operation == "xor.b32":
            registers[result] = sources[0] ^ sources[1]
        elif operation == "shr.u32":
            registers[result] = sources[0] >> sources[1]
        else:
            assert operation == "mov.b32"
            registers[result] = sources[0]


def permuted(a, b, selector):
    """prmt: of eight bytes those that the lowest four fields of four bits name; with a field's highest bit its sign."""
    eight, result = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], 0
    for place in range(4):
        field = selector >> 4 * place & 15
        byte = eight[field & 7]
        result |= ((0xFF if byte >= 128 else 0) if field & 8 else byte) << 8 * place
    return result
