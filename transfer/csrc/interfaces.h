// SPDX-License-Identifier: Apache-2.0
// (name, address) of every network interface.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvrail {

std::vector<std::pair<std::string, std::string>> interfaces();

}  // namespace kvrail
