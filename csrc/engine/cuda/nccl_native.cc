#include "engine/cuda/nccl_native.h"

#include <cstring>
#include <vector>

#include "kernels/cast.h"
#include "kernels/reduce.h"

namespace pycomm::cuda {

namespace {

// The dtype as NCCL has it for arithmetic; false where it has none that we use.
struct Numbers {
  nccl::DataType type = nccl::kUInt8;
  size_t per_element = 1;
};
bool numbers_of(DType t, Numbers* out) {
  switch (t) {
    case DType::kFloat64: *out = {nccl::kFloat64, 1}; return true;
    case DType::kFloat32: *out = {nccl::kFloat32, 1}; return true;
    case DType::kFloat16: *out = {nccl::kFloat16, 1}; return true;
    case DType::kBFloat16: *out = {nccl::kBFloat16, 1}; return true;
    case DType::kInt8: *out = {nccl::kInt8, 1}; return true;
    case DType::kInt32: *out = {nccl::kInt32, 1}; return true;
    case DType::kInt64: *out = {nccl::kInt64, 1}; return true;
    case DType::kUInt8: *out = {nccl::kUInt8, 1}; return true;
    case DType::kComplex64: *out = {nccl::kFloat32, 2}; return true;
    case DType::kComplex128: *out = {nccl::kFloat64, 2}; return true;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt16:
    case DType::kBool: return false;
  }
  return false;
}

bool is_complex(DType t) { return t == DType::kComplex64 || t == DType::kComplex128; }
bool is_float(DType t) {
  return t == DType::kFloat64 || t == DType::kFloat32 || is_low_precision(t) || is_complex(t);
}
bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduceScatter || c == Collective::kReduce;
}
bool has_parts(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kAllGather || c == Collective::kGather ||
         c == Collective::kScatter;
}

Status refuse(const NativeCall& call, Code code, const std::string& why) {
  return Status::error(code, format("%s/nccl: %s", collective_name(call.collective), why.c_str()));
}

bool find_op(ReduceOp op, DType dtype, nccl::RedOp* out) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum: *out = nccl::kSum; return true;
    case ReduceOp::kAvg: *out = nccl::kAvg; return true;
    case ReduceOp::kProduct: *out = nccl::kProd; return !is_complex(dtype);
    case ReduceOp::kMin: *out = nccl::kMin; return !is_float(dtype);
    case ReduceOp::kMax: *out = nccl::kMax; return !is_float(dtype);
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor: return false;
  }
  return false;
}

// The length of every rank's part, and where it begins.
struct Parts {
  std::vector<uint64_t> len, start;
  bool equal = true;
  Parts(const NativeCall& call, int n_ranks) {
    uint64_t at = 0;
    for (int q = 0; q < n_ranks; q++) {
      const auto i = static_cast<size_t>(q);
      len.push_back(call.counts.empty() ? call.count / static_cast<uint64_t>(n_ranks) : call.counts[i]);
      start.push_back(at);
      at += len.back();
      equal = equal && len[i] == len[0];
    }
  }
};

// premul_sum's factor as a number of the element type, and the operation that NCCL makes of it.
Status make_premul(nccl::NcclComm& comm, const NativeCall& call, nccl::DataType type, nccl::RedOp* out) {
  std::byte scalar[8];
  if (type == nccl::kFloat64) {
    std::memcpy(scalar, &call.scalar, 8);
  } else {
    const auto factor = static_cast<float>(call.scalar);
    const DType real = call.dtype == DType::kComplex64 ? DType::kFloat32 : call.dtype;
    pycomm::cast(real, scalar, DType::kFloat32, &factor, 1, 1.0f);
  }
  return comm.settle(
      comm.api().red_op_create_pre_mul_sum(out, scalar, type, nccl::kScalarHostImmediate, comm.raw()),
      "ncclRedOpCreatePreMulSum", {});
}

Status run_reduction(nccl::NcclComm& comm, Stream stream, const NativeCall& call,
                     const nccl::Patience& patience) {
  const nccl::Api& api = comm.api();
  Numbers numbers;
  nccl::RedOp op = nccl::kSum;
  (void)numbers_of(call.dtype, &numbers);  // supported, as checked
  (void)find_op(call.op, call.dtype, &op);
  const bool premul = call.op == ReduceOp::kPremulSum;
  if (premul) PYCOMM_RETURN_IF_ERROR(make_premul(comm, call, numbers.type, &op));
  const size_t count = call.count * numbers.per_element;
  nccl::Result result = nccl::kInternalError;
  const char* what = "";
  if (call.collective == Collective::kAllReduce) {
    what = "ncclAllReduce";
    result = api.all_reduce(call.in, call.out, count, numbers.type, op, comm.raw(), stream);
  } else if (call.collective == Collective::kReduceScatter) {
    what = "ncclReduceScatter";
    const size_t each = count / static_cast<size_t>(comm.n_ranks());
    result = api.reduce_scatter(call.in, call.out, each, numbers.type, op, comm.raw(), stream);
  } else {
    what = "ncclReduce";
    result = api.reduce(call.in, call.out, count, numbers.type, op, call.root, comm.raw(), stream);
  }
  PYCOMM_RETURN_IF_ERROR(comm.settle(result, what, patience));
  if (!premul) return Status();
  return comm.settle(api.red_op_destroy(op, comm.raw()), "ncclRedOpDestroy", patience);
}

// A message to a peer, or from it, of a call that is grouped sends and receives.
struct Message {
  int peer;
  bool sent;
  std::byte* at;
  size_t n_bytes;
};
using Messages = std::vector<Message>;

std::byte* place(const void* tensor, uint64_t n_elems, DType dtype) {
  return static_cast<std::byte*>(const_cast<void*>(tensor)) + n_elems * dtype_size(dtype);
}

// The root's with all ranks, its own part among them unless that lies where it belongs; another rank's with
// the root.
Messages rooted_messages(const NativeCall& call, int rank, int n_ranks) {
  const Parts parts(call, n_ranks);
  const bool gathers = call.collective == Collective::kGather, is_root = rank == call.root;
  const auto own = static_cast<size_t>(rank);
  const size_t size = dtype_size(call.dtype);
  const void* const whole = gathers ? call.out : call.in;  // the root's
  std::byte* const part = place(gathers ? call.in : call.out, 0, call.dtype);
  const bool in_place = is_root && place(whole, parts.start[own], call.dtype) == part;
  Messages all;
  for (int q = 0; is_root && q < n_ranks; q++) {
    if (q == rank && in_place) continue;
    const auto i = static_cast<size_t>(q);
    all.push_back({q, !gathers, place(whole, parts.start[i], call.dtype), parts.len[i] * size});
  }
  if (!in_place) all.push_back({call.root, gathers, part, parts.len[own] * size});
  return all;
}

Messages all_to_all_messages(const AllToAll& call) {
  const size_t size = dtype_size(call.dtype);
  std::byte *from = place(call.in, 0, call.dtype), *to = place(call.out, 0, call.dtype);
  Messages all;
  for (size_t q = 0; q < call.send_counts.size(); q++) {
    const int peer = static_cast<int>(q);
    const size_t n_out = call.send_counts[q] * size, n_in = call.recv_counts[q] * size;
    all.push_back({peer, true, from, n_out});
    all.push_back({peer, false, to, n_in});
    from += n_out;
    to += n_in;
  }
  return all;
}

// One group.
Status exchange(nccl::NcclComm& comm, Stream stream, const Messages& messages,
                const nccl::Patience& patience) {
  PYCOMM_RETURN_IF_ERROR(comm.start_group());
  for (const Message& m : messages) {
    PYCOMM_RETURN_IF_ERROR(m.sent ? comm.send(m.at, m.n_bytes, m.peer, stream)
                                  : comm.recv(m.at, m.n_bytes, m.peer, stream));
  }
  return comm.end_group(patience);
}

Status check_exchanges(const nccl::NcclComm& comm, const char* what, const Messages& messages) {
  for (const Message& m : messages) {
    if (m.n_bytes > 0) PYCOMM_RETURN_IF_ERROR(comm.check_exchange(what, m.peer, m.sent));
  }
  return Status();
}

Status run_all_gather(nccl::NcclComm& comm, Stream stream, const NativeCall& call, const Parts& parts,
                      const nccl::Patience& patience) {
  const nccl::Api& api = comm.api();
  const size_t size = dtype_size(call.dtype);
  if (parts.equal) {
    return comm.settle(
        api.all_gather(call.in, call.out, parts.len[0] * size, nccl::kUInt8, comm.raw(), stream),
        "ncclAllGather", patience);
  }
  PYCOMM_RETURN_IF_ERROR(comm.start_group());
  for (int q = 0; q < comm.n_ranks(); q++) {
    const auto i = static_cast<size_t>(q);
    if (parts.len[i] == 0) continue;
    std::byte* const to = static_cast<std::byte*>(call.out) + parts.start[i] * size;
    const void* const from = q == comm.rank() ? call.in : to;
    PYCOMM_RETURN_IF_ERROR(comm.in_group(
        api.broadcast(from, to, parts.len[i] * size, nccl::kUInt8, q, comm.raw(), stream), "ncclBroadcast"));
  }
  return comm.end_group(patience);
}

// A call as it is issued on a stream that may be captured.
template <class Issue>
Status capturable(const char* what, Stream stream, const Issue& issue) {
  bool captured = false;
  PYCOMM_RETURN_IF_ERROR(capture_state(stream, what, &captured));
  Status s = issue();
  if (!captured) return s;
  return std::move(s).within(format(
      "%s, captured into a CUDA graph (NCCL makes its connections in a communicator's first calls: make the "
      "same call once before the capture, on all ranks)",
      what));
}

Status issue_native(nccl::NcclComm& comm, Stream stream, const NativeCall& call,
                    const nccl::Patience& patience) {
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kReduce: return run_reduction(comm, stream, call, patience);
    case Collective::kAllGather:
      return run_all_gather(comm, stream, call, Parts(call, comm.n_ranks()), patience);
    case Collective::kGather:
    case Collective::kScatter:
      return exchange(comm, stream, rooted_messages(call, comm.rank(), comm.n_ranks()), patience);
    case Collective::kBroadcast: break;
  }
  const void* const from = comm.rank() == call.root ? call.in : call.out;
  return comm.settle(comm.api().broadcast(from, call.out, call.count * dtype_size(call.dtype), nccl::kUInt8,
                                          call.root, comm.raw(), stream),
                     "ncclBroadcast", patience);
}

}  // namespace

Status native_supported(const NativeCall& call, int n_ranks) {
  if (has_parts(call.collective)) {
    uint64_t sum = 0;
    for (const uint64_t c : call.counts) sum += c;
    const auto n = static_cast<size_t>(n_ranks);
    const bool given = call.counts.size() == n && sum == call.count;
    if (!given && (!call.counts.empty() || call.count % n != 0)) {
      return refuse(
          call, Code::kValue,
          format("counts of %zu parts with a sum of %llu, expected %d with a sum of %llu", call.counts.size(),
                 static_cast<unsigned long long>(sum), n_ranks, static_cast<unsigned long long>(call.count)));
    }
  }
  if (!reduces(call.collective)) return Status();
  if (find_reduce(call.dtype, call.op) == nullptr) {
    return refuse(call, Code::kValue,
                  format("%s is not defined for %s, which has %s", reduce_op_name(call.op),
                         dtype_name(call.dtype), defined_ops(call.dtype).c_str()));
  }
  if (call.deterministic) {
    return refuse(call, Code::kSchedule,
                  "does not add in the canonical order, which deterministic=True asks for");
  }
  Numbers numbers;
  nccl::RedOp op = nccl::kSum;
  if (!numbers_of(call.dtype, &numbers) || !find_op(call.op, call.dtype, &op)) {
    return refuse(
        call, Code::kSchedule,
        format("NCCL has no %s of %s with pycomm's meaning; use another algorithm (%s)",
               reduce_op_name(call.op), dtype_name(call.dtype), known_algorithms(call.collective).c_str()));
  }
  if (call.collective == Collective::kReduceScatter && !Parts(call, n_ranks).equal) {
    return refuse(call, Code::kSchedule,
                  format("NCCL's parts are equal; use another algorithm (%s)",
                         known_algorithms(call.collective).c_str()));
  }
  return Status();
}

Status run_native(nccl::NcclComm& comm, Stream stream, const NativeCall& call,
                  const nccl::Patience& patience) {
  PYCOMM_RETURN_IF_ERROR(native_supported(call, comm.n_ranks()));
  if (call.count == 0) return Status();
  const std::string what = format("%s/nccl", collective_name(call.collective));
  return capturable(what.c_str(), stream, [&] { return issue_native(comm, stream, call, patience); });
}

Status native_can_be_captured(const nccl::NcclComm& comm, const NativeCall& call) {
  if (call.collective != Collective::kGather && call.collective != Collective::kScatter) return Status();
  return check_exchanges(comm, collective_name(call.collective),
                         rooted_messages(call, comm.rank(), comm.n_ranks()));
}

Status run_all_to_all(nccl::NcclComm& comm, Stream stream, const AllToAll& call,
                      const nccl::Patience& patience) {
  const auto n = static_cast<size_t>(comm.n_ranks());
  if (call.send_counts.size() != n || call.recv_counts.size() != n) {
    return Status::error(Code::kValue, format("all_to_all/nccl: %zu and %zu counts, expected %zu",
                                              call.send_counts.size(), call.recv_counts.size(), n));
  }
  return capturable("all_to_all/nccl", stream,
                    [&] { return exchange(comm, stream, all_to_all_messages(call), patience); });
}

Status all_to_all_can_be_captured(const nccl::NcclComm& comm, const AllToAll& call) {
  return check_exchanges(comm, "all_to_all", all_to_all_messages(call));
}

}  // namespace pycomm::cuda
