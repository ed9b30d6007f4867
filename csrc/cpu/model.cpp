#include "model.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace ppsd {
namespace {

size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

std::vector<RowOf> rows_of(const Tensor& tensor) {
  std::vector<RowOf> rows;
  rows.reserve(tensor.rows);
  for (int64_t r = 0; r < tensor.rows; ++r) rows.push_back({&tensor, r});
  return rows;
}

// The rows of q or k, each head's channels in rotary order.
void append_rotary(const Tensor& tensor, int head_dim, std::vector<RowOf>* rows) {
  for (int64_t r = 0; r < tensor.rows; ++r) {
    const int64_t head = r / head_dim;
    rows->push_back({&tensor, head * head_dim + rope_channel(int(r % head_dim), head_dim)});
  }
}

void append_rotary(const Tensor& vector, int head_dim, std::vector<float>* out) {
  const std::vector<float> plain = Packer::vector(vector);
  for (size_t r = 0; r < plain.size(); ++r)
    out->push_back(plain[r / head_dim * head_dim + rope_channel(int(r % head_dim), head_dim)]);
}

// Panels of gate and up in turn.
std::vector<RowOf> interleaved(const Tensor& gate, const Tensor& up) {
  std::vector<RowOf> rows;
  for (int64_t first = 0; first < gate.rows; first += kPanel) {
    for (int l = 0; l < kPanel; ++l) rows.push_back({&gate, first + l});
    for (int l = 0; l < kPanel; ++l) rows.push_back({&up, first + l});
  }
  return rows;
}

// Can the kernels read these rows where they lie? If not, they are decoded to float32 first.
bool lie_ready(const std::vector<RowOf>& rows) {
  return std::all_of(rows.begin(), rows.end(), [&](const RowOf& row) {
    return row.tensor->blocks == nullptr && row.tensor->stored == rows[0].tensor->stored;
  });
}

// An output of int4, of a row that is stored in four bits. False: a scale is no finite number.
bool copy_four_bits(const Matrix& matrix, int output, const RowOf& row) {
  const int l = output % kPanel;
  bool finite = true;
  const BlockType& type = *row.tensor->blocks;
  const auto* from = static_cast<const uint8_t*>(row.tensor->row(row.row));
  uint8_t* to = matrix.panel(output / kPanel);
  for (int i = 0; i < matrix.inputs; i += type.values, from += type.bytes) {
    FourBits blocks[kMostFourBits];
    type.four_bits(from, blocks);
    for (int b = 0; b < type.values / kBlock; ++b, to += kInt4Block) {
      auto* halves = reinterpret_cast<uint16_t*>(to);
      halves[l] = nearest_half(blocks[b].scale);
      halves[kPanel + l] = nearest_half(blocks[b].minimum);
      for (int word = 0; word < kBlock / 8; ++word)
        std::memcpy(to + kInt4Codes + word * 4 * kPanel + l * 4, blocks[b].codes + word * 4, 4);
      finite = finite && std::isfinite(blocks[b].scale) && std::isfinite(blocks[b].minimum);
    }
  }
  return finite;
}

// A panel of int6 of rows that are stored in six bits; `rows`: of its outputs that there are. False: likewise.
bool copy_six_bits(const Matrix& matrix, int p, const RowOf* rows, int count) {
  bool finite = true;
  for (int l = 0; l < count; ++l) {
    const BlockType& type = *rows[l].tensor->blocks;
    const auto* from = static_cast<const uint8_t*>(rows[l].tensor->row(rows[l].row));
    uint8_t* to = matrix.panel(p);
    for (int i = 0; i < matrix.inputs; i += kInt6Inputs, from += type.bytes, to += kInt6Block) {
      SixBits block;
      type.six_bits(from, &block);
      reinterpret_cast<uint16_t*>(to)[l] = block.scale;
      for (int g = 0; g < kInt6Inputs / kSixes; ++g) {
        to[kInt6Scales + g * kPanel + l] = uint8_t(block.scales[g]);
        for (int k = 0; k < 4; ++k) {
          const uint8_t* codes = block.codes + g * kSixes + k;
          uint8_t* at = to + kInt6Codes + g * kSixesBytes + l * 4 + k;
          at[0] = uint8_t((codes[0] & 15) | codes[4] << 4);
          at[64] = uint8_t((codes[8] & 15) | codes[12] << 4);
          at[128] = uint8_t(codes[0] >> 4 | codes[4] >> 4 << 2 | codes[8] >> 4 << 4 | codes[12] >> 4 << 6);
        }
      }
      finite = finite && std::isfinite(half_to_float(block.scale));
    }
  }
  return finite;
}

}  // namespace

std::vector<float> Rotary::at(int length) const {
  if (!by_length() || length <= original) return frequencies;
  if (!long_frequencies.empty()) return long_frequencies;
  const double size = 2.0 * double(frequencies.size());
  const float base = float(theta * std::pow(growth * length / original - (growth - 1.0), size / (size - 2.0)));
  std::vector<float> out;
  for (size_t i = 0; i < frequencies.size(); ++i) out.push_back(1.0f / std::pow(base, 2.0f * float(i) / float(size)));
  return out;
}

Format Packer::format_for(const Tensor& tensor, bool delicate) const {
  const bool widened = format_ == Format::kInt4 && !tensor.four_bits() && (as_stored_ || delicate);
  const Format format = widened ? Format::kInt8 : format_;
  return format == Format::kInt8 && tensor.six_bits() ? Format::kInt6 : format;
}

Matrix Packer::plain_matrix(const Tensor& tensor) const {
  return {format_for(tensor), int(tensor.rows), int(tensor.columns)};
}

Matrix Packer::lm_head_matrix(const Tensor& tensor) const {
  return {format_for(tensor, true), shape_.vocab_size, shape_.hidden_size};
}

Matrix Packer::qkv_matrix(const LayerTensors& t) const {
  Matrix matrix{format_for(t.q), shape_.q_outputs() + 2 * shape_.kv_outputs(), int(t.q.columns)};
  if (matrix.format <= Format::kInt8) return matrix;
  matrix.wide_from = 0;   // from the first of them that is in another format
  for (const auto& [tensor, delicate] : {std::pair(&t.q, false), std::pair(&t.k, true), std::pair(&t.v, true)}) {
    if (format_for(*tensor, delicate) != matrix.format) break;
    matrix.wide_from += int(tensor->rows) / kPanel;
  }
  return matrix;
}

Matrix Packer::gate_up_matrix(const LayerTensors& t) const {
  const Format gate = format_for(t.gate), up = format_for(t.up);
  return {gate == up ? gate : Format::kInt8, 2 * int(t.gate.rows), shape_.hidden_size};
}

size_t Packer::matrix_bytes(int outputs, int inputs) const { return aligned(Matrix{format_, outputs, inputs}.bytes()); }

size_t Packer::lm_head_bytes(const Tensor& tensor) const { return aligned(lm_head_matrix(tensor).bytes()); }

size_t Packer::layer_bytes(const LayerTensors& layer) const {
  size_t bytes = aligned(qkv_matrix(layer).bytes()) + aligned(plain_matrix(layer.o).bytes());
  if (layer.gate.present()) bytes += aligned(gate_up_matrix(layer).bytes()) + aligned(plain_matrix(layer.down).bytes());
  return bytes;
}

PackedLayer Packer::layer(const LayerTensors& t, uint8_t** memory, const float* importance) const {
  PackedLayer out;
  const InputOffsets at(shape_);
  const auto weigh = [&](int offset) { return importance ? importance + offset : nullptr; };
  out.input_norm = vector(t.input_norm);
  std::vector<RowOf> qkv;
  append_rotary(t.q, shape_.head_dim, &qkv);
  append_rotary(t.k, shape_.head_dim, &qkv);
  for (const RowOf& row : rows_of(t.v)) qkv.push_back(row);
  out.qkv = pack(qkv_matrix(t), qkv, weigh(at.qkv), memory);
  if (t.k_bias.present()) {
    append_rotary(t.q_bias, shape_.head_dim, &out.qkv_bias);
    append_rotary(t.k_bias, shape_.head_dim, &out.qkv_bias);
    for (float x : vector(t.v_bias)) out.qkv_bias.push_back(x);
  }
  out.attention = t.attention;
  if (t.q_norm.present()) {
    append_rotary(t.q_norm, shape_.head_dim, &out.q_norm);
    append_rotary(t.k_norm, shape_.head_dim, &out.k_norm);
  }
  if (t.o.present()) out.o = pack(plain_matrix(t.o), rows_of(t.o), weigh(at.o), memory);
  if (t.o_bias.present()) out.o_bias = vector(t.o_bias);
  if (t.gate_bias.present()) {
    const std::vector<float> gate = vector(t.gate_bias), up = vector(t.up_bias);
    for (size_t first = 0; first < gate.size(); first += kPanel) {
      out.gate_up_bias.insert(out.gate_up_bias.end(), gate.begin() + first, gate.begin() + first + kPanel);
      out.gate_up_bias.insert(out.gate_up_bias.end(), up.begin() + first, up.begin() + first + kPanel);
    }
    out.down_bias = vector(t.down_bias);
  }
  if (t.gate.present()) {
    out.post_norm = vector(t.post_norm);
    out.gate_up = pack(gate_up_matrix(t), interleaved(t.gate, t.up), weigh(at.gate_up), memory);
    out.down = pack(plain_matrix(t.down), rows_of(t.down), weigh(at.down), memory);
  }
  for (const Tensor* tensor : {&t.q, &t.k, &t.v, &t.o, &t.gate, &t.up, &t.down}) release_pages(*tensor);
  return out;
}

Matrix Packer::matrix(const Tensor& tensor, uint8_t** memory) const {
  return pack(plain_matrix(tensor), rows_of(tensor), nullptr, memory);
}

Matrix Packer::lm_head(const Tensor& tensor, uint8_t** memory) const {
  return pack(lm_head_matrix(tensor), rows_of(tensor), nullptr, memory, &tensor);
}

Matrix Packer::draft_head(const Tensor& tensor, const std::vector<int>& ids, uint8_t** memory) const {
  std::vector<RowOf> rows;
  for (int id : ids) rows.push_back({&tensor, id});
  return pack({format_, int(rows.size()), int(tensor.columns)}, rows, nullptr, memory, &tensor);
}

Matrix Packer::pack(Matrix matrix, const std::vector<RowOf>& rows, const float* importance, uint8_t** memory,
                    const Tensor* large) const {
  matrix.data = *memory;
  *memory += aligned(matrix.bytes());
  if (filled_) return matrix;
  const bool ready = lie_ready(rows);
  std::vector<SourceRow> sources(rows.size());
  for (size_t i = 0; ready && i < rows.size(); ++i) sources[i].data = rows[i].tensor->row(rows[i].row);
  const Source source{sources.data(), ready ? rows[0].tensor->stored : Stored::kFp32, importance};
  const size_t panel_values = size_t(kPanel) * matrix.inputs;
  std::vector<float> decoded(ready ? 0 : team_->size() * panel_values);   // a panel of each member
  const auto pack_panel = [&](int member, int p) {
    const int begin = p * kPanel, end = std::min(begin + kPanel, matrix.outputs);
    const auto stored_so = [](const RowOf& row) { return row.tensor->four_bits(); };
    if (matrix.format_of(p) == Format::kInt4 && std::all_of(&rows[begin], &rows[begin] + (end - begin), stored_so)) {
      bool finite = true;
      for (int i = begin; i < end; ++i) finite = copy_four_bits(matrix, i, rows[i]) && finite;
      return finite;
    }
    if (matrix.format_of(p) == Format::kInt6) return copy_six_bits(matrix, p, &rows[begin], end - begin);
    float* to = decoded.data() + member * panel_values;
    for (int i = begin; i < end && !ready; ++i, to += matrix.inputs) {
      read_row(*rows[i].tensor, rows[i].row, to);
      sources[i].data = to;
    }
    return kernels_.pack(matrix, source, p, p + 1);
  };
  constexpr int kPanels = 512;
  std::atomic<bool> finite{true};
  for (int first = 0; first < matrix.panels(); first += kPanels) {
    const int count = std::min(kPanels, matrix.panels() - first);
    Shares shares(team_->size());
    team_->run([&](int member) {
      team_->share(shares, member, count, 8, [&](int begin, int end) {
        for (int p = first + begin; p < first + end; ++p)
          if (!pack_panel(member, p)) finite = false;
      });
    });
    if (large != nullptr) release_pages(*large);
  }
  if (!finite) throw std::runtime_error(kNotFinite);
  return matrix;
}

std::vector<float> Packer::vector(const Tensor& tensor) {
  std::vector<float> out(size_t(tensor.rows * tensor.columns));
  for (int64_t r = 0; r < tensor.rows; ++r) read_row(tensor, r, out.data() + r * tensor.columns);
  if (!std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); })) throw std::runtime_error(kNotFinite);
  return out;
}

void pack_row(const Kernels& kernels, const Tensor& tensor, int64_t r, const Matrix& matrix, int output) {
  if (matrix.format == Format::kInt4 && tensor.four_bits()) {
    copy_four_bits(matrix, output, {&tensor, r});
    return;
  }
  std::vector<float> decoded;
  if (tensor.blocks != nullptr) read_row(tensor, r, (decoded.resize(size_t(tensor.columns)), decoded.data()));
  const void* row = decoded.empty() ? tensor.row(r) : decoded.data();
  kernels.pack_output(matrix, row, decoded.empty() ? tensor.stored : Stored::kFp32, nullptr, output);
}

void read_row(const Tensor& tensor, int64_t r, float* out) {
  const void* from = tensor.row(r);
  if (tensor.blocks != nullptr) {
    const auto* block = static_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < tensor.columns; i += tensor.blocks->values, block += tensor.blocks->bytes)
      tensor.blocks->decode(block, out + i);
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(from);
  const int64_t n = tensor.columns;
  switch (tensor.stored) {
    case Stored::kFp32: std::memcpy(out, from, size_t(n) * 4); break;
    case Stored::kFp16: for (int64_t i = 0; i < n; ++i) out[i] = half_to_float(halves[i]); break;
    case Stored::kBf16: for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(halves[i]); break;
    case Stored::kInt8: break;   // of a KV cache alone
  }
}

void release_pages(const Tensor& tensor) {
  if (!tensor.mapped) return;
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), begin = uintptr_t(tensor.data);
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + tensor.row_bytes() * tensor.rows) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace ppsd
