"""int4 on the device: the CPU's rounding, and the instructions that make numbers of codes."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import make

from ppsd_rt import _native
from ppsd_rt.triton_kernels import int4
from ppsd_rt.triton_kernels.linear import quantise_int4


@pytest.mark.parametrize("inputs", [32, 96, 128, 576])
def test_weights_are_rounded_as_on_the_cpu(inputs):
    weight = 0.02 * make(48, inputs).cpu()
    weight[3] = 0.0
    weight[5] = 0.125
    weight[7, :32] = torch.arange(16).repeat(2) * 2.0**-9 - 3 * 2.0**-9
    packed = quantise_int4(weight)
    assert packed.inputs == inputs
    assert packed.values.shape == (48, -(-inputs // 128) * 16)
    assert packed.scales.shape == (48, -(-inputs // 128) * 4)
    ours, its = packed.wide(), torch.from_numpy(_native.testing.packed(weight.numpy(), "int4"))
    assert (ours == its).float().mean() > 0.99, "sums in another order may choose another line"
    errors = [(each - weight).square().sum() for each in (ours, its)]
    assert errors[0] < 1.001 * errors[1]
    assert errors[0] < 0.006 * weight.square().sum()
    for row in (3, 5, 7):
        assert torch.equal(ours[row, :32], weight[row, :32]), "what a line can say it says exactly"
    assert torch.equal(packed.rows(torch.tensor([9, 2])).wide(), ours[[9, 2]])


def test_codes_come_back():
    codes = torch.from_numpy(np.random.default_rng(1).integers(0, 16, (5, 160)).astype(np.int32))
    scale, minimum = (torch.rand(5, 5).to(torch.float16) for _ in range(2))
    expected = codes.view(5, 5, 32) * scale.float()[:, :, None] - minimum.float()[:, :, None]
    assert torch.equal(int4.unpacked(*int4.of_codes(codes, scale, minimum), 160), expected.view(5, 160))


def test_errors_go_where_inputs_matter_least():
    weight, importance = make(64, 256), torch.full((256,), 0.01)
    importance[3::16] = 1.0
    errors = [((quantise_int4(weight, of).wide() - weight).square() * importance).sum() for of in (importance, None)]
    assert errors[0] < 0.9 * errors[1]


def test_the_assembly_makes_numbers_of_codes():
    """Its instructions, as the PTX manual describes them, on every code in every place."""
    dice = np.random.default_rng(0)
    words = [*(0x11111111 * code for code in range(16)), *dice.integers(0, 2**32, 200).tolist()]
    for word in words:
        registers = {"$4": word}
        run(int4.ASSEMBLY, registers)
        pairs = np.array([registers[f"${i}"] for i in range(4)], np.uint32).view(np.uint16)
        found = (pairs.astype(np.uint32) << 16).view(np.float32)
        assert found.tolist() == [128 + (word >> place & 15) for place in int4.PLACES]


def run(assembly, registers):
    def value(name):
        return registers[name] if name in registers else int(name, 0) & 0xFFFFFFFF

    for line in assembly.strip("{}").split(";"):
        operation, *names = re.split(r",?\s+", line.strip())
        if operation in ("", ".reg"):
            continue
        result, sources = names[0], [value(name) for name in names[1:]]
        if operation == "and.b32":
            registers[result] = sources[0] & sources[1]
        elif operation == "or.b32":
            registers[result] = sources[0] | sources[1]
        elif operation == "shr.u32":
            registers[result] = sources[0] >> sources[1]
        else:
            assert operation == "mov.b32"
            registers[result] = sources[0]
