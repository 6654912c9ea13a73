#pragma once

#include <trireme/common/half.h>

#include <cstdint>
#include <type_traits>

// The elements and the operations that the reductions' loops are made of.
namespace trireme::shm {

using cpu::BFloat16;
using cpu::Half;

// A bool of any process: a byte.
struct Truth {
  uint8_t byte;
};

template <typename Real>
struct Complex {
  Real real;
  Real imaginary;
};

// Return a stored value in the type computed in. (For fp16 only that type counts: its loops are
// Isa::widen and Isa::narrow.)
TRIREME_INLINE float load(BFloat16 value) { return cpu::to_float(value); }
TRIREME_INLINE float load(Half value) { return cpu::to_float(value); }
TRIREME_INLINE uint8_t load(Truth value) { return value.byte != 0; }
template <typename T>
TRIREME_INLINE T load(T value) {
  return value;
}

template <typename T>
using Computed = decltype(load(T{}));

template <typename T>
TRIREME_INLINE T store(Computed<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return cpu::to_bfloat16(value);
  } else {
    return T{value};
  }
}

// The operations, on unsigned numbers where integers wrap.
struct Sum {
  template <typename C>
  TRIREME_INLINE C operator()(C a, C b) const {
    return static_cast<C>(a + b);
  }
};
template <typename C>
struct SumDivided {
  C divisor;
  TRIREME_INLINE C operator()(C a, C b) const { return (a + b) / divisor; }
};
// Divides the sum, which has wrapped around as T does, towards zero.
template <typename T>
struct SumQuotient {
  using C = std::make_unsigned_t<T>;
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;  // holds any divisor
  Wide divisor;
  TRIREME_INLINE C operator()(C a, C b) const {
    return static_cast<C>(static_cast<T>(static_cast<C>(a + b)) / divisor);
  }
};
template <typename C>
struct SumScaled {
  C factor;
  TRIREME_INLINE C operator()(C a, C b) const { return (a + b) * factor; }
};
struct Product {
  template <typename C>
  TRIREME_INLINE C operator()(C a, C b) const {
    if constexpr (std::is_integral_v<C>) {
      return static_cast<C>(1u * a * b);  // 1u: two uint16_t would become an int, which overflows
    } else {
      return a * b;
    }
  }
};
template <typename C>
TRIREME_INLINE bool is_nan(C value) {
  if constexpr (std::is_integral_v<C>) {
    return false;
  } else {
    return value != value;
  }
}
struct Min {
  template <typename C>
  TRIREME_INLINE C operator()(C a, C b) const {
    return ((b < a) | is_nan(b)) ? b : a;  // `|` evaluates both: no branch
  }
};
struct Max {
  template <typename C>
  TRIREME_INLINE C operator()(C a, C b) const {
    return ((b > a) | is_nan(b)) ? b : a;
  }
};
struct And {
  TRIREME_INLINE uint8_t operator()(uint8_t a, uint8_t b) const { return a & b; }
};
struct Or {
  TRIREME_INLINE uint8_t operator()(uint8_t a, uint8_t b) const { return a | b; }
};
struct Xor {
  TRIREME_INLINE uint8_t operator()(uint8_t a, uint8_t b) const { return a ^ b; }
};

}  // namespace trireme::shm
