// Host tests of how the kernel on prepacked weights divides tiles among workers: a worker that waits for
// the parts of a tile must find that other workers have all of them.
#include "cutlass_evt/kernel/mixed_input_plan.hpp"

#include "checks.hpp"

namespace {

using cutlass_evt::MixedInputPlan;

/// What is wrong with the runs of a plan that splits tiles; null if nothing is.
char const* fault_of(MixedInputPlan const& plan, int steps) {
  if (plan.first_step(0) != 0 || plan.first_step(plan.active) != int64_t{plan.tiles} * steps) {
    return "the runs do not cover all steps";
  }
  for (int worker = 0; worker < plan.active; ++worker) {
    int64_t const begin = plan.first_step(worker);
    int64_t const size = plan.first_step(worker + 1) - begin;
    if (size < 1) {
      return "a worker has no steps, although the worker that adds up waits for it";
    }
    if (plan.parts > 1) {
      int const part = worker % plan.parts;
      int64_t const of_first = plan.first_step(worker - part + 1) - plan.first_step(worker - part);
      if (part == 0 && begin != int64_t{worker / plan.parts} * steps) {
        return "the first part of a tile does not begin with the tile";
      }
      if (part > 0 && (of_first < size + plan.lead - 2 || of_first > size + plan.lead + 2)) {
        return "the first part is not longer by the lead, within the roundings of both";
      }
    }
  }
  return nullptr;
}

void test_runs() {
  int splits = 0;
  int equal_parts = 0;
  for (int workers : {1, 2, 39, 57, 66, 78, 114, 132, 264, 396}) {
    for (int tiles : {0,   1,   2,   3,   4,   5,   7,   11,  12,  16,  24,   31,   32,   33,   43,   48,
                      64,  65,  66,  67,  96,  128, 131, 132, 133, 160, 192,  224,  256,  263,  264,  265,
                      300, 384, 396, 397, 448, 512, 600, 791, 792, 896, 1024, 1188, 1500, 3000, 4752, 5000}) {
      for (int steps : {1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 23, 28, 32, 45, 64, 112, 128, 255, 256}) {
        for (int least : {1, 2, 3, 4, 8, 16}) {
          for (int lead : {0, 1, 2, 4, 8}) {
            MixedInputPlan const plan(tiles, steps, workers, least, 0, lead, true);
            CHECK(plan.active <= workers, "%d tiles of %d steps: %d of %d workers", tiles, steps, plan.active,
                  workers);
            if (!plan.split) {
              CHECK(plan.active == (tiles < workers ? tiles : workers), "%d tiles, %d workers: %d", tiles,
                    workers, plan.active);
              continue;
            }
            ++splits;
            equal_parts += plan.parts > 1;
            char const* const fault = fault_of(plan, steps);
            CHECK(fault == nullptr, "%d tiles of %d steps, %d workers, least %d, lead %d: %s", tiles, steps,
                  workers, least, lead, fault);
          }
        }
      }
    }
  }
  CHECK(splits > 10000 && equal_parts > 10000, "%d plans split tiles, %d into equal parts", splits,
        equal_parts);
}

void test_known() {
  // 64 tiles of 32 steps on 132 workers: two parts of each, one of 17 steps and one of 15.
  MixedInputPlan const plan(64, 32, 132, 4, 0, 2, true);
  CHECK(plan.split && plan.active == 128 && plan.parts == 2, "%d workers, %d parts", plan.active, plan.parts);
  CHECK(plan.first_step(1) == 17 && plan.first_step(2) == 32, "%d", static_cast<int>(plan.first_step(1)));
  // Whole tiles: because the caller asks for them; as many as workers; nearly three for each worker.
  CHECK(!MixedInputPlan(64, 32, 132, 4, 0, 2, false).split, "split although the caller forbids it");
  CHECK(!MixedInputPlan(132, 32, 132, 4, 0, 2, true).split, "a tile each, and split");
  CHECK(!MixedInputPlan(380, 32, 132, 4, 0, 2, true).split, "4 %% idle, and split");
  CHECK(MixedInputPlan(340, 32, 132, 4, 0, 2, true).split, "14 %% idle, and whole");
  CHECK(!MixedInputPlan(112, 4, 132, 2, 0, 2, true).split, "15 %% idle, but a part of four steps has four");
}

void test_saved_steps() {
  using cutlass_evt::least_saved_steps;
  // 96 tiles of 8 tokens and 4096 of k: parts are one stage of 1024 shorter, which is too few, or three of
  // 384.
  CHECK(!MixedInputPlan(96, 4, 132, 1, least_saved_steps(8, 64, 1024), 1, true).split,
        "one stage, and split");
  CHECK(MixedInputPlan(96, 11, 132, 3, least_saved_steps(8, 64, 384), 2, true).split, "three, and whole");
  for (int saved = 0; saved <= 16; ++saved) {  // 32 steps become 16
    CHECK(MixedInputPlan(64, 32, 132, 4, saved, 2, true).split, "16 steps fewer of %d, and whole", saved);
  }
  CHECK(!MixedInputPlan(64, 32, 132, 4, 17, 2, true).split, "16 steps fewer of 17, and split");
}

void test_token_tiles() {
  using cutlass_evt::most_token_tiles;
  CHECK(most_token_tiles(7, 0, 8) == 1 && most_token_tiles(8, 0, 8) == 1 && most_token_tiles(9, 0, 8) == 2,
        "dense: as many as there are");
  // Groups of 1, 1 and 15 tokens have four tiles of 8; three of 8 have three.
  CHECK(most_token_tiles(17, 3, 8) >= 4 && most_token_tiles(24, 3, 8) >= 3,
        "groups: no fewer than there are");
}

}  // namespace

int main() {
  test_token_tiles();
  test_runs();
  test_known();
  test_saved_steps();
  return report();
}
