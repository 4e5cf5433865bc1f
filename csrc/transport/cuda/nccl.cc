#include "transport/cuda/nccl.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace pycomm::nccl {

namespace {

constexpr const char* kSoname = "libnccl.so.2";

struct State {
  std::mutex mutex;
  std::vector<std::string> folders;
  std::unique_ptr<Library> library;
};
State& state() {
  static State* const s = new State;  // calls may come while the process ends
  return *s;
}

std::string remedy() {
  return format(
      "install NCCL %s or newer with pip install 'pycomm-collectives[cu13]' (or [cu12], as your driver has "
      "it), "
      "or set PYCOMM_NCCL_LIB to the path of a libnccl.so.2",
      version_text(kOldestVersion).c_str());
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return kSoname;
  return map->l_name;
}

// Fills the table; the library's version comes first, since an older one lacks functions.
Status read_library(void* handle, const char* how, Library* out) {
  out->path = path_of(handle);
  out->how = how;
  const std::string who = format("NCCL (%s, %s)", out->path.c_str(), how);
  const auto get_version = reinterpret_cast<Result (*)(int*)>(dlsym(handle, "ncclGetVersion"));
  if (get_version == nullptr) {
    return Status::error(Code::kSystem, who + " has no ncclGetVersion, so it is not NCCL: " + remedy());
  }
  if (get_version(&out->version) != kSuccess) {
    return Status::error(Code::kSystem, who + " does not say its version: " + remedy());
  }
  if (out->version < kOldestVersion) {
    return Status::error(Code::kSystem, format("%s is version %s, and pycomm needs %s or newer: %s",
                                               who.c_str(), version_text(out->version).c_str(),
                                               version_text(kOldestVersion).c_str(), remedy().c_str()));
  }
  std::string missing;
#define PYCOMM_LOAD(result, member, symbol, parameters) \
  out->api.member = reinterpret_cast<decltype(out->api.member)>(dlsym(handle, #symbol));
#define PYCOMM_LOAD_REQUIRED(result, member, symbol, parameters) \
  PYCOMM_LOAD(result, member, symbol, parameters)                \
  if (out->api.member == nullptr) missing += " " #symbol;
  PYCOMM_NCCL_REQUIRED(PYCOMM_LOAD_REQUIRED)
  PYCOMM_NCCL_OPTIONAL(PYCOMM_LOAD)
#undef PYCOMM_LOAD_REQUIRED
#undef PYCOMM_LOAD
  if (missing.empty()) return Status();
  return Status::error(Code::kSystem,
                       format("%s, version %s, lacks%s: %s", who.c_str(), version_text(out->version).c_str(),
                              missing.c_str(), remedy().c_str()));
}

Status load(void* handle, const char* how, Library* out) {
  Status s = read_library(handle, how, out);
  if (!s.ok()) dlclose(handle);  // or the next search would meet it as "already loaded"
  return s;
}

Status find(const std::vector<std::string>& folders, Library* out) {
  const auto open_file = [](const char* file) { return dlopen(file, RTLD_NOW | RTLD_LOCAL); };
  if (void* handle = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return load(handle, "already loaded", out);

  const char* named = std::getenv("PYCOMM_NCCL_LIB");
  if (named != nullptr && *named != '\0') {
    if (void* handle = open_file(named)) return load(handle, "PYCOMM_NCCL_LIB", out);
    return Status::error(Code::kSystem,
                         format("PYCOMM_NCCL_LIB is '%s', which cannot be opened (%s): unset it, "
                                "or set it to the path of a libnccl.so.2",
                                named, dlerror()));
  }
  std::string looked;
  for (const std::string& folder : folders) {
    const std::string file = folder + "/" + kSoname;
    looked += file + ", ";
    if (access(file.c_str(), F_OK) != 0) continue;
    if (void* handle = open_file(file.c_str())) return load(handle, "site-packages", out);
    return Status::error(Code::kSystem, format("NCCL (%s) cannot be opened (%s): %s", file.c_str(), dlerror(),
                                               remedy().c_str()));
  }
  if (void* handle = open_file(kSoname)) return load(handle, "the dynamic linker", out);
  return Status::error(
      Code::kSystem, format("NCCL was not found (looked at: loaded libraries, %sthe dynamic linker's %s): %s",
                            looked.c_str(), kSoname, remedy().c_str()));
}

}  // namespace

void set_search_folders(std::vector<std::string> folders) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.folders = std::move(folders);
}

Status open(const Library** out) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.library == nullptr) {
    auto found = std::make_unique<Library>();
    PYCOMM_RETURN_IF_ERROR(find(s.folders, found.get()));
    s.library = std::move(found);
  }
  *out = s.library.get();
  return Status();
}

std::string version_text(int version) {
  return format("%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace pycomm::nccl
