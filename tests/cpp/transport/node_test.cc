// The rendezvous: who finds whom, and what a wrong or missing process is told, each within a bounded time.
// Ranks are threads, except where a rank must die: that one is a forked process.
#include "transport/node.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "transport/unix_socket.h"

namespace pycomm {
namespace {

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

class NodeTest : public testing::Test {
 protected:
  void SetUp() override {
    setenv("PYCOMM_ARENA_MAX", "16777216", 1);
    char name[] = "/tmp/pycomm-node-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    parent_ = name;
    folder_ = parent_ + "/run";
  }
  void TearDown() override {
    const std::string remove = "rm -rf '" + parent_ + "'";
    EXPECT_EQ(std::system(remove.c_str()), 0);
  }
  Status join(int rank, int size, std::shared_ptr<Node>* out, double timeout_s = 10) const {
    return Node::join(folder_, rank, size, 4096, timeout_s, nullptr, out);
  }
  bool exists(const std::string& name) const {
    struct stat st;
    return lstat((folder_ + name).c_str(), &st) == 0;
  }
  void await_socket(int rank) const {
    while (!exists(format("/%d.sock", rank))) std::this_thread::yield();
  }

  std::string parent_, folder_;
};

TEST_F(NodeTest, RanksFindEachOtherAndSeeEachOthersMemory) {
  for (int n : {1, 2, 3, 8}) {
    std::vector<std::shared_ptr<Node>> nodes(static_cast<size_t>(n));
    std::vector<std::thread> threads;
    for (int r = 0; r < n; r++) {
      threads.emplace_back([&, r] {
        const Status s = join(r, n, &nodes[static_cast<size_t>(r)]);
        ASSERT_TRUE(s.ok()) << s.message();
        nodes[static_cast<size_t>(r)]->arena()->base()[100] = static_cast<std::byte>(r + 1);
      });
    }
    for (std::thread& t : threads) t.join();
    for (const auto& node : nodes) {
      ASSERT_NE(node, nullptr);
      EXPECT_EQ(node->size(), n);
      for (int q = 0; q < n; q++) {
        EXPECT_EQ(node->base(q)[100], static_cast<std::byte>(q + 1));
        EXPECT_EQ(node->base(q)[101], std::byte{0});
        EXPECT_EQ(node->pid(q), getpid());
        EXPECT_TRUE(node->alive(q));
      }
    }
    EXPECT_FALSE(exists("")) << "the run folder is left behind";
  }
}

TEST_F(NodeTest, WhoHasNoMemoryForItsArenaTellsTheOthers) {
  constexpr size_t kTooMuch = size_t{1} << 30;  // more than PYCOMM_ARENA_MAX
  std::vector<std::string> said(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; r++) {
    threads.emplace_back([&, r] {
      std::shared_ptr<Node> node;
      const Status s = Node::join(folder_, r, 3, r == 1 ? kTooMuch : 4096, 10, nullptr, &node);
      EXPECT_EQ(s.code(), Code::kSystem);
      EXPECT_EQ(node, nullptr);
      said[static_cast<size_t>(r)] = s.message();
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(said[1].rfind("shared arena: ", 0), 0u) << said[1];
  for (const size_t r : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(said[r].rfind("rank 1 (host ", 0), 0u) << said[r];
    EXPECT_NE(said[r].find("cannot join: shared arena: "), std::string::npos) << said[r];
  }
  EXPECT_FALSE(exists("")) << "the run folder is left behind";
}

TEST_F(NodeTest, TheOnlyRankOfAHostLeavesNoFolder) {
  ASSERT_EQ(mkdir(folder_.c_str(), 0700), 0);
  std::shared_ptr<Node> node;
  const Status s = join(0, 1, &node);
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_FALSE(exists(""));
}

TEST_F(NodeTest, AMissingRankIsNamed) {
  std::shared_ptr<Node> nodes[2];
  Status results[2];
  const double start = now_s();
  std::thread one([&] { results[1] = join(2, 4, &nodes[1], 0.5); });
  results[0] = join(0, 4, &nodes[0], 0.5);
  one.join();
  EXPECT_LT(now_s() - start, 5);
  for (const Status& s : results) {
    EXPECT_EQ(s.code(), Code::kTimeout);
    EXPECT_NE(s.message().find("rank(s) 1, 3 to join"), std::string::npos) << s.message();
  }
  EXPECT_FALSE(exists("/0.sock"));
}

TEST_F(NodeTest, TwoProcessesOfOneRankAreTold) {
  std::shared_ptr<Node> nodes[3];
  Status first;
  std::thread a([&] { first = join(0, 2, &nodes[0]); });
  await_socket(0);
  const Status twin = join(0, 2, &nodes[1]);
  EXPECT_EQ(twin.code(), Code::kSystem);
  EXPECT_NE(twin.message().find("two processes have the same rank"), std::string::npos) << twin.message();
  // The twin must not have harmed the rank that was there first.
  const Status other = join(1, 2, &nodes[2]);
  a.join();
  EXPECT_TRUE(first.ok()) << first.message();
  EXPECT_TRUE(other.ok()) << other.message();
}

TEST_F(NodeTest, AnotherIdeaOfTheSizeIsToldToBoth) {
  std::shared_ptr<Node> nodes[2];
  Status first;
  const double start = now_s();
  std::thread a([&] { first = join(0, 2, &nodes[0]); });
  const Status second = join(1, 3, &nodes[1]);
  a.join();
  EXPECT_LT(now_s() - start, 5);
  EXPECT_EQ(first.code(), Code::kValue);
  EXPECT_NE(first.message().find("WORLD_SIZE"), std::string::npos) << first.message();
  EXPECT_FALSE(second.ok());
  EXPECT_NE(second.message().find("rank 0"), std::string::npos) << second.message();
}

// A stranger of the same user who connects must not end the job, whatever he says or does not say.
TEST_F(NodeTest, StrangersOnTheSocketAreTurnedAway) {
  std::shared_ptr<Node> nodes[2];
  Status first;
  std::thread a([&] { first = join(0, 2, &nodes[0]); });
  await_socket(0);
  const std::string path = folder_ + "/0.sock";
  const auto connect = [&] {
    int fd = -1;
    for (const double end = now_s() + 5; fd < 0 && now_s() < end;) EXPECT_TRUE(unix_connect(path, &fd).ok());
    EXPECT_GE(fd, 0);
    return fd;
  };
  const int silent = connect();  // says nothing, stays
  ::close(connect());            // hangs up at once
  const int no_fd = connect();   // garbage without a descriptor
  EXPECT_GT(write(no_fd, "GET / HTTP/1.1\r\n", 16), 0);
  const int with_fd = connect();  // garbage with one, of a Hello's length and of others
  const char junk[200] = "garbage";
  EXPECT_TRUE(send_with_fd(with_fd, junk, 32, STDIN_FILENO).ok());
  const int longer = connect();
  EXPECT_TRUE(send_with_fd(longer, junk, sizeof junk, STDIN_FILENO).ok());
  const Status second = join(1, 2, &nodes[1]);
  a.join();
  EXPECT_TRUE(first.ok()) << first.message();
  EXPECT_TRUE(second.ok()) << second.message();
  for (int fd : {silent, no_fd, with_fd, longer}) ::close(fd);
}

TEST_F(NodeTest, AFolderOpenToOthersIsRefused) {
  ASSERT_EQ(mkdir(folder_.c_str(), 0700), 0);
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  std::shared_ptr<Node> node;
  const Status s = join(0, 2, &node, 1);
  EXPECT_EQ(s.code(), Code::kSystem);
  EXPECT_NE(s.message().find("0700"), std::string::npos) << s.message();
}

TEST_F(NodeTest, AFolderNameTooLongForASocketIsRefused) {
  folder_ = parent_ + "/" + std::string(120, 'x');
  std::shared_ptr<Node> node;
  const Status s = join(0, 2, &node, 1);
  EXPECT_EQ(s.code(), Code::kValue);
  EXPECT_NE(s.message().find("PYCOMM_RUN_DIR"), std::string::npos) << s.message();
}

TEST_F(NodeTest, CtrlCEndsTheWait) {
  std::shared_ptr<Node> node;
  const double start = now_s();
  const Status s = Node::join(
      folder_, 0, 2, 4096, 10, [] { return Status::error(Code::kInterrupt, "interrupted"); }, &node);
  EXPECT_EQ(s.code(), Code::kInterrupt);
  EXPECT_LT(now_s() - start, 5);
}

TEST_F(NodeTest, ADeathIsSeenAndAForkedChildKnowsItself) {
  int to_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    ::close(to_child[1]);
    std::shared_ptr<Node> node;
    if (!join(1, 2, &node).ok()) _exit(3);
    node->arena()->base()[200] = std::byte{9};
    char c;
    while (read(to_child[0], &c, 1) > 0) {
    }
    _exit(0);
  }
  ::close(to_child[0]);
  std::shared_ptr<Node> node;
  const Status s = join(0, 2, &node);
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(node->pid(1), child);
  EXPECT_TRUE(node->alive(1));
  EXPECT_FALSE(node->forked());
  const pid_t grandchild = fork();
  if (grandchild == 0) _exit(node->forked() ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(grandchild, &status, 0), grandchild);
  EXPECT_EQ(status, 0) << "a forked child must know that the node is not its own";
  ASSERT_EQ(kill(child, SIGSTOP), 0);
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  EXPECT_STREQ(node->process_state(1), "stopped");
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(node->alive(1));
  EXPECT_STREQ(node->process_state(1), "dead");
  ::close(to_child[1]);
}

}  // namespace
}  // namespace pycomm
