// Words of another process, as they may be printed.
#include "base/text.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

TEST(Text, ValidUtf8StaysAsItIs) {
  for (const char* text :
       {"", "no memory", "one\n\ttwo", "Grüße", "\u20ac", "\U0001F600", "\uFFFD", "\U0010FFFF"})
    EXPECT_EQ(printable(text, 100), text);
}

TEST(Text, WhatIsNoUtf8BecomesQuestionMarks) {
  EXPECT_EQ(printable("a\xff"
                      "b",
                      100),
            "a?b");
  EXPECT_EQ(printable("\x80", 100), "?");  // continues nothing
  EXPECT_EQ(printable("\xc3", 100), "?");  // ends early
  EXPECT_EQ(printable("\xe2\x82", 100), "??");
  EXPECT_EQ(printable("\xe2\x82x", 100), "??x");
  EXPECT_EQ(printable("\xc0\xaf", 100), "??");            // '/' in two bytes
  EXPECT_EQ(printable("\xe0\x80\xaf", 100), "???");       // in three
  EXPECT_EQ(printable("\xf0\x80\x80\xaf", 100), "????");  // in four
  EXPECT_EQ(printable("\xed\xa0\x80", 100), "???");       // half of a surrogate pair
  EXPECT_EQ(printable("\xf4\x90\x80\x80", 100), "????");  // above U+10FFFF
  EXPECT_EQ(printable("\xf8\x88\x80\x80\x80", 100), "?????");
}

TEST(Text, ControlCharactersToo) {
  EXPECT_EQ(printable("\x1b[2J\r\x7f", 100), "?[2J??");
  EXPECT_EQ(printable(std::string_view("a\0b", 3), 100), "a?b");
}

TEST(Text, NoCharacterIsCutAtTheLimit) {
  EXPECT_EQ(printable("aü", 3), "aü");
  EXPECT_EQ(printable("aü", 2), "a");
  EXPECT_EQ(printable("abc", 0), "");
  EXPECT_EQ(printable("\xff\xff\xff", 2), "??");
}

}  // namespace
}  // namespace pycomm
