// torch's float32 bicubic without antialias, for the global views of Phi.
#pragma once

#include <cstdint>

namespace pixelgate {

// Mirrored field by field in kernels.py.
struct BicubicJob {
    const uint8_t *pixels;  // rows of RGB
    int64_t row_stride;     // bytes
    int32_t height_in, width_in, height, width;
    const float *table;  // [3][256]: what a byte is before it is interpolated
    float *out;          // [3][height][width]
};

void bicubic_f32(const BicubicJob &job);  // throws std::bad_alloc

}  // namespace pixelgate
