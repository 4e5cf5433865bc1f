// What does a peer-memory kernel cost by itself, on one rank: no peer to wait for, no link to cross?
//
//   peer_bench [--bytes 256M] [--repeats 20] [--warmups 5] [--json]
//
// all_reduce of float32 at 4 KiB, 1 MiB, and --bytes: "symmetric" where both tensors lie in symmetric memory,
// "staged" where they do not. The smallest shows what a launch costs; the largest what at most 36 blocks of
// 512 threads reach of the memory's bandwidth, of which nothing is required: over NVLink and PCIe less is
// enough. Between GPUs: pycomm bench all_reduce --device cuda. Words: measure.h.
#include <cstring>

#include "engine/cuda/peer_collectives.h"
#include "measure.h"

namespace pycomm::gpu_bench {
namespace {

Status alone(const void* mine, size_t n_bytes, void* all) {
  std::memcpy(all, mine, n_bytes);
  return {};
}

// A communicator of one rank.
struct Peers {
  explicit Peers(size_t n_heap_bytes) {
    const PeerMemory::Options options{0,
                                      0,
                                      1,
                                      PeerCollectives::reserved_bytes(peer.half_bytes),
                                      PeerCollectives::zero_bytes(),
                                      n_heap_bytes,
                                      nullptr,
                                      {0}};
    check(PeerMemory::create(options, alone, &memory), "PeerMemory");
    check(PeerCollectives::create(memory.get(), peer, alone, &comm), "PeerCollectives");
  }
  ~Peers() {
    comm.reset();
    PeerMemory::retire(std::move(memory));
  }
  PeerOptions peer;
  std::shared_ptr<PeerMemory> memory;
  std::unique_ptr<PeerCollectives> comm;
};

void measure(Bench& bench, Peers& peers, size_t n_bytes, PeerWay way, bool symmetric) {
  const size_t n = n_bytes / 4;
  const Numbers numbers(DType::kFloat32, 1);
  const Memory in(numbers, n), out(n * 4);
  void *from = in.data(), *to = out.data();
  if (symmetric) {
    check(peers.memory->allocate(n * 4, &from), "symmetric memory");
    check(peers.memory->allocate(n * 4, &to), "symmetric memory");
    check(cudaMemcpy(from, in.data(), n * 4, cudaMemcpyDeviceToDevice), "copy");
  }
  check(cudaDeviceSynchronize(), "before the calls");
  const auto right = [&] {
    check(peers.comm->failure(), "all_reduce");
    if (symmetric) check(cudaMemcpy(out.data(), to, n * 4, cudaMemcpyDeviceToDevice), "copy");
    for (const auto& [begin, n_elems] : checked_ranges(n)) {
      if (out.get(begin * 4, n_elems * 4) != numbers.slice(begin, n_elems)) return false;
    }
    return true;
  };
  bench.measure({way == PeerWay::kOneShot ? "all_reduce/one_shot" : "all_reduce/two_shot",
                 symmetric ? "float32, symmetric" : "float32, staged", 2 * n * 4,
                 [&](cuda::Stream s) {
                   return peers.comm->all_reduce(from, to, n, DType::kFloat32, ReduceOp::kSum, 1, way, s);
                 },
                 right, false});
  if (symmetric) {
    check(peers.memory->release(from), "release");
    check(peers.memory->release(to), "release");
  }
}

}  // namespace
}  // namespace pycomm::gpu_bench

int main(int argc, char** argv) {
  using namespace pycomm;
  gpu_bench::Bench bench("peer", argc, argv);
  const size_t most = bench.n_bytes();
  gpu_bench::Peers peers(2 * most + (size_t{1} << 20));
  std::vector<size_t> sizes;
  for (const size_t n_bytes : {size_t{4} << 10, size_t{1} << 20}) {
    if (n_bytes < most) sizes.push_back(n_bytes);
  }
  sizes.push_back(most);
  for (const bool symmetric : {true, false}) {
    for (const PeerWay way : {PeerWay::kOneShot, PeerWay::kTwoShot}) {
      for (const size_t n_bytes : sizes) gpu_bench::measure(bench, peers, n_bytes, way, symmetric);
    }
  }
  return bench.finish();
}
