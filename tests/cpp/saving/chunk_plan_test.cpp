// Which rank hashes which chunk of a file, and the checksums that come of it.

#include <trireme/saving/chunk_plan.h>

#include <trireme/saving/checksum.h>
#include <trireme/saving/chunk_hasher.h>

#include <catch_torch.h>
#include <string>
#include <vector>

namespace trireme::chunk_plan_test {
namespace {

constexpr int64_t kRows = 8;

// A header of one tensor of kRows x 4 bytes behind 16 bytes of text, then one of 2 bytes.
SafetensorsHeader header_of() {
  SafetensorsHeader header;
  header.entries = {{"rows", at::kByte, {kRows, 4}, 0}, {"two", at::kByte, {2}, kRows * 4}};
  header.bytes = 16;
  header.file_bytes = 16 + kRows * 4 + 2;
  return header;
}

WrittenPart rows(int64_t rank, int64_t first, int64_t count) {
  return {rank, {{first, 0}, {count, 4}}};
}

std::string drawn(const WrittenParts& parts, int64_t world, int64_t chunk_bytes) {
  return plan_chunks(header_of(), parts, world, chunk_bytes).text();
}

}  // namespace

TEST_CASE("who writes all of a chunk hashes it, other chunks are dealt out") {
  const WrittenPart two{0, {{0}, {2}}};
  const WrittenParts one{{"rows", {rows(0, 0, 8)}}, {"two", {two}}};
  const WrittenParts halves{{"rows", {rows(0, 0, 4), rows(1, 4, 4)}}, {"two", {two}}};
  const WrittenParts thirds{{"rows", {rows(0, 0, 3), rows(1, 3, 3), rows(2, 6, 2)}},
                            {"two", {two}}};
  const WrittenParts columns{{"rows", {{0, {{0, 0}, {8, 2}}}, {1, {{0, 2}, {8, 2}}}}},
                             {"two", {two}}};
  const WrittenParts corners{
      {"rows", {{0, {{0, 0}, {4, 2}}}, {1, {{0, 2}, {4, 2}}}, rows(2, 4, 4)}}, {"two", {two}}};
  // The file: 16 bytes of header, 8 rows of 4 bytes, 2 bytes.
  // bytes of a chunk                       8       16      20      50
  CHECK(drawn(one, 1, 8) == "0* 0* 0 0 0 0 0");
  CHECK(drawn(halves, 2, 8) == "0* 1* 0 0 1 1 0");
  CHECK(drawn(thirds, 3, 8) == "0* 1* 0 2* 1 2 0");
  CHECK(drawn(columns, 2, 8) == "0* 1* 0* 1* 0* 1* 0");
  CHECK(drawn(corners, 3, 8) == "0* 1* 2* 0* 2 2 0");
  CHECK(drawn(halves, 2, 16) == "0* 0 1 0");
  CHECK(drawn(halves, 2, 20) == "0 0* 1*");
  CHECK(drawn(halves, 2, 50) == "0*");
  CHECK(drawn(halves, 2, 1000) == "0*");
  CHECK(drawn({{"rows", {rows(0, 0, 0), rows(1, 0, 8)}}, {"two", {two}}}, 2, 24) == "1 1 0");
}

TEST_CASE("a chunk border may lie inside an element or a row") {
  const WrittenParts thirds{{"rows", {rows(0, 0, 3), rows(1, 3, 3), rows(2, 6, 2)}},
                            {"two", {{2, {{0}, {2}}}}}};
  CHECK(drawn(thirds, 3, 7) == "0* 1* 0 0 1 2* 2 2");
}

TEST_CASE("checksums are those of the file, in whatever pieces its bytes are told") {
  std::string file(50, ' ');
  for (size_t i = 0; i < file.size(); ++i) file[i] = static_cast<char>(i * 7);
  const WrittenParts one{{"rows", {rows(0, 0, 8)}}, {"two", {{0, {{0}, {2}}}}}};
  for (const int64_t chunk_bytes : {7, 20, 50, 64}) {
    const ChunkPlan plan = plan_chunks(header_of(), one, 1, chunk_bytes);
    for (const size_t piece : {1, 5, 50}) {
      ChunkHasher hasher(plan, 0, 50, chunk_bytes);
      for (size_t begin = 0; begin < file.size(); begin += piece)
        hasher.add(static_cast<int64_t>(begin), std::string_view(file).substr(begin, piece));
      for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
        if (plan.chunks[chunk].is_shared) continue;
        const auto begin = chunk * static_cast<size_t>(chunk_bytes);
        CHECK(hasher.found().at(chunk) ==
              checksum_of(std::string_view(file).substr(begin, static_cast<size_t>(chunk_bytes))));
      }
    }
  }
}

TEST_CASE("a chunk with a gap has no checksum") {
  const WrittenParts one{{"rows", {rows(0, 0, 8)}}, {"two", {{0, {{0}, {2}}}}}};
  const ChunkPlan plan = plan_chunks(header_of(), one, 1, 25);
  ChunkHasher hasher(plan, 0, 50, 25);
  const std::string bytes(50, 'x');
  hasher.add(0, std::string_view(bytes).substr(0, 20));
  hasher.add(21, std::string_view(bytes).substr(0, 29));
  CHECK(hasher.found().count(0) == 0);
  CHECK(hasher.found().count(1) == 1);
}

TEST_CASE("checksums are XXH3 of 64 bits") {
  CHECK(checksum_text(checksum_of("")) == "2d06800538d394c2");  // of its test vectors
  Checksum checksum;
  checksum.add("tri");
  checksum.add("reme");
  CHECK(checksum.value() == checksum_of("trireme"));
  CHECK(checksum_from(checksum_text(checksum.value())) == checksum.value());
  CHECK_FALSE(checksum_from("12345678"));
  CHECK_FALSE(checksum_from("123456789012345g"));
  CHECK_FALSE(checksum_from("-12345678901234x"));
}

}  // namespace trireme::chunk_plan_test
