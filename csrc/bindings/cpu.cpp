// The CPU part: models packed from arrays, engines and their answers.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "../cpu/checkpoint.h"
#include "../cpu/cores.h"
#include "../cpu/half.h"
#include "../cpu/measure.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using FloatArray = py::array_t<float, py::array::c_style>;

Stored stored_as(const py::dtype& dtype, const std::string& name) {
  if (dtype.kind() == 'f' && dtype.itemsize() == 4) return Stored::kFp32;
  if (dtype.kind() == 'f' && dtype.itemsize() == 2) return Stored::kFp16;
  if (dtype.kind() == 'u' && dtype.itemsize() == 2) return Stored::kBf16;
  throw std::runtime_error("tensor " + name + " has dtype " + std::string(py::str(dtype)) + "; expected 16 or 32 bits");
}

bool is_mapped(const py::handle& array) { return py::isinstance(array, py::module_::import("numpy").attr("memmap")); }

// A matrix of a GGUF file where it lies.
struct PyBlocks {
  py::array data;
  Tensor tensor;

  // data: [rows, bytes of a row] uint8
  PyBlocks(py::array bytes, const std::string& type, int64_t columns, int neighbours) : data(std::move(bytes)) {
    tensor.blocks = block_type(type);
    if (tensor.blocks == nullptr && type != "F32" && type != "F16" && type != "BF16")
      throw std::runtime_error("blocks of type " + type + " are unknown");
    if (data.ndim() != 2 || data.dtype().kind() != 'u' || data.itemsize() != 1 || !(data.flags() & py::array::c_style))
      throw std::runtime_error("blocks are a dense array of bytes: [rows, bytes of a row]");
    tensor.data = data.data();
    tensor.stored = type == "F16" ? Stored::kFp16 : type == "BF16" ? Stored::kBf16 : Stored::kFp32;
    tensor.rows = data.shape(0);
    tensor.columns = columns;
    tensor.mapped = is_mapped(data);
    tensor.neighbours = neighbours;
    const int unit = tensor.blocks == nullptr ? 1 : tensor.blocks->values;
    if (columns < 1 || columns % unit || int64_t(tensor.row_bytes()) != data.shape(1) || neighbours < 0 || neighbours % 2 ||
        (neighbours > 0 && tensor.rows % neighbours))
      throw std::runtime_error("blocks do not fit their shape");
  }

  py::tuple four_bits() const {
    if (!tensor.four_bits()) throw std::invalid_argument("these blocks are not of four bits");
    const BlockType& type = *tensor.blocks;
    py::array_t<uint8_t> codes({tensor.rows, tensor.columns});
    py::array_t<uint16_t> scales({tensor.rows, tensor.columns / kBlock}), minima({tensor.rows, tensor.columns / kBlock});
    uint8_t* code = codes.mutable_data();
    uint16_t *scale = scales.mutable_data(), *minimum = minima.mutable_data();
    FourBits blocks[kMostFourBits];
    for (int64_t r = 0; r < tensor.rows; ++r) {
      const auto* from = static_cast<const uint8_t*>(tensor.row(r));
      for (int64_t i = 0; i < tensor.columns; i += type.values, from += type.bytes) {
        type.four_bits(from, blocks);
        for (int b = 0; b < type.values / kBlock; ++b, code += kBlock) {
          if (!std::isfinite(blocks[b].scale) || !std::isfinite(blocks[b].minimum)) throw std::runtime_error(kNotFinite);
          *scale++ = nearest_half(blocks[b].scale);
          *minimum++ = nearest_half(blocks[b].minimum);
          for (int k = 0; k < kBlock; ++k) code[k] = uint8_t(blocks[b].codes[k % 16] >> (k < 16 ? 0 : 4) & 15);
        }
      }
    }
    return py::make_tuple(codes, scales, minima);
  }
};

// What lies where, by name: dense arrays, and blocks.
NamedTensors tensors_of(const py::dict& arrays) {
  NamedTensors tensors;
  for (const auto& [key, value] : arrays) {
    const auto name = key.cast<std::string>();
    tensors[name] = tensor_of(value, name);
  }
  return tensors;
}

// [layers][InputOffsets::width], of these token ids as a text.
FloatArray importance_of(const ModelShape& shape, const py::dict& arrays, const Rotary& frequencies,
                         const std::vector<int>& ids, int threads) {
  const NamedTensors tensors = tensors_of(arrays);
  FloatArray out({shape.num_layers, InputOffsets(shape).width});
  float* to = out.mutable_data();
  const py::gil_scoped_release release;
  measure_importance(pick_kernels(), shape, layers_of(tensors, shape), embedding_of(tensors, shape), frequencies, ids,
                     threads, to);
  return out;
}

// importance: null; or as importance_of gives it
PyModel make_model(const ModelShape& shape, const py::dict& arrays, const Rotary& frequencies,
                   const std::string& format, const std::string& kv, int threads, int first, int last, bool lm_head,
                   const std::optional<FloatArray>& importance, const PackedFile& file) {
  const NamedTensors tensors = tensors_of(arrays);
  if (importance && (importance->ndim() != 2 || importance->shape(0) != shape.num_layers ||
                     importance->shape(1) != InputOffsets(shape).width))
    throw std::runtime_error("the importance of the inputs is that of a model of another shape");
  const Packing packing{format_of(format), kv_format_of(kv), threads, first, last, lm_head,
                        importance ? importance->data() : nullptr, file};
  PyModel model{nullptr, arrays};
  const py::gil_scoped_release release;
  model.model = pack_model(pick_kernels(), shape, tensors, frequencies, packing);
  return model;
}

PyModel make_with_exit_head(const PyModel& base, int exit_layer, const py::dict& arrays, const std::vector<int>& draft_ids,
                            int threads, const PackedFile& file, int tap) {
  const NamedTensors tensors = tensors_of(arrays);
  PyModel model{nullptr, base.arrays};
  const py::gil_scoped_release release;
  model.model = with_exit_head(*base.model, exit_layer, tensors, draft_ids, threads, file, tap);
  return model;
}

PyModel make_with_eagle3(const PyModel& base, const ModelShape& shape, const Rotary& rotary, const std::vector<int>& taps,
                         bool norm_before_residual, bool norm_output, const py::dict& arrays,
                         const std::vector<int>& draft_ids, int threads, const PackedFile& file) {
  const NamedTensors tensors = tensors_of(arrays);
  PyModel model{nullptr, base.arrays.attr("copy")()};
  model.arrays[py::str("the exit head's")] = arrays;   // of which its embedding is read
  Eagle eagle;
  eagle.shape = shape;
  eagle.rotary = rotary;
  eagle.taps = taps;
  eagle.norm_before_residual = norm_before_residual;
  eagle.norm_output = norm_output;
  const py::gil_scoped_release release;
  model.model = with_eagle3(*base.model, std::move(eagle), tensors, draft_ids, threads, file);
  return model;
}

}  // namespace

Tensor ppsd::bindings::tensor_of(const py::handle& value, const std::string& name) {
  if (py::isinstance<PyBlocks>(value)) return value.cast<const PyBlocks&>().tensor;
  if (!py::isinstance<py::array>(value)) throw std::runtime_error("tensor " + name + " is no array");
  const auto array = py::reinterpret_borrow<py::array>(value);
  if (array.ndim() < 1 || array.ndim() > 2 || !(array.flags() & py::array::c_style))
    throw std::runtime_error("tensor " + name + " is not a dense array of one or two dimensions");
  const int64_t columns = array.ndim() == 2 ? array.shape(1) : 1;
  return {array.data(), stored_as(array.dtype(), name), array.shape(0), columns, is_mapped(value)};
}

void bind_cpu(py::module_& m) {
  m.def("isa", [] { return std::string(pick_kernels().name); });
  m.def("usable_isas", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable_kernels()) names.push_back(kernels->name);
    return names;
  });
  m.def("usable_cores", [](const std::string& system) { return usable_cores(system).order; }, py::arg("system") = kDevices);
  m.def("best_cores", [](const std::string& system) { return usable_cores(system).best; }, py::arg("system") = kDevices);
  m.attr("PASS_ROWS") = kPassRows;
  m.def("read_bandwidth", &read_bandwidth, py::arg("threads"), py::arg("megabytes"), py::call_guard<py::gil_scoped_release>());
  m.def("kernel_names", &kernel_names);
  m.def("in_callback", &in_callback);

  py::class_<Rotary>(m, "Rotary")
      .def(py::init([](std::vector<float> frequencies, float factor, int original, std::vector<float> long_frequencies,
                       double theta, double growth) {
             if (!long_frequencies.empty() && long_frequencies.size() != frequencies.size())
               throw std::invalid_argument("there are as many frequencies in long texts as in short ones");
             Rotary rotary(std::move(frequencies));
             rotary.factor = factor;
             rotary.original = original;
             rotary.long_frequencies = std::move(long_frequencies);
             rotary.theta = theta;
             rotary.growth = growth;
             return rotary;
           }),
           py::arg("frequencies"), py::arg("factor") = 1.0f, py::arg("original") = 0,
           py::arg("long_frequencies") = std::vector<float>(), py::arg("theta") = 0.0, py::arg("growth") = 0.0);

  py::class_<PyBlocks>(m, "Blocks")
      .def(py::init<py::array, const std::string&, int64_t, int>(), py::arg("data"), py::arg("type"), py::arg("columns"),
           py::arg("neighbours") = 0)
      .def("four_bits", &PyBlocks::four_bits);
  m.def("importance", &importance_of, py::arg("shape"), py::arg("tensors"), py::arg("frequencies"), py::arg("ids"),
        py::arg("threads"));
  py::register_exception<NotPacked>(m, "NotPacked", PyExc_RuntimeError);
  py::class_<PackedFile>(m, "PackedFile")
      .def(py::init([](int file, uint64_t checksum) { return PackedFile{file, checksum}; }), py::arg("file"), py::arg("checksum"))
      .def_property_readonly_static("HEADER", [](const py::object&) { return PackedFile::kHeader; });
  py::class_<PyModel>(m, "Model")
      .def(py::init(&make_model), py::arg("shape"), py::arg("tensors"), py::arg("frequencies"), py::arg("format"),
           py::arg("kv"), py::arg("threads"), py::arg("first") = 0, py::arg("last") = -1, py::arg("lm_head") = true,
           py::arg("importance") = py::none(), py::arg("file") = PackedFile())
      .def("with_exit_head", &make_with_exit_head, py::arg("exit_layer"), py::arg("tensors"), py::arg("draft_ids"),
           py::arg("threads"), py::arg("file") = PackedFile(), py::arg("tap") = 0)
      .def("with_eagle3", &make_with_eagle3, py::kw_only(), py::arg("shape"), py::arg("rotary"), py::arg("taps"),
           py::arg("norm_before_residual"), py::arg("norm_output"), py::arg("tensors"), py::arg("draft_ids"),
           py::arg("threads"), py::arg("file") = PackedFile())
      .def("write_packed", [](const PyModel& model, int file) { return write_packed(file, *model.model->memory.back()); },
           py::arg("file"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("own_bytes", [](const PyModel& model) { return model.model->memory.back()->bytes(); })
      .def_property_readonly("mapped", [](const PyModel& model) { return model.model->mapped; })
      .def_property_readonly("packed_bytes", [](const PyModel& model) { return model.model->packed_bytes; })
      .def_property_readonly("isa", [](const PyModel& model) { return std::string(model.model->kernels->name); });

  attributes(py::class_<KernelTime>(m, "KernelTime"), "seconds", &KernelTime::seconds, "least", &KernelTime::least,
         "most", &KernelTime::most, "bytes", &KernelTime::bytes, "flops", &KernelTime::flops);

  py::class_<PyEngine>(m, "Engine")
      .def(py::init([](const PyModel& model, int threads) {
             return PyEngine{model, {new CpuEngine(model.model, threads), NotAfterFork()}};
           }),
           py::arg("model"), py::arg("threads"))
      .def_property_readonly("threads", [](const PyEngine& engine) { return engine.engine->threads(); })
      .def_property_readonly("pin_problem", [](const PyEngine& engine) { return engine.engine->pin_problem(); })
      .def(
          "time_kernel",
          [](PyEngine& engine, const std::string& name, int rows, int context, int repeats) {
            return time_kernel(*engine.engine->model(), engine.engine->team(), name, rows, context, repeats);
          },
          py::arg("name"), py::arg("rows"), py::arg("context"), py::arg("repeats"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "logits",
          [](PyEngine& engine, const std::vector<int>& ids, int last) {
            if (last < 1 || last > int(ids.size())) throw std::invalid_argument("there are not so many ids");
            std::vector<float> logits;
            {
              const py::gil_scoped_release release;
              logits = engine.engine->logits(ids, last);
            }
            return py::array_t<float>({py::ssize_t(last), py::ssize_t(logits.size() / last)}, logits.data());
          },
          py::arg("ids"), py::arg("last"))
      .def(
          "logprobs",
          [](PyEngine& engine, const std::vector<int>& ids, int top) {
            std::vector<Logprobs> all;
            {
              const py::gil_scoped_release release;
              all = engine.engine->logprobs(ids, top);
            }
            py::list out;
            for (const Logprobs& each : all) out.append(logprob_of(each));
            return out;
          }, py::arg("ids"), py::arg("top"));
}
