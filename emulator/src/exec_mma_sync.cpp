// mma.sync: products of matrices that a warp holds in registers (PTX ISA, "Warp Level Matrix Instructions:
// mma"): D = A B^T + C with A of 16 rows, B of 8 rows and fp32 C and D. A row of A or B has 32 bytes in every
// shape: 16 elements of 16 bits, 32 of 8 bits with one scale factor, or 64 of 4 bits with a scale factor for
// each 16 or 32 of them.
//
// The option `arithmetic` says how the products add up: PTXEMU_ROUNDED sums them in double, adds C, and
// rounds once to fp32; PTXEMU_TRUNCATED is MMA-Sim's model (numeric.hpp), in which products of fp16 and bf16
// are summands with 25 fraction bits, and the exact sums of 16 products of e2m1 summands with 35. Sums that
// fit in fp32 are the same.
#include <cmath>

#include "families.hpp"
#include "machine.hpp"
#include "numeric.hpp"

namespace ptxemu {

namespace {

constexpr int kM = 16, kN = 8;  // rows of A, and of B
constexpr int kRowBytes = 32;
constexpr int kMaxK = 64;
constexpr int kMaxBlocks = 4;             // scale factors of a row
constexpr int kLaneBytes = sizeof(u32);   // of a row, in a register of a lane
constexpr int kHalfRow = 4 * kLaneBytes;  // of a row, in a register of four lanes

/// The elements of A and B, in the order of the names that decode_mma_sync looks for.
enum Element {
  kF16,
  kBf16,
  kE2m1,
  kE4m3,
  kE2m1Mx,    // with ue8m0 scale factors
  kE4m3E2m1,  // A in e4m3, and B in e2m1 with an element in a byte
  kNumElements
};
constexpr int kE2m1InByte = kNumElements;  // for decode_row, of B

/// The elements of A, or of B, alone.
constexpr int of_a(int element) { return element == kE4m3E2m1 ? kE4m3 : element; }
constexpr int of_b(int element) { return element == kE4m3E2m1 ? kE2m1InByte : element; }

/// Decodes the elements of a row; returns their number.
int decode_row(u8 const* bytes, int element, double* out) {
  if (element == kE2m1 || element == kE2m1Mx) {
    for (int i = 0; i < kMaxK; ++i) {
      out[i] = decode_e2m1(bytes[i / 2] >> (i % 2 * 4) & 15);
    }
    return kMaxK;
  }
  if (element == kE2m1InByte) {  // in bits 2 to 5; CUTLASS's kernels clear the others
    for (int i = 0; i < kRowBytes; ++i) {
      if ((bytes[i] & 0xC3) != 0) {
        fatal("mma.sync of e2m1 beside e4m3 with the byte 0x%02x: only bits 2 to 5 are modelled", bytes[i]);
      }
      out[i] = decode_e2m1(bytes[i] >> 2);
    }
    return kRowBytes;
  }
  if (element == kE4m3) {
    for (int i = 0; i < kRowBytes; ++i) {
      out[i] = decode_e4m3(bytes[i]);
    }
    return kRowBytes;
  }
  for (int i = 0; i < kRowBytes / 2; ++i) {
    u32 const code = bytes[2 * i] | bytes[2 * i + 1] << 8;
    out[i] = element == kF16 ? decode_f16(code) : decode_bf16(code);
  }
  return kRowBytes / 2;
}

/// The sum of 16 products and c in MMA-Sim's model. `least`: the exponent of subnormal elements.
u32 truncated_product(double const* a, double const* b, int least, float c) {
  constexpr int kCount = kRowBytes / 2, kFractionBits = 25;
  Summand summands[kCount + 1];
  double plain = c;
  for (int i = 0; i < kCount; ++i) {
    plain += a[i] * b[i];
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      summands[i] = summand(static_cast<float>(a[i]), least) * summand(static_cast<float>(b[i]), least);
    }
  }
  if (!std::isfinite(plain)) {
    return plain != plain ? kTensorCoreNan : as_bits(static_cast<float>(plain));
  }
  summands[kCount] = summand(c, -126);
  return as_bits(truncated_sum(summands, kCount + 1, kFractionBits));
}

/// The sum of 64 products of e2m1 with their ue4m3 scale factors and c in MMA-Sim's model.
u32 truncated_block_product(double const* a, double const* b, double const* scale_a, double const* scale_b,
                            float c) {
  constexpr int kFractionBits = 35, kLeast = -6, kBlock = 16;
  Summand summands[kMaxBlocks + 1];
  double plain = c;
  for (int i = 0; i < kMaxBlocks; ++i) {
    double dot = 0;
    for (int j = i * kBlock; j < (i + 1) * kBlock; ++j) {
      dot += a[j] * b[j];
    }
    plain += scale_a[i] * scale_b[i];
    if (scale_a[i] == scale_a[i] && scale_b[i] == scale_b[i]) {
      summands[i] = Summand{static_cast<i64>(dot * 4), -2, 0} *  // a multiple of 1/4
                    summand(static_cast<float>(scale_a[i]), kLeast) *
                    summand(static_cast<float>(scale_b[i]), kLeast);
    }
  }
  if (!std::isfinite(plain)) {
    return plain != plain ? kTensorCoreNan : as_bits(static_cast<float>(plain));
  }
  summands[kMaxBlocks] = summand(c, -126);
  return as_bits(truncated_sum(summands, kMaxBlocks + 1, kFractionBits));
}

}  // namespace

/// mode: the elements of A and B.
bool decode_mma_sync(Instruction& in) {
  static char const* const types[] = {".f32.f16.f16.f32",         ".f32.bf16.bf16.f32",
                                      ".f32.e2m1.e2m1.f32.ue4m3", ".f32.e4m3.e4m3.f32.ue8m0",
                                      ".f32.e2m1.e2m1.f32.ue8m0", ".f32.e4m3.e2m1.f32.ue8m0"};
  static size_t const num_operands[] = {4, 4, 8, 8, 8, 8};
  in.handler = &Machine::exec_mma_sync;
  for (in.mode[0] = 0; in.mode[0] < kNumElements; ++in.mode[0]) {
    std::string const suffix = types[in.mode[0]];
    if (in.opcode.size() > suffix.size() &&
        in.opcode.compare(in.opcode.size() - suffix.size(), suffix.size(), suffix) == 0) {
      break;
    }
  }
  if (in.mode[0] == kNumElements || in.operands.size() != num_operands[in.mode[0]] || !in.has("row") ||
      !in.has("col")) {
    return false;
  }
  // The number of parts excludes every other modifier, such as .sp or .satfinite.
  switch (in.mode[0]) {
    case kE2m1:
      return in.has("kind::mxf4nvf4") && in.has("block_scale") && in.has("scale_vec::4X") &&
             in.has("m16n8k64") && in.parts.size() == 14;
    case kE4m3:
    case kE4m3E2m1:
      return in.has("kind::mxf8f6f4") && in.has("block_scale") && in.has("scale_vec::1X") &&
             in.has("m16n8k32") && in.parts.size() == 14;
    case kE2m1Mx:
      return (in.has("kind::mxf4") || in.has("kind::mxf4nvf4")) && in.has("block_scale") &&
             in.has("scale_vec::2X") && in.has("m16n8k64") && in.parts.size() == 14;
    default: return in.has("m16n8k16") && in.parts.size() == 10;
  }
}

/// mma.sync d, a, b, c, and with block scales: scales of a, {byte, thread}, scales of b, {byte, thread}
Outcome Machine::exec_mma_sync(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  if (mask != kFullMask) {
    fatal("mma.sync in lanes 0x%08x, must be executed by all 32 lanes of the warp", mask);
  }
  Row row;
  auto const read_register = [&](size_t operand, size_t i) {
    Operand const& o = in.operands[operand];
    read(warp, o.kind == Operand::kVector ? o.parts.at(i) : o, row);
  };
  // Four lanes hold a row. Register r of A belongs to rows 8 (r % 2) and up, and to half r / 2 of them;
  // register r of B to half r.
  u8 a_bytes[kM][kRowBytes], b_bytes[kN][kRowBytes];
  for (int r = 0; r < 4; ++r) {
    read_register(1, static_cast<size_t>(r));
    for (int l = 0; l < kWarpSize; ++l) {
      u32 const word = static_cast<u32>(row[l]);
      std::memcpy(&a_bytes[l / 4 + 8 * (r % 2)][l % 4 * kLaneBytes + r / 2 * kHalfRow], &word, kLaneBytes);
    }
  }
  for (int r = 0; r < 2; ++r) {
    read_register(2, static_cast<size_t>(r));
    for (int l = 0; l < kWarpSize; ++l) {
      u32 const word = static_cast<u32>(row[l]);
      std::memcpy(&b_bytes[l / 4][l % 4 * kLaneBytes + r * kHalfRow], &word, kLaneBytes);
    }
  }
  double a[kM][kMaxK], b[kN][kMaxK];
  int k = 0;
  for (int m = 0; m < kM; ++m) {
    k = decode_row(a_bytes[m], of_a(in.mode[0]), a[m]);
  }
  for (int n = 0; n < kN; ++n) {
    decode_row(b_bytes[n], of_b(in.mode[0]), b[n]);
  }

  // The scale factors of a row are bytes of one register: all four, from its first block on, or the one or
  // two that the byte selector says. Row m of A has them in lane 4 (m % 8) + m / 8 and row n of B in lane 4
  // n, each plus what the thread selector says: the other half of the quad for A, a lane of it for B.
  double scale_a[kM][kMaxBlocks], scale_b[kN][kMaxBlocks];
  bool const scaled = in.mode[0] >= kE2m1;
  int const blocks = in.mode[0] == kE2m1 ? kMaxBlocks : in.mode[0] == kE2m1Mx ? 2 : 1;
  if (scaled) {
    struct Selector {
      int byte, thread;
    };
    auto const selector = [&](size_t operand, u64 threads) {
      read_register(operand, 0);
      u64 const byte = row[0] & 0xFFFF;
      read_register(operand, 1);
      u64 const thread = row[0] & 0xFFFF;
      if (byte >= kMaxBlocks || byte % static_cast<u64>(blocks) != 0 || thread >= threads) {
        fatal("mma.sync with scale selector {%llu, %llu}, must be {%s, 0 to %llu}",
              static_cast<unsigned long long>(byte), static_cast<unsigned long long>(thread),
              blocks == kMaxBlocks ? "0"
              : blocks == 2        ? "0 or 2"
                                   : "0 to 3",
              static_cast<unsigned long long>(threads - 1));
      }
      return Selector{static_cast<int>(byte), static_cast<int>(thread)};
    };
    auto const factor = [&](u64 word, int byte) {
      u32 const code = static_cast<u32>(word >> (8 * byte) & 255);
      return in.mode[0] == kE2m1 ? decode_ue4m3(code) : decode_e8m0(code);
    };
    Selector const at_a = selector(5, 2), at_b = selector(7, 4);
    read_register(4, 0);
    for (int m = 0; m < kM; ++m) {
      for (int i = 0; i < blocks; ++i) {
        scale_a[m][i] = factor(row[4 * (m % 8) + m / 8 + 2 * at_a.thread], at_a.byte + i);
      }
    }
    read_register(6, 0);
    for (int n = 0; n < kN; ++n) {
      for (int i = 0; i < blocks; ++i) {
        scale_b[n][i] = factor(row[4 * n + at_b.thread], at_b.byte + i);
      }
    }
  }

  bool const truncated = session_.options.arithmetic == PTXEMU_TRUNCATED;
  if (truncated && in.mode[0] > kE2m1) {
    fatal("mma.sync of an MX format with truncated arithmetic is not modelled");
  }
  double sums[kM][kN];
  for (int m = 0; m < kM && !truncated; ++m) {
    for (int n = 0; n < kN; ++n) {
      double sum = 0;
      for (int i = 0; i < blocks; ++i) {
        double block = 0;
        for (int j = i * (k / blocks); j < (i + 1) * (k / blocks); ++j) {
          block += a[m][j] * b[n][j];
        }
        sum += scaled ? block * (scale_a[m][i] * scale_b[n][i]) : block;
      }
      sums[m][n] = sum;
    }
  }
  // Register r of C and D has row l / 4 + 8 (r / 2), column 2 (l % 4) + r % 2 in lane l. All of C is read
  // before D is written, since they may share registers.
  u32 d[4][kWarpSize];
  for (int r = 0; r < 4; ++r) {
    read_register(3, static_cast<size_t>(r));
    for (int l = 0; l < kWarpSize; ++l) {
      float const c = as_float(row[l]);
      int const m = l / 4 + 8 * (r / 2), n = 2 * (l % 4) + r % 2;
      if (truncated) {
        d[r][l] = scaled ? truncated_block_product(a[m], b[n], scale_a[m], scale_b[n], c)
                         : truncated_product(a[m], b[n], in.mode[0] == kF16 ? -14 : -126, c);
      } else {
        d[r][l] = as_bits(static_cast<float>(sums[m][n] + static_cast<double>(c)));
      }
    }
  }
  for (int r = 0; r < 4; ++r) {
    for (int l = 0; l < kWarpSize; ++l) {
      write(warp, in.operands[0].parts.at(static_cast<size_t>(r)), l, d[r][l]);
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
