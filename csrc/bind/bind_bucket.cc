// csrc/bucket in Python: _C.bucket.assign(sizes, kinds, first_cap, cap) -> list of lists of indices.
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "bucket/bucket.h"

namespace py = pybind11;

namespace pycomm {

namespace {
std::vector<Bucket> assign(const std::vector<uint64_t>& sizes, const std::vector<int32_t>& kinds,
                           uint64_t first_cap, uint64_t cap) {
  if (sizes.size() != kinds.size()) {
    throw_if_error(Status::error(
        Code::kValue, format("buckets: %zu sizes, but %zu kinds; give one of each for every parameter",
                             sizes.size(), kinds.size())));
  }
  std::vector<Param> params(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) params[i] = Param{sizes[i], kinds[i]};
  std::vector<Bucket> buckets;
  throw_if_error(assign_buckets(params, first_cap, cap, &buckets));
  return buckets;
}
}  // namespace

void bind_bucket(py::module_& m) {
  py::module_ bucket =
      m.def_submodule("bucket", "Which gradients are reduced together (csrc/bucket/bucket.h).");
  bucket.def(
      "assign", &assign, py::arg("sizes"), py::arg("kinds"), py::arg("first_cap"), py::arg("cap"),
      "Buckets of parameter indices, in the order in which they are to be reduced. sizes, first_cap and\n"
      "cap are bytes; parameters are given in the order in which their gradients are expected.");
}

}  // namespace pycomm
