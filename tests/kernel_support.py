"""What the tests of the Triton kernels share. They run on a GPU where there is one, else in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from support import tiny_config
from torch import Tensor
from triton.language import core as language
from triton.language import semantic
from triton.runtime import interpreter

from ppsd_rt.cuda.buffers import rotations
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.triton_kernels.cache import PAGE
from ppsd_rt.triton_kernels.linear import Weight, quantise, quantise_fp8, quantise_int4
from ppsd_rt.triton_kernels.state import KNOWN, ROWS, START, WORDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROW_COUNTS = (1, 2, 7, 16)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def state_of(rows: int, start: int = 0, known: int = 0) -> Tensor:
    state = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE)
    state[ROWS], state[START], state[KNOWN] = rows, start, known
    return state


def table(capacity: int, head_dim: int) -> Tensor:
    """Cosines and sines [capacity, head_dim]."""
    return rotations(LlamaConfig.from_dict(tiny_config(head_dim=head_dim)), capacity, torch.device(DEVICE))


def paged(keys: Tensor, values: Tensor) -> Tensor:
    """[kv_heads, capacity, head_dim] each -> the cache of a layer."""
    cells = torch.cat((keys, values))
    whole = F.pad(cells, (0, 0, 0, -cells.shape[1] % PAGE), value=torch.nan)
    return whole.unflatten(1, (-1, PAGE)).transpose(0, 1).contiguous()


def unpaged(cache: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = cache.transpose(0, 1).flatten(1, 2).chunk(2)
    return keys, values


FORMATS = ("fp32", "int8", "int4", "fp8")


def in_format(weight: Tensor, format: str) -> Weight:
    """For tests to float32 rounding: on a GPU quantised ones are multiplied as bfloat16; test_on_gpu.py judges that."""
    if format == "fp32":
        return Weight(weight)
    if DEVICE == "cuda":
        pytest.skip(f"{format} is multiplied as bfloat16 on a GPU: see test_on_gpu.py")
    return {"int8": quantise, "int4": quantise_int4, "fp8": quantise_fp8}[format](weight)


def matrix(outputs: int, inputs: int, format: str = "fp32", seed: int = 0) -> Weight:
    return in_format(make(outputs, inputs, seed=seed) / inputs**0.5, format)


def close(ours: Tensor, theirs: Tensor) -> None:
    """To float32 rounding."""
    assert ours.shape == theirs.shape
    assert (ours.float() - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1)


def dot_row_by_row(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product as matrix instructions compute it: every row and every column alike.

    The interpreter asks the BLAS, whose order of additions depends on where a row or a column stands. So each row is a
    product of its own, by sixteen columns at a time.
    """
    left, right = a.data[..., None, :], b.data[..., None, :, :]
    parts = [left @ right[..., i : i + 16] for i in range(0, right.shape[-1], 16)]
    return interpreter.TensorHandle(np.concatenate(parts, axis=-1)[..., 0, :] + d.data, d.dtype.scalar)


def device_function(self, *args, **kwargs):
    """A kernel calls a function. The interpreter would patch the language for each call, on top of the last time; it
    has been patched for the kernel, and what Triton's own library sees of it stays so after the first time.
    """
    if not patched_for_library and not any(value is triton.language for value in self.fn.__globals__.values()):
        interpreter._patch_lang(self.fn)
        patched_for_library.append(True)
    return self.rewrite()(*args, **kwargs)


patched_for_library: list[bool] = []


def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """Numbers of kernels are arrays of one element, which numpy from 2.4 on does not take for the bounds of a range."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


# The interpreter spends most of its time on types: it makes those of every shape, and of the tuple that the shape is,
# for every value anew, and looks at few of them. So they are made once, or when they are asked for.
# Two tensors whose shape is one object need no broadcasting, and a type that is the one wanted no cast. A number beside
# a tensor is a tensor like it, made once for each number and shape.

block_types: dict[tuple[object, ...], dict[str, object]] = {}
shapes: dict[tuple[int, ...], tuple[object, object]] = {}
np_dtypes: dict[str, np.dtype] = {}


def block_type(self, element_ty, shape, made=language.block_type.__init__):
    if element_ty.is_ptr():
        made(self, element_ty, shape)
        return
    sizes = tuple([getattr(size, "value", size) for size in shape])
    key = element_ty.name, sizes
    if key not in block_types:
        made(self, element_ty, shape)
        block_types[key] = {**vars(self), "of_tensors": shape_of(sizes), "others": {}}
    vars(self).update(block_types[key])


def shape_of(sizes):
    if sizes not in shapes:
        shapes[sizes] = (
            language.tuple([language.constexpr(size) for size in sizes]),
            language.constexpr(math.prod(sizes)),
        )
    return shapes[sizes]


def tensor(self, handle, type):
    of_tensors = vars(type).get("of_tensors")
    if of_tensors is None:  # a number, or pointers
        of_tensors = shape_of(tuple([getattr(size, "value", size) for size in type.shape]) if type.is_block() else ())
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = of_tensors


def tuple_of_values(self, args, type=None, made=language.tuple.__init__):
    if type is None:
        self.values = list(args)  # its type comes when it is asked for
    else:
        made(self, args, type)


def tuple_attribute(self, name, found=language.tuple.__getattr__):
    if name != "type":
        return found(self, name)
    self.type = language._type_for_tuple_values(self.values)
    return self.type


def with_element_ty(self, scalar_ty, made=language.block_type.with_element_ty):
    if scalar_ty.is_ptr() or self.element_ty.is_ptr():
        return made(self, scalar_ty)
    others = vars(self)["others"]
    if scalar_ty.name not in others:
        others[scalar_ty.name] = made(self, scalar_ty)
    return others[scalar_ty.name]


def broadcast(self, lhs, rhs, made=semantic.TritonSemantic.broadcast_impl_value):
    return (lhs, rhs) if lhs.shape is rhs.shape else made(self, lhs, rhs)


def operands(
    self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False,
    made=semantic.TritonSemantic.binary_op_type_checking_impl,
):  # fmt: skip
    """Two of a type that stays as it is, or one and a number: what most operations have."""
    of_lhs, of_rhs = type(lhs) is language.tensor, type(rhs) is language.tensor
    if of_lhs and of_rhs:
        if lhs.dtype is rhs.dtype and lhs.dtype in (language.int32, language.float32):
            return broadcast(self, lhs, rhs)
    elif arithmetic_check and of_lhs and (number := constant(rhs, lhs)):
        return lhs, number
    elif arithmetic_check and of_rhs and (number := constant(lhs, rhs)):
        return number, rhs
    return made(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def constant(value, like):
    """The number as a tensor of the same type and shape, where it has that type beside it; else None."""
    whole = like.dtype is language.int32 and type(value) is int and -(2**31) <= value < 2**31
    if not whole and not (like.dtype is language.float32 and type(value) in (int, float)):
        return None
    key = whole, value, id(like.shape)  # of `shapes`, which stay
    if key not in constants:
        shape = like.handle.data.shape if like.type.is_block() else (1,)
        data = np.full(shape, value or 0, np.int32 if whole else np.float32)  # no minus 0, as the interpreter has it
        data.flags.writeable = False
        constants[key] = language.tensor(interpreter.TensorHandle(data, like.dtype), like.type)
    return constants[key]


constants: dict[tuple[bool, float, int], language.tensor] = {}


def fits(np_array, tl_dtype):
    return isinstance(tl_dtype, language.pointer_type) or np_array.itemsize * 8 <= max(8, tl_dtype.primitive_bitwidth)


def cast(self, input, dst_ty, fp_downcast_rounding=None, made=semantic.TritonSemantic.cast):
    return input if input.dtype is dst_ty else made(self, input, dst_ty, fp_downcast_rounding)


def same_dtype(self, other, made=language.dtype.__eq__):
    return self is other or made(self, other)


def without_constexpr(value, made=language._unwrap_if_constexpr):
    kind = type(value)
    if kind is int or kind is language.tensor:
        return value
    return value.value if kind is language.constexpr else made(value)


def patch_attribute(owner, name, member, builder, scope):
    """Triton's own goes through two functions that look at the arguments' names, for every call."""
    inner, given = getattr(member, "__wrapped__", member), {"_semantic": interpreter.interpreter_semantic}
    scope.set_attr(owner, name, lambda *args, **named: inner(*args, **{**named, **given}))


def np_dtype(type, made=interpreter._get_np_dtype):
    if type.is_ptr():
        return made(type)
    if type.name not in np_dtypes:
        np_dtypes[type.name] = made(type)
    return np_dtypes[type.name]


language.block_type.__init__ = block_type
language.tensor.__init__ = tensor
language.tuple.__init__ = tuple_of_values
language.tuple.__getattr__ = tuple_attribute
interpreter._get_np_dtype = np_dtype
interpreter._patch_attr = patch_attribute
language.block_type.with_element_ty = with_element_ty
interpreter._validate_np_data_size = fits
semantic.TritonSemantic.binary_op_type_checking_impl = operands
semantic.TritonSemantic.broadcast_impl_value = broadcast
semantic.TritonSemantic.cast = cast
language.dtype.__eq__ = same_dtype
language._unwrap_if_constexpr = without_constexpr
interpreter._patch_lang_tensor = patch_tensor
interpreter.InterpreterBuilder.create_dot = dot_row_by_row
interpreter.InterpretedFunction.__call__ = device_function
# Every addition would be made once more in 64 bits, to see whether it overflows: a third of the time.
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
