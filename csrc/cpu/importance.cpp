#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "checkpoint.h"

namespace ppsd {
namespace {

void to_means(float* squares, int count, int rows) {
  for (int i = 0; i < count; ++i) squares[i] /= float(rows);
  const float mean = std::accumulate(squares, squares + count, 0.0f) / float(count);
  if (!std::isfinite(mean))
    throw std::runtime_error("what goes into it is not a number: weights are damaged, or overflow in this format");
  for (int i = 0; i < count; ++i) squares[i] = std::max(squares[i], mean * 1e-3f);
}

}  // namespace

void measure_importance(const Kernels& kernels, const ModelShape& shape, const std::vector<LayerTensors>& layers,
                        const Tensor& embedding, const Rotary& rotary, const std::vector<int>& ids,
                        int threads, float* out) {
  const int hidden = shape.hidden_size, rows = int(ids.size());
  const InputOffsets at(shape);
  std::vector<float> x(size_t(rows) * hidden);   // [rows][hidden]
  for (int r = 0; r < rows; ++r) embed(embedding, ids[r], x.data() + size_t(r) * hidden);
  const std::vector<float> rope = make_rope(rotary, rows, rows);
  Team team(threads, {});
  const Packer packer(kernels, Format::kInt8, shape, &team);
  const Memory memory(packer.layer_bytes(layers[0]));
  for (size_t number = 0; number < layers.size(); ++number, out += at.width)
    named("layer " + std::to_string(number), [&] {
      uint8_t* free = memory.as<>();
      const PackedLayer packed = packer.layer(layers[number], &free);
      LayerStack stack(kernels, shape, Format::kInt8, Stored::kBf16, {&packed}, threads);
      const int spans = (rows + kSpan - 1) / kSpan;
      const Memory cache(stack.end() * size_t(spans));
      std::vector<uint8_t*> blocks;
      for (int span = 0; span < spans; ++span) blocks.push_back(cache.as<>() + stack.end() * size_t(span));
      stack.observe(out);
      for (int start = 0; start < rows; start += kPassRows) {
        const Segment segment{std::min(kPassRows, rows - start), start, blocks.data(), spans};
        stack.run(team, {segment}, rope.data(), x.data() + size_t(start) * hidden);
      }
      const int begins[] = {at.qkv, at.o, at.gate_up, at.down, at.width};
      for (int matrix = 0; matrix < 4; ++matrix)
        to_means(out + begins[matrix], begins[matrix + 1] - begins[matrix], rows);
    });
}

}  // namespace ppsd
