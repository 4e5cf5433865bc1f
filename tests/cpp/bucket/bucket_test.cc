// Buckets: the five rules of bucket.h on random parameters, and small cases whose answer is seen by eye.
#include "bucket/bucket.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace pycomm {
namespace {

constexpr uint64_t kNoCap = ~uint64_t{0};

std::vector<Bucket> assign(const std::vector<Param>& params, uint64_t first_cap, uint64_t cap) {
  std::vector<Bucket> buckets;
  const Status status = assign_buckets(params, first_cap, cap, &buckets);
  EXPECT_TRUE(status.ok()) << status.message();
  return buckets;
}

uint64_t bytes_of(const std::vector<Param>& params, const Bucket& bucket) {
  uint64_t n_bytes = 0;
  for (uint32_t i : bucket) n_bytes += params[i].n_bytes;
  return n_bytes;
}

// Checks every rule of the header, and that the packing is greedy (no bucket that its successor's head fits
// into).
void expect_rules(const std::vector<Param>& params, uint64_t first_cap, uint64_t cap) {
  const std::vector<Bucket> buckets = assign(params, first_cap, cap);
  std::vector<int> n_times(params.size(), 0);
  std::map<int32_t, std::vector<const Bucket*>> of_kind;
  for (size_t b = 0; b < buckets.size(); ++b) {
    ASSERT_FALSE(buckets[b].empty());
    const int32_t kind = params[buckets[b].front()].kind;
    for (uint32_t i : buckets[b]) {
      ASSERT_LT(i, params.size());
      ++n_times[i];
      EXPECT_EQ(params[i].kind, kind) << "rule 1";
    }
    of_kind[kind].push_back(&buckets[b]);
    if (b > 0) {
      EXPECT_LT(buckets[b - 1].back(), buckets[b].back()) << "rule 5";
    }
  }
  for (int n : n_times) EXPECT_EQ(n, 1) << "rule 1";
  for (const auto& [kind, list] : of_kind) {
    int64_t last = -1;
    for (size_t b = 0; b < list.size(); ++b) {
      const Bucket& bucket = *list[b];
      for (uint32_t i : bucket) {
        EXPECT_LT(last, static_cast<int64_t>(i)) << "rule 2";
        last = i;
      }
      const uint64_t limit = b == 0 ? first_cap : cap;  // rule 4
      const uint64_t n_bytes = bytes_of(params, bucket);
      size_t n_not_empty = 0;
      for (uint32_t i : bucket) n_not_empty += params[i].n_bytes > 0;
      if (n_not_empty > 1) {
        EXPECT_LE(n_bytes, limit) << "rule 3";
      }
      if (b + 1 < list.size()) {
        EXPECT_GT(n_bytes + params[list[b + 1]->front()].n_bytes, limit) << "greedy";
      }
    }
  }
}

TEST(Bucket, NoParametersNoBuckets) { EXPECT_TRUE(assign({}, 1, 2).empty()); }

TEST(Bucket, TheFirstIsSmallAndTheOthersFillUpToTheCap) {
  const std::vector<Param> params = {{4, 0}, {4, 0}, {8, 0}, {8, 0}, {4, 0}, {100, 0}, {1, 0}};
  EXPECT_EQ(assign(params, 8, 20), (std::vector<Bucket>{{0, 1}, {2, 3, 4}, {5}, {6}}));
}

TEST(Bucket, KindsAreKeptApartAndLaunchedWhenComplete) {
  // Kind 7's bucket is complete at index 1, kind 0's at index 2: 7 goes first although 0 was opened first.
  const std::vector<Param> params = {{4, 0}, {4, 7}, {4, 0}};
  EXPECT_EQ(assign(params, 100, 100), (std::vector<Bucket>{{1}, {0, 2}}));
}

TEST(Bucket, EmptyParametersNeedNoRoom) {
  EXPECT_EQ(assign({{0, 0}, {50, 0}, {0, 0}, {1, 0}, {0, 0}}, 10, 10),
            (std::vector<Bucket>{{0, 1, 2}, {3, 4}}));
}

TEST(Bucket, ACapOfZeroSeparatesAll) {
  EXPECT_EQ(assign({{1, 0}, {2, 0}, {3, 0}}, 0, 0), (std::vector<Bucket>{{0}, {1}, {2}}));
}

TEST(Bucket, SizesNearTwoToThe64DoNotWrapAround) {
  EXPECT_EQ(assign({{kNoCap, 0}, {kNoCap, 0}, {2, 0}}, 1, kNoCap), (std::vector<Bucket>{{0}, {1}, {2}}));
}

TEST(Bucket, AFirstCapAboveTheCapIsRefused) {
  std::vector<Bucket> buckets;
  const Status status = assign_buckets({}, 2, 1, &buckets);
  EXPECT_EQ(status.code(), Code::kValue);
  EXPECT_NE(status.message().find("first cap of 2 bytes exceeds the cap of 1"), std::string::npos);
}

TEST(Bucket, RandomParametersObeyEveryRule) {
  std::mt19937 random(20261129);
  for (int round = 0; round < 2000; ++round) {
    std::vector<Param> params(random() % 40);
    const uint32_t largest = 1u << (random() % 12);
    for (Param& param : params) param = {random() % largest, static_cast<int32_t>(random() % 3)};
    const uint64_t cap = random() % 3000;
    expect_rules(params, random() % (cap + 1), cap);
  }
}

}  // namespace
}  // namespace pycomm
