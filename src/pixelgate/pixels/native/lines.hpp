// Writes patches in whole cache lines. Included by the levels that have vectors for it, compiled with their flags;
// everything is in an anonymous namespace, so each level has its own copy.
#pragma once

#include "kernels.hpp"

#include <cstring>

namespace pixelgate {
namespace {

constexpr size_t LINE = 64;
static_assert(STAGE_GAP >= 2 * LINE, "pieces are read LINE bytes beyond both ends");

// Bytes come in pieces of at least LINE bytes, from memory that may be read LINE bytes beyond both ends. What does not
// fill a line waits for the next piece, so that every line but the first and the last of a run is written once and
// whole; with STREAM it bypasses the cache. `Line` is a level's 64 bytes: load(source), load(held, tail, source) for
// `held` bytes from one place and the rest from another, save(target), stream(target).
template <class Line, bool STREAM>
class LineWriter {
  public:
    void begin(uint8_t *target) {
        skip_ = reinterpret_cast<uintptr_t>(target) % LINE;
        at_ = target - skip_;
        held_ = skip_;
    }

    inline void write(const uint8_t *source, size_t bytes) {
        Line line;
        if (skip_) {  // the beginning of the first line belongs to somebody else
            line.load(source - held_);
            save_part(line, skip_, LINE);
            skip_ = 0;
        } else if (held_) {
            line.load(held_, tail_, source - held_);
            put(line);
        } else {
            line.load(source);
            put(line);
        }
        const uint8_t *const end = source + bytes;
        for (source += LINE - held_; source + LINE <= end; source += LINE) {
            at_ += LINE;
            line.load(source);
            put(line);
        }
        at_ += LINE;
        tail_ = source;
        held_ = size_t(end - source);
    }

    void finish() {
        if (!held_) return;
        Line line;
        line.load(tail_);
        save_part(line, 0, held_);
    }

  private:
    inline void put(const Line &line) {
        if (STREAM)
            line.stream(at_);
        else
            line.save(at_);
    }

    void save_part(const Line &line, size_t begin, size_t end) {
        alignas(LINE) uint8_t bytes[LINE];
        line.save(bytes);
        std::memcpy(at_ + begin, bytes + begin, end - begin);
    }

    size_t skip_ = 0;
    uint8_t *at_ = nullptr;
    const uint8_t *tail_ = nullptr;  // `held_` bytes that wait for the rest of their line
    size_t held_ = 0;
};

// Makes each patch's planes with `make(pixels, stage)` and writes them, once for every temporal copy. Writing lags a
// patch behind: what has just been stored cannot be loaded in other pieces before it has reached the cache. The patch
// before that is still there, as the rest of its last line waits.
template <class Line, bool STREAM, class Make>
void write_patches(const Store &store, const Run &run, const uint8_t *strip, Make make) {
    const Job &job = *store.job;
    LineWriter<Line, STREAM> writer;
    const auto stage = [&](int x) { return store.stage + size_t(x % STAGES) * 3 * store.stage_pitch; };
    for (int x = run.begin; x <= run.end; x++) {
        if (x < run.end) make(strip + size_t(x) * job.patch * 3, stage(x));
        const int done = x - 1;
        if (done < run.begin) continue;
        if (done % job.merge == 0) writer.begin(patch_address(store, run.y, done));
        for (int c = 0; c < 3; c++)
            for (int t = 0; t < job.temporal; t++) writer.write(stage(done) + c * store.stage_pitch, store.plane_bytes);
        if (done % job.merge == job.merge - 1) writer.finish();
    }
}

}  // namespace
}  // namespace pixelgate
