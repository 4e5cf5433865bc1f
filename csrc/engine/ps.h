// What the communicators of another process are in, read from its arena: for `pycomm ps`.
//
// Nothing is asked of that process, which may be stopped, or hang. Its arena (transport/arena.h) has no name:
// it is opened as /proc/PID/fd/N, which the kernel allows to the same user only, and is gone when the process
// is. Each word is right by itself (Shown, control.h), and read while the other process goes on.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace pycomm {

struct PsRow {
  int64_t pid = 0;  // as that process knows it
  std::string job, label, host;
  int job_rank = 0, rank = 0, size = 0;
  bool failed = false;
  std::string why;   // when it has failed
  std::string call;  // the latest: "all_reduce"; empty: none yet
  uint32_t number = 0;
  bool inside = false;  // the call has not returned
  // For whom it waits, -1: any rank, -2: for nobody (by now: the first tenth of a second is not shown).
  int waits_for = -2;
  double waited_s = 0;
  std::string transfer;  // "send", "recv", or nothing, which a caller waits in beside
  int transfer_peer = -2;
  double transfer_s = 0;
};

// Every communicator that the process shows; nothing where the file is no arena of this version.
Status read_arena(const std::string& path, std::vector<PsRow>* out);

}  // namespace pycomm
