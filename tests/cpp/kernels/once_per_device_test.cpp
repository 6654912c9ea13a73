#include <trireme/kernels/once_per_device.h>

#include <catch_torch.h>
#include <string>
#include <vector>

namespace trireme::once_per_device_test {

TEST_CASE("each device is asked once, and its answer kept") {
  OncePerDevice devices;
  std::vector<int> asked(2, 0);
  const auto why_not = [&](int number, const char* reason) {
    const char* said = devices.why_not(c10::Device(c10::kCPU, static_cast<int8_t>(number)), [&] {
      ++asked[static_cast<size_t>(number)];
      return reason;
    });
    return std::string(said == nullptr ? "runs" : said);
  };
  for (int again = 0; again < 2; ++again) {
    CHECK(why_not(0, nullptr) == "runs");
    CHECK(why_not(1, "no kernel image") == "no kernel image");
  }
  CHECK(asked == std::vector<int>(2, 1));
}

}  // namespace trireme::once_per_device_test
