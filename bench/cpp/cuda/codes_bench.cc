// How near to a copy's bandwidth are the steps of an all-reduce whose numbers travel as codes?
//
//   codes_bench [--bytes 256M] [--repeats 20] [--warmups 5] [--json]
//
// --bytes is the size of the float32 vector. The steps are those of engine/cuda/nccl_rounds.h, of 8 ranks: a
// contribution is encoded (with and without error feedback), an owner reduces seven messages and its own
// values (into float32, or encoded at once, with feedback, and what the message says kept), and a message is
// decoded. Words: measure.h.
#include <cstring>

#include "kernels/blocks.h"
#include "kernels/reduce.h"
#include "measure.h"

namespace pycomm::gpu_bench {
namespace {

constexpr int kRanks = 8;
constexpr int kOwn = 3;  // the owner's rank

using Floats = std::vector<float>;

Floats floats(const Bytes& bytes) {
  Floats out(bytes.size() / 4);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// On the CPU: maxima and codes of x, and in x what they do not say.
struct Coded {
  Coded(DType code, Floats* x)
      : code(code), maxima(n_blocks(x->size())), codes(x->size() * dtype_size(code)) {
    block_maxima(x->data(), x->size(), maxima.data());
    quantize(code, codes.data(), x->data(), x->size(), maxima.data(), true);
  }
  Floats said() const {
    Floats out(codes.size() / dtype_size(code));
    dequantize(code, out.data(), codes.data(), out.size(), maxima.data());
    return out;
  }
  const DType code;
  Floats maxima;
  Bytes codes;
};

struct Message {
  Message(DType code, size_t n) : code(code), n(n), data(cuda::coded_bytes(code, n)) {}
  // A range begins with a block.
  bool holds(const Range& r, const Coded& want) const {
    const size_t size = dtype_size(code);
    return floats(data.get(r.begin / kBlockElems * 4, want.maxima.size() * 4)) == want.maxima &&
           data.get(cuda::coded_begin(n) + r.begin * size, want.codes.size()) == want.codes;
  }
  DType code;
  size_t n;
  Memory data;
};

struct Vector {
  Vector(size_t n, unsigned seed) : numbers(DType::kFloat32, seed), data(numbers, n) {}
  float* p() const { return reinterpret_cast<float*>(data.data()); }
  Floats in(const Range& r) const { return floats(numbers.slice(r.begin, r.n_elems)); }
  bool holds(const Range& r, const Floats& want) const {
    return floats(data.get(r.begin * 4, r.n_elems * 4)) == want;
  }
  const Numbers numbers;
  const Memory data;
};

bool everywhere(size_t n, const std::function<bool(const Range&)>& right) {
  for (const Range& r : checked_ranges(n)) {
    if (!right(r)) return false;
  }
  return true;
}

// `run` changes its operands, so its first call's result is compared, here, and later ones move as many
// bytes.
std::function<bool()> right_at_first(const Bench& bench, const std::function<Status(cuda::Stream)>& run,
                                     const std::function<bool()>& right) {
  check(run(bench.stream()), "the first call");
  check(cudaStreamSynchronize(bench.stream()), "the first call");
  const bool is_right = right();
  return [is_right] { return is_right; };
}

void measure_encode(Bench& bench, DType code, size_t n, bool feedback) {
  const Vector x(n, 1), residual(n, 2);
  const Message message(code, n);
  const void* src = x.p();
  const auto run = [&](cuda::Stream s) {
    const cuda::CodedSegment all{nullptr, message.data.data(), feedback ? residual.p() : nullptr, &src, n};
    return cuda::reduce_coded(code, ReduceOp::kSum, {&all, 1}, 1, 0, 1.0, s);
  };
  const auto right = [&] {
    return everywhere(n, [&](const Range& r) {
      Floats left = x.in(r);
      const Floats before = residual.in(r);
      for (size_t i = 0; feedback && i < left.size(); ++i) left[i] = before[i] + left[i];
      const Coded want(code, &left);
      return message.holds(r, want) && (!feedback || residual.holds(r, left));
    });
  };
  const size_t moved = n * (feedback ? 12 : 4) + cuda::coded_bytes(code, n);
  bench.measure({feedback ? "encode, feedback" : "encode", dtype_name(code), moved, run,
                 feedback ? right_at_first(bench, run, right) : right});
}

void encode(Bench& bench, DType code, const Vector& x, const Message& message) {
  const void* src = x.p();
  const cuda::CodedSegment all{nullptr, message.data.data(), nullptr, &src, message.n};
  check(cuda::reduce_coded(code, ReduceOp::kSum, {&all, 1}, 1, 0, 1.0, bench.stream()), "encode");
}

void measure_decode(Bench& bench, DType code, size_t n) {
  const Vector x(n, 3), out(n, 4);
  const Message message(code, n);
  encode(bench, code, x, message);
  const void* src = message.data.data();
  const auto run = [&](cuda::Stream s) {
    const cuda::CodedSegment all{out.p(), nullptr, nullptr, &src, n};
    return cuda::reduce_coded(code, ReduceOp::kSum, {&all, 1}, 1, -1, 1.0, s);
  };
  bench.measure({"decode", dtype_name(code), cuda::coded_bytes(code, n) + n * 4, run, [&] {
                   return everywhere(n, [&](const Range& r) {
                     Floats v = x.in(r);
                     return out.holds(r, Coded(code, &v).said());
                   });
                 }});
}

void measure_reduce(Bench& bench, DType code, size_t n, bool encodes) {
  const Vector own(n, 5), other(n, 6), residual(n, 7), out(n, 8);
  std::vector<Message> messages;  // memory of their own, with the same contents
  std::vector<const void*> srcs;
  messages.reserve(kRanks);
  for (int k = 0; k < kRanks; ++k) {
    if (k == kOwn) {
      srcs.push_back(own.p());
      continue;
    }
    messages.emplace_back(code, n);
    encode(bench, code, other, messages.back());
    srcs.push_back(messages.back().data.data());
  }
  const Message message(code, n);
  const auto run = [&](cuda::Stream s) {
    const cuda::CodedSegment all{out.p(), encodes ? message.data.data() : nullptr,
                                 encodes ? residual.p() : nullptr, srcs.data(), n};
    return cuda::reduce_coded(code, ReduceOp::kAvg, {&all, 1}, kRanks, kOwn, kRanks, s);
  };
  const auto right = [&] {
    return everywhere(n, [&](const Range& r) {
      Floats theirs = other.in(r), mine = own.in(r), mean(r.n_elems);
      theirs = Coded(code, &theirs).said();
      std::vector<const void*> in(kRanks, theirs.data());
      in[kOwn] = mine.data();
      void* dst = mean.data();
      find_reduce(DType::kFloat32, ReduceOp::kAvg)(&dst, 1, in.data(), kRanks, r.n_elems, kRanks);
      if (!encodes) return out.holds(r, mean);
      const Floats before = residual.in(r);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] = before[i] + mean[i];
      const Coded want(code, &mean);
      return message.holds(r, want) && residual.holds(r, mean) && out.holds(r, want.said());
    });
  };
  const size_t moved =
      (kRanks - 1) * cuda::coded_bytes(code, n) + n * 8 + (encodes ? cuda::coded_bytes(code, n) + n * 8 : 0);
  bench.measure({encodes ? "reduce of 8, encode" : "reduce of 8", dtype_name(code), moved, run,
                 encodes ? right_at_first(bench, run, right) : right});
}

}  // namespace
}  // namespace pycomm::gpu_bench

int main(int argc, char** argv) {
  using namespace pycomm;
  gpu_bench::Bench bench("codes", argc, argv);
  const size_t n = bench.n_bytes() / 4;
  for (const DType code : {DType::kInt8, DType::kFloat8E4M3, DType::kFloat16}) {
    gpu_bench::measure_encode(bench, code, n, false);
    gpu_bench::measure_encode(bench, code, n, true);
    gpu_bench::measure_reduce(bench, code, n, false);
    gpu_bench::measure_reduce(bench, code, n, true);
    gpu_bench::measure_decode(bench, code, n);
  }
  return bench.finish();
}
