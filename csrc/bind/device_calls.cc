#include "bind/device_calls.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "bind/bind.h"
#include "bind/dlpack.h"
#include "bind/hooks.h"
#include "bind/tensor.h"

namespace py = pybind11;

namespace pycomm {

Status end_on_host(const DeviceEnd& end, CallerHooks* hooks) {
  constexpr double kLongestS = 30;  // after a failure, whose abort is bounded, too
  if (!DeviceEngine::is_emulated()) return Status();
  Status s = end.wait(-1, hooks);
  for (const double until_s = monotonic_s() + kLongestS; !end.over() && monotonic_s() < until_s;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return s;
}

namespace {
std::shared_ptr<DeviceEngine> device_of(const PyCommunicator& self) {
  auto engine = self.comm->device();
  if (engine == nullptr) {
    throw_if_error(Status::error(Code::kValue, "this communicator has made no call on CUDA tensors so far"));
  }
  return engine;
}

struct TensorMemory {
  int device;
  std::unique_ptr<DeviceBlock> block;
};

// torch's current stream where the last tensor dies: on autograd's threads, too, which do not hold the GIL.
// torch before 2.10 says it in Python only.
Status stream_of_the_last(int device, void** stream) {
  if (emulated_device() >= 0) return Status();
  const dlpack::ExchangeApi* const torch = exchange_api();
  if (torch != nullptr && torch->current_work_stream != nullptr) {
    const bool known = torch->current_work_stream(dlpack::kCuda, device, stream) == 0;
    return known ? Status() : Status::error(Code::kSystem, "torch has no current stream");
  }
  const py::gil_scoped_acquire gil;
  const py::error_scope keep;  // a tensor may die while an exception is under way
  Status s = current_stream(device, stream);
  PyErr_Clear();
  return s;
}

void drop_memory(void* context) {
  const std::unique_ptr<TensorMemory> memory(static_cast<TensorMemory*>(context));
  if (Py_IsInitialized() == 0) return;
  void* stream = nullptr;
  if (stream_of_the_last(memory->device, &stream).ok()) {
    memory->block->used_on(stream);
  } else {
    memory->block->hold();
  }
}
}  // namespace

PyObject* empty_on_device(PyCommunicator& self, const std::vector<int64_t>& shape, DType dtype,
                          size_t n_bytes, int device) {
  if (self.comm->device() == nullptr) {  // collective, the first time: a call that moves nothing
    Request first;
    first.call.device = device;
    GilHooks hooks;
    raise_after(hooks, current_stream(device, &first.call.stream));
    const Status s = self.comm->prepare(&first, nullptr);
    if (!s.ok()) refuse_and_raise(self, s);
    hooks.before_block();
    raise_after(hooks,
                self.comm->run(first, &hooks).within("empty, the first call on CUDA, meets the others"));
  }
  throw_if_error(self.comm->check_usable());
  const auto engine = device_of(self);
  if (device != engine->device()) {
    throw_if_error(Status::error(
        Code::kValue,
        format("empty: device is cuda:%d, this communicator's is cuda:%d", device, engine->device())));
  }
  void* stream = nullptr;
  std::unique_ptr<DeviceBlock> block;
  GilHooks hooks;
  raise_after(hooks, current_stream(device, &stream));
  raise_after(hooks, engine->allocate(n_bytes, stream, &hooks, &block));
  auto memory = std::make_unique<TensorMemory>(TensorMemory{device, std::move(block)});
  void* const data = memory->block->data();
  return make_tensor(data, shape.data(), static_cast<int>(shape.size()), dtype, device, memory.release(),
                     &drop_memory);
}

namespace {

std::vector<std::string> device_algorithms(const PyCommunicator& self, int collective) {
  std::vector<std::string> names;
  for (const uint8_t way : device_of(self)->ways(static_cast<Collective>(collective)))
    names.emplace_back(device_way_name(way));
  return names;
}

py::list device_selection(const PyCommunicator& self, int collective) {
  py::list rows;
  for (const DeviceTables::Row& r : self.comm->device_tables().of(static_cast<Collective>(collective)))
    rows.append(py::make_tuple(r.max_bytes, device_way_name(r.way)));
  return rows;
}

void set_device_selection(const PyCommunicator& self, int collective,
                          const std::vector<std::tuple<uint64_t, std::string>>& rows) {
  std::vector<DeviceTables::Row> table;
  for (const auto& [max_bytes, name] : rows) {
    DeviceTables::Row r{max_bytes, 0};
    throw_if_error(find_device_way(static_cast<CallKind>(collective), name, &r.way));
    table.push_back(r);
  }
  throw_if_error(self.comm->device_tables().set(static_cast<Collective>(collective), std::move(table)));
}

// Of a call on CUDA: until it is issued; torch's current stream then waits for it. With a timeout, or `host`,
// the calling thread waits for the device.
bool wait_work(Work& self, double timeout_s, bool host) {
  GilHooks hooks;
  bool finished = false;
  const double end_s = monotonic_s() + timeout_s;
  Status s = self.wait(timeout_s, &hooks, &finished);
  const DeviceEnd* const end = self.issued() ? self.end().get() : nullptr;
  if (!s.ok()) {  // told below
  } else if (end != nullptr && (host || timeout_s >= 0)) {
    s = end->wait(timeout_s < 0 ? -1 : std::max(0.0, end_s - monotonic_s()), &hooks);
    if (s.code() == Code::kTimeout && timeout_s >= 0 && !end->passed()) {
      hooks.acquire();
      return false;
    }
  } else if (end != nullptr) {
    s = end_on_host(*end, &hooks);
  }
  hooks.acquire();
  if (s.code() == Code::kInterrupt && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (end != nullptr) {  // also of a failed call, which may still use the tensors
    void* stream = nullptr;
    Status ordered = current_stream(end->device(), &stream);
    if (ordered.ok()) ordered = end->order(stream);
    if (s.ok()) s = std::move(ordered);
  }
  throw_if_error(s);
  return finished;
}

}  // namespace

void add_work(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("wait", &wait_work, py::arg("timeout_s"), py::arg("host") = false)
      .def_property_readonly("device",
                             [](const Work& w) { return w.end() == nullptr ? -1 : w.end()->device(); })
      .def("done", &Work::done)
      .def("over", &Work::over)
      .def("is_ordered", [](const Work& w) { return w.end() == nullptr || w.end()->is_ordered(); })
      .def("announce", &Work::announce)
      .def("raise_if_failed", [](const Work& w) { throw_if_error(w.result()); })
      .def_readonly("source", &Work::source);
}

void add_device_calls(py::class_<PyCommunicator>& communicator) {
  communicator
      .def_property_readonly("device",
                             [](const PyCommunicator& c) {
                               const auto engine = c.comm->device();
                               return engine == nullptr ? -1 : engine->device();
                             })
      .def("device_description",
           [](const PyCommunicator& c) {
             const auto engine = c.comm->device();
             return engine == nullptr ? "" : engine->describe();
           })
      .def("device_algorithms", &device_algorithms)
      .def("device_selection", &device_selection)
      .def("set_device_selection", &set_device_selection);
}

}  // namespace pycomm
