// Schedules run on numbers by an interpreter that shares nothing with the verifier; and mutated schedules.
//
// If the verifier accepts a schedule, running it must give the right numbers; float sums must have the bits
// of the canonical tree where an algorithm claims it. Mutants (a step dropped, doubled, swapped, sent
// elsewhere …) must be rejected, or be harmless: accepted and still right.
#include "schedule/interpreter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "schedule/catalog_params.h"
#include "schedule/print.h"
#include "schedule/verify.h"

namespace pycomm {
namespace {

class Interpreted : public testing::TestWithParam<const Algorithm*> {};
class Reducing : public Interpreted {};

TEST_P(Interpreted, GivesTheRightNumbers) {
  const Algorithm& a = *GetParam();
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 33}) {
    for (int root : {0, n / 2, n - 1}) {
      if (root != 0 && !has_root(a.collective)) continue;
      for (int n_chunks : {0, 1, 3}) {
        const auto all = build_all(a, n, root, n_chunks);
        EXPECT_EQ(wrong_result(all, a.collective, root, false), "") << n << " ranks, root " << root;
        if (a.in_place) {
          EXPECT_EQ(wrong_result(all, a.collective, root, true), "") << n << " ranks, root " << root;
        }
      }
    }
  }
}

float float_input(int rank, uint32_t part) {
  std::mt19937 random(static_cast<uint32_t>(rank) * 1000u + part);
  return std::ldexp(static_cast<float>(random() >> 8), static_cast<int>(random() % 20) - 30);
}

// T of docs/numerics.md, from its definition.
float canonical(int lo, int hi, uint32_t part) {
  const int n = hi - lo;
  if (n == 1) return float_input(lo, part);
  int p = 1;
  while (2 * p <= n) p *= 2;
  const int m = std::min(p, n - p / 2);
  return canonical(lo, lo + m, part) + canonical(lo + m, hi, part);
}

TEST_P(Reducing, HasTheCanonicalBitsWhereItSaysSo) {
  const Algorithm& a = *GetParam();
  for (int n : {2, 3, 5, 6, 7, 8, 12, 13, 17}) {
    const int root = has_root(a.collective) ? n - 1 : 0;
    const auto all = build_all(a, n, root, 2);
    Interpreter<float> run(all, a.in_place, float_input);
    run.run();
    std::vector<float> first(all[0].n_parts, -1.0f);
    for (const Schedule& s : all) {
      for (uint32_t o = 0; o < s.n_out; o++) {
        const uint32_t part = s.part[s.out(o)];
        const float got = run.out(s.rank, o);
        if (first[part] < 0) first[part] = got;
        EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(first[part])) << "ranks differ";
        if (a.deterministic) {
          EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(canonical(0, n, part)))
              << name_of(a) << ", " << n << " ranks, rank " << s.rank << ", part " << part;
        }
      }
    }
  }
}

// One random change of one rank's steps; says what it did.
std::string mutate(std::vector<Schedule>* all, std::mt19937* random) {
  const auto pick = [&](size_t n) { return static_cast<size_t>((*random)() % n); };
  Schedule& s = (*all)[pick(all->size())];
  if (s.steps.empty()) return "nothing";
  const size_t i = pick(s.steps.size()), j = pick(s.steps.size());
  Step& step = s.steps[i];
  const std::string who = format("rank %d, step %zu (%s): ", s.rank, i, step_text(s, step).c_str());
  const auto at = [&](size_t k) { return s.steps.begin() + static_cast<std::ptrdiff_t>(k); };
  switch (pick(9)) {
    case 0: s.steps.erase(at(i)); return who + "dropped";
    case 1: s.steps.insert(at(i), Step(step)); return who + "doubled";
    case 2: std::swap(s.steps[i], s.steps[j]); return who + format("swapped with step %zu", j);
    case 3: step.peer = pick(all->size()); return who + "other peer";
    case 4: step.src = static_cast<uint32_t>(pick(s.n_chunks())); return who + "other source";
    case 5: step.dst = static_cast<uint32_t>(pick(s.n_chunks())); return who + "other destination";
    case 6: step.round = step.round + pick(3); return who + "later";
    case 7: step.op_bits = pick(16); return who + "other op";
    case 8: step.n_chunks = 1 + pick(3); return who + "other length";
  }
  return "";
}

TEST_P(Interpreted, MutantsAreRejectedOrHarmless) {
  const Algorithm& a = *GetParam();
  std::mt19937 random(20);
  int n_rejected = 0, n_mutants = 0;
  for (int n : {2, 3, 4, 5, 8}) {
    const int root = has_root(a.collective) ? n / 2 : 0;
    const auto original = build_all(a, n, root, 2);
    for (int k = 0; k < 400; k++) {
      auto all = original;
      const std::string what = mutate(&all, &random);
      const bool in_place = a.in_place && k % 2 == 0;
      const Proof proof = verify_schedules(all, {a.collective, root, in_place, a.deterministic});
      n_mutants++;
      if (proof.ok) {
        EXPECT_EQ(wrong_result(all, a.collective, root, in_place), "") << n << " ranks, " << what;
      } else {
        n_rejected++;
        EXPECT_NE(proof.violation.what, "") << what;
      }
    }
  }
  EXPECT_GT(n_rejected, n_mutants / 4) << "of " << n_mutants;
}

std::vector<const Algorithm*> every_reducing_algorithm() {
  auto list = every_algorithm();
  std::erase_if(list, [](const Algorithm* a) { return !reduces(a->collective); });
  return list;
}

INSTANTIATE_TEST_SUITE_P(Catalog, Reducing, testing::ValuesIn(every_reducing_algorithm()), test_name);
INSTANTIATE_TEST_SUITE_P(Catalog, Interpreted, testing::ValuesIn(every_algorithm()), test_name);

}  // namespace
}  // namespace pycomm
