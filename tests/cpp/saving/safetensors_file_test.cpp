// A file of tensors that several processes write and read, each its part.

#include <trireme/saving/safetensors_file.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <catch_torch.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <temporary_folder.h>
#include <vector>

namespace trireme::safetensors_file_test {

using trireme::test::TemporaryFolder;

namespace {

const RankOf kAlone{0, 1};

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A file of any header text and so many bytes of tensors.
void write_file(const std::string& path, const std::string& header, size_t bytes) {
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  write_text(path, length + header + std::string(bytes, 'x'));
}

using trireme::test::error_of;

std::string error_of(const std::string& path) {
  return error_of([&] { SafetensorsFile::open(path, kAlone); });
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Returns where in three dimensions a part begins that is cut along `dim`.
std::vector<int64_t> from(int64_t dim, int64_t first) {
  std::vector<int64_t> all(3, 0);
  all[static_cast<size_t>(dim)] = first;
  return all;
}

}  // namespace

TEST_CASE("a layout has wide elements first, and no gaps") {
  const SafetensorsHeader header = plan_safetensors({{"a", at::kByte, {3}},
                                                     {"b", at::kDouble, {2, 2}},
                                                     {"c", at::kFloat, {}},
                                                     {"d", at::kInt, {0}}},
                                                    {{"format", "pt"}});
  std::string picture;
  for (const SafetensorsEntry& entry : header.entries)
    picture +=
        entry.name + "@" + std::to_string(entry.begin) + "+" + std::to_string(entry.bytes()) + " ";
  CHECK(picture == "b@0+32 c@32+4 d@36+0 a@36+3 ");
  CHECK(header.bytes % 8 == 0);
  CHECK(header.file_bytes == header.bytes + 39);
}

TEST_CASE("what is written part by part is read part by part") {
  const TemporaryFolder folder;
  const at::Tensor whole = at::arange(60).view({3, 5, 4}).to(at::kFloat);
  for (int64_t dim = 0; dim < 3; ++dim) {
    const std::string path = folder.at(std::to_string(dim));
    const SafetensorsHeader header = plan_safetensors(
        {{"other", at::kDouble, {7}}, {"w", at::kFloat, {3, 5, 4}}, {"s", at::kLong, {}}}, {});
    SafetensorsFile::create(path, header, kAlone);
    const auto entry_of = [&](const std::string& name) {
      for (const SafetensorsEntry& entry : header.entries)
        if (entry.name == name) return entry;
      return SafetensorsEntry{};
    };
    const int64_t cut = 2;
    for (const auto& [first, rows] : {std::pair{int64_t{0}, cut}, {cut, whole.size(dim) - cut}}) {
      const auto file = SafetensorsFile::open_to_write(path, header, kAlone);
      file.write(entry_of("w"), {whole.narrow(dim, first, rows), from(dim, first)});
      file.sync();
    }
    const auto file = SafetensorsFile::open(path, kAlone);
    file.write(entry_of("s"), {});  // nothing of it
    CHECK(file.header() == header);
    const at::Tensor all = at::zeros({3, 5, 4});
    const auto version = all._version();
    file.read(entry_of("w"), {all});
    CHECK(at::equal(all, whole));
    CHECK(all._version() > version);
    const at::Tensor turned = at::zeros({4, 1, 3}).permute({2, 1, 0});  // not contiguous
    file.read(entry_of("w"), {turned, {0, 3, 0}});
    CHECK(at::equal(turned, whole.narrow(1, 3, 1)));
  }
}

TEST_CASE("what is cut along several dimensions is written and read part by part") {
  const TemporaryFolder folder;
  const at::Tensor whole = at::arange(3 * 5 * 4 * 2).view({3, 5, 4, 2}).to(at::kFloat);
  const SafetensorsHeader header = plan_safetensors({{"w", at::kFloat, {3, 5, 4, 2}}}, {});
  const SafetensorsEntry& entry = header.entries.front();
  // {first, rows} along each dimension.
  using Cut = std::pair<int64_t, int64_t>;
  const std::vector<std::vector<Cut>> cuts = {
      {{0, 1}, {1, 2}}, {{0, 5}}, {{0, 3}, {3, 1}}, {{0, 1}, {1, 1}}};
  const auto for_each_part = [&](const auto& call) {
    for (const Cut& a : cuts[0])
      for (const Cut& b : cuts[1])
        for (const Cut& c : cuts[2])
          for (const Cut& d : cuts[3])
            call(whole.narrow(0, a.first, a.second)
                     .narrow(1, b.first, b.second)
                     .narrow(2, c.first, c.second)
                     .narrow(3, d.first, d.second),
                 std::vector<int64_t>{a.first, b.first, c.first, d.first});
  };
  const auto file = SafetensorsFile::create(folder.at("f"), header, kAlone);
  for_each_part([&](const at::Tensor& part, const std::vector<int64_t>& first) {
    file.write(entry, {part, first});
  });
  const at::Tensor all = at::zeros({3, 5, 4, 2});
  file.read(entry, {all});
  CHECK(at::equal(all, whole));
  for_each_part([&](const at::Tensor& part, const std::vector<int64_t>& first) {
    const at::Tensor read = at::zeros(part.sizes());
    file.read(entry, {read, first});
    CHECK(at::equal(read, part));
  });
}

TEST_CASE("every dtype that the format has") {
  const TemporaryFolder folder;
  std::vector<SafetensorsEntry> entries;
  std::vector<at::Tensor> values;
  for (const at::ScalarType dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kComplexFloat, at::kFloat8_e4m3fn}) {
    entries.push_back({c10::toString(dtype), dtype, {5}});
    values.push_back((at::arange(5) % 2).to(dtype));
  }
  const SafetensorsHeader header = plan_safetensors(entries, {});
  const auto file = SafetensorsFile::create(folder.at("f"), header, kAlone);
  for (const SafetensorsEntry& entry : header.entries)
    for (size_t i = 0; i < entries.size(); ++i)
      if (entries[i].name == entry.name) file.write(entry, {values[i]});
  const auto again = SafetensorsFile::open(folder.at("f"), kAlone);
  for (const SafetensorsEntry& entry : again.header().entries)
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].name != entry.name) continue;
      const at::Tensor read = at::empty({5}, at::TensorOptions().dtype(entry.dtype));
      again.read(entry, {read});
      CHECK(at::equal(read.view(at::kByte), values[i].view(at::kByte)));
    }
  CHECK(safetensors_dtype(at::kComplexDouble).empty());
}

TEST_CASE("parts of many pieces are read by several threads, each its bytes") {
  const TemporaryFolder folder;
  const at::Tensor whole = at::arange(3 * 1500 * 1000, at::kFloat).view({3, 1500, 1000});
  const SafetensorsHeader header = plan_safetensors({{"w", at::kFloat, {3, 1500, 1000}}}, {});
  const auto file = SafetensorsFile::create(folder.at("f"), header, kAlone);
  file.write(header.entries.front(), {whole});
  const int threads = at::get_num_threads();
  for (const int each : {1, 2, 5}) {
    at::set_num_threads(each);
    for (int64_t dim = 0; dim < 3; ++dim) {
      const int64_t rows = whole.size(dim) - 1;
      std::vector<int64_t> sizes = whole.sizes().vec();
      sizes[static_cast<size_t>(dim)] = rows;
      const at::Tensor part = at::zeros(sizes);
      file.read(header.entries.front(), {part, from(dim, 1)});
      CHECK(at::equal(part, whole.narrow(dim, 1, rows)));
    }
  }
  std::filesystem::resize_file(folder.at("f"), static_cast<uintmax_t>(header.file_bytes - 4));
  const at::Tensor all = at::zeros({3, 1500, 1000});
  const auto read = [&] { file.read(header.entries.front(), {all}); };
  CHECK(has(error_of(read), "an end of the file in the middle of a tensor"));
  at::set_num_threads(threads);
}

TEST_CASE("values of another dtype than the file's are cast") {
  const TemporaryFolder folder;
  const at::Tensor whole = at::arange(12, at::kFloat).view({4, 3}) / 7;
  const SafetensorsHeader header = plan_safetensors({{"w", at::kFloat, {4, 3}}}, {});
  const auto file = SafetensorsFile::create(folder.at("f"), header, kAlone);
  file.write(header.entries.front(), {whole});
  const at::Tensor part = at::zeros({2, 3}, at::kBFloat16);
  file.read(header.entries.front(), {part, {1, 0}});
  CHECK(at::equal(part, whole.narrow(0, 1, 2).to(at::kBFloat16)));
}

TEST_CASE("files that are none, are cut, or lie") {
  const TemporaryFolder folder;
  const std::string path = folder.at("f");
  write_text(path, "");
  CHECK(has(error_of(path), "got no header in"));
  write_text(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}");
  CHECK(has(error_of(path), "got no header in"));
  write_file(path, "{\"a\": ", 0);
  CHECK(has(error_of(path), "a header that cannot be read"));
  write_file(path, R"({"a": 5})", 0);
  CHECK(has(error_of(path), "a header that cannot be read"));
  const std::string a = R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]})";
  write_file(path, a + "}", 8);
  CHECK(error_of(path) == "no error");
  write_file(path, a + "}", 7);
  CHECK(has(error_of(path), "'a' cut off at the end of the file"));
  write_file(path, a + R"(, "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}})", 12);
  CHECK(has(error_of(path), "'b' over another tensor"));
  for (const char* entry :
       {R"({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]})",
        R"({"dtype": "F33", "shape": [2], "data_offsets": [0, 8]})",
        R"({"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]})",
        R"({"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]})",
        R"({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]})"}) {
    write_file(path, std::string(R"({"w": )") + entry + "}", 8);
    CHECK(has(error_of(path), "got 'w' as "));
  }
  CHECK(has(error_of([&] { SafetensorsFile::open(folder.at("none"), kAlone); }), "No such file"));
  const auto create = [&] { SafetensorsFile::create(path, plan_safetensors({}, {}), kAlone); };
  CHECK(has(error_of(create), "cannot open '" + path + "': File exists"));
}

}  // namespace trireme::safetensors_file_test
