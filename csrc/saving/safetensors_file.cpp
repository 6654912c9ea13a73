#include <trireme/saving/safetensors_file.h>

#include <trireme/common/resolved.h>
#include <trireme/kernels/cpu/parallel.h>
#include <trireme/saving/checksum.h>
#include <trireme/saving/chunk_hasher.h>
#include <trireme/saving/disk_room.h>
#include <trireme/saving/json_text.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace trireme {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little);
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr std::string_view kMetadata = "__metadata__";
constexpr size_t kMaxShown = 200;                      // bytes of an entry in a message
constexpr int64_t kBytesPerThread = int64_t{4} << 20;  // for less a thread is not worth waking
constexpr int64_t kCachedBytes = int64_t{256}
                                 << 10;  // stay in a core's cache until they are used again

struct DtypeName {
  at::ScalarType dtype;
  const char* name;
};
constexpr std::array<DtypeName, 15> kDtypes = {{{at::kBool, "BOOL"},
                                                {at::kByte, "U8"},
                                                {at::kChar, "I8"},
                                                {at::kShort, "I16"},
                                                {at::kInt, "I32"},
                                                {at::kLong, "I64"},
                                                {at::kHalf, "F16"},
                                                {at::kBFloat16, "BF16"},
                                                {at::kFloat, "F32"},
                                                {at::kDouble, "F64"},
                                                {at::kComplexFloat, "C64"},
                                                {at::kFloat8_e4m3fn, "F8_E4M3"},
                                                {at::kFloat8_e5m2, "F8_E5M2"},
                                                {at::kUInt16, "U16"},
                                                {at::kUInt32, "U32"}}};

// Returns whether a name is "__metadata__" after any number of dots.
bool is_like_metadata(const std::string& name) {
  return name.ends_with(kMetadata) && name.find_first_not_of('.') == name.size() - kMetadata.size();
}

std::string text_of(const SafetensorsHeader& header) {
  std::string text = "{";
  const auto add = [&](const std::string& name, const Json& value) {
    text += (text.size() > 1 ? "," : "") + Json(name).dump() + ":" + value.dump();
  };
  if (!header.metadata.empty()) add(std::string(kMetadata), header.metadata);
  for (const SafetensorsEntry& entry : header.entries)
    add(to_safetensors_name(entry.name),
        {{"dtype", safetensors_dtype(entry.dtype)},
         {"shape", entry.sizes},
         {"data_offsets", {entry.begin, entry.begin + entry.bytes()}}});
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

// Returns one entry of the JSON text, and sets `end` to its end. Throws Json::exception for other
// JSON.
SafetensorsEntry entry_of(const std::string& name, const Json& text, int64_t& end) {
  SafetensorsEntry entry;
  entry.name = name;
  const std::string dtype = text.at("dtype").get<std::string>();
  const auto* known = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& candidate) {
    return dtype == candidate.name;
  });
  entry.dtype = known == kDtypes.end() ? at::ScalarType::Undefined : known->dtype;
  entry.sizes = text.at("shape").get<std::vector<int64_t>>();
  entry.begin = text.at("data_offsets").at(0).get<int64_t>();
  end = text.at("data_offsets").at(1).get<int64_t>();
  return entry;
}

// Returns whether [begin, end) has the bytes that dtype and sizes need.
bool fits(const SafetensorsEntry& entry, int64_t end) {
  if (entry.dtype == at::ScalarType::Undefined) return false;
  auto bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  for (const int64_t extent : entry.sizes)
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return false;
  return entry.begin >= 0 && end >= entry.begin && end - entry.begin == bytes;
}

}  // namespace

int64_t SafetensorsEntry::numel() const { return c10::multiply_integers(sizes); }

int64_t SafetensorsEntry::bytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

std::string safetensors_dtype(at::ScalarType dtype) {
  for (const DtypeName& known : kDtypes)
    if (known.dtype == dtype) return known.name;
  return "";
}

std::string to_safetensors_name(const std::string& name) {
  return is_like_metadata(name) ? "." + name : name;
}

std::string from_safetensors_name(const std::string& written) {
  return is_like_metadata(written) && written.size() > kMetadata.size() ? written.substr(1)
                                                                        : written;
}

SafetensorsHeader plan_safetensors(std::vector<SafetensorsEntry> entries,
                                   std::map<std::string, std::string> metadata) {
  std::stable_sort(entries.begin(), entries.end(), [](const auto& one, const auto& other) {
    return c10::elementSize(one.dtype) > c10::elementSize(other.dtype);
  });
  SafetensorsHeader header{std::move(entries), std::move(metadata)};
  int64_t end = 0;
  for (SafetensorsEntry& entry : header.entries) {
    entry.begin = end;
    end += entry.bytes();
  }
  header.bytes = kLengthBytes + static_cast<int64_t>(text_of(header).size());
  header.file_bytes = header.bytes + end;
  return header;
}

std::string header_bytes(const SafetensorsHeader& header) {
  const std::string text = text_of(header);
  const auto length = static_cast<uint64_t>(text.size());
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + text;
}

SafetensorsFile::SafetensorsFile(std::string path, int descriptor, RankOf where)
    : path_(std::move(path)), descriptor_(descriptor), where_(where) {
  if (descriptor_ < 0) fail("open");
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      where_(other.where_),
      header_(std::move(other.header_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(where_, other.where_);
  std::swap(header_, other.header_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

SafetensorsFile SafetensorsFile::create(std::string path, SafetensorsHeader header, RankOf where) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  SafetensorsFile file(std::move(path), descriptor, where);
  file.header_ = std::move(header);
  // Allocates all space now if the file system can, so that a full disk is noticed before any work.
  int result = ::fallocate(descriptor, 0, 0, file.header_.file_bytes);
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS))
    result = ::ftruncate(descriptor, file.header_.file_bytes);
  if (result != 0) file.fail("make room in");
  const std::string first = header_bytes(file.header_);
  file.write_bytes(first.data(), static_cast<int64_t>(first.size()), 0);
  return file;
}

SafetensorsFile SafetensorsFile::open_to_write(std::string path, SafetensorsHeader header,
                                               RankOf where) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  SafetensorsFile file(std::move(path), descriptor, where);
  file.header_ = std::move(header);
  return file;
}

SafetensorsFile SafetensorsFile::open(std::string path, RankOf where) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  SafetensorsFile file(std::move(path), descriptor, where);
  file.read_header();
  return file;
}

void SafetensorsFile::read_header() {
  struct stat found{};
  if (::fstat(descriptor_, &found) != 0) fail("look at");
  header_.file_bytes = found.st_size;
  uint64_t length = 0;
  if (header_.file_bytes >= kLengthBytes)
    read_bytes(reinterpret_cast<char*>(&length), kLengthBytes, 0);
  const int64_t most = std::min(kMaxHeaderBytes, header_.file_bytes - kLengthBytes);
  if (most < 2 || length > static_cast<uint64_t>(most)) refuse("no header");
  std::string written(length, ' ');
  read_bytes(written.data(), static_cast<int64_t>(length), kLengthBytes);
  header_.bytes = kLengthBytes + static_cast<int64_t>(length);
  try {
    check_json(written);
    const Json text = Json::parse(written);
    for (const auto& [name, value] : text.items()) {
      if (name == kMetadata) {
        header_.metadata = value.get<std::map<std::string, std::string>>();
        continue;
      }
      int64_t end = 0;
      header_.entries.push_back(entry_of(from_safetensors_name(name), value, end));
      if (!fits(header_.entries.back(), end))
        refuse("'" + name + "' as " + value.dump(-1, ' ', true).substr(0, kMaxShown));
    }
  } catch (const JsonTextError& error) {
    refuse(std::string("a header that cannot be read (") + error.what() + ")");
  } catch (const Json::exception& error) {
    refuse(std::string("a header that cannot be read (") + error.what() + ")");
  }
  // Puts empty tensors before the tensor that begins at the same byte.
  std::stable_sort(
      header_.entries.begin(), header_.entries.end(), [](const auto& one, const auto& other) {
        return std::pair(one.begin, one.bytes()) < std::pair(other.begin, other.bytes());
      });
  check_entries(header_.file_bytes - header_.bytes);
}

void SafetensorsFile::check_entries(int64_t data_bytes) const {
  int64_t end = 0;
  for (const SafetensorsEntry& entry : header_.entries) {
    if (entry.begin < end) refuse("'" + entry.name + "' over another tensor");
    end = entry.begin + entry.bytes();
    if (end > data_bytes) refuse("'" + entry.name + "' cut off at the end of the file");
  }
}

SafetensorsFile::Runs SafetensorsFile::runs_of(const SafetensorsEntry& entry,
                                               const TensorPart& part) const {
  const at::IntArrayRef whole = entry.sizes, own = part.values.sizes();
  TORCH_INTERNAL_ASSERT(own.size() == whole.size() &&
                        (part.first.empty() || part.first.size() == whole.size()));
  auto stride = static_cast<int64_t>(c10::elementSize(entry.dtype));
  Runs runs{1, stride, header_.bytes + entry.begin, {}};
  bool is_one = true;  // so far
  for (size_t dim = whole.size(); dim-- > 0;) {
    const int64_t first = part.first.empty() ? 0 : part.first[dim];
    TORCH_INTERNAL_ASSERT(first >= 0 && first + own[dim] <= whole[dim]);
    runs.begin += first * stride;
    if (is_one) {
      runs.bytes *= own[dim];
      is_one = own[dim] == whole[dim];
    } else {
      runs.numel *= own[dim];
      runs.dims.push_back({own[dim], stride});
    }
    stride *= whole[dim];
  }
  return part.values.numel() == 0 ? Runs{} : runs;
}

int64_t SafetensorsFile::Runs::begin_of(int64_t run) const {
  int64_t found = begin;
  for (const Dim& dim : dims) {
    found += run % dim.numel * dim.stride;
    run /= dim.numel;
  }
  return found;
}

template <typename Visit>
void SafetensorsFile::Runs::for_each_piece(int64_t begin, int64_t end, const Visit& visit) const {
  for (int64_t done = begin; done < end;) {
    const int64_t in_run = done % bytes;
    const int64_t count = std::min(end - done, bytes - in_run);
    visit(done, count, begin_of(done / bytes) + in_run);
    done += count;
  }
}

void SafetensorsFile::write(const SafetensorsEntry& entry, const TensorPart& part,
                            ChunkHasher* hasher) const {
  if (!part.values.defined()) return;
  TORCH_INTERNAL_ASSERT(part.values.scalar_type() == entry.dtype);
  const at::Tensor values = resolved(part.values.detach()).cpu().contiguous();
  const auto* data = static_cast<const char*>(values.const_data_ptr());
  write_some(entry, part, 0, {data, values.nbytes()}, hasher);
}

void SafetensorsFile::write_some(const SafetensorsEntry& entry, const TensorPart& part,
                                 int64_t begin, std::string_view bytes, ChunkHasher* hasher) const {
  const Runs runs = runs_of(entry, part);
  const int64_t most = hasher == nullptr ? header_.file_bytes : kCachedBytes;
  const auto write_piece = [&](int64_t done, int64_t count, int64_t offset) {
    const char* data = bytes.data() + (done - begin);
    if (hasher != nullptr) hasher->add(offset, {data, static_cast<size_t>(count)});
    write_bytes(data, count, offset);
  };
  const int64_t end = runs.numel == 0 ? begin : begin + static_cast<int64_t>(bytes.size());
  for (int64_t first = begin; first < end; first += most)
    runs.for_each_piece(first, std::min(first + most, end), write_piece);
}

void SafetensorsFile::read(const SafetensorsEntry& entry, const TensorPart& part) const {
  if (!part.values.defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = part.values.detach();
  const bool in_place = values.is_cpu() && values.is_contiguous() && is_resolved(values) &&
                        values.scalar_type() == entry.dtype;
  const at::Tensor target =
      in_place ? values : at::empty(values.sizes(), at::TensorOptions().dtype(entry.dtype));
  read_runs(static_cast<char*>(target.mutable_data_ptr()), runs_of(entry, part));
  if (!in_place) {
    part.values.detach().copy_(target);
  } else if (!values.is_inference()) {
    values.unsafeGetTensorImpl()->bump_version();
  }
}

void SafetensorsFile::sync() const {
  if (::fsync(descriptor_) != 0) fail("write");
}

uint64_t SafetensorsFile::checksum(int64_t begin, int64_t end) const {
  Checksum checksum;
  std::string bytes(static_cast<size_t>(std::min(kCachedBytes, end - begin)), '\0');
  for (int64_t done = begin; done < end; done += kCachedBytes) {
    const int64_t count = std::min(kCachedBytes, end - done);
    read_bytes(bytes.data(), count, done);
    checksum.add({bytes.data(), static_cast<size_t>(count)});
  }
  return checksum.value();
}

void SafetensorsFile::write_bytes(const char* data, int64_t bytes, int64_t offset) const {
  while (bytes > 0) {
    const ssize_t done = ::pwrite(descriptor_, data, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("write");
    data += done;
    offset += done;
    bytes -= done;
  }
}

void SafetensorsFile::read_bytes(char* data, int64_t bytes, int64_t offset) const {
  while (bytes > 0) {
    const ssize_t done = ::pread(descriptor_, data, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("read");
    if (done == 0) refuse("an end of the file in the middle of a tensor");
    data += done;
    offset += done;
    bytes -= done;
  }
}

// Each thread reads an equal share of the bytes: one core alone limits a copy out of the page
// cache, even more so into memory that is new to the process.
void SafetensorsFile::read_runs(char* part, const Runs& runs) const {
  if (runs.numel == 0) return;
  const auto read_some = [&](int64_t begin, int64_t end) {
    runs.for_each_piece(begin, end, [&](int64_t done, int64_t bytes, int64_t offset) {
      read_bytes(part + done, bytes, offset);
    });
  };
  cpu::for_ranges(runs.numel * runs.bytes, read_some, kBytesPerThread);
}

void SafetensorsFile::fail(const std::string& doing) const {
  std::string why = std::strerror(errno);
  // A file that is opened to be read has no header yet.
  if (doing != "read" && header_.file_bytes > 0) why += disk_room(path_, header_.file_bytes);
  TORCH_CHECK(false, error_text("saving", "cannot " + doing + " '" + path_ + "': " + why, where_,
                                "See that every rank can use this folder."));
}

void SafetensorsFile::refuse(const std::string& got) const {
  TORCH_CHECK_VALUE(false, error_text("saving", "got " + got + " in '" + path_ + "'", where_,
                                      "Restore the file, or load another checkpoint."));
}

}  // namespace trireme
