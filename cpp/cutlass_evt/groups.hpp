// The device tables of CUTLASS's grouped GEMMs, with one entry for each group, and the kernel that fills them
// from the group ends.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass_evt/epilogue/visitor.hpp"
#include "cutlass_evt/prefix_sum.hpp"

namespace cutlass_evt {

/// The size that differs from group to group: m or k.
enum class Ragged { kM, kK };

/// The arguments of a grouped GEMM. Op is an epilogue, see Fusion.
///
/// Ragged m: group g multiplies the rows offs[g-1] .. offs[g]-1 of A (m, k) by B[g] (n, k)^T and writes the
/// same rows of D (m, n). The scales of A start at a multiple of 128 rows for each group.
///
/// Ragged k: D[g] (m, n) is the product over the columns of group g in A (m, k) and B (n, k). The columns of
/// a group start at a multiple of those of a scale tile (four blocks: 64 of NVFP4, 128 of MXFP8) and are
/// padded with zeros to the next.
template <class Op>
struct GroupedArguments {
  Ragged ragged = Ragged::kM;
  int m = 0, n = 0, k = 0;
  int num_groups = 0;
  int const* offs = nullptr;  // (num_groups) cumulative ends, on the device
  int scale_tiles = 0;        // ragged m: the capacity of the scales of A, in tiles of 128 rows
  void const* a = nullptr;
  void const* scale_a = nullptr;
  void const* b = nullptr;
  void const* scale_b = nullptr;
  typename Op::Arguments epilogue;
  int device = 0;
  int num_sms = 0;
};

/// The sizes of one group and where it begins in each buffer.
struct GroupExtent {
  int m, n, k;
  int64_t a_elems;        // offset into A, in elements
  int64_t b_elems;        // offset into B, in elements
  int64_t scale_a_bytes;  // offset into the scales of A
  int64_t scale_b_bytes;  // offset into the scales of B
  int64_t row;            // first element of the vectors along the rows (ragged m)
  int64_t d_rows;         // first row in C and D
};

/// The tables of one grouped kernel. Collectives are its CUTLASS types, Op its epilogue.
template <class Collectives, class Op>
struct GroupTable {
  using Shape = cute::Shape<int, int, int>;
  using ElementA = typename Collectives::Operands::ElementA;
  using ElementB = typename Collectives::Operands::ElementB;
  using StrideA = typename Collectives::Kernel::InternalStrideA;
  using StrideB = typename Collectives::Kernel::InternalStrideB;
  using StrideD = typename Collectives::Kernel::InternalStrideD;
  using Stored = typename Op::ElementOutput;

  Shape* shapes;
  ElementA const** a;
  ElementB const** b;
  StrideA* stride_a;
  StrideB* stride_b;
  typename Collectives::Operands::ScaleTable scales;
  EpilogueTables epilogue;
  Stored** d;
  StrideD* stride_d;

  /// Assigns the arrays to workspace and returns the bytes that they need. workspace may be null if only the
  /// number is wanted.
  static size_t lay_out(void* workspace, int num_groups, GroupTable* table) {
    char* next = static_cast<char*>(workspace);
    size_t bytes = 0;
    auto const allocate = [&](auto*& array) {
      using T = cute::remove_pointer_t<cute::remove_reference_t<decltype(array)>>;
      array = reinterpret_cast<T*>(next + bytes);
      bytes += (sizeof(T) * static_cast<size_t>(num_groups) + 127) / 128 * 128;
    };
    allocate(table->shapes);
    allocate(table->a);
    allocate(table->b);
    allocate(table->stride_a);
    allocate(table->stride_b);
    table->scales.lay_out(allocate);
    for (auto& vector : table->epilogue.per_row) {
      allocate(vector);
    }
    for (auto& vector : table->epilogue.per_column) {
      allocate(vector);
    }
    allocate(table->epilogue.c);
    allocate(table->d);
    allocate(table->stride_d);
    return bytes;
  }

  /// Writes the entries of group g.
  CUTLASS_DEVICE void set(int g, GroupedArguments<Op> const& args, GroupExtent const& group) const {
    // The first operand of a swapped kernel is B.
    constexpr bool kSwapped = Op::kSwapped;
    static_assert(!kSwapped || cute::is_same_v<ElementA, ElementB>,
                  "operands that are swapped must have one format");
    auto const* const rows = offset<ElementA>(args.a, group.a_elems);
    auto const* const cols = offset<ElementB>(args.b, group.b_elems);
    shapes[g] = kSwapped ? Shape{group.n, group.m, group.k} : Shape{group.m, group.n, group.k};
    if constexpr (kSwapped) {
      a[g] = cols;
      b[g] = rows;
    } else {
      a[g] = rows;
      b[g] = cols;
    }
    cute::get<0>(stride_a[g]) = args.k;
    cute::get<0>(stride_b[g]) = args.k;
    auto const* const scale_rows = static_cast<uint8_t const*>(args.scale_a) + group.scale_a_bytes;
    auto const* const scale_cols = static_cast<uint8_t const*>(args.scale_b) + group.scale_b_bytes;
    scales.set(g, kSwapped ? scale_cols : scale_rows, kSwapped ? scale_rows : scale_cols, shapes[g], args.k);
    EpilogueArguments const& terms = args.epilogue;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      epilogue.per_row[v][g] = terms.per_row[v].at(g, group.row);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumColumnVectors; ++v) {
      epilogue.per_column[v][g] = terms.per_column[v].at(g, 0);
    }
    epilogue.c[g] = static_cast<typename Op::Result const*>(terms.c) + group.d_rows * terms.c_row_stride;
    int64_t const d_row_stride = terms.d_row_stride * kStoredElements<Op>;
    d[g] = static_cast<Stored*>(terms.d) + group.d_rows * d_row_stride;
    cute::get<kSwapped ? 1 : 0>(stride_d[g]) = d_row_stride;
  }

 private:
  template <class Element>
  static CUTLASS_DEVICE Element const* offset(void const* data, int64_t elems) {
    auto const* const bytes = static_cast<uint8_t const*>(data);
    return reinterpret_cast<Element const*>(bytes + elems * cutlass::sizeof_bits<Element>::value / 8);
  }
};

constexpr int kPrepareThreads = 256;

/// Writes D[g] of the empty groups of ragged k, act(bias) + beta * C: the GEMM has no tile of them, since
/// CUTLASS 4.2 cannot multiply a group of k = 0.
template <class Op>
CUTLASS_DEVICE void fill_empty_groups(GroupedArguments<Op> const& args, int cta, int num_ctas) {
  using Out = typename Op::Result;
  typename Op::Arguments const& terms = args.epilogue;
  int64_t const size = int64_t{args.m} * args.n;
  for (int g = 0; g < args.num_groups; ++g) {
    if (args.offs[g] > (g > 0 ? max(args.offs[g - 1], 0) : 0)) {
      continue;
    }
    for (int64_t i = int64_t{cta} * kPrepareThreads + threadIdx.x; i < size;
         i += int64_t{num_ctas} * kPrepareThreads) {
      int64_t const row = i / args.n;
      int64_t const column = i % args.n;
      int64_t const row_of_d = int64_t{g} * args.m + row;
      // The factors of a product that is 0 are left out.
      auto const addend = [&](auto v, int64_t at) {
        return is_addend(v) ? epilogue::element(terms, v, g, at) : absent(v);
      };
      float z[1] = {0.0f};
      Op::template finish<1>(
          terms, 1.0f, z, [&](RowVector v, int) { return addend(v, row); },
          [&](ColumnVector v, int) { return addend(v, column); },
          Source{[&](int) {
                   return epilogue::to_float(
                       terms, static_cast<Out const*>(terms.c)[row_of_d * terms.c_row_stride + column]);
                 },
                 [&](int) { return Place{static_cast<int>(row), static_cast<int>(column), g, true}; }});
      static_cast<epilogue::StoredAs<Out>*>(terms.d)[row_of_d * terms.d_row_stride + column] =
          epilogue::cast_all<Out, 1>(terms, z)[0];
    }
  }
}

/// Fills the tables with CTA 0. Further CTAs, which are launched for ragged k, write D of the empty groups.
template <class Collectives, class Op>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_groups(__grid_constant__ GroupedArguments<Op> const args,
                   __grid_constant__ GroupTable<Collectives, Op> const table) {
  // The previous kernel may have written the group ends, and may still read the tables or D. The dependents,
  // which are the GEMM, wait for this grid in turn before they read the tables.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (blockIdx.x > 0) {
    if constexpr (!Op::kGated) {
      fill_empty_groups(args, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
    }
    return;
  }
  bool const is_ragged_m = args.ragged == Ragged::kM;
  // Groups start at whole tiles of scales: 128 rows for ragged m, four blocks of columns for ragged k. Ends
  // that are out of order or out of range are an error of the caller that is not reported. The clamps, and
  // dropping groups for which there is no room, keep every access within the buffers.
  constexpr int kBlock = Collectives::Operands::kBlock;
  constexpr int kTileColumns = 4 * kBlock;
  int const step = is_ragged_m ? 128 : kTileColumns;
  int const room = is_ragged_m ? args.scale_tiles : args.k / kTileColumns;
  int const most = is_ragged_m ? args.m : INT32_MAX;
  int64_t const words = (args.k / kBlock + 3) / 4;  // words of 4 scales in a row
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
    GroupExtent group{};
    group.n = args.n;
    if (is_ragged_m) {
      group.m = size;
      group.k = args.k;
      group.a_elems = int64_t{begin} * args.k;
      group.b_elems = int64_t{g} * args.n * args.k;
      group.scale_a_bytes = start * words * 512;
      group.scale_b_bytes = g * ((args.n + 127) / 128) * words * 512;
      group.row = begin;
      group.d_rows = begin;
    } else {
      group.m = size > 0 ? args.m : 0;  // empty groups have no tiles; fill_empty_groups writes their D
      group.k = size > 0 ? tiles * kTileColumns : kTileColumns;
      group.a_elems = start * kTileColumns;
      group.b_elems = group.a_elems;
      group.scale_a_bytes = start * 512;
      group.scale_b_bytes = group.scale_a_bytes;
      group.d_rows = int64_t{g} * args.m;
    }
    table.set(g, args, group);
  }
}

}  // namespace cutlass_evt
