#include "engine/mailbox.h"

#include <cstring>
#include <new>

namespace pycomm {

Status Arrival::deliver(int rank) const {
  const Posted& p = posted;
  p.work->source = from;
  if (p.n_bytes != n_bytes || p.dtype != dtype) {
    return Status::error(
        Code::kMismatch,
        format("recv(source %d, tag %d) on rank %d expects %zu bytes of %s, the message has %zu bytes of %s",
               from, tag, rank, p.n_bytes, dtype_name(p.dtype), n_bytes, dtype_name(dtype)));
  }
  if (own != nullptr) std::memcpy(p.data, own.get(), n_bytes);
  return Status();
}

std::shared_ptr<Arrival> Mailbox::take(const Posted& recv) {
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    if (!recv.wants((*it)->from, (*it)->tag)) continue;
    std::shared_ptr<Arrival> a = std::move(*it);
    unexpected_.erase(it);
    a->matched = true;
    a->posted = recv;
    return a;
  }
  posted_.push_back(recv);
  return nullptr;
}

// The first cell of a message: to the first recv that wants it, else kept.
void Mailbox::begin(int from, const CellHeader& header) {
  auto a = std::make_shared<Arrival>();
  a->from = from;
  a->tag = header.tag;
  a->dtype = static_cast<DType>(header.dtype);
  a->n_bytes = header.message_bytes;
  arriving_[static_cast<size_t>(from)] = a;
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if (!it->wants(from, a->tag)) continue;
    a->matched = true;
    a->posted = std::move(*it);
    posted_.erase(it);
    if (a->posted.n_bytes == a->n_bytes) a->data = a->posted.data;
    break;
  }
  if (!a->matched) unexpected_.push_back(a);
  if (a->data == nullptr && a->n_bytes > 0) {
    // Not touched before the bytes are there: a message that is only announced takes no memory.
    a->own.reset(new (std::nothrow) std::byte[a->n_bytes]);
    if (a->own == nullptr) throw std::bad_alloc();
    a->data = a->own.get();
  }
}

std::shared_ptr<Arrival> Mailbox::add(int from, const CellHeader& header, const std::byte* data) {
  std::shared_ptr<Arrival>& slot = arriving_[static_cast<size_t>(from)];
  if (header.first) begin(from, header);
  Arrival& a = *slot;
  if (header.n_bytes > 0) std::memcpy(a.data + a.have, data, header.n_bytes);
  a.have += header.n_bytes;
  return a.whole() ? std::move(slot) : nullptr;
}

void Mailbox::fail_all(const Status& status) {
  for (const Posted& p : posted_) p.work->finish(status.clone());
  posted_.clear();
  for (auto& a : arriving_) {
    if (a != nullptr && a->matched) a->posted.work->finish(status.clone());
    a = nullptr;
  }
}

}  // namespace pycomm
