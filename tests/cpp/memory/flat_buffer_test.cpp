// Memory that is zeros until somebody writes to it.

#include <trireme/memory/flat_buffer.h>

#include <algorithm>
#include <catch_torch.h>
#include <cstdint>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace trireme::flat_buffer_test {

namespace {

int64_t page_bytes() { return ::sysconf(_SC_PAGESIZE); }

// Page by page, '#' for what is in memory.
std::string resident(const at::Tensor& tensor) {
  const auto page = page_bytes();
  const auto pages = (static_cast<int64_t>(tensor.storage().nbytes()) + page - 1) / page;
  std::vector<unsigned char> in_memory(static_cast<size_t>(pages));
  REQUIRE(::mincore(tensor.storage().mutable_data(), static_cast<size_t>(pages * page),
                    in_memory.data()) == 0);
  std::string picture;
  for (const unsigned char bits : in_memory) picture += (bits & 1) != 0 ? '#' : '.';
  return picture;
}

// Floats of `pages` pages.
at::Tensor lazy_pages(int64_t pages) {
  return lazy_zeros(pages * page_bytes() / 4, at::kFloat, at::kCPU);
}

}  // namespace

TEST_CASE("zeros that nobody has written take no memory, and are zeros") {
  const at::Tensor lazy = lazy_pages(8);
  CHECK(resident(lazy) == "........");
  const int64_t page = page_bytes() / 4;
  lazy.narrow(0, 2 * page, 1).fill_(1);
  lazy.narrow(0, 5 * page - 1, 2).fill_(2);  // across a boundary
  CHECK(resident(lazy) == "..#.##..");
  CHECK(lazy.sum().item<float>() == 5);
}

TEST_CASE("whole pages that are zeros again are given back, the rest is overwritten") {
  const at::Tensor lazy = lazy_pages(8);
  const int64_t page = page_bytes() / 4;
  lazy.fill_(1);
  CHECK(resident(lazy) == "########");
  make_zero(lazy, page + 7, 4 * page);  // to page 5, element 7
  CHECK(resident(lazy) == "##...###");
  const at::Tensor expected = at::ones({8 * page});
  expected.narrow(0, page + 7, 4 * page).zero_();
  CHECK(at::equal(lazy, expected));
}

TEST_CASE("pages that are brought at once keep their values") {
  const at::Tensor lazy = lazy_pages(4);
  lazy.narrow(0, 5, 1).fill_(7);
  bring_pages(lazy.narrow(0, page_bytes() / 4, 3));
  bring_pages(at::empty({0}));
  const std::string picture = resident(lazy);
  CHECK((picture == "####" || picture == "#..."));  // a system that cannot
  CHECK(lazy.sum().item<float>() == 7);
}

TEST_CASE("a run inside one page, at a page and of nothing") {
  const int64_t page = page_bytes() / 4;
  for (const auto& [begin, numel] :
       std::vector<std::pair<int64_t, int64_t>>{{3, 5}, {page, page}, {page, 0}, {0, 3 * page}}) {
    const at::Tensor lazy = lazy_pages(3);
    lazy.fill_(1);
    make_zero(lazy, begin, numel);
    const at::Tensor expected = at::ones({3 * page});
    expected.narrow(0, begin, numel).zero_();
    CHECK(at::equal(lazy, expected));
  }
}

TEST_CASE("sizes that are no whole pages, other dtypes, nothing") {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat}) {
    for (const int64_t numel : {0, 1, 1000, 12345}) {
      const at::Tensor lazy = lazy_zeros(numel, dtype, at::kCPU);
      CHECK(lazy.scalar_type() == dtype);
      CHECK(at::equal(lazy, at::zeros({numel}, dtype)));
      lazy.fill_(1);
      make_zero(lazy, numel / 3, numel - numel / 3);
      CHECK(at::real(lazy.to(at::kComplexDouble)).sum().item<double>() ==
            static_cast<double>(numel / 3));
    }
  }
}

TEST_CASE("memory is unmapped with the last tensor over it") {
  at::Tensor lazy = lazy_pages(4);
  void* pages = lazy.mutable_data_ptr();
  at::Tensor range = range_of(lazy, {2, 3}, {3, 1}, 10);
  lazy.reset();
  range.fill_(1);
  CHECK(range.sum().item<float>() == 6);
  range.reset();
  std::vector<unsigned char> in_memory(4);
  CHECK(::mincore(pages, static_cast<size_t>(4 * page_bytes()), in_memory.data()) != 0);
}

TEST_CASE("more than there is address space for") {
  CHECK_THROWS_WITH(lazy_zeros(int64_t{1} << 60, at::kByte, at::kCPU),
                    Catch::Contains("[flat_buffer] got no address space for 1152921504606846976 "
                                    "bytes") &&
                        Catch::Contains("ulimit -v"));
}

TEST_CASE("a range is a tensor over its part of the storage, and no view") {
  const at::Tensor buffer = at::arange(24).to(at::kFloat);
  const at::Tensor range = range_of(buffer, {2, 3}, {1, 2}, 10);
  CHECK(at::equal(range, at::tensor({10, 12, 14, 11, 13, 15}, at::kFloat).view({2, 3})));
  CHECK(range.is_alias_of(buffer));
  CHECK_FALSE(range.is_view());
  range.zero_();
  CHECK(buffer.narrow(0, 10, 6).count_nonzero().item<int>() == 0);
  CHECK(buffer._version() == 0);  // each counts for itself
}

}  // namespace trireme::flat_buffer_test
