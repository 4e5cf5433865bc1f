// send and recv with ranks on other hosts (engine/p2p.h): the Net carries the cells, the same mailbox finds
// the recv that a message is for.
//
// A message is copied when it is sent, in pieces of at most kPieceBytes, and its work ends when the last
// piece has left this process. Order of locks: the Net's, then PointToPoint's.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "engine/mailbox.h"
#include "transport/tcp/net.h"

namespace pycomm {

class PointToPoint;

class Far final : public Sink {
 public:
  static constexpr size_t kPieceBytes = size_t{256} << 10;
  static constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 48;

  static constexpr uint16_t kGreeting = 2;  // in flags; 1: the first piece of a message

  struct Message {
    int peer, tag;
    double deadline_s;
    std::shared_ptr<Work> work;
    size_t n_left;  // pieces
  };

  Far(PointToPoint& p2p, std::shared_ptr<Net> net, uint64_t id, std::vector<int> job_ranks);
  ~Far() override;
  void leave(const std::string& why);

  // Before a recv waits for q (-1: any): there must be a connection whose end tells that q has gone, and q
  // must answer when it has left the communicator.
  void greet(int q);
  void send(Message message, DType dtype, const std::byte* data, size_t n_bytes);
  const std::string& name(int q) const { return net_->name(job_ranks_[static_cast<size_t>(q)]); }
  // What the rank does: asks, and tells what is known by now. Without PointToPoint's mutex.
  std::string ask(int q);

  // ---- with PointToPoint's mutex ----
  // Why nothing can go to or come from this rank any more; null: it can.
  const std::string* gone(int q) const;
  const std::map<uint64_t, Message>& messages() const { return messages_; }
  void fail_all(const Status& status);

  std::byte* landing(int, const MessageHeader&) override { return nullptr; }
  void arrived(int peer, const MessageHeader& header, std::byte* data,
               std::unique_ptr<std::byte[]> own) override;
  void sent(uint64_t token) override;
  void lost(int peer, const Status& why) override;
  void left(int peer, const std::string& why) override;
  void tick() override {}

 private:
  bool fits(size_t from, const MessageHeader& header) const;

  PointToPoint& p2p_;
  std::shared_ptr<Net> net_;
  uint64_t id_;
  std::vector<int> job_ranks_;
  std::map<int, int> ranks_;  // by job rank
  std::map<uint64_t, Message> messages_;
  uint64_t next_token_ = 1;
  std::vector<uint64_t> to_come_;  // of the message that is coming from each rank
  std::map<int, std::string> gone_;
  std::vector<bool> greeted_;  // by rank
};

}  // namespace pycomm
