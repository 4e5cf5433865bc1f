// The calling Python thread while the engine blocks: it gives the GIL away, and looks for Ctrl-C.
#pragma once

#include <Python.h>

#include "engine/group.h"

namespace pycomm {

class GilHooks final : public CallerHooks {
 public:
  GilHooks() = default;
  ~GilHooks() override { acquire(); }
  GilHooks(const GilHooks&) = delete;
  GilHooks& operator=(const GilHooks&) = delete;

  // Brief waits spin with the GIL held: giving it away and back costs more.
  void before_block() override {
    if (saved_ == nullptr) saved_ = PyEval_SaveThread();
  }
  Status poll() override {
    const bool released = saved_ != nullptr;
    acquire();
    if (PyErr_CheckSignals() != 0) return Status::error(Code::kInterrupt, "interrupted");
    if (released) before_block();
    return Status();
  }
  void acquire() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
    saved_ = nullptr;
  }

 private:
  PyThreadState* saved_ = nullptr;
};

}  // namespace pycomm
