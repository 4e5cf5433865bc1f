#include "engine/cuda/device_coded.h"

#include "engine/cuda/rounds_binding.h"

namespace pycomm {

CodedGather::CodedGather(const Call& coded, const DeviceEngine::Link& link)
    : code(code_dtype(coded.sig.compression)), call(coded) {
  constexpr size_t kPadding = 16;
  const CallParts parts(coded, link.n_ranks);
  call.sig.count = 0;
  for (const uint64_t n : parts.len) {
    n_bytes.push_back((cuda::coded_bytes(code, n) + kPadding - 1) / kPadding * kPadding);
    call.sig.count += n_bytes.back();
  }
  call.sig.dtype = DType::kUInt8;
  call.sig.compression = Compression::kNone;
  call.residual = nullptr;
  call.counts = n_bytes;
  call.in = Buffer(nullptr, n_bytes[static_cast<size_t>(link.rank)]);
  call.out = Buffer(nullptr, call.sig.count);
}

// [this rank's message] [all messages] [what the way needs], and before them, unless the tensors are float32:
// [this rank's part] [the result] in float32.
Status DeviceEngine::Impl::coded_scratch_bytes(const Call& call, size_t* out) {
  const CodedGather coded(call, link);
  size_t way = 0;
  PYCOMM_RETURN_IF_ERROR(scratch_bytes(coded.call, &way));
  *out = cuda::aligned(coded.call.in.n_elems()) + cuda::aligned(coded.call.out.n_elems()) + way;
  if (call.sig.dtype == DType::kFloat32) return Status();
  *out +=
      cuda::aligned(call.in.n_elems() * sizeof(float)) + cuda::aligned(call.out.n_elems() * sizeof(float));
  return Status();
}

Status DeviceEngine::Impl::gather_coded(const Call& call, const Plain& plain, std::byte* scratch,
                                        double timeout_s) {
  const DType dtype = call.sig.dtype;
  if (dtype != DType::kFloat32) {
    std::byte* const in = scratch;
    std::byte* const out = in + cuda::aligned(call.in.n_elems() * sizeof(float));
    const cuda::CastSegment widen{in, plain.in, call.in.n_elems()};
    PYCOMM_RETURN_IF_ERROR(cuda::cast(DType::kFloat32, dtype, {&widen, 1}, 1.0f, stream()));
    Call wide = call;
    wide.sig.dtype = DType::kFloat32;
    PYCOMM_RETURN_IF_ERROR(
        gather_coded(wide, {in, out}, out + cuda::aligned(call.out.n_elems() * sizeof(float)), timeout_s));
    const cuda::CastSegment narrow{plain.out, out, call.out.n_elems()};
    return cuda::cast(dtype, DType::kFloat32, {&narrow, 1}, 1.0f, stream());
  }
  const CodedGather coded(call, link);
  const CallParts parts(call, link.n_ranks);
  const auto mine = static_cast<size_t>(link.rank);
  std::byte* const all = scratch + cuda::aligned(coded.call.in.n_elems());
  const void* const values = plain.in;
  float* const residual = call.residual == nullptr ? nullptr : call.residual + parts.start[mine];
  const cuda::CodedSegment own{nullptr, scratch, residual, &values, parts.len[mine]};
  PYCOMM_RETURN_IF_ERROR(
      cuda::reduce_coded(coded.code, ReduceOp::kSum, {&own, 1}, 1, 0, 1.0, stream()).within("codes"));
  PYCOMM_RETURN_IF_ERROR(
      by_way(coded.call, {scratch, all}, all + cuda::aligned(coded.call.out.n_elems()), timeout_s));
  std::vector<const void*> messages;
  std::vector<cuda::CodedSegment> segments;
  messages.reserve(parts.len.size());
  auto* const out = reinterpret_cast<float*>(plain.out);
  const std::byte* message = all;
  for (size_t q = 0; q < parts.len.size(); message += coded.n_bytes[q], q++) {
    messages.push_back(message);
    segments.push_back({out + parts.start[q], nullptr, nullptr, &messages.back(), parts.len[q]});
  }
  return cuda::reduce_coded(coded.code, ReduceOp::kSum, segments, 1, -1, 1.0, stream()).within("codes");
}

}  // namespace pycomm
