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
constexpr int CHUNK = 4;                 // patches at a time: streamed stores drain while the next are resampled

size_t pitch_of(size_t bytes) { return (bytes + SLACK + 63) / 64 * 64; }

// Produces rows of the resized picture, top to bottom, a block at a time.
class Resampler {
  public:
    Resampler(const Job &job, const Level &level, int block) : job_(job), level_(level), rows_(block) {
        if (!job.rows) return;
        tap_pitch_ = job.rows->axis.taps + SPARE_TAPS;
        taps_.resize(tap_pitch_ * block);
        if (vertical_first()) {
            if (vertical_only()) return;
            pitch_ = pitch_of(size_t(job.width_in) * job.channels);
            memory_ = allocate(pitch_ * block);
            for (int i = 0; i < block; i++) between_.push_back(memory_.get() + i * pitch_);
        } else {
            while (ring_ < source_rows_of(block) + BATCH) ring_ *= 2;
            pitch_ = pitch_of(size_t(job.width) * 3);
            memory_ = allocate(pitch_ * ring_);
        }
    }

    // Begins rows first .. first + count - 1, RGB, in `targets`: all that cannot be done column by column. Called with
    // rising multiples of `block` and at most `block` rows.
    void begin(int first, int count, uint8_t *const *targets) {
        if (!job_.rows) {
            for (int i = 0; i < count; i++) rows_[i] = source(first + i);
            horizontal(rows_.data(), targets, count);
        } else if (vertical_only()) {
            collect(first, count, targets, [this](int row) { return source(row); });
        } else if (vertical_first()) {
            collect(first, count, between_.data(), [this](int row) { return source(row); });
            level_.vertical(*job_.rows, block_, 0, size_t(job_.width_in) * job_.channels);
            for (int i = 0; i < count; i++) rows_[i] = between_[i];
            horizontal(rows_.data(), targets, count);
        } else {
            fill_ring(first, first + count - 1);
            collect(first, count, targets, [this](int row) { return ring_row(row); });
        }
    }

    // Finishes bytes `begin` to `end` of these rows.
    void finish(size_t begin, size_t end) {
        if (job_.rows && (vertical_only() || !vertical_first())) level_.vertical(*job_.rows, block_, begin, end);
    }

    // Asks for the source of bytes `begin` to `end` of a later block's rows, so that begin() need not wait for it.
    void prefetch(int first, int count, size_t begin, size_t end) const {
        int row = first, last = first + count;
        if (job_.rows) {
            const Axis &axis = job_.rows->axis;
            row = axis.start[first - 1] + axis.count[first - 1];  // rows before are in use
            last = axis.start[last - 1] + axis.count[last - 1];
        }
        const size_t bytes_in = size_t(job_.width_in) * job_.channels, bytes = size_t(job_.width) * 3;
        const size_t source_begin = begin * bytes_in / bytes, source_end = end * bytes_in / bytes;
        for (; row < last; row++)
            for (size_t x = source_begin; x < source_end; x += 64) __builtin_prefetch(source(row) + x, 0, 2);
    }

    void fill(int first, int count, uint8_t *const *targets) {
        begin(first, count, targets);
        finish(0, size_t(job_.width) * 3);
    }

  private:
    bool vertical_only() const { return !job_.columns && job_.channels == 3; }
    bool vertical_first() const { return job_.vertical_first || !job_.columns; }
    const uint8_t *source(int y) const { return job_.pixels + y * job_.row_stride; }
    uint8_t *ring_row(int y) const { return memory_.get() + size_t(y & (ring_ - 1)) * pitch_; }

    // How many source rows a block needs at once.
    int source_rows_of(int block) const {
        const Axis &axis = job_.rows->axis;
        int most = 0;
        for (int y = 0; y < axis.size_out; y += block) {
            const int last = std::min(y + block, axis.size_out) - 1;
            most = std::max(most, axis.start[last] + axis.count[last] - axis.start[y]);
        }
        return most;
    }

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

    // Sets block_ to rows whose taps are found by `row_at`.
    template <class RowAt>
    void collect(int first, int count, uint8_t *const *targets, RowAt row_at) {
        const Axis &axis = job_.rows->axis;
        for (int i = 0; i < count; i++) {
            const uint8_t **taps = taps_.data() + i * tap_pitch_;
            const int start = axis.start[first + i], used = axis.count[first + i];
            for (int k = 0; k < used + SPARE_TAPS; k++) taps[k] = row_at(start + std::min(k, used - 1));
        }
        block_ = {first, count, taps_.data(), tap_pitch_, targets};
    }

    void fill_ring(int first, int last) {
        const Axis &axis = job_.rows->axis;
        const int needed = axis.start[last] + axis.count[last];
        filled_ = std::max(filled_, axis.start[first]);
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
    }

    const Job &job_;
    const Level &level_;
    std::vector<const uint8_t *> taps_, rows_;
    std::vector<uint8_t *> between_;
    Memory memory_;  // a ring of horizontally resized rows, or a block of vertically resized ones
    RowBlock block_{};
    size_t pitch_ = 0, tap_pitch_ = 0;
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

Memory room_for_table(const Job &job) { return allocate(bytes_of(job.element) * 256 * 3); }

Divisor divisor_of(float value) {
    const float high = 1.0f / value;
    const double rest = 1.0 - double(high) * double(value);  // exact
    return {high, float(rest / double(value))};
}

Normalisation normalisation_of(const Job &job) {
    Normalisation n{};
    n.divides_first = job.divisor != 1.0f;
    n.divisor = divisor_of(job.divisor);
    for (int c = 0; c < 3; c++) {
        n.subtract[c] = job.subtract[c];
        n.divide[c] = divisor_of(job.divide[c]);
    }
    return n;
}

Store store_of(const Job &job, const Level &level, const Memory &table) {
    Store store{};
    store.job = &job;
    store.element_bytes = bytes_of(job.element);
    store.split_table = table.get();
    if (job.has_arithmetic) store.normalisation = normalisation_of(job);
    if (level.prepare) level.prepare(store);
    return store;
}

void run_patches(const Job &job, const Level &level) {
    Resampler resampler(job, level, job.patch);
    const Memory table = room_for_table(job);
    Store store = store_of(job, level, table);
    store.grid_width = job.width / job.patch;
    store.plane_bytes = store.element_bytes * job.patch * job.patch;
    store.patch_bytes = store.plane_bytes * 3 * job.temporal;
    store.stage_pitch = (store.plane_bytes + 63) / 64 * 64 + STAGE_GAP;
    const int grid_height = job.height / job.patch;
    const size_t bytes = store.patch_bytes * store.grid_width * grid_height;
    store.stream = level.finish_streaming && bytes >= STREAM_FROM;
    const size_t stage_bytes = store.stage_pitch * 3 * STAGES + STAGE_GAP;
    const Memory stage = allocate(stage_bytes);
    std::memset(stage.get(), 0, stage_bytes);  // the gaps are read, though never used
    store.stage = stage.get() + STAGE_GAP;
    const size_t row_bytes = size_t(job.width) * 3;
    const int chunk = store.stream ? (CHUNK + job.merge - 1) / job.merge * job.merge : store.grid_width;
    Strip strip(job.patch, row_bytes);
    for (int y = 0; y < grid_height; y++) {
        resampler.begin(y * job.patch, job.patch, strip.targets.data());
        size_t finished = 0;
        const auto finish = [&](int x) {  // the columns of a chunk that ends before patch x, in whole lines
            const size_t needed = std::min((size_t(x) * job.patch * 3 + 63) / 64 * 64, row_bytes);
            resampler.finish(finished, needed);
            finished = needed;
        };
        finish(chunk);
        for (int x = 0; x < store.grid_width; x += chunk) {
            finish(x + 2 * chunk);  // a chunk ahead: it can then be loaded without waiting for the stores
            if (store.stream && y + 1 < grid_height) {
                const size_t patch_bytes = size_t(job.patch) * 3;
                resampler.prefetch((y + 1) * job.patch, job.patch, x * patch_bytes,
                                   std::min(size_t(x + chunk) * patch_bytes, row_bytes));
            }
            level.patches(store, {y, x, std::min(x + chunk, store.grid_width)}, strip.targets[0], strip.pitch);
        }
    }
    // once, at the end: streamed stores drain while the next rows are resampled
    if (store.stream) level.finish_streaming();
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
    const Memory table = room_for_table(job);
    const Store store = store_of(job, level, table);
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
