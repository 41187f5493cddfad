// Every processor: 128-bit vectors where the baseline has them (SSE2 on x86-64, NEON on ARM64), plain C++ elsewhere.
#include "kernels.hpp"

#include <cstring>

#if defined(PIXELGATE_SCALAR)  // for testing the last resort on any processor
#elif defined(__SSE2__)
#define USE_SSE2
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define USE_NEON
#include <arm_neon.h>
#endif

namespace pixelgate {
namespace {

// Sums of four neighbouring bytes, and what they need of a processor: to add two taps times a pair of 16-bit weights.
#if defined(USE_SSE2)

using Sums = __m128i;

inline Sums splat(int32_t value) { return _mm_set1_epi32(value); }
inline Sums add_shifted(Sums low, Sums high) { return _mm_add_epi32(low, _mm_slli_epi32(high, 12)); }

inline __m128i load4(const uint8_t *p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm_cvtsi32_si128(bytes);
}

inline Sums add4(Sums sums, const uint8_t *a, const uint8_t *b, int32_t pair) {
    const __m128i mixed = _mm_unpacklo_epi8(load4(a), load4(b));
    return _mm_add_epi32(sums, _mm_madd_epi16(_mm_unpacklo_epi8(mixed, _mm_setzero_si128()), splat(pair)));
}

inline void add16(Sums *sums, const uint8_t *a, const uint8_t *b, int32_t pair) {
    const __m128i zero = _mm_setzero_si128(), weights = splat(pair);
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(a));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i *>(b));
    const __m128i low = _mm_unpacklo_epi8(x, y), high = _mm_unpackhi_epi8(x, y);
    const __m128i quarters[4] = {_mm_unpacklo_epi8(low, zero), _mm_unpackhi_epi8(low, zero),
                                 _mm_unpacklo_epi8(high, zero), _mm_unpackhi_epi8(high, zero)};
    for (int i = 0; i < 4; i++) sums[i] = _mm_add_epi32(sums[i], _mm_madd_epi16(quarters[i], weights));
}

inline void finish4(uint8_t *target, Sums sums, int precision) {
    const __m128i words = _mm_sra_epi32(sums, _mm_cvtsi32_si128(precision));
    const __m128i bytes = _mm_packus_epi16(_mm_packs_epi32(words, words), _mm_setzero_si128());
    const int32_t four = _mm_cvtsi128_si32(bytes);
    std::memcpy(target, &four, 4);
}

inline void finish16(uint8_t *target, const Sums *sums, int precision) {
    const __m128i shift = _mm_cvtsi32_si128(precision);
    __m128i words[4];
    for (int i = 0; i < 4; i++) words[i] = _mm_sra_epi32(sums[i], shift);
    const __m128i low = _mm_packs_epi32(words[0], words[1]), high = _mm_packs_epi32(words[2], words[3]);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(target), _mm_packus_epi16(low, high));
}

#elif defined(USE_NEON)

using Sums = int32x4_t;

inline Sums splat(int32_t value) { return vdupq_n_s32(value); }
inline Sums add_shifted(Sums low, Sums high) { return vaddq_s32(low, vshlq_n_s32(high, 12)); }

inline int16x4_t load4(const uint8_t *p) {
    uint32_t bytes;
    std::memcpy(&bytes, p, 4);
    return vreinterpret_s16_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}

inline Sums add4(Sums sums, const uint8_t *a, const uint8_t *b, int32_t pair) {
    sums = vmlal_n_s16(sums, load4(a), int16_t(pair));
    return vmlal_n_s16(sums, load4(b), int16_t(pair >> 16));
}

inline void add16(Sums *sums, const uint8_t *a, const uint8_t *b, int32_t pair) {
    const uint8_t *rows[2] = {a, b};
    const int16_t weights[2] = {int16_t(pair), int16_t(pair >> 16)};
    for (int i = 0; i < 2; i++) {
        const uint8x16_t bytes = vld1q_u8(rows[i]);
        const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
        const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
        sums[0] = vmlal_n_s16(sums[0], vget_low_s16(low), weights[i]);
        sums[1] = vmlal_n_s16(sums[1], vget_high_s16(low), weights[i]);
        sums[2] = vmlal_n_s16(sums[2], vget_low_s16(high), weights[i]);
        sums[3] = vmlal_n_s16(sums[3], vget_high_s16(high), weights[i]);
    }
}

inline uint8x8_t clipped(Sums a, Sums b, int precision) {
    const int32x4_t shift = vdupq_n_s32(-precision);
    return vqmovun_s16(vcombine_s16(vqmovn_s32(vshlq_s32(a, shift)), vqmovn_s32(vshlq_s32(b, shift))));
}

inline void finish4(uint8_t *target, Sums sums, int precision) {
    const uint8x8_t bytes = clipped(sums, sums, precision);
    std::memcpy(target, &bytes, 4);
}

inline void finish16(uint8_t *target, const Sums *sums, int precision) {
    vst1q_u8(target, vcombine_u8(clipped(sums[0], sums[1], precision), clipped(sums[2], sums[3], precision)));
}

#else

// Unsigned, because sums of half weights wrap around on their way to a result that fits.
struct Sums {
    uint32_t lane[4];
};

inline Sums splat(int32_t value) {
    const uint32_t lane = uint32_t(value);
    return {{lane, lane, lane, lane}};
}

inline Sums add_shifted(Sums low, Sums high) {
    for (int i = 0; i < 4; i++) low.lane[i] += high.lane[i] << 12;
    return low;
}

inline Sums add4(Sums sums, const uint8_t *a, const uint8_t *b, int32_t pair) {
    for (int i = 0; i < 4; i++) sums.lane[i] += uint32_t(a[i] * int16_t(pair) + b[i] * int16_t(pair >> 16));
    return sums;
}

inline void add16(Sums *sums, const uint8_t *a, const uint8_t *b, int32_t pair) {
    for (int i = 0; i < 4; i++) sums[i] = add4(sums[i], a + i * 4, b + i * 4, pair);
}

inline void finish4(uint8_t *target, Sums sums, int precision) {
    for (int i = 0; i < 4; i++) target[i] = clip(int32_t(sums.lane[i]) >> precision);
}

inline void finish16(uint8_t *target, const Sums *sums, int precision) {
    for (int i = 0; i < 4; i++) finish4(target + i * 4, sums[i], precision);
}

#endif

template <int CHANNELS, bool NARROW>
void horizontal_row(const Weights &columns, const uint8_t *row, uint8_t *target) {
    const Axis &axis = columns.axis;
    const Sums half = splat(1 << (axis.precision - 1));
    for (int x = 0; x < columns.safe; x++) {
        Sums low = half, high = splat(0);
        const uint8_t *in = row + size_t(axis.start[x]) * CHANNELS;
        const int32_t *weights = columns.paired + size_t(x) * columns.pairs * 2;
        for (int k = 0; k < axis.count[x]; k += 2, in += 2 * CHANNELS, weights += 2) {
            low = add4(low, in, in + CHANNELS, weights[0]);
            if (!NARROW) high = add4(high, in, in + CHANNELS, weights[1]);
        }
        // the fourth byte is overwritten by the next pixel
        finish4(target + x * 3, NARROW ? low : add_shifted(low, high), axis.precision);
    }
    for (int x = columns.safe; x < axis.size_out; x++) horizontal_pixel<CHANNELS>(axis, x, row, target);
}

void horizontal(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets, int count) {
    using Row = void (*)(const Weights &, const uint8_t *, uint8_t *);
    const Row variants[2][2] = {{horizontal_row<3, false>, horizontal_row<3, true>},
                                {horizontal_row<4, false>, horizontal_row<4, true>}};
    const Row run = variants[columns.channels == 4][columns.narrow];
    for (int i = 0; i < count; i++) run(columns, rows[i], targets[i]);
}

template <bool NARROW>
void vertical_row(const Weights &rows, int y, const uint8_t *const *taps, uint8_t *target, size_t begin, size_t end) {
    const Axis &axis = rows.axis;
    const int32_t *weights = rows.paired + size_t(y) * rows.pairs * 2;
    const int pairs = (axis.count[y] + 1) / 2;
    const Sums half = splat(1 << (axis.precision - 1)), zero = splat(0);
    for (; begin < end; begin += 16) {
        // the last block overlaps its neighbour, so nothing outside the row is touched
        const size_t x = begin + 16 <= end ? begin : end - 16;
        Sums low[4] = {half, half, half, half}, high[4] = {zero, zero, zero, zero};
        for (int p = 0; p < pairs; p++) {
            add16(low, taps[p * 2] + x, taps[p * 2 + 1] + x, weights[p * 2]);
            if (!NARROW) add16(high, taps[p * 2] + x, taps[p * 2 + 1] + x, weights[p * 2 + 1]);
        }
        if (!NARROW)
            for (int i = 0; i < 4; i++) low[i] = add_shifted(low[i], high[i]);
        finish16(target + x, low, axis.precision);
    }
}

// For rows of less than a vector.
void vertical_bytes(const Weights &rows, int y, const uint8_t *const *taps, uint8_t *target, size_t begin, size_t end) {
    const Axis &axis = rows.axis;
    for (size_t x = begin; x < end; x++) {
        int32_t sum = 1 << (axis.precision - 1);
        for (int k = 0; k < axis.count[y]; k++) sum += axis.weights[size_t(y) * axis.taps + k] * taps[k][x];
        target[x] = clip(sum >> axis.precision);
    }
}

void vertical(const Weights &rows, const RowBlock &block, size_t begin, size_t end) {
    const auto run = end < 16 ? vertical_bytes : rows.narrow ? vertical_row<true> : vertical_row<false>;
    for (int i = 0; i < block.count; i++)
        run(rows, block.first + i, block.taps + i * block.pitch, block.targets[i], begin, end);
}

template <class Value>
void look_up(const Value *table, const uint8_t *pixels, int count, Value *target) {
    for (int x = 0; x < count; x++) target[x] = table[pixels[x * 3]];
}

template <class Value>
void patch_row(const Store &store, const Run &run, const uint8_t *strip, size_t pitch) {
    const Job &job = *store.job;
    const int patch = job.patch;
    const size_t plane = size_t(patch) * patch;
    for (int grid_x = run.begin; grid_x < run.end; grid_x++) {
        Value *target = reinterpret_cast<Value *>(patch_address(store, run.y, grid_x));
        for (int c = 0; c < 3; c++, target += job.temporal * plane) {
            const Value *table = static_cast<const Value *>(job.table) + c * 256;
            const uint8_t *pixels = strip + size_t(grid_x) * patch * 3 + c;
            for (int y = 0; y < patch; y++) look_up(table, pixels + y * pitch, patch, target + y * patch);
            for (int t = 1; t < job.temporal; t++) std::memcpy(target + t * plane, target, plane * sizeof(Value));
        }
    }
}

void patches(const Store &store, const Run &run, const uint8_t *strip, size_t pitch) {
    switch (store.element_bytes) {
        case 1: return patch_row<uint8_t>(store, run, strip, pitch);
        case 2: return patch_row<uint16_t>(store, run, strip, pitch);
        default: return patch_row<uint32_t>(store, run, strip, pitch);
    }
}

template <class Value>
void plane_rows(const Store &store, const uint8_t *pixels, int count, uint8_t *const *targets) {
    for (int c = 0; c < 3; c++) {
        const Value *table = static_cast<const Value *>(store.job->table) + c * 256;
        look_up(table, pixels + c, count, reinterpret_cast<Value *>(targets[c]));
    }
}

void planes(const Store &store, const uint8_t *pixels, int count, uint8_t *const *targets) {
    switch (store.element_bytes) {
        case 1: return plane_rows<uint8_t>(store, pixels, count, targets);
        case 2: return plane_rows<uint16_t>(store, pixels, count, targets);
        default: return plane_rows<uint32_t>(store, pixels, count, targets);
    }
}

}  // namespace

const Level portable_level = {horizontal, vertical, patches, planes, nullptr, nullptr};

}  // namespace pixelgate
