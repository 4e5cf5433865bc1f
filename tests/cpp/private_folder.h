// A private folder for the rendezvous of a test's ranks, which is gone with its contents' last user.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <string>

namespace pycomm {

class PrivateFolder {
 public:
  PrivateFolder() {
    char name[] = "/tmp/pycomm-test-XXXXXX";
    if (mkdtemp(name) != nullptr) path_ = name;
  }
  ~PrivateFolder() {
    rmdir(run().c_str());
    rmdir(path_.c_str());
  }
  std::string run() const { return path_ + "/run"; }

 private:
  std::string path_;
};

}  // namespace pycomm
