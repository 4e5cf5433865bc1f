// Status: success is free and empty; a failure keeps its code and gathers context on the way up.
#include "base/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>

#include "base/dtype.h"

namespace pycomm {
namespace {

Status fails() { return Status::error(Code::kTimeout, "rank 3 did not answer"); }

Status passes_on(bool* went_on) {
  PYCOMM_RETURN_IF_ERROR(Status());
  PYCOMM_RETURN_IF_ERROR(fails());
  *went_on = true;
  return Status();
}

TEST(Status, SuccessIsOnePointerAndEmpty) {
  static_assert(sizeof(Status) == sizeof(void*));
  const Status ok;
  EXPECT_TRUE(ok.ok());
  EXPECT_EQ(ok.code(), Code::kOk);
  EXPECT_EQ(ok.message(), "");
  EXPECT_TRUE(Status().within("anything").ok());
}

TEST(Status, FailureTravelsUpWithContext) {
  bool went_on = false;
  const Status failure = passes_on(&went_on).within("all_reduce #7");
  EXPECT_FALSE(went_on);
  EXPECT_EQ(failure.code(), Code::kTimeout);
  EXPECT_EQ(failure.message(), "all_reduce #7: rank 3 did not answer");
}

TEST(Status, CloneIsIndependent) {
  Status first = fails();
  const Status copy = first.clone();
  const Status moved = std::move(first).within("later");
  EXPECT_EQ(copy.message(), "rank 3 did not answer");
  EXPECT_EQ(moved.message(), "later: rank 3 did not answer");
  EXPECT_TRUE(Status().clone().ok());
}

TEST(Status, FromErrnoSaysWhatAndWhy) {
  const Status failure = Status::from_errno("open /x", ENOENT);
  EXPECT_EQ(failure.code(), Code::kSystem);
  EXPECT_EQ(failure.message(), "open /x: No such file or directory");
}

TEST(Format, IsNeverTruncated) {
  const std::string longer_than_any_buffer(100000, 'x');
  EXPECT_EQ(format("%s %d", longer_than_any_buffer.c_str(), 7), longer_than_any_buffer + " 7");
  EXPECT_EQ(format("%s", ""), "");
}

TEST(DType, EveryCodeHasANameAndTheSizeOfItsBits) {
  // The number in a name is the width in bits, as in torch; bool is one byte.
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string name = dtype_name(dtype);
    ASSERT_NE(name, "?") << i;
    if (dtype == DType::kBool) {
      EXPECT_EQ(dtype_size(dtype), 1u);
      continue;
    }
    const size_t digits = name.find_first_of("0123456789");
    ASSERT_NE(digits, std::string::npos) << name;
    EXPECT_EQ(dtype_size(dtype) * 8, std::stoul(name.substr(digits))) << name;
  }
  EXPECT_STREQ(dtype_name(static_cast<DType>(kNumDTypes)), "?");
  for (int i = 0; i < kNumReduceOps; ++i) EXPECT_STRNE(reduce_op_name(static_cast<ReduceOp>(i)), "?");
  EXPECT_STREQ(reduce_op_name(static_cast<ReduceOp>(kNumReduceOps)), "?");
}

}  // namespace
}  // namespace pycomm
