// The device tables of a grouped GEMM, one entry a group, and the kernel that fills them from the group ends.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_evt/epilogue/activation.hpp"
#include "cutlass_evt/epilogue/scaled.hpp"
#include "cutlass_evt/prefix_sum.hpp"

namespace cutlass_evt {

enum class Ragged { kRows, kDepth };

/// An fp32 vector or number of each group; see fp4gemm_grouped_vector_t.
struct GroupVector {
  float const* data = nullptr;
  int64_t group_stride = 0;  // elements
  bool is_vector = true;
};

/// kRows: rows offs[g-1]..offs[g]-1 of A (m, k) times B[g] (n, k)^T are the same rows of D (m, n). The scales
/// of A begin anew at a multiple of 128 rows for each group. kDepth: D[g] (m, n) is the product over the
/// columns of group g in A (m, k) and B (n, k), which begin at multiples of 64; the columns after the last
/// row of a group are zeros.
template <class Op>
struct GroupedArguments {
  Ragged ragged = Ragged::kRows;
  int m = 0, n = 0, k = 0;
  int num_groups = 0;
  int const* offs = nullptr;  // (num_groups) cumulative ends, on the device
  int scale_tiles = 0;        // kRows: tiles of 128 rows that the scales of A have room for
  void const* a = nullptr;
  void const* scale_a = nullptr;  // null where the architecture multiplies decoded operands
  void const* b = nullptr;
  void const* scale_b = nullptr;
  GroupVector alpha_row;  // kRows: indexed by the row of A
  GroupVector alpha_col;
  GroupVector bias;
  float alpha = 1.0f;
  float const* alpha_groups = nullptr;  // (num_groups), in place of alpha
  Activation activation = Activation::kNone;
  typename Op::ElementOutput const* c = nullptr;
  int64_t c_row_stride = 0;  // elements
  float beta = 1.0f;
  typename Op::ElementOutput* d = nullptr;
  int64_t d_row_stride = 0;  // elements
  int device = 0;
  int num_sms = 0;
};

/// What differs from group to group, in the terms of D: sizes, and how far into each buffer the group lies.
struct GroupPlace {
  int m, n, k;
  int64_t a_elems;  // into A
  int64_t b_elems;  // into B
  int64_t scale_a_bytes;
  int64_t scale_b_bytes;
  int64_t row;     // first row: of alpha_row (kRows)
  int64_t d_rows;  // into C and D
};

/// Collectives of one grouped kernel -> its tables.
template <class Collectives, class Op>
struct GroupTable {
  using Shape = cute::Shape<int, int, int>;
  using Element = typename Collectives::ElementData;
  using StrideA = typename Collectives::Kernel::InternalStrideA;
  using StrideB = typename Collectives::Kernel::InternalStrideB;
  using StrideD = typename Collectives::Kernel::InternalStrideD;
  using Out = typename Op::ElementOutput;

  Shape* shapes;
  Element const** a;
  Element const** b;
  StrideA* stride_a;
  StrideB* stride_b;
  typename Collectives::ScaleTable scales;
  float const** alpha_row;
  float const** alpha_col;
  float const** bias;
  Out const** c;
  Out** d;
  StrideD* stride_d;

  /// Lays the arrays out in workspace; workspace null: only counts. Returns the bytes that they take.
  static size_t place(void* workspace, int num_groups, GroupTable* table) {
    char* next = static_cast<char*>(workspace);
    size_t bytes = 0;
    auto const take = [&](auto*& array) {
      using T = cute::remove_pointer_t<cute::remove_reference_t<decltype(array)>>;
      array = reinterpret_cast<T*>(next + bytes);
      bytes += (sizeof(T) * static_cast<size_t>(num_groups) + 127) / 128 * 128;
    };
    take(table->shapes);
    take(table->a);
    take(table->b);
    take(table->stride_a);
    take(table->stride_b);
    table->scales.place(take);
    take(table->alpha_row);
    take(table->alpha_col);
    take(table->bias);
    take(table->c);
    take(table->d);
    take(table->stride_d);
    return bytes;
  }

  CUTLASS_DEVICE void set(int g, GroupedArguments<Op> const& args, GroupPlace const& place) const {
    // Kernel order: a swapped kernel's first operand is B.
    constexpr bool kSwapped = Op::kSwapped;
    Element const* const rows = offset(args.a, place.a_elems);
    Element const* const cols = offset(args.b, place.b_elems);
    shapes[g] = kSwapped ? Shape{place.n, place.m, place.k} : Shape{place.m, place.n, place.k};
    a[g] = kSwapped ? cols : rows;
    b[g] = kSwapped ? rows : cols;
    cute::get<0>(stride_a[g]) = args.k;
    cute::get<0>(stride_b[g]) = args.k;
    auto const* const scale_rows = static_cast<uint8_t const*>(args.scale_a) + place.scale_a_bytes;
    auto const* const scale_cols = static_cast<uint8_t const*>(args.scale_b) + place.scale_b_bytes;
    scales.set(g, kSwapped ? scale_cols : scale_rows, kSwapped ? scale_rows : scale_cols, shapes[g], args.k);
    alpha_row[g] = args.alpha_row.data + g * args.alpha_row.group_stride +
                   (args.ragged == Ragged::kRows && args.alpha_row.is_vector ? place.row : 0);
    alpha_col[g] = args.alpha_col.data + g * args.alpha_col.group_stride;
    bias[g] = args.bias.data + g * args.bias.group_stride;
    c[g] = args.c + place.d_rows * args.c_row_stride;
    d[g] = args.d + place.d_rows * args.d_row_stride;
    cute::get<kSwapped ? 1 : 0>(stride_d[g]) = args.d_row_stride;
  }

 private:
  static CUTLASS_DEVICE Element const* offset(void const* data, int64_t elems) {
    auto const* const bytes = static_cast<uint8_t const*>(data);
    return reinterpret_cast<Element const*>(bytes + elems * cutlass::sizeof_bits<Element>::value / 8);
  }
};

constexpr int kPrepareThreads = 256;
constexpr int kDepthStep = 64;  // columns at whose multiples the groups of kDepth begin: a tile of scales

/// D[g] of the empty groups of kDepth, of which no tile of the GEMM is: act(bias) + beta * C.
template <class Op>
CUTLASS_DEVICE void fill_empty_groups(GroupedArguments<Op> const& args, int cta, int num_ctas) {
  int64_t const size = int64_t{args.m} * args.n;
  for (int g = 0; g < args.num_groups; ++g) {
    if (args.offs[g] > (g > 0 ? max(args.offs[g - 1], 0) : 0)) {
      continue;
    }
    float const* const bias =
        args.bias.data == nullptr ? nullptr : args.bias.data + g * args.bias.group_stride;
    for (int64_t i = int64_t{cta} * kPrepareThreads + threadIdx.x; i < size;
         i += int64_t{num_ctas} * kPrepareThreads) {
      int64_t const row = int64_t{g} * args.m + i / args.n;
      int const col = static_cast<int>(i % args.n);
      auto const* const c = args.c == nullptr ? nullptr : args.c + row * args.c_row_stride + col;
      args.d[row * args.d_row_stride + col] =
          Op::apply(0.0f, 1.0f, 1.0f, 1.0f, bias == nullptr ? nodes::kNoBias : bias[col], args.activation, c,
                    args.beta);
    }
  }
}

/// The first CTA fills the tables; further ones, launched for kDepth, D of the empty groups.
template <class Collectives, class Op>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_groups(__grid_constant__ GroupedArguments<Op> const args,
                   __grid_constant__ GroupTable<Collectives, Op> const table) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (blockIdx.x > 0) {
    if constexpr (!Op::kGated) {
      fill_empty_groups(args, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
    }
    return;
  }
  bool const by_rows = args.ragged == Ragged::kRows;
  // Places are counted in tiles of scales: of 128 rows (kRows) or of 64 columns. Ends that are out of order
  // or out of range would be an error of the caller; they must not lead outside of the buffers.
  int const step = by_rows ? 128 : kDepthStep;
  int const room = by_rows ? args.scale_tiles : args.k / kDepthStep;
  int const most = by_rows ? args.m : INT32_MAX;
  int64_t const words = (args.k / 16 + 3) / 4;  // of 4 scales, in a row
  __shared__ int64_t warp_sums[kPrepareThreads / 32];
  int64_t carry = 0;
  for (int base = 0; base < args.num_groups; base += kPrepareThreads) {
    int const g = base + static_cast<int>(threadIdx.x);
    bool const valid = g < args.num_groups;
    int const begin = valid && g > 0 ? min(max(args.offs[g - 1], 0), most) : 0;
    int const end = valid ? min(max(args.offs[g], 0), most) : 0;
    int size = max(end - begin, 0);
    int64_t total = 0;
    int const tiles = size / step + (size % step != 0 ? 1 : 0);
    int64_t const start =
        carry + inclusive_sum<kPrepareThreads>(int64_t{tiles}, warp_sums, &total, PlainAdd{}) - tiles;
    carry += total;
    if (!valid) {
      continue;
    }
    if (start + tiles > room) {
      size = 0;
    }
    GroupPlace place{};
    place.n = args.n;
    if (by_rows) {
      place.m = size;
      place.k = args.k;
      place.a_elems = int64_t{begin} * args.k;
      place.b_elems = int64_t{g} * args.n * args.k;
      place.scale_a_bytes = start * words * 512;
      place.scale_b_bytes = g * ((args.n + 127) / 128) * words * 512;
      place.row = begin;
      place.d_rows = begin;
    } else {
      place.m = size > 0 ? args.m : 0;  // no tiles: fill_empty_groups writes D
      place.k = size > 0 ? tiles * kDepthStep : kDepthStep;
      place.a_elems = start * kDepthStep;
      place.b_elems = place.a_elems;
      place.scale_a_bytes = start * 512;
      place.scale_b_bytes = place.scale_a_bytes;
      place.d_rows = int64_t{g} * args.m;
    }
    table.set(g, args, place);
  }
}

}  // namespace cutlass_evt
