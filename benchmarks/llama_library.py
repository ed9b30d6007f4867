"""llama.cpp through its C interface: token ids in, logits out. For the benchmarks only.

Any build of the library does: `build_llama_cpp.sh` makes one for this machine; an installed llama-cpp-python or
xllamacpp brings one, which may have been compiled for an older machine than this one (`system_info` says so).
"""

import ctypes
import importlib.util
import os
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
BUILT = HERE / "llama.cpp" / "build" / "bin" / "libllama.so"


class _Batch(Structure):
    """struct llama_batch"""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class _ContextParams(Structure):
    """The beginning of struct llama_context_params. It is passed on the stack, so more room than it needs is right."""

    _fields_ = (("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32), ("rest", c_int8 * 1012))


class _ModelParams(Structure):
    """struct llama_model_params, whatever it holds: the defaults are used."""

    _fields_ = (("all", c_int8 * 1024),)


class _QuantizeParams(Structure):
    """The beginning of struct llama_model_quantize_params, and more room than it needs."""

    _fields_ = (("nthread", c_int32), ("ftype", c_int32), ("rest", c_int8 * 1016))


QUANTIZED = {"IQ4_NL": 25, "Q4_K_M": 15}  # what only the library makes: enum llama_ftype


def quantize(library: Path, source: Path, target: Path, format: str) -> None:
    """A GGUF file of another format from one of floats: whole, or none."""
    lib = _declared(ctypes.CDLL(str(library)))
    lib.llama_backend_init()
    params = lib.llama_model_quantize_default_params()
    params.ftype = QUANTIZED[format]
    unfinished = target.with_name(target.name + ".unfinished")
    if lib.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp cannot make {format} of {source}")
    unfinished.replace(target)


def find_library() -> Path | None:
    """$LLAMA_LIBRARY, the library that build_llama_cpp.sh made, or that of an installed package."""
    if os.environ.get("LLAMA_LIBRARY"):
        return Path(os.environ["LLAMA_LIBRARY"])
    if BUILT.exists():
        return BUILT
    for package, pattern in (("llama_cpp", "lib/libllama.so"), ("xllamacpp", "xllamacpp*.so")):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            found = sorted(Path(folder).glob(pattern))
            if found:
                return found[0]
    return None


class Llama:
    """A model and one context of it. Not for several threads."""

    def __init__(self, library: Path, model: Path, context: int, threads: int) -> None:
        """context: the most tokens of a text. Raises RuntimeError if the library refuses the model."""
        self.lib = _declared(ctypes.CDLL(str(library)))
        self.lib.llama_backend_init()
        self._model = self.lib.llama_model_load_from_file(str(model).encode(), self.lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = self.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = (context + 255) // 256 * 256
        self._context = self.lib.llama_init_from_model(self._model, params)
        if not self._context or self.lib.llama_n_ctx(self._context) < context:
            raise RuntimeError(f"llama.cpp makes no context of {context} tokens for {model}")
        self.lib.llama_set_n_threads(self._context, threads, threads)
        self.vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self._model))

    @property
    def system_info(self) -> str:
        """The instruction sets that the library was compiled for."""
        return self.lib.llama_print_system_info().decode()

    def forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self._context), True)

    def decode(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """Append ids to the text -> [vocabulary], the logits after the last one; valid until the next call."""
        array = (c_int32 * len(ids))(*ids)  # that the batch only points at
        self._run(self.lib.llama_batch_get_one(array, len(ids)))
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self._context, -1), (self.vocabulary,))

    def logits(self, ids: list[int], last: int) -> npt.NDArray[np.float32]:
        """[last, vocabulary]: a new text, and the logits after each of its `last` ids."""
        self.forget()
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, id in enumerate(ids):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = id, place, 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = place >= len(ids) - last
        self._run(batch)
        rows = [self.lib.llama_get_logits_ith(self._context, place) for place in range(len(ids) - last, len(ids))]
        found = np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows])
        self.lib.llama_batch_free(batch)
        return found

    def _run(self, batch: _Batch) -> None:
        status = self.lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    for name, result, arguments in (
        ("llama_backend_init", None, ()),
        ("llama_print_system_info", c_char_p, ()),
        ("llama_model_default_params", _ModelParams, ()),
        ("llama_context_default_params", _ContextParams, ()),
        ("llama_model_load_from_file", c_void_p, (c_char_p, _ModelParams)),
        ("llama_init_from_model", c_void_p, (c_void_p, _ContextParams)),
        ("llama_n_ctx", c_uint32, (c_void_p,)),
        ("llama_set_n_threads", None, (c_void_p, c_int32, c_int32)),
        ("llama_model_get_vocab", c_void_p, (c_void_p,)),
        ("llama_vocab_n_tokens", c_int32, (c_void_p,)),
        ("llama_get_memory", c_void_p, (c_void_p,)),
        ("llama_memory_clear", None, (c_void_p, c_bool)),
        ("llama_batch_get_one", _Batch, (POINTER(c_int32), c_int32)),
        ("llama_batch_init", _Batch, (c_int32, c_int32, c_int32)),
        ("llama_batch_free", None, (_Batch,)),
        ("llama_decode", c_int32, (c_void_p, _Batch)),
        ("llama_get_logits_ith", POINTER(c_float), (c_void_p, c_int32)),
        ("llama_model_quantize_default_params", _QuantizeParams, ()),
        ("llama_model_quantize", c_uint32, (c_char_p, c_char_p, POINTER(_QuantizeParams))),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
