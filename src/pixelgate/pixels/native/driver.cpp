// The part every level shares: rows through the two passes, strips into the layout. Entry points for kernels.py.
#include "kernels.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace pixelgate {
namespace {

constexpr size_t SLACK = 64;          // strips may be read this far past a row's end
constexpr size_t STREAM_FROM = 1 << 20;  // output bytes from which stores that bypass the cache pay
constexpr int BATCH = 4;              // source rows resampled at a time

struct Free {
    void operator()(uint8_t *p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory allocate(size_t bytes) {
    void *p = nullptr;
    if (posix_memalign(&p, 64, std::max<size_t>(bytes, 64)) != 0) throw std::bad_alloc();
    return Memory(static_cast<uint8_t *>(p));
}

size_t pitch_of(size_t bytes) { return (bytes + SLACK + 63) / 64 * 64; }

int32_t pair_of(int32_t a, int32_t b) { return int32_t(uint32_t(a & 0xFFFF) | uint32_t(b & 0xFFFF) << 16); }

// Regroups an axis; `storage` owns the result.
PairedAxis pair_axis(const Axis &axis, std::vector<int32_t> &storage) {
    if (!axis.weights) return {&axis, nullptr, 0, true};
    const size_t total = size_t(axis.size_out) * axis.taps;
    const bool narrow = std::all_of(axis.weights, axis.weights + total, [](int32_t w) { return w == int16_t(w); });
    const int pairs = (axis.taps + 3) / 4 * 2;  // whole groups of four taps
    storage.assign(size_t(axis.size_out) * pairs * 2, 0);
    for (int i = 0; i < axis.size_out; i++) {
        const int32_t *weights = axis.weights + size_t(i) * axis.taps;
        int32_t *out = storage.data() + size_t(i) * pairs * 2;
        for (int k = 0; k < axis.count[i]; k += 2, out += 2) {
            const int32_t a = weights[k], b = k + 1 < axis.count[i] ? weights[k + 1] : 0;
            out[0] = narrow ? pair_of(a, b) : pair_of(a & 4095, b & 4095);
            out[1] = narrow ? 0 : pair_of(a >> 12, b >> 12);
        }
    }
    return {&axis, storage.data(), pairs, narrow};
}

// How many leading outputs may be computed from whole 16-byte blocks. The last output never is: its fourth byte
// would fall outside the row.
int32_t safe_outputs(const Axis &axis, int channels) {
    if (!axis.weights) return 0;
    const int64_t row = int64_t(axis.size_in) * channels;
    int32_t x = 0;
    for (; x < axis.size_out - 1; x++) {
        const int64_t groups = (axis.count[x] + 3) / 4;
        if ((axis.start[x] + (groups - 1) * 4) * channels + 16 > row) break;
    }
    return x;
}

class Resampler {
  public:
    Resampler(const Job &job, const Level &level, int block)
        : job_(job), level_(level), rows_(pair_axis(job.rows, row_weights_)),
          columns_{pair_axis(job.columns, column_weights_), job.channels, safe_outputs(job.columns, job.channels)} {
        const size_t source_bytes = size_t(job.columns.size_in) * job.channels;
        if (!job.rows.weights) return;
        taps_.resize(job.rows.taps + 2);
        if (vertical_only()) return;
        if (job.vertical_first || !job.columns.weights) {
            pitch_ = pitch_of(source_bytes);
            memory_ = allocate(pitch_ * block);
        } else {
            while (ring_ < job.rows.taps + BATCH) ring_ *= 2;
            pitch_ = pitch_of(size_t(job.columns.size_out) * 3);
            memory_ = allocate(pitch_ * ring_);
        }
    }

    // Rows first .. first + count - 1 of the resized picture, RGB, into `targets`. Called with rising `first`.
    void fill(int first, int count, uint8_t *const *targets) {
        if (!job_.rows.weights) {
            std::vector<const uint8_t *> rows(count);
            for (int i = 0; i < count; i++) rows[i] = source(first + i);
            horizontal(rows.data(), targets, count);
        } else if (vertical_only()) {
            for (int i = 0; i < count; i++) vertical_from_source(first + i, targets[i]);
        } else if (job_.vertical_first || !job_.columns.weights) {
            std::vector<const uint8_t *> rows(count);
            for (int i = 0; i < count; i++) {
                uint8_t *row = memory_.get() + i * pitch_;
                vertical_from_source(first + i, row);
                rows[i] = row;
            }
            horizontal(rows.data(), targets, count);
        } else {
            for (int i = 0; i < count; i++) vertical_from_ring(first + i, targets[i]);
        }
    }

  private:
    bool vertical_only() const { return !job_.columns.weights && job_.channels == 3; }
    const uint8_t *source(int y) const { return job_.pixels + y * job_.row_stride; }
    uint8_t *ring_row(int y) const { return memory_.get() + size_t(y & (ring_ - 1)) * pitch_; }

    void horizontal(const uint8_t *const *rows, uint8_t *const *targets, int count) const {
        if (job_.columns.weights) return level_.horizontal(columns_, rows, targets, count);
        const int width = job_.columns.size_out;
        for (int i = 0; i < count; i++) {
            if (job_.channels == 3) {
                std::memcpy(targets[i], rows[i], size_t(width) * 3);
                continue;
            }
            for (int x = 0; x < width; x++)
                for (int c = 0; c < 3; c++) targets[i][x * 3 + c] = rows[i][x * 4 + c];
        }
    }

    template <class RowAt>
    void vertical(int y, uint8_t *target, size_t bytes, RowAt row_at) {
        const int start = job_.rows.start[y], count = job_.rows.count[y];
        for (int k = 0; k < count; k++) taps_[k] = row_at(start + k);
        taps_[count] = taps_[count - 1];
        level_.vertical(rows_, y, taps_.data(), target, bytes);
    }

    void vertical_from_source(int y, uint8_t *target) {
        const size_t bytes = size_t(job_.columns.size_in) * job_.channels;
        vertical(y, target, bytes, [this](int row) { return source(row); });
    }

    void vertical_from_ring(int y, uint8_t *target) {
        const int needed = job_.rows.start[y] + job_.rows.count[y];
        filled_ = std::max(filled_, job_.rows.start[y]);
        while (filled_ < needed) {
            const uint8_t *rows[BATCH];
            uint8_t *targets[BATCH];
            const int count = std::min(BATCH, job_.rows.size_in - filled_);
            for (int i = 0; i < count; i++) {
                rows[i] = source(filled_ + i);
                targets[i] = ring_row(filled_ + i);
            }
            level_.horizontal(columns_, rows, targets, count);
            filled_ += count;
        }
        vertical(y, target, size_t(job_.columns.size_out) * 3, [this](int row) { return ring_row(row); });
    }

    const Job &job_;
    const Level &level_;
    std::vector<int32_t> row_weights_, column_weights_;
    const PairedAxis rows_;
    const Horizontal columns_;
    std::vector<const uint8_t *> taps_;
    Memory memory_;  // a ring of horizontally resized rows, or a block of vertically resized ones
    size_t pitch_ = 0;
    int ring_ = 1;
    int filled_ = 0;
};

void run_pixels(const Job &job, const Level &level) {
    constexpr int BLOCK = 8;
    Resampler resampler(job, level, BLOCK);
    const int height = job.rows.size_out;
    for (int y = 0; y < height; y += BLOCK) {
        uint8_t *targets[BLOCK];
        const int count = std::min(BLOCK, height - y);
        for (int i = 0; i < count; i++) targets[i] = static_cast<uint8_t *>(job.out) + (y + i) * job.out_stride;
        resampler.fill(y, count, targets);
    }
}

void run_patches(const Job &job, const Level &level) {
    Resampler resampler(job, level, job.patch);
    static constexpr size_t ELEMENT_BYTES[] = {1, 4, 2, 2};
    PatchStore store{};
    store.job = &job;
    store.grid_width = job.columns.size_out / job.patch;
    store.element_bytes = ELEMENT_BYTES[job.element];
    store.patch_bytes = store.element_bytes * 3 * job.temporal * job.patch * job.patch;
    const int grid_height = job.rows.size_out / job.patch;
    store.stream = store.patch_bytes * store.grid_width * grid_height >= STREAM_FROM;
    const Memory stage = allocate(store.patch_bytes * job.merge);
    store.stage = stage.get();

    const size_t pitch = pitch_of(size_t(job.columns.size_out) * 3);
    const Memory strip = allocate(pitch * job.patch);
    std::memset(strip.get(), 0, pitch * job.patch);  // the slack is read, though never used
    std::vector<uint8_t *> targets(job.patch);
    for (int i = 0; i < job.patch; i++) targets[i] = strip.get() + i * pitch;
    for (int y = 0; y < grid_height; y++) {
        resampler.fill(y * job.patch, job.patch, targets.data());
        level.patches(store, y, strip.get(), pitch);
    }
}

const Level *level_named(int level) {
#if defined(__x86_64__)
    if (level == 1 && __builtin_cpu_supports("avx2")) return &avx2_level;
#endif
    return level == 0 ? &portable_level : nullptr;
}

}  // namespace
}  // namespace pixelgate

extern "C" {

enum Status { OK = 0, NO_MEMORY = 1, NO_LEVEL = 2 };

// The size of Job, so that the caller can check that its mirror is the same structure.
__attribute__((visibility("default"))) int pixelgate_job_size() { return int(sizeof(pixelgate::Job)); }

// 1 when this processor can run the level: 0 portable, 1 AVX2.
__attribute__((visibility("default"))) int pixelgate_has_level(int level) {
    return pixelgate::level_named(level) != nullptr;
}

__attribute__((visibility("default"))) int pixelgate_run(const pixelgate::Job *job, int level) {
    const pixelgate::Level *chosen = pixelgate::level_named(level);
    if (!chosen) return NO_LEVEL;
    try {
        if (job->layout == pixelgate::PATCHES)
            pixelgate::run_patches(*job, *chosen);
        else
            pixelgate::run_pixels(*job, *chosen);
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
    return OK;
}
}
