// The verifier's first half: what can be proved without running anything (verify.h says what that is).
//
// Form: every step names an op, peer and chunks that exist, and chunks hold the parts that the collective
// promises. Pairing: the k-th send p->q meets the k-th recv at q from p. The second half, verify.cc, runs the
// steps and may rely on all of it. Not thread-safe; the checker keeps views of what it was given.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "schedule/verify.h"

namespace pycomm {

// Makes `violation` name step `index` of `rank` (-1: none) and say what is wrong. Always false.
bool blame(std::span<const Schedule> all, int rank, int index, std::string what, Violation* violation);

class FormChecker {
 public:
  FormChecker(std::span<const Schedule> schedules, const Claim& claim, Violation* violation)
      : all_(schedules), claim_(claim), n_(static_cast<int>(schedules.size())), violation_(violation) {}

  bool check_form();
  // After check_form. (*partner)[rank][step]: the sender's step that a recv meets; -1 for other steps.
  bool check_pairing(std::vector<std::vector<int>>* partner);

 private:
  struct At {
    int rank, index;
  };
  // The parts that a rank's inputs or outputs must hold: all of 0 … n_parts - 1, only its own, or none.
  enum class Holds { kAll, kOwn, kNone };

  bool fail(int rank, int index, std::string what) {
    return blame(all_, rank, index, std::move(what), violation_);
  }
  Holds expected_in(int rank) const;
  Holds expected_out(int rank) const;
  bool parts_per_rank() const;
  bool check_head(int rank);
  bool check_chunks(int rank, const char* name, uint32_t first, uint32_t n, Holds expected);
  bool check_step(int rank, int index);
  bool check_pair(At send_at, At recv_at);

  std::span<const Schedule> all_;
  const Claim claim_;
  const int n_;
  Violation* violation_;
};

}  // namespace pycomm
