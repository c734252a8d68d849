// The consumers of the mainloop on prepacked NVFP4 weights: they multiply stages in shared memory into sums
// in registers. On SM90 tiles of eight tokens use mma.sync and wider ones wgmma; on SM120 all use mma.sync.
#pragma once

#include "cute/atom/mma_atom.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"
#include "cutlass_evt/mainloop/mixed_input.hpp"

namespace cutlass_evt {

/// The consumers with mma.sync m16n8k16, of fp16 and bf16. Config is a MixedInputConfig without kUsesWgmma. A
/// warp has 16 weight rows, and all tokens of the tile as blocks of eight.
///
/// On SM90 an mma.sync keeps its scheduler from issuing anything else for six clocks, and decoding one
/// operand takes 14 instructions. These two bound the time of a chunk, so the loop has little else in it. On
/// SM120 decoding is far from the bound, see bench/notes/sm120_decode.md.
template <class Config>
struct MixedInputMmaMultiply {
  using Mainloop = MixedInputMainloop<Config>;
  using Shared = typename Mainloop::Shared;
  using Position = typename Mainloop::Position;
  using Element = typename Config::Element;
  static_assert(!Config::kQuantizes || Config::kTokens == 8, "a kernel quantizes up to eight tokens");
  // From a chunk of the tokens to the next.
  static constexpr int kChunkBytes = Config::kQuantizes ? 128 : Config::kTokenChunkBytes;

  /// The sums of one thread: for each block of eight tokens those of two tokens in row r, then in row r + 8.
  struct Accumulators {
    static constexpr int kSize = Config::kTokens / 2;
    float values[kSize];

    CUTLASS_DEVICE float& operator[](int index) { return values[index]; }
  };

  /// c += a * (b0, b1), one mma.sync.
  CUTLASS_DEVICE static void mma(float* c, uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (cute::is_same_v<Element, cutlass::half_t>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  /// accumulators = the product of this warp's rows and chunks with the tokens, over the stages of `work`.
  CUTLASS_DEVICE static void multiply(MixedInputOperands const& p, Shared const& shared, Position& at,
                                      TileWork const& work, Accumulators& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kSize; ++i) {
      accumulators.values[i] = 0.0f;
    }
    if constexpr (Config::kLeastTokens < Config::kTokens) {
      int const present = __shfl_sync(0xFFFFFFFFu, work.tokens, 0);  // shows ptxas that warps do not diverge
      if (present <= Config::kLeastTokens) {
        multiply<Config::kLeastTokens / 8>(p, shared, at, work, accumulators);
        return;
      }
    }
    multiply<Config::kTokens / 8>(p, shared, at, work, accumulators);
  }

 private:
  /// The loop for tiles that hold `Blocks` blocks of eight tokens.
  template <int Blocks>
  CUTLASS_DEVICE static void multiply(MixedInputOperands const& p, Shared const& shared, Position& at,
                                      TileWork const& work, Accumulators& accumulators) {
    constexpr int kPer = Config::kChunksPerGroup;
    int const warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 128), 0);
    int const row_group = warpgroup % Config::kRowGroups;
    int const depth_group = warpgroup / Config::kRowGroups;
    typename Mainloop::Share const share(shared, row_group * Config::kChunks + depth_group * kPer);

    // ldmatrix loads four 8 x 8 matrices: eight tokens by 32 along k. Each lane gives the address of one row
    // of one matrix, 16 bytes of a token, which the 128-byte swizzle permutes by the token's number.
    uint32_t const lane = threadIdx.x % 32;
    uint32_t token = lane % 8;
    uint32_t token_bytes = 128;  // from a token to the next
    uint32_t chunk = static_cast<uint32_t>(depth_group * kPer);
    if constexpr (Config::kQuantizes) {
      // Lanes without a token read the last one: the columns of their products are not stored.
      token = cute::min(token, static_cast<uint32_t>(work.tokens - 1));
      token_bytes = static_cast<uint32_t>(Config::token_stride(p.depth_chunks));
      chunk += static_cast<uint32_t>(work.begin * Config::kChunks);
    }
    uint32_t const tokens_at = shared.tokens_at(0) + chunk * kChunkBytes + token * token_bytes;
    uint32_t halves_at[2] = {tokens_at + (lane / 8 ^ token) * 16, tokens_at + ((lane / 8 + 4) ^ token) * 16};

    // Row groups beyond the weight are not loaded.
    bool has_rows = true;
    if constexpr (Config::kRowGroups > 1) {
      has_rows = __shfl_sync(0xFFFFFFFFu, work.first_chunk + row_group < p.row_chunks ? 1 : 0, 0) != 0;
    }

    auto const multiply_chunk = [&](int stage, int sub) {
      if (!has_rows) {
        return;
      }
      typename Mainloop::Raw raw;
      share.load(raw, stage, sub);
      uint32_t b[2][Blocks][4];
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const slot = Config::kQuantizes ? 0 : stage * Config::kTokenBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < Blocks; ++block) {
          load_tokens(b[half][block],
                      halves_at[half] + static_cast<uint32_t>(slot + sub * kChunkBytes + block_at(block)));
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        raw.decode(k, {}, a);
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < Blocks; ++block) {
          mma(accumulators.values + block * 4, a, b[k / 2][block][k % 2 * 2], b[k / 2][block][k % 2 * 2 + 1]);
        }
      }
    };
    auto const release = [&] {
      __syncwarp();  // every lane has read the stage
      Mainloop::release(shared, at.stage);
      at.advance();
      if constexpr (Config::kQuantizes) {
        halves_at[0] += Config::kChunks * kChunkBytes;
        halves_at[1] += Config::kChunks * kChunkBytes;
      }
    };

    int const last = Mainloop::chunks_left(p, work.end - 1, depth_group);  // of this warp, in the last stage
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = work.end - work.begin - (last < kPer ? 1 : 0); left > 0; --left) {
      Mainloop::wait_full(shared, at);
      CUTLASS_PRAGMA_UNROLL
      for (int sub = 0; sub < kPer; ++sub) {
        multiply_chunk(at.stage, sub);
      }
      release();
    }
    if (last < kPer) {
      Mainloop::wait_full(shared, at);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int sub = 0; sub < last; ++sub) {
        multiply_chunk(at.stage, sub);
      }
      release();
    }
  }

  /// The offset of a block of eight tokens from the first one of the same chunk, see MixedInputConfig.
  CUTLASS_HOST_DEVICE static constexpr int block_at(int block) {
    constexpr int kPerPart = Config::kLeastTokens / 8;
    return block / kPerPart * (Config::kChunks * Config::kTokenChunkBytes) + block % kPerPart * 1024;
  }

  CUTLASS_DEVICE static void load_tokens(uint32_t (&b)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(from)
                 : "memory");
  }
};

/// The consumers of tiles of 16 tokens and more, with wgmma. Config is a MixedInputConfig. A warpgroup has 64
/// weight rows.
template <class Config>
struct MixedInputWgmmaMultiply {
  using Mainloop = MixedInputMainloop<Config>;
  using Shared = typename Mainloop::Shared;
  using Position = typename Mainloop::Position;
  using Raw = typename Mainloop::Raw;
  using Element = typename Config::Element;
  using Packing = typename Config::Packing;
  using SmemLayoutAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  // The tokens of a stage: (tokens, k of a chunk, chunks). Where a block of tokens is one swizzle atom, the
  // chunks of a block follow one another, and the next block follows them.
  using SmemLayout = decltype(cute::tile_to_shape(
      SmemLayoutAtom{},
      cute::make_shape(cute::Int<Config::kTokens>{}, cute::Int<Packing::kDepth>{},
                       cute::Int<Config::kChunks>{}),
      cute::conditional_t<Config::kLeastTokens == 8, cute::Step<cute::_3, cute::_1, cute::_2>,
                          cute::Step<cute::_1, cute::_2, cute::_3>>{}));
  template <int Tokens>
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::Int<64>, cute::Int<Tokens>, cute::Int<Packing::kDepth>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  static_assert(
      cute::size<1>(typename TiledMma<Config::kTokens>::AtomShape_MNK{}) == Config::kTokens,
      "CuTe selects a wgmma of fewer columns, unless CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED is defined");
  template <int Tokens>
  using Fragment = decltype(cute::partition_fragment_C(TiledMma<Tokens>{},
                                                       cute::Shape<cute::Int<64>, cute::Int<Tokens>>{}));

  struct Accumulators {
    static constexpr int kSize = Config::kTokens / 2;
    Fragment<Config::kTokens> values;

    CUTLASS_DEVICE float& operator[](int index) { return values(index); }
  };

  /// result = the product of this warpgroup's rows and chunks with the tokens, over the stages of `work`.
  CUTLASS_DEVICE static void multiply(MixedInputOperands const& p, Shared const& shared, Position& at,
                                      TileWork const& work, Accumulators& result) {
    int const present = __shfl_sync(0xFFFFFFFFu, work.tokens, 0);  // shows ptxas that warps do not diverge
    // Tiles of 32 tokens have a loop for each of two widths; more loops would need more registers. Other
    // tiles branch within the loop.
    if constexpr (Config::kTokens == 32 && Config::kLeastTokens < 32) {
      if (present <= 16) {
        multiply<16, 16>(p, shared, at, work, present, result.values);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 16 / 2; i < Accumulators::kSize; ++i) {
          result[i] = 0.0f;
        }
      } else {
        multiply<32, 32>(p, shared, at, work, present, result.values);
      }
    } else {
      multiply<Config::kLeastTokens, Config::kTokens>(p, shared, at, work, present, result.values);
    }
  }

 private:
  /// The loop for wgmmas of Least, 2 Least, .. Most tokens: the narrowest that covers the `present` tokens.
  template <int Least, int Most>
  CUTLASS_DEVICE static void multiply(MixedInputOperands const& p, Shared const& shared, Position& at,
                                      TileWork const& work, int present,
                                      Fragment<Config::kTokens>& accumulators) {
    using namespace cute;
    int const warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 128), 0);
    int const row_group = warpgroup % Config::kRowGroups;
    int const depth_group = warpgroup / Config::kRowGroups;
    constexpr int kPer = Config::kChunksPerGroup;

    uint64_t const descriptor = first_descriptor(shared) +
                                static_cast<uint64_t>(depth_group * (kPer * Config::kTokenChunkBytes / 16));
    auto accumulate = GMMA::ScaleOut::Zero;
    auto const fragment_layout =
        make_layout(make_shape(Shape<Int<4 / sizeof(Element)>, _2, _2>{}, _1{}, _4{}));
    Tensor fragment_0 = make_tensor<Element>(fragment_layout);
    Tensor fragment_1 = make_tensor<Element>(fragment_layout);
    constexpr bool kInPairs = Config::kPromotes && !Config::kAlternates;
    constexpr int kPartTokens = cute::min(Most, Config::kPartTokens);
    static_assert(!Config::kPromotes || Most % kPartTokens == 0, "a promoted tile has whole parts");
    Fragment<kPartTokens> part_sums[Config::kAlternates ? 2 : 1];
    if constexpr (Config::kPromotes) {
      clear(accumulators);
    }
    if constexpr (Config::kAlternates) {
      clear(part_sums[1]);  // what the first group finds in place of the sums before it
    }

    typename Mainloop::Share const share(shared, row_group * Config::kChunks + depth_group * kPer);

    typename Raw::Constants constants;
    // Where the ALU pipe bounds the decoding, shifts become multiplications, which another pipe executes,
    // because the compiler does not know that blockIdx.z is 0.
    if constexpr (!Config::kSharesRows && sizeof(Element) == 2) {
      uint32_t const zero = blockIdx.z;
      constants.by_3 += zero;
      constants.by_7 += zero;
      constants.by_10 += zero;
    }

    // Chunks in the last stage, which may have fewer than the others.
    int const last = Mainloop::chunks_left(p, work.end - 1, depth_group);
    int left = work.end - work.begin - (last < kPer ? 1 : 0);  // whole stages

    auto const decode = [&](Raw const& raw, auto& fragment) {
      Tensor registers = recast<uint32_t>(fragment);  // (4, 1, 4)
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        raw.decode(k, constants, a);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          registers(i, 0, k) = a[i];
        }
      }
    };
    auto const tokens_of = [&](int stage, int sub) {
      return descriptor + static_cast<uint64_t>(stage * (Config::kTokenBytes / 16) +
                                                sub * (Config::kTokenChunkBytes / 16));
    };

    // Issues the wgmmas of a chunk as one group. The fences keep the compiler from moving accesses to the
    // registers of a wgmma across it.
    auto const issue = [&](auto& fragment, int stage, int sub) {
      warpgroup_fence_operand(accumulators);
      warpgroup_fence_operand(fragment);
      multiply_chunk<Least, Most>(present, tokens_of(stage, sub), fragment, accumulate, accumulators);
      accumulate = GMMA::ScaleOut::One;
    };
    // The same for promoted sums. Groups use the two sets of sums in turn.
    auto const issue_set = [&](auto set, auto& fragment, int stage, int sub) {
      warpgroup_fence_operand(part_sums[set]);
      warpgroup_fence_operand(fragment);
      warpgroup_arrive();
      multiply_part<kPartTokens>(tokens_of(stage, sub), fragment, GMMA::ScaleOut::Zero, part_sums[set]);
      warpgroup_commit_batch();
    };
    auto const add_part = [&](auto part, auto set) {
      warpgroup_fence_operand(part_sums[set]);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPartTokens / 2; ++i) {
        accumulators(part * (kPartTokens / 2) + i) += part_sums[set](i);
      }
    };

    // One chunk of the software pipeline: loads the encoded weights of the next chunk, decodes this one and
    // issues its wgmmas. The wait leaves one group in flight, so that on return the previous chunk has been
    // multiplied; its stage is released if the chunk was its last. `turn` is 0 or 1, in turn.
    int previous = at.stage;  // the stage to release
    bool first = true;
    auto const load_next = [&](auto sub, Raw& next, bool more) {
      if constexpr (sub + 1 == kPer) {
        at.advance();
        if (more) {
          Mainloop::wait_full(shared, at);
          share.load(next, at.stage, 0);
        }
      } else {
        share.load(next, at.stage, sub + 1);
      }
    };
    auto const chunk = [&](auto sub, auto turn, Raw& raw, Raw& next, auto& fragment, bool more) {
      int const stage = at.stage;
      load_next(sub, next, more);
      decode(raw, fragment);
      if constexpr (Config::kPromotes) {
        issue_set(turn, fragment, stage, sub);
      } else {
        issue(fragment, stage, sub);
      }
      next.look_up(shared.decoder_at());
      warpgroup_wait<1>();
      if constexpr (Config::kPromotes) {
        add_part(_0{}, cute::Int<1 - turn>{});
      }
      if constexpr (sub == 0) {
        if (!first) {
          Mainloop::release(shared, previous);
        }
        first = false;
        previous = stage;
      }
    };
    // A pair of chunks of a promoted tile, or a single one: every part is multiplied by both before its sums
    // are added.
    auto const pair = [&](auto chunks) {
      constexpr int kCount = chunks;
      int stages[2] = {at.stage, at.stage};
      Raw raws[2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        stages[i] = at.stage;
        Mainloop::wait_full(shared, at);
        share.load(raws[i], at.stage, 0);
        at.advance();
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        raws[i].look_up(shared.decoder_at());
      }
      decode(raws[0], fragment_0);
      if constexpr (kCount == 2) {
        decode(raws[1], fragment_1);
      }
      cute::for_each(cute::make_seq<Most / kPartTokens>{}, [&](auto part) {
        if (part == 0 || Least == Most || part * kPartTokens < present) {
          auto& sums = part_sums[0];
          uint64_t const offset = part * (kPartTokens * 128 / 16);
          warpgroup_fence_operand(sums);
          warpgroup_fence_operand(fragment_0);
          warpgroup_fence_operand(fragment_1);
          warpgroup_arrive();
          multiply_part<kPartTokens>(tokens_of(stages[0], 0) + offset, fragment_0, GMMA::ScaleOut::Zero,
                                     sums);
          if constexpr (kCount == 2) {
            multiply_part<kPartTokens>(tokens_of(stages[1], 0) + offset, fragment_1, GMMA::ScaleOut::One,
                                       sums);
          }
          warpgroup_commit_batch();
          warpgroup_wait<0>();
          add_part(part, _0{});
        }
      });
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        Mainloop::release(shared, stages[i]);
      }
    };
    // Adds the sums of the last chunk, whose turn was `turn`.
    auto const add_last = [&](auto turn) {
      if constexpr (Config::kAlternates) {
        warpgroup_wait<0>();
        add_part(_0{}, turn);
      }
    };

    // The loops are unrolled over two fragments so that ptxas can see that no fragment is written while a
    // wgmma reads it; otherwise it serialises all wgmmas (its remark C7513).
    if constexpr (kInPairs) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; left > 1; left -= 2) {
        pair(_2{});
      }
      if (left > 0) {
        pair(_1{});
      }
      return;
    }
    if (left > 0) {
      Raw raw_0, raw_1;
      Mainloop::wait_full(shared, at);
      share.load(raw_0, at.stage, 0);
      raw_0.look_up(shared.decoder_at());
      if constexpr (kPer == 1) {
        CUTLASS_PRAGMA_NO_UNROLL
        while (true) {
          chunk(_0{}, _0{}, raw_0, raw_1, fragment_0, left > 1);
          if (left == 1) {
            add_last(_0{});
            break;
          }
          chunk(_0{}, _1{}, raw_1, raw_0, fragment_1, left > 2);
          if (left == 2) {
            add_last(_1{});
            break;
          }
          left -= 2;
        }
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (; left > 0; --left) {
          cute::for_each(cute::make_seq<kPer / 2>{}, [&](auto two) {
            chunk(cute::Int<2 * two>{}, _0{}, raw_0, raw_1, fragment_0, left > 1);
            chunk(cute::Int<2 * two + 1>{}, _1{}, raw_1, raw_0, fragment_1, left > 1);
          });
        }
      }
      warpgroup_wait<0>();
      Mainloop::release(shared, previous);
    }
    if (last < kPer) {
      Mainloop::wait_full(shared, at);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int sub = 0; sub < last; ++sub) {
        Raw raw;
        share.load(raw, at.stage, sub);
        raw.look_up(shared.decoder_at());
        decode(raw, fragment_0);
        if constexpr (Config::kPromotes) {
          issue_set(_0{}, fragment_0, at.stage, sub);
          warpgroup_wait<0>();
          add_part(_0{}, _0{});
        } else {
          issue(fragment_0, at.stage, sub);
          warpgroup_wait<0>();
        }
      }
      Mainloop::release(shared, at.stage);
      at.advance();
    }
    warpgroup_fence_operand(accumulators);
    if constexpr (Config::kDepthGroups > 1 && !Config::kPromotes) {
      // k may end before this warpgroup's first chunk.
      if (accumulate == GMMA::ScaleOut::Zero) {
        clear(accumulators);
      }
    }
  }

  /// The wgmma descriptor of the tokens in the first chunk of the first stage. Those of other chunks, and of
  /// other 16 along k, add an offset in units of 16 bytes. The sum has 64 bits so that it is one instruction;
  /// cute's descriptor iterator needs three.
  CUTLASS_DEVICE static uint64_t first_descriptor(Shared const& shared) {
    using namespace cute;
    Tensor tokens = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(shared.tokens())), SmemLayout{});
    auto const slice = TiledMma<Config::kTokens>{}.get_slice(0);
    Tensor operand = slice.make_fragment_B(slice.partition_B(tokens));
    return operand.data().desc_.desc_;
  }

  /// sums (+)= fragment times `Tokens` tokens of a chunk at `descriptor`: wgmmas of a group.
  template <int Tokens, class A>
  CUTLASS_DEVICE static void multiply_part(uint64_t descriptor, A const& fragment,
                                           cute::GMMA::ScaleOut accumulate, Fragment<Tokens>& sums) {
    using namespace cute;
    TiledMma<Tokens> mma;
    mma.accumulate_ = accumulate;
    Tensor flat = make_tensor(sums.data(), sums.layout())(_, _0{}, _0{});
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 4; ++k) {
      Tensor operand = make_tensor<uint64_t>(Shape<_1>{});
      operand(0) = descriptor + static_cast<uint64_t>(k * (128 / 4 / 16));
      mma.call(flat, fragment(_, _0{}, k), operand, flat);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }

  /// accumulators (+)= fragment times the chunk of tokens at `descriptor`, as wide as `present` needs: Width
  /// tokens or, by recursion, twice as many, up to Most. The widths share the first registers of
  /// accumulators.
  template <int Width, int Most, class A>
  CUTLASS_DEVICE static void multiply_chunk(int present, uint64_t descriptor, A const& fragment,
                                            cute::GMMA::ScaleOut accumulate,
                                            Fragment<Config::kTokens>& accumulators) {
    using namespace cute;
    if (Width == Most || present <= Width) {
      Tensor sums = make_tensor(accumulators.data(), Fragment<Width>{}.layout())(_, _0{}, _0{});
      TiledMma<Width> mma;
      mma.accumulate_ = accumulate;
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        Tensor operand = make_tensor<uint64_t>(Shape<_1>{});
        operand(0) = descriptor + static_cast<uint64_t>(k * (128 / 4 / 16));
        mma.call(sums, fragment(_, _0{}, k), operand, sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    } else if constexpr (Width < Most) {
      multiply_chunk<2 * Width, Most>(present, descriptor, fragment, accumulate, accumulators);
    }
  }
};

}  // namespace cutlass_evt
