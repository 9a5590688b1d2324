// SPDX-License-Identifier: Apache-2.0
// The text that a UCX print function writes to a stream.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

namespace kvrail {

template <typename Print>
std::string captured(Print print) {
  char* text = nullptr;
  std::size_t length = 0;
  FILE* stream = open_memstream(&text, &length);
  if (stream == nullptr) throw std::bad_alloc();
  print(stream);
  std::fclose(stream);
  std::string result(text, length);
  std::free(text);
  return result;
}

}  // namespace kvrail
