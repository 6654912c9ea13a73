#include <trireme/common/intra_op_threads.h>

#include <catch_torch.h>
#include <vector>

namespace trireme::intra_op_threads_test {

TEST_CASE("threads are shared out once") {
  CHECK(intra_op_threads_of(4, 2) == std::vector<int>{2, 2});
  CHECK(intra_op_threads_of(5, 2) == std::vector<int>{3, 2});
  CHECK(intra_op_threads_of(8, 3) == std::vector<int>{3, 3, 2});
  CHECK(intra_op_threads_of(1, 3) == std::vector<int>{1, 1, 1});
  CHECK(intra_op_threads_of(7, 1) == std::vector<int>{7});
}

}  // namespace trireme::intra_op_threads_test
