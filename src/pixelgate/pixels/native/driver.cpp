// The part every level shares: rows through the two passes, finished rows into the layout.
#include "driver.hpp"

#include "memory.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace pixelgate {
namespace {

constexpr size_t STREAM_FROM = 8 << 20;  // output bytes from which stores that bypass the cache pay
constexpr int BATCH = 4;                 // source rows resampled at a time
constexpr int SPARE_TAPS = 3;            // pointers that a level may follow beyond the last tap
constexpr int BLOCK = 8;                 // finished rows at a time, where the layout does not say

size_t pitch_of(size_t bytes) { return (bytes + SLACK + 63) / 64 * 64; }

// Produces rows of the resized picture, top to bottom.
class Resampler {
  public:
    Resampler(const Job &job, const Level &level, int block) : job_(job), level_(level), rows_(block) {
        if (!job.rows) return;
        taps_.resize(job.rows->axis.taps + SPARE_TAPS);
        if (vertical_only()) return;
        if (vertical_first()) {
            pitch_ = pitch_of(size_t(job.width_in) * job.channels);
            memory_ = allocate(pitch_ * block);
        } else {
            while (ring_ < job.rows->axis.taps + BATCH) ring_ *= 2;
            pitch_ = pitch_of(size_t(job.width) * 3);
            memory_ = allocate(pitch_ * ring_);
        }
    }

    // Rows first .. first + count - 1, RGB, into `targets`. Called with rising `first`, at most `block` at a time.
    void fill(int first, int count, uint8_t *const *targets) {
        if (!job_.rows) {
            for (int i = 0; i < count; i++) rows_[i] = source(first + i);
            horizontal(rows_.data(), targets, count);
        } else if (vertical_only()) {
            for (int i = 0; i < count; i++) vertical_from_source(first + i, targets[i]);
        } else if (vertical_first()) {
            for (int i = 0; i < count; i++) {
                uint8_t *row = memory_.get() + i * pitch_;
                vertical_from_source(first + i, row);
                rows_[i] = row;
            }
            horizontal(rows_.data(), targets, count);
        } else {
            for (int i = 0; i < count; i++) vertical_from_ring(first + i, targets[i]);
        }
    }

  private:
    bool vertical_only() const { return !job_.columns && job_.channels == 3; }
    bool vertical_first() const { return job_.vertical_first || !job_.columns; }
    const uint8_t *source(int y) const { return job_.pixels + y * job_.row_stride; }
    uint8_t *ring_row(int y) const { return memory_.get() + size_t(y & (ring_ - 1)) * pitch_; }

    void horizontal(const uint8_t *const *rows, uint8_t *const *targets, int count) const {
        if (job_.columns) return level_.horizontal(*job_.columns, rows, targets, count);
        for (int i = 0; i < count; i++) {
            if (job_.channels == 3) {
                std::memcpy(targets[i], rows[i], size_t(job_.width) * 3);
                continue;
            }
            for (int x = 0; x < job_.width; x++)
                for (int c = 0; c < 3; c++) targets[i][x * 3 + c] = rows[i][x * 4 + c];
        }
    }

    template <class RowAt>
    void vertical(int y, uint8_t *target, size_t bytes, RowAt row_at) {
        const Axis &axis = job_.rows->axis;
        const int start = axis.start[y], count = axis.count[y];
        for (int k = 0; k < count; k++) taps_[k] = row_at(start + k);
        for (int k = count; k < count + SPARE_TAPS; k++) taps_[k] = taps_[count - 1];
        level_.vertical(*job_.rows, y, taps_.data(), target, bytes);
    }

    void vertical_from_source(int y, uint8_t *target) {
        vertical(y, target, size_t(job_.width_in) * job_.channels, [this](int row) { return source(row); });
    }

    void vertical_from_ring(int y, uint8_t *target) {
        const Axis &axis = job_.rows->axis;
        const int needed = axis.start[y] + axis.count[y];
        filled_ = std::max(filled_, axis.start[y]);
        while (filled_ < needed) {
            const uint8_t *rows[BATCH];
            uint8_t *targets[BATCH];
            const int count = std::min(BATCH, job_.height_in - filled_);
            for (int i = 0; i < count; i++) {
                rows[i] = source(filled_ + i);
                targets[i] = ring_row(filled_ + i);
            }
            level_.horizontal(*job_.columns, rows, targets, count);
            filled_ += count;
        }
        vertical(y, target, size_t(job_.width) * 3, [this](int row) { return ring_row(row); });
    }

    const Job &job_;
    const Level &level_;
    std::vector<const uint8_t *> taps_, rows_;
    Memory memory_;  // a ring of horizontally resized rows, or a block of vertically resized ones
    size_t pitch_ = 0;
    int ring_ = 1;
    int filled_ = 0;
};

void run_pixels(const Job &job, const Level &level) {
    Resampler resampler(job, level, BLOCK);
    for (int y = 0; y < job.height; y += BLOCK) {
        uint8_t *targets[BLOCK];
        const int count = std::min(BLOCK, job.height - y);
        for (int i = 0; i < count; i++) targets[i] = static_cast<uint8_t *>(job.out) + (y + i) * job.strides[0];
        resampler.fill(y, count, targets);
    }
}

// Rows of memory that levels may read SLACK bytes past their end.
class Strip {
  public:
    Strip(int rows, size_t bytes) : pitch(pitch_of(bytes)), targets(rows), memory_(allocate(pitch * rows)) {
        std::memset(memory_.get(), 0, pitch * rows);  // the slack is read, though never used
        for (int i = 0; i < rows; i++) targets[i] = memory_.get() + i * pitch;
    }

    const size_t pitch;
    std::vector<uint8_t *> targets;

  private:
    const Memory memory_;
};

Memory split_table(const Job &job, const Level &level) {
    Memory table = allocate(bytes_of(job.element) * 256 * 3);
    if (level.split_table) level.split_table(job, table.get());
    return table;
}

Store store_of(const Job &job, const Memory &table) {
    Store store{};
    store.job = &job;
    store.element_bytes = bytes_of(job.element);
    store.split_table = table.get();
    return store;
}

void run_patches(const Job &job, const Level &level) {
    Resampler resampler(job, level, job.patch);
    const Memory table = split_table(job, level);
    Store store = store_of(job, table);
    store.grid_width = job.width / job.patch;
    store.plane_bytes = store.element_bytes * job.patch * job.patch;
    store.patch_bytes = store.plane_bytes * 3 * job.temporal;
    store.stage_pitch = (store.plane_bytes + 63) / 64 * 64 + 64;
    const int grid_height = job.height / job.patch;
    store.stream = store.patch_bytes * store.grid_width * grid_height >= STREAM_FROM;
    const Memory stage = allocate(store.stage_pitch * 3 * job.merge + 64);
    std::memset(stage.get(), 0, store.stage_pitch * 3 * job.merge + 64);  // the gaps are read, though never used
    store.stage = stage.get();
    Strip strip(job.patch, size_t(job.width) * 3);
    for (int y = 0; y < grid_height; y++) {
        resampler.fill(y * job.patch, job.patch, strip.targets.data());
        level.patches(store, y, strip.targets[0], strip.pitch);
    }
    // once, at the end: streamed stores drain while the next rows are resampled
    if (store.stream && level.finish_streaming) level.finish_streaming();
}

// Cuts a row of the canvas into the rows of its tiles.
void store_row(const Store &store, const Level &level, const uint8_t *row, int y) {
    const Job &job = *store.job;
    const int across = job.canvas_width / job.tile_width;
    for (int t = 0; t < across; t++) {
        const int64_t tile = int64_t(y / job.tile_height) * across + t;
        uint8_t *targets[3];
        for (int c = 0; c < 3; c++)
            targets[c] = static_cast<uint8_t *>(job.out) + tile * job.strides[0] + c * job.strides[1] +
                         (y % job.tile_height) * job.strides[2];
        level.planes(store, row + size_t(t) * job.tile_width * 3, job.tile_width, targets);
    }
}

void run_tiles(const Job &job, const Level &level) {
    Resampler resampler(job, level, BLOCK);
    Strip strip(BLOCK + 1, size_t(job.canvas_width) * 3);
    for (uint8_t *row : strip.targets)
        for (int x = 0; x < job.canvas_width; x++) std::memcpy(row + x * 3, job.fill, 3);
    const Memory table = split_table(job, level);
    const Store store = store_of(job, table);
    const uint8_t *const empty = strip.targets[BLOCK];
    uint8_t *targets[BLOCK];
    for (int i = 0; i < BLOCK; i++) targets[i] = strip.targets[i] + size_t(job.left) * 3;

    for (int y = 0; y < job.top; y++) store_row(store, level, empty, y);
    for (int y = 0; y < job.height; y += BLOCK) {
        const int count = std::min(BLOCK, job.height - y);
        resampler.fill(y, count, targets);
        for (int i = 0; i < count; i++) store_row(store, level, strip.targets[i], job.top + y + i);
    }
    for (int y = job.top + job.height; y < job.canvas_height; y++) store_row(store, level, empty, y);
}

}  // namespace

void run(const Job &job, const Level &level) {
    switch (job.layout) {
        case PATCHES: return run_patches(job, level);
        case TILES: return run_tiles(job, level);
        default: return run_pixels(job, level);
    }
}

}  // namespace pixelgate
