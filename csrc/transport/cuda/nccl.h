// NCCL, opened at run time: one build of pycomm works with NCCL 2.18 and newer, and without.
//
// The library is looked for in this order, and the first that is found must serve:
//   1. one that the process has loaded already (torch's): two copies in a process would not know each other
//   2. the file that PYCOMM_NCCL_LIB names
//   3. libnccl.so.2 in the folders of set_search_folders (…/site-packages/nvidia/nccl/lib: only Python knows)
//   4. libnccl.so.2 as the dynamic linker finds it
// It stays open until the process ends. A failure is not remembered: the next call looks again. Any thread.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "transport/cuda/nccl_api.h"

namespace pycomm::nccl {

struct Library {
  Api api;
  int version = 0;   // as ncclGetVersion says: 22807 is 2.28.7
  std::string path;  // of the file
  std::string how;   // "already loaded", "PYCOMM_NCCL_LIB", "site-packages" or "the dynamic linker"
};

void set_search_folders(std::vector<std::string> folders);

// kSystem when there is none, or none that serves; the message names what was looked at, and the remedy.
Status open(const Library** out);

std::string version_text(int version);  // "2.28.7"

}  // namespace pycomm::nccl
