// What kernels.py calls. Nothing is thrown across this border.
#include "bicubic_f32.hpp"
#include "driver.hpp"
#include "weights.hpp"

#include <new>

namespace {

using namespace pixelgate;

enum Status { OK = 0, NO_MEMORY = 1, NO_LEVEL = 2 };

const Level *level_named(int level) {
#if defined(__x86_64__)
    if (level == 2 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &avx512_level;
    if (level == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2_level;
#endif
    return level == 0 ? &portable_level : nullptr;
}

template <class Work>
int guarded(Work work) {
    try {
        work();
        return OK;
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The sizes of the structures, so that the caller can check that its mirrors are the same.
EXPORT int pixelgate_job_size() { return int(sizeof(Job)); }
EXPORT int pixelgate_bicubic_job_size() { return int(sizeof(BicubicJob)); }

// 1 when this processor can run the level: 0 portable, 1 AVX2, 2 AVX-512.
EXPORT int pixelgate_has_level(int level) { return level_named(level) != nullptr; }

// Regroups an axis for a level, to be used in Job.rows (channels 0) or Job.columns; null without memory.
EXPORT const Weights *pixelgate_prepare(const Axis *axis, int channels, int level, size_t *bytes) {
    Preparation *made = nullptr;
    const int status = guarded([&] {
        made = new Preparation(*axis, channels);
        if (level >= 2) made->make_digits();
        *bytes = made->bytes();
    });
    if (status == OK) return made;
    delete made;
    return nullptr;
}

EXPORT void pixelgate_release(const Weights *weights) { delete static_cast<const Preparation *>(weights); }

EXPORT int pixelgate_run(const Job *job, int level) {
    const Level *chosen = level_named(level);
    if (!chosen) return NO_LEVEL;
    return guarded([&] { run(*job, *chosen); });
}

EXPORT int pixelgate_bicubic_f32(const BicubicJob *job) {
    return guarded([&] { bicubic_f32(*job); });
}
