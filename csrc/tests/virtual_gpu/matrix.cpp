// Matrix instructions on bfloat16: exact products, added up in double and rounded once. A tensor core rounds otherwise.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "machine.h"
#include "units.h"

namespace virtual_gpu {
namespace {

float wide(uint32_t half) {
  const uint32_t its = half << 16;
  float number;
  std::memcpy(&number, &its, 4);
  return number;
}

const uint8_t* read_shared(Warp& w, uint32_t at, int bytes) {
  Shared& memory = w.cta->shared;
  if (at % uint32_t(bytes) || uint64_t(at) + uint64_t(bytes) > memory.bytes.size()) w.fail("is out of the bounds of shared memory, or not aligned");
  if (w.cta->machine->audits)
    if (const char* what = memory.note(at, bytes, w.number, false, false, w.cta->machine->epoch_of(*w.cta))) w.fail(what);
  return &memory.bytes[at];
}

uint32_t shared_address(Warp& w, const Operand& o, int lane) {
  return uint32_t((o.bits == 64 ? w.lanes<uint64_t>(o)[lane] : w.lanes<uint32_t>(o)[lane]) + uint64_t(o.value));
}

// `option`: 1 if transposed. A row of eight values of 16 bits is 16 bytes; lane 8 m + r has the address of row r of
// matrix m; lane 4 r + c gets columns 2 c and 2 c + 1 of row r.
void ldmatrix(Warp& w, const Instruction& i) {
  uint16_t rows[32][8];
  for (int r = 0; r < 8 * int(i.to.size()); ++r) std::memcpy(rows[r], read_shared(w, shared_address(w, i.from[0], r), 16), 16);
  for (size_t m = 0; m < i.to.size(); ++m) {
    uint32_t* to = w.lanes<uint32_t>(i.to[m]);
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = l % 4 * 2;
      to[l] = i.option ? rows[8 * m + size_t(c)][r] | uint32_t(rows[8 * m + size_t(c) + 1][r]) << 16
                       : rows[8 * m + size_t(r)][c] | uint32_t(rows[8 * m + size_t(r)][c + 1]) << 16;
    }
  }
}
void stmatrix(Warp& w, const Instruction& i) {
  Shared& memory = w.cta->shared;
  for (size_t m = 0; m + 1 < i.from.size(); ++m) {
    uint16_t rows[8][8];
    const uint32_t* from = w.lanes<uint32_t>(i.from[m + 1]);
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = l % 4 * 2;
      (i.option ? rows[c][r] : rows[r][c]) = uint16_t(from[l]);
      (i.option ? rows[c + 1][r] : rows[r][c + 1]) = uint16_t(from[l] >> 16);
    }
    for (int r = 0; r < 8; ++r) {
      const uint32_t at = shared_address(w, i.from[0], int(8 * m) + r);
      if (at % 16 || uint64_t(at) + 16 > memory.bytes.size()) w.fail("is out of the bounds of shared memory, or not aligned");
      if (w.cta->machine->audits)
        if (const char* what = memory.note(at, 16, w.number, true, std::memcmp(&memory.bytes[at], rows[r], 16) != 0, w.cta->machine->epoch_of(*w.cta))) w.fail(what);
      std::memcpy(&memory.bytes[at], rows[r], 16);
    }
  }
}

// The part of a 16 x 16 matrix that a warp's registers hold: lane 4 r + c has columns 2 c and 2 c + 1 of row r, of each of
// four parts: the upper left, the lower left, the upper right, the lower right one.
void unfold(const uint32_t* registers[4], double matrix[16][16]) {
  for (int part = 0; part < 4; ++part)
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4 + part % 2 * 8, c = l % 4 * 2 + part / 2 * 8;
      matrix[r][c] = wide(registers[part][l] & 0xFFFF), matrix[r][c + 1] = wide(registers[part][l] >> 16);
    }
}

// 16 x 8 of sums: the registers hold rows r and r + 8 likewise.
void mma(Warp& w, const Instruction& i) {
  const uint32_t* rows[4];
  double a[16][16], b[16][8];
  for (size_t part = 0; part < 4; ++part) rows[part] = w.lanes<uint32_t>(i.from[part]);
  unfold(rows, a);
  for (int half = 0; half < 2; ++half) {
    const uint32_t* from = w.lanes<uint32_t>(i.from[size_t(4 + half)]);
    for (int l = 0; l < kLanes; ++l) {
      const int n = l / 4, k = l % 4 * 2 + 8 * half;
      b[k][n] = wide(from[l] & 0xFFFF), b[k + 1][n] = wide(from[l] >> 16);
    }
  }
  float sums[16][8];
  for (int part = 0; part < 4; ++part) {
    const float* from = w.lanes<float>(i.from[size_t(6 + part)]);
    for (int l = 0; l < kLanes; ++l) sums[l / 4 + part / 2 * 8][l % 4 * 2 + part % 2] = from[l];
  }
  for (int r = 0; r < 16; ++r) {
    double row[8];
    for (int n = 0; n < 8; ++n) row[n] = sums[r][n];
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) row[n] += a[r][k] * b[k][n];
    for (int n = 0; n < 8; ++n) sums[r][n] = float(row[n]);
  }
  for (int part = 0; part < 4; ++part) {
    float* to = w.lanes<float>(i.to[size_t(part)]);
    for (int l = 0; l < kLanes; ++l) to[l] = sums[l / 4 + part / 2 * 8][l % 4 * 2 + part % 2];
  }
}

// -- wgmma -------------------------------------------------------------------------------------------------------------

// Four warps multiply 64 rows; each has 16 of them, and so each may do its own when it waits, which is as late as may be.
// Until then what reads the sums reads NaNs.
void wgmma(Warp& w, const Instruction& i) {
  const size_t sums = i.to.size();
  const bool registers = i.sizes[1] == 4;
  const size_t next = registers ? 4 : 1;   // of `from`: A, B, scale of the sums, signs of A and B, whether they are transposed
  Product product;
  product.its = &i, product.commit = w.products_committed;
  if (registers)
    for (size_t part = 0; part < 4; ++part)
      product.rows.insert(product.rows.end(), w.lanes<uint32_t>(i.from[part]), w.lanes<uint32_t>(i.from[part]) + kLanes);
  else
    product.descriptors.push_back(w.lanes<uint64_t>(i.from[0])[0]);
  product.descriptors.push_back(w.lanes<uint64_t>(i.from[next])[0]);
  const Operand& scale = i.from[next + 1];
  product.accumulates = scale.constant ? scale.value != 0 : (w.predicate(scale) & 1) != 0;
  for (size_t sign : {next + 2, next + 3})
    if (i.from[sign].value != 1) w.fail("multiplies with a sign that the machine does not know");
  auto& kept = w.sums[i.to[0].place];
  if (kept.empty()) {
    for (const Operand& o : i.to) kept.insert(kept.end(), w.lanes<uint32_t>(o), w.lanes<uint32_t>(o) + kLanes);
    for (const Operand& o : i.to) std::fill_n(w.lanes<uint32_t>(o), kLanes, 0x7FFFFFFFu);
  }
  if (kept.size() != sums * kLanes) w.fail("adds to sums of another shape");
  w.products.push_back(std::move(product));
}
void commit_products(Warp& w, const Instruction&) { ++w.products_committed; }
void wait_for_products(Warp& w, const Instruction& i) { end_products(w, int(i.from[0].value)); }

// Value [row][k] of a tile in shared memory. PTX: matrix descriptors, and the patterns of swizzling.
float of_tile(Warp& w, uint64_t descriptor, int row, int k, bool transposed) {
  const auto field = [&](int shift) { return uint32_t(descriptor >> shift & 0x3FFF) * 16; };
  const uint32_t start = field(0), lead = field(16), stride = field(32);
  const int mode = int(descriptor >> 62);
  const uint32_t width = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
  const uint32_t r = uint32_t(row), c = uint32_t(k);
  uint32_t at = start;
  if (!transposed) at += r % 8 * width + c * 2 + r / 8 * stride;
  else at += c % 8 * width + r % (width / 2) * 2 + r / (width / 2) * lead + c / 8 * stride;
  if (mode) at ^= (at >> 7 & (mode == 1 ? 7 : mode == 2 ? 3 : 1)) << 4;
  uint16_t half;
  std::memcpy(&half, read_shared(w, at, 2), 2);
  return wide(half);
}

void multiply(Warp& w, const Product& product) {
  const Instruction& i = *product.its;
  const bool registers = !product.rows.empty();
  const size_t flags = registers ? 8 : 5;   // where those of transposition begin
  const bool a_transposed = !registers && i.from[flags].value, b_transposed = i.from.size() > (registers ? flags : flags + 1) && i.from[registers ? flags : flags + 1].value;
  const int columns = int(i.to.size()) * 2;
  const int first = w.number % 4 * 16;
  double a[16][16];
  if (registers) {
    const uint32_t* parts[4];
    for (int part = 0; part < 4; ++part) parts[part] = product.rows.data() + part * kLanes;
    unfold(parts, a);
  } else {
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k) a[r][k] = of_tile(w, product.descriptors[0], first + r, k, a_transposed);
  }
  std::vector<double> b(size_t(columns) * 16);
  for (int n = 0; n < columns; ++n)
    for (int k = 0; k < 16; ++k) b[size_t(k * columns + n)] = of_tile(w, product.descriptors.back(), n, k, b_transposed);
  auto& sums = w.sums[i.to[0].place];
  std::vector<double> row(size_t(columns), 0.0);
  for (int r = 0; r < 16; ++r) {
    const auto cell = [&](int n) -> uint32_t& {   // its register: eight columns have four, for rows r and r + 8
      return sums[size_t((n / 8 * 4 + r / 8 * 2 + n % 2) * kLanes + r % 8 * 4 + n % 8 / 2)];
    };
    for (int n = 0; n < columns; ++n) {
      float before = 0;
      if (product.accumulates) std::memcpy(&before, &cell(n), 4);
      row[size_t(n)] = before;
    }
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < columns; ++n) row[size_t(n)] += a[r][k] * b[size_t(k * columns + n)];
    for (int n = 0; n < columns; ++n) {
      const float sum = float(row[size_t(n)]);
      std::memcpy(&cell(n), &sum, 4);
    }
  }
}

}  // namespace

void end_products(Warp& w, int left) {
  std::vector<Product> kept;
  for (Product& product : w.products) {
    if (product.commit >= w.products_committed - left) kept.push_back(std::move(product));
    else multiply(w, product);
  }
  std::vector<const Instruction*> ended;
  for (const Product& product : w.products)
    if (product.its != nullptr) ended.push_back(product.its);
  for (const Instruction* its : ended) {
    const int place = its->to[0].place;
    const auto uses = [&](const Product& product) { return product.its->to[0].place == place; };
    if (w.sums.count(place) == 0 || std::any_of(kept.begin(), kept.end(), uses)) continue;
    const auto& sums = w.sums[place];
    for (size_t n = 0; n < its->to.size(); ++n) std::memcpy(w.lanes<uint32_t>(its->to[n]), sums.data() + n * kLanes, kLanes * 4);
    w.sums.erase(place);
  }
  w.products = std::move(kept);
}

bool bind_matrix(Instruction& its) {
  const auto& part = its.name;
  const auto has = [&](const char* name) { return std::find(part.begin(), part.end(), name) != part.end(); };
  its.option = has("trans");
  if (part[0] == "ldmatrix" && has("m8n8")) its.run = ldmatrix;
  else if (part[0] == "stmatrix" && has("m8n8")) its.run = stmatrix;
  else if (part[0] == "mma" && has("m16n8k16") && has("bf16")) its.run = mma;
  else if (part[0] == "wgmma" && part[1] == "mma_async" && has("bf16")) its.run = wgmma;
  else if (part[0] == "wgmma" && part[1] == "commit_group") its.run = commit_products;
  else if (part[0] == "wgmma" && part[1] == "wait_group") its.run = wait_for_products;
  else if (part[0] == "wgmma" && part[1] == "fence") its.run = [](Warp&, const Instruction&) {};
  else return false;
  return true;
}

}  // namespace virtual_gpu
