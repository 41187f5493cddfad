// AVX2: 8-bit pixels widened to 16 bits, two taps per multiply-add, two rows or 32 bytes at a time.
#if defined(__AVX2__)
#include "kernels.hpp"
#include "lines.hpp"

#include <cstring>
#include <immintrin.h>

namespace pixelgate {
namespace {

inline __m128i load16(const uint8_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
inline __m256i load32(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// ---------------------------------------------------------------------------------------------------- horizontal

// Places taps t and t + 1 of a pixel block side by side as 16-bit values: R R' G G' B B' 0 0.
template <int CHANNELS>
inline __m256i tap_pair(int t) {
    const char a = char(t * CHANNELS), b = char(a + CHANNELS), none = -1;
    const __m128i order = _mm_setr_epi8(a, none, b, none, char(a + 1), none, char(b + 1), none, char(a + 2), none,
                                        char(b + 2), none, none, none, none, none);
    return _mm256_broadcastsi128_si256(order);
}

template <int CHANNELS, bool NARROW>
void horizontal_rows(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets) {
    const Axis &axis = columns.axis;
    const __m256i half = _mm256_set1_epi32(1 << (axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(axis.precision);
    const __m256i first = tap_pair<CHANNELS>(0), second = tap_pair<CHANNELS>(2);
    const uint8_t *upper = rows[0], *lower = rows[1];
    for (int x = 0; x < columns.safe; x++) {
        __m256i low = half, high = _mm256_setzero_si256();
        size_t offset = size_t(axis.start[x]) * CHANNELS;
        const int32_t *w = columns.paired + size_t(x) * columns.pairs * 2;
        for (int k = 0; k < axis.count[x]; k += 4, offset += 4 * CHANNELS, w += 4) {
            const __m256i block =
                _mm256_inserti128_si256(_mm256_castsi128_si256(load16(upper + offset)), load16(lower + offset), 1);
            const __m256i a = _mm256_shuffle_epi8(block, first), b = _mm256_shuffle_epi8(block, second);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(a, _mm256_set1_epi32(w[0])));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(b, _mm256_set1_epi32(w[2])));
            if (!NARROW) {
                high = _mm256_add_epi32(high, _mm256_madd_epi16(a, _mm256_set1_epi32(w[1])));
                high = _mm256_add_epi32(high, _mm256_madd_epi16(b, _mm256_set1_epi32(w[3])));
            }
        }
        __m256i sum = NARROW ? low : _mm256_add_epi32(low, _mm256_slli_epi32(high, 12));
        sum = _mm256_sra_epi32(sum, shift);
        sum = _mm256_packs_epi32(sum, sum);
        sum = _mm256_packus_epi16(sum, sum);
        const int32_t up = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum));
        const int32_t down = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
        std::memcpy(targets[0] + x * 3, &up, 4);  // the fourth byte is overwritten by the next pixel
        std::memcpy(targets[1] + x * 3, &down, 4);
    }
    for (int x = columns.safe; x < axis.size_out; x++) {
        horizontal_pixel<CHANNELS>(axis, x, upper, targets[0]);
        horizontal_pixel<CHANNELS>(axis, x, lower, targets[1]);
    }
}

void horizontal(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets, int count) {
    using Rows = void (*)(const Weights &, const uint8_t *const *, uint8_t *const *);
    const Rows variants[2][2] = {{horizontal_rows<3, false>, horizontal_rows<3, true>},
                                 {horizontal_rows<4, false>, horizontal_rows<4, true>}};
    const Rows run = variants[columns.channels == 4][columns.narrow];
    for (int i = 0; i < count; i += 2) {
        const int j = i + 1 < count ? i + 1 : i;  // an odd last row is computed twice
        const uint8_t *two_rows[2] = {rows[i], rows[j]};
        uint8_t *two_targets[2] = {targets[i], targets[j]};
        run(columns, two_rows, two_targets);
    }
}

// ------------------------------------------------------------------------------------------------------ vertical

template <bool NARROW>
inline void vertical_block(const Weights &rows, const int32_t *weights, int pairs, const uint8_t *const *taps,
                           uint8_t *target, size_t x) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i half = _mm256_set1_epi32(1 << (rows.axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(rows.axis.precision);
    __m256i low[4] = {half, half, half, half}, high[4] = {zero, zero, zero, zero};
    for (int p = 0; p < pairs; p++) {
        const __m256i a = load32(taps[p * 2] + x), b = load32(taps[p * 2 + 1] + x);
        const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
        const __m256i quarter[4] = {_mm256_unpacklo_epi8(ab_low, zero), _mm256_unpackhi_epi8(ab_low, zero),
                                    _mm256_unpacklo_epi8(ab_high, zero), _mm256_unpackhi_epi8(ab_high, zero)};
        const __m256i low_weights = _mm256_set1_epi32(weights[p * 2]);
        const __m256i high_weights = _mm256_set1_epi32(weights[p * 2 + 1]);
        for (int i = 0; i < 4; i++) {
            low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(quarter[i], low_weights));
            if (!NARROW) high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(quarter[i], high_weights));
        }
    }
    __m256i sum[4];
    for (int i = 0; i < 4; i++)
        sum[i] = _mm256_sra_epi32(NARROW ? low[i] : _mm256_add_epi32(low[i], _mm256_slli_epi32(high[i], 12)), shift);
    const __m256i words[2] = {_mm256_packs_epi32(sum[0], sum[1]), _mm256_packs_epi32(sum[2], sum[3])};
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + x), _mm256_packus_epi16(words[0], words[1]));
}

template <bool NARROW>
void vertical_row(const Weights &rows, int y, const uint8_t *const *taps, uint8_t *target, size_t bytes) {
    const int32_t *weights = rows.paired + size_t(y) * rows.pairs * 2;
    const int pairs = (rows.axis.count[y] + 1) / 2;
    for (size_t x = 0; x + 32 <= bytes; x += 32) vertical_block<NARROW>(rows, weights, pairs, taps, target, x);
    // the last block overlaps its neighbour, so nothing outside the row is touched
    if (bytes % 32) vertical_block<NARROW>(rows, weights, pairs, taps, target, bytes - 32);
}

void vertical(const Weights &rows, int y, const uint8_t *const *taps, uint8_t *target, size_t bytes) {
    if (bytes < 32) return portable_level.vertical(rows, y, taps, target, bytes);
    if (rows.narrow) return vertical_row<true>(rows, y, taps, target, bytes);
    vertical_row<false>(rows, y, taps, target, bytes);
}

// ------------------------------------------------------------------------------------------------------- patches

struct Planes {
    __m128i channel[3];
};

// 16 RGB pixels to three rows of 16 bytes.
inline Planes deinterleave(const uint8_t *p) {
    const __m128i a = load16(p), b = load16(p + 16), c = load16(p + 32);
    const char n = -1;
    const __m128i order[3][3] = {
        {_mm_setr_epi8(0, 3, 6, 9, 12, 15, n, n, n, n, n, n, n, n, n, n),
         _mm_setr_epi8(n, n, n, n, n, n, 2, 5, 8, 11, 14, n, n, n, n, n),
         _mm_setr_epi8(n, n, n, n, n, n, n, n, n, n, n, 1, 4, 7, 10, 13)},
        {_mm_setr_epi8(1, 4, 7, 10, 13, n, n, n, n, n, n, n, n, n, n, n),
         _mm_setr_epi8(n, n, n, n, n, 0, 3, 6, 9, 12, 15, n, n, n, n, n),
         _mm_setr_epi8(n, n, n, n, n, n, n, n, n, n, n, 2, 5, 8, 11, 14)},
        {_mm_setr_epi8(2, 5, 8, 11, 14, n, n, n, n, n, n, n, n, n, n, n),
         _mm_setr_epi8(n, n, n, n, n, 1, 4, 7, 10, 13, n, n, n, n, n, n),
         _mm_setr_epi8(n, n, n, n, n, n, n, n, n, n, 0, 3, 6, 9, 12, 15)},
    };
    Planes planes;
    for (int i = 0; i < 3; i++)
        planes.channel[i] = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, order[i][0]), _mm_shuffle_epi8(b, order[i][1])),
                                         _mm_shuffle_epi8(c, order[i][2]));
    return planes;
}

struct Normalise {
    __m256 divisor, subtract, divide;
    bool divides_first;
};

inline void set_constants(const Job &job, Normalise *constants) {
    for (int c = 0; c < 3; c++)
        constants[c] = {_mm256_set1_ps(job.divisor), _mm256_set1_ps(job.subtract[c]), _mm256_set1_ps(job.divide[c]),
                        job.divisor != 1.0f};
}

inline __m256 normalise(__m128i bytes, const Normalise &n) {
    __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    if (n.divides_first) x = _mm256_div_ps(x, n.divisor);
    return _mm256_div_ps(_mm256_sub_ps(x, n.subtract), n.divide);
}

// Eight finished elements of one kind, from eight bytes to memory.
struct AsUint8 {
    static constexpr size_t bytes = 1;
    static void put(uint8_t *target, __m128i pixels, const Normalise &) {
        _mm_storel_epi64(reinterpret_cast<__m128i *>(target), pixels);
    }
};
struct AsFloat32 {
    static constexpr size_t bytes = 4;
    static void put(uint8_t *target, __m128i pixels, const Normalise &n) {
        _mm256_storeu_ps(reinterpret_cast<float *>(target), normalise(pixels, n));
    }
};
struct AsBfloat16 {
    static constexpr size_t bytes = 2;
    static void put(uint8_t *target, __m128i pixels, const Normalise &n) {
        // to nearest, ties to even: add half of the last kept bit, and one less if that bit is even
        const __m256i bits = _mm256_castps_si256(normalise(pixels, n));
        const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
        const __m256i words = _mm256_srli_epi32(rounded, 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(target), _mm256_castsi256_si128(packed));
    }
};

class Line {
  public:
    inline void load(const uint8_t *source) { copy(bytes_, source); }
    inline void append(size_t held, const uint8_t *source) { copy(bytes_ + held, source); }
    inline void save(uint8_t *target) const { copy(target, bytes_); }
    inline void stream(uint8_t *target) const {
        for (int half = 0; half < 64; half += 32)
            _mm256_stream_si256(reinterpret_cast<__m256i *>(target + half), load32(bytes_ + half));
    }

  private:
    static inline void copy(uint8_t *target, const uint8_t *source) {
        for (int half = 0; half < 64; half += 32)
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + half), load32(source + half));
    }

    alignas(32) uint8_t bytes_[128];  // what is appended to a nearly full line runs over its end
};

// For patches 8 to 16 pixels wide: a patch row is two overlapping groups of eight.
template <class As>
void patch_row(const Store &store, int grid_y, const uint8_t *strip, size_t pitch) {
    const Job &job = *store.job;
    const int patch = job.patch, merge = job.merge;
    const size_t row = patch * As::bytes, second = (patch - 8) * As::bytes;
    alignas(16) uint8_t order[16];
    for (int i = 0; i < 16; i++) order[i] = uint8_t(i < 8 ? patch - 8 + i : 0x80);
    const __m128i to_second = load16(order);
    Normalise constants[3];
    set_constants(job, constants);

    for (int grid_x = 0; grid_x < store.grid_width; grid_x += merge) {
        for (int i = 0; i < merge; i++) {
            const uint8_t *pixels = strip + size_t(grid_x + i) * patch * 3;
            for (int y = 0; y < patch; y++, pixels += pitch) {
                const Planes planes = deinterleave(pixels);
                for (int c = 0; c < 3; c++) {
                    uint8_t *target = store.stage + size_t(i * 3 + c) * store.stage_pitch + y * row;
                    const __m128i tail = _mm_shuffle_epi8(planes.channel[c], to_second);
                    As::put(target, planes.channel[c], constants[c]);
                    As::put(target + second, tail, constants[c]);
                }
            }
        }
        const auto write = store.stream ? write_run<Line, true> : write_run<Line, false>;
        write(patch_address(store, grid_y, grid_x), store.stage, store.stage_pitch, store.plane_bytes, merge * 3,
              job.temporal);
    }
}

void patches(const Store &store, int grid_y, const uint8_t *strip, size_t pitch) {
    const Job &job = *store.job;
    const bool two_groups = job.patch >= 8 && job.patch <= 16;
    if (two_groups && job.element == UINT8) return patch_row<AsUint8>(store, grid_y, strip, pitch);
    if (two_groups && job.has_arithmetic && job.element == FLOAT32)
        return patch_row<AsFloat32>(store, grid_y, strip, pitch);
    if (two_groups && job.has_arithmetic && job.element == BFLOAT16)
        return patch_row<AsBfloat16>(store, grid_y, strip, pitch);
    portable_level.patches(store, grid_y, strip, pitch);
}

// -------------------------------------------------------------------------------------------------------- planes

// Whole groups of 16 pixels; the last one overlaps its neighbour.
template <class As>
void plane_rows(const Job &job, const uint8_t *pixels, int count, uint8_t *const *targets) {
    Normalise constants[3];
    set_constants(job, constants);
    for (int begin = 0; begin < count; begin += 16) {
        const int x = begin + 16 <= count ? begin : count - 16;
        const Planes planes = deinterleave(pixels + size_t(x) * 3);
        for (int c = 0; c < 3; c++) {
            uint8_t *target = targets[c] + x * As::bytes;
            As::put(target, planes.channel[c], constants[c]);
            As::put(target + 8 * As::bytes, _mm_unpackhi_epi64(planes.channel[c], planes.channel[c]), constants[c]);
        }
    }
}

void planes(const Store &store, const uint8_t *pixels, int count, uint8_t *const *targets) {
    const Job &job = *store.job;
    if (count >= 16 && job.element == UINT8) return plane_rows<AsUint8>(job, pixels, count, targets);
    if (count >= 16 && job.has_arithmetic && job.element == FLOAT32)
        return plane_rows<AsFloat32>(job, pixels, count, targets);
    if (count >= 16 && job.has_arithmetic && job.element == BFLOAT16)
        return plane_rows<AsBfloat16>(job, pixels, count, targets);
    portable_level.planes(store, pixels, count, targets);
}

void finish_streaming() { _mm_sfence(); }

}  // namespace

const Level avx2_level = {horizontal, vertical, patches, planes, nullptr, finish_streaming};

}  // namespace pixelgate
#endif
