#include <trireme/grad/codes/code_exchange.h>

#include <trireme/grad/codes/gathered_codes.h>
#include <trireme/grad/codes/low_rank.h>
#include <trireme/grad/codes/reduced_codes.h>

namespace trireme {
namespace {

void scale_inputs(const CodeExchange& exchange) {
  if (exchange.input_scale == 1) return;
  for (const CodedGradient& gradient : exchange.gradients) {
    const Span values{gradient.values, at::kFloat, gradient.numel};
    scaled_copy(values, values, exchange.input_scale);
  }
}

std::unique_ptr<InFlight> make(const Compression& compression, CodeExchange exchange) {
  if (const auto format = block_format(compression)) {
    const auto* int8 = std::get_if<Int8>(&compression);
    const bool has_dither = int8 && int8->rounding == Rounding::kStochastic;
    return make_block_codes(*format, has_dither, std::move(exchange));
  }
  if (const auto dtype = cast_dtype(compression)) {
    const bool are_two = exchange.senders->world() == 2;
    return (are_two ? make_cast_codes : make_casts)(*dtype, std::move(exchange));
  }
  if (const auto* method = std::get_if<TopK>(&compression))
    return make_sparse_codes(*method, std::move(exchange));
  return make_drawn_values(std::get<RandomK>(compression), std::move(exchange));
}

}  // namespace

CodesInFlight start_exchange(const Compression& compression, CodeExchange exchange) {
  scale_inputs(exchange);
  if (const auto* method = std::get_if<PowerSGD>(&compression)) {
    auto matrices = std::make_unique<LowRank>(*method, std::move(exchange));
    LowRank* low_rank = matrices.get();  // lives in the Pending
    const int64_t sent = matrices->start();
    return {Pending(std::move(matrices)), sent, [low_rank] { low_rank->go_on(); }};
  }
  std::unique_ptr<InFlight> codes = make(compression, std::move(exchange));
  const int64_t sent = codes->start();
  return {Pending(std::move(codes)), sent};
}

}  // namespace trireme
