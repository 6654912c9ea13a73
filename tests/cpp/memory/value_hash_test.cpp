// Numbers by which ranks compare what they hold.

#include <trireme/memory/value_hash.h>

#include <catch_torch.h>
#include <set>

namespace trireme::value_hash_test {

TEST_CASE("any bit of any element makes another hash, strides make none") {
  for (const auto dtype : {at::kByte, at::kHalf, at::kFloat, at::kComplexDouble}) {
    for (const int64_t numel : {0, 1, 3, 8, 33, 70}) {
      const at::Tensor values = at::arange(numel).to(dtype);
      const at::Tensor bytes = values.view(at::kByte);
      std::set<uint64_t> seen{hash_of_values(values)};
      for (int64_t byte = 0; byte < bytes.numel(); ++byte) {
        for (const int bit : {1, 128}) {
          bytes[byte].bitwise_xor_(bit);
          seen.insert(hash_of_values(values));
          bytes[byte].bitwise_xor_(bit);
        }
      }
      CHECK(static_cast<int64_t>(seen.size()) == 2 * bytes.numel() + 1);
    }
  }
  const at::Tensor table = at::arange(12, at::kFloat).view({3, 4});
  CHECK(hash_of_values(table.t()) == hash_of_values(table.t().contiguous()));
  CHECK(hash_of_values(table.t()) != hash_of_values(table));
  CHECK(hash_of_values(at::zeros({3})) != hash_of_values(at::zeros({4})));
}

}  // namespace trireme::value_hash_test
