// Schedules as text for people, error messages and golden files.
//
// A chunk is written by what it holds: in[3] and out[3] are part 3 of the input and the output, s1[3] is
// scratch chunk 1, which holds part 3; in[0..3] is a run of consecutive chunks. Deterministic: the same
// schedule always gives the same text.
#pragma once

#include <span>
#include <string>

#include "schedule/catalog.h"

namespace pycomm {

// "in[3]", "s1[0..3]"; a chunk that does not exist is written "chunk 17 (of 12)".
std::string chunk_text(const Schedule& s, uint32_t chunk, uint32_t n_chunks = 1);
// "send" or "recv_reduce" and so on; an op that does not exist is written "op 7".
std::string op_text(const Step& step);
// What the step does, without its round: "send in[0] to rank 1", "out[2] = (from rank 3) + in[2]".
std::string step_text(const Schedule& s, const Step& step);
// One rank: a heading, then a line for each step, grouped by round.
std::string schedule_text(const Algorithm& a, const Schedule& s);

}  // namespace pycomm
