// AVX-512 with VBMI and VNNI: four 8-bit taps per multiply-add, with weights as balanced base-256 digits; where weights
// are narrow, the vertical pass takes two 16-bit taps.
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "store_avx512.hpp"

#include <immintrin.h>

namespace pixelgate {
namespace {

constexpr int ROWS = 4;  // rows resampled together: a step is decoded once for all of them

// The upper halves of the words of two vectors, within 128-bit lanes.
struct UpperHalves {
    alignas(64) uint16_t index[32];

    constexpr UpperHalves() : index{} {
        for (int i = 0; i < 32; i++) index[i] = uint16_t(i / 8 * 8 + i % 4 * 2 + 1 + (i % 8 < 4 ? 0 : 32));
    }
};
constexpr UpperHalves UPPER_HALVES;

// Four vectors of sums to bytes, side by side within 128-bit lanes. FAR: the shift is 16 or more, so only the upper
// halves have to be shifted, two vectors at a time.
template <bool FAR>
INLINE __m512i clipped(__m512i a, __m512i b, __m512i c, __m512i d, __m128i shift) {
    if (FAR) {
        const __m512i upper = _mm512_load_si512(UPPER_HALVES.index);
        const __m128i rest = _mm_sub_epi64(shift, _mm_cvtsi32_si128(16));
        const __m512i ab = _mm512_permutex2var_epi16(a, upper, b), cd = _mm512_permutex2var_epi16(c, upper, d);
        return _mm512_packus_epi16(_mm512_sra_epi16(ab, rest), _mm512_sra_epi16(cd, rest));
    }
    const __m512i ab = _mm512_packs_epi32(_mm512_sra_epi32(a, shift), _mm512_sra_epi32(b, shift));
    const __m512i cd = _mm512_packs_epi32(_mm512_sra_epi32(c, shift), _mm512_sra_epi32(d, shift));
    return _mm512_packus_epi16(ab, cd);
}

// The sums of a digit, and those of the next lower one.
INLINE __m512i with_next(__m512i sums, __m512i next) { return _mm512_add_epi32(_mm512_slli_epi32(sums, 8), next); }

// ---------------------------------------------------------------------------------------------------- horizontal

// A block of the programme: 16 output bytes of each row, as 32-bit sums. Of few steps the digits come one after the
// other, the highest first, into the same sums.
template <int DIGITS, int STEPS>
INLINE void block_of_few(const Weights &columns, int step, const uint8_t *const *rows, __m512i half,
                         __m512i sums[ROWS]) {
    constexpr size_t STEP_BYTES = 64 * (1 + DIGITS);
    const uint8_t *const programme = columns.programme + step * STEP_BYTES;
    __m512i taps[STEPS][ROWS];
    for (int s = 0; s < STEPS; s++) {
        const __m512i picks = _mm512_load_si512(programme + s * STEP_BYTES);
        for (int r = 0; r < ROWS; r++)
            taps[s][r] = _mm512_permutexvar_epi8(picks, load64(rows[r] + columns.offsets[step + s]));
    }
    for (int d = DIGITS - 1; d >= 0; d--) {
        for (int r = 0; r < ROWS; r++) sums[r] = d < DIGITS - 1 ? _mm512_slli_epi32(sums[r], 8) : half;
        for (int s = 0; s < STEPS; s++) {
            const __m512i weights = _mm512_load_si512(programme + s * STEP_BYTES + 64 * (1 + d));
            for (int r = 0; r < ROWS; r++) sums[r] = _mm512_dpbusd_epi32(sums[r], taps[s][r], weights);
        }
    }
}

// The same for any number of steps, whose taps do not stay in registers: each digit has its own sums.
template <int DIGITS>
INLINE void block_of_many(const Weights &columns, int step, int end, const uint8_t *const *rows, __m512i half,
                          __m512i total[ROWS]) {
    __m512i sums[ROWS][DIGITS];
    for (int r = 0; r < ROWS; r++)
        for (int d = 0; d < DIGITS; d++) sums[r][d] = d < DIGITS - 1 ? _mm512_setzero_si512() : half;
    for (; step < end; step++) {
        const uint8_t *const programme = columns.programme + size_t(step) * 64 * (1 + DIGITS);
        const __m512i picks = _mm512_load_si512(programme);
        __m512i weights[DIGITS];
        for (int d = 0; d < DIGITS; d++) weights[d] = _mm512_load_si512(programme + 64 * (1 + d));
        for (int r = 0; r < ROWS; r++) {
            const __m512i taps = _mm512_permutexvar_epi8(picks, load64(rows[r] + columns.offsets[step]));
            for (int d = 0; d < DIGITS; d++) sums[r][d] = _mm512_dpbusd_epi32(sums[r][d], taps, weights[d]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        total[r] = sums[r][DIGITS - 1];
        for (int d = DIGITS - 2; d >= 0; d--) total[r] = with_next(total[r], sums[r][d]);
    }
}

template <int DIGITS>
INLINE void block_of(const Weights &columns, int block, const uint8_t *const *rows, __m512i half, __m512i sums[ROWS]) {
    const int step = columns.steps[block], end = columns.steps[block + 1];
    switch (end - step) {
        case 1: return block_of_few<DIGITS, 1>(columns, step, rows, half, sums);
        case 2: return block_of_few<DIGITS, 2>(columns, step, rows, half, sums);
        default: return block_of_many<DIGITS>(columns, step, end, rows, half, sums);
    }
}

template <int DIGITS>
void horizontal_rows(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets) {
    const __m512i half = _mm512_set1_epi32(columns.half);
    const __m128i shift = _mm_cvtsi32_si128(columns.shift);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int64_t bytes = int64_t(columns.axis.size_out) * 3;
    int64_t x = 0;
    int block = 0;
    for (; x + 64 <= bytes; x += 64, block += 4) {
        __m512i a[ROWS], b[ROWS], c[ROWS], d[ROWS];
        block_of<DIGITS>(columns, block, rows, half, a);
        block_of<DIGITS>(columns, block + 1, rows, half, b);
        block_of<DIGITS>(columns, block + 2, rows, half, c);
        block_of<DIGITS>(columns, block + 3, rows, half, d);
        for (int r = 0; r < ROWS; r++) {
            const __m512i mixed = clipped<DIGITS == 3>(a[r], b[r], c[r], d[r], shift);  // within 128-bit lanes
            _mm512_storeu_si512(targets[r] + x, _mm512_permutexvar_epi32(in_order, mixed));
        }
    }
    for (; x < bytes; x += 16, block++) {
        __m512i sums[ROWS];
        block_of<DIGITS>(columns, block, rows, half, sums);
        for (int r = 0; r < ROWS; r++) {
            const __m512i positive = _mm512_max_epi32(_mm512_sra_epi32(sums[r], shift), _mm512_setzero_si512());
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
        return clipped<false>(sums[0], sums[1], sums[2], sums[3], shift);
    }
};

// Bytes x of four tap rows, side by side for a multiply-add.
template <bool WHOLE>
INLINE void load_quad(const uint8_t *const *taps, size_t x, __mmask64 mask, __m512i quarters[4]) {
    __m512i row[4];
    for (int t = 0; t < 4; t++) row[t] = load_part<WHOLE>(taps[t] + x, mask);
    const __m512i ab_low = _mm512_unpacklo_epi8(row[0], row[1]), ab_high = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i cd_low = _mm512_unpacklo_epi8(row[2], row[3]), cd_high = _mm512_unpackhi_epi8(row[2], row[3]);
    quarters[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
    quarters[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
    quarters[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
    quarters[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// Wider weights, three 8-bit digits: four tap rows per multiply-add. Of few groups the digits come one after the other,
// the highest first, into the same sums.
template <int GROUPS>
struct ByQuads {
    const __m512i half;
    const __m128i shift;
    __m512i weights[GROUPS][3];

    INLINE ByQuads(const Weights &rows, int group)
        : half(_mm512_set1_epi32(rows.half)), shift(_mm_cvtsi32_si128(rows.shift)) {
        for (int g = 0; g < GROUPS; g++)
            for (int d = 0; d < 3; d++) weights[g][d] = _mm512_set1_epi32(rows.quads[(group + g) * 3 + d]);
    }

    template <bool WHOLE>
    INLINE __m512i bytes(const uint8_t *const *taps, size_t x, __mmask64 mask) const {
        __m512i quarters[GROUPS][4], sums[4] = {half, half, half, half};
        for (int g = 0; g < GROUPS; g++) load_quad<WHOLE>(taps + g * 4, x, mask, quarters[g]);
        for (int d = 2; d >= 0; d--) {
            for (__m512i &sum : sums) sum = d < 2 ? _mm512_slli_epi32(sum, 8) : sum;
            for (int g = 0; g < GROUPS; g++)
                for (int i = 0; i < 4; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], quarters[g][i], weights[g][d]);
        }
        return clipped<true>(sums[0], sums[1], sums[2], sums[3], shift);
    }
};

// The same for any number of groups, whose taps do not stay in registers: each digit has its own sums.
struct ByManyQuads {
    const int32_t *const weights;
    const int groups;
    const __m512i half;
    const __m128i shift;

    INLINE ByManyQuads(const Weights &rows, int group, int count)
        : weights(rows.quads + size_t(group) * 3), groups(count), half(_mm512_set1_epi32(rows.half)),
          shift(_mm_cvtsi32_si128(rows.shift)) {}

    template <bool WHOLE>
    INLINE __m512i bytes(const uint8_t *const *taps, size_t x, __mmask64 mask) const {
        const __m512i zero = _mm512_setzero_si512();
        __m512i sums[3][4] = {{zero, zero, zero, zero}, {zero, zero, zero, zero}, {half, half, half, half}};
        for (int g = 0; g < groups; g++) {
            __m512i quarters[4];
            load_quad<WHOLE>(taps + g * 4, x, mask, quarters);
            for (int d = 0; d < 3; d++) {
                const __m512i weight = _mm512_set1_epi32(weights[g * 3 + d]);
                for (int i = 0; i < 4; i++) sums[d][i] = _mm512_dpbusd_epi32(sums[d][i], quarters[i], weight);
            }
        }
        __m512i words[4];
        for (int i = 0; i < 4; i++) words[i] = with_next(with_next(sums[2][i], sums[1][i]), sums[0][i]);
        return clipped<true>(words[0], words[1], words[2], words[3], shift);
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
    for (int i = 0; i < block.count; i++) {
        const int y = block.first + i;
        const uint8_t *const *const taps = block.taps + i * block.pitch;
        const uint8_t *const four[4] = {taps[0], taps[1], taps[2], taps[3]};  // stay in registers, where they are all
        uint8_t *const target = block.targets[i];
        if (rows.narrow) {
            const int pairs = (rows.axis.count[y] + 1) / 2;
            const int32_t *const weights = rows.paired + size_t(y) * rows.pairs * 2;
            const __m512i half = _mm512_set1_epi32(1 << (rows.axis.precision - 1));
            const __m128i shift = _mm_cvtsi32_si128(rows.axis.precision);
            if (pairs == 2)  // nearly always, in a resize to about the same size
                vertical_row(ByPairs<2>{weights, pairs, half, shift}, four, target, begin, end);
            else
                vertical_row(ByPairs<0>{weights, pairs, half, shift}, taps, target, begin, end);
        } else {
            const int group = rows.groups[y], count = rows.groups[y + 1] - group;
            if (count == 1)
                vertical_row(ByQuads<1>(rows, group), four, target, begin, end);
            else if (count == 2)
                vertical_row(ByQuads<2>(rows, group), taps, target, begin, end);
            else
                vertical_row(ByManyQuads(rows, group, count), taps, target, begin, end);
        }
    }
}

void finish_streaming() { _mm_sfence(); }

}  // namespace

const Level avx512_level = {horizontal, vertical, patches, planes, prepare, finish_streaming};

}  // namespace pixelgate
#endif
