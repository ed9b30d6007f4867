// How much an error in each input of a layer's matrices matters: what int4 weighs its errors by.
#pragma once

#include <vector>

#include "model.h"

namespace ppsd {

// The mean square that each input has over a text's rows (as the "importance matrix" of llama.cpp; an output's squared error
// is the sum of its weights' squared errors times these, if inputs are uncorrelated): `out` [layers][InputOffsets::width]. No
// input counts less than a thousandth of its matrix's mean, for another text may use it. The layers are packed as int8 one
// after the other, so that only one takes memory. Throws std::runtime_error where weights or rows are not finite.
void measure_importance(const Kernels& kernels, const ModelShape& shape, const std::vector<LayerTensors>& layers,
                        const Tensor& embedding, const Rotary& rotary, const std::vector<int>& ids,
                        int threads, float* out);

}  // namespace ppsd
