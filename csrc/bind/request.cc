#include "bind/request.h"

#include <algorithm>

#include "bind/bind.h"
#include "bind/tensor.h"

namespace pycomm {

namespace {

struct Range {
  const std::byte *begin, *end;
  uint64_t at;  // of its first element in the buffer
  bool out;
};

void add_ranges(const Buffer& b, size_t size, bool out, std::vector<Range>* ranges) {
  for (uint64_t at = 0; at < b.n_elems();) {
    uint64_t run;
    const std::byte* p = b.locate(at, size, &run);
    run = std::min(run, b.n_elems() - at);
    ranges->push_back({p, p + run * size, at, out});
    at += run;
  }
}

// Memory may be shared by an input and an output at the same element of the vector (in place), and in no
// other way: neither a tensor given twice, nor one that lies across others. Results would depend on timing.
Status check_overlap(const Call& call, size_t size, uint64_t in_at, uint64_t out_at, bool same_object) {
  if (same_object && call.out.single() && call.sig.kind != CallKind::kAllToAll) return Status();
  std::vector<Range> ranges;
  if (!same_object || call.sig.kind == CallKind::kAllToAll) add_ranges(call.in, size, false, &ranges);
  add_ranges(call.out, size, true, &ranges);
  std::sort(ranges.begin(), ranges.end(), [](const Range& x, const Range& y) { return x.begin < y.begin; });
  // An input that overlaps only inputs is read twice, which harms nobody.
  for (size_t i = 0; i < ranges.size(); i++) {
    for (size_t j = i + 1; j < ranges.size() && ranges[j].begin < ranges[i].end; j++) {
      const Range &x = ranges[i], &y = ranges[j];
      if (!x.out && !y.out) continue;
      const auto place = [&](const Range& r) {
        return r.begin - static_cast<std::ptrdiff_t>((r.at + (r.out ? out_at : in_at)) * size);
      };
      if (x.out != y.out && place(x) == place(y) && call.sig.kind != CallKind::kAllToAll) continue;
      return Status::error(
          Code::kValue, format("%s: tensors overlap in memory, but not as an in-place call does (input and "
                               "output the same elements of the vector): give separate tensors",
                               call_kind_name(call.sig.kind)));
    }
  }
  return Status();
}

// Which share of the vector each tensor must hold.
Status check_sizes(const PyCommunicator& self, const Call& call, const std::vector<uint64_t>& counts) {
  const int rank = self.comm->rank();
  const bool root = rank == call.sig.root;
  const uint64_t all = call.sig.count;
  const uint64_t mine = counts.empty() ? all : counts[static_cast<size_t>(rank)];  // parted kinds
  const auto expect = [&](const char* what, const Buffer& b, uint64_t want) {
    if (b.n_elems() == want) return Status();
    return Status::error(
        Code::kValue,
        format("%s: %s has %llu elements, expected %llu", call_kind_name(call.sig.kind), what,
               static_cast<unsigned long long>(b.n_elems()), static_cast<unsigned long long>(want)));
  };
  switch (call.sig.kind) {
    case CallKind::kAllReduce:
      PYCOMM_RETURN_IF_ERROR(expect("tensor", call.in, all));
      return expect("out", call.out, all);
    case CallKind::kReduceScatter:
      PYCOMM_RETURN_IF_ERROR(expect("input", call.in, all));
      return expect("output", call.out, mine);
    case CallKind::kAllGather:
      PYCOMM_RETURN_IF_ERROR(expect("input", call.in, mine));
      return expect("output", call.out, all);
    case CallKind::kBroadcast: return expect("tensor", call.out, all);
    case CallKind::kReduce:
      PYCOMM_RETURN_IF_ERROR(expect("tensor", call.in, all));
      return root ? expect("out", call.out, all) : Status();
    case CallKind::kGather:
      PYCOMM_RETURN_IF_ERROR(expect("tensor", call.in, mine));
      return root ? expect("output", call.out, all) : Status();
    case CallKind::kScatter:
      if (root) PYCOMM_RETURN_IF_ERROR(expect("input", call.in, all));
      return expect("output", call.out, mine);
    case CallKind::kAllToAll:
    case CallKind::kBarrier:
    case CallKind::kRefused: return Status();
  }
  return Status();
}

// Which tensors this rank has to give: a rooted call needs one of them at the root only.
Status check_given(CallKind kind, bool root, bool has_in, bool has_out) {
  if (kind == CallKind::kBarrier) return Status();
  const bool in_at_root = kind == CallKind::kBroadcast || kind == CallKind::kScatter;
  const bool out_at_root = kind == CallKind::kReduce || kind == CallKind::kGather;
  const bool no_in = !has_in && (root || !in_at_root), no_out = !has_out && (root || !out_at_root);
  if (!no_in && !no_out) return Status();
  return Status::error(Code::kType, format("%s: the %s must be a torch.Tensor on this rank, got None",
                                           call_kind_name(kind), no_in ? "input" : "output"));
}

// Counts that no memory could hold add up to the largest number, which no tensor's size equals.
uint64_t sum(const std::vector<uint64_t>& v) {
  uint64_t n = 0;
  for (uint64_t x : v) {
    if (__builtin_add_overflow(n, x, &n)) return ~uint64_t{0};
  }
  return n;
}

// Collectives that cut the vector into one part for each rank, of which a rank gives or gets its own.
bool is_parted(CallKind kind) {
  return kind == CallKind::kReduceScatter || kind == CallKind::kAllGather || kind == CallKind::kGather ||
         kind == CallKind::kScatter;
}

// Options that the kind does not have are refused, not ignored.
Status check_options(CallKind kind, const Options& o) {
  const bool all_to_all = kind == CallKind::kAllToAll;
  const char* wrong = nullptr;
  if (!o.counts.empty() && !is_parted(kind)) wrong = "counts";
  if ((!o.send_counts.empty() || !o.recv_counts.empty()) && !all_to_all) wrong = "split sizes";
  if (o.algorithm && (all_to_all || kind == CallKind::kBarrier)) wrong = "algorithm";
  if (wrong == nullptr) return Status();
  return Status::error(Code::kType, format("%s takes no %s", call_kind_name(kind), wrong));
}

}  // namespace

Status make_request(PyCommunicator& self, CallKind kind, PyObject* in, PyObject* out, Options o,
                    Request* request) {
  Call& call = request->call;
  Layout layout = Layout::kPlain, out_layout = Layout::kPlain;
  DType out_dtype = DType::kUInt8;
  int out_device = -1;
  call.sig.kind = kind;
  call.sig.op = static_cast<ReduceOp>(o.op);
  call.sig.root = o.root;
  call.scalar = o.scalar;
  call.sig.compression = static_cast<Compression>(o.compression);
  const bool has_in = in != Py_None, has_out = out != Py_None;
  PYCOMM_RETURN_IF_ERROR(check_options(kind, o));
  PYCOMM_RETURN_IF_ERROR(check_given(kind, self.comm->rank() == o.root, has_in, has_out));
  if (has_in) {
    const bool is_tensor = kind == CallKind::kAllReduce || kind == CallKind::kReduce ||
                           kind == CallKind::kBroadcast || kind == CallKind::kGather;
    const char* what = is_tensor ? "tensor" : "input";
    PYCOMM_RETURN_IF_ERROR(view_tensors(in, what, in == out, &call.in, &call.sig.dtype, &call.device, &layout)
                               .within(call_kind_name(kind)));
  }
  if (has_out && out == in) {
    call.out = call.in;
  } else if (has_out) {
    const bool reduces = kind == CallKind::kAllReduce || kind == CallKind::kReduce;
    const char* what = kind == CallKind::kBroadcast ? "tensor" : reduces ? "out" : "output";
    PYCOMM_RETURN_IF_ERROR(view_tensors(out, what, true, &call.out, &out_dtype, &out_device, &out_layout)
                               .within(call_kind_name(kind)));
    if (has_in && out_dtype != call.sig.dtype) {
      return Status::error(Code::kType, format("%s: input is %s, output is %s", call_kind_name(kind),
                                               dtype_name(call.sig.dtype), dtype_name(out_dtype)));
    }
    call.sig.dtype = out_dtype;
    if (has_in && out_device != call.device) {
      return Status::error(
          Code::kValue,
          format("%s: input is on %s, output on %s; one call takes tensors on one device",
                 call_kind_name(kind), device_name(call.device).c_str(), device_name(out_device).c_str()));
    }
    call.device = out_device;
  }
  if (call.device >= 0) PYCOMM_RETURN_IF_ERROR(current_stream(call.device, &call.stream));
  if (layout != Layout::kPlain || out_layout != Layout::kPlain)
    return Status::error(Code::kSystem, "needs staging");
  const auto n = static_cast<uint64_t>(self.comm->size());
  if (kind == CallKind::kAllReduce || kind == CallKind::kReduce) call.sig.count = call.in.n_elems();
  if (kind == CallKind::kBroadcast) call.sig.count = call.out.n_elems();
  if (is_parted(kind)) {
    if (o.counts.empty()) {
      const bool whole_in = kind == CallKind::kReduceScatter;
      const bool part_in = kind == CallKind::kAllGather || kind == CallKind::kGather;
      const uint64_t whole = whole_in  ? call.in.n_elems()
                             : part_in ? call.in.n_elems() * n
                                       : call.out.n_elems() * n;
      if (whole % n != 0) {
        return Status::error(Code::kValue,
                             format("%s: %llu elements do not divide evenly over %llu ranks; give counts=",
                                    call_kind_name(kind), static_cast<unsigned long long>(whole),
                                    static_cast<unsigned long long>(n)));
      }
      o.counts.assign(n, whole / n);
    }
    if (o.counts.size() != n) {
      return Status::error(Code::kValue,
                           format("%s: counts has %zu entries, expected %llu, one for each rank",
                                  call_kind_name(kind), o.counts.size(), static_cast<unsigned long long>(n)));
    }
    call.sig.count = sum(o.counts);
  }
  if (kind == CallKind::kAllToAll) {
    call.sig.count = 0;  // may differ between ranks; pairs are compared by the engine
    if (o.send_counts.size() != n || o.recv_counts.size() != n)
      return Status::error(Code::kValue, "all_to_all: one split size for each rank is needed");
    if (sum(o.send_counts) != call.in.n_elems() || sum(o.recv_counts) != call.out.n_elems()) {
      return Status::error(
          Code::kValue,
          format("all_to_all: split sizes add up to %llu and %llu, the tensors have %llu and %llu elements",
                 static_cast<unsigned long long>(sum(o.send_counts)),
                 static_cast<unsigned long long>(sum(o.recv_counts)),
                 static_cast<unsigned long long>(call.in.n_elems()),
                 static_cast<unsigned long long>(call.out.n_elems())));
    }
  }
  if (o.root < 0 || static_cast<uint64_t>(o.root) >= n) {
    return Status::error(
        Code::kValue, format("%s: rank %d is not in this communicator of %llu", call_kind_name(kind), o.root,
                             static_cast<unsigned long long>(n)));
  }
  PYCOMM_RETURN_IF_ERROR(check_sizes(self, call, o.counts));
  if (o.residual.first != 0 && o.residual.second != call.sig.count) {
    return Status::error(
        Code::kValue,
        format("%s: error_feedback keeps %llu elements, the vector has %llu; give each vector one "
               "of its own",
               call_kind_name(kind), static_cast<unsigned long long>(o.residual.second),
               static_cast<unsigned long long>(call.sig.count)));
  }
  call.residual = reinterpret_cast<float*>(o.residual.first);
  uint64_t before = 0;
  if (!o.counts.empty()) {
    for (int q = 0; q < self.comm->rank(); q++) before += o.counts[static_cast<size_t>(q)];
  }
  const bool in_part = kind == CallKind::kAllGather || kind == CallKind::kGather;
  const bool out_part = kind == CallKind::kReduceScatter || kind == CallKind::kScatter;
  if (has_in && has_out) {
    PYCOMM_RETURN_IF_ERROR(check_overlap(call, dtype_size(call.sig.dtype), in_part ? before : 0,
                                         out_part ? before : 0, in == out));
  }
  request->counts = std::move(o.counts);
  request->send_counts = std::move(o.send_counts);
  request->recv_counts = std::move(o.recv_counts);
  request->deterministic = o.deterministic.value_or(self.deterministic);
  request->timeout_s = o.timeout_s;
  return self.comm->prepare(request, o.algorithm ? o.algorithm->c_str() : self.algorithm_for(kind));
}

bool is_staging(const Status& s) { return s.code() == Code::kSystem && s.message() == "needs staging"; }

void raise_after(GilHooks& hooks, const Status& s) {
  hooks.acquire();
  throw_if_error(s);
}

void refuse_and_raise(PyCommunicator& self, const Status& why) {
  if (why.code() == Code::kValue || why.code() == Code::kType || why.code() == Code::kSchedule) {
    Request request;
    request.refusal = why.message();
    GilHooks hooks;
    const Status s = self.comm->run(request, &hooks);
    hooks.acquire();
    if (!s.ok()) return throw_if_error(s);  // closed, or failed before: that is the news
  }
  throw_if_error(why);
}

}  // namespace pycomm
