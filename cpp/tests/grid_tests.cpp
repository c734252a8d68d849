// Host tests of launches over more CTAs than one grid holds.
#include "quantize/grid.hpp"

#include "checks.hpp"

namespace {

using fp4gemm::for_grid_parts;
using fp4gemm::kMaxGridX;
using fp4gemm::kMaxGridY;

/// The number of launches for `total` CTAs, after checking that they cover each CTA exactly once.
int launches_for(int64_t total, int64_t most) {
  int64_t next = 0;
  int launches = 0;
  for_grid_parts(total, most, [&](int64_t first, unsigned count) {
    ++launches;
    CHECK(first == next, "part %d of %lld starts at %lld, not %lld", launches, static_cast<long long>(total),
          static_cast<long long>(first), static_cast<long long>(next));
    CHECK(count >= 1 && int64_t{count} <= most, "part %d of %lld has %u CTAs, the limit is %lld", launches,
          static_cast<long long>(total), count, static_cast<long long>(most));
    next = first + count;
  });
  CHECK(next == total, "the parts end at %lld, not %lld", static_cast<long long>(next),
        static_cast<long long>(total));
  return launches;
}

void test_parts_cover_every_cta_once() {
  CHECK(launches_for(0, kMaxGridY) == 0, "an empty range is not launched");
  for (int64_t total : {int64_t{1}, kMaxGridY - 1, kMaxGridY}) {
    CHECK(launches_for(total, kMaxGridY) == 1, "%lld CTAs fit one grid", static_cast<long long>(total));
  }
  CHECK(launches_for(kMaxGridY + 1, kMaxGridY) == 2, "one CTA more than a grid holds");
  CHECK(launches_for(2 * kMaxGridY, kMaxGridY) == 2, "exactly two grids");
  // Tiles of 128 rows of the longest tensor there may be, 2^31 - 1 rows.
  CHECK(launches_for(int64_t{1} << 24, kMaxGridY) == 257, "the tiles of 2^31 rows");
  CHECK(launches_for(int64_t{1} << 31, kMaxGridX) == 2, "a CTA for each of 2^31 rows");
}

}  // namespace

int main() {
  test_parts_cover_every_cta_once();
  return report();
}
