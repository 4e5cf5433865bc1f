// Reduction trees stored once each, with the set of ranks under every node.
#include "schedule/values.h"

#include <bit>

#include "schedule/builder.h"

namespace pycomm {

Value Values::make(int32_t left, int32_t right, uint32_t part, bool is_leaf) {
  const Key key{(static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right),
                part};
  const auto [it, is_new] = index_.try_emplace(key, static_cast<Value>(nodes_.size()));
  if (!is_new) return it->second;
  nodes_.push_back({left, right, part});
  const size_t at = sets_.size();
  sets_.resize(at + n_words_);
  if (is_leaf) {
    sets_[at + static_cast<size_t>(left) / 64] |= uint64_t{1} << (left % 64);
  } else {
    for (size_t w = 0; w < n_words_; w++) sets_[at + w] = set(left)[w] | set(right)[w];
  }
  return it->second;
}

Value Values::leaf(int rank, uint32_t part) { return make(rank, -1, part, true); }

Value Values::sum(Value left, Value right) { return make(left, right, nodes_[left].part, false); }

Value Values::canonical(int lo, int hi, uint32_t part) {
  if (hi - lo == 1) return leaf(lo, part);
  const int mid = lo + canonical_left(hi - lo);
  const Value left = canonical(lo, mid, part);
  return sum(left, canonical(mid, hi, part));
}

int Values::in_both(Value a, Value b) const {
  for (size_t w = 0; w < n_words_; w++) {
    const uint64_t both = set(a)[w] & set(b)[w];
    if (both != 0) return static_cast<int>(w) * 64 + std::countr_zero(both);
  }
  return -1;
}

int Values::missing(Value v) const {
  for (int r = 0; r < n_ranks_; r++) {
    if (((set(v)[r / 64] >> (r % 64)) & 1) == 0) return r;
  }
  return -1;
}

void Values::append_text(Value v, std::string* out) const {
  if (out->size() > 200) return;
  const Node& node = nodes_[v];
  if (node.right < 0) {
    *out += std::to_string(node.left);
    return;
  }
  *out += '(';
  append_text(node.left, out);
  *out += '+';
  append_text(node.right, out);
  *out += ')';
}

std::string Values::text(Value v) const {
  std::string out;
  append_text(v, &out);
  if (out.size() > 200) out = out.substr(0, 200) + "…";
  return out;
}

}  // namespace pycomm
