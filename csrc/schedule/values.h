// Symbolic values: reduction trees over ranks' inputs, each distinct tree stored once (hash-consing).
//
// A Value is an index, so equal trees are equal numbers. A leaf is the input of one rank for one part. Each
// node carries the set of ranks under it as bits; `sum` is only called on disjoint sets, so the set is also
// the count. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace pycomm {

using Value = int32_t;
inline constexpr Value kNothing = -1;  // never written

class Values {
 public:
  explicit Values(int n_ranks) : n_ranks_(n_ranks), n_words_((static_cast<size_t>(n_ranks) + 63) / 64) {}

  Value leaf(int rank, uint32_t part);
  Value sum(Value left, Value right);
  // T(lo, hi) of docs/numerics.md over the inputs of one part.
  Value canonical(int lo, int hi, uint32_t part);

  int in_both(Value a, Value b) const;  // a rank whose input is in both; -1 when there is none
  int missing(Value v) const;           // a rank whose input is not in v; -1 when all are
  // "((0+1)+2)": ranks, without the part; long trees are cut short.
  std::string text(Value v) const;

 private:
  struct Node {
    int32_t left, right;  // a leaf: rank and -1
    uint32_t part;
  };
  Value make(int32_t left, int32_t right, uint32_t part, bool is_leaf);
  const uint64_t* set(Value v) const { return sets_.data() + static_cast<size_t>(v) * n_words_; }
  void append_text(Value v, std::string* out) const;

  struct Key {
    uint64_t operands, part;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& k) const {
      return static_cast<size_t>((k.operands * 0x9e3779b97f4a7c15u) ^ (k.part * 0xc2b2ae3d27d4eb4fu) ^
                                 (k.operands >> 29));
    }
  };

  int n_ranks_;
  size_t n_words_;
  std::vector<Node> nodes_;
  std::vector<uint64_t> sets_;  // n_words_ for each node
  std::unordered_map<Key, Value, KeyHash> index_;
};

}  // namespace pycomm
