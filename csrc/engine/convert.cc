#include "engine/convert.h"

#include <algorithm>

#include "kernels/cast.h"
#include "kernels/reduce.h"

namespace pycomm {

namespace {
// Calls fn(address, element index, run length) for each contiguous piece.
template <class Fn>
void for_each_piece(const Buffer& b, size_t elem_size, Fn fn) {
  for (uint64_t at = 0; at < b.n_elems();) {
    uint64_t run;
    std::byte* p = b.locate(at, elem_size, &run);
    run = std::min(run, b.n_elems() - at);
    fn(p, at, run);
    at += run;
  }
}
}  // namespace

Status Converted::begin(Engine* engine, bool deterministic, Call* call) {
  const DType dtype = call->sig.dtype;
  const size_t size = dtype_size(dtype);
  const bool reduces = call->sig.kind == CallKind::kAllReduce || call->sig.kind == CallKind::kReduceScatter ||
                       call->sig.kind == CallKind::kReduce;
  const bool is_coded = call->sig.compression != Compression::kNone && engine == nullptr;
  if (!reduces && !is_coded) return Status();
  const bool premul = call->sig.op == ReduceOp::kPremulSum;
  if (!is_low_precision(dtype)) {
    if (!premul) return Status();
    in_.resize(call->in.n_elems() * size);
    const ReduceFn multiply = find_reduce(dtype, ReduceOp::kPremulSum);
    for_each_piece(call->in, size, [&](std::byte* p, uint64_t at, uint64_t run) {
      void* dst = in_.data() + at * size;
      const void* src = p;
      multiply(&dst, 1, &src, 1, run, call->scalar);
    });
    call->in = Buffer(in_.data(), call->in.n_elems());
    return Status();
  }
  if (!premul && !is_coded) {
    bool complete = !deterministic;
    if (deterministic && engine != nullptr) PYCOMM_RETURN_IF_ERROR(engine->reduces_at_once(*call, &complete));
    if (complete) return Status();
  }
  const float scale = premul ? static_cast<float>(call->scalar) : 1.0f;
  std::vector<std::byte> wide(call->in.n_elems() * sizeof(float));
  for_each_piece(call->in, size, [&](std::byte* p, uint64_t at, uint64_t run) {
    cast(DType::kFloat32, wide.data() + at * sizeof(float), dtype, p, run, scale);
  });
  in_ = std::move(wide);
  out_.resize(call->out.n_elems() * sizeof(float));
  call_ = call;
  user_out_ = call->out;
  call->in = Buffer(in_.data(), call->in.n_elems());
  call->out = Buffer(out_.data(), call->out.n_elems());
  call->in_float32 = true;
  return Status();
}

void Converted::end() {
  if (call_ == nullptr) return;
  for_each_piece(user_out_, dtype_size(call_->sig.dtype), [&](std::byte* p, uint64_t at, uint64_t run) {
    cast(call_->sig.dtype, p, DType::kFloat32, out_.data() + at * sizeof(float), run, 1.0f);
  });
}

}  // namespace pycomm
