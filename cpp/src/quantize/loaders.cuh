// The inputs of a row kernel: x itself, rows of x by index, its Hadamard rotation, SiLU(gate) * up, or an RMS
// norm. A loader returns the blocks of one row.
#pragma once

#include "quantize/cast.cuh"
#include "quantize/hadamard.cuh"
#include "quantize/row_reduce.cuh"
#include "quantize/silu.cuh"

namespace fp4gemm {

/// The input of a row kernel, with the fields that each of the loaders needs.
struct Input {
  void const* x;
  int64_t row_stride;                  // elements
  SignMasks signs{};                   // Hadamard
  int64_t const* rng_state = nullptr;  // Hadamard with DrawnSigns: {seed, offset}; else null
  int64_t up_offset = 0;               // SiLU: elements from the gate to the factor `up`
  void const* residual = nullptr;      // norm: added to x, (m, k) contiguous; null: none
  void* sum = nullptr;                 // norm: out, x + residual, (m, k) contiguous
  void const* weight = nullptr;        // norm: (k), or null
  int64_t k = 0;                       // norm
  float epsilon = 0.0f;                // norm
  int const* rows = nullptr;       // gather: (m) on the device, the row of x for each row; null: the same row
  int64_t num_rows = 0;            // gather: of x, with rows
  int const* row_limit = nullptr;  // gather: on the device, the rows before the first row of zeros; or null
};

/// The blocks of x.
///
/// Every loader is constructed for a row and the first block that its thread loads. load(b) returns block
/// first_block + b as a Block<Element>; b is 64 bits wide, since a whole tensor may be loaded as one row.
/// With kIsNorm, what load() returns must go through finish().
///
/// @tparam T The type of x.
template <class T>
class PlainLoader {
 public:
  using Element = T;
  static constexpr bool kIsNorm = false;

  __device__ PlainLoader(Input const& input, int64_t row, int first_block)
      : x_(static_cast<T const*>(input.x) + row * input.row_stride + first_block * kBlock) {}

  /// Block first_block + block of the row.
  __device__ Block<T> load(int64_t block) const { return load_block(x_ + block * kBlock); }

  /// The elements of that block.
  __device__ T const* elements(int64_t block) const { return x_ + block * kBlock; }

 private:
  T const* x_;
};

/// The blocks of rows of x that an index names. A row whose index is outside of x, and every row from
/// *row_limit on, is zero.
template <class T>
class GatherLoader {
 public:
  using Element = T;
  static constexpr bool kIsNorm = false;

  __device__ GatherLoader(Input const& input, int64_t row, int first_block) {
    int64_t const source = input.rows != nullptr ? load_after_wait(input.rows + row) : row;
    bool const is_in_x = input.rows == nullptr || (source >= 0 && source < input.num_rows);
    bool const is_zero = !is_in_x || (input.row_limit != nullptr && row >= load_after_wait(input.row_limit));
    x_ =
        is_zero ? nullptr : static_cast<T const*>(input.x) + source * input.row_stride + first_block * kBlock;
  }

  __device__ Block<T> load(int64_t block) const {
    return x_ != nullptr ? load_block(x_ + block * kBlock) : Block<T>{};
  }

 private:
  T const* x_;
};

/// The blocks of x after the Hadamard transform.
///
/// @tparam Rotation The type that the results are rounded to, __nv_bfloat16, or float for no rounding; or
///     DrawnSigns.
template <class T, class Rotation>
class HadamardLoader {
 public:
  using Element = RotatedTo<Rotation>;
  static constexpr bool kIsNorm = false;

  __device__ HadamardLoader(Input const& input, int64_t row, int first_block)
      : plain_(input, row, first_block), signs_(input.signs, input.rng_state) {}

  __device__ Block<Element> load(int64_t block) const {
    return rotated<Rotation>(plain_.load(block), signs_);
  }

 private:
  PlainLoader<T> plain_;
  Signs<Rotation> signs_;
};

/// T(T(silu(gate)) * up), with the two roundings of eager F.silu(gate) * up.
template <class T>
class SiluAndMulLoader {
 public:
  using Element = T;
  static constexpr bool kIsNorm = false;

  __device__ SiluAndMulLoader(Input const& input, int64_t row, int first_block)
      : gate_(static_cast<T const*>(input.x) + row * input.row_stride + first_block * kBlock),
        up_offset_(input.up_offset) {}

  __device__ Block<T> load(int64_t block) const {
    T const* const start = gate_ + block * kBlock;
    Block<T> gate = load_block(start);
    Block<T> const up = load_block(start + up_offset_);
#pragma unroll
    for (int i = 0; i < Block<T>::kWords; ++i) {
      gate.words[i] = multiply_pair<T>(pack_pair<T>(silu(gate.element(2 * i)), silu(gate.element(2 * i + 1))),
                                       up.words[i]);
    }
    return gate;
  }

 private:
  T const* gate_;
  int64_t up_offset_;
};

/// T(weight * T(h * r)) with h = T(x + residual) and r = 1 / sqrt(mean(h^2) + epsilon).
template <class T>
class RmsNormLoader {
 public:
  using Element = T;
  static constexpr bool kIsNorm = true;

  __device__ RmsNormLoader(Input const& input, int64_t row, int first_block)
      : x_(static_cast<T const*>(input.x) + row * input.row_stride + first_block * kBlock),
        residual_(offset(static_cast<T const*>(input.residual), row * input.k + first_block * kBlock)),
        sum_(offset(static_cast<T*>(input.sum), row * input.k + first_block * kBlock)),
        weight_(offset(static_cast<T const*>(input.weight), first_block * kBlock)) {}

  /// h, from which the kernel computes r.
  __device__ Block<T> load(int64_t block) const {
    int64_t const start = block * kBlock;
    Block<T> h = load_block(x_ + start);
    if (residual_ != nullptr) {
      Block<T> const other = load_block(residual_ + start);
#pragma unroll
      for (int i = 0; i < Block<T>::kWords; ++i) {
        h.words[i] = pack_pair<T>(__fadd_rn(h.element(2 * i), other.element(2 * i)),
                                  __fadd_rn(h.element(2 * i + 1), other.element(2 * i + 1)));
      }
    }
    return h;
  }

  /// h again, after store_sum, which may have written over the residual.
  __device__ Block<T> reload(int64_t block) const {
    if (sum_ == nullptr) {
      return load(block);
    }
    Block<T> h;
    auto const* const source = reinterpret_cast<uint32_t const*>(sum_ + block * kBlock);
#pragma unroll
    for (int i = 0; i < Block<T>::kWords; ++i) {
      h.words[i] = source[i];
    }
    return h;
  }

  /// Writes h as the new residual, if there is one.
  __device__ void store_sum(int64_t block, Block<T> const& h) const {
    if (sum_ != nullptr) {
      uint4* const target = reinterpret_cast<uint4*>(sum_ + block * kBlock);
      target[0] = {h.words[0], h.words[1], h.words[2], h.words[3]};
      target[1] = {h.words[4], h.words[5], h.words[6], h.words[7]};
    }
  }

  /// The normalised block, from h and r.
  __device__ Block<T> finish(int64_t block, Block<T> h, float r) const {
#pragma unroll
    for (int i = 0; i < Block<T>::kWords; ++i) {
      h.words[i] = pack_pair<T>(__fmul_rn(h.element(2 * i), r), __fmul_rn(h.element(2 * i + 1), r));
    }
    if (weight_ != nullptr) {
      Block<T> const weight = load_block(weight_ + block * kBlock);
#pragma unroll
      for (int i = 0; i < Block<T>::kWords; ++i) {
        h.words[i] = multiply_pair<T>(h.words[i], weight.words[i]);
      }
    }
    return h;
  }

  /// The sum of h^2 over the block, folded by halves as row_sum folds the sums of blocks.
  __device__ static float sum_of_squares(Block<T> const& h) {
    float square[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      square[i] = __fmul_rn(h.element(i), h.element(i));
    }
    fold_by_halves<kBlock / 2>(square);
    return square[0];
  }

 private:
  template <class P>
  __device__ static P* offset(P* pointer, int64_t elements) {
    return pointer == nullptr ? nullptr : pointer + elements;
  }

  T const* x_;
  T const* residual_;
  T* sum_;
  T const* weight_;
};

}  // namespace fp4gemm
