#pragma once

#include <trireme/grad/codes/in_flight.h>
#include <trireme/kernels/block_codes.h>
#include <trireme/kernels/sparse_codes.h>

#include <memory>

namespace trireme {

std::unique_ptr<InFlight> make_block_codes(const BlockFormat& format, bool has_dither,
                                           CodeExchange exchange);
std::unique_ptr<InFlight> make_cast_codes(at::ScalarType dtype, CodeExchange exchange);
std::unique_ptr<InFlight> make_sparse_codes(const TopK& method, CodeExchange exchange);

}  // namespace trireme
