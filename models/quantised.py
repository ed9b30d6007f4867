"""Quantised checkpoints: the folders of AWQ, GPTQ, compressed-tensors and fp8, read as their own libraries read them.

The layouts are those of AutoAWQ (`gemm`), gptqmodel (`gptq`, `gptq_v2`), compressed-tensors (`pack-quantized`,
`int-quantized`, `naive-quantized`, `float-quantized`) and transformers' `fp8`. Weights alone are read: where a scheme
also rounds what flows between the layers (W8A8), that stays as it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError
from .config import Shapes
from .files import shown, unfit
from .stored import Array, Decoded, Floats, Stored, Uniform, as_float32, bfloat16_bits

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in 32 bits the value of each of eight outputs lies
_SCALES = ("F16", "BF16", "F32")
# What is read: quant_method -> the values of the settings that decide how.
_SUPPORTED: dict[str, dict[str, tuple[object, ...]]] = {
    "awq": {"bits": (4,), "version": ("gemm",)},
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2")},
    "compressed-tensors": {
        "format": ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized"),
        "num_bits": (4, 8),
        "sparsity_config": ("dense",),
    },
    "fp8": {},
}


class Scheme(NamedTuple):
    """What `quantization_config` says, as far as it matters to reading."""

    method: str  # awq, gptq, compressed-tensors or fp8
    bits: int = 8
    zero_offset: int = 0  # GPTQ's first format stores zero points less one
    block: tuple[int, int] | None = None  # outputs and inputs of an fp8 matrix that share a scale


def read_scheme(raw: Mapping[str, Any], where: str) -> Scheme | None:
    """Of a parsed `config.json`; None: it is not quantised. Raises PpsdError for what is not supported."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not settings:
        return None

    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(method, str) or method not in _SUPPORTED:
        raise unfit(where, "quantization_config: quant_method", shown(method), " or ".join(_SUPPORTED))
    said = {"bits": settings.get("w_bit", 4), "version": "gemm", "checkpoint_format": "gptq", **settings}
    said["version"] = str(said["version"]).lower()
    if method == "compressed-tensors":
        said["num_bits"] = _bits(settings)
        said["sparsity_config"] = (settings.get("sparsity_config") or {}).get("format", "dense")
    for key, supported in _SUPPORTED[method].items():
        if said.get(key) not in supported:
            raise unfit(where, f"quantization_config: {key}", shown(said.get(key)), " or ".join(map(str, supported)))
    if method == "fp8":
        return Scheme(method, block=_block(settings.get("weight_block_size")))
    if method == "compressed-tensors":
        return Scheme(method, said["num_bits"], block=_block(_weights(settings)[0].get("block_structure")))
    return Scheme(method, int(said["bits"]), int(method == "gptq" and said["checkpoint_format"] == "gptq"))


def _weights(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a compressed-tensors scheme says of the weights of each of its groups."""
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if groups else []
    return [each for each in weights if isinstance(each, dict)] or [{}]


def _bits(settings: Mapping[str, Any]) -> Any:
    """Which all groups share; None: they differ."""
    first, *others = [weights.get("num_bits") for weights in _weights(settings)]
    return first if all(bits == first for bits in others) else None


def _block(sizes: Any) -> tuple[int, int] | None:
    whole = isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    return (sizes[0], sizes[1]) if whole else None


class QuantisedTensors(Decoded):
    """Tensors by their names in an unquantised checkpoint.

    Each look-up of a quantised matrix gives a copy in the dtype of its scales, rounded to it as the scheme's own
    library rounds: float16, float32, or uint16 for the bits of bfloat16. `uniform` gives it without the last rounding.
    """

    def __init__(self, stored: Mapping[str, Stored], shapes: Shapes, scheme: Scheme, where: Path) -> None:
        """stored: every tensor of the folder. shapes: of the model's. Raises PpsdError for parts that are missing, or
        of another shape or dtype than the scheme says."""
        self._stored, self._shapes, self._scheme, self._where = stored, shapes, scheme, where
        self.quantised = {name for name in shapes if name.endswith(".weight") and self._is_quantised(name)}
        self._of = dict.fromkeys(name for name in shapes if name in self.quantised or name in stored)
        for name in self.quantised:
            self._read(name, slice(0, 8))  # says what does not fit

    def __getitem__(self, name: str) -> Array:
        return self._rows(name, slice(0, self._shapes[name][0])) if name in self.quantised else self._stored[name].data

    @property
    def kinds(self) -> set[str]:
        """How the matrices are stored, for people."""
        return {f"{self._scheme.method}, {self._scheme.bits} bits"}

    @property
    def used(self) -> set[str]:
        """The names in the file that all these are read from."""
        parts = {name for name in self._stored if f"{name.rpartition('.')[0]}.weight" in self.quantised}
        return parts | set(self._shapes)

    def values_at(self, name: str, places: npt.NDArray[np.int64]) -> Array:
        """The values of a tensor at some places of it as one long row; only the rows around them are decoded."""
        if name not in self.quantised:
            return self[name].reshape(-1)[places]
        rows, columns = np.divmod(places, self._shapes[name][1])
        first = rows // 8 * 8
        near = {row: self._rows(name, slice(row, row + 8)) for row in set(first.tolist())}
        return np.array([near[at][row - at, column] for at, row, column in zip(first, rows, columns, strict=True)])

    def _rows(self, name: str, outputs: slice) -> Array:
        values, dtype = self._read(name, outputs)
        if isinstance(values, Uniform):  # by their formula, whose product is rounded once, whatever the scales' dtype
            q = values.q.reshape(len(values.q), -1, values.group).astype(np.float32)
            zeros = np.divide(values.minimum, -values.scale, out=np.zeros_like(values.scale), where=values.scale != 0)
            q -= np.rint(zeros)[:, :, None]
            values = (q * values.scale[:, :, None]).reshape(values.q.shape)
        return _rounded(values, dtype)

    def uniform(self, name: str, outputs: slice | None = None) -> Uniform | None:
        """A matrix as it is quantised, or some rows of it, from a multiple of 8 on; None where it is not, or not in
        groups of neighbouring inputs, or in fp8."""
        if name not in self.quantised:
            return None
        values, _ = self._read(name, outputs or slice(0, self._shapes[name][0]))
        return values if isinstance(values, Uniform) else None

    @property
    def four_bits(self) -> frozenset[str]:
        """The matrices whose codes have four bits at most."""
        names = self.quantised if self._scheme.bits <= 4 else ()
        return frozenset(name for name in names if name not in self._stored)  # compressed-tensors: there of 8 bits

    @property
    def in_four_bits(self) -> frozenset[str]:
        """Of `four_bits` those whose scales are for a multiple of 32 neighbouring inputs."""
        some = {name: self.uniform(name, slice(0, 8)) for name in self.four_bits}
        return frozenset(name for name, rows in some.items() if rows is not None and rows.group % 32 == 0)

    def _is_quantised(self, name: str) -> bool:
        if self._scheme.method in ("awq", "gptq"):
            return name.removesuffix("weight") + "qweight" in self._stored
        stored = self._stored.get(name)
        return stored.dtype in ("I8", "F8_E4M3") if stored else f"{name}_packed" in self._stored

    def _read(self, name: str, outputs: slice) -> tuple[Uniform | Floats, str]:
        """Rows of a matrix, and the dtype of its scales. outputs: which, from a multiple of 8 on."""
        read = {"awq": self._awq, "gptq": self._gptq}.get(self._scheme.method, self._compressed)
        return read(name, slice(outputs.start, min(outputs.stop, self._shapes[name][0])))

    def _misfit(self, name: str, found: str, expected: str) -> PpsdError:
        return unfit(self._where, f"tensor {name}", found, f"by config.json and its quantization_config {expected}")

    def _part(self, name: str, *dtypes: str, shape: tuple[int, ...] | None = None) -> Stored:
        stored = self._stored.get(name)
        if stored is None or stored.dtype not in dtypes:
            found = "missing" if stored is None else f"of dtype {stored.dtype}"
            raise self._misfit(name, found, " or ".join(dtypes))
        if shape not in (None, stored.data.shape):
            raise self._misfit(name, f"of shape {stored.data.shape}", f"{shape}")
        return stored

    def _awq(self, name: str, outputs: slice) -> tuple[Uniform | Floats, str]:
        prefix, (out, inputs) = name.removesuffix("weight"), self._shapes[name]
        if out % 8:
            raise self._misfit(name, f"of {out} outputs", "a multiple of 8")
        words = slice(outputs.start // 8, -(-outputs.stop // 8))
        q = _of_awq(self._part(f"{prefix}qweight", "I32", shape=(inputs, out // 8)).data[:, words])
        groups = self._groups(f"{prefix}scales", inputs)
        zeros = _of_awq(self._part(f"{prefix}qzeros", "I32", shape=(groups, out // 8)).data[:, words])
        scales = self._part(f"{prefix}scales", *_SCALES, shape=(groups, out))
        return self._values(prefix, q.T, zeros.T, as_float32(scales.data)[:, outputs].T), scales.dtype

    def _gptq(self, name: str, outputs: slice) -> tuple[Uniform | Floats, str]:
        prefix, (out, inputs), bits = name.removesuffix("weight"), self._shapes[name], self._scheme.bits
        each = 32 // bits
        if inputs % each or out % each:
            raise self._misfit(name, f"of shape {(out, inputs)}", f"multiples of {each}")
        q = _unpacked(self._part(f"{prefix}qweight", "I32", shape=(inputs // each, out)).data[:, outputs].T, bits)
        groups = self._groups(f"{prefix}scales", inputs)
        zeros = _unpacked(self._part(f"{prefix}qzeros", "I32", shape=(groups, out // each)).data, bits)[:, outputs].T
        scales = self._part(f"{prefix}scales", *_SCALES, shape=(groups, out))
        counted = zeros.astype(np.float32) + self._scheme.zero_offset
        return self._values(prefix, q, counted, as_float32(scales.data)[:, outputs].T), scales.dtype

    def _compressed(self, name: str, outputs: slice) -> tuple[Uniform | Floats, str]:
        out, inputs = self._shapes[name]
        # The second is DeepSeek's name; it is what they are multiplied by, all the same.
        scales = self._part(f"{name}_scale{'_inv' if f'{name}_scale_inv' in self._stored else ''}", *_SCALES)
        scale = as_float32(scales.data)
        scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale  # one for all, or one for each output
        misfit = self._misfit(f"{name}_scale", f"of shape {scale.shape}", f"scales of {(out, inputs)}")
        if scale.ndim != 2 or scale.shape[0] > out or scale.shape[1] > inputs:
            raise misfit
        if name in self._stored and self._stored[name].dtype == "F8_E4M3":
            codes = self._part(name, "F8_E4M3", shape=(out, inputs)).data[outputs]
            return _E4M3[codes] * self._spread(name, scale)[outputs], scales.dtype
        if inputs % scale.shape[1] or scale.shape[0] not in (1, out):
            raise misfit
        bits = 8 if name in self._stored else self._scheme.bits
        if name in self._stored:
            q = (self._part(name, "I8", shape=(out, inputs)).data[outputs].astype(np.int16) + 128).astype(np.uint8)
        else:
            words = -(-inputs * bits // 32)
            q = _unpacked(self._part(f"{name}_packed", "I32", shape=(out, words)).data[outputs], bits)[:, :inputs]
        zeros = self._zero_points(name, (out, scale.shape[1]), bits)[outputs]
        rows = np.broadcast_to(scale, (out, scale.shape[1]))[outputs]
        return self._values(f"{name}_", q, zeros, rows), scales.dtype

    def _values(self, prefix: str, q: npt.NDArray[np.uint8], zeros: Array, scale: Floats) -> Uniform | Floats:
        """q [outputs, inputs], zeros and scale [outputs, groups]; g_idx says which group each input is of, where they
        are not neighbours."""
        inputs, groups = q.shape[1], scale.shape[1]
        each = inputs // groups
        order = self._stored.get(f"{prefix}g_idx")
        if order is None or (order.data == -1).all() or np.array_equal(order.data, np.arange(inputs) // each):
            scale = np.ascontiguousarray(scale)
            return Uniform(np.ascontiguousarray(q), scale, -np.ascontiguousarray(zeros, np.float32) * scale, each)
        group = self._part(f"{prefix}g_idx", "I32", shape=(inputs,)).data
        if group.min() < 0 or group.max() >= groups:
            raise self._misfit(f"{prefix}g_idx", f"of groups up to {group.max()}", f"0 to {groups - 1}")
        return (q - zeros.astype(np.float32)[:, group]) * scale[:, group]

    def _spread(self, name: str, scale: Floats) -> Floats:
        """Scales of blocks [n, m] -> of every value; the last blocks may be cut off."""
        for axis, size in enumerate(self._shapes[name]):
            count = scale.shape[axis]
            block = self._scheme.block[axis] if self._scheme.block and count > 1 else size // count
            if -(-size // block) != count:
                expected = f"scales of {self._shapes[name]}"
                raise self._misfit(f"{name}_scale", f"of shape {scale.shape}", expected)
            scale = np.repeat(scale, block, axis).take(np.arange(size), axis)
        return scale

    def _zero_points(self, name: str, shape: tuple[int, int], bits: int) -> Floats:
        """As q counts, from 0: [outputs, groups]."""
        middle = np.float32(1 << (bits - 1))
        stored = self._stored.get(f"{name}_zero_point")
        if stored is None:
            return np.full(shape, middle, np.float32)
        if stored.dtype == "I32" and bits < 8 and stored.data.shape == (-(-shape[0] * bits // 32), shape[1]):
            return np.ascontiguousarray(_unpacked(stored.data.T, bits)[:, : shape[0]].T, np.float32)
        zeros = self._part(f"{name}_zero_point", "I8").data
        zeros = zeros.reshape(-1, 1) if zeros.ndim < 2 else zeros
        if zeros.shape not in (shape, (1, 1), (1, shape[1])):
            raise self._misfit(f"{name}_zero_point", f"of shape {zeros.shape}", f"{shape}")
        return np.broadcast_to(zeros.astype(np.float32) + middle, shape)

    def _groups(self, name: str, inputs: int) -> int:
        shape = self._part(name, *_SCALES).data.shape
        if len(shape) != 2 or shape[0] < 1 or inputs % shape[0]:
            raise self._misfit(name, f"of shape {shape}", f"groups that divide {inputs} inputs")
        return int(shape[0])


def _of_awq(words: Array) -> npt.NDArray[np.uint8]:
    """int32 [rows, n] -> [rows, 8 n], in AWQ's order."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    return np.stack([(bits >> 4 * place & 15).astype(np.uint8) for place in _AWQ_ORDER], -1).reshape(len(words), -1)


def _unpacked(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """int32 [rows, n] -> [rows, 32 n / bits], counted from 0, the lowest bits first; bits: 2, 4 or 8."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], axis=-1).reshape(len(words), -1)


def _rounded(values: Floats, dtype: str) -> Array:
    return bfloat16_bits(values) if dtype == "BF16" else values.astype(f"f{int(dtype[1:]) // 8}", copy=False)


def _e4m3() -> Floats:
    """What each of the 256 codes of float8_e4m3fn stands for."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


_E4M3 = _e4m3()
