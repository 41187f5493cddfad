// AVX-512 with VBMI and VNNI: weights as balanced base-256 digits, four 8-bit taps per multiply-add, and the 256-entry
// tables of the affine step in registers.
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "kernels.hpp"
#include "lines.hpp"

#include <cstring>
#include <immintrin.h>

namespace pixelgate {
namespace {

// A call in these places would spill every register.
#define INLINE __attribute__((always_inline)) inline

constexpr int ROWS = 4;  // rows resampled together: a step is decoded once for all of them

inline __m512i load64(const void *p) { return _mm512_loadu_si512(p); }
inline __mmask64 first(int64_t bytes) { return bytes >= 64 ? ~0ull : (1ull << bytes) - 1; }

template <int DIGITS>
inline __m512i recombined(const __m512i *sums, __m128i shift) {
    __m512i total = _mm512_add_epi32(sums[0], _mm512_slli_epi32(sums[1], 8));
    if (DIGITS == 3) total = _mm512_add_epi32(total, _mm512_slli_epi32(sums[DIGITS - 1], 16));
    return _mm512_sra_epi32(total, shift);
}

// ---------------------------------------------------------------------------------------------------- horizontal

template <int DIGITS>
void horizontal_rows(const Weights &columns, const uint8_t *const *rows, uint8_t *const *targets) {
    const __m512i half = _mm512_set1_epi32(1 << (columns.axis.precision - 1)), zero = _mm512_setzero_si512();
    const __m128i shift = _mm_cvtsi32_si128(columns.axis.precision);
    const int64_t bytes = int64_t(columns.axis.size_out) * 3;
    const uint8_t *step = columns.programme;
    const int32_t *const offsets = columns.offsets, *const steps = columns.steps;
    int s = 0;
    for (int64_t begin = 0, block = 0; begin < bytes; begin += 16, block++) {
        __m512i sums[ROWS][DIGITS];
        for (int r = 0; r < ROWS; r++)
            for (int d = 0; d < DIGITS; d++) sums[r][d] = d ? zero : half;
        for (const int end = steps[block + 1]; s < end; s++, step += 64 * (1 + DIGITS)) {
            const __m512i picks = _mm512_load_si512(step);
            __m512i weights[DIGITS];
            for (int d = 0; d < DIGITS; d++) weights[d] = _mm512_load_si512(step + 64 * (1 + d));
            for (int r = 0; r < ROWS; r++) {
                const __m512i taps = _mm512_permutexvar_epi8(picks, load64(rows[r] + offsets[s]));
                for (int d = 0; d < DIGITS; d++) sums[r][d] = _mm512_dpbusd_epi32(sums[r][d], taps, weights[d]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            const __m512i words = _mm512_max_epi32(recombined<DIGITS>(sums[r], shift), zero);
            const __m128i finished = _mm512_cvtusepi32_epi8(words);
            uint8_t *const target = targets[r] + begin;
            if (bytes - begin >= 16)
                _mm_storeu_si128(reinterpret_cast<__m128i *>(target), finished);
            else
                _mm_mask_storeu_epi8(target, __mmask16(first(bytes - begin)), finished);
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

template <int DIGITS, bool WHOLE>
INLINE void vertical_block(const int32_t *quads, int groups, __m512i half, __m128i shift, const uint8_t *const *taps,
                           uint8_t *target, size_t x, __mmask64 mask) {
    __m512i sums[4][DIGITS];
    for (int i = 0; i < 4; i++)
        for (int d = 0; d < DIGITS; d++) sums[i][d] = d ? _mm512_setzero_si512() : half;
    for (int g = 0; g < groups; g++) {
        __m512i rows[4];
        for (int t = 0; t < 4; t++)
            rows[t] = WHOLE ? load64(taps[g * 4 + t] + x) : _mm512_maskz_loadu_epi8(mask, taps[g * 4 + t] + x);
        const __m512i ab_low = _mm512_unpacklo_epi8(rows[0], rows[1]), ab_high = _mm512_unpackhi_epi8(rows[0], rows[1]);
        const __m512i cd_low = _mm512_unpacklo_epi8(rows[2], rows[3]), cd_high = _mm512_unpackhi_epi8(rows[2], rows[3]);
        const __m512i quarters[4] = {_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                                     _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
        for (int d = 0; d < DIGITS; d++) {
            const __m512i weights = _mm512_set1_epi32(quads[g * DIGITS + d]);
            for (int i = 0; i < 4; i++) sums[i][d] = _mm512_dpbusd_epi32(sums[i][d], quarters[i], weights);
        }
    }
    __m512i words[4];
    for (int i = 0; i < 4; i++) words[i] = recombined<DIGITS>(sums[i], shift);
    const __m512i low = _mm512_packs_epi32(words[0], words[1]), high = _mm512_packs_epi32(words[2], words[3]);
    const __m512i bytes = _mm512_packus_epi16(low, high);
    if (WHOLE)
        _mm512_storeu_si512(target + x, bytes);
    else
        _mm512_mask_storeu_epi8(target + x, mask, bytes);
}

template <int DIGITS>
void vertical_row(const Weights &rows, int y, const uint8_t *const *taps, uint8_t *target, size_t bytes) {
    const int32_t *quads = rows.quads + size_t(rows.groups[y]) * DIGITS;
    const int groups = rows.groups[y + 1] - rows.groups[y];
    const __m512i half = _mm512_set1_epi32(1 << (rows.axis.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(rows.axis.precision);
    size_t x = 0;
    for (; x + 64 <= bytes; x += 64) vertical_block<DIGITS, true>(quads, groups, half, shift, taps, target, x, 0);
    if (x < bytes) vertical_block<DIGITS, false>(quads, groups, half, shift, taps, target, x, first(bytes - x));
}

void vertical(const Weights &rows, int y, const uint8_t *const *taps, uint8_t *target, size_t bytes) {
    if (rows.digits == 2) return vertical_row<2>(rows, y, taps, target, bytes);
    vertical_row<3>(rows, y, taps, target, bytes);
}

// ----------------------------------------------------------------------------------------------- tables, elements

// A channel's 256 elements by their bytes: row[b][q] holds byte b of entries 64 q to 64 q + 63.
template <int BYTES>
struct Table {
    __m512i row[BYTES][4];
};

void split_table(const Job &job, uint8_t *target) {
    const uint8_t *elements = static_cast<const uint8_t *>(job.table);
    const size_t bytes = bytes_of(job.element);
    for (size_t c = 0; c < 3; c++)
        for (size_t b = 0; b < bytes; b++)
            for (size_t value = 0; value < 256; value++)
                target[(c * bytes + b) * 256 + value] = elements[(c * 256 + value) * bytes + b];
}

template <int BYTES>
INLINE Table<BYTES> table_of(const Store &store, int channel) {
    const uint8_t *split = store.split_table + channel * 256 * BYTES;
    Table<BYTES> table;
    for (int b = 0; b < BYTES; b++)
        for (int q = 0; q < 4; q++) table.row[b][q] = _mm512_load_si512(split + b * 256 + q * 64);
    return table;
}

template <int BYTES>
struct Elements {
    __m512i part[BYTES];  // 64 elements in memory order
};

// The order in which interleaving the bytes of elements, which works within 128-bit lanes, gives them back in memory
// order.
template <int BYTES>
inline __m512i in_lanes(__m512i pixels) {
    if constexpr (BYTES == 4)
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), pixels);
    if constexpr (BYTES == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), pixels);
    return pixels;
}

// 64 pixels of one channel to their elements.
template <int BYTES>
INLINE Elements<BYTES> look_up(const Table<BYTES> &table, __m512i pixels) {
    pixels = in_lanes<BYTES>(pixels);
    const __mmask64 upper = _mm512_movepi8_mask(pixels);
    __m512i bytes[BYTES];
    for (int b = 0; b < BYTES; b++) {
        const __m512i low = _mm512_permutex2var_epi8(table.row[b][0], pixels, table.row[b][1]);
        const __m512i high = _mm512_permutex2var_epi8(table.row[b][2], pixels, table.row[b][3]);
        bytes[b] = _mm512_mask_blend_epi8(upper, low, high);
    }
    Elements<BYTES> elements;
    if constexpr (BYTES == 1) {
        elements.part[0] = bytes[0];
    } else if constexpr (BYTES == 2) {
        elements.part[0] = _mm512_unpacklo_epi8(bytes[0], bytes[1]);
        elements.part[1] = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
    } else {
        const __m512i ab_low = _mm512_unpacklo_epi8(bytes[0], bytes[1]);
        const __m512i ab_high = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
        const __m512i cd_low = _mm512_unpacklo_epi8(bytes[2], bytes[3]);
        const __m512i cd_high = _mm512_unpackhi_epi8(bytes[2], bytes[3]);
        elements.part[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
        elements.part[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
        elements.part[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
        elements.part[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
    }
    return elements;
}

// The last `count` of a group's 64 elements, as whole vectors that end at `end`: what they overlap is written again.
template <int BYTES>
INLINE void store_last(uint8_t *end, const Elements<BYTES> &elements, int count) {
    for (int b = 0; b < BYTES; b++)
        if ((BYTES - b) * 64 < count * BYTES + 64)
            _mm512_storeu_si512(end - (BYTES - b) * 64, elements.part[b]);
}

// A run of at least 64 pixels of one channel to its elements.
template <int BYTES>
INLINE void store_run(uint8_t *target, const Table<BYTES> &table, const uint8_t *pixels, int count) {
    int x = 0;
    for (; x + 64 <= count; x += 64)
        store_last(target + size_t(x + 64) * BYTES, look_up(table, load64(pixels + x)), 64);
    if (x < count) store_last(target + size_t(count) * BYTES, look_up(table, load64(pixels + count - 64)), count - x);
}

// ------------------------------------------------------------------------------------------------------- patches

struct Places {
    alignas(64) uint8_t number[64];

    constexpr Places() : number{} {
        for (int i = 0; i < 64; i++) number[i] = uint8_t(i);
    }
};
constexpr Places PLACES;

class Line {
  public:
    inline void load(const uint8_t *source) { bytes_ = load64(source); }
    inline void save(uint8_t *target) const { _mm512_storeu_si512(target, bytes_); }
    inline void stream(uint8_t *target) const { _mm512_stream_si512(reinterpret_cast<__m512i *>(target), bytes_); }

    // The first `held` bytes stay; joined in registers, because memory written in two parts is slow to read as one.
    inline void append(size_t held, const uint8_t *source) {
        const __m512i place = _mm512_load_si512(PLACES.number);
        const __m512i from_source = _mm512_add_epi8(place, _mm512_set1_epi8(char(64 - held)));
        const __mmask64 old = first(int64_t(held));
        bytes_ = _mm512_permutex2var_epi8(bytes_, _mm512_mask_mov_epi8(from_source, old, place), load64(source));
    }

  private:
    __m512i bytes_ = _mm512_setzero_si512();
};

constexpr int NARROWEST = 8, WIDEST = 16;  // pixels of a patch row: a patch has a whole group, a gather a whole row

// The bytes of each channel's whole patch are gathered, then looked up 64 at a time.
template <int BYTES>
void patch_row(const Store &patches, int grid_y, const uint8_t *strip, size_t pitch) {
    const Job &job = *patches.job;
    const int patch = job.patch, merge = job.merge, pixels = patch * patch;
    alignas(64) uint8_t order[64] = {};
    for (int i = 0; i < 48; i++) order[i] = uint8_t(i % 16 * 3 + i / 16);
    const __m512i by_channel = _mm512_load_si512(order);
    alignas(64) uint8_t channel[3][WIDEST * WIDEST + 16];  // a row is stored as 16 bytes, the last one beyond the patch

    for (int grid_x = 0; grid_x < patches.grid_width; grid_x += merge) {
        for (int i = 0; i < merge; i++) {
            const uint8_t *row = strip + size_t(grid_x + i) * patch * 3;
            for (int y = 0; y < patch; y++, row += pitch) {
                const __m512i three = _mm512_permutexvar_epi8(by_channel, load64(row));
                _mm_storeu_si128(reinterpret_cast<__m128i *>(channel[0] + y * patch), _mm512_castsi512_si128(three));
                _mm_storeu_si128(reinterpret_cast<__m128i *>(channel[1] + y * patch),
                                 _mm512_extracti32x4_epi32(three, 1));
                _mm_storeu_si128(reinterpret_cast<__m128i *>(channel[2] + y * patch),
                                 _mm512_extracti32x4_epi32(three, 2));
            }
            for (int c = 0; c < 3; c++) {
                // a copy of its own stays in registers: stores could change any table in memory
                const Table<BYTES> table = table_of<BYTES>(patches, c);
                store_run(patches.stage + size_t(i * 3 + c) * patches.stage_pitch, table, channel[c], pixels);
            }
        }
        const auto write = patches.stream ? write_run<Line, true> : write_run<Line, false>;
        write(patch_address(patches, grid_y, grid_x), patches.stage, patches.stage_pitch, patches.plane_bytes,
              merge * 3, job.temporal);
    }
}

void patches(const Store &store, int grid_y, const uint8_t *strip, size_t pitch) {
    if (store.job->patch < NARROWEST || store.job->patch > WIDEST)
        return portable_level.patches(store, grid_y, strip, pitch);
    switch (store.element_bytes) {
        case 1: return patch_row<1>(store, grid_y, strip, pitch);
        case 2: return patch_row<2>(store, grid_y, strip, pitch);
        default: return patch_row<4>(store, grid_y, strip, pitch);
    }
}

// -------------------------------------------------------------------------------------------------------- planes

// Byte x * 3 + c of 192 in two picks: from the first 128 bytes, then from the rest.
struct Picks {
    alignas(64) uint8_t early[3][64];
    alignas(64) uint8_t late[3][64];

    constexpr Picks() : early{}, late{} {
        for (int c = 0; c < 3; c++)
            for (int x = 0; x < 64; x++) {
                const int byte = x * 3 + c;
                early[c][x] = uint8_t(byte < 128 ? byte : 0);
                late[c][x] = uint8_t(byte < 128 ? x : byte - 64);
            }
    }
};
constexpr Picks PICKS;

template <int BYTES>
void plane_rows(const Store &rows, const uint8_t *pixels, int count, uint8_t *const *targets) {
    for (int c = 0; c < 3; c++) {
        const Table<BYTES> table = table_of<BYTES>(rows, c);
        const __m512i picks = _mm512_load_si512(PICKS.early[c]), more = _mm512_load_si512(PICKS.late[c]);
        for (int begin = 0; begin < count; begin += 64) {
            const int x = begin + 64 <= count ? begin : count - 64;  // the last group overlaps its neighbour
            const uint8_t *in = pixels + size_t(x) * 3;
            const __m512i found = _mm512_permutex2var_epi8(load64(in), picks, load64(in + 64));
            const __m512i channel = _mm512_permutex2var_epi8(found, more, load64(in + 128));
            store_last(targets[c] + size_t(x + 64) * BYTES, look_up(table, channel), 64);
        }
    }
}

void planes(const Store &rows, const uint8_t *pixels, int count, uint8_t *const *targets) {
    if (count < 64) return avx2_level.planes(rows, pixels, count, targets);
    switch (rows.element_bytes) {
        case 1: return plane_rows<1>(rows, pixels, count, targets);
        case 2: return plane_rows<2>(rows, pixels, count, targets);
        default: return plane_rows<4>(rows, pixels, count, targets);
    }
}

void finish_streaming() { _mm_sfence(); }

}  // namespace

const Level avx512_level = {horizontal, vertical, patches, planes, split_table, finish_streaming};

}  // namespace pixelgate
#endif
