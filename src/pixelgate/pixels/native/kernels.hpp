// What the driver and the instruction-set levels share. Plain data and function pointers only: a level's file is
// compiled with its own flags, so no inline library code may be instantiated there and leak into the other levels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pixelgate {

// One resampled axis: out[i] = clip((half + sum_k weights[i * taps + k] * in[start[i] + k]) >> precision).
// weights == nullptr: the axis does not change.
struct Axis {
    int32_t size_in, size_out;
    int32_t taps, precision;
    const int32_t *start, *count, *weights;
};

enum Layout : int32_t { PIXELS = 0, PATCHES = 1 };
enum Element : int32_t { UINT8 = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// One picture's work. Mirrored field by field in kernels.py, which has checked every value.
struct Job {
    const uint8_t *pixels;  // rows of RGB, or of RGB and one ignored byte
    int64_t row_stride;     // bytes, positive
    int32_t channels;       // bytes per source pixel: 3 or 4
    int32_t vertical_first;
    Axis rows, columns;

    int32_t layout;
    int32_t element;
    void *out;
    int64_t out_stride;  // PIXELS: bytes per row

    int32_t patch, merge, temporal;  // PATCHES
    int32_t has_arithmetic;
    const void *table;                  // [3][256] elements
    float divisor, subtract[3], divide[3];  // (x / divisor - subtract) / divide gives the table bit for bit
};

// Weights regrouped for instructions that multiply and add two 16-bit taps at once: weight = high * 4096 + low.
// weights[(i * pairs + p) * 2] holds the low halves of taps 2p and 2p + 1, the next entry their high halves.
struct PairedAxis {
    const Axis *axis;
    const int32_t *weights;
    int32_t pairs;
    bool narrow;  // every weight fits 16 bits: the low entry is the weight itself, the high one is zero
};

struct Horizontal {
    PairedAxis paired;
    int32_t channels;
    int32_t safe;  // outputs before this one read whole 16-byte blocks inside the row and may write 4 bytes
};

// A finished strip of `patch` resized rows on its way into the output.
struct PatchStore {
    const Job *job;
    int32_t grid_width;
    size_t element_bytes, patch_bytes;
    uint8_t *stage;  // room for `merge` patches, 64-byte aligned: filled in cache, then streamed past it
    bool stream;
};

struct Level {
    // Resample `count` rows: source rows of `channels` bytes per pixel to rows of RGB.
    void (*horizontal)(const Horizontal &, const uint8_t *const *rows, uint8_t *const *targets, int count);
    // Output row y from its tap rows; the pointer list has one valid spare entry at its end.
    void (*vertical)(const PairedAxis &, int y, const uint8_t *const *taps, uint8_t *target, size_t bytes);
    // Grid row `grid_y` from a strip of RGB rows that may be read 64 bytes past each row's end.
    void (*patches)(const PatchStore &, int grid_y, const uint8_t *strip, size_t pitch);
};

extern const Level portable_level;
#if defined(__x86_64__)
extern const Level avx2_level;
#endif

// Patches of a grid row are contiguous in runs of `merge`; this is where the patch at (y, x) begins.
static inline uint8_t *patch_address(const PatchStore &store, int y, int x) {
    const int merge = store.job->merge;
    const int64_t block = int64_t(y / merge) * (store.grid_width / merge) + x / merge;
    const int64_t index = block * merge * merge + int64_t(y % merge) * merge + x % merge;
    return static_cast<uint8_t *>(store.job->out) + index * int64_t(store.patch_bytes);
}

}  // namespace pixelgate
