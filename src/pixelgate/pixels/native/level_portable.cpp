// The reference level: plain C++, for every processor.
#include "kernels.hpp"

#include <cstring>

namespace pixelgate {
namespace {

inline uint8_t clip(int32_t value) { return uint8_t(value < 0 ? 0 : value > 255 ? 255 : value); }

template <int CHANNELS>
void horizontal_row(const Axis &axis, const uint8_t *row, uint8_t *target) {
    const int32_t half = 1 << (axis.precision - 1);
    for (int x = 0; x < axis.size_out; x++) {
        const uint8_t *in = row + size_t(axis.start[x]) * CHANNELS;
        const int32_t *weights = axis.weights + size_t(x) * axis.taps;
        int32_t red = half, green = half, blue = half;
        for (int k = 0; k < axis.count[x]; k++, in += CHANNELS) {
            red += weights[k] * in[0];
            green += weights[k] * in[1];
            blue += weights[k] * in[2];
        }
        *target++ = clip(red >> axis.precision);
        *target++ = clip(green >> axis.precision);
        *target++ = clip(blue >> axis.precision);
    }
}

void horizontal(const Horizontal &pass, const uint8_t *const *rows, uint8_t *const *targets, int count) {
    for (int i = 0; i < count; i++) {
        if (pass.channels == 3)
            horizontal_row<3>(*pass.paired.axis, rows[i], targets[i]);
        else
            horizontal_row<4>(*pass.paired.axis, rows[i], targets[i]);
    }
}

void vertical(const PairedAxis &paired, int y, const uint8_t *const *taps, uint8_t *target, size_t bytes) {
    const Axis &axis = *paired.axis;
    const int32_t *weights = axis.weights + size_t(y) * axis.taps;
    constexpr size_t BLOCK = 64;  // sums stay in registers or the nearest cache while the taps go by
    for (size_t begin = 0; begin < bytes; begin += BLOCK) {
        const size_t size = bytes - begin < BLOCK ? bytes - begin : BLOCK;
        int32_t sums[BLOCK];
        for (size_t x = 0; x < size; x++) sums[x] = 1 << (axis.precision - 1);
        for (int k = 0; k < axis.count[y]; k++) {
            const uint8_t *in = taps[k] + begin;
            const int32_t weight = weights[k];
            for (size_t x = 0; x < size; x++) sums[x] += weight * in[x];
        }
        for (size_t x = 0; x < size; x++) target[begin + x] = clip(sums[x] >> axis.precision);
    }
}

template <class Value>
void patch_row(const PatchStore &store, int grid_y, const uint8_t *strip, size_t pitch) {
    const Job &job = *store.job;
    const int patch = job.patch;
    const size_t plane = size_t(patch) * patch;
    for (int grid_x = 0; grid_x < store.grid_width; grid_x++) {
        Value *target = reinterpret_cast<Value *>(patch_address(store, grid_y, grid_x));
        for (int c = 0; c < 3; c++, target += job.temporal * plane) {
            const Value *table = static_cast<const Value *>(job.table) + c * 256;
            for (int y = 0; y < patch; y++) {
                const uint8_t *in = strip + y * pitch + size_t(grid_x) * patch * 3 + c;
                for (int x = 0; x < patch; x++) target[y * patch + x] = table[in[x * 3]];
            }
            for (int t = 1; t < job.temporal; t++) std::memcpy(target + t * plane, target, plane * sizeof(Value));
        }
    }
}

void patches(const PatchStore &store, int grid_y, const uint8_t *strip, size_t pitch) {
    switch (store.element_bytes) {
        case 1: return patch_row<uint8_t>(store, grid_y, strip, pitch);
        case 2: return patch_row<uint16_t>(store, grid_y, strip, pitch);
        default: return patch_row<uint32_t>(store, grid_y, strip, pitch);
    }
}

}  // namespace

const Level portable_level = {horizontal, vertical, patches};

}  // namespace pixelgate
