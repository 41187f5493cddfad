// Source of the arithmetic: torch 2.14 UpSampleKernel.cpp, as its AVX2 and AVX-512 builds compute it: some products are
// fused with the addition that follows, and which ones decides the last bit.
#include "bicubic_f32.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace pixelgate {
namespace {

constexpr float A = -0.75f;

struct Tap {
    int32_t index[4];
    float weight[4];
};

float near_weight(float x) { return std::fma(A + 2.0f, x, -(A + 3.0f)) * x * x + 1.0f; }
float far_weight(float x) { return std::fma(std::fma(A, x, -5.0f * A), x, 8.0f * A) * x - 4.0f * A; }

std::vector<Tap> taps_of(int32_t size_in, int32_t size_out) {
    std::vector<Tap> taps(size_out);
    const float scale = float(size_in) / float(size_out);
    for (int32_t i = 0; i < size_out; i++) {
        const float real = std::fma(scale, float(i) + 0.5f, -0.5f);
        const int32_t first = std::min(int32_t(std::floor(real)), size_in - 1);
        const float t = std::min(std::max(real - float(first), 0.0f), 1.0f);
        const float rest = 1.0f - t;
        const float weights[4] = {far_weight(t + 1.0f), near_weight(t), near_weight(rest), far_weight(rest + 1.0f)};
        for (int32_t k = 0; k < 4; k++) {
            taps[i].index[k] = std::min(std::max(first + k - 1, 0), size_in - 1);
            taps[i].weight[k] = weights[k];
        }
    }
    return taps;
}

float blend(float a, float b, float c, float d, const float *w) {
    return std::fma(d, w[3], std::fma(c, w[2], std::fma(a, w[0], b * w[1])));
}

}  // namespace

void bicubic_f32(const BicubicJob &job) {
    const std::vector<Tap> rows = taps_of(job.height_in, job.height), columns = taps_of(job.width_in, job.width);
    for (int c = 0; c < 3; c++) {
        const float *table = job.table + c * 256;
        float *out = job.out + int64_t(c) * job.height * job.width;
        for (const Tap &row : rows) {
            const uint8_t *source[4];
            for (int k = 0; k < 4; k++) source[k] = job.pixels + row.index[k] * job.row_stride + c;
            for (const Tap &column : columns) {
                float across[4];
                for (int k = 0; k < 4; k++) {
                    float value[4];
                    for (int j = 0; j < 4; j++) value[j] = table[source[k][column.index[j] * 3]];
                    across[k] = blend(value[0], value[1], value[2], value[3], column.weight);
                }
                *out++ = blend(across[0], across[1], across[2], across[3], row.weight);
            }
        }
    }
}

}  // namespace pixelgate
