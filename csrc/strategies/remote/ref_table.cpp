#include <trireme/strategies/remote/ref_table.h>

#include <algorithm>
#include <iterator>
#include <utility>

// See [Note: who holds an object] in ref_table.h.

namespace trireme::remote {

int64_t RefTable::add(std::shared_ptr<Hosted> object, const std::string& class_name,
                      int64_t holder) {
  const std::lock_guard lock(mutex_);
  const void* identity = object->identity();
  int64_t number = next_;
  if (identity != nullptr) {
    const auto [there, is_new] = by_identity_.try_emplace(identity, next_);
    number = there->second;
  }
  const auto [entry, is_new] = all_.try_emplace(number);
  if (is_new) {
    ++next_;
    entry->second.found = {std::move(object), class_name};
  }
  ++entry->second.counts[holder];
  return number;
}

RefTable::Found RefTable::find(int64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto entry = all_.find(number);
  return entry == all_.end() ? Found{} : entry->second.found;
}

bool RefTable::count(int64_t number, int64_t holder, int64_t change) {
  const std::lock_guard lock(mutex_);
  if (number < 0 || number >= next_) return false;
  const auto entry = all_.find(number);
  if (entry == all_.end() || gone_holders_.contains(holder)) return true;
  entry->second.counts[holder] += change;
  drop_if_unheld(entry);
  return true;
}

bool RefTable::hold(int64_t number, int64_t holder) {
  const std::lock_guard lock(mutex_);
  const auto entry = all_.find(number);
  if (entry == all_.end()) return false;
  ++entry->second.counts[holder];
  return true;
}

void RefTable::forget(int64_t holder) {
  const std::lock_guard lock(mutex_);
  gone_holders_.insert(holder);
  for (auto entry = all_.begin(); entry != all_.end();) {
    const auto next = std::next(entry);
    if (entry->second.counts.erase(holder) > 0) drop_if_unheld(entry);
    entry = next;
  }
}

void RefTable::drop_if_unheld(std::map<int64_t, Entry>::iterator entry) {
  const auto& counts = entry->second.counts;
  if (std::any_of(counts.begin(), counts.end(),
                  [](const auto& count) { return count.second != 0; }))
    return;
  by_identity_.erase(entry->second.found.object->identity());
  gone_.push_back(std::move(entry->second.found.object));
  all_.erase(entry);
}

std::vector<std::shared_ptr<Hosted>> RefTable::take_gone() {
  const std::lock_guard lock(mutex_);
  return std::exchange(gone_, {});
}

bool RefTable::has_gone() const {
  const std::lock_guard lock(mutex_);
  return !gone_.empty();
}

std::vector<std::string> RefTable::classes() const {
  std::set<std::string> names;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, entry] : all_) names.insert(entry.found.class_name);
  return {names.begin(), names.end()};
}

std::vector<std::shared_ptr<Hosted>> RefTable::take_all() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Hosted>> all = std::exchange(gone_, {});
  for (auto& [number, entry] : all_) all.push_back(std::move(entry.found.object));
  all_.clear();
  by_identity_.clear();
  return all;
}

}  // namespace trireme::remote
