// Files hold what is offloaded as long as somebody has a piece of it, also beside a forked child.

#include <trireme/activation/offload_file.h>

#include <activation/folder_in_use.h>
#include <algorithm>
#include <catch_torch.h>
#include <string>
#include <sys/wait.h>
#include <temporary_folder.h>
#include <unistd.h>
#include <vector>

namespace trireme::offload_file_test {

using namespace trireme::test;

namespace {

c10::Storage write_piece(const TemporaryFolder& folder, size_t bytes, char value) {
  const std::vector<char> data(bytes, value);
  return write_offloaded(folder.path, data.data(), bytes);
}

bool holds(const c10::Storage& piece, char value) {
  const auto* const begin = static_cast<const char*>(piece.data());
  return std::all_of(begin, begin + piece.nbytes(), [&](char letter) { return letter == value; });
}

}  // namespace

TEST_CASE("files are large, and a piece may be larger") {
  const TemporaryFolder folder;
  std::vector<c10::Storage> pieces;
  for (const size_t bytes : {size_t{100}, kOffloadFileBytes + 1, size_t{5000}, kOffloadFileBytes}) {
    pieces.push_back(write_piece(folder, bytes, static_cast<char>(pieces.size())));
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    read_ahead(pieces[i]);
    CHECK(holds(pieces[i], static_cast<char>(i)));
    // The memory is the piece's own.
    static_cast<char*>(pieces[i].mutable_data())[pieces[i].nbytes() - 1] = 'x';
  }
  pieces.clear();
  CHECK_FALSE(is_in_use(folder.path));
}

TEST_CASE("a forked child reads what its parent has written, and writes to files of its own") {
  const TemporaryFolder folder;
  constexpr size_t kBytes = 100000;
  c10::Storage first = write_piece(folder, kBytes, 1);
  int parent_has_written[2];
  REQUIRE(::pipe(parent_has_written) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char word = 0;
    const bool was_told = ::read(parent_has_written[0], &word, 1) == 1;
    const c10::Storage own = write_piece(folder, kBytes, 3);
    ::_exit(was_told && holds(first, 1) && holds(own, 3) ? 0 : 1);
  }
  const c10::Storage second = write_piece(folder, kBytes, 2);  // where the child, too, would go on
  first = c10::Storage();
  REQUIRE(::write(parent_has_written[1], "x", 1) == 1);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  CHECK(holds(second, 2));
  ::close(parent_has_written[0]);
  ::close(parent_has_written[1]);
}

}  // namespace trireme::offload_file_test
