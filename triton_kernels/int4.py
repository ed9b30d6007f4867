"""int4 on a GPU: the CPU's, packed in the order in which matrix instructions take weights.

A weight is `scale * code - minimum`: a code from 0 to 15, and a float16 scale and minimum for its block of 32 inputs,
as in files with four bits, whose own are taken as they are.

    words  [outputs, groups of 128 inputs, 4 threads, 4 blocks]   int32: eight codes
    scales [outputs, groups of 128 inputs, 4 blocks]              int32: scale, minimum; zeros end a short last group

A thread takes a quarter of each block: inputs 32 b + 8 t to 32 b + 8 t + 7 of a group. So what a matrix instruction
adds up at once, four weights of each of four threads, is of one block.

The instruction multiplies `128 + code`, exact in bfloat16: the code's bits under the exponent of 128. What it has added
up for a block is multiplied by the scale, and the sum of the rows' own values, times `-(128 * scale + minimum)`, is
added. A second instruction, whose left operand is all ones, adds these up, in the same places. A block's sums are
float32 of at most 2^12 times its largest value: they lose far less than the rows did as they became bfloat16.

Input 2 i of a thread's eight has its code in the bits from 4 i on, input 2 i + 1 in those from 4 i + 16 on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # inputs that share a scale
GROUP = 128  # inputs that four threads load at once
PLACES = (0, 16, 4, 20, 8, 24, 12, 28)  # of the first bit of each of eight codes
STEPS, STARTS = (13.4, 14.2, 15.0, 15.8, 16.8, 18.0), (-0.4, 0.0, 0.4)  # of lines that are tried, as on the CPU

# $4: eight codes -> $0 to $3: two numbers 128 + code.
ASSEMBLY = (
    "{.reg .b32 codes; mov.b32 codes, $4;"
    + " shr.u32 codes, codes, 4;".join(
        f" and.b32 ${i}, codes, 0x000F000F; or.b32 ${i}, ${i}, 0x43004300;" for i in range(4)
    )
    + "}"
)
_ASSEMBLY = tl.constexpr(ASSEMBLY)


@triton.jit
def levels_of(words, DOT: tl.constexpr):
    """int32 [...] -> 128 + code [..., 2, 2, 2]."""
    if DOT is tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            _ASSEMBLY, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        pairs = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:  # in the interpreter, which knows no assembly
        place = tl.join(tl.join(words * 0, words * 0 + 8), tl.join(words * 0 + 4, words * 0 + 12))
        pairs = tl.expand_dims(words, (-1, -2)) >> place
        return (128 + tl.join(pairs & 15, (pairs >> 16) & 15)).to(tl.float32)


@triton.jit
def factors_of(scales):
    """int32 [...] -> by what `128 + code` is multiplied, and what is added; float32."""
    scale = scales.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, -128 * scale - minimum


def packed(weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[outputs, inputs], inputs a multiple of 32 -> words and scales, the groups of a row one after the other.

    As the CPU rounds (csrc/cpu/kernels/pack.h): some lines are tried, the codes that the weights have on each, then the
    line that fits these codes best. The one with the least squared error is kept.

    importance: of each input [inputs], by which errors are weighed; None: all alike.
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    heavy = torch.ones(weight.shape[1]) if importance is None else importance
    heavy = heavy.to(weight.device).view(-1, BLOCK)
    heavy = heavy / heavy.sum(1, keepdim=True)
    most, least = blocks.amax(2), blocks.amin(2)
    middle = (blocks * heavy).sum(2)
    scale, minimum, explained = torch.zeros_like(most), -least, torch.full_like(most, -1.0)
    for steps in STEPS:
        for start in STARTS:
            step = (most - least) / steps
            codes = _codes(blocks, step, -(0.5 * (most + least) + (start - 7.5) * step))
            mean = (codes * heavy).sum(2)
            off = codes - mean[:, :, None]
            product = ((blocks - middle[:, :, None]) * off * heavy).sum(2)
            square = (off * off * heavy).sum(2)
            slope = torch.where(square > 0, product / square, 0.0)
            better = (slope * product > explained) & (most > least)
            scale, minimum = torch.where(better, slope, scale), torch.where(better, slope * mean - middle, minimum)
            explained = torch.where(better, slope * product, explained)
    scale, minimum = (line.clamp(-65504, 65504).to(torch.float16) for line in (scale, minimum))
    return of_codes(_codes(blocks, scale.float(), minimum.float()).to(torch.int32).flatten(1), scale, minimum)


def _codes(blocks: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    inverse = torch.where(scale != 0, 1 / scale, 0.0)
    return ((blocks + minimum[:, :, None]) * inverse[:, :, None]).round().clamp(0, 15)


def of_codes(codes: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [outputs, inputs], float16 [outputs, inputs / 32] -> words and scales."""
    short = -codes.shape[1] % GROUP
    eight = torch.nn.functional.pad(codes, (0, short)).view(len(codes), -1, 4, 4, 8).transpose(2, 3)
    words = (eight << torch.tensor(PLACES, dtype=torch.int32, device=codes.device)).sum(4, dtype=torch.int32)
    scales = torch.stack((scale, minimum), 2).contiguous().view(torch.int32)
    return words.flatten(1), torch.nn.functional.pad(scales.flatten(1), (0, short // BLOCK))


def unpacked(words: Tensor, scales: Tensor, inputs: int) -> Tensor:
    """float32 [outputs, inputs]."""
    codes = words[:, :, None] >> torch.tensor(PLACES, dtype=torch.int32, device=words.device) & 15
    blocks = codes.view(len(words), -1, 4, 4, 8).transpose(2, 3).reshape(len(words), -1, BLOCK).float()
    scale, minimum = scales.view(torch.float16).float().unflatten(1, (-1, 2)).unbind(2)
    return (blocks * scale[:, :, None] - minimum[:, :, None]).flatten(1)[:, :inputs]
