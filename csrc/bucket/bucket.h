// Buckets: which gradients are reduced together in one coalesced call, and in which order.
//
// A *parameter* here is its size in bytes and its *kind*, a number that differs where dtype or device differ;
// a bucket holds one kind. Parameters come in the order in which their gradients are expected during backward
// (the reverse of their order of use, or the order that a first backward showed). Caps are in bytes.
//
// The result is defined by five rules, each of them tested:
//   1. every parameter is in exactly one bucket, and a bucket has one kind;
//   2. parameters of one kind keep the given order, within a bucket and over the buckets;
//   3. a bucket is within its cap unless it is a single parameter (empty parameters beside it do not count);
//   4. the first bucket of each kind has first_cap, so that communication starts early; the others have cap;
//   5. buckets are in the order in which their last gradient is expected. A bucket is launched after its
//      predecessors on every rank, so in this order none waits for a later one.
// Greedy: a parameter opens a new bucket only when its kind's open one has no room. Cost O(n log n).
//
// Pure functions, no state, any thread. Source: S. Li et al., "PyTorch Distributed: Experiences on
// Accelerating Data Parallel Training", VLDB 2020, section 3.2.3; rules 3 and 5 are stricter than torch's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace pycomm {

struct Param {
  uint64_t n_bytes;
  int32_t kind;
};

using Bucket = std::vector<uint32_t>;  // indices into the parameters given

// kValue when first_cap exceeds cap, or when there are more than 2^32 - 1 parameters.
Status assign_buckets(std::span<const Param> params, uint64_t first_cap_bytes, uint64_t cap_bytes,
                      std::vector<Bucket>* out);

}  // namespace pycomm
