// Models out of the tensors of a checkpoint, and of an exit head's file.
//
// Whatever is wrong with the tensors is a std::runtime_error that names one: missing, of another shape, not finite.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "eagle.h"
#include "heads.h"
#include "packed_file.h"

namespace ppsd {

// All that is read-only: weights, vocabulary, rotary frequencies. Shared by the stages of one model.
struct CpuModel {
  const Kernels* kernels;
  ModelShape shape;
  Format format;
  Stored kv;
  Tensor embedding, lm_head;           // [vocabulary][hidden], where the checkpoint has them; tied: the same
  Rotary rotary;
  std::vector<PackedLayer> layers;
  PackedHead head;                     // the final norm, and the whole LM head
  // The exit head; without one nothing is drafted, and all layers verify. exit_layer 0: it reads the embeddings.
  int exit_layer = 0;
  std::vector<PackedLayer> exit_layers;
  PackedFeedback exit_feedback;
  PackedTap tap;
  PackedHead exit_head;                // its matrix may be `head`'s
  std::shared_ptr<const Eagle> eagle;  // or this, which reads what all layers make of the text
  std::vector<int> draft_ids;          // or empty: the whole vocabulary
  Tensor draft_rows;                   // the LM head whose rows are drafted with for ids of the text; or not present
  std::vector<std::shared_ptr<const Memory>> memory;   // what the matrices lie in; models with other heads share it
  size_t packed_bytes = 0;
  bool mapped = false;                 // the last of `memory`, from a file

  const PackedHead& drafting_head() const { return eagle ? eagle->head : exit_head; }
  bool drafts() const { return !drafting_head().norm.empty(); }
  DraftVocabulary draft_vocabulary() const;   // that a text begins with
  std::vector<int> taps() const {      // after so many layers, verified rows are kept for the head
    return eagle ? eagle->taps : tap.layer > 0 ? std::vector<int>{tap.layer} : std::vector<int>();
  }
};

std::vector<const PackedLayer*> pointers(const std::vector<PackedLayer>& layers, int first, int last);
void embed(const Tensor& table, int id, float* row);   // row [hidden]

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
  PackedFile file;                     // maps what packing these tensors has made before
};

std::shared_ptr<const CpuModel> pack_model(const Kernels& kernels, const ModelShape& shape, const NamedTensors& tensors,
                                           Rotary rotary, const Packing& packing);

// The same model with an exit head after layers [0, exit_layer), or on the embeddings; the weights of the model itself
// are shared.
// draft_ids: those that the head scores; empty: all. file: as of Packing. tap: PackedTap::layer.
std::shared_ptr<const CpuModel> with_exit_head(const CpuModel& base, int exit_layer, const NamedTensors& tensors,
                                               std::vector<int> draft_ids, int threads, const PackedFile& file = {}, int tap = 0);

// The same with an EAGLE-3 head. eagle: its shape, rotation, taps and flags; the rest comes from the tensors, of which the
// embedding is read where it lies.
std::shared_ptr<const CpuModel> with_eagle3(const CpuModel& base, Eagle eagle, const NamedTensors& tensors,
                                            std::vector<int> draft_ids, int threads, const PackedFile& file = {});

// How much an error in each input of a layer's matrices matters, which int4 weighs its errors by (importance.cpp):
// the mean square that each input has over a text's rows (as the "importance matrix" of llama.cpp; an output's squared error
// is the sum of its weights' squared errors times these, if inputs are uncorrelated): `out` [layers][InputOffsets::width]. No
// input counts less than a thousandth of its matrix's mean, for another text may use it. The layers are packed as int8 one
// after the other, so that only one takes memory. Throws std::runtime_error where weights or rows are not finite.
void measure_importance(const Kernels& kernels, const ModelShape& shape, const std::vector<LayerTensors>& layers,
                        const Tensor& embedding, const Rotary& rotary, const std::vector<int>& ids,
                        int threads, float* out);

}  // namespace ppsd
