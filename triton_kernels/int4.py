"""int4 on a GPU, packed in the order in which matrix instructions take weights.

A weight is one of 16 levels times the float16 scale of its block of 32 inputs. The CPU's int4 is another: its levels
lie at even distances and have a minimum, as in files with four bits. A file's own four bits are rounded again here.
The levels are dense in the middle, where most weights are: k-means in one dimension on the default model's weights.

    words  [outputs, groups of 128 inputs, 4 threads, 4 blocks]   int32: eight weights, the first in the lowest bits
    scales [outputs, groups of 128 inputs, 4 blocks]              float16; a last group that is short ends with zeros

A thread takes a quarter of each block: inputs 32 b + 8 t to 32 b + 8 t + 7 of a group. So what a matrix instruction
adds up at once, four weights of each of four threads, is of one block, and its sum needs one scale.

A level has 16 bits in bfloat16. A permutation of bytes picks each half of four levels at once, from eight entries of a
table. It takes the lowest three bits of a code; where the highest is set, it gives the sign of the byte instead, eight
times. So one permutation of the first eight entries and one of the others, with the highest bits turned, make a level
when they are combined by XOR: 19 instructions for eight weights. That asks for codes k and k + 8 whose bytes have the
same signs, and CODED has such pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # inputs that share a scale
GROUP = 128  # inputs that four threads load at once
LEVELS = (-127, -99, -79, -63, -48, -35, -22, -9, 2, 14, 26, 40, 55, 70, 86, 110)
CODED = (-127, -99, -63, -48, 2, 14, 26, 70, -79, -22, -35, -9, 40, 55, 86, 110)  # by code
FACTORS = (0.85, 0.95, 1.05)  # scales that are tried, as parts of the one that makes the largest weight -127


def _tables() -> tuple[int, ...]:
    """Of low bytes, then of high ones: the first eight entries in two words, and the others; int32."""
    bits = torch.tensor(CODED, dtype=torch.bfloat16).view(torch.int16).tolist()
    words = []
    for shift in (0, 8):
        entries = [value >> shift & 0xFF for value in bits]
        entries = [entry ^ 0xFF if entry >= 128 else entry for entry in entries[:8]] + entries[8:]
        words += [int.from_bytes(entries[i : i + 4], "little", signed=False) for i in range(0, 16, 4)]
    return tuple(word - (word >> 31 << 32) for word in words)


TABLES = _tables()


def _assembly() -> str:
    """$4: eight codes; $5 to $8: every other word of TABLES -> $0 to $3: two levels each."""
    lines = [".reg .b32 codes, others, low, high, more;", "mov.b32 codes, $4;", "xor.b32 others, codes, 0x88888888;"]
    for half in (0, 2):
        for byte, table in (("low", 0), ("high", 4)):
            first, second = (f"${5 + (table + i) // 2}, {TABLES[table + i + 1]}" for i in (0, 2))
            lines += [f"prmt.b32 {byte}, {first}, codes;", f"prmt.b32 more, {second}, others;"]
            lines += [f"xor.b32 {byte}, {byte}, more;"]
        lines += [f"prmt.b32 ${half}, low, high, 0x5140;", f"prmt.b32 ${half + 1}, low, high, 0x7362;"]
        lines += [f"shr.u32 {register}, {register}, 16;" for register in ("codes", "others")]
    return "{" + " ".join(lines) + "}"


ASSEMBLY = _assembly()
# 0, which the assembler does not know: it would copy a table that is a constant anew for each permutation.
ZERO = "mov.u32 $0, %lanemask_lt; and.b32 $0, $0, 0x80000000;"
_ASSEMBLY, _ZERO, _CODED, _TABLES = map(tl.constexpr, (ASSEMBLY, ZERO, CODED, TABLES))


@triton.jit
def levels_of(words, DOT: tl.constexpr):
    """int32 [...] -> levels [..., 2, 2, 2]."""
    if DOT is tl.bfloat16:
        zero = tl.inline_asm_elementwise(_ZERO, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True, pack=1)
        a, b, c, d = tl.inline_asm_elementwise(
            _ASSEMBLY, "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, zero ^ _TABLES[0], zero ^ _TABLES[2], zero ^ _TABLES[4], zero ^ _TABLES[6]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        pairs = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:  # in the interpreter, which knows no assembly
        place = tl.join(tl.join(words * 0, words * 0 + 16), tl.join(words * 0 + 8, words * 0 + 24))
        codes = (tl.expand_dims(words, (-1, -2)) >> place) & 0xFF
        codes = tl.join(codes & 15, codes >> 4)
        levels = tl.zeros(codes.shape, tl.float32)
        for code in tl.static_range(16):
            levels = tl.where(codes == code, _CODED[code], levels)
        return levels


def packed(weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[outputs, inputs], inputs a multiple of 32 -> words and scales, the groups of a row one after the other.

    Some scales are tried: the levels that the weights go to under each, then the scale that fits these levels best. The
    one with the least squared error is kept.

    importance: of each input [inputs], by which errors are weighed; None: all alike.
    """
    inputs = weight.shape[1]
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    heavy = torch.ones(inputs, device=weight.device) if importance is None else importance.to(weight.device)
    heavy = heavy.view(-1, BLOCK)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    most, best = (torch.zeros(blocks.shape[:2], device=weight.device) for _ in range(2))
    for factor in FACTORS:
        near = levels[torch.bucketize(blocks * (-127 / (largest * factor)), borders, out_int32=True)]
        product, square = (blocks * heavy * near).sum(2), (heavy * near * near).sum(2)
        explained = product / square * product  # of the sum of squares
        best = torch.where(explained > most, product / square, best)
        most = torch.maximum(most, explained)
    scales = best.clamp(-65504, 65504).to(torch.float16)
    inverse = torch.where(scales != 0, 1 / scales.float(), 0.0)
    code_of = torch.tensor([CODED.index(level) for level in LEVELS], dtype=torch.int32, device=weight.device)
    codes = code_of[torch.bucketize(blocks * inverse[:, :, None], borders, out_int32=True)].flatten(1)
    short = -inputs % GROUP
    codes = torch.nn.functional.pad(codes, (0, short)).view(len(codes), -1, 4, 4, 8).transpose(2, 3)
    words = (codes << torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)).sum(4, dtype=torch.int32)
    return words.flatten(1), torch.nn.functional.pad(scales, (0, short // BLOCK)).view(torch.int32)


def unpacked(words: Tensor, scales: Tensor, inputs: int) -> Tensor:
    """float32 [outputs, inputs]."""
    codes = words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32, device=words.device) & 15
    levels = torch.tensor(CODED, dtype=torch.float32, device=words.device)[codes]
    blocks = levels.view(len(words), -1, 4, 4, 8).transpose(2, 3).reshape(len(words), -1, BLOCK)
    return (blocks * scales.view(torch.float16).float()[:, :, None]).flatten(1)[:, :inputs]
