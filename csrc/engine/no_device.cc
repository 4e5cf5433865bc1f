// DeviceEngine of a build without CUDA: nothing can be made of it, and whoever asks is told.
#if !defined(PYCOMM_HAS_CUDA)
#include "engine/device_engine.h"

namespace pycomm {

struct DeviceHeritage {};
struct DeviceBlock::Impl {};
struct DeviceTurn::Impl {};
struct DeviceEnd::Impl {};
struct DeviceEngine::Impl {};

namespace {
constexpr const char* kWhy =
    "this build of pycomm has no CUDA engine (no nvcc was found when it was built, or PYCOMM_CUDA=off): "
    "install "
    "the CUDA toolkit and pip install again, or move the tensors with .cpu()";
Status no() { return Status::error(Code::kValue, kWhy); }
}  // namespace

const char* device_way_name(uint8_t) { return ""; }
bool device_way_is_deterministic(uint8_t) { return false; }
Status find_device_way(CallKind, const std::string&, uint8_t*) { return no(); }

Status DeviceTurn::take(int, void*, std::shared_ptr<DeviceTurn>*) { return no(); }
Status DeviceTurn::wait(CallerHooks*, const std::function<Status()>&) { return no(); }
bool DeviceTurn::is_captured() const { return false; }
DeviceTurn::~DeviceTurn() = default;
DeviceEnd::~DeviceEnd() = default;
Status DeviceEnd::order(void*) const { return no(); }
bool DeviceEnd::is_ordered() const { return true; }
bool DeviceEnd::passed() const { return true; }
bool DeviceEnd::over() const { return true; }
Status DeviceEnd::failure() const { return no(); }
int DeviceEnd::device() const { return -1; }
Status DeviceEnd::wait(double, CallerHooks*) const { return no(); }

const char* DeviceEngine::why_not_built() { return kWhy; }
int DeviceEngine::device_count() { return 0; }
bool DeviceEngine::is_emulated() { return false; }
DeviceEngine::DeviceEngine() = default;
DeviceEngine::~DeviceEngine() = default;
void DeviceEngine::set_free_cached(void (*)()) {}
Status DeviceEngine::reserve(const DeviceTables&, Call*) { return no(); }
Status DeviceEngine::create(int, Link, std::unique_ptr<DeviceEngine>*) { return no(); }
int DeviceEngine::device() const { return -1; }
Status DeviceEngine::choose(const DeviceTables&, Call*) const { return no(); }
Status DeviceEngine::run(const Call&, const DeviceTurn&, double, std::shared_ptr<DeviceEnd>*) { return no(); }
void DeviceEngine::abort(const Status&) {}
std::shared_ptr<DeviceHeritage> DeviceEngine::bequeath(std::vector<int>) { return nullptr; }
Status DeviceEngine::failure() const { return Status(); }
bool DeviceEngine::is_idle() const { return true; }
Status DeviceEngine::allocate(size_t, void*, CallerHooks*, std::unique_ptr<DeviceBlock>*) { return no(); }
DeviceBlock::~DeviceBlock() = default;
void* DeviceBlock::data() const { return nullptr; }
void DeviceBlock::used_on(void*) {}
void DeviceBlock::hold() {}
DeviceTables::DeviceTables() = default;
Status DeviceTables::set(Collective, std::vector<Row>) { return no(); }
std::vector<uint8_t> DeviceEngine::ways(Collective) const { return {}; }
std::string DeviceEngine::describe() const { return kWhy; }

}  // namespace pycomm
#endif
