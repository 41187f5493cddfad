// What the driver and the instruction-set levels share. Plain data and function pointers only: a level's file is
// compiled with its own flags, so no inline library code may be instantiated there and leak into the other levels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pixelgate {

// One resampled axis: out[i] = clip((half + sum_k weights[i * taps + k] * in[start[i] + k]) >> precision).
struct Axis {
    int32_t size_in, size_out;
    int32_t taps, precision;
    const int32_t *start, *count, *weights;
};

// An axis regrouped for a level's instructions, made once and used for many pictures. Read-only and shared.
struct Weights {
    Axis axis;         // its arrays belong to the preparation
    int32_t channels;  // bytes per source pixel of a horizontal axis; 0 for a vertical one
    bool narrow;       // every weight fits 16 bits

    // Two taps per multiply-add (16 bit x 16 bit): weight = high * 4096 + low, or low alone where narrow.
    // paired[(i * pairs + p) * 2] holds the low halves of taps 2p and 2p + 1, the next entry their high halves.
    const int32_t *paired;
    int32_t pairs;
    int32_t safe;  // horizontal: outputs before this one read whole 16-byte blocks inside the row and may write 4 bytes

    // Four taps per multiply-add (8 bit x 8 bit): weight = sum over d of digit[d] * 256^d, balanced. Vertical axes have
    // this form where they are not narrow.
    int32_t digits;
    int32_t half, shift;       // out = clip((half * 256^(digits - 1) + sum) >> shift)
    const int32_t *groups;     // vertical: first group of row i; one more entry at the end
    const int32_t *quads;      // vertical: per group and digit, the digits of four taps
    const int32_t *steps;      // horizontal: first step of each block of 16 output bytes; one more entry at the end
    const int32_t *offsets;    // horizontal: per step, where its 64 source bytes begin
    const uint8_t *programme;  // horizontal: per step 64 byte indices, then per digit 64 weights
};

enum Layout : int32_t { PIXELS = 0, PATCHES = 1, TILES = 2 };
enum Element : int32_t { UINT8 = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// One picture's work. Mirrored field by field in binding.py; kernels.py has checked every value.
struct Job {
    const uint8_t *pixels;  // rows of RGB, or of RGB and one ignored byte
    int64_t row_stride;     // bytes, positive
    int32_t channels;       // bytes per source pixel: 3 or 4
    int32_t vertical_first;
    int32_t height_in, width_in, height, width;  // before and after resampling
    const Weights *rows, *columns;               // null: the axis does not change

    int32_t layout;
    int32_t element;
    void *out;
    int64_t strides[3];  // bytes. PIXELS: row. TILES: tile, plane, row.

    int32_t patch, merge, temporal;                  // PATCHES
    int32_t canvas_height, canvas_width, top, left;  // TILES: where the picture lies on the canvas
    int32_t tile_height, tile_width;                 // TILES: how the canvas is cut
    uint8_t fill[4];                                 // TILES: the canvas around the picture, RGB

    int32_t has_arithmetic;
    const void *table;                      // [3][256] elements
    float divisor, subtract[3], divide[3];  // (x / divisor - subtract) / divide gives the table bit for bit
};

// A division by d as x * high + x * low, where high + low is 1 / d to 48 bits and only the end is rounded: this is the
// quotient, correctly rounded, unless it lies extremely close to the middle between two floats.
struct Divisor {
    float high, low;
};

// The job's arithmetic without divisions. Levels compare all that it gives with the table before they rely on it.
struct Normalisation {
    bool divides_first;
    Divisor divisor, divide[3];
    float subtract[3];
};

// Finished rows on their way into the output.
struct Store {
    const Job *job;
    size_t element_bytes;
    uint8_t *split_table;  // the table in the level's own form, 64-byte aligned

    Normalisation normalisation;
    bool computes;  // the level's arithmetic gives the table bit for bit

    // PATCHES
    int32_t grid_width;
    size_t plane_bytes, patch_bytes;  // of a channel, of all channels and their temporal copies
    uint8_t *stage;  // STAGES patches of 3 planes, `stage_pitch` bytes apart: made here, written as lines
    size_t stage_pitch;
    bool stream;
};

// A block of output rows on its way through the vertical pass.
struct RowBlock {
    int first, count;            // rows of the axis
    const uint8_t *const *taps;  // each row's tap rows, three valid spare entries behind them, `pitch` entries a row
    size_t pitch;
    uint8_t *const *targets;
};

// Part of a row of patches.
struct Run {
    int y, begin, end;  // grid coordinates; whole groups of `merge` patches
};

struct Level {
    // Resample `count` rows: source rows of `channels` bytes per pixel to rows of RGB.
    void (*horizontal)(const Weights &, const uint8_t *const *rows, uint8_t *const *targets, int count);
    // Bytes `begin` to `end` of a block's rows; bytes before `begin` may be computed again.
    void (*vertical)(const Weights &, const RowBlock &, size_t begin, size_t end);
    // Patches from a strip of RGB rows that may be read SLACK bytes past each row's end.
    void (*patches)(const Store &, const Run &, const uint8_t *strip, size_t pitch);
    // A run of RGB pixels, readable SLACK bytes past its end, to one run of elements per channel.
    void (*planes)(const Store &, const uint8_t *pixels, int count, uint8_t *const *targets);
    // Fills split_table, which has as many bytes as the table, and `computes`; null where a level uses neither.
    void (*prepare)(Store &);
    // Orders streamed stores before what the caller does next; null where a level does not stream.
    void (*finish_streaming)();
};

constexpr size_t SLACK = 192;
constexpr int STAGES = 3;
constexpr size_t STAGE_GAP = 128;  // between planes of the stage, and before the first

extern const Level portable_level;
#if defined(__x86_64__)
extern const Level avx2_level;
extern const Level avx512_level;
#endif

static inline uint8_t clip(int32_t value) { return uint8_t(value < 0 ? 0 : value > 255 ? 255 : value); }

// One output pixel, tap by tap: for the end of a row, where a whole block would reach beyond it.
template <int CHANNELS>
static inline void horizontal_pixel(const Axis &axis, int x, const uint8_t *row, uint8_t *target) {
    const uint8_t *in = row + size_t(axis.start[x]) * CHANNELS;
    const int32_t *weights = axis.weights + size_t(x) * axis.taps;
    for (int c = 0; c < 3; c++) {
        int32_t sum = 1 << (axis.precision - 1);
        for (int k = 0; k < axis.count[x]; k++) sum += weights[k] * in[k * CHANNELS + c];
        target[x * 3 + c] = clip(sum >> axis.precision);
    }
}

static inline size_t bytes_of(int32_t element) { return element == UINT8 ? 1 : element == FLOAT32 ? 4 : 2; }

// Patches of a grid row are contiguous in runs of `merge`; this is where the patch at (y, x) begins.
static inline uint8_t *patch_address(const Store &store, int y, int x) {
    const int merge = store.job->merge;
    const int64_t block = int64_t(y / merge) * (store.grid_width / merge) + x / merge;
    const int64_t index = block * merge * merge + int64_t(y % merge) * merge + x % merge;
    return static_cast<uint8_t *>(store.job->out) + index * int64_t(store.patch_bytes);
}

}  // namespace pixelgate
