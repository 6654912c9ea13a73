#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/byte_ring.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/transfer.h>

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::shm {

// Point-to-point messages between the ranks of a host group, ordered as in MPI: messages of one
// source with one tag arrive in the order in which they were sent, and meet the posted recvs that
// match them in the order of these.
//
// A message streams through a bounded ring from its source to its destination, in chunks, whatever
// its size. A send is done when its last byte is in the ring, so a message that fits is buffered
// and no sender waits for the peer; a larger one waits until the peer receives. Messages in front
// of the one that a recv waits for go to private memory; otherwise unwanted messages stay in the
// ring, and hold their sender back.
//
// The rings of a rank to all others are one segment, which its first send makes: world x 64 to 256
// KiB. Ranks that only receive make none, and ranks without messages need not take part.
//
// Nothing here blocks (but for a second at most if the memory of a peer cannot be opened): a
// waiting thread calls progress() until it returns true no more, then sleeps on mail_futex of the
// own block, awake every kLookEvery to look(). One thread at a time, but beside the one that uses
// the host group for collectives. Errors end transfers, with a Fault each:
//   kMismatch        a message had other bytes or another dtype than its recv. It is consumed, and
//                    all goes on. Its send ends so too if it was larger than the ring and the recv
//                    was posted; else it had been done before the mismatch was known
//   any other        peer lost, deadline, another rank's failure, no memory: the group has failed,
//                    and all transfers end with it
class TRIREME_API Mailbox {
 public:
  explicit Mailbox(HostGroup& group);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Posts a transfer. Throws Fault if it was not posted: the group has failed, or has no memory
  // (kMemory; the group goes on).
  void post(const TransferPtr& transfer);
  // Moves all that can be moved now. Returns true if anything was.
  bool progress();
  // Ends transfers that wait in vain, and all if the group has failed.
  void look();
  // Returns whether no transfer is pending, and no message is half received.
  bool is_idle() const { return pending_sends_ == 0 && recvs_.empty() && streams_ == 0; }
  bool is_sending() const { return pending_sends_ > 0; }
  // Returns the transfers that have ended since the last call.
  std::vector<TransferPtr> take_ended();

  // Ends all recvs, or all sends, with Fault(kAborted).
  void withdraw(Transfer::Kind kind, const std::string& why);
  // Announces that no more will be sent; peers that wait for it raise.
  void close();
  // Returns whether a destination that is still there has not mapped the messages sent to it: it
  // would lose them if this process ended now.
  bool is_unfetched();

 private:
  struct Header;
  // A message that came before its recv.
  struct Letter {
    int64_t source;
    int64_t tag;
    Dtype dtype;
    std::vector<std::byte> bytes;
    int64_t received = 0;
  };
  using Letters = std::list<Letter>;
  // The messages from one source.
  struct Inbox {
    Segment segment;
    RingReader ring;
    uint64_t sequence = 0;
    int64_t wanted = 0;  // posted recvs that name this source
    // Whether a message is being read: it goes to `target`, to `letter` or nowhere.
    bool streams = false;
    int64_t left = 0;  // bytes
    TransferPtr target;
    std::optional<Letters::iterator> letter;
  };
  struct Outbox {
    RingWriter ring;
    uint64_t sequence = 0;
    bool streams = false;  // the front of `sends`
    std::deque<TransferPtr> sends;
  };
  struct Absence {
    std::string text;  // empty: the rank is there
    bool left;         // in good order, not by dying
  };

  void make_outbox();
  bool open_inbox(int64_t source);
  bool push(int64_t destination);
  bool pull(int64_t source);
  bool begin_message(int64_t source);
  bool read_message(int64_t source);
  bool take_letter(const TransferPtr& recv);
  std::list<TransferPtr>::iterator find_recv(int64_t source, int64_t tag);
  bool wants(int64_t source) const;
  bool fits(Transfer& recv, const Header& header, int64_t source);
  bool fits_ring(const Transfer& send) const;
  void blame(Transfer& send, int64_t destination);
  void unlist(std::list<TransferPtr>::iterator recv);

  std::vector<TransferPtr> pending() const;
  Absence absence_of(int64_t peer);
  std::string why_lost(const Transfer& transfer) const;
  std::string why_late(const Transfer& transfer) const;
  void end(const TransferPtr& transfer) { ended_.push_back(transfer); }
  void end(const TransferPtr& transfer, FaultKind kind, const std::string& text);
  void break_off(FaultKind kind, const std::string& text);
  void report_overwritten(int64_t peer, const std::string& got);
  void forget_all();
  void drop_stream(int64_t source);
  std::string describe(const Transfer& transfer) const;
  std::string rank_name(int64_t peer) const;

  HostGroup& group_;
  int64_t capacity_;              // bytes of a ring
  Segment segment_;               // this rank's outgoing rings
  std::vector<Outbox> outboxes_;  // one per destination
  std::vector<Inbox> inboxes_;    // one per source
  std::list<TransferPtr> recvs_;  // posted, and without a message
  Letters letters_;               // in the order in which they came
  std::vector<TransferPtr> ended_;
  std::vector<Absence> absences_;  // absence of each rank, when look() last asked
  int64_t pending_sends_ = 0;
  int64_t wanted_of_any_ = 0;
  int64_t streams_ = 0;  // inboxes that are in the middle of a message
};

}  // namespace trireme::shm
