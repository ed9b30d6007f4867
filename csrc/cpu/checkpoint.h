// Models out of the tensors of a checkpoint, and of an exit head's file.
//
// Whatever is wrong with the tensors is a std::runtime_error that names one: missing, of another shape, not finite.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "stage.h"

namespace ppsd {

// By name, where they lie in memory; their owner keeps them there. A vector has one column.
using NamedTensors = std::map<std::string, Tensor>;

Format format_of(const std::string& name);      // "float32", "bfloat16", "int8", "int4"
Stored kv_format_of(const std::string& name);   // "float32", "bfloat16", "int8"

// All layers of a checkpoint, and its embedding.
std::vector<LayerTensors> layers_of(const NamedTensors& tensors, const ModelShape& shape);
Tensor embedding_of(const NamedTensors& tensors, const ModelShape& shape);

struct Packing {
  Format format = Format::kFp32;
  Stored kv = Stored::kFp32;
  int threads = 1;
  int first = 0, last = -1;            // layers [first, last); -1: to the end
  bool lm_head = true;
  const float* importance = nullptr;   // [layers][InputOffsets::width], as measure_importance gives it, or null
};

std::shared_ptr<const CpuModel> pack_model(const Kernels& kernels, const ModelShape& shape, const NamedTensors& tensors,
                                           Rotary rotary, const Packing& packing);

// The same model with an exit head after layers [0, exit_layer), or on the embeddings; the weights of the model itself
// are shared.
// draft_ids: those that the head scores; empty: all.
std::shared_ptr<const CpuModel> with_exit_head(const CpuModel& base, int exit_layer, const NamedTensors& tensors,
                                               std::vector<int> draft_ids, int threads);

// The same with an EAGLE-3 head. eagle: its shape, rotation, taps and flags; the rest comes from the tensors, of which the
// embedding is read where it lies.
std::shared_ptr<const CpuModel> with_eagle3(const CpuModel& base, Eagle eagle, const NamedTensors& tensors,
                                            std::vector<int> draft_ids, int threads);

}  // namespace ppsd
