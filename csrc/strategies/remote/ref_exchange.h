#pragma once

#include <trireme/comm/message_box.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/strategies/remote/deferred_destruction.h>
#include <trireme/strategies/remote/ref_table.h>
#include <trireme/strategies/remote/value.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::remote {

// Makes the Refs of this rank, and reports their numbers to the owners. See [Note: who holds an
// object] in ref_table.h. Thread-safe.
class TRIREME_API RefExchange : public std::enable_shared_from_this<RefExchange> {
 public:
  // `sessions`: by rank; they tell starts apart.
  RefExchange(RankOf where, std::vector<int64_t> sessions, std::shared_ptr<MessageBox> box,
              std::shared_ptr<DeferredDestruction> deferred);

  RefTable& table() { return table_; }
  int64_t own_session() const { return sessions_[static_cast<size_t>(where_.rank)]; }

  // Returns a Ref for an address that another rank has sent. Throws c10::ValueError for an address
  // of an earlier start, and for a dead object of this rank.
  RefPtr adopt(const RefAddress& address);
  // Returns a Ref to an object of this rank.
  RefPtr show(std::shared_ptr<Hosted> object, const std::string& class_name);
  // Returns an object of this rank; null for one of another rank, or of an earlier start.
  std::shared_ptr<Hosted> find(const RefAddress& address) const;

  // Tells the owner that `to` has one more Ref. Returns false if the owner takes no message now.
  // Throws c10::ValueError for a Ref of an earlier start.
  bool try_lend(const Ref& ref, int64_t to);
  // Lets the owner of a session forget a forward. Never throws, never waits.
  void drop(const RefAddress& session, int64_t forward) noexcept;

  // Handle messages of other ranks. Throw c10::ValueError for a message of another form.
  void take_count(int64_t number, const Value& value);
  void take_drop(int64_t number, const Value& value);
  // Drops the Refs of a rank that is gone.
  void forget(int64_t rank);

 private:
  Ref::Release releaser();
  void check_session(const RefAddress& address) const;
  void release(const RefAddress& address) noexcept;
  bool tell_count(const RefAddress& address, int64_t holder, int64_t change) noexcept;
  bool tell_drop(const RefAddress& session, int64_t forward) noexcept;
  void clean_later();
  bool is_in_child() const;

  RankOf where_;
  ForkGuard fork_guard_;
  std::vector<int64_t> sessions_;
  std::shared_ptr<MessageBox> box_;
  std::shared_ptr<DeferredDestruction> deferred_;
  RefTable table_;
};

}  // namespace trireme::remote
