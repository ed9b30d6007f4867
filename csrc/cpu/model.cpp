#include "model.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "half.h"

namespace ppsd {
namespace {

constexpr char kNotFinite[] = "a weight is NaN or infinite: the file is damaged, fetch or train it again";

size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

std::vector<SourceRow> rows_of(const Tensor& tensor) {
  std::vector<SourceRow> rows(tensor.rows);
  for (int64_t r = 0; r < tensor.rows; ++r) rows[r].data = tensor.row(r);
  return rows;
}

// The rows of q or k, each head's channels in rotary order.
void append_rotary(const Tensor& tensor, int head_dim, std::vector<SourceRow>* rows) {
  for (int64_t r = 0; r < tensor.rows; ++r) {
    const int64_t head = r / head_dim;
    rows->push_back({tensor.row(head * head_dim + rope_channel(int(r % head_dim), head_dim))});
  }
}

void append_rotary(const Tensor& vector, int head_dim, std::vector<float>* out) {
  const std::vector<float> plain = Packer::vector(vector);
  for (size_t r = 0; r < plain.size(); ++r)
    out->push_back(plain[r / head_dim * head_dim + rope_channel(int(r % head_dim), head_dim)]);
}

// Panels of gate and up in turn.
std::vector<SourceRow> interleaved(const Tensor& gate, const Tensor& up) {
  std::vector<SourceRow> rows;
  for (int64_t first = 0; first < gate.rows; first += kPanel) {
    for (int l = 0; l < kPanel; ++l) rows.push_back({gate.row(first + l)});
    for (int l = 0; l < kPanel; ++l) rows.push_back({up.row(first + l)});
  }
  return rows;
}

}  // namespace

size_t Packer::matrix_bytes(int outputs, int inputs) const { return aligned(Matrix{format_, outputs, inputs}.bytes()); }

size_t Packer::lm_head_bytes() const {
  return aligned(Matrix{lm_head_format(), shape_.vocab_size, shape_.hidden_size}.bytes());
}

Matrix Packer::qkv_matrix() const {
  Matrix matrix{format_, shape_.q_outputs() + 2 * shape_.kv_outputs(), shape_.hidden_size};
  if (format_ == Format::kInt4) matrix.wide_from = shape_.q_outputs() / kPanel;
  return matrix;
}

size_t Packer::layer_bytes(const LayerTensors& layer) const {
  size_t bytes = aligned(qkv_matrix().bytes()) +
                 matrix_bytes(shape_.hidden_size, shape_.q_outputs());
  if (layer.gate.present())
    bytes += matrix_bytes(2 * shape_.intermediate_size, shape_.hidden_size) +
             matrix_bytes(shape_.hidden_size, shape_.intermediate_size);
  return bytes;
}

PackedLayer Packer::layer(const LayerTensors& t, uint8_t** memory, const float* importance) const {
  PackedLayer out;
  const InputOffsets at(shape_);
  const auto source = [&](const std::vector<SourceRow>& rows, const Tensor& tensor, int offset) {
    return Source{rows.data(), tensor.stored, importance ? importance + offset : nullptr};
  };
  out.input_norm = vector(t.input_norm);
  std::vector<SourceRow> qkv;
  append_rotary(t.q, shape_.head_dim, &qkv);
  append_rotary(t.k, shape_.head_dim, &qkv);
  for (const SourceRow& row : rows_of(t.v)) qkv.push_back(row);
  out.qkv = pack(qkv_matrix(), source(qkv, t.q, at.qkv), memory);
  if (t.q_bias.present()) {
    append_rotary(t.q_bias, shape_.head_dim, &out.qkv_bias);
    append_rotary(t.k_bias, shape_.head_dim, &out.qkv_bias);
    for (float x : vector(t.v_bias)) out.qkv_bias.push_back(x);
  }
  out.attention = t.attention;
  if (t.q_norm.present()) {
    append_rotary(t.q_norm, shape_.head_dim, &out.q_norm);
    append_rotary(t.k_norm, shape_.head_dim, &out.k_norm);
  }
  out.o = pack({format_, shape_.hidden_size, shape_.q_outputs()}, source(rows_of(t.o), t.o, at.o), memory);
  if (t.o_bias.present()) out.o_bias = vector(t.o_bias);
  if (t.gate.present()) {
    out.post_norm = vector(t.post_norm);
    const int inner = shape_.intermediate_size, hidden = shape_.hidden_size;
    out.gate_up = pack({format_, 2 * inner, hidden}, source(interleaved(t.gate, t.up), t.gate, at.gate_up), memory);
    out.down = pack({format_, hidden, inner}, source(rows_of(t.down), t.down, at.down), memory);
  }
  for (const Tensor* tensor : {&t.q, &t.k, &t.v, &t.o, &t.gate, &t.up, &t.down}) release_pages(*tensor);
  return out;
}

Matrix Packer::matrix(const Tensor& tensor, uint8_t** memory) const {
  const std::vector<SourceRow> rows = rows_of(tensor);
  return pack({format_, int(tensor.rows), int(tensor.columns)}, {rows.data(), tensor.stored, nullptr}, memory);
}

Matrix Packer::lm_head(const Tensor& tensor, uint8_t** memory) const {
  const std::vector<SourceRow> rows = rows_of(tensor);
  const Matrix matrix{lm_head_format(), int(tensor.rows), int(tensor.columns)};
  return pack(matrix, {rows.data(), tensor.stored, nullptr}, memory, &tensor);
}

Matrix Packer::draft_head(const Tensor& tensor, const std::vector<int>& ids, uint8_t** memory) const {
  std::vector<SourceRow> rows;
  for (int id : ids) rows.push_back({tensor.row(id)});
  const Matrix matrix{format_, int(rows.size()), int(tensor.columns)};
  return pack(matrix, {rows.data(), tensor.stored, nullptr}, memory, &tensor);
}

Matrix Packer::pack(Matrix matrix, const Source& source, uint8_t** memory, const Tensor* large) const {
  matrix.data = *memory;
  *memory += aligned(matrix.bytes());
  constexpr int kPanels = 512;
  std::atomic<bool> finite{true};
  for (int first = 0; first < matrix.panels(); first += kPanels) {
    const int count = std::min(kPanels, matrix.panels() - first);
    Shares shares(team_->size());
    team_->run([&](int member) {
      team_->share(shares, member, count, 8, [&](int begin, int end) {
        if (!kernels_.pack(matrix, source, first + begin, first + end)) finite = false;
      });
    });
    if (large != nullptr) release_pages(*large);
  }
  if (!finite) throw std::runtime_error(kNotFinite);
  return matrix;
}

std::vector<float> Packer::vector(const Tensor& tensor) {
  std::vector<float> out(size_t(tensor.rows * tensor.columns));
  for (size_t i = 0; i < out.size(); ++i) switch (tensor.stored) {
      case Stored::kFp32: out[i] = static_cast<const float*>(tensor.data)[i]; break;
      case Stored::kFp16: out[i] = half_to_float(static_cast<const uint16_t*>(tensor.data)[i]); break;
      case Stored::kBf16: out[i] = bf16_to_float(static_cast<const uint16_t*>(tensor.data)[i]); break;
      case Stored::kInt8: break;   // of a KV cache alone
    }
  if (!std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); })) throw std::runtime_error(kNotFinite);
  return out;
}

void release_pages(const Tensor& tensor) {
  if (!tensor.mapped) return;
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), begin = uintptr_t(tensor.data);
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + tensor.row_bytes() * tensor.rows) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace ppsd
