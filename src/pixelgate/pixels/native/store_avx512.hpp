// AVX-512 with VBMI: finished rows into the layout, through the affine step. Included by level_avx512.cpp alone and
// compiled with its flags.
#pragma once

#include "lines.hpp"

#include <immintrin.h>

namespace pixelgate {
namespace {

// A call in these places would spill every register.
#define INLINE __attribute__((always_inline)) inline

inline __m512i load64(const void *p) { return _mm512_loadu_si512(p); }
inline __mmask64 first(int64_t bytes) { return bytes >= 64 ? ~0ull : (1ull << bytes) - 1; }

// ----------------------------------------------------------------------------------------------- tables, elements

// A channel's 256 elements by their bytes: row[b][q] holds byte b of entries 64 q to 64 q + 63.
template <int BYTES>
struct Table {
    __m512i row[BYTES][4];
};

void split_table(const Store &store) {
    const uint8_t *elements = static_cast<const uint8_t *>(store.job->table);
    const size_t bytes = store.element_bytes;
    for (size_t c = 0; c < 3; c++)
        for (size_t b = 0; b < bytes; b++)
            for (size_t value = 0; value < 256; value++)
                store.split_table[(c * bytes + b) * 256 + value] = elements[(c * 256 + value) * bytes + b];
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

// ---------------------------------------------------------------------------------------------------- arithmetic

// float32 from 16 bytes of a channel, each in a 32-bit lane.
struct Normalise {
    bool divides_first;
    __m512 divisor[2], subtract[3], divide[3][2];  // of a divisor its high and its low part

    explicit Normalise(const Normalisation &n) : divides_first(n.divides_first) {
        set(n.divisor, divisor);
        for (int c = 0; c < 3; c++) {
            subtract[c] = _mm512_set1_ps(n.subtract[c]);
            set(n.divide[c], divide[c]);
        }
    }
    static void set(const Divisor &source, __m512 *target) {
        target[0] = _mm512_set1_ps(source.high);
        target[1] = _mm512_set1_ps(source.low);
    }
    static INLINE __m512 quotient(__m512 x, const __m512 *divisor) {
        return _mm512_fmadd_ps(x, divisor[0], _mm512_mul_ps(x, divisor[1]));
    }
    INLINE __m512 operator()(__m512i pixels, int c) const {
        __m512 x = _mm512_cvtepi32_ps(pixels);
        if (divides_first) x = quotient(x, divisor);
        return quotient(_mm512_sub_ps(x, subtract[c]), divide[c]);
    }
};

// Whether the arithmetic gives the table.
bool gives_table(const Store &store) {
    const Normalise normalise(store.normalisation);
    const float *table = static_cast<const float *>(store.job->table);
    for (int c = 0; c < 3; c++) {
        __m512i pixels = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int x = 0; x < 256; x += 16, table += 16) {
            const __m512i made = _mm512_castps_si512(normalise(pixels, c));
            if (_mm512_cmpneq_epi32_mask(made, load64(table))) return false;
            pixels = _mm512_add_epi32(pixels, _mm512_set1_epi32(16));
        }
    }
    return true;
}

void prepare(Store &store) {
    store.computes = store.job->element == FLOAT32 && store.job->has_arithmetic && gives_table(store);
    split_table(store);
}

// ------------------------------------------------------------------------------------------------------- patches

// The three channels of 16 pixels side by side.
struct ByChannel {
    alignas(64) uint8_t order[64];

    constexpr ByChannel() : order{} {
        for (int i = 0; i < 48; i++) order[i] = uint8_t(i % 16 * 3 + i / 16);
    }
};
constexpr ByChannel BY_CHANNEL;

class Line {
  public:
    inline void load(const uint8_t *source) { bytes_ = load64(source); }
    inline void load(size_t held, const uint8_t *tail, const uint8_t *source) {
        bytes_ = _mm512_mask_mov_epi8(load64(source), first(int64_t(held)), load64(tail));
    }
    inline void save(uint8_t *target) const { _mm512_storeu_si512(target, bytes_); }
    inline void stream(uint8_t *target) const { _mm512_stream_si512(reinterpret_cast<__m512i *>(target), bytes_); }

  private:
    __m512i bytes_;
};

constexpr int NARROWEST = 8, WIDEST = 16;  // pixels of a patch row: a patch has a whole group, a gather a whole row

// Where the 16 pixels of a group lie: the patch's pixels row by row, 16 at a time, are part of two rows.
template <int PATCH>
struct Groups {
    static constexpr int COUNT = (PATCH * PATCH + 15) / 16;
    alignas(64) uint8_t index[COUNT][3][64];  // a channel's bytes of two rows of 64, each for a lane of 32 bits

    constexpr Groups() : index{} {
        for (int g = 0; g < COUNT; g++)
            for (int c = 0; c < 3; c++)
                for (int i = 0; i < 16; i++) {
                    const int place = g * 16 % PATCH + i;
                    index[g][c][i * 4] = uint8_t(place / PATCH * 64 + place % PATCH * 3 + c);
                }
    }
};

// Computes: 16 pixels of a channel at a time. A group must not touch three rows.
template <int PATCH>
struct ByArithmetic {
    static_assert(PATCH == 14 || PATCH == 16, "");
    static constexpr Groups<PATCH> GROUPS{};
    const Normalise normalise;
    const size_t pitch, stage_pitch;

    INLINE void operator()(const uint8_t *pixels, uint8_t *stage) const {
        for (int g = 0; g < GROUPS.COUNT; g++) {
            const int y = g * 16 / PATCH, next = y + 1 < PATCH ? y + 1 : y;
            const __m512i upper = load64(pixels + y * pitch), lower = load64(pixels + next * pitch);
            for (int c = 0; c < 3; c++) {
                const __m512i wide = _mm512_maskz_permutex2var_epi8(
                    0x1111111111111111, upper, _mm512_load_si512(GROUPS.index[g][c]), lower);
                _mm512_store_ps(stage + c * stage_pitch + g * 64, normalise(wide, c));
            }
        }
    }
};

// Looks up: the bytes of each channel's whole patch are gathered, then taken 64 at a time.
template <int BYTES>
struct ByTable {
    const Store &store;
    const size_t pitch;

    INLINE void operator()(const uint8_t *row, uint8_t *stage) const {
        const int patch = store.job->patch;
        const __m512i by_channel = _mm512_load_si512(BY_CHANNEL.order);
        alignas(64) uint8_t channel[3][WIDEST * WIDEST + 16];  // a row is 16 bytes, the last one beyond the patch
        for (int y = 0; y < patch; y++, row += pitch) {
            const __m512i three = _mm512_permutexvar_epi8(by_channel, load64(row));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(channel[0] + y * patch), _mm512_castsi512_si128(three));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(channel[1] + y * patch), _mm512_extracti32x4_epi32(three, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(channel[2] + y * patch), _mm512_extracti32x4_epi32(three, 2));
        }
        for (int c = 0; c < 3; c++) {
            // a copy of its own stays in registers: stores could change any table in memory
            const Table<BYTES> table = table_of<BYTES>(store, c);
            store_run(stage + c * store.stage_pitch, table, channel[c], patch * patch);
        }
    }
};

template <class Make>
void write(const Store &store, const Run &run, const uint8_t *strip, const Make &make) {
    if (store.stream) return write_patches<Line, true>(store, run, strip, make);
    write_patches<Line, false>(store, run, strip, make);
}

void patches(const Store &store, const Run &run, const uint8_t *strip, size_t pitch) {
    const Job &job = *store.job;
    if (job.patch < NARROWEST || job.patch > WIDEST) return portable_level.patches(store, run, strip, pitch);
    if (store.computes && job.patch == 14)
        return write(store, run, strip, ByArithmetic<14>{Normalise(store.normalisation), pitch, store.stage_pitch});
    if (store.computes && job.patch == 16)
        return write(store, run, strip, ByArithmetic<16>{Normalise(store.normalisation), pitch, store.stage_pitch});
    switch (store.element_bytes) {
        case 1: return write(store, run, strip, ByTable<1>{store, pitch});
        case 2: return write(store, run, strip, ByTable<2>{store, pitch});
        default: return write(store, run, strip, ByTable<4>{store, pitch});
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

}  // namespace
}  // namespace pixelgate
