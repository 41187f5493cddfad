// Writes a run of memory in whole cache lines. Included by the levels that have vectors for it, compiled with their flags;
// everything is in an anonymous namespace, so each level has its own copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pixelgate {
namespace {

constexpr size_t LINE = 64;

// Bytes come in pieces of any size, from memory that may be read LINE bytes past each piece. What does not fill a line
// waits for the next piece, so that every line but the first and the last is written once and whole; with STREAM it
// bypasses the cache. `Line` is a level's 64 bytes: load(source), append(held, source), save(target), stream(target).
template <class Line, bool STREAM>
class LineWriter {
  public:
    explicit LineWriter(uint8_t *target)
        : skip_(reinterpret_cast<uintptr_t>(target) % LINE), at_(target - skip_), held_(skip_) {}

    inline void write(const uint8_t *source, size_t bytes) {
        open_.append(held_, source);
        if (held_ + bytes < LINE) {
            held_ += bytes;
            return;
        }
        const size_t used = LINE - held_;
        close();
        source += used;
        bytes -= used;
        for (; bytes >= LINE; bytes -= LINE, source += LINE, at_ += LINE) {
            Line line;
            line.load(source);
            put(line);
        }
        open_.load(source);
        held_ = bytes;
    }

    inline void finish() { save_part(held_); }

  private:
    inline void put(const Line &line) {
        if (STREAM)
            line.stream(at_);
        else
            line.save(at_);
    }

    inline void save_part(size_t end) {
        alignas(LINE) uint8_t bytes[LINE];
        open_.save(bytes);
        std::memcpy(at_ + skip_, bytes + skip_, end - skip_);
    }

    inline void close() {
        if (skip_)  // the beginning of the first line belongs to somebody else
            save_part(LINE);
        else
            put(open_);
        skip_ = 0;
        at_ += LINE;
    }

    Line open_;
    size_t skip_;
    uint8_t *at_;
    size_t held_;
};

// A run of patches: each channel's plane from the stage, once for every temporal copy.
template <class Line, bool STREAM>
void write_run(uint8_t *target, const uint8_t *stage, size_t pitch, size_t plane, int planes, int copies) {
    LineWriter<Line, STREAM> writer(target);
    for (int p = 0; p < planes; p++, stage += pitch)
        for (int t = 0; t < copies; t++) writer.write(stage, plane);
    writer.finish();
}

}  // namespace
}  // namespace pixelgate
