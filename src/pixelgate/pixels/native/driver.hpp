// Runs one picture's work at one level.
#pragma once

#include "kernels.hpp"

namespace pixelgate {

void run(const Job &job, const Level &level);  // throws std::bad_alloc

}  // namespace pixelgate
