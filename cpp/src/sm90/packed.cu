// A GEMM for few rows of A that reads both operands as packed codes. It is one launch without workspace and
// reads each byte of the weights once.
//
// The operands are swapped: the 16 x 16 operand of mma.sync holds rows of B (the weights), the 16 x 8 operand
// rows of A (the tokens). The elements along k may be in any order if both operands have the same order. So
// each thread loads 16 contiguous bytes, which are 32 codes of one row, and passes them to eight MMAs in the
// order in which decoding needs the fewest instructions. A CTA computes 32 rows of B. Its warps process
// chunks of k in turn, and their sums are added in shared memory in a fixed order.
#include "cutlass/numeric_conversion.h"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "error.hpp"
#include "kernel_row.hpp"
#include "quantize/numerics.cuh"
#include "sm90/arch.hpp"

namespace fp4gemm {

constexpr int kPackedWarps = 8;
constexpr int kPackedRows = 32;    // of B, in a CTA
constexpr int kPackedChunk = 128;  // of k, that a warp processes at a time: 32 for each thread of a quad

struct PackedOperand {
  uint8_t const* codes;
  uint8_t const* scales;  // swizzled
  int rows;
};

struct PackedParams {
  PackedOperand a;  // (m, k)
  PackedOperand b;  // (n, k)
  int k;
  cutlass_evt::EpilogueArguments epilogue;
};

/// 32 codes of one row and their two block scales, as in memory.
struct PackedRow {
  uint4 codes;
  uint32_t scales;

  /// The two block scales as fp16 times 2^7.
  __device__ __half2 scale_pair() const {
    __half2 const pair =
        __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(scales), __NV_E4M3));
    return __hmul2(pair, __float2half2_rn(128.0f));
  }
};

/// Eight codes of one block, times their scale, as four fp16 pairs; a pair holds nibbles i and i + 4. The
/// bits of an e2m1 number, moved to the sign, the low exponent bits and the high mantissa bit of an fp16, are
/// its value times 2^-14, exactly. The scale has a factor of 2^7, so the product is the value times 2^-7.
struct DecodedWord {
  uint32_t pairs[4];

  __device__ DecodedWord(uint32_t codes, __half2 scale) {
    uint32_t const bits[4] = {
        ((codes << 12) & 0x80008000u) | ((codes << 9) & 0x0E000E00u),
        ((codes << 8) & 0x80008000u) | ((codes << 5) & 0x0E000E00u),
        ((codes << 4) & 0x80008000u) | ((codes << 1) & 0x0E000E00u),
        (codes & 0x80008000u) | ((codes >> 3) & 0x0E000E00u),
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __half2 const product = __hmul2(reinterpret_cast<__half2 const&>(bits[i]), scale);
      pairs[i] = reinterpret_cast<uint32_t const&>(product);
    }
  }
};

/// c += a b^T with a (16, 16) and b (8, 16) in fp16 and c (16, 8) in fp32; each thread holds its fragments.
__device__ inline void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// kTiles rows, 8 apart. The threads of lanes 4 g to 4 g + 3 hold row g of each 8.
template <int kTiles>
struct PackedTiles {
  PackedRow rows[kTiles];

  /// Eight codes of row i. There are four such words, two in each block.
  __device__ DecodedWord decode(int i, int word) const {
    uint32_t const codes[4] = {rows[i].codes.x, rows[i].codes.y, rows[i].codes.z, rows[i].codes.w};
    __half2 const scales = rows[i].scale_pair();
    return DecodedWord(codes[word], word < 2 ? __low2half2(scales) : __high2half2(scales));
  }
};

constexpr int kPackedStep = kPackedWarps * kPackedChunk;  // of k, between consecutive chunks of a warp

/// The position at which a thread reads its PackedTiles; it advances along k.
template <int kTiles>
class PackedCursor {
 public:
  /// first_row is a multiple of 8 * kTiles, so that the rows are in one tile of the scales: 128 bytes apart
  /// for every 8 rows up to 32, and 4 bytes further for the next 32.
  __device__ PackedCursor(PackedOperand const& operand, int first_row, int k0, int k) : k_left_(k - k0) {
    int const row = first_row + static_cast<int>(threadIdx.x % 32 / 4);
    rows_left_ = operand.rows - row;
    row_bytes_ = k / 2;
    codes_ = operand.codes + (int64_t{row} * k + k0) / 2;
    scales_ = operand.scales + scale_offset(row, k0 / kBlock, (k / kBlock + 3) / 4);
  }

  /// The 32 elements of each row at this position, zeros outside of the operand. Advances by one step.
  __device__ PackedTiles<kTiles> next() {
    PackedTiles<kTiles> tiles;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (8 * i < rows_left_ && k_left_ > 0) {
        tiles.rows[i].codes = __ldg(reinterpret_cast<uint4 const*>(codes_ + i * 8 * row_bytes_));
        tiles.rows[i].scales = __ldg(reinterpret_cast<uint16_t const*>(scales_ + i % 4 * 128 + i / 4 * 4));
      } else {
        tiles.rows[i] = {};
      }
    }
    codes_ += kPackedStep / 2;
    scales_ += kPackedStep / kBlock / 4 * 512;
    k_left_ -= kPackedStep;
    return tiles;
  }

 private:
  uint8_t const* codes_;
  uint8_t const* scales_;
  int64_t row_bytes_;
  int rows_left_;
  int k_left_;
};

template <int kTokenTiles>
__device__ inline void multiply(float (&acc)[2][kTokenTiles][4], PackedTiles<4> const& b,
                                PackedTiles<kTokenTiles> const& a) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    DecodedWord const rows[4] = {b.decode(0, word), b.decode(1, word), b.decode(2, word), b.decode(3, word)};
#pragma unroll
    for (int token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
      DecodedWord const tokens = a.decode(token_tile, word);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        DecodedWord const& upper = rows[2 * tile];
        DecodedWord const& lower = rows[2 * tile + 1];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          mma_16x8x16(acc[tile][token_tile], upper.pairs[i], lower.pairs[i], upper.pairs[i + 1],
                      lower.pairs[i + 1], tokens.pairs[i], tokens.pairs[i + 1]);
        }
      }
    }
  }
}

/// The grid has a CTA for each tile of 32 rows of B and 8 * kTokenTiles rows of A; tiles of B vary fastest.
/// Op is the epilogue.
template <class Op, int kTokenTiles>
__global__ void __launch_bounds__(32 * kPackedWarps, kTokenTiles <= 2 ? 2 : 1) packed_gemm(PackedParams p) {
  int const warp = static_cast<int>(threadIdx.x / 32);
  int const lane = static_cast<int>(threadIdx.x % 32);
  unsigned const tiles_n = static_cast<unsigned>(p.b.rows + kPackedRows - 1) / kPackedRows;
  int const n0 = static_cast<int>(blockIdx.x % tiles_n) * kPackedRows;
  int const m0 = static_cast<int>(blockIdx.x / tiles_n) * (8 * kTokenTiles);
  int const start = warp * kPackedChunk;

  float acc[2][kTokenTiles][4] = {};
  PackedCursor<4> b(p.b, n0, start + lane % 4 * 32, p.k);
  PackedCursor<kTokenTiles> a(p.a, m0, start + lane % 4 * 32, p.k);
  PackedTiles<4> next = b.next();
  // All threads of a warp make the same number of steps, although some may be beyond the end of k: mma.sync
  // needs the whole warp. Only the weights, which come from device memory, are loaded a step ahead; the
  // tokens are in the L2 cache.
  for (int k0 = start; k0 < p.k; k0 += kPackedStep) {
    PackedTiles<4> const current = next;
    PackedTiles<kTokenTiles> const tokens = a.next();
    next = b.next();
    multiply(acc, current, tokens);
  }

  __shared__ float partial[kPackedWarps][8]
                          [kPackedRows + 1];  // of one token tile, by warp, token and row of B
#pragma unroll
  for (int token_tile = 0; token_tile < kTokenTiles; ++token_tile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int const row = i / 4 * 16 + i % 4 / 2 * 8 + lane / 4;
      partial[warp][lane % 4 * 2 + i % 2][row] = acc[i / 4][token_tile][i % 4];
    }
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPackedWarps; ++i) {
      sum += partial[i][warp][lane];
    }
    int const m = m0 + 8 * token_tile + warp;
    int const n = n0 + lane;
    if (m < p.a.rows && n < p.b.rows) {
      using Out = typename Op::Result;
      cutlass_evt::EpilogueArguments const& args = p.epilogue;
      float z[1] = {sum * 16384.0f};
      Op::template finish<1>(
          args, args.alpha, z,
          [&](cutlass_evt::RowVector v, int) { return cutlass_evt::epilogue::element(args, v, 0, m); },
          [&](cutlass_evt::ColumnVector v, int) { return cutlass_evt::epilogue::element(args, v, 0, n); },
          [&](int) {
            return static_cast<float>(static_cast<Out const*>(args.c)[m * args.c_row_stride + n]);
          });
      static_cast<Out*>(args.d)[m * args.d_row_stride + n] = cutlass_evt::epilogue::cast<Out>(z[0]);
    }
    __syncthreads();
  }
}

/// The table row of packed_gemm for tiles of 8 * kTokenTiles tokens.
template <class Op, int kTokenTiles>
struct PackedKernel {
  using Out = typename Op::ElementOutput;
  static constexpr int kTokens = 8 * kTokenTiles;

  static constexpr KernelTraits kTraits{
      sm90::kArch,     false, false, Op::kGated, kTokens,           kPackedRows,
      kPackedChunk,    1,     1,     Op::kName,  OutType<Out>::kId, OutType<Out>::kName,
      Operands::kNvfp4};
  static constexpr NameBuilder kName = kTraits.name();

  static size_t workspace_bytes(Problem const&) { return 0; }

  static fp4gemm_status_t launch(Problem const& p, void*, fp4gemm_stream_t stream) {
    PackedParams params;
    params.a = {static_cast<uint8_t const*>(p.a), static_cast<uint8_t const*>(p.scale_a),
                static_cast<int>(p.m)};
    params.b = {static_cast<uint8_t const*>(p.b), static_cast<uint8_t const*>(p.scale_b),
                static_cast<int>(p.n)};
    params.k = static_cast<int>(p.k);
    params.epilogue = p.epilogue;
    int64_t const tiles = (p.m + kTokens - 1) / kTokens * ((p.n + kPackedRows - 1) / kPackedRows);
    if (tiles > INT32_MAX) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s supports m * n up to %lld, it is %lld", kName.text,
                  static_cast<long long>(INT32_MAX) * kTokens * kPackedRows,
                  static_cast<long long>(p.m * p.n));
    }
    packed_gemm<Op, kTokenTiles><<<static_cast<unsigned>(tiles), 32 * kPackedWarps, 0, stream>>>(params);
    FP4GEMM_CUDA(cudaGetLastError());
    return FP4GEMM_SUCCESS;
  }
};

template <class Out, int kTokenTiles>
constexpr Kernel make_packed_kernel() {
  return make_row<PackedKernel<cutlass_evt::epilogue::RowCol<Out>, kTokenTiles>>();
}

constexpr Kernel kKernels[] = {
    make_packed_kernel<cutlass::bfloat16_t, 1>(),
    make_packed_kernel<cutlass::bfloat16_t, 2>(),
    make_packed_kernel<cutlass::bfloat16_t, 4>(),
    make_packed_kernel<cutlass::bfloat16_t, 8>(),
    make_packed_kernel<cutlass::half_t, 1>(),
    make_packed_kernel<cutlass::half_t, 2>(),
    make_packed_kernel<cutlass::half_t, 4>(),
    make_packed_kernel<cutlass::half_t, 8>(),
    make_packed_kernel<float, 1>(),
    make_packed_kernel<float, 2>(),
    make_packed_kernel<float, 4>(),
    make_packed_kernel<float, 8>(),
};
KernelList const sm90::lists::packed = make_list(kKernels);

}  // namespace fp4gemm
