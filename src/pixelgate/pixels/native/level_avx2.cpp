// AVX2: 8-bit pixels widened to 16 bits, two taps per multiply-add, two rows or 32 bytes at a time.
#if defined(__AVX2__)
#include "kernels.hpp"
#include "lines.hpp"

#include <cstring>
#include <immintrin.h>

namespace pixelgate {
namespace {

// A call in these places would spill every register.
#define INLINE __attribute__((always_inline)) inline

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

// An output pixel's sums in 32-bit lanes, R G B and one without meaning: of the upper row, then of the lower row.
struct Sums {
    __m256i low, high;
};

template <int CHANNELS, bool NARROW>
INLINE void add_four_taps(Sums &sums, const int32_t *weights, const uint8_t *upper, const uint8_t *lower) {
    const __m256i block = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(upper)), load16(lower), 1);
    const __m256i a = _mm256_shuffle_epi8(block, tap_pair<CHANNELS>(0));
    const __m256i b = _mm256_shuffle_epi8(block, tap_pair<CHANNELS>(2));
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(a, _mm256_set1_epi32(weights[0])));
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(b, _mm256_set1_epi32(weights[2])));
    if (NARROW) return;
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(a, _mm256_set1_epi32(weights[1])));
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(b, _mm256_set1_epi32(weights[3])));
}

template <int CHANNELS, bool NARROW>
INLINE __m256i pixel(const Weights &columns, int x, __m256i half, __m128i shift, const uint8_t *upper,
                     const uint8_t *lower) {
    const size_t offset = size_t(columns.axis.start[x]) * CHANNELS;
    const int32_t *weights = columns.paired + size_t(x) * columns.pairs * 2;
    Sums sums{half, _mm256_setzero_si256()};
    add_four_taps<CHANNELS, NARROW>(sums, weights, upper + offset, lower + offset);
    for (int k = 4; k < columns.axis.count[x]; k += 4) {
        const size_t at = offset + size_t(k) * CHANNELS;
        add_four_taps<CHANNELS, NARROW>(sums, weights + k, upper + at, lower + at);
    }
    if (!NARROW) sums.low = _mm256_add_epi32(sums.low, _mm256_slli_epi32(sums.high, 12));
    return _mm256_sra_epi32(sums.low, shift);
}

template <int CHANNELS, bool NARROW>
void horizontal_rows(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets) {
    const uint8_t *upper = rows[0], *lower = rows[1];
    const __m256i half = _mm256_set1_epi32(1 << (columns.axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(columns.axis.precision);
    const char none = -1;
    const __m256i close_up = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, none, none, none, none));
    // four pixels at a time, while there is room for 16 bytes: the last four are overwritten by the next pixels
    const int room = columns.axis.size_out - 2, end = columns.safe < room ? columns.safe : room;
    int x = 0;
    for (; x + 4 <= end; x += 4) {
        const __m256i a = pixel<CHANNELS, NARROW>(columns, x, half, shift, upper, lower);
        const __m256i b = pixel<CHANNELS, NARROW>(columns, x + 1, half, shift, upper, lower);
        const __m256i c = pixel<CHANNELS, NARROW>(columns, x + 2, half, shift, upper, lower);
        const __m256i d = pixel<CHANNELS, NARROW>(columns, x + 3, half, shift, upper, lower);
        const __m256i words = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        const __m256i bytes = _mm256_shuffle_epi8(words, close_up);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(targets[0] + x * 3), _mm256_castsi256_si128(bytes));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(targets[1] + x * 3), _mm256_extracti128_si256(bytes, 1));
    }
    for (; x < columns.axis.size_out; x++) {
        horizontal_pixel<CHANNELS>(columns.axis, x, upper, targets[0]);
        horizontal_pixel<CHANNELS>(columns.axis, x, lower, targets[1]);
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

// Adds two tap rows' 32 bytes at x, times their weights, to sums in four quarters.
template <bool NARROW>
inline void add_pair(__m256i *low, __m256i *high, const uint8_t *const *taps, const int32_t *weights, size_t x) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i a = load32(taps[0] + x), b = load32(taps[1] + x);
    const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
    const __m256i quarter[4] = {_mm256_unpacklo_epi8(ab_low, zero), _mm256_unpackhi_epi8(ab_low, zero),
                                _mm256_unpacklo_epi8(ab_high, zero), _mm256_unpackhi_epi8(ab_high, zero)};
    const __m256i low_weights = _mm256_set1_epi32(weights[0]), high_weights = _mm256_set1_epi32(weights[1]);
    for (int i = 0; i < 4; i++) {
        low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(quarter[i], low_weights));
        if (!NARROW) high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(quarter[i], high_weights));
    }
}

// 32 bytes of a row at a time; the last block overlaps its neighbour, so nothing outside the row is touched.
template <bool NARROW, class AddTaps>
inline void vertical_row(const Axis &axis, uint8_t *target, size_t begin, size_t end, AddTaps add_taps) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(axis.precision);
    for (; begin < end; begin += 32) {
        const size_t x = begin + 32 <= end ? begin : end - 32;
        __m256i low[4] = {half, half, half, half}, high[4] = {zero, zero, zero, zero};
        add_taps(low, high, x);
        for (int i = 0; i < 4; i++) {
            if (!NARROW) low[i] = _mm256_add_epi32(low[i], _mm256_slli_epi32(high[i], 12));
            low[i] = _mm256_sra_epi32(low[i], shift);
        }
        const __m256i words[2] = {_mm256_packs_epi32(low[0], low[1]), _mm256_packs_epi32(low[2], low[3])};
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + x), _mm256_packus_epi16(words[0], words[1]));
    }
}

template <bool NARROW>
void vertical_rows(const Weights &rows, const RowBlock &block, size_t begin, size_t end) {
    for (int i = 0; i < block.count; i++) {
        const int y = block.first + i;
        const int32_t *weights = rows.paired + size_t(y) * rows.pairs * 2;
        const uint8_t *const *taps = block.taps + i * block.pitch;
        const int pairs = (rows.axis.count[y] + 1) / 2;
        if (pairs == 2) {  // nearly always, in a resize to about the same size: all its operands stay in registers
            const uint8_t *const four[4] = {taps[0], taps[1], taps[2], taps[3]};
            const int32_t two[4] = {weights[0], weights[1], weights[2], weights[3]};
            vertical_row<NARROW>(rows.axis, block.targets[i], begin, end, [&](__m256i *low, __m256i *high, size_t x) {
                add_pair<NARROW>(low, high, four, two, x);
                add_pair<NARROW>(low, high, four + 2, two + 2, x);
            });
            continue;
        }
        vertical_row<NARROW>(rows.axis, block.targets[i], begin, end, [&](__m256i *low, __m256i *high, size_t x) {
            for (int p = 0; p < pairs; p++) add_pair<NARROW>(low, high, taps + p * 2, weights + p * 2, x);
        });
    }
}

void vertical(const Weights &rows, const RowBlock &block, size_t begin, size_t end) {
    if (end < 32) return portable_level.vertical(rows, block, begin, end);
    if (rows.narrow) return vertical_rows<true>(rows, block, begin, end);
    vertical_rows<false>(rows, block, begin, end);
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
    bool divides_first;
    __m256 divisor[2], subtract, divide[2];  // of a divisor its high and its low part
};

inline void set_constants(const Store &store, Normalise *constants) {
    const Normalisation &n = store.normalisation;
    for (int c = 0; c < 3; c++)
        constants[c] = {n.divides_first,
                        {_mm256_set1_ps(n.divisor.high), _mm256_set1_ps(n.divisor.low)},
                        _mm256_set1_ps(n.subtract[c]),
                        {_mm256_set1_ps(n.divide[c].high), _mm256_set1_ps(n.divide[c].low)}};
}

inline __m256 quotient(__m256 x, const __m256 *divisor) {
    return _mm256_fmadd_ps(x, divisor[0], _mm256_mul_ps(x, divisor[1]));
}

inline __m256 normalise(__m128i bytes, const Normalise &n) {
    __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    if (n.divides_first) x = quotient(x, n.divisor);
    return quotient(_mm256_sub_ps(x, n.subtract), n.divide);
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

template <class As>
bool gives_table(const Store &store) {
    Normalise constants[3];
    set_constants(store, constants);
    uint8_t made[3 * 256 * As::bytes], *target = made;
    for (int c = 0; c < 3; c++) {
        __m128i pixels = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0);
        for (int x = 0; x < 256; x += 8, target += 8 * As::bytes) {
            As::put(target, pixels, constants[c]);
            pixels = _mm_add_epi8(pixels, _mm_set1_epi8(8));
        }
    }
    return std::memcmp(made, store.job->table, sizeof(made)) == 0;
}

void prepare(Store &store) {
    const Job &job = *store.job;
    if (job.element == UINT8) store.computes = true;
    if (job.element == FLOAT32) store.computes = job.has_arithmetic && gives_table<AsFloat32>(store);
    if (job.element == BFLOAT16) store.computes = job.has_arithmetic && gives_table<AsBfloat16>(store);
}

// A mask of 64 bytes whose first `held` are set begins 64 - held bytes in.
struct Held {
    alignas(64) uint8_t bytes[128];

    constexpr Held() : bytes{} {
        for (int i = 0; i < 64; i++) bytes[i] = 0xFF;
    }
};
constexpr Held HELD;

class Line {
  public:
    inline void load(const uint8_t *source) {
        low_ = load32(source);
        high_ = load32(source + 32);
    }
    inline void load(size_t held, const uint8_t *tail, const uint8_t *source) {
        const uint8_t *mask = HELD.bytes + 64 - held;
        low_ = _mm256_blendv_epi8(load32(source), load32(tail), load32(mask));
        high_ = _mm256_blendv_epi8(load32(source + 32), load32(tail + 32), load32(mask + 32));
    }
    inline void save(uint8_t *target) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(target), low_);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + 32), high_);
    }
    inline void stream(uint8_t *target) const {
        _mm256_stream_si256(reinterpret_cast<__m256i *>(target), low_);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(target + 32), high_);
    }

  private:
    __m256i low_, high_;
};

// For patches 8 to 16 pixels wide: a patch row is two overlapping groups of eight.
template <class As>
struct Planewise {
    Normalise constants[3];
    __m128i to_second;
    int patch;
    size_t pitch, stage_pitch;

    Planewise(const Store &store, size_t strip_pitch)
        : patch(store.job->patch), pitch(strip_pitch), stage_pitch(store.stage_pitch) {
        set_constants(store, constants);
        alignas(16) uint8_t order[16];
        for (int i = 0; i < 16; i++) order[i] = uint8_t(i < 8 ? patch - 8 + i : 0x80);
        to_second = load16(order);
    }

    inline void operator()(const uint8_t *pixels, uint8_t *stage) const {
        const size_t row = patch * As::bytes, second = (patch - 8) * As::bytes;
        for (int y = 0; y < patch; y++, pixels += pitch) {
            const Planes planes = deinterleave(pixels);
            for (int c = 0; c < 3; c++) {
                uint8_t *target = stage + c * stage_pitch + y * row;
                As::put(target, planes.channel[c], constants[c]);
                As::put(target + second, _mm_shuffle_epi8(planes.channel[c], to_second), constants[c]);
            }
        }
    }
};

template <class As>
void write(const Store &store, const Run &run, const uint8_t *strip, size_t pitch) {
    const Planewise<As> make(store, pitch);
    if (store.stream) return write_patches<Line, true>(store, run, strip, make);
    write_patches<Line, false>(store, run, strip, make);
}

void patches(const Store &store, const Run &run, const uint8_t *strip, size_t pitch) {
    const Job &job = *store.job;
    if (!store.computes || job.patch < 8 || job.patch > 16) return portable_level.patches(store, run, strip, pitch);
    switch (store.element_bytes) {
        case 1: return write<AsUint8>(store, run, strip, pitch);
        case 2: return write<AsBfloat16>(store, run, strip, pitch);
        default: return write<AsFloat32>(store, run, strip, pitch);
    }
}

// -------------------------------------------------------------------------------------------------------- planes

// Whole groups of 16 pixels; the last one overlaps its neighbour.
template <class As>
void plane_rows(const Store &store, const uint8_t *pixels, int count, uint8_t *const *targets) {
    Normalise constants[3];
    set_constants(store, constants);
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
    if (!store.computes || count < 16) return portable_level.planes(store, pixels, count, targets);
    switch (store.element_bytes) {
        case 1: return plane_rows<AsUint8>(store, pixels, count, targets);
        case 2: return plane_rows<AsBfloat16>(store, pixels, count, targets);
        default: return plane_rows<AsFloat32>(store, pixels, count, targets);
    }
}

void finish_streaming() { _mm_sfence(); }

}  // namespace

const Level avx2_level = {horizontal, vertical, patches, planes, prepare, finish_streaming};

}  // namespace pixelgate
#endif
