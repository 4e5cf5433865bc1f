// See measure.h.
#include "measure.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "kernels/cast.h"

namespace pycomm::gpu_bench {

// ---- errors

void fail(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

void check(const Status& status, const std::string& what) {
  if (!status.ok()) fail(what + ": " + status.message());
}

void check(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) fail(what + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// ---- numbers

Numbers::Numbers(DType dtype, unsigned seed) : dtype_(dtype), period_(kPeriod * dtype_size(dtype)) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(kPeriod);
  for (float& v : values) v = normal(rng);
  cast(dtype, period_.data(), DType::kFloat32, values.data(), kPeriod, 1.0f);
}

Bytes Numbers::slice(size_t begin, size_t n_elems) const {
  const size_t size = dtype_size(dtype_);
  Bytes out(n_elems * size);
  for (size_t i = 0; i < n_elems;) {
    const size_t at = (begin + i) % kPeriod, n = std::min(n_elems - i, kPeriod - at);
    std::memcpy(&out[i * size], &period_[at * size], n * size);
    i += n;
  }
  return out;
}

Memory::Memory(size_t n_bytes) : n_bytes_(n_bytes) {
  check(cudaMalloc(reinterpret_cast<void**>(&p_), std::max<size_t>(n_bytes, 1)),
        format("cudaMalloc of %zu bytes", n_bytes));
  // Memory that was never written may not be there yet.
  check(cudaMemset(p_, 0, n_bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaMemset");
}

Memory::Memory(const Numbers& numbers, size_t n_elems) : Memory(n_elems * dtype_size(numbers.dtype())) {
  for (size_t begin = 0; begin < n_elems; begin += Numbers::kPeriod) {
    const size_t n = std::min(n_elems - begin, Numbers::kPeriod);
    set(begin * dtype_size(numbers.dtype()), numbers.slice(begin, n));
  }
}

Memory::~Memory() {
  if (p_ != nullptr) (void)cudaFree(p_);
}

void Memory::set(size_t at, const Bytes& contents) const {
  check(cudaMemcpy(p_ + at, contents.data(), contents.size(), cudaMemcpyHostToDevice), "copy to the device");
  check(cudaDeviceSynchronize(), "copy to the device");  // from pageable memory it may still be under way
}

Bytes Memory::get(size_t at, size_t n_bytes) const {
  Bytes out(n_bytes);
  check(cudaMemcpy(out.data(), p_ + at, n_bytes, cudaMemcpyDeviceToHost), "copy from the device");
  return out;
}

std::vector<size_t> tensor_lengths(size_t n_elems) {
  static constexpr size_t kLayer[] = {size_t{3072} * 1024, 3072, size_t{1024} * 1024, 1024, 1024,
                                      size_t{4096} * 1024, 4096, size_t{4096} * 1024, 1024, 1024};
  const size_t scale = n_elems < size_t{1} << 20 ? 1024 : 1;  // a small total has as many tensors
  std::vector<size_t> lengths;
  for (size_t i = 0; n_elems > 0; ++i) {
    const size_t n = std::min(n_elems, std::max<size_t>(kLayer[i % std::size(kLayer)] / scale, 8));
    lengths.push_back(n);
    n_elems -= n;
  }
  return lengths;
}

std::vector<Range> checked_ranges(size_t n_elems) {
  constexpr size_t kMost = 16384;  // a multiple of the blocks of kernels/blocks.h
  if (n_elems <= 2 * kMost) return {{0, n_elems}};
  const size_t last = (n_elems - kMost) / kMost * kMost;
  return {{0, kMost}, {last, n_elems - last}};
}

// ---- measuring

namespace {

size_t parse_size(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const double scale = unit.empty()  ? 1
                       : unit == "K" ? 1024
                       : unit == "M" ? 1048576
                       : unit == "G" ? 1 << 30
                                     : 0;
  if (end == text.c_str() || !(number * scale >= 1) || number * scale > 0x1p40) {
    fail(format("--bytes is '%s'; expected a size such as 64K, 256M or 1G", text.c_str()));
  }
  return static_cast<size_t>(number * scale);
}

int parse_count(const char* flag, const std::string& text, int least) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (end == text.c_str() || *end != '\0' || number < least || number > 100000) {
    fail(format("%s is '%s'; expected a number from %d to 100000", flag, text.c_str(), least));
  }
  return static_cast<int>(number);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const size_t n = v.size();
  return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

constexpr bool emulated() {
#if defined(PYCOMM_CUDA_EMULATED)
  return true;
#else
  return false;
#endif
}

std::string device_text() {
#if defined(PYCOMM_CUDA_EMULATED)
  return "emulated on the CPU";
#else
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  return format(
      "%s, compute capability %d.%d, %d multiprocessors, CUDA %d.%d of the driver, %d.%d of the runtime",
      properties.name, properties.major, properties.minor, properties.multiProcessorCount, driver / 1000,
      driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
#endif
}

}  // namespace

Bench::Bench(const std::string& name, int argc, char** argv) : name_(name) {
  parse(argc, argv);
  int n_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&n_devices);
  if (error != cudaSuccess || n_devices == 0) {
    const std::string why = error == cudaSuccess
                                ? "the driver has no device"
                                : format("%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
    fail(format("no GPU: %s; %s_bench measures on one, and was not run", why.c_str(), name.c_str()));
  }
  check(cudaSetDevice(0), "cudaSetDevice(0)");
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
}

Bench::~Bench() {
  for (cudaEvent_t event : events_) (void)cudaEventDestroy(event);
  (void)cudaStreamDestroy(stream_);
}

void Bench::parse(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      json_ = true;
      continue;
    }
    const bool known = flag == "--bytes" || flag == "--repeats" || flag == "--warmups";
    if (!known || i + 1 == argc) {
      fail(format("%s_bench: %s '%s'; expected --bytes 256M, --repeats 20, --warmups 5, --json",
                  name_.c_str(), known ? "no value for" : "unknown argument", flag.c_str()));
    }
    const std::string value = argv[++i];
    if (flag == "--bytes") n_bytes_ = parse_size(value);
    if (flag == "--repeats") n_repeats_ = parse_count("--repeats", value, 1);
    if (flag == "--warmups") n_warmups_ = parse_count("--warmups", value, 0);
  }
}

void Bench::measure(const Row& row) {
  const std::string what = row.kernel + " " + row.dtype;
  const size_t n_copied = row.n_bytes_moved / 2;
  const Memory from(n_copied), to(n_copied);
  check(cudaDeviceSynchronize(), what);
  std::vector<double> copies, kernels;
  for (int i = 0; i < n_warmups_ + n_repeats_; ++i) {
    check(cudaEventRecord(events_[0], stream_), what);
    check(cudaMemcpyAsync(to.data(), from.data(), n_copied, cudaMemcpyDeviceToDevice, stream_), "copy");
    check(cudaEventRecord(events_[1], stream_), what);
    check(row.run(stream_), what);
    check(cudaEventRecord(events_[2], stream_), what);
    check(cudaEventSynchronize(events_[2]), what);
    float copy_ms = 0, kernel_ms = 0;
    check(cudaEventElapsedTime(&copy_ms, events_[0], events_[1]), what);
    check(cudaEventElapsedTime(&kernel_ms, events_[1], events_[2]), what);
    if (i < n_warmups_) continue;
    copies.push_back(copy_ms * 1e3);
    kernels.push_back(kernel_ms * 1e3);
  }
  if (!row.right()) fail(what + ": the result is not the CPU's");
  Result result{row.kernel, row.dtype, "-", row.n_bytes_moved, median(kernels), median(copies)};
  // Smaller operands are partly in the cache, which says nothing of a share of the memory's bandwidth.
  if (!emulated() && row.required && n_bytes_ >= size_t{256} << 20) {
    result.verdict = result.copy_us >= 0.85 * result.us ? "met" : "missed";
  }
  results_.push_back(std::move(result));
}

int Bench::finish() {
  if (results_.empty()) fail(name_ + "_bench: nothing was measured");
  json_ ? print_json() : print_table();
  return 0;
}

void Bench::print_table() const {
  std::printf("# %s: %s; medians of %d calls, after %d\n", name_.c_str(), device_text().c_str(), n_repeats_,
              n_warmups_);
  if (emulated()) std::printf("# emulated: no time here means anything\n");
  std::printf("%-24s %-26s %12s %10s %9s %14s %13s\n", "kernel", "dtype", "bytes", "µs", "GB/s",
              "share of copy", "at least 85%");
  for (const Result& r : results_) {
    std::printf("%-24s %-26s %12zu %10.1f %9.1f %13.1f%% %13s\n", r.kernel.c_str(), r.dtype.c_str(),
                r.n_bytes_moved, r.us, static_cast<double>(r.n_bytes_moved) / r.us * 1e-3,
                100 * r.copy_us / r.us, r.verdict.c_str());
  }
}

void Bench::print_json() const {
  std::printf(
      "{\n \"bench\": \"%s\",\n \"device\": \"%s\",\n \"emulated\": %s,\n \"repeats\": %d,\n \"rows\": [",
      name_.c_str(), device_text().c_str(), emulated() ? "true" : "false", n_repeats_);
  const char* before = "\n";
  for (const Result& r : results_) {
    std::printf(
        "%s  {\"kernel\": \"%s\", \"dtype\": \"%s\", \"bytes\": %zu, \"us\": %.3f, \"copy_us\": %.3f, "
        "\"at_least_85_percent\": \"%s\"}",
        before, r.kernel.c_str(), r.dtype.c_str(), r.n_bytes_moved, r.us, r.copy_us, r.verdict.c_str());
    before = ",\n";
  }
  std::printf("\n ]\n}\n");
}

}  // namespace pycomm::gpu_bench
