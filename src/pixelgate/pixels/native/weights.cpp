// Regroups the weights of an axis for the levels: made once, then read by many pictures.
#include "weights.hpp"

#include <algorithm>
#include <cstring>

namespace pixelgate {
namespace {

constexpr int BLOCK = 16;   // output bytes of a step
constexpr int WINDOW = 64;  // source bytes of a step

int32_t pair_of(int32_t a, int32_t b) { return int32_t(uint32_t(a & 0xFFFF) | uint32_t(b & 0xFFFF) << 16); }

// Balanced base-256 digits, lowest first; false if `count` of them do not hold the weight.
bool split(int32_t weight, int count, int8_t *digits) {
    for (int d = 0; d < count; d++) {
        digits[d] = int8_t(weight & 0xFF);
        weight = (weight - digits[d]) >> 8;
    }
    return weight == 0;
}

// How many leading outputs may be computed from whole 16-byte blocks. The last output never is: its fourth byte
// would fall outside the row.
int32_t safe_outputs(const Axis &axis, int channels) {
    const int64_t row = int64_t(axis.size_in) * channels;
    int32_t x = 0;
    for (; x < axis.size_out - 1; x++) {
        const int64_t groups = (axis.count[x] + 3) / 4;
        if ((axis.start[x] + (groups - 1) * 4) * channels + 16 > row) break;
    }
    return x;
}

}  // namespace

Preparation::Preparation(const Axis &source, int source_channels) : Weights{} {
    const size_t total = size_t(source.size_out) * source.taps;
    start_.assign(source.start, source.start + source.size_out);
    count_.assign(source.count, source.count + source.size_out);
    weights_.assign(source.weights, source.weights + total);
    axis = source;
    axis.start = start_.data();
    axis.count = count_.data();
    axis.weights = weights_.data();
    channels = source_channels;
    narrow = std::all_of(weights_.begin(), weights_.end(), [](int32_t w) { return w == int16_t(w); });
    make_pairs();
    if (channels) safe = safe_outputs(axis, channels);
}

void Preparation::make_pairs() {
    pairs = (axis.taps + 3) / 4 * 2;  // whole groups of four taps
    paired_.assign(size_t(axis.size_out) * pairs * 2, 0);
    for (int i = 0; i < axis.size_out; i++) {
        const int32_t *weights = axis.weights + size_t(i) * axis.taps;
        int32_t *out = paired_.data() + size_t(i) * pairs * 2;
        for (int k = 0; k < axis.count[i]; k += 2, out += 2) {
            const int32_t a = weights[k], b = k + 1 < axis.count[i] ? weights[k + 1] : 0;
            out[0] = narrow ? pair_of(a, b) : pair_of(a & 4095, b & 4095);
            out[1] = narrow ? 0 : pair_of(a >> 12, b >> 12);
        }
    }
    paired = paired_.data();
}

void Preparation::make_digits() {
    int8_t unused[3];
    const bool two = std::all_of(weights_.begin(), weights_.end(), [&](int32_t w) { return split(w, 2, unused); });
    digits = two ? 2 : 3;
    // Half is added in units of the highest digit; where it is no multiple of them, all is scaled up until it is.
    const int unit = 8 * (digits - 1);
    shift = std::max(axis.precision, unit + 1);
    half = 1 << (shift - 1 - unit);
    if (channels && int64_t(axis.size_in) * channels >= WINDOW) make_programme();
    if (!channels && !narrow) make_quads();
}

void Preparation::make_quads() {
    for (int i = 0; i < axis.size_out; i++) {
        groups_.push_back(int32_t(quads_.size() / digits));
        const int32_t *weights = axis.weights + size_t(i) * axis.taps;
        for (int first = 0; first < axis.count[i]; first += 4) {
            int8_t quad[3][4] = {};
            for (int t = 0; t < 4 && first + t < axis.count[i]; t++) {
                int8_t digit[3] = {};
                split(scaled(weights[first + t]), digits, digit);
                for (int d = 0; d < digits; d++) quad[d][t] = digit[d];
            }
            for (int d = 0; d < digits; d++) {
                int32_t packed;
                std::memcpy(&packed, quad[d], 4);
                quads_.push_back(packed);
            }
        }
    }
    groups_.push_back(int32_t(quads_.size() / digits));
    groups = groups_.data();
    quads = quads_.data();
}

// For each block of 16 output bytes a list of steps. A step names 64 source bytes; each of the block's 16 lanes picks
// up to four taps of its own pixel and channel out of them.
void Preparation::make_programme() {
    const int64_t row = int64_t(axis.size_in) * channels;
    const int step_bytes = WINDOW * (1 + digits);
    const int bytes_out = axis.size_out * 3;
    std::vector<uint8_t> steps_made;
    for (int block = 0; block * BLOCK < bytes_out; block++) {
        steps_.push_back(int32_t(offsets_.size()));
        int next[BLOCK], end[BLOCK];  // taps still to be done, per lane
        for (int lane = 0; lane < BLOCK; lane++) {
            const int x = (block * BLOCK + lane) / 3;
            next[lane] = x < axis.size_out ? axis.start[x] : 0;
            end[lane] = x < axis.size_out ? axis.start[x] + axis.count[x] : 0;
        }
        for (;;) {
            int64_t base = row;
            for (int lane = 0; lane < BLOCK; lane++)
                if (next[lane] < end[lane]) base = std::min(base, int64_t(next[lane]) * channels);
            if (base == row) break;
            base = std::min(base, row - WINDOW);
            const size_t at = steps_made.size();
            steps_made.resize(at + step_bytes, 0);
            offsets_.push_back(int32_t(base));
            for (int lane = 0; lane < BLOCK; lane++) {
                const int x = (block * BLOCK + lane) / 3, channel = (block * BLOCK + lane) % 3;
                for (int t = 0; t < 4 && next[lane] < end[lane]; t++, next[lane]++) {
                    const int64_t byte = int64_t(next[lane]) * channels + channel - base;
                    if (byte >= WINDOW) break;
                    int8_t digit[3] = {};
                    split(scaled(axis.weights[size_t(x) * axis.taps + next[lane] - axis.start[x]]), digits, digit);
                    steps_made[at + lane * 4 + t] = uint8_t(byte);
                    for (int d = 0; d < digits; d++)
                        steps_made[at + WINDOW * (1 + d) + lane * 4 + t] = uint8_t(digit[d]);
                }
            }
        }
    }
    steps_.push_back(int32_t(offsets_.size()));
    programme_ = allocate(steps_made.size());
    programme_bytes_ = steps_made.size();
    std::memcpy(programme_.get(), steps_made.data(), steps_made.size());
    steps = steps_.data();
    offsets = offsets_.data();
    programme = programme_.get();
}

size_t Preparation::bytes() const {
    const size_t words = start_.size() + count_.size() + weights_.size() + paired_.size() + groups_.size() +
                         quads_.size() + steps_.size() + offsets_.size();
    return sizeof(*this) + words * sizeof(int32_t) + programme_bytes_;
}

}  // namespace pixelgate
