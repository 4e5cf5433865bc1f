#include "engine/plan.h"

#include <algorithm>
#include <map>

#include "engine/fuse.h"

namespace pycomm {

namespace {

// Locations, not chunk ids, carry hazards: in place, input and output of one part are one location.
class Locations {
 public:
  Locations(const std::vector<Schedule>& schedules, bool in_place) {
    for (const Schedule& s : schedules) {
      std::vector<uint32_t> loc(s.n_chunks());
      for (uint32_t c = 0; c < s.n_chunks(); c++) loc[c] = c;
      if (in_place) {
        for (uint32_t i = 0; i < s.n_in; i++) {
          for (uint32_t o = 0; o < s.n_out; o++) {
            if (s.part[s.in(i)] == s.part[s.out(o)]) loc[s.out(o)] = i;
          }
        }
      }
      loc_.push_back(std::move(loc));
    }
  }
  uint32_t of(Ref r) const { return loc_[r.rank][r.chunk]; }
  bool same(Ref a, Ref b) const { return a.rank == b.rank && of(a) == of(b); }
  const std::vector<uint32_t>& of_rank(int rank) const { return loc_[rank]; }

 private:
  std::vector<std::vector<uint32_t>> loc_;
};

using Program = std::vector<std::vector<Instr>>;  // one list for each rank

struct Access {
  int rank;
  uint32_t instr;
};

// Readers and own writers of every location, so that the passes below need no search over all ranks.
struct Accesses {
  std::map<std::pair<int, uint32_t>, std::vector<Access>> readers, writers;
  Accesses(const Program& program, const Locations& locs) {
    for (int r = 0; r < static_cast<int>(program.size()); r++) {
      for (uint32_t i = 0; i < program[r].size(); i++) {
        for (Ref s : program[r][i].srcs) readers[{s.rank, locs.of(s)}].push_back({r, i});
        for (Ref d : program[r][i].dsts) writers[{d.rank, locs.of(d)}].push_back({r, i});
      }
    }
  }
  const std::vector<Access>& read(Ref x, const Locations& locs) const { return get(readers, x, locs); }
  const std::vector<Access>& written(Ref x, const Locations& locs) const { return get(writers, x, locs); }

 private:
  static const std::vector<Access>& get(const std::map<std::pair<int, uint32_t>, std::vector<Access>>& m,
                                        Ref x, const Locations& locs) {
    static const std::vector<Access> none;
    const auto it = m.find({x.rank, locs.of(x)});
    return it == m.end() ? none : it->second;
  }
};

// Put: r's instruction i makes a chunk that q's instruction j only copies to an output. r may write it there
// itself if nobody else has touched, or will touch, that output of q.
void lower_puts(const std::vector<Schedule>& schedules, const Locations& locs, Program* program) {
  const Accesses acc(*program, locs);
  const int n = static_cast<int>(program->size());
  std::vector<std::vector<uint8_t>> dropped(n);
  for (int q = 0; q < n; q++) dropped[q].resize((*program)[q].size());
  for (int q = 0; q < n; q++) {
    for (uint32_t j = 0; j < (*program)[q].size(); j++) {
      const Instr& copy = (*program)[q][j];
      if (copy.srcs.size() != 1 || copy.srcs[0].rank == q || copy.dsts.size() != 1) continue;
      const Ref src = copy.srcs[0], dst = copy.dsts[0];
      const Schedule& at_q = schedules[q];
      if (dst.chunk < at_q.n_in || dst.chunk >= at_q.n_in + at_q.n_out) continue;
      int64_t maker = -1;  // the instruction of src.rank that made what is copied
      for (const Access& w : acc.written(src, locs)) {
        const Instr& instr = (*program)[w.rank][w.instr];
        if (w.rank == src.rank && instr.round < copy.round) maker = std::max<int64_t>(maker, w.instr);
      }
      if (maker < 0) continue;
      bool free = acc.written(dst, locs).size() == 1;
      for (const Access& a : acc.read(dst, locs)) {
        free = free && a.rank == src.rank && a.instr <= maker && a.rank != q;
      }
      if (!free) continue;
      (*program)[src.rank][maker].dsts.push_back(dst);
      dropped[q][j] = 1;
    }
  }
  for (int q = 0; q < n; q++) {
    std::vector<Instr> kept;
    for (uint32_t j = 0; j < (*program)[q].size(); j++) {
      if (!dropped[q][j]) kept.push_back(std::move((*program)[q][j]));
    }
    (*program)[q] = std::move(kept);
  }
}

// The waits of every instruction, first in terms of the peer's instruction index (stored in Wait::post).
void add_wait(std::vector<Wait>* waits, int peer, uint32_t instr) {
  for (Wait& w : *waits) {
    if (w.peer == peer) {
      w.post = std::max(w.post, instr);
      return;
    }
  }
  waits->push_back({peer, instr});
}

void find_waits(const Locations& locs, bool direct, Program* program,
                std::vector<std::vector<Wait>>* exit_waits) {
  const Accesses acc(*program, locs);
  const int n = static_cast<int>(program->size());
  for (int r = 0; r < n; r++) {
    for (Instr& instr : (*program)[r]) {
      for (Ref s : instr.srcs) {
        if (s.rank == r) continue;
        int64_t maker = -1;
        for (const Access& w : acc.written(s, locs)) {
          if (w.rank == s.rank && (*program)[w.rank][w.instr].round < instr.round)
            maker = std::max<int64_t>(maker, w.instr);
        }
        if (maker >= 0) add_wait(&instr.waits, s.rank, static_cast<uint32_t>(maker));
      }
      for (const Access& a : acc.read(instr.dsts[0], locs)) {
        if (a.rank != r && (*program)[a.rank][a.instr].round < instr.round)
          add_wait(&instr.waits, a.rank, a.instr);
      }
    }
  }
  exit_waits->assign(n, {});
  if (!direct) return;
  for (int s = 0; s < n; s++) {
    for (uint32_t i = 0; i < (*program)[s].size(); i++) {
      for (Ref x : (*program)[s][i].srcs) {
        if (x.rank != s) add_wait(&(*exit_waits)[x.rank], s, i);
      }
      for (Ref x : (*program)[s][i].dsts) {
        if (x.rank != s) add_wait(&(*exit_waits)[x.rank], s, i);
      }
    }
  }
}

// Marks the instructions that somebody waits for, and turns instruction indices into numbers of posts.
void number_posts(Program* program, std::vector<std::vector<Wait>>* exit_waits,
                  std::vector<uint32_t>* n_posts) {
  const auto for_all_waits = [&](auto&& fn) {
    for (auto& list : *program) {
      for (Instr& i : list) {
        for (Wait& w : i.waits) fn(w);
      }
    }
    for (auto& list : *exit_waits) {
      for (Wait& w : list) fn(w);
    }
  };
  for_all_waits([&](Wait& w) { (*program)[w.peer][w.post].post = true; });
  std::vector<std::vector<uint32_t>> number(program->size());
  n_posts->clear();
  for (size_t r = 0; r < program->size(); r++) {
    uint32_t k = 0;
    for (const Instr& i : (*program)[r]) number[r].push_back(k += i.post);
    n_posts->push_back(k);
  }
  for_all_waits([&](Wait& w) { w.post = number[w.peer][w.post]; });
}

std::vector<ChunkPlace> place_chunks(const Schedule& s, const Program& program, bool tiled,
                                     uint32_t* n_exposed, uint32_t* n_private) {
  std::vector<ChunkPlace> places(s.n_chunks());
  std::vector<uint8_t> exposed(s.n_chunks());
  for (int r = 0; r < static_cast<int>(program.size()); r++) {
    for (const Instr& i : program[r]) {
      for (Ref x : i.srcs) {
        if (x.rank != s.rank) continue;
        exposed[x.chunk] |= r != s.rank || (x.chunk < s.n_in && i.own_input_from_slot);
      }
    }
  }
  *n_exposed = *n_private = 0;
  for (uint32_t c = 0; c < s.n_chunks(); c++) {
    places[c].part = s.part[c];
    places[c].is_in = c < s.n_in;
    places[c].is_out = !places[c].is_in && c < s.n_in + s.n_out;
    if (tiled && exposed[c]) {
      places[c].exposed = static_cast<int32_t>((*n_exposed)++);
    } else if (!places[c].is_in && !places[c].is_out) {
      places[c].scratch = static_cast<int32_t>((*n_private)++);
    }
  }
  return places;
}

void mark_instrs(const Schedule& s, std::vector<Instr>* instrs) {
  for (size_t i = 0; i < instrs->size(); i++) {
    Instr& instr = (*instrs)[i];
    instr.last_write = true;
    for (size_t j = i + 1; j < instrs->size(); j++) {
      if ((*instrs)[j].dsts[0] == instr.dsts[0]) instr.last_write = false;
    }
    for (Ref x : instr.srcs) {
      if (x.rank != s.rank || x.chunk >= s.n_in) continue;
      for (size_t j = 0; j < i; j++) {
        const Ref d = (*instrs)[j].dsts[0];
        const bool is_out = d.chunk >= s.n_in && d.chunk < s.n_in + s.n_out;
        if (is_out && s.part[d.chunk] == s.part[x.chunk]) instr.own_input_from_slot = true;
      }
    }
  }
}

bool is_complete(const Instr& instr, const std::vector<Schedule>& schedules) {
  if (instr.srcs.size() != schedules.size()) return false;
  for (size_t q = 0; q < instr.srcs.size(); q++) {
    const Ref x = instr.srcs[q];
    if (x.rank != static_cast<int>(q) || x.chunk >= schedules[x.rank].n_in) return false;
  }
  return true;
}

uint32_t first_of_second_stage(const std::vector<Instr>& instrs) {
  uint32_t at = 0;
  for (uint32_t i = 0; i < instrs.size(); i++) {
    if (instrs[i].post) at = i + 1;
  }
  return at;
}

}  // namespace

Status make_plan(const Algorithm& algorithm, int rank, int n_ranks, int root, int n_chunks, PlanMode mode,
                 std::unique_ptr<Plan>* out) {
  if (mode == PlanMode::kDirectInPlace && !algorithm.in_place) {
    return Status::error(Code::kSchedule, format("%s/%s cannot run in place",
                                                 collective_name(algorithm.collective), algorithm.name));
  }
  std::vector<Schedule> schedules;
  for (int r = 0; r < n_ranks; r++) {
    schedules.push_back(
        algorithm.build(r, n_ranks, root, n_chunks > 0 ? n_chunks : algorithm.default_n_chunks));
  }
  const bool tiled = mode == PlanMode::kTiled;
  const Locations locs(schedules, mode == PlanMode::kDirectInPlace);
  Program program;
  const SendTable sends(schedules);
  for (const Schedule& s : schedules) {
    program.emplace_back();
    PYCOMM_RETURN_IF_ERROR(fuse(s, sends, locs.of_rank(s.rank), &program.back()));
  }
  auto plan = std::make_unique<Plan>();
  plan->fused_scale = true;
  for (int r = 0; r < n_ranks; r++) {
    mark_instrs(schedules[r], &program[r]);
    for (Instr& i : program[r]) {
      i.complete = is_complete(i, schedules);
      if (i.srcs.size() > 1 && !i.complete) plan->fused_scale = false;
    }
  }
  if (!tiled) lower_puts(schedules, locs, &program);
  std::vector<std::vector<Wait>> exit_waits;
  find_waits(locs, !tiled, &program, &exit_waits);
  number_posts(&program, &exit_waits, &plan->n_posts);

  plan->mode = mode;
  plan->rank = rank;
  plan->n_ranks = n_ranks;
  plan->n_parts = schedules[rank].n_parts;
  for (int r = 0; r < n_ranks; r++) {
    uint32_t n_exposed, n_private;
    plan->chunks.push_back(place_chunks(schedules[r], program, tiled, &n_exposed, &n_private));
    plan->max_exposed = std::max(plan->max_exposed, n_exposed);
    const uint32_t second = first_of_second_stage(program[r]);
    if (tiled && plan->n_posts[r] > 0 && second < program[r].size()) plan->n_stages = 2;
    if (r == rank) {
      plan->second_stage = second;
      plan->own.n_private = n_private;
    }
  }
  for (const auto& list : program) {
    for (const Instr& i : list) {
      plan->n_rounds = std::max(plan->n_rounds, i.round + 1);
      for (Ref x : i.srcs) {
        const ChunkPlace& c = plan->chunks[x.rank][x.chunk];
        const bool shared_scratch = !c.is_in && !c.is_out && i.dsts[0].rank != x.rank;
        if (!tiled && shared_scratch) plan->direct_ok = false;
      }
    }
  }
  const std::vector<Instr>& mine = program[rank];
  plan->one_shot = tiled && plan->n_parts == 1 && plan->max_exposed == 1 && mine.size() == 1 &&
                   mine[0].complete && mine[0].dsts.size() == 1 && n_ranks > 1 &&
                   std::all_of(plan->n_posts.begin(), plan->n_posts.end(), [](uint32_t k) { return k == 0; });
  plan->own.chunks = plan->chunks[rank];
  plan->own.n_posts = plan->n_posts[rank];
  plan->own.exit_waits = std::move(exit_waits[rank]);
  plan->own.instrs = std::move(program[rank]);
  if (plan->n_stages == 1) plan->second_stage = static_cast<uint32_t>(plan->own.instrs.size());
  *out = std::move(plan);
  return Status();
}

}  // namespace pycomm
