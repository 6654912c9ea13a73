#pragma once

#include <trireme/grad/codes/in_flight.h>

#include <memory>

namespace trireme {

std::unique_ptr<InFlight> make_casts(at::ScalarType dtype, CodeExchange exchange);
std::unique_ptr<InFlight> make_drawn_values(const RandomK& method, CodeExchange exchange);

}  // namespace trireme
