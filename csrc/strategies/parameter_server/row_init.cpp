#include <trireme/strategies/parameter_server/row_init.h>

#include <trireme/kernels/optimizer_spec.h>

#include <ATen/core/PhiloxRNGEngine.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>

namespace trireme::ps {
namespace {

// The number of values drawn at a time.
constexpr int64_t kDrawn = 64;

// Returns a number in (0, 1].
double draw(at::Philox4_32& engine) { return (static_cast<double>(engine()) + 1) * 0x1p-32; }

struct TextOf {
  std::string operator()(const Zeros&) const { return "Zeros()"; }
  std::string operator()(const Normal& normal) const {
    return "Normal(std=" + digits_of(normal.std) + ")";
  }
  std::string operator()(const Uniform& uniform) const {
    return "Uniform(bound=" + digits_of(uniform.bound) + ")";
  }
};

// Fills a row; the Box-Muller transform makes two normal numbers of two uniform ones.
struct Filler {
  uint64_t seed;
  int64_t id;
  Span row;

  void operator()(const Zeros&) const {
    std::memset(row.data, 0, static_cast<size_t>(row.numel) * c10::elementSize(row.dtype));
  }
  void operator()(const Normal& normal) const {
    fill([&](at::Philox4_32& engine, double& first, double& second) {
      const double radius = normal.std * std::sqrt(-2 * std::log(draw(engine)));
      const double angle = 2 * std::numbers::pi * draw(engine);
      first = radius * std::cos(angle);
      second = radius * std::sin(angle);
    });
  }
  void operator()(const Uniform& uniform) const {
    fill([&](at::Philox4_32& engine, double& first, double& second) {
      first = uniform.bound * (1 - 2 * draw(engine));
      second = uniform.bound * (1 - 2 * draw(engine));
    });
  }

  template <typename DrawTwo>
  void fill(const DrawTwo& draw_two) const {
    at::Philox4_32 engine(seed, static_cast<uint64_t>(id));
    std::array<double, kDrawn> drawn{};
    for (int64_t begin = 0; begin < row.numel; begin += kDrawn) {
      const int64_t numel = std::min(kDrawn, row.numel - begin);
      for (size_t i = 0; i < static_cast<size_t>(numel); i += 2)
        draw_two(engine, drawn[i], drawn[i + 1]);
      scaled_copy(slice(row, begin, begin + numel), ConstSpan{drawn.data(), at::kDouble, numel},
                  1.0);
    }
  }
};

}  // namespace

std::string complaint_about(const RowInit& init) {
  double width = 0;
  if (const auto* normal = std::get_if<Normal>(&init)) width = normal->std;
  if (const auto* uniform = std::get_if<Uniform>(&init)) width = uniform->bound;
  if (width >= 0 && std::isfinite(width)) return {};
  return "got " + to_string(init) + ", expected a finite number >= 0";
}

std::string to_string(const RowInit& init) { return std::visit(TextOf{}, init); }

void fill_row(const RowInit& init, uint64_t seed, int64_t id, Span row) {
  std::visit(Filler{seed, id, row}, init);
}

}  // namespace trireme::ps
