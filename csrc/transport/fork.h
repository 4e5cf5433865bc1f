// What a forked child must not have: descriptors of ours that, open there, would hide this process's death.
//
// A peer learns of a death by the hang-up of a socket, among other ways, and that comes only when the last
// copy of its descriptor is closed: a DataLoader worker lives on after its parent. So whatever owns
// descriptors is *watched*: pthread_atfork holds its lock while the process forks, and has it close them in
// the child. In the child, fork_generation() differs from what it was when the object was made: it is the
// parent's, and only its destructor may be called.
//
// Threads: any. Never call watch_forks or forget_forks with the object's lock held.
#pragma once

#include <cstdint>

namespace pycomm {

class Forkable {
 public:
  virtual ~Forkable() = default;
  virtual void lock_for_fork() = 0;
  virtual void unlock_after_fork() = 0;  // in the parent and, behind close_in_child, in the child
  virtual void close_in_child() = 0;
};

// Locks are taken in this order: a Net's thread may look at a Node.
enum class ForkOrder : uint8_t { kNet, kNode };

void watch_forks(Forkable* object, ForkOrder order);
void forget_forks(Forkable* object);
uint64_t fork_generation();

}  // namespace pycomm
