// tcgen05.mma with block scales (PTX ISA, "Tensorcore 5th Generation Instructions: tcgen05.mma"). One
// instruction multiplies 32 bytes of each row:
//   kind::mxf4nvf4, blocks of 16   NVFP4: 64 values of k, and a scale factor for each 16 of them
//   kind::mxf8f6f4                 MXFP8: 32 values of k in e4m3, and one scale factor. Instead of these, A
//   or
//                                  B may have values in e2m1, 16 of which lie in the first 8 of 16 bytes
//   kind::mxf4 or mxf4nvf4,        MXFP4: 64 values of k, and a scale factor for each 32 of them
//   blocks of 32
// The option `arithmetic` says how the products add up: PTXEMU_ROUNDED sums them in double and rounds once to
// fp32; PTXEMU_TRUNCATED, for NVFP4 alone, is MMA-Sim's model (numeric.hpp), in which the exact sum of 16
// products and its two scale factors make a summand with 35 fraction bits. Sums that fit in fp32 are the
// same.
#include <algorithm>
#include <cmath>

#include "machine.hpp"
#include "numeric.hpp"
#include "races.hpp"
#include "tcgen05.hpp"

namespace ptxemu {

namespace {

constexpr u32 kRowBytes = 32;  // of A and B
constexpr u32 kMaxK = 64;      // values of k of one instruction
constexpr u32 kMaxBlocks = 4;  // scale factors of a row
constexpr u32 kRows = 128;     // rows of A and D in a CTA
constexpr u32 kMaxColumns = 256;
// Formats of A and B in the instruction descriptor, of kind::mxf8f6f4 and of the kinds for e2m1 alone.
constexpr u32 kFormatE4m3 = 0, kFormatE2m1 = 5, kFormatOfFp4Kinds = 1;

/// How the 32 bytes of a row of A or B hold its values: 64 in e2m1, 32 in e4m3, or 32 in e2m1, where each 16
/// values are followed by 8 bytes of padding (PTX ISA, .b4x16_p64).
enum class Element { kE2m1, kE4m3, kPaddedE2m1 };

/// A kind of products.
struct Kind {
  u32 k, block;       // values of k of one instruction, and those that share a scale factor
  bool must_be_e8m0;  // the scale factors; else the instruction descriptor chooses

  /// The elements of A or B by its format in the instruction descriptor; false: they are not modelled.
  bool element_of(u32 format, Element* element) const {
    bool const is_byte = k == kRowBytes;  // kind::mxf8f6f4
    *element = !is_byte ? Element::kE2m1 : format == kFormatE2m1 ? Element::kPaddedE2m1 : Element::kE4m3;
    return is_byte ? format == kFormatE4m3 || format == kFormatE2m1 : format == kFormatOfFp4Kinds;
  }

  /// The scale factors of a row, which begin at a multiple of as many bytes in their word of four.
  u32 blocks() const { return k / block; }
};
constexpr Kind kKinds[] = {{64, 16, false}, {32, 32, true}, {64, 32, true}};  // by the mode of decode_tcgen05

/// The instruction descriptor (PTX ISA, "Instruction descriptor", the tables for .kind::mxf4,
/// .kind::mxf4nvf4 and .kind::mxf8f6f4).
struct InstructionDescriptor {
  u32 m, n, scale_a_id, scale_b_id;
  bool e8m0;  // type of the scale factors; else ue4m3
  bool negate_a, negate_b;
  Element a, b;
};

InstructionDescriptor unpack(u32 bits, int cta_group, Kind const& kind) {
  InstructionDescriptor d = {(bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, bits >> 29 & 3,
                             bits >> 4 & 3,          (bits >> 23 & 1) != 0, (bits >> 13 & 1) != 0,
                             (bits >> 14 & 1) != 0,  Element::kE2m1,        Element::kE2m1};
  u32 const format_a = bits >> 7 & 7, format_b = bits >> 10 & 7;
  bool const known = kind.element_of(format_a, &d.a) & kind.element_of(format_b, &d.b);
  if ((bits >> 2 & 1) != 0 || !known || (bits >> 15 & 3) != 0 || (bits >> 31 & 1) != 0 ||
      (kind.must_be_e8m0 && !d.e8m0) || d.scale_a_id % kind.blocks() != 0 ||
      d.scale_b_id % kind.blocks() != 0) {
    fatal(
        "instruction descriptor 0x%08x: sparse, transposed, k = 96, formats %u and %u, %s scales, or scale "
        "ids "
        "%u and %u are not modelled",
        bits, format_a, format_b, d.e8m0 ? "ue8m0" : "ue4m3", d.scale_a_id, d.scale_b_id);
  }
  u32 const groups = static_cast<u32>(cta_group);
  if (d.m != kRows * groups || d.n == 0 || d.n > kMaxColumns || d.n % (8 * groups) != 0) {
    fatal("instruction descriptor 0x%08x: m = %u, n = %u with cta_group::%d is not modelled", bits, d.m, d.n,
          cta_group);
  }
  return d;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PTXEMU_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define PTXEMU_CLONES
#endif

using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));
constexpr u32 kVector = 8;

/// dots[n] = sum over the block of NVFP4 of a[k] * b[k][n].
PTXEMU_CLONES void multiply_block(float const* a, float const* b, u32 n, float* dots) {
  for (u32 j = 0; j < n; j += kVector) {
    Floats sum = {}, values;
    for (u32 k = 0; k < 16; ++k) {
      std::memcpy(&values, &b[k * kMaxColumns + j], sizeof values);
      sum += a[k] * values;
    }
    std::memcpy(&dots[j], &sum, sizeof sum);
  }
}

/// sums[n] += scale_a * scale_b[n] * sum over a block of e2m1 values of a[k] * b[k][n]. The sum over the
/// block, of 16 or 32, is exact in float, since it is a multiple of 1/4 of at most 1152; its product with the
/// two scale factors has 21 significant bits at most.
PTXEMU_CLONES void accumulate_block(float const* a, float const* b, u32 n, u32 block, float scale_a,
                                    float const* scale_b, double* sums) {
  for (u32 j = 0; j < n; j += kVector) {
    Floats sum = {}, values;
    for (u32 k = 0; k < block; ++k) {
      std::memcpy(&values, &b[k * kMaxColumns + j], sizeof values);
      sum += a[k] * values;
    }
    Floats scales;
    std::memcpy(&scales, &scale_b[j], sizeof scales);
    Doubles total;
    std::memcpy(&total, &sums[j], sizeof total);
    total += __builtin_convertvector(sum, Doubles) *
             (static_cast<double>(scale_a) * __builtin_convertvector(scales, Doubles));
    std::memcpy(&sums[j], &total, sizeof total);
  }
}

/// The same for a block of values in e4m3, 32 of them, whose sum is a multiple of 2^-18 below 2^23 and so
/// exact in double; also where A or B has values in e2m1. The scale factors are powers of two.
PTXEMU_CLONES void accumulate_e4m3_block(float const* a, float const* b, u32 n, u32 block, float scale_a,
                                         float const* scale_b, double* sums) {
  for (u32 j = 0; j < n; j += kVector) {
    Doubles sum = {}, total;
    Floats values, scales;
    for (u32 k = 0; k < block; ++k) {
      std::memcpy(&values, &b[k * kMaxColumns + j], sizeof values);
      sum += static_cast<double>(a[k]) * __builtin_convertvector(values, Doubles);
    }
    std::memcpy(&scales, &scale_b[j], sizeof scales);
    std::memcpy(&total, &sums[j], sizeof total);
    total += sum * (static_cast<double>(scale_a) * __builtin_convertvector(scales, Doubles));
    std::memcpy(&sums[j], &total, sizeof total);
  }
}

}  // namespace

struct Machine::Mma {
  Kind const* kind;
  std::vector<Cta*> ctas;     // one, or the two of a pair
  u32 d, scales_a, scales_b;  // TMEM columns
  u64 a, b;                   // matrix descriptors
  InstructionDescriptor shape;
  bool accumulate;  // add the product to D; else D is overwritten
};

/// Decodes rows of values, without their scale factors, to [row][k]. `element` is an Element.
void Machine::read_operand_rows(Cta* cta, u64 descriptor, u32 rows, int element, float* out) {
  bool const padded = element == static_cast<int>(Element::kPaddedE2m1);
  bool const packed = element == static_cast<int>(Element::kE2m1);
  u32 const k = packed ? 2 * kRowBytes : kRowBytes;
  u32 const used = padded ? 8 : 16;  // of 16 bytes
  static float const values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  for (u32 row = 0; row < rows; ++row) {
    for (u32 byte = 0; byte < kRowBytes; byte += 16) {
      u32 const from = descriptor_address(descriptor, row, byte);
      u8 const* const codes = shared_bytes(cta, from, 16);
      if (std::memchr(&cta->written[from], 0, used) != nullptr) {
        hazard("tcgen05.mma reads uninitialised shared memory in [%u, %u), row %u", from, from + used, row);
      }
      for (u32 i = 0; i < 16; ++i) {
        if (packed) {
          out[row * k + 2 * (byte + i)] = values[codes[i] & 15];
          out[row * k + 2 * (byte + i) + 1] = values[codes[i] >> 4];
        } else if (padded) {
          out[row * k + byte + i] = values[codes[i / 2] >> (i % 2 * 4) & 15];
        } else {
          out[row * k + byte + i] = decode_e4m3(codes[i]);
        }
      }
    }
  }
}

/// Decodes `count` scale factors of each row, from byte `id` of its word on. Row r has its four bytes in lane
/// r % 32 and column r / 32, and in the same way in each of the four groups of 32 lanes (PTX ISA, "Scale
/// factor layout").
void Machine::read_scales(Cta* cta, u32 column, u32 rows, bool e8m0, u32 id, u32 count, float* out) {
  check_tmem(cta, column, (rows + 31) / 32);
  for (u32 row = 0; row < rows; ++row) {
    u32 const at = column + row / 32;
    u32 const word = cta->tmem_word(row % 32, at);
    for (u32 lane = row % 32; lane < kTmemLanes; lane += 32) {
      if (cta->tmem_is_written(lane, at) == 0) {
        hazard("tcgen05.mma reads uninitialised scales, lane %u, column %u", lane, at);
      }
      if (cta->tmem_word(lane, at) != word) {
        hazard("the four copies of the scales of row %u differ", row);
      }
    }
    for (u32 i = 0; i < count; ++i) {
      u32 const code = word >> (8 * (id + i)) & 255;
      out[row * count + i] = e8m0 ? decode_e8m0(code) : decode_ue4m3(code);
    }
  }
}

/// The product of the CTA's rows as MMA-Sim models it ("GST-FDPA" with groups of 16 and 35 fraction bits).
void Machine::add_truncated(Cta* cta, Mma const& mma, float const* a, float const* b, float const* scale_a,
                            float const* scale_b) {
  constexpr int kFractionBits = 35;
  constexpr Kind const& kNvfp4 = kKinds[0];
  constexpr u32 kBlocks = kNvfp4.k / kNvfp4.block;
  if (mma.kind != &kNvfp4) {
    fatal("tcgen05.mma of an MX format with truncated arithmetic is not modelled");
  }
  u32 const n = mma.shape.n;
  int const least = mma.shape.e8m0 ? -127 : -6;  // the exponent of the least normal scale factor
  std::vector<Summand> columns(static_cast<size_t>(n) * kBlocks);
  for (u32 j = 0; j < n; ++j) {
    for (u32 i = 0; i < kBlocks; ++i) {
      float const scale = scale_b[i * kMaxColumns + j];
      columns[j * kBlocks + i] = scale == scale ? summand(scale, least) : Summand{};
    }
  }
  float dots[kBlocks][kMaxColumns];
  for (u32 r = 0; r < kRows; ++r) {
    Summand row[kBlocks];
    for (u32 i = 0; i < kBlocks; ++i) {
      multiply_block(&a[r * kNvfp4.k + i * kNvfp4.block],
                     &b[static_cast<size_t>(i) * kNvfp4.block * kMaxColumns], n, dots[i]);
      float const scale = scale_a[r * kBlocks + i];
      row[i] = scale == scale ? summand(mma.shape.negate_a ? -scale : scale, least) : Summand{};
    }
    for (u32 j = 0; j < n; ++j) {
      u32& word = cta->tmem_word(r, mma.d + j);
      u8& written = cta->tmem_is_written(r, mma.d + j);
      if (mma.accumulate && written == 0) {
        hazard("tcgen05.mma adds to uninitialised TMEM, lane %u, column %u", r, mma.d + j);
      }
      written = 1;
      float const c = mma.accumulate ? as_float(word) : 0.0f;
      Summand summands[kBlocks + 1];
      bool is_nan = c != c;
      for (u32 i = 0; i < kBlocks; ++i) {
        float const both = scale_a[r * kBlocks + i] * scale_b[i * kMaxColumns + j];
        is_nan = is_nan || both != both;
        // A sum of 16 products is a multiple of 1/4.
        summands[i] = Summand{static_cast<i64>(dots[i][j] * 4), -2, 0} * row[i] * columns[j * kBlocks + i];
      }
      if (is_nan) {
        word = kTensorCoreNan;
      } else if (!std::isinf(c)) {
        summands[kBlocks] = summand(c, -126);
        word = as_bits(truncated_sum(summands, kBlocks + 1, kFractionBits));
      }
    }
  }
}

/// D = A B^T + D, or without + D. CTA i of the group has rows [128 i, 128 i + 128) of A and D with the scale
/// factors of A, an equal part of the rows of B, and the scale factors of all of B.
void Machine::multiply(Mma const& mma) {
  u32 const groups = static_cast<u32>(mma.ctas.size()), n = mma.shape.n, share = n / groups;
  u32 const depth = mma.kind->k, blocks = mma.kind->blocks();
  auto const accumulate = mma.kind->k == kRowBytes ? accumulate_e4m3_block : accumulate_block;
  std::vector<float> rows(static_cast<size_t>(std::max(kRows, share)) * kMaxK);
  std::vector<float> b(static_cast<size_t>(kMaxK) * kMaxColumns);  // [k][column]
  std::vector<float> scales(static_cast<size_t>(kMaxColumns) * kMaxBlocks), scale_b(scales.size());
  // Each CTA of a pair supplies its part of B, and its own copy of the scale factors of all of B.
  for (u32 g = 0; g < groups; ++g) {
    read_operand_rows(mma.ctas[g], mma.b, share, static_cast<int>(mma.shape.b), rows.data());
    for (u32 r = 0; r < share; ++r) {
      for (u32 k = 0; k < depth; ++k) {
        b[k * kMaxColumns + g * share + r] = mma.shape.negate_b ? -rows[r * depth + k] : rows[r * depth + k];
      }
    }
    std::vector<float> mine(scales.size());
    read_scales(mma.ctas[g], mma.scales_b, n, mma.shape.e8m0, mma.shape.scale_b_id, blocks, mine.data());
    if (g == 1 && std::memcmp(mine.data(), scales.data(), n * blocks * sizeof(float)) != 0) {
      hazard("the CTAs of a pair hold different scales of B");
    }
    scales = mine;
  }
  // Transposed to [block][column], so that accumulate_block reads a vector of columns.
  for (u32 j = 0; j < n; ++j) {
    for (u32 i = 0; i < blocks; ++i) {
      scale_b[i * kMaxColumns + j] = scales[j * blocks + i];
    }
  }
  for (Cta* cta : mma.ctas) {
    check_tmem(cta, mma.d, n);
    read_operand_rows(cta, mma.a, kRows, static_cast<int>(mma.shape.a), rows.data());
    read_scales(cta, mma.scales_a, kRows, mma.shape.e8m0, mma.shape.scale_a_id, blocks, scales.data());
    if (session_.options.arithmetic == PTXEMU_TRUNCATED) {
      add_truncated(cta, mma, rows.data(), b.data(), scales.data(), scale_b.data());
      continue;
    }
    for (u32 r = 0; r < kRows; ++r) {
      double sums[kMaxColumns] = {};
      for (u32 i = 0; i < blocks; ++i) {
        float const scale = mma.shape.negate_a ? -scales[r * blocks + i] : scales[r * blocks + i];
        size_t const first = static_cast<size_t>(i) * mma.kind->block;
        accumulate(&rows[r * depth + first], &b[first * kMaxColumns], n, mma.kind->block, scale,
                   &scale_b[i * kMaxColumns], sums);
      }
      for (u32 j = 0; j < n; ++j) {
        u32& word = cta->tmem_word(r, mma.d + j);
        u8& written = cta->tmem_is_written(r, mma.d + j);
        if (mma.accumulate) {
          if (written == 0) {
            hazard("tcgen05.mma adds to uninitialised TMEM, lane %u, column %u", r, mma.d + j);
          }
          sums[j] += static_cast<double>(as_float(word));
        }
        word = as_bits(static_cast<float>(sums[j]));
        written = 1;
      }
    }
  }
}

/// tcgen05.mma [d], a, b, instruction descriptor, [scale factors of a], [of b], accumulate
Outcome Machine::exec_tcgen05_mma(Warp& warp, Group&, Instruction const& in, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    auto const operand = [&](size_t i) { return uniform(warp, in.operands[i], 1u << l); };
    u32 const d = static_cast<u32>(operand(0)), idesc = static_cast<u32>(operand(3));
    u32 const scales_a =
        static_cast<u32>(operand(4)) & 0x3FFFFFFF;  // the top two bits are the scale factor id
    u32 const scales_b = static_cast<u32>(operand(5)) & 0x3FFFFFFF;
    if (in.mode[0] == 2 && (warp.cta->rank & 1) != 0) {
      fatal("tcgen05.mma of cta_group::2 issued by the odd CTA of a pair");
    }
    if (d >> 16 != 0 || scales_a >> 16 != 0 || scales_b >> 16 != 0) {
      fatal("tcgen05.mma with TMEM addresses 0x%x, 0x%x, 0x%x: lanes other than 0 are not modelled", d,
            scales_a, scales_b);
    }
    Kind const& kind = kKinds[in.mode[1]];
    Mma const mma = {&kind,
                     cta_group(warp.cta, in.mode[0]),
                     d,
                     scales_a,
                     scales_b,
                     operand(1),
                     operand(2),
                     unpack(idesc, in.mode[0], kind),
                     (operand(6) & 1) != 0};
    session_.statistics.add("idesc",
                            format_text("cta_group::%d 0x%08x (m %u n %u %s)", in.mode[0], idesc, mma.shape.m,
                                        mma.shape.n, mma.shape.e8m0 ? "ue8m0" : "ue4m3"));
    session_.statistics.add("descriptor", "A " + describe_descriptor(mma.a));
    session_.statistics.add("descriptor", "B " + describe_descriptor(mma.b));
    auto operation = make_operation(warp.cta, "tcgen05.mma");
    for (Cta* cta : mma.ctas) {
      auto const [a_low, a_high] = descriptor_bytes(mma.a, kRows);
      auto const [b_low, b_high] = descriptor_bytes(mma.b, mma.shape.n / static_cast<u32>(in.mode[0]));
      operation->reads(cta, a_low, a_high);
      operation->reads(cta, b_low, b_high);
      operation->writes_tmem(cta, d, d + mma.shape.n);
      operation->reads_tmem(cta, scales_a, scales_a + 4);
      operation->reads_tmem(cta, scales_b, scales_b + (mma.shape.n + 31) / 32);
    }
    operation->run = [this, mma] { multiply(mma); };
    issue(operation, true);
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
