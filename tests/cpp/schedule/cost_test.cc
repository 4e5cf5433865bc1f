// The cost model against closed forms worked out by hand from the port model in cost.h.
#include "schedule/cost.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace pycomm {
namespace {

constexpr double kAlpha = 3e-6, kBeta = 2e-10, kGamma = 5e-11;

CostModel flat(double gamma = kGamma) {
  CostModel m;
  m.in_node = {kAlpha, kBeta};
  m.gamma_s_per_byte = gamma;
  return m;
}

const Algorithm& algorithm(Collective c, const char* name) {
  const Algorithm* a = find_algorithm(c, name);
  EXPECT_NE(a, nullptr) << name;
  return *a;
}

double simulated(Collective c, const char* name, int n, double bytes, const CostModel& m, int n_chunks = 0) {
  double t = -1;
  const Status s = simulate_cost(algorithm(c, name), n, 0, n_chunks, bytes, m, &t);
  EXPECT_TRUE(s.ok()) << s.message();
  return t;
}

double streamed(Collective c, const char* name, int n, double bytes, const CostModel& m, int n_chunks = 0) {
  double t = -1;
  const Status s = stream_cost(algorithm(c, name), n, 0, n_chunks, bytes, m, &t);
  EXPECT_TRUE(s.ok()) << s.message();
  return t;
}

void expect_close(double got, double expected) { EXPECT_NEAR(got, expected, 1e-9 * expected); }

TEST(Cost, Ring) {
  for (int n : {2, 3, 4, 8, 17, 64}) {
    for (double bytes : {0.0, 1000.0, 1e6, 1e9}) {
      const double part = bytes / n;
      const double once = (n - 1) * (kAlpha + part * kBeta), reduce = (n - 1) * part * kGamma;
      expect_close(simulated(Collective::kAllReduce, "ring", n, bytes, flat()), 2 * once + reduce);
      expect_close(simulated(Collective::kReduceScatter, "ring", n, bytes, flat()), once + reduce);
      expect_close(simulated(Collective::kAllGather, "ring", n, bytes, flat()), once);
    }
  }
}

TEST(Cost, RingInSlicesHidesTheReductions) {
  const int n = 4, k = 8;
  const double bytes = 4e6, slice = bytes / n / k;
  CostModel m = flat();
  m.slice_bytes = slice;
  expect_close(simulated(Collective::kAllReduce, "ring", n, bytes, m),
               2 * (n - 1) * k * (kAlpha + slice * kBeta));
  expect_close(streamed(Collective::kAllReduce, "ring", n, bytes, m),
               2 * (n - 1) * k * (kAlpha + slice * kBeta));
  // Of a reduce-scatter, the reduction of the last slice remains.
  expect_close(simulated(Collective::kReduceScatter, "ring", n, bytes, m),
               (n - 1) * k * (kAlpha + slice * kBeta) + slice * kGamma);
}

TEST(Cost, HalvingDoublingOfAPowerOfTwo) {
  for (int log_p = 1; log_p <= 6; log_p++) {
    const int p = 1 << log_p;
    const double bytes = 1e6, travels = bytes * (p - 1) / p;
    expect_close(simulated(Collective::kAllReduce, "halving_doubling", p, bytes, flat()),
                 2 * (log_p * kAlpha + travels * kBeta) + travels * kGamma);
  }
}

TEST(Cost, OnePortSendsOneMessageAfterTheOther) {
  for (int n : {2, 3, 8, 16}) {
    const double bytes = 1e5, message = kAlpha + bytes / n * kBeta;
    expect_close(simulated(Collective::kAllGather, "direct", n, bytes, flat()), (n - 1) * message);
    expect_close(simulated(Collective::kAllReduce, "direct", n, bytes, flat(0)), 2 * (n - 1) * message);
    expect_close(simulated(Collective::kGather, "direct", n, bytes, flat()), (n - 1) * message);
    expect_close(simulated(Collective::kBroadcast, "direct", n, bytes, flat()),
                 (n - 1) * (kAlpha + bytes * kBeta));
  }
}

TEST(Cost, Trees) {
  const double bytes = 1e5, message = kAlpha + bytes * kBeta;
  expect_close(simulated(Collective::kBroadcast, "binomial", 8, bytes, flat()), 3 * message);
  expect_close(simulated(Collective::kReduce, "binomial", 8, bytes, flat()), 3 * (message + bytes * kGamma));
  const int n = 5, chunks = 10;
  expect_close(simulated(Collective::kBroadcast, "chain", n, bytes, flat(), chunks),
               (chunks + n - 2) * (kAlpha + bytes / chunks * kBeta));
}

TEST(Cost, SlicesPipelineAChainByThemselves) {
  const int n = 5, k = 10;
  const double bytes = 1e5;
  CostModel m = flat();
  m.slice_bytes = bytes / k;
  expect_close(simulated(Collective::kBroadcast, "chain", n, bytes, m, 1),
               (k + n - 2) * (kAlpha + bytes / k * kBeta));
}

TEST(Cost, TheSlowestLinkOfTheRingDecides) {
  CostModel m = flat();
  m.ranks_per_node = 4;
  m.between = {10 * kAlpha, 10 * kBeta};
  const int n = 16;
  const double part = 1e6 / n;
  expect_close(simulated(Collective::kAllReduce, "ring", n, 1e6, m),
               2 * (n - 1) * 10 * (kAlpha + part * kBeta));  // reductions hide behind the slow links
  m.ranks_per_node = 16;                                     // one node: nothing goes between
  expect_close(simulated(Collective::kAllReduce, "ring", n, 1e6, m),
               simulated(Collective::kAllReduce, "ring", n, 1e6, flat()));
}

TEST(Cost, NearPartnersStayInTheNode) {
  CostModel m = flat(0);
  m.ranks_per_node = 4;
  m.between = {10 * kAlpha, 10 * kBeta};
  // 8 ranks: halves of 1/2 and 1/4 go within the node, 1/8 between the two.
  const double bytes = 8e5;
  const double expected = 2 * (2 * kAlpha + bytes * 0.75 * kBeta + 10 * (kAlpha + bytes * 0.125 * kBeta));
  expect_close(simulated(Collective::kAllReduce, "halving_doubling", 8, bytes, m), expected);
}

TEST(Cost, StreamedIsCloseToSimulated) {
  for (const Algorithm& a : catalog()) {
    for (int n : {1, 2, 3, 7, 8, 17, 64}) {
      double whole = -1, stream = -1;
      ASSERT_TRUE(simulate_cost(a, n, 0, 0, 1e6, flat(), &whole).ok());
      ASSERT_TRUE(stream_cost(a, n, 0, 0, 1e6, flat(), &stream).ok());
      // Below 1 where a port waits for one tree while the other could go on (double_tree): cost.h's tenths.
      EXPECT_GE(stream, whole * 0.9) << collective_name(a.collective) << "/" << a.name << " n " << n;
      EXPECT_LE(stream, whole * 1.5 + 1e-12) << collective_name(a.collective) << "/" << a.name << " n " << n;
    }
  }
}

TEST(Cost, AHundredThousandRanks) {
  const int n = 100000;
  const double part = 1e9 / n;
  Cost c;
  ASSERT_TRUE(predict(algorithm(Collective::kAllReduce, "ring"), n, 0, 0, 1e9, flat(), &c).ok());
  EXPECT_EQ(c.method, CostMethod::kStreamed);
  EXPECT_EQ(c.rounds, 2 * (n - 1));
  expect_close(c.seconds, 2 * (n - 1) * (kAlpha + part * kBeta) + (n - 1) * part * kGamma);
}

TEST(Cost, RefusesNonsense) {
  Cost c;
  const Algorithm& ring = algorithm(Collective::kAllReduce, "ring");
  EXPECT_EQ(predict(ring, 0, 0, 0, 1, flat(), &c).code(), Code::kSchedule);
  EXPECT_EQ(predict(ring, 4, 7, 0, 1, flat(), &c).code(), Code::kSchedule);
  EXPECT_EQ(predict(ring, 100001, 0, 0, 1, flat(), &c).code(), Code::kValue);
  EXPECT_EQ(predict(ring, 4, 0, 0, -1, flat(), &c).code(), Code::kValue);
  CostModel m = flat();
  m.slice_bytes = 1;
  EXPECT_EQ(predict(ring, 4, 0, 0, 1e9, m, &c).code(), Code::kValue);
  m = flat();
  m.in_node.beta_s_per_byte = -1;
  EXPECT_EQ(predict(ring, 4, 0, 0, 1, m, &c).code(), Code::kValue);
}

SharedWork shared(const char* name, int n, double bytes, SharedProtocol p) {
  SharedWork w;
  const Status s = shared_work(algorithm(Collective::kAllReduce, name), n, 0, 0, bytes, p, 1 << 18, &w);
  EXPECT_TRUE(s.ok()) << s.message();
  return w;
}

TEST(SharedWork, TwoRanksCountedByHand) {
  const double s = 1 << 20;
  // Direct: read both halves' operands (2 x S/2), write the result here and at the peer (2 x S/2).
  for (const char* name : {"direct", "ring"}) {
    const SharedWork w = shared(name, 2, s, SharedProtocol::kDirect);
    expect_close(w.read_bytes, s);
    expect_close(w.written_bytes, s);
  }
  // One-shot: read everything of both, write everything; tiled also stages the input.
  SharedWork w = shared("one_shot", 2, s, SharedProtocol::kDirect);
  expect_close(w.read_bytes, 2 * s);
  expect_close(w.written_bytes, s);
  w = shared("one_shot", 2, s, SharedProtocol::kTiled);
  expect_close(w.read_bytes, 3 * s);
  expect_close(w.written_bytes, 2 * s);
  EXPECT_EQ(w.syncs, 1 + 4);
  // Tiled direct: stage the half that the peer reduces, reduce the other to slot and tensor, fetch the first.
  w = shared("direct", 2, s, SharedProtocol::kTiled);
  expect_close(w.read_bytes, s / 2 + s + s / 2);
  expect_close(w.written_bytes, s / 2 + s + s / 2);
  EXPECT_EQ(w.syncs, 1 + 2 * 4);
}

}  // namespace
}  // namespace pycomm
