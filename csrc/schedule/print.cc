// Chunks, steps and schedules as text.
#include "schedule/print.h"

namespace pycomm {

std::string chunk_text(const Schedule& s, uint32_t chunk, uint32_t n_chunks) {
  const uint32_t total = s.n_chunks();
  if (chunk >= total || n_chunks == 0 || n_chunks > total - chunk || s.part.size() != total) {
    return format("chunks %u to %llu (of %u)", chunk, static_cast<unsigned long long>(chunk) + n_chunks,
                  total);
  }
  std::string where = "in";
  if (chunk >= s.n_in + s.n_out) {
    where = format("s%u", chunk - s.n_in - s.n_out);
  } else if (chunk >= s.n_in) {
    where = "out";
  }
  if (n_chunks == 1) return where + format("[%u]", s.part[chunk]);
  return where + format("[%u..%u]", s.part[chunk], s.part[chunk + n_chunks - 1]);
}

std::string op_text(const Step& step) {
  switch (step.op()) {
    case StepOp::kSend: return "send";
    case StepOp::kRecv: return "recv";
    case StepOp::kRecvReduce: return "recv_reduce";
    case StepOp::kReduce: return "reduce";
    case StepOp::kCopy: return "copy";
  }
  return format("op %u", static_cast<unsigned>(step.op_bits & 7));
}

std::string step_text(const Schedule& s, const Step& step) {
  const auto n = static_cast<uint32_t>(step.n_chunks);
  const std::string src = chunk_text(s, step.src, n), dst = chunk_text(s, step.dst, n);
  const std::string incoming = format("(from rank %u)", static_cast<unsigned>(step.peer));
  const auto sum = [&](const std::string& other) {
    return dst + " = " + (step.src_left() ? src + " + " + other : other + " + " + src);
  };
  switch (step.op()) {
    case StepOp::kSend: return "send " + src + format(" to rank %u", static_cast<unsigned>(step.peer));
    case StepOp::kRecv: return dst + " = " + incoming;
    case StepOp::kRecvReduce: return sum(incoming);
    case StepOp::kReduce: return sum(dst);
    case StepOp::kCopy: return dst + " = " + src;
  }
  return op_text(step);
}

std::string schedule_text(const Algorithm& a, const Schedule& s) {
  std::string text =
      format("%s/%s, rank %d of %d: %u parts, %u in, %u out, %u scratch\n", collective_name(a.collective),
             a.name, s.rank, s.n_ranks, s.n_parts, s.n_in, s.n_out, s.n_scratch);
  int64_t round = -1;
  for (const Step& step : s.steps) {
    const auto r = static_cast<int64_t>(step.round);
    text += r == round ? "           " : format("  round %-3lld", static_cast<long long>(r));
    text += format(" %-11s  ", op_text(step).c_str()) + step_text(s, step) + "\n";
    round = r;
  }
  return text;
}

}  // namespace pycomm
