// What is logged, and how a line looks.
#include "base/log.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

std::string logged(LogLevel chosen, LogLevel level, const std::string& sentence) {
  set_log_level(chosen);
  testing::internal::CaptureStderr();
  log_line(level, sentence);
  set_log_level(LogLevel::kWarning);
  return testing::internal::GetCapturedStderr();
}

TEST(Log, LevelsChoose) {
  EXPECT_EQ(logged(LogLevel::kWarning, LogLevel::kWarning, "one"), "pycomm: one\n");
  EXPECT_EQ(logged(LogLevel::kWarning, LogLevel::kInfo, "one"), "");
  EXPECT_EQ(logged(LogLevel::kInfo, LogLevel::kInfo, "one"), "pycomm: one\n");
  EXPECT_EQ(logged(LogLevel::kOff, LogLevel::kWarning, "one"), "");
  EXPECT_EQ(logged(LogLevel::kInfo, LogLevel::kOff, "one"), "");
}

TEST(Log, NoWordsOfAPeerCommandTheTerminal) {
  EXPECT_EQ(logged(LogLevel::kWarning, LogLevel::kWarning, "a\x1b[2J\nb"), "pycomm: a?[2J?b\n");
}

TEST(Log, LevelsByName) {
  LogLevel level = LogLevel::kInfo;
  EXPECT_TRUE(parse_log_level("", &level).ok());
  EXPECT_EQ(level, LogLevel::kWarning);
  EXPECT_TRUE(parse_log_level("info", &level).ok());
  EXPECT_EQ(level, LogLevel::kInfo);
  const Status s = parse_log_level("loud", &level);
  EXPECT_EQ(s.code(), Code::kValue);
  EXPECT_EQ(s.message(), "PYCOMM_LOG_LEVEL must be off, warning or info, got \"loud\"");
  EXPECT_EQ(level, LogLevel::kInfo);
}

}  // namespace
}  // namespace pycomm
