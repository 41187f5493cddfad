// AVX-512 with VBMI and VNNI: four 8-bit taps per multiply-add, with weights as balanced base-256 digits; where weights
// are narrow, the vertical pass takes two 16-bit taps.
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "store_avx512.hpp"

#include <immintrin.h>

namespace pixelgate {
namespace {

constexpr int ROWS = 4;  // rows resampled together: a step is decoded once for all of them

template <int DIGITS>
inline __m512i recombined(const __m512i *sums, __m128i shift) {
    __m512i total = _mm512_add_epi32(sums[0], _mm512_slli_epi32(sums[1], 8));
    if (DIGITS == 3) total = _mm512_add_epi32(total, _mm512_slli_epi32(sums[DIGITS - 1], 16));
    return _mm512_sra_epi32(total, shift);
}

// ---------------------------------------------------------------------------------------------------- horizontal

// A block of the programme: 16 output bytes of each row, as 32-bit values.
template <int DIGITS>
INLINE void block_of(const Weights &columns, int block, const uint8_t *const *rows, __m512i half, __m128i shift,
                     __m512i words[ROWS]) {
    __m512i sums[ROWS][DIGITS];
    for (int r = 0; r < ROWS; r++)
        for (int d = 0; d < DIGITS; d++) sums[r][d] = d ? _mm512_setzero_si512() : half;
    for (int s = columns.steps[block], end = columns.steps[block + 1]; s < end; s++) {
        const uint8_t *const step = columns.programme + size_t(s) * 64 * (1 + DIGITS);
        const __m512i picks = _mm512_load_si512(step);
        __m512i weights[DIGITS];
        for (int d = 0; d < DIGITS; d++) weights[d] = _mm512_load_si512(step + 64 * (1 + d));
        for (int r = 0; r < ROWS; r++) {
            const __m512i taps = _mm512_permutexvar_epi8(picks, load64(rows[r] + columns.offsets[s]));
            for (int d = 0; d < DIGITS; d++) sums[r][d] = _mm512_dpbusd_epi32(sums[r][d], taps, weights[d]);
        }
    }
    for (int r = 0; r < ROWS; r++) words[r] = recombined<DIGITS>(sums[r], shift);
}

template <int DIGITS>
void horizontal_rows(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets) {
    const __m512i half = _mm512_set1_epi32(1 << (columns.axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(columns.axis.precision);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int64_t bytes = int64_t(columns.axis.size_out) * 3;
    int64_t x = 0;
    int block = 0;
    for (; x + 64 <= bytes; x += 64, block += 4) {
        __m512i a[ROWS], b[ROWS], c[ROWS], d[ROWS];
        block_of<DIGITS>(columns, block, rows, half, shift, a);
        block_of<DIGITS>(columns, block + 1, rows, half, shift, b);
        block_of<DIGITS>(columns, block + 2, rows, half, shift, c);
        block_of<DIGITS>(columns, block + 3, rows, half, shift, d);
        for (int r = 0; r < ROWS; r++) {
            const __m512i low = _mm512_packs_epi32(a[r], b[r]), high = _mm512_packs_epi32(c[r], d[r]);
            const __m512i mixed = _mm512_packus_epi16(low, high);  // within 128-bit lanes
            _mm512_storeu_si512(targets[r] + x, _mm512_permutexvar_epi32(in_order, mixed));
        }
    }
    for (; x < bytes; x += 16, block++) {
        __m512i words[ROWS];
        block_of<DIGITS>(columns, block, rows, half, shift, words);
        for (int r = 0; r < ROWS; r++) {
            const __m512i positive = _mm512_max_epi32(words[r], _mm512_setzero_si512());
            _mm_mask_storeu_epi8(targets[r] + x, __mmask16(first(bytes - x)), _mm512_cvtusepi32_epi8(positive));
        }
    }
}

void horizontal(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets, int count) {
    if (!columns.programme) return avx2_level.horizontal(columns, rows, targets, count);  // rows under 64 bytes
    for (int i = 0; i < count; i += ROWS) {
        const uint8_t *some_rows[ROWS];
        uint8_t *some_targets[ROWS];
        for (int r = 0; r < ROWS; r++) {
            const int row = i + r < count ? i + r : count - 1;  // the last row is computed again where rows are missing
            some_rows[r] = rows[row];
            some_targets[r] = targets[row];
        }
        if (columns.digits == 2)
            horizontal_rows<2>(columns, some_rows, some_targets);
        else
            horizontal_rows<3>(columns, some_rows, some_targets);
    }
}

// ------------------------------------------------------------------------------------------------------ vertical

// 64 bytes, or those of them that the mask names.
template <bool WHOLE>
INLINE __m512i load_part(const uint8_t *p, __mmask64 mask) {
    return WHOLE ? load64(p) : _mm512_maskz_loadu_epi8(mask, p);
}

// Unpacking works within 128-bit lanes: neighbouring bytes become four vectors of 32-bit sums, and come back in order.
INLINE __m512i packed(const __m512i *sums) {
    return _mm512_packus_epi16(_mm512_packs_epi32(sums[0], sums[1]), _mm512_packs_epi32(sums[2], sums[3]));
}

// Weights of 16 bits: two tap rows per multiply-add. With PAIRS known, the loop is none and pointers stay in registers.
template <int PAIRS>
struct ByPairs {
    const int32_t *weights;
    const int pairs;
    const __m512i half;
    const __m128i shift;

    template <bool WHOLE>
    INLINE __m512i bytes(const uint8_t *const *taps, size_t x, __mmask64 mask) const {
        const __m512i zero = _mm512_setzero_si512();
        __m512i sums[4] = {half, half, half, half};
        for (int p = 0; p < (PAIRS ? PAIRS : pairs); p++) {
            const __m512i a = load_part<WHOLE>(taps[p * 2] + x, mask), b = load_part<WHOLE>(taps[p * 2 + 1] + x, mask);
            const __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
            const __m512i quarters[4] = {_mm512_unpacklo_epi8(low, zero), _mm512_unpackhi_epi8(low, zero),
                                         _mm512_unpacklo_epi8(high, zero), _mm512_unpackhi_epi8(high, zero)};
            const __m512i weight = _mm512_set1_epi32(weights[p * 2]);
            for (int i = 0; i < 4; i++) sums[i] = _mm512_dpwssd_epi32(sums[i], quarters[i], weight);
        }
        for (__m512i &sum : sums) sum = _mm512_sra_epi32(sum, shift);
        return packed(sums);
    }
};

// Wider weights, three 8-bit digits: four tap rows per multiply-add.
struct ByQuads {
    const int32_t *quads;
    const int groups;
    const __m512i half;
    const __m128i shift;

    template <bool WHOLE>
    INLINE __m512i bytes(const uint8_t *const *taps, size_t x, __mmask64 mask) const {
        __m512i sums[4][3];
        for (auto &sum : sums)
            for (int d = 0; d < 3; d++) sum[d] = d ? _mm512_setzero_si512() : half;
        for (int g = 0; g < groups; g++) {
            __m512i row[4];
            for (int t = 0; t < 4; t++) row[t] = load_part<WHOLE>(taps[g * 4 + t] + x, mask);
            const __m512i ab_low = _mm512_unpacklo_epi8(row[0], row[1]), ab_high = _mm512_unpackhi_epi8(row[0], row[1]);
            const __m512i cd_low = _mm512_unpacklo_epi8(row[2], row[3]), cd_high = _mm512_unpackhi_epi8(row[2], row[3]);
            const __m512i quarters[4] = {
                _mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
            for (int d = 0; d < 3; d++) {
                const __m512i weight = _mm512_set1_epi32(quads[g * 3 + d]);
                for (int i = 0; i < 4; i++) sums[i][d] = _mm512_dpbusd_epi32(sums[i][d], quarters[i], weight);
            }
        }
        __m512i words[4];
        for (int i = 0; i < 4; i++) words[i] = recombined<3>(sums[i], shift);
        return packed(words);
    }
};

template <class Form>
INLINE void vertical_row(const Form &form, const uint8_t *const *taps, uint8_t *target, size_t x, size_t end) {
    for (; x + 64 <= end; x += 64) _mm512_storeu_si512(target + x, form.template bytes<true>(taps, x, 0));
    if (x == end) return;
    const __mmask64 mask = first(int64_t(end - x));
    _mm512_mask_storeu_epi8(target + x, mask, form.template bytes<false>(taps, x, mask));
}

void vertical(const Weights &rows, const RowBlock &block, size_t begin, size_t end) {
    const __m512i half = _mm512_set1_epi32(1 << (rows.axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(rows.axis.precision);
    for (int i = 0; i < block.count; i++) {
        const int y = block.first + i, pairs = (rows.axis.count[y] + 1) / 2;
        const int32_t *const weights = rows.paired + size_t(y) * rows.pairs * 2;
        const uint8_t *const *const taps = block.taps + i * block.pitch;
        uint8_t *const target = block.targets[i];
        if (!rows.narrow) {
            const int group = rows.groups[y];
            vertical_row(ByQuads{rows.quads + size_t(group) * 3, rows.groups[y + 1] - group, half, shift}, taps, target,
                         begin, end);
        } else if (pairs == 2) {  // nearly always, in a resize to about the same size
            const uint8_t *const four[4] = {taps[0], taps[1], taps[2], taps[3]};
            vertical_row(ByPairs<2>{weights, pairs, half, shift}, four, target, begin, end);
        } else {
            vertical_row(ByPairs<0>{weights, pairs, half, shift}, taps, target, begin, end);
        }
    }
}

void finish_streaming() { _mm_sfence(); }

}  // namespace

const Level avx512_level = {horizontal, vertical, patches, planes, prepare, finish_streaming};

}  // namespace pixelgate
#endif
