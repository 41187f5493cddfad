// Owns what a Weights points to.
#pragma once

#include "kernels.hpp"
#include "memory.hpp"

#include <vector>

namespace pixelgate {

class Preparation : public Weights {
  public:
    Preparation(const Axis &axis, int channels);
    Preparation(const Preparation &) = delete;
    Preparation &operator=(const Preparation &) = delete;

    void make_digits();  // the form that multiplies 8-bit digits
    size_t bytes() const;

  private:
    void make_pairs();
    void make_quads();
    void make_programme();
    int32_t scaled(int32_t weight) const { return weight * (1 << (shift - axis.precision)); }

    std::vector<int32_t> start_, count_, weights_, paired_, groups_, quads_, steps_, offsets_;
    Memory programme_;
    size_t programme_bytes_ = 0;
};

}  // namespace pixelgate
