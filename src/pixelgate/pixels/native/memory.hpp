// Aligned memory with an owner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace pixelgate {

struct Free {
    void operator()(uint8_t *p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

inline Memory allocate(size_t bytes) {
    void *p = nullptr;
    if (posix_memalign(&p, 64, std::max<size_t>(bytes, 64)) != 0) throw std::bad_alloc();
    return Memory(static_cast<uint8_t *>(p));
}

}  // namespace pixelgate
